"""Search in the evaluation of a run: its episodes, and what they took, for results.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from ragen_apo.agent.proxy import AgentProxy
from ragen_apo.agent.search import SearchedEpisode, TurnSearch, check_search
from ragen_apo.config.search import SearchConfig
from ragen_apo.distributed.torchrun import this_worker
from ragen_apo.environments.base import HasTasks
from ragen_apo.errors import ConfigError
from ragen_apo.evaluation.evaluate import EvaluationPlan
from ragen_apo.session import Session
from ragen_apo.stages.stored_values import stored_trajectories
from ragen_apo.types import Task
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


def search_episodes(
    session: Session, proxy: AgentProxy, plan: EvaluationPlan, settings: SearchConfig
) -> list[SearchedEpisode]:
    """The plan's episodes as the search finds them, with what the run's store knows of moves."""
    advantages: Mapping[Move, float] = {}
    if settings.rank_by == "values":
        tasks = [request.task for request in plan.requests(session.environments)]
        advantages = stored_advantages(session, tasks)
    return play_search(proxy, plan, settings, advantages=advantages, policy_version="trained")


def play_search(
    proxy: AgentProxy,
    plan: EvaluationPlan,
    settings: SearchConfig,
    *,
    advantages: Mapping[Move, float],
    policy_version: str,
) -> list[SearchedEpisode]:
    """The episodes that the search finds for the plan's requests; see `TurnSearch`."""
    search = TurnSearch(proxy, settings, advantages)
    proxy.engine.model.model.eval()
    return search.play(plan.requests(proxy.environments), policy_version=policy_version)


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
