"""The algorithm of a run in words, for the whole report.

Consumes `RunData`; produces the algorithm's traits and monitors, and sentences on origin, adapters
and an early stop.
"""

from __future__ import annotations

from collections.abc import Mapping

from ragen_apo.config.algorithms import (
    DEFAULT,
    AlgorithmConfig,
    Monitor,
    Traits,
    algorithm_class,
    read_algorithm,
)
from ragen_apo.config.section import as_section
from ragen_apo.plural import counted
from ragen_apo.report.api_model import cost, faults
from ragen_apo.report.load import RunData, finite, mapping
from ragen_apo.report.style import compact, one_line, percent


def settings_of(run: RunData) -> AlgorithmConfig | None:
    """The algorithm with the run's options; None where this version does not know them."""
    try:
        return read_algorithm(run.config.get("algorithm"))
    except ValueError:
        return None


def algorithm_of(run: RunData) -> Traits:
    """The traits of the run's algorithm, also where a later version gave it options of its own.

    Of an algorithm that this version does not know, or whose code was not imported, its name only.
    """
    if (known := _class_of(run)) is not None:
        return known.traits
    name = one_line(_name_of(run).rpartition(":")[2], 30)
    return Traits(label=name, sentence=f"{name} trains the agent")


def monitors_of(run: RunData) -> Mapping[str, Monitor]:
    """The algorithm's own metrics, none of an algorithm that this version does not know."""
    known = _class_of(run)
    return {} if known is None else known.monitors


def _class_of(run: RunData) -> type[AlgorithmConfig] | None:
    try:
        return algorithm_class(_name_of(run))
    except ValueError:
        return None


def _name_of(run: RunData) -> str:
    return str(mapping(as_section(run.config.get("algorithm"))).get("name") or DEFAULT)


def rollouts_per_task(run: RunData) -> int:
    """How often a step plays each of its tasks."""
    settings = settings_of(run)
    return 1 if settings is None else settings.rollouts_per_task


def origin(run: RunData) -> str | None:
    """How the reference was made, and the data of the tasks."""
    warm_start = mapping(run.config.get("warm_start"))
    demonstrations = mapping(warm_start.get("demonstrations"))
    path = run.option("policy", "path")
    if not warm_start:
        sentence = ""
    elif not warm_start.get("enabled"):
        sentence = f"The reference is the model {path}" if path else "The reference is untrained"
    elif not demonstrations.get("num_steps"):
        sentence = "The reference has seen no demonstrations"
    elif demonstrations.get("recordings"):
        sentence = f"The reference imitates the recorded episodes of {demonstrations['recordings']}"
    else:
        sentence = f"The reference imitates the scripted policy ‘{demonstrations.get('teacher')}’"
    data = f"tasks are made of {run.record['data']}" if run.record.get("data") else ""
    parts = "; ".join(part for part in (sentence, data) if part)
    return f"{parts[0].upper()}{parts[1:]}." if parts else None


def distilled(run: RunData) -> str | None:
    """That the policy imitated the reference's good episodes before Stage 2, and what it solved."""
    updates = [
        row for row in run.distillation if row.get("reference_version") == 0 and "loss" in row
    ]
    if not updates:
        return None
    beta = finite(run.option("distillation", "beta"))
    at = "" if beta is None else f" at beta {beta:g}"
    outcome = mapping(mapping(run.results.get("baselines")).get("distilled"))
    solved = finite(outcome.get("success_rate"))
    so_far = "" if solved is None else f" With that alone it solves {percent(solved)}."
    return (
        "Before its first step the policy imitated the reference’s own good episodes "
        f"(distillation{at}, {counted(len(updates), 'update')}).{so_far}"
    )


def refreshed(run: RunData) -> str | None:
    """That the policy became the reference again, if it did: what the KL and V* belong to."""
    versions = [finite(row.get("reference_version")) or 0 for row in run.metrics]
    pairs = zip(versions, versions[1:], run.metrics, strict=False)
    last = [compact(row.get("step")) for before, now, row in pairs if now > before]
    if not last:
        return None
    steps = ", ".join(last if len(last) < 7 else [*last[:3], "…", last[-1]])
    return (
        f"The policy became the new reference {counted(len(last), 'time')} (step {steps}); from "
        "there on the KL and all that is relative to a reference are to the newest one."
    )


def shuffled(run: RunData) -> str | None:
    """Says that the run is a control, if it is one."""
    if not run.option("training", "shuffle_returns"):
        return None
    return "The returns of each step were shuffled among its episodes: this run is a control."


def adapters(run: RunData) -> str | None:
    """Says that adapters were trained instead of the weights, if they were."""
    lora = run.option("policy", "lora")
    if not lora:
        return None
    rank = finite(mapping(lora).get("rank"))
    size = "" if rank is None else f" of rank {compact(rank)}"
    return f"Adapters{size} (LoRA) were trained; the model’s own weights stayed as they were."


def chosen(run: RunData) -> str | None:
    """By which evaluation the policy's weights were chosen, with `training.keep_best`."""
    best = mapping(run.record.get("best"))
    if not best:
        return None
    rate = finite(best.get("success_rate"))
    solved = "" if rate is None else f" ({percent(rate)})"
    split = one_line(str(best.get("split") or "unknown"), 60)
    return (
        f"The policy has the weights after step {compact(best.get('step'))}, those of the best "
        f"evaluation during training, on the split ‘{split}’{solved}."
    )


def early_stop(run: RunData) -> str | None:
    """The step and the reason of an early stop, if there was one."""
    stopped = mapping(run.record.get("early_stop"))
    if not stopped:
        return None
    most = finite(run.option("training", "max_steps"))
    made = finite(stopped.get("step"))
    where = "early" if made is None else f"early, after step {compact(made)}"
    if made is not None and most is not None:
        where += f" of {compact(most)}"
    reason = f": {one_line(stopped['reason'])}" if stopped.get("reason") else ""
    return f"Training stopped {where}{reason}."


def resumed(run: RunData) -> str | None:
    """That more than one process has trained the run, if it was so."""
    attempts = finite(run.record.get("attempts"))
    if attempts is None or attempts < 2:
        return None
    times = "once" if attempts == 2 else f"{compact(attempts - 1)} times"
    return f"The run was resumed {times}."


def went_on(run: RunData) -> str | None:
    """After which steps the run had ended before, if it was given more."""
    noted = run.record.get("went_on_after")
    steps = [step for each in noted if (step := finite(each))] if isinstance(noted, list) else []
    if not steps:
        return None
    after = " and ".join(f"step {compact(step)}" for step in steps)
    has_risen = run.option("optimizer", "schedule") not in (None, "constant")
    rates = ", for which its learning rate rose again" if has_risen else ""
    return f"The run had ended after {after} and was given more steps{rates}."


def search_label(run: RunData) -> str:
    """By which search the evaluated episodes were found; empty for plain play."""
    return one_line(mapping(run.results.get("search")).get("label") or "")


def searched(run: RunData) -> str | None:
    """That the rate is not the policy's own, where a search found the episodes."""
    if not search_label(run):
        return None
    sentence = f"The evaluated episodes were found by a search over turns ({search_label(run)})"
    if mapping(run.results.get("search")).get("uses_reward"):
        sentence += ", in which the reward chose: an upper bound, which no deployed agent reaches"
    if knew_tasks(run):
        sentence += ", which knew rewards of these very tasks: it says nothing about new tasks"
    return f"{sentence}."


def knew_tasks(run: RunData) -> bool:
    """Whether the search chose moves by what Stage 1 had earned in the evaluated tasks."""
    return bool(finite(mapping(run.results.get("search")).get("known_move_share")))


def circumstances(run: RunData) -> list[str]:
    """What is special about how the numbers were made, each where it applies.

    `searched` to `resumed` of a run; `cost` and `faults` of a model behind an API.
    """
    control = shuffled(run)
    made = [origin(run), distilled(run), refreshed(run), control, adapters(run)]
    ended = [chosen(run), early_stop(run), went_on(run), resumed(run)]
    sentences = [searched(run), *made, *ended, cost(run), faults(run)]
    return [sentence for sentence in sentences if sentence]
