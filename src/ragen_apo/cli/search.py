"""The options of `evaluate` for a search over turns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from cyclopts import Group, Parameter

from ragen_apo.choices import SearchRanking
from ragen_apo.cli.common import Number
from ragen_apo.errors import ConfigError

_GROUP = Group("A search over turns", sort_key=9)


@Parameter(name="*", group=_GROUP)
@dataclass(frozen=True)
class SearchOptions:
    """What is kept of how many candidates; docs/search.md says more."""

    search: Literal["beam", "best-of-n"] | None = None
    """Play the best of several branches that are pruned turn by turn, or the best of whole
    episodes. Default: as evaluation.search configures, which is no search."""
    width: Number | None = None
    """Branches that are kept, or episodes. Default: 4."""
    candidates: Number | None = None
    """Responses that a beam samples for each branch in a turn. Default: as many as --width."""
    rank_by: SearchRanking | None = None
    """What decides. values: V* where the run's store knows the move, likelihood elsewhere;
    likelihood; votes: how many candidates do the same, with beam; reward: that of the finished
    episodes, which no deployed agent sees: an upper bound, with best-of-n. Default: values."""
    search_tokens: Number | None = None
    """Tokens sampled for an episode after which its best branch goes on greedily."""

    def section(self) -> dict[str, Any] | None:
        """The keys of `evaluation.search` that are given; None if none is."""
        method = None if self.search is None else self.search.replace("-", "_")
        keys = {
            "method": method,
            "width": self.width,
            "candidates": self.candidates,
            "rank_by": self.rank_by,
            "max_tokens": self.search_tokens,
        }
        return {key: value for key, value in keys.items() if value is not None} or None


def refuse_search_options(search: SearchOptions) -> None:
    """Raises ConfigError if a search is asked for that only a run can do."""
    if search.section() is not None:
        raise ConfigError(
            "--search and its options go with a run; a model behind an API plays each task once"
        )


def require_method(search: SearchOptions, *, is_configured: bool) -> None:
    """Raises ConfigError for options of a search where there is none to change."""
    if search.section() is not None and search.search is None and not is_configured:
        raise ConfigError(
            "--width, --candidates, --rank-by and --search-tokens are options of a search; add "
            "--search beam or --search best-of-n"
        )
