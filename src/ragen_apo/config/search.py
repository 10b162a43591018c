"""A search over turns: how many branches an episode has, and what decides between them."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, Field, model_validator

from ragen_apo.choices import SearchMethod, SearchRanking
from ragen_apo.config.section import Count, Section, whole_number
from ragen_apo.plural import counted

Width = Annotated[int, BeforeValidator(whole_number), Field(ge=1, le=256)]

WITHOUT_SEARCH = "without search"
"""The name, among the baselines, of the same policy on the same episodes as `evaluation` plays them
otherwise."""


class SearchConfig(Section):
    """Several candidates are sampled for a turn or an episode, and the best one is played
    (docs/search.md).
    """

    method: SearchMethod = "beam"
    """`beam` keeps the best branches after every turn. `best_of_n` plays several whole episodes,
    and the best one counts."""
    width: Width = 4
    """Branches that are kept after a turn, or episodes that are played side by side."""
    candidates: Width | None = None
    """Responses that `beam` samples for each branch in a turn, the first one greedily; null for as
    many as `width`."""
    rank_by: SearchRanking = "values"
    """`values`: V* if the store of Stage 1 knows the move, otherwise the likelihood of the tokens.
    `regression`: Q* of the last move, seen or not, by regression on the reference's hidden states
    over all episodes of Stage 1. `likelihood`: only that. `votes`: how many candidates choose the
    same action, for `beam` only. `reward`: the return of the finished episode, for `best_of_n`
    only; a deployed agent cannot see it, so the result is an upper bound."""
    max_tokens: Count | None = None
    """Sampled tokens of an episode after which its best branch continues greedily. The current turn
    is finished first. Null for no limit."""

    @property
    def num_candidates(self) -> int:
        """Responses a branch and turn in `beam`."""
        return self.candidates or self.width

    @property
    def num_rows(self) -> int:
        """Responses of one episode that are sampled at the same time, at most."""
        return self.width * self.num_candidates if self.method == "beam" else self.width

    @property
    def copies_environments(self) -> bool:
        """Whether an episode is in several states at once; a beam of one branch is in one."""
        return self.width > 1

    @property
    def label(self) -> str:
        """A few words for tables, such as `beam of 4`."""
        if self.method == "best_of_n":
            words = f"best of {self.width} episodes"
        else:
            words = f"beam of {self.width}"
            if self.num_candidates != self.width:
                words += f", {counted(self.num_candidates, 'candidate')}"
        return words if self.rank_by == "values" else f"{words} by {self.rank_by}"

    @model_validator(mode="after")
    def _there_is_a_choice(self) -> SearchConfig:
        if self.num_rows == 1:
            raise ValueError(
                "width 1 leaves nothing to choose from; set width to 2 or more, or candidates of "
                "a beam"
            )
        if self.method == "best_of_n" and self.candidates is not None:
            raise ValueError(
                f"candidates ({self.candidates}) are of method beam; best_of_n samples one response"
                " a turn in each of its `width` episodes"
            )
        if self.rank_by == "reward" and self.method != "best_of_n":
            raise ValueError(
                "rank_by reward compares finished episodes: set method to best_of_n, or rank_by to "
                "values or likelihood"
            )
        if self.rank_by == "votes" and self.method != "beam":
            raise ValueError(
                "rank_by votes counts the candidates of a turn that do the same: set method to "
                "beam, or rank_by to values or likelihood"
            )
        return self
