"""Search in the evaluation of a run: what it knows of moves, and what it took, for results.json."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

import torch

from ragen_apo.agent.proxy import AgentProxy
from ragen_apo.agent.search import (
    MoveInContext,
    PredictMoves,
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
from ragen_apo.stages.value_regression import features_of_turns, moves_by_regression
from ragen_apo.types import Task, TrainingSample, Trajectory
from ragen_apo.values.moves import Move, move_advantages


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
    predict = predictor_of_moves(session) if settings.rank_by == "regression" else None
    return TurnSearch(proxy, settings, advantages=known, predict=predict)


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


def predictor_of_moves(session: Session) -> PredictMoves:
    """Q* of moves by regression over the newest reference's episodes of Stage 1.

    Raises ConfigError where the store has none, and TrainingError where it has too few.
    """
    config = session.config
    reference, episodes = _newest_sampled(session)
    regression = moves_by_regression(
        reference,
        episodes,
        # No regression predicts the best return of a state, as beta1 0 has it: the mean.
        beta=config.values.beta1 or math.inf,
        micro_batch_size=config.training.micro_batch_size,
    )
    session.progress.say(f"search: {regression.sentence('Q*', 'move')}")
    value_of = regression.on(torch.device("cpu"))

    def predict(moves: Sequence[MoveInContext]) -> Sequence[float]:
        samples = [_as_sample(move) for move in moves]
        features = features_of_turns(
            reference, samples, move_reader, micro_batch_size=config.training.micro_batch_size
        )
        return value_of(torch.cat(features)).tolist() if features else []

    return predict


def _newest_sampled(session: Session) -> tuple[LanguageModel, list[Trajectory]]:
    """The newest reference of which the store has episodes of training tasks, and these."""
    run, tasks = session.run, session.training_tasks()
    folders = sorted(run.reference(0).parent.glob("[0-9]*"), key=lambda each: -int(each.name))
    for folder in folders if session.values_path.exists() else []:
        reference = session.load_model(folder)
        with session.value_store() as store:
            conditions = session.conditions(reference)
            if episodes := list(stored_trajectories(store, conditions, tasks)):
                return reference, episodes
    raise ConfigError(
        "evaluation.search: rank_by regression is fitted to episodes of Stage 1, and "
        f"{session.values_path} has none of a reference of this run; sample some with `ragen-apo "
        f"estimate-values {run.path}`, or set rank_by to likelihood"
    )


def _as_sample(move: MoveInContext) -> tuple[TrainingSample]:
    num_read = len(move.token_ids) - move.num_sampled
    mask = (False,) * num_read + (True,) * move.num_sampled
    return (TrainingSample(move.token_ids, mask, (0.0,) * len(mask)),)


def search_summary(episodes: Sequence[SearchedEpisode], settings: SearchConfig) -> dict[str, Any]:
    """How the search went, as JSON values."""
    num_moves = sum(each.num_moves for each in episodes)
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
        "known_move_share": sum(each.num_known_moves for each in episodes) / max(num_moves, 1),
    }
