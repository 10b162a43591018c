"""Search in the evaluation of a run: what it knows of moves, and what it took, for results.json."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

import torch

from ragen_apo.agent.proxy import AgentProxy
from ragen_apo.agent.search import (
    MoveInContext,
    MovePredictor,
    SearchedEpisode,
    TurnSearch,
    check_search,
)
from ragen_apo.config.search import SearchConfig
from ragen_apo.distributed.torchrun import this_worker
from ragen_apo.environments.base import HasTasks
from ragen_apo.errors import ConfigError
from ragen_apo.policy.language_model import LanguageModel
from ragen_apo.policy.turn_features import move_reader
from ragen_apo.session import Session
from ragen_apo.stages.stored_values import stored_trajectories
from ragen_apo.stages.value_regression import features_of_turns, fit_to_turns
from ragen_apo.types import Task, Trajectory
from ragen_apo.values.estimator import soft_value
from ragen_apo.values.moves import Move, move_advantages
from ragen_apo.values.regression import NUM_FOLDS

MAX_UNEXPLAINED = 0.9
"""A regression that leaves more of the variance is no guide: at 0.97 the best of four episodes was
worse than greedy play in the catalogue shop (docs/search.md)."""


def require_searchable(
    settings: SearchConfig | None, environment: HasTasks, *, num_rows: int
) -> None:
    """Raises ConfigError where the configured search cannot be done; nothing without one."""
    if settings is None:
        return
    if (size := this_worker().size) > 1:
        raise ConfigError(
            f"evaluation.search: torchrun has started {size} processes, and a search is for one: "
            "evaluate without torchrun, or set evaluation.search to null"
        )
    check_search(settings, environment, num_rows=num_rows)


def turn_search(
    session: Session, proxy: AgentProxy, settings: SearchConfig, tasks: Sequence[Task]
) -> TurnSearch:
    """The search with what the run's store says of moves in these tasks.

    Raises ConfigError where the store has nothing that the search needs.
    """
    known: Mapping[Move, float] = {}
    if settings.rank_by == "values":
        known = stored_advantages(session, tasks)
    predictor = predictor_of_moves(session) if settings.rank_by == "regression" else None
    return TurnSearch(proxy, settings, advantages=known, predictor=predictor)


def stored_advantages(session: Session, tasks: Sequence[Task]) -> Mapping[Move, float]:
    """A_hat of the moves that Stage 1 of the run's first reference has made in these tasks.

    Empty for a run without Stage 1 and for tasks that it has not sampled, as those of a test split
    until `estimate-values --split test` has.
    """
    config, run = session.config, session.run
    if not session.values_path.exists() or not run.reference(0).exists():
        return {}
    reference = session.load_model(run.reference(0))
    conditions = session.conditions(reference)
    once = {task.task_id: task for task in tasks}
    with session.value_store() as store:
        trajectories = stored_trajectories(store, conditions, list(once.values()))
        return move_advantages(trajectories, beta=config.values.beta1)


def predictor_of_moves(session: Session) -> MovePredictor:
    """Q* of moves by regression over the newest reference's episodes of Stage 1.

    Raises ConfigError where the store has those of too few tasks.
    """
    config = session.config
    # beta1 0 is the best return, which no regression predicts; the mean takes its place.
    beta, size = config.values.beta1 or math.inf, config.training.micro_batch_size
    reference, episodes = _newest_sampled(session)
    regression, _ = fit_to_turns(
        reference,
        episodes,
        move_reader,
        beta=beta,
        held_out="tasks",  # a search plays others than Stage 1
        micro_batch_size=size,
    )
    session.progress.say(f"search: {regression.sentence('Q*', 'move')}")
    if regression.unexplained > MAX_UNEXPLAINED:
        session.progress.say(
            "What is predicted is mostly noise then, and may choose worse episodes than greedy "
            "play; rank by likelihood, or compare with the row without search."
        )
    value_of = regression.on(torch.device("cpu"))

    def predict(moves: Sequence[MoveInContext]) -> Sequence[float]:
        samples = [(move.as_sample(),) for move in moves]
        features = features_of_turns(reference, samples, move_reader, micro_batch_size=size)
        return value_of(torch.cat(features)).tolist() if features else []

    ends = [each.turns[-1].reward for each in episodes if not each.terminated]
    return MovePredictor(
        predict,
        ran_out=soft_value(ends, beta=beta) if ends else None,
        unexplained=regression.unexplained,
    )


def _newest_sampled(session: Session) -> tuple[LanguageModel, list[Trajectory]]:
    """The newest reference of which the store has episodes of enough training tasks, and these."""
    run, tasks, store = session.run, session.training_tasks(), session.values_path
    if store.exists():
        for version in reversed(run.reference_versions()):
            reference = session.load_model(run.reference(version))
            conditions = session.conditions(reference)
            with session.value_store() as opened:
                episodes = list(stored_trajectories(opened, conditions, tasks))
            if len({episode.task.task_id for episode in episodes}) >= NUM_FOLDS:
                return reference, episodes
    is_own = session.config.values.store is None
    command = f"ragen-apo estimate-values {shlex.quote(str(run.path))}"
    remedy = f"sample some with `{command}`" if is_own else "put it back"
    raise ConfigError(
        f"evaluation.search: rank_by regression is fitted to episodes of at least {NUM_FOLDS} "
        f"tasks of Stage 1, and {store} has fewer of this run's references; {remedy}, or set "
        "rank_by to likelihood"
    )


def search_summary(episodes: Sequence[SearchedEpisode], search: TurnSearch) -> dict[str, Any]:
    """How the search went, as JSON values; null for what is not of its ranking."""
    settings, predictor = search.settings, search.predictor
    num_moves = max(sum(each.num_moves for each in episodes), 1)
    num_known = sum(each.num_known_moves for each in episodes)
    return {
        "label": settings.label,
        "method": settings.method,
        "width": settings.width,
        "candidates": settings.num_candidates if settings.method == "beam" else 1,
        "rank_by": settings.rank_by,
        "uses_reward": settings.rank_by == "reward",
        "max_tokens": settings.max_tokens,
        "sampled_tokens": sum(each.num_sampled_tokens for each in episodes),
        "avg_tokens": fmean(each.num_sampled_tokens for each in episodes),
        "cut_share": fmean(each.is_cut for each in episodes),
        "known_move_share": num_known / num_moves if settings.rank_by == "values" else None,
        "unexplained": predictor and predictor.unexplained,
    }
