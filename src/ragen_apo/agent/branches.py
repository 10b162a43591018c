"""The branches of a search and what decides between them. Pure: no engine, no environment.

A branch is one way that an episode has gone; a proposal is a response that may continue one. Both
have a merit: sums over turns, and what is predicted of the last one. No part of it but `reward` is
unknown to a deployed agent.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any, TypeVar

from ragen_apo.agent.environment_manager import Outcome
from ragen_apo.agent.proxy import Episode
from ragen_apo.agent.responses import ParsedResponse
from ragen_apo.choices import SearchRanking
from ragen_apo.policy.engine import Response

_DIGITS = 9
"""Equal sums in another order differ in the digits behind, and must not decide."""


@dataclass(frozen=True)
class Merit:
    """What is known of a branch."""

    num_unreadable: int = 0
    """Turns without a readable action: the tokens of a response that never ends repeat themselves,
    and so are likely."""
    advantage: float = 0.0
    """The sum of A_hat (`values.moves`) over the moves that the store knows."""
    logprob: float = 0.0
    """The sum over sampled tokens."""
    num_tokens: int = 0
    predicted: float = 0.0
    """What can be earned from the last move on, where it is predicted."""
    vote_logprob: float = 0.0
    """The sum over turns of log (share of the candidates that do the same): an estimate of the
    probability of the actions, whatever the thoughts."""
    reward: float = 0.0
    """The return so far, for the ranking by reward alone."""

    def after(self, response: Response, parsed: ParsedResponse, *, advantage: float) -> Merit:
        """With one more turn, whose reward is not there yet."""
        return replace(
            self,
            num_unreadable=self.num_unreadable + (not parsed.is_valid),
            advantage=self.advantage + advantage,
            logprob=self.logprob + sum(response.logprobs),
            num_tokens=self.num_tokens + len(response.token_ids),
        )

    @property
    def mean_logprob(self) -> float:
        """Per sampled token; 0 before the first."""
        return self.logprob / max(self.num_tokens, 1)

    def rank(self, rank_by: SearchRanking) -> tuple[float, ...]:
        """Higher is better: readable turns first, then what is asked for, then likelihood.

        By reward, the reward comes before all.
        """
        asked = {
            "values": self.advantage,
            "regression": self.predicted,
            "votes": self.vote_logprob,
        }.get(rank_by, 0.0)
        return (
            round(self.reward if rank_by == "reward" else 0.0, _DIGITS),
            -self.num_unreadable,
            round(asked, _DIGITS),
            self.mean_logprob,
        )


@dataclass(eq=False)
class Branch:
    """One way that an episode has gone so far."""

    episode: Episode
    row: Any
    """The engine's row with its context."""
    is_greedy: bool
    """Whether its first candidate is the most probable response."""
    merit: Merit = Merit()
    outcome: Outcome | None = None
    """Of its last turn, once it is over."""


@dataclass(frozen=True, eq=False)
class Proposal:
    """A response that may continue a branch."""

    parent: Branch
    row: Any
    response: Response
    text: str
    parsed: ParsedResponse
    is_greedy: bool
    is_known: bool
    """Whether the store of Stage 1 knows its move."""
    merit: Merit

    @property
    def does(self) -> tuple[int, str, bool]:
        """What would happen; the same for responses that differ in their thoughts alone."""
        return id(self.parent), self.parsed.action, self.parsed.is_valid


Candidate = TypeVar("Candidate", Branch, Proposal, Branch | Proposal)


def best_first(candidates: Sequence[Candidate], *, rank_by: SearchRanking) -> list[Candidate]:
    """In the order of their merit; those that are equal stay in their order."""
    return sorted(candidates, key=lambda each: each.merit.rank(rank_by), reverse=True)


def with_votes(proposals: Sequence[Proposal]) -> list[Proposal]:
    """The candidates of a turn with the votes of those of the same branch."""
    num_alike = Counter(each.does for each in proposals)
    num_of_branch = Counter(each.parent for each in proposals)
    counted: list[Proposal] = []
    for each in proposals:
        share = num_alike[each.does] / num_of_branch[each.parent]
        vote_logprob = each.merit.vote_logprob + math.log(share)
        counted.append(replace(each, merit=replace(each.merit, vote_logprob=vote_logprob)))
    return counted


def with_predictions(proposals: Sequence[Proposal], predicted: Sequence[float]) -> list[Proposal]:
    """The proposals with what is predicted of them: the mean over those that do the same.

    What is predicted differs with the thoughts, too, by chance. The highest of several would win
    for that alone.
    """
    of_move: dict[tuple[int, str, bool], list[float]] = defaultdict(list)
    for each, value in zip(proposals, predicted, strict=True):
        of_move[each.does].append(value)
    return [
        replace(each, merit=replace(each.merit, predicted=fmean(of_move[each.does])))
        for each in proposals
    ]


def kept_in_beam(
    over: Sequence[Branch],
    proposals: Sequence[Proposal],
    *,
    width: int,
    rank_by: SearchRanking,
) -> tuple[list[Branch], list[Proposal]]:
    """The best `width` of the branches that are over and of the proposals.

    Of the proposals that would do the same in the same branch only the best one is looked at: the
    others would take places and lead nowhere else.
    """
    different: dict[tuple[int, str, bool], Proposal] = {}
    for proposal in best_first(proposals, rank_by=rank_by):
        different.setdefault(proposal.does, proposal)
    pool: list[Branch | Proposal] = [*over, *different.values()]
    kept = best_first(pool, rank_by=rank_by)[:width]
    return (
        [each for each in kept if isinstance(each, Branch)],
        [each for each in kept if isinstance(each, Proposal)],
    )
