"""An evaluation by search: its episodes, and what they took, for results.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from ragen_apo.agent.proxy import AgentProxy
from ragen_apo.agent.search import SearchedEpisode, TurnSearch
from ragen_apo.config.search import SearchConfig
from ragen_apo.evaluation.evaluate import EvaluationPlan
from ragen_apo.evaluation.summary import outcome_summary
from ragen_apo.types import Trajectory
from ragen_apo.values.moves import Move


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


def search_summary(episodes: Sequence[SearchedEpisode], settings: SearchConfig) -> dict[str, Any]:
    """How the search went, as JSON values; raises ValueError without episodes."""
    if not episodes:
        raise ValueError("no episodes to summarize; search for at least one episode")
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


def summary_with_tokens(trajectories: Sequence[Trajectory]) -> dict[str, Any]:
    """The `outcome_summary` and the mean of sampled tokens, to be compared with a search's."""
    tokens = fmean(trajectory.num_response_tokens for trajectory in trajectories)
    return {**outcome_summary(trajectories), "avg_tokens": tokens}
