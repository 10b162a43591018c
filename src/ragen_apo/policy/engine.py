"""What plays episodes asks of what samples tokens: token ids in, token ids out.

    open_row -> submit -> step ... -> submit -> step ... -> close_row        within `rollout`

`GenerationEngine` samples in this process, `ServerEngine` asks inference servers. Neither sees
text: what was sampled once stays in the row's context as it was sampled.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np

from ragen_apo.errors import ContextError
from ragen_apo.policy.language_model import LanguageModel

RowT = TypeVar("RowT")
"""An engine's own record of an episode in progress."""


@dataclass(frozen=True)
class Response:
    """The tokens sampled in one turn and the log-probabilities they were sampled with."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Exact where the policy samples in this process, otherwise as a server reports them."""
    stopped: bool
    """True if the closing tag or the end token was reached, False at the token limit."""


class Engine(Protocol[RowT]):
    """Samples responses for many rows; each row is one context that grows turn by turn."""

    model: LanguageModel
    num_rows: int

    @property
    def num_free_rows(self) -> int:
        """How many more rows can be opened."""
        ...

    def rollout(self) -> AbstractContextManager[None]:
        """Inside, rows may be open and no weight may change; at the end all rows are closed."""
        ...

    def open_row(self, draws: np.random.Generator) -> RowT:
        """An empty row with its own generator of uniform numbers; servers draw their own."""
        ...

    def copy_row(self, row: RowT, draws: np.random.Generator) -> RowT:
        """Another row with the same context, which is not computed again; `row` may not write."""
        ...

    def submit(
        self, row: RowT, prompt: Sequence[int], *, max_new_tokens: int, restarts: bool = False
    ) -> None:
        """Asks for a response to the row's new prompt tokens; `step` returns it.

        With `restarts` the prompt is the row's whole context from now on. Raises ContextError, and
        changes nothing, if context and longest response exceed the capacity.
        """
        ...

    def step(self, *, temperature: float) -> list[tuple[RowT, Response]]:
        """Goes on with all rows for a while and returns the responses that are over, maybe none.

        Temperature 0 takes the most probable token, and its log-probability at temperature 1.
        """
        ...

    def close_row(self, row: RowT) -> None:
        """Ends the row and makes room for another."""
        ...


def too_long(num_tokens: int, *, capacity: int) -> ContextError:
    """The error for a row whose context and longest response exceed an engine's capacity."""
    return ContextError(
        f"a context of {num_tokens} tokens does not fit the cache of {capacity}; "
        "raise agent.max_context_tokens or shorten turns"
    )
