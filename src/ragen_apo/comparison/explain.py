"""What the numbers of a comparison mean, in sentences: what was measured, warnings, the columns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from ragen_apo.comparison.measure import Measurement
from ragen_apo.comparison.plan import Comparison, ComparisonConfig
from ragen_apo.comparison.table import in_common, is_reached_later, mean_bounds
from ragen_apo.config import RunConfig
from ragen_apo.config.moved import value_at
from ragen_apo.config.overrides import differences
from ragen_apo.plural import counted
from ragen_apo.report.style import duration, percent

MAY_DIFFER = ("agent", "training.max_tasks")
"""Keys besides the algorithm's that change how hard a run's task is."""


def explanation(measurements: Sequence[Measurement], *, comparison: Comparison) -> list[str]:
    """Sentences: first what was measured, then warnings, then what the columns are."""
    settings = comparison.settings
    configs = comparison.configs()
    within = " within the budget" if settings.budget.is_set else ""
    return [
        _what_was_measured(comparison, configs),
        *_warnings(measurements, configs, settings=settings, within=within),
        *_columns(measurements, settings=settings, within=within),
    ]


def how_success_is_measured(config: RunConfig) -> str:
    """For an axis: `success (greedy, 100 episodes)`."""
    return f"success ({_sampled(config)}, {counted(config.training.eval_episodes, 'episode')})"


def lines_of_the_curves(settings: ComparisonConfig) -> str:
    """What is drawn thick, and what faint."""
    if len(settings.seeds) == 1:
        return "Each line is the run of the one seed."
    return (
        "Thick lines: means over the seeds, of the evaluations that all seeds have. Faint lines: "
        "single seeds."
    )


def _sampled(config: RunConfig) -> str:
    evaluation = config.evaluation
    return f"temperature {evaluation.temperature:g}" if evaluation.temperature else "greedy"


def _what_was_measured(comparison: Comparison, configs: Mapping[str, RunConfig]) -> str:
    settings = comparison.settings
    config = next(iter(configs.values()))
    during, after = config.training.eval_episodes, config.evaluation.num_episodes
    every = sorted({each.training.eval_every or 0 for each in configs.values()})
    steps = " to ".join(dict.fromkeys(f"{number:,}" for number in (every[0], every[-1])))
    played = counted(during, "episode")
    played += f" ({after:,} after training)" if after != during else ""
    search = config.evaluation.search
    searched = f", with search by {search.method} after training" if search else ""
    policy = comparison.reference(settings.seeds[0]).policy
    small = policy.small
    model = policy.path or f"small, {counted(small.num_layers, 'layer')} of {small.hidden_size:,}"
    seeds = ", ".join(map(str, settings.seeds))
    return (
        f"Measured: success in {played} of split {config.evaluation.split} of the environment "
        f"{config.environment.name.rpartition('/')[2]}, {_sampled(config)}{searched}, every {steps}"
        f" {'step' if steps == '1' else 'steps'} and after training. Model: {model}. "
        + (f"Means over seeds {seeds}." if len(settings.seeds) > 1 else f"One seed, {seeds}.")
    )


def _warnings(
    measurements: Sequence[Measurement],
    configs: Mapping[str, RunConfig],
    *,
    settings: ComparisonConfig,
    within: str,
) -> Iterator[str]:
    if len(settings.seeds) == 1:
        yield (
            "One seed cannot tell algorithms apart: with another one the order may be another. "
            "Give more seeds."
        )
    names = dict.fromkeys(run.name for run in measurements)
    bounds = [mean_bounds([run for run in measurements if run.name == n]) for n in names]
    if len(bounds) > 1 and max(low for low, _ in bounds) <= min(high for _, high in bounds):
        yield (
            "All intervals overlap: success after training does not tell these runs apart. With"
            " more evaluated tasks (evaluation.num_episodes) they are narrower."
        )
    failed = [f"{run.name} (seed {run.seed})" for run in measurements if not run.best]
    if len(failed) == len(measurements):
        yield f"No run had any success{within}."
    elif failed:
        yield f"No success at all{within}: {', '.join(failed)}."
    if crowded := sum(run.crowded_cores is True for run in measurements):
        yield (
            f"In {crowded} of {counted(len(measurements), 'run')} other processes used the cores "
            "at the start: the seconds say little."
        )
    yield from _differences(configs)
    if settings.share_values:
        yield (
            "Of the runs of a seed whose Stage 1 is the same, only the first paid for it, and"
            " those that had sampled before they shared it: the costs of the others lack its"
            " samples. So there is no mean success over tokens."
        )
    elif late := _without_evaluation(measurements):
        yield (
            f"Up to the end of the mean success {' and '.join(late)} had no evaluation after the"
            " first, for example because Stage 1 was sampled:"
            f" {'its' if len(late) == 1 else 'their'} mean success says little."
        )


def _differences(configs: Mapping[str, RunConfig]) -> Iterator[str]:
    """What makes runs differ in more than their algorithm."""
    first, *others = (_may_differ(config) for config in configs.values())
    keys = {each.key for other in others for each in differences(first, other)}
    if keys:
        yield (
            f"The runs differ in {' and '.join(sorted(keys))}, too: so what they reach is not the "
            "algorithm's alone."
        )
    episodes = sorted({_episodes_between_evaluations(config) for config in configs.values()})
    if len(episodes) > 1:
        yield (
            f"The runs are evaluated after {episodes[0]:,} to {episodes[-1]:,} episodes of "
            "training: where they are evaluated more rarely, a target is seen later."
        )


def _may_differ(config: RunConfig) -> dict[str, object]:
    values = config.model_dump(by_alias=True)
    return {key: value_at(values, key) for key in MAY_DIFFER}


def _episodes_between_evaluations(config: RunConfig) -> int:
    training = config.training
    episodes = training.tasks_per_step * training.best_of * config.algorithm.rollouts_per_task
    return episodes * (training.eval_every or 0)


def _without_evaluation(measurements: Sequence[Measurement]) -> list[str]:
    """Which runs are not yet evaluated in training where mean success ends."""
    _, end = in_common(measurements)
    late = [
        run.name for run in measurements if not any(0 < point.tokens <= end for point in run.points)
    ]
    return list(dict.fromkeys(late))


def _columns(
    measurements: Sequence[Measurement], *, settings: ComparisonConfig, within: str
) -> Iterator[str]:
    common, shortest = in_common(measurements)
    several = len(settings.seeds) > 1
    if several:
        yield "In brackets behind a mean: the smallest and the largest of the seeds."
    yield (
        "Seconds are those of the clock on the wall. They and generated tokens include Stage 1 and"
        " distillation, not the warm start and the evaluations."
    )
    if limits := _limits(settings):
        yield f"Budget of a run: {limits}."
    if common:
        alone = " All had that before they were trained, and one of them never rose above it."
        if is_reached_later(measurements, common):
            alone = ""
        yield f"Every run reached {percent(common)}{within}.{alone}"
    part = (
        " There is a mean only if every seed paid for it; else the table says how many did, and"
        " from what to what."
        if several
        else ""
    )
    yield (
        f'A target costs what was used until the first evaluation that reaches it.{part} "At the'
        ' start": the reference reached it before any training.'
    )
    if not settings.share_values:
        is_without_curve = any(run.points[-1].tokens == 0 for run in measurements)
        shortest_run = f"shortest run{' with an evaluation' + within if is_without_curve else ''}"
        yield (
            "Mean success: area under the curve of success against tokens, up to"
            f" {counted(shortest, 'token')}, where the curve of the {shortest_run} ends."
        )
    if settings.budget.is_set:
        yield (
            "Success within the budget: of the last evaluation during training that it allows."
            " Success after training, pass@k, updates, KL, entropy and memory are of the whole run."
        )
    yield (
        "The 95% interval is that of one run, for the number of tasks that it was evaluated on"
        + (": its bounds are means over the seeds." if several else ".")
    )
    yield "Updates are those of the distillations and of Stage 2."
    yield (
        "KL and entropy are those of the last step, the KL to the newest reference of the run: a"
        " run that made new ones shows less, and a few tokens that the reference finds far likelier"
        " make it large."
    )
    if several:
        yield "Peak memory is that of the seed that needed most."


def _limits(settings: ComparisonConfig) -> str:
    budget = settings.budget
    limits = [duration(budget.seconds)] if budget.seconds is not None else []
    limits += [counted(budget.tokens, "token")] if budget.tokens is not None else []
    return ", ".join(limits)
