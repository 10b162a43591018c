"""Stage 2 of a run: training steps with metrics, evaluations, checkpoints and new references."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from ragen_apo.agent.proxy import AgentProxy
from ragen_apo.config.algorithms import algorithm_errors
from ragen_apo.evaluation.evaluate import EvaluationPlan, play_evaluation
from ragen_apo.evaluation.summary import METRIC_PREFIX, outcome_summary
from ragen_apo.files import append_json_line, read_json_lines
from ragen_apo.plural import counted
from ragen_apo.policy.language_model import LanguageModel
from ragen_apo.session import Session
from ragen_apo.stages.best import BestWatch, begin_watch, keep_as_best, take_best
from ragen_apo.stages.distillation import distil
from ragen_apo.stages.early_stop import EarlyStop, EarlyStopWatch
from ragen_apo.stages.origin import note_reference
from ragen_apo.stages.stored_values import note_samples, reference_values, selected_tasks
from ragen_apo.stages.values import estimate_values, note_values
from ragen_apo.training.checkpoint import (
    ALGORITHM_FILE,
    DISTILLATION,
    Position,
    algorithm_tensors,
    checkpoint_errors,
    load_moments,
    save_checkpoint,
)
from ragen_apo.training.optimization import Optimizer
from ragen_apo.training.rollouts_ahead import rollouts_ahead
from ragen_apo.training.trainer import Trainer
from ragen_apo.types import Task, Trajectory

TOTALS = ("num_episodes", "num_generated_tokens", "num_updates")
"""Metrics of a step that are also reported as running totals, `<name>_total`."""


def run_stage_two(
    session: Session, policy: LanguageModel, tasks: Sequence[Task], *, position: Position
) -> None:
    """Trains `policy` in place from `position` to the last step, or to where a rule stops it."""
    with algorithm_errors(session.config.algorithm):
        trainer = make_trainer(session, policy, tasks, position=position)
    with contextlib.closing(trainer):
        _take_steps(session, trainer, tasks, position)
    if session.config.training.keep_best:
        take_best(session, policy)


def _take_steps(
    session: Session, trainer: Trainer, tasks: Sequence[Task], position: Position
) -> None:
    config, max_steps = session.config.training, session.config.training.max_steps
    rows = session.ranks.from_first(lambda: read_json_lines(session.run.metrics), "rows so far")
    watch = EarlyStopWatch(config.early_stop, rows)
    best = begin_watch(session) if config.keep_best else None

    def is_over() -> bool:
        """Asked of the present position; a new reference can end training as well."""
        return position.step >= max_steps or watch.stopped is not None or not trainer.tasks

    if position.step == 0:
        _note_distilled(session, trainer, best)
    elif not is_over() and _refresh_was_left_out(session, position):
        position = _refresh_reference(session, trainer, tasks, position)
    session.progress.start("stage 2", max_steps)
    while not is_over():
        with algorithm_errors(session.config.algorithm):
            result = trainer.step(position.step)
        position = _advance(position, result.metrics)
        row = _row(session, trainer, position, result.metrics)
        watch.note(row)
        is_evaluated = _is_due(position.step, config.eval_every, is_last=is_over())
        is_best = _note_step(
            session, trainer, row, result.kept_episodes, is_evaluated=is_evaluated, best=best
        )
        is_refreshed = not is_over() and _refresh_is_due(session, position, row)
        if is_refreshed:
            position = _refresh_reference(session, trainer, tasks, position)
            session.progress.start("stage 2", max_steps)
        is_distilled = is_refreshed and session.config.distillation.enabled
        is_due = _is_due(position.step, config.checkpoint_every, is_last=is_over())
        if is_distilled or is_best or is_due:
            _save(session, trainer, position)
    stopped = watch.stopped
    if not trainer.tasks:
        reason = (
            "the new reference solves most tasks in all their samples, and of the others none has "
            "samples that differ (rollout_filter)"
        )
        stopped = EarlyStop("rollout_filter", position.step, reason)
    if stopped and stopped.step < max_steps and session.ranks.is_first:
        _note_early_stop(session, stopped)
    if session.ranks.is_first:
        _say_idle_steps(session)


def _say_idle_steps(session: Session) -> None:
    rows = read_json_lines(session.run.metrics)
    if num_idle := sum(row.get("num_updates") == 0 for row in rows):
        session.progress.say(
            f"{num_idle} of {counted(len(rows), 'step')} made no update: no episode was better or "
            "worse than what it was compared with, or rollout_filter left those out"
        )


def make_trainer(
    session: Session, policy: LanguageModel, tasks: Sequence[Task], *, position: Position
) -> Trainer:
    """A trainer in the state that a checkpoint says, or in a new run's."""
    config = session.config
    if config.policy.freeze_embeddings:
        policy.freeze_embeddings()
    optimizer = Optimizer(policy.model, weight_decay=config.optimizer.weight_decay)
    algorithm = config.algorithm.make(config, policy)
    checkpoint = session.run.checkpoints / position.name
    if position.step > 0:
        load_moments(checkpoint, optimizer)
        with checkpoint_errors(checkpoint, ALGORITHM_FILE):
            algorithm.load_state_tensors(algorithm_tensors(checkpoint))
    version = position.reference_version
    reference = reference_model(session, policy, version=version)
    note_samples(session, reference, tasks, version=version)
    selected = selected_tasks(session, reference, tasks, version=version)
    by_regression = config.needs_values and config.values.estimator == "regression"
    # The regressions of later references, and those of a run that goes on, are not of Stage 1.
    is_first = by_regression and position.step == 0
    with session.clock.timed("stage 1") if is_first else contextlib.nullcontext():
        values = reference_values(session, reference, tasks)
    return Trainer(
        config,
        policy=policy,
        reference=reference,
        proxy=session.proxy(policy),
        tasks=selected,
        values=values,
        algorithm=algorithm,
        optimizer=optimizer,
        ahead=rollouts_ahead(config, algorithm, session.environments, progress=session.progress),
    )


def _save(session: Session, trainer: Trainer, position: Position) -> None:
    """A checkpoint from which `make_trainer` goes on."""
    session.ranks.require_equal_weights([trainer.policy.model, *trainer.algorithm.other_models])
    with session.clock.saving():
        save_checkpoint(
            session.run.checkpoints,
            position=position,
            model=trainer.policy.model,
            optimizer=trainer.optimizer,
            algorithm_state=trainer.algorithm.state_tensors(),
            keep=session.config.training.keep_checkpoints,
            ranks=session.ranks,
        )


def _note_early_stop(session: Session, stopped: EarlyStop) -> None:
    session.run.note(early_stop=asdict(stopped))
    num_steps = session.config.training.max_steps
    session.progress.say(f"stopped after step {stopped.step} of {num_steps}: {stopped.reason}")


def reference_model(session: Session, policy: LanguageModel, *, version: int) -> LanguageModel:
    """The frozen reference. Adapters were added to the first one, so it needs no second copy."""
    if version == 0 and session.config.policy.lora is not None:
        reference = policy.without_adapters()
    else:
        reference = session.load_model(session.run.reference(version))
        reference.model.requires_grad_(False)
        reference = session.shard(reference)
    reference.is_constant = True
    return reference


def _advance(position: Position, metrics: dict[str, float | int]) -> Position:
    totals = {name: position.counters.get(name, 0) + int(metrics[name]) for name in TOTALS}
    return replace(position, step=position.step + 1, counters={**position.counters, **totals})


def _row(
    session: Session, trainer: Trainer, position: Position, metrics: dict[str, float | int]
) -> dict[str, float | int]:
    """A row of metrics.jsonl but for its evaluation; that of the first rank, on all of them."""
    row = metrics | {f"{name}_total": position.counters[name] for name in TOTALS}
    row["reference_version"] = position.reference_version
    row["num_training_tasks"] = len(trainer.tasks)
    return session.ranks.from_first(lambda: row, "row of metrics")  # decides what comes next


def _note_step(
    session: Session,
    trainer: Trainer,
    row: dict[str, float | int],
    kept_episodes: Sequence[dict[str, Any]],
    *,
    is_evaluated: bool,
    best: BestWatch | None,
) -> bool:
    """Writes what a step has to show, with an evaluation of the policy after it if it is due.

    Returns whether that is the best so far, whose weights are kept.
    """
    episodes: Sequence[Trajectory] = ()
    if is_evaluated:
        trainer.pause_rollouts()
        episodes = _evaluation_episodes(session, trainer.proxy)
        row = row | _outcome(episodes)
    is_best = best is not None and best.note(row)
    if is_best:
        keep_as_best(session, trainer.policy, step=int(row["step"]))
    for kept in kept_episodes if session.ranks.is_first else ():
        append_json_line(session.run.rollouts, kept)
    session.note_row(session.run.metrics, row, episodes=episodes)
    session.progress.update(int(row["step"]), _note(row))
    return is_best


def _is_due(step: int, every: int | None, *, is_last: bool) -> bool:
    return every is not None and (step % every == 0 or is_last)


def _evaluation_episodes(session: Session, proxy: AgentProxy) -> list[Trajectory]:
    """Played with the present weights."""
    config = session.config
    trained = [] if config.training.eval_split is None else session.training_tasks()
    plan = EvaluationPlan(
        split=config.split_while_training,
        num_episodes=config.training.eval_episodes,
        temperature=config.evaluation.temperature,
        seed=config.seed,
        trained_on=frozenset(task.task_id for task in trained),
    )
    return play_evaluation(proxy, plan, policy_version="evaluation")


def _outcome(episodes: Sequence[Trajectory]) -> dict[str, float]:
    outcome = outcome_summary(episodes)
    return {
        "eval_success_rate": outcome["success_rate"],
        "eval_avg_reward": outcome["avg_reward"],
        "eval_avg_steps": outcome["avg_steps"],
        **{f"eval_{METRIC_PREFIX}{name}": m for name, m in outcome.get("metrics", {}).items()},
    }


def _note(row: dict[str, float | int]) -> str:
    note = f"success {row['success_rate']:.0%}  return {row['return_mean']:.2f}"
    if "eval_success_rate" in row:
        note += f"  eval {row['eval_success_rate']:.0%}"
    return note


def _note_distilled(session: Session, trainer: Trainer, best: BestWatch | None) -> None:
    """Evaluates what was distilled, once, before the first step: one more row of its curve."""
    curve = session.run.distillation
    rows = session.ranks.from_first(lambda: read_json_lines(curve), "curve of the distillation")
    rows = [row for row in rows if row["reference_version"] == 0]
    is_noted = any("eval_success_rate" in row for row in rows)
    if rows and not is_noted and session.config.training.eval_every is not None:
        labels = {key: rows[-1][key] for key in ("phase", "reference_version", "step")}
        outcome = _outcome(_evaluation_episodes(session, trainer.proxy))
        if best is not None and best.note({"step": 0, **outcome}):
            keep_as_best(session, trainer.policy, step=0)
        session.note_row(curve, labels | outcome)


def _refresh_is_due(session: Session, position: Position, row: dict[str, float | int]) -> bool:
    rules = session.config.reference
    steps, max_kl = rules.refresh_every_steps, rules.refresh_max_kl
    by_steps = steps is not None and (
        position.step - position.counters.get("refreshed_at", 0) >= steps
    )
    kl = row.get("kl_per_sequence", 0.0)
    # What it began at is 0 or more: below the limit no row has to be read for it.
    by_kl = max_kl is not None and kl > max_kl and kl - _kl_at_start(session, row) > max_kl
    return by_steps or by_kl


def _refresh_was_left_out(session: Session, position: Position) -> bool:
    """Whether a new reference was due after the last step so far, which then was the run's last."""
    last = session.ranks.from_first(lambda: read_json_lines(session.run.metrics)[-1:], "last row")
    return any(
        row["step"] == position.step
        and row["reference_version"] == position.reference_version
        and _refresh_is_due(session, position, row)
        for row in last
    )


def _kl_at_start(session: Session, row: dict[str, float | int]) -> float:
    """KL of the first update under the row's reference.

    Distillation has moved the policy then, and adapters that were merged into a reference round
    otherwise than those of the policy.
    """
    if not session.config.distillation.enabled and session.config.policy.lora is None:
        return 0.0

    def noted() -> float:
        rows, version = read_json_lines(session.run.metrics), row["reference_version"]
        updates = (each for each in rows if "kl_per_sequence" in each)
        first = next((each for each in updates if each["reference_version"] == version), row)
        return first.get("kl_per_sequence", 0.0)

    return session.ranks.from_first(noted, "KL after the distillation")


def _refresh_reference(
    session: Session, trainer: Trainer, tasks: Sequence[Task], position: Position
) -> Position:
    """The policy becomes the reference, of which there is one at a time; the position after that.

    Its samples, if any are used, are added to the store.
    """
    policy, version = trainer.policy, position.reference_version + 1
    trainer.pause_rollouts()
    trainer.drop_reference()
    with session.clock.timed("reference refresh"):
        session.save_model(policy, session.run.reference(version))
        if session.ranks.is_first:
            note_reference(session.run, version)
        reference = reference_model(session, policy, version=version)
        if session.config.has_stage_one:
            report = estimate_values(session, reference, tasks, version=version)
            note_values(session, report, version=version)
            note_samples(session, reference, tasks, version=version, is_new=True)
        if session.config.distillation.enabled:
            with session.clock.timed(DISTILLATION):
                distil(session, policy, reference, tasks, version=version)
        trainer.take_reference(
            reference,
            tasks=selected_tasks(session, reference, tasks, version=version),
            values=reference_values(session, reference, tasks),
        )
    counters = {"reference_version": version, "refreshed_at": position.step}
    return replace(position, counters={**position.counters, **counters})
