"""Two runs on the same tasks: who solved what, and both episodes of a task."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from ragen_apo.config.agent import AgentConfig
from ragen_apo.config.api_model import AGENT_KEYS, prompt_told
from ragen_apo.config.overrides import MAX_CHANGES, differences, merge
from ragen_apo.evaluation.summary import paired_difference_interval
from ragen_apo.report.api_model import api_model
from ragen_apo.report.load import RunData, mapping
from ragen_apo.web.pages import page_of
from ragen_apo.web.view import query
from ragen_apo.web.view.lists import PAGE_SIZE
from ragen_apo.web.view.query import EpisodeKey
from ragen_apo.web.view.rows import EpisodeIndex
from ragen_apo.web.view.shown import algorithm_label
from ragen_apo.web.view.site import Site

MAX_TURNS = 25
"""Of an episode beside another; the rest is on its own page."""
OUTCOMES = {(1, 0): "first", (0, 1): "second", (1, 1): "both", (0, 0): "neither"}
"""Who solved a task, by the successes of both."""
_DEFAULT = object()
"""In place of an option that is not written out: only the environment knows what it is then."""


def compare(site: Site, request: Request) -> Response:
    """Two runs on the tasks that both have played."""
    a, b = query.text(request, "a"), query.text(request, "b")
    names = [name for name in site.folder.names() if "evaluation" in site.sources(name)]
    if not a or not b:
        return page_of("view/compare_choose.html", names=names, a=a, b=b)
    page = query.page(request, PAGE_SIZE)
    wanted = query.choice(request, "outcome", ["any", *OUTCOMES.values()])
    runs = site.data(a), site.data(b)
    (first, first_path), (second, second_path) = (site.index(each, "evaluation") for each in (a, b))
    pairs = _pairs(first, second)
    counts = Counter(outcome for *_, outcome in pairs)
    chosen = [pair for pair in pairs if wanted in ("any", pair[2])]
    page = page.within(len(chosen))
    shown = page.of(chosen)
    return page_of(
        "view/compare.html",
        a=a,
        b=b,
        labels=[algorithm_label(data) for data in runs],
        damage=site.damage(a, num_episodes=len(first)) + site.damage(b, num_episodes=len(second)),
        different=_different(*runs),
        difference=_difference(counts, len({first.task_ids[number] for number, *_ in pairs})),
        counts={"any": len(pairs)} | {each: counts[each] for each in OUTCOMES.values()},
        patterns=[site.pattern_names(name) for name in (a, b)],
        outcome=wanted,
        rows=list(
            zip(
                first.read(first_path, [number for number, *_ in shown]).items(),
                second.read(second_path, [number for _, number, _ in shown]).items(),
                strict=True,
            )
        ),
        page=page.number,
        pages=page.links(len(chosen)),
    )


def _different(first: RunData, second: RunData) -> str:
    """How what they were told to play differs although the tasks have the same ids; or may differ,
    where one has an option written out that may be the other's default. Empty if it does not.
    """
    of_both_kinds = (api_model(first) is None) != (api_model(second) is None)
    a, b = (_played(each, as_told=of_both_kinds) for each in (first, second))
    changes = list(differences(a, b, absent=_DEFAULT))
    if not changes:
        return ""
    may = "" if any(_DEFAULT not in each[1:] for each in changes) else "may "
    told = [f"{key}: A {_value(a)}, B {_value(b)}"[:200] for key, a, b in changes]
    return f"{may}differ in what was played: {'; '.join(told[:MAX_CHANGES])}"


def _difference(counts: Counter[str], num_tasks: int) -> str:
    """How much more of the common tasks the first run solves; the interval where each was played
    once, as episodes of one task are no independent pairs.
    """
    num_pairs, only = counts.total(), (counts["first"], counts["second"])
    if not num_pairs:
        return ""
    told = f"{100 * (only[0] - only[1]) / num_pairs:+.1f} points"
    if num_tasks == num_pairs:
        bounds = paired_difference_interval(
            only_first=only[0], only_second=only[1], num_tasks=num_tasks
        )
        told += ", 95% interval {:+.1f} to {:+.1f}".format(*(100 * each for each in bounds))
    return told.replace("-", "−")


def _value(value: object) -> str:
    return "left at its default" if value is _DEFAULT else json.dumps(value)


def _played(run: RunData, *, as_told: bool) -> dict[str, Any]:
    """What decides about episodes and their returns. `as_told`: with the system prompt that a model
    behind an API gets in place of the configuration's.
    """
    evaluation = {**mapping(run.option("evaluation")), **mapping(run.results.get("evaluation"))}
    agent = merge(AgentConfig().model_dump(mode="json"), mapping(run.option("agent")))
    if as_told:
        agent["system_prompt"] = prompt_told(agent["system_prompt"])
    return {
        "environment": run.option("environment"),
        "agent": {key: agent[key] for key in AGENT_KEYS},
        "evaluation": {key: evaluation.get(key) for key in ("temperature", "search")},
    }


def _pairs(first: EpisodeIndex, second: EpisodeIndex) -> list[tuple[int, int, str]]:
    """Episodes of one task, by their numbers in the files, and who solved it; as the first run
    played them. An evaluation that plays a task several times is paired in its order.
    """
    others = _by_task(second)
    return [
        (number, other, OUTCOMES[first.successes[number], second.successes[other]])
        for key, number in _by_task(first).items()
        if (other := others.get(key)) is not None
    ]


def _by_task(index: EpisodeIndex) -> dict[tuple[str, int], int]:
    """The number of an episode by its task and how often that came up before."""
    seen: Counter[str] = Counter()
    numbers: dict[tuple[str, int], int] = {}
    for number, task_id in enumerate(index.task_ids):
        numbers[task_id, seen[task_id]] = number
        seen[task_id] += 1
    return numbers


def side(site: Site, request: Request) -> Response:
    """The episodes of two runs on one task, side by side."""
    keys = [
        EpisodeKey(query.text(request, run), "evaluation", query.number(request, number))
        for run, number in (("a", "first"), ("b", "second"))
    ]
    first, second = shown = [site.shown(key) for key in keys]
    if first.stored.task.task_id != second.stored.task.task_id:
        raise HTTPException(400, "these are episodes of two different tasks")
    return page_of(
        "view/side.html",
        sides=list(zip(keys, shown, strict=True)),
        most_turns=MAX_TURNS,
        words=[
            site.words(key.run, each.stored.failure) for key, each in zip(keys, shown, strict=True)
        ],
    )
