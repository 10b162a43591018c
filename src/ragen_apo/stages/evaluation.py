"""Evaluates a run: its trained policy, its reference and the environment's baselines."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from statistics import fmean
from typing import Any

from pydantic import BaseModel, TypeAdapter

from ragen_apo.agent.proxy import AgentProxy
from ragen_apo.config import RunConfig
from ragen_apo.config.search import WITHOUT_SEARCH
from ragen_apo.environments.base import tasks_of
from ragen_apo.errors import RagenApoError, RunDirectoryError
from ragen_apo.evaluation.evaluate import (
    EvaluationPlan,
    play_baselines,
    play_evaluation,
    sampled_pass_at,
)
from ragen_apo.evaluation.summary import episode_rows, outcome_summary, results_document
from ragen_apo.files import check_writable, read_json
from ragen_apo.plural import counted
from ragen_apo.progress import Progress
from ragen_apo.run_directory import RunDirectory
from ragen_apo.session import Session, open_session
from ragen_apo.stages.origin import has_same_tasks, require_same_origin
from ragen_apo.stages.search import require_searchable, search_summary, turn_search
from ragen_apo.types import Trajectory


class _Results(BaseModel):
    split: str
    episodes: int


def evaluate_run(config: RunConfig, run: RunDirectory, *, progress: Progress) -> dict[str, Any]:
    """Plays what the section `evaluation` asks for; writes results.json and episodes.jsonl.

    Returns the results. Before anything is played it raises

    - RunDirectoryError if the run has no trained policy yet or another process works on it,
    - OSError if the results could not be written,
    - ConfigError if `evaluation.search` is impossible.
    """
    if not run.policy.exists():
        raise RunDirectoryError(
            f"{run.path} has no trained policy yet; finish it with `{run.resume_command}`"
        )
    session = open_session(config, run, progress)
    with session.locked():
        if session.ranks.is_first:
            run.remove_leftovers()
        return _evaluate(session)


def _evaluate(session: Session) -> dict[str, Any]:
    config, run, progress = session.config, session.run, session.progress
    section = config.evaluation
    plan = EvaluationPlan(section.split, section.num_episodes, section.temperature, config.seed)
    is_phase_of_run = "evaluation" not in run.read_status().get("phases", {})
    is_phase_of_run |= not run.results.exists()  # of a run that went on, they are set aside
    _refuse_what_is_impossible(session, plan)
    _say_what_is_replaced(session, plan)
    proxy = session.proxy(session.load_model(run.policy))
    trajectories, search, baselines = _play_policy(session, proxy, plan)
    progress.update(1, "policy")
    pass_at = None
    if (k := section.pass_k) is not None:
        pass_at = sampled_pass_at(proxy, plan, k=k, temperature=config.sampling.temperature)
    progress.update(2, "pass@k")
    del proxy  # with its model, before others are loaded
    baselines |= _play_earlier_models(session, plan)
    progress.update(3, "reference")
    baselines |= play_baselines(session.environments, plan)
    progress.update(4, "baselines")
    policy = str(run.policy)
    results = results_document(
        trajectories,
        policy=policy,
        split=plan.split,
        baselines=baselines,
        pass_at=pass_at,
        failure_words=session.environments.properties.failure_words,
        search=search,
    )
    results["evaluation"] = section.model_dump(mode="json")
    results["tasks_trained_on"] = _tasks_trained_on(session, trajectories)
    if session.ranks.is_first:
        run.write_evaluation(results, episode_rows(trajectories, policy=policy))
        if is_phase_of_run:  # a later one is none of what the run took
            run.add_seconds("evaluation", time.perf_counter() - session.opened)
    return results


def _refuse_what_is_impossible(session: Session, plan: EvaluationPlan) -> None:
    """Raises what `evaluate_run` says, in a moment."""
    if session.ranks.is_first:
        for file in (session.run.results, session.run.episodes):
            check_writable(file)
    require_same_origin(session, but_for=("evaluation",))
    tasks_of(session.environments, plan.split)
    session.environments.scripted_policies()  # their outcome comes last
    num_rows = session.config.training.num_rows
    require_searchable(session.config.evaluation.search, session.environments, num_rows=num_rows)


def _say_what_is_replaced(session: Session, plan: EvaluationPlan) -> None:
    """A run keeps one evaluation: that of another split, or of more episodes, is gone after it."""
    run, asked = session.run, session.config.evaluation
    if not run.results.exists():
        return
    number = len(plan.requests(session.environments))
    with suppress(RagenApoError):  # a damaged one is replaced without a word
        before = read_json(run.results, TypeAdapter(_Results), advice="")
        if before.split != asked.split or before.episodes > number:
            session.progress.say(
                f"This replaces the evaluation of {counted(before.episodes, 'episode')} of the "
                f"split {before.split} in {run.results.parent}; copy that folder to keep it. "
                f"`ragen-apo report {run.path}` then writes the report of the new one."
            )


def _tasks_trained_on(session: Session, trajectories: Sequence[Trajectory]) -> int | None:
    """How many of the tasks that were played are among those that the run was trained on.

    None where that is not known any more.
    """
    played = {trajectory.task.task_id for trajectory in trajectories}
    if not has_same_tasks(session):
        session.progress.say(
            "The training tasks are not those that this run was begun with: a file or a data set "
            "of its environment was changed. What is played may have been trained on."
        )
        return None
    number = len(played & {task.task_id for task in session.training_tasks()})
    if number and session.config.evaluation.split == "test":
        session.progress.say(
            f"{number} of the {counted(len(played), 'task')} of the split test are training tasks "
            "of this run: its success is not that of held-out tasks."
        )
    return number


def _play_policy(
    session: Session, proxy: AgentProxy, plan: EvaluationPlan
) -> tuple[list[Trajectory], dict[str, Any] | None, dict[str, dict[str, Any]]]:
    """The trained policy's episodes, by search where one is configured.

    Then what the search says of itself and, as a baseline, the same policy without it: a search
    samples more tokens. None and nothing without a search.
    """
    section, requests = session.config.evaluation.search, plan.requests(session.environments)
    search = section and turn_search(session, proxy, section, [each.task for each in requests])
    session.progress.start("evaluation", 4)
    trajectories = play_evaluation(proxy, plan, policy_version="trained")
    if not search:
        return trajectories, None, {}
    tokens = fmean(trajectory.num_response_tokens for trajectory in trajectories)
    baseline = outcome_summary(trajectories) | {"avg_tokens": tokens}
    found = search.play(requests, policy_version="trained")
    episodes = [each.trajectory for each in found]
    return episodes, search_summary(found, search), {WITHOUT_SEARCH: baseline}


def _play_earlier_models(session: Session, plan: EvaluationPlan) -> dict[str, dict[str, Any]]:
    """The outcome of the reference and of what was distilled, where the run has them."""
    run, outcomes = session.run, {}
    if not session.has(run.reference(0)):
        session.progress.say(f"{run.reference(0)} is missing, so its results are left out")
    for name, folder in (("reference", run.reference(0)), ("distilled", run.distilled)):
        if session.has(folder):
            proxy = session.proxy(session.load_model(folder))
            outcomes[name] = outcome_summary(play_evaluation(proxy, plan, policy_version=name))
    return outcomes
