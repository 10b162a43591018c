"""Success against tokens spent: greedy and sampled play, beams, and the best of n episodes.

    python -m benchmarks.search FrozenLake=runs/frozen_lake Sokoban=runs/sokoban --measured FILE
    python -m benchmarks.search Sokoban=runs/one Sokoban=runs/two --page search_by_regression ...

Each world is a finished run, whose trained policy plays the first tasks of its split `test`; and of
its split `train`, whose moves its value store knows, once more with and without them. A world that
is named several times has as many policies, of runs with different seeds, and each plays once.
Worlds named in --narrow, where an episode is long, are left out of the split `train` and of wide
beams. A line of FILE is one measurement, and what it holds is not measured again.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.runs import percent
from benchmarks.tables import write_page

from ragen_apo.agent.proxy import AgentProxy
from ragen_apo.config import load_config
from ragen_apo.config.search import SearchConfig
from ragen_apo.evaluation.evaluate import EvaluationPlan, play_evaluation
from ragen_apo.evaluation.summary import outcome_summary
from ragen_apo.files import append_json_line, read_json_lines
from ragen_apo.progress import SilentProgress
from ragen_apo.run_directory import RunDirectory
from ragen_apo.session import Session, open_session
from ragen_apo.stages.search import turn_search

NUM_SEEDS = 3


@dataclass(frozen=True)
class Variant:
    """One way to play; without settings it is greedy, or sampled at the temperature of training."""

    name: str
    sees: str
    """What decides between candidates, for readers."""
    settings: SearchConfig | None = None
    is_sampled: bool = False
    split: str = "test"

    @property
    def is_long(self) -> bool:
        """Whether it is left out in narrow worlds."""
        return self.split != "test" or (self.settings is not None and self.settings.num_rows > 4)


def beam(width: int, candidates: int, rank_by: str = "likelihood") -> SearchConfig:
    """A beam; `rank_by` likelihood leaves the store out, so splits can be compared."""
    return SearchConfig.model_validate(
        {"width": width, "candidates": candidates, "rank_by": rank_by}
    )


def best_of(width: int, rank_by: str = "likelihood") -> SearchConfig:
    """The best of so many episodes."""
    return SearchConfig.model_validate({"method": "best_of_n", "width": width, "rank_by": rank_by})


REGRESSION, UPPER_BOUND = "Q\\* by regression", "reward (upper bound)"
VARIANTS = {
    "search": (
        Variant("greedy", "nothing"),
        Variant("sampled", "nothing", is_sampled=True),
        Variant("beam of 1, 4 candidates", "likelihood", beam(1, 4)),
        Variant("beam of 1, 4 candidates", "votes", beam(1, 4, "votes")),
        Variant("beam of 2", "likelihood", beam(2, 2)),
        Variant("beam of 4", "likelihood", beam(4, 4)),
        Variant("best of 2", "likelihood", best_of(2)),
        Variant("best of 4", "likelihood", best_of(4)),
        Variant("best of 2", UPPER_BOUND, best_of(2, "reward")),
        Variant("best of 4", UPPER_BOUND, best_of(4, "reward")),
        Variant("greedy", "nothing", split="train"),
        Variant("beam of 2", "likelihood", beam(2, 2), split="train"),
        Variant("beam of 2", "V* of Stage 1", beam(2, 2, "values"), split="train"),
    ),
    "search_by_regression": (
        Variant("greedy", "nothing"),
        Variant("best of 4", "likelihood", best_of(4)),
        Variant("best of 4", REGRESSION, best_of(4, "regression")),
        Variant("best of 4", UPPER_BOUND, best_of(4, "reward")),
        Variant("best of 8", "likelihood", best_of(8)),
        Variant("best of 8", REGRESSION, best_of(8, "regression")),
        Variant("best of 8", UPPER_BOUND, best_of(8, "reward")),
        Variant("beam of 1, 4 candidates", REGRESSION, beam(1, 4, "regression")),
        Variant("beam of 2", REGRESSION, beam(2, 2, "regression")),
    ),
}
"""By page."""


class World:
    """Runs whose trained policies play; opened when they are first needed."""

    def __init__(self, name: str, folders: Sequence[Path], *, is_narrow: bool = False) -> None:
        self.name, self.folders, self.is_narrow = name, folders, is_narrow
        self._opened: dict[Path, tuple[Session, AgentProxy]] = {}

    def opened(self, seed: int) -> tuple[Session, AgentProxy]:
        """A run's session, and the agent with its trained policy."""
        folder = self.folders[seed % len(self.folders)]
        if folder not in self._opened:
            run = RunDirectory(folder)
            session = open_session(load_config(run.config), run, SilentProgress())
            self._opened[folder] = session, session.proxy(session.load_model(run.policy))
        return self._opened[folder]

    def seeds(self, variant: Variant) -> range:
        """One for each policy. A single policy plays under several, but greedily under one."""
        if len(self.folders) > 1:
            return range(len(self.folders))
        return range(1 if variant.settings is None and not variant.is_sampled else NUM_SEEDS)

    def measured(self, variant: Variant, *, num_episodes: int, seed: int) -> dict[str, Any]:
        """Success, return and sampled tokens of an episode, and what the store knows of moves."""
        session, proxy = self.opened(seed)
        temperature = session.config.sampling.temperature if variant.is_sampled else 0.0
        plan = EvaluationPlan(variant.split, num_episodes, temperature, seed)
        known = None
        if variant.settings is None:
            played = play_evaluation(proxy, plan, policy_version="benchmark")
            tokens = fmean(episode.num_response_tokens for episode in played)
        else:
            requests = plan.requests(session.environments)
            tasks = [request.task for request in requests]
            search = turn_search(session, proxy, variant.settings, tasks)
            found = search.play(requests, policy_version="benchmark")
            played = [each.trajectory for each in found]
            tokens = fmean(each.num_sampled_tokens for each in found)
            if variant.settings.rank_by == "values":
                known = sum(e.num_known_moves for e in found) / sum(e.num_moves for e in found)
        summary = outcome_summary(played)
        return {
            "episodes": len(played),
            "success": summary["success_rate"],
            "return": summary["avg_reward"],
            "tokens": tokens,
            "known": known,
        }


def measurements(
    worlds: Sequence[World], variants: Sequence[Variant], measured: Path, *, num_episodes: int
) -> Iterator[dict[str, Any]]:
    """Every world, variant and seed; those that are not in the file yet are added to it.

    With 0 episodes nothing is played, and what is not in the file is left out.
    """
    known = {_key(row): row for row in read_json_lines(measured)}
    for world in worlds:
        for variant in variants:
            if world.is_narrow and variant.is_long:
                continue
            for seed in world.seeds(variant):
                cell = {
                    "world": world.name,
                    "split": variant.split,
                    "variant": variant.name,
                    "sees": variant.sees,
                    "seed": seed,
                }
                if _key(cell) not in known and num_episodes == 0:
                    continue
                if _key(cell) not in known:
                    numbers = world.measured(variant, num_episodes=num_episodes, seed=seed)
                    known[_key(cell)] = {**cell, **numbers}
                    append_json_line(measured, known[_key(cell)])
                yield known[_key(cell)]


def _key(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(row[name] for name in ("world", "split", "variant", "sees", "seed"))


def table(rows: Sequence[Mapping[str, Any]]) -> list[list[object]]:
    """A row of cells for each world and variant, over the seeds."""
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault(_key(row)[:-1], []).append(row)
    cells: list[list[object]] = []
    for (world, split, variant, sees), group in groups.items():
        rates = [row["success"] for row in group]
        known = [row["known"] for row in group if row["known"] is not None]
        cells.append(
            [
                f"{world}, {split}",
                variant,
                sees,
                percent(rates) if len(rates) > 1 else f"{100 * rates[0]:.1f}",
                f"{fmean(row['return'] for row in group):.3f}",
                f"{fmean(row['tokens'] for row in group):.0f}",
                f"{100 * fmean(known):.0f}" if known else "",
                f"{group[0]['episodes']} x {len(group)}",
            ]
        )
    return cells


def main() -> None:
    """Measures what is missing and writes a page of benchmarks/results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("worlds", nargs="+", help="NAME=RUN")
    parser.add_argument("--measured", type=Path, required=True)
    parser.add_argument("--episodes", type=int, default=100, help="0: only what FILE holds")
    parser.add_argument("--page", choices=VARIANTS, default="search")
    parser.add_argument("--narrow", nargs="*", default=[], metavar="NAME")
    arguments = parser.parse_args()
    folders: dict[str, list[Path]] = {}
    for name, folder in map(_named, arguments.worlds):
        folders.setdefault(name, []).append(folder)
    worlds = [
        World(name, each, is_narrow=name in arguments.narrow) for name, each in folders.items()
    ]
    variants, num_episodes = VARIANTS[arguments.page], arguments.episodes
    rows = list(measurements(worlds, variants, arguments.measured, num_episodes=num_episodes))
    write_page(
        "search",
        suffix=arguments.page.removeprefix("search"),
        title="Search over turns: success against tokens spent",
        notes=(
            "The trained policy of a run plays the first tasks of a split. A number is a mean ± "
            "standard deviation: over seeds of sampling where a world has one policy (greedy play "
            "has one), over policies where it has several. Tokens "
            "are all that were sampled for an episode, dropped candidates included. Those of "
            "Stage 1 are not in them. A beam of n samples n candidates a branch and turn, one "
            "of them greedy. One of the best of n episodes is greedy play. `known` is the share "
            "of candidates whose move the value store knows, where it decides. For tasks of "
            "`train` it comes from the rewards that Stage 1 has read there. The choice by reward "
            "is an upper bound: no deployed agent sees it. A row with fewer seeds than another is "
            "unfinished."
        ),
        header=[
            "world, split",
            "play",
            "decided by",
            "success, %",
            "return",
            "tokens",
            "known, %",
            "episodes x seeds",
        ],
        rows=table(rows),
    )


def _named(text: str) -> tuple[str, Path]:
    name, equals, folder = text.partition("=")
    if not equals:
        raise SystemExit(f"{text}: expected NAME=RUN, such as Sokoban=runs/sokoban")
    return name, Path(folder)


if __name__ == "__main__":
    main()
