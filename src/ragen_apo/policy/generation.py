"""Batched generation over many turns with one KV cache kept for the whole episode.

Rows have different lengths and no padding on the left: each writes its keys and values at its own
positions, and a mask hides what a row has not written. Rows that take part in a call lie in the
first slots of the cache; a row that has finished its response moves behind them, so it costs
nothing.

Each row draws its uniform numbers from its own generator, one block a turn, so a trajectory does
not depend on which rows it shares a batch with (up to floating-point rounding of the matrix
products).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

from ragen_apo.errors import ContextError
from ragen_apo.policy.language_model import CLOSING_TAG, LanguageModel

_TAIL_TOKENS = 12
"""How many last tokens are decoded to look for a closing tag that is several tokens long."""


@dataclass
class _View:
    """What the attention layers of one forward pass read and write."""

    num_rows: int = 0
    positions_BT: Tensor = field(default_factory=lambda: torch.zeros(0, 0, dtype=torch.long))
    length: int = 0
    """The longest context among the rows, new tokens included."""


class _RaggedLayer(CacheLayerMixin):
    """Keys and values [rows, heads, capacity + 1, head_dim] of one layer; the last place is waste.

    Padding of a ragged batch of new tokens is written to the waste place, which no mask shows.
    """

    def __init__(self, view: _View, *, num_rows: int, capacity: int) -> None:
        super().__init__()
        self.view, self.num_rows, self.capacity = view, num_rows, capacity

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        _, heads, _, head_dim = key_states.shape
        shape = (self.num_rows, heads, self.capacity + 1, head_dim)
        # Zeros: a masked place still enters the product with weight zero, so it may hold no NaN.
        self.keys = torch.zeros(shape, dtype=key_states.dtype, device=key_states.device)
        shape = (*shape[:3], value_states.shape[-1])
        self.values = torch.zeros(shape, dtype=key_states.dtype, device=key_states.device)
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None and self.values is not None
        rows = torch.arange(self.view.num_rows, device=key_states.device)[:, None]
        self.keys[rows, :, self.view.positions_BT] = key_states.transpose(1, 2)
        self.values[rows, :, self.view.positions_BT] = value_states.transpose(1, 2)
        written = (slice(0, self.view.num_rows), slice(None), slice(0, self.view.length))
        return self.keys[written], self.values[written]

    @torch.inference_mode()
    def swap(self, first: int, second: int, *, length: int) -> None:
        """Exchanges two rows' first `length` places."""
        if not self.is_initialized or first == second:
            return
        assert self.keys is not None and self.values is not None
        for store in (self.keys, self.values):
            kept = store[first, :, :length].clone()
            store[first, :, :length] = store[second, :, :length]
            store[second, :, :length] = kept

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.view.length, 0

    def get_seq_length(self) -> int:
        return self.view.length

    def get_max_length(self) -> int:
        return self.capacity


@dataclass(eq=False)
class Row:
    """One episode's place in the engine."""

    slot: int
    draws: np.random.Generator
    length: int = 0
    """Tokens of this row that are in the cache."""
    unread: list[int] = field(default_factory=list)
    """Sampled tokens that the model has not read yet: the last one of each response."""


@dataclass(frozen=True)
class Response:
    """The tokens sampled in one turn and the exact log-probabilities they were sampled with."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    stopped: bool
    """True if the closing tag or the end token was reached, False at the token limit."""


class StopRule:
    """Says when a response is over: at an end token, or when its text ends with the closing tag."""

    def __init__(self, model: LanguageModel) -> None:
        self._tokenizer = model.tokenizer
        self.end_ids = set(model.end_ids)
        tag_ids = model.tokenizer.encode(CLOSING_TAG, add_special_tokens=False)
        if len(tag_ids) == 1:
            self.end_ids.add(tag_ids[0])
            self._may_close: set[int] = set()
        else:
            vocabulary = model.tokenizer.get_vocab()
            self._may_close = {index for text, index in vocabulary.items() if ">" in text}

    def is_over(self, token_ids: Sequence[int]) -> bool:
        """Whether the response ends with its last token."""
        if token_ids[-1] in self.end_ids:
            return True
        if token_ids[-1] not in self._may_close:
            return False
        return CLOSING_TAG in self._tokenizer.decode(list(token_ids[-_TAIL_TOKENS:]))


class GenerationEngine:
    """Generates responses for many rows whose caches live from the first turn to the last.

    `capacity` is the longest context of a row in tokens. Memory: two tensors
    [num_rows, kv_heads, capacity + 1, head_dim] a layer.
    """

    def __init__(self, model: LanguageModel, *, num_rows: int, capacity: int) -> None:
        self.model, self.num_rows, self.capacity = model, num_rows, capacity
        self.stop_rule = StopRule(model)
        self._view = _View()
        self._layers = [
            _RaggedLayer(self._view, num_rows=num_rows, capacity=capacity)
            for _ in range(model.config.num_hidden_layers)
        ]
        self._cache = Cache(layers=list(self._layers))
        self._rows: list[Row] = []
        self._places = torch.arange(capacity, device=model.device)

    @property
    def num_free_rows(self) -> int:
        return self.num_rows - len(self._rows)

    def open_row(self, draws: np.random.Generator) -> Row:
        """An empty row with its own generator of uniform numbers."""
        assert self.num_free_rows > 0
        row = Row(slot=len(self._rows), draws=draws)
        self._rows.append(row)
        return row

    def close_row(self, row: Row) -> None:
        """Gives the row's place back."""
        last = self._rows[-1]
        self._exchange(row, last)
        self._rows.pop()

    def close_all_rows(self) -> None:
        """Gives every place back: nothing is left behind by episodes that were broken off."""
        self._rows.clear()

    @torch.inference_mode()
    def respond(
        self,
        rows: Sequence[Row],
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        temperature: float,
    ) -> list[Response]:
        """Reads each row's new prompt tokens and samples one response a row.

        Temperature 0 takes the most probable token; its log-probability is that at temperature 1.
        Raises ContextError if a prompt and a full response would not fit into the capacity.
        """
        for row, prompt in zip(rows, prompts, strict=True):
            needed = row.length + len(row.unread) + len(prompt) + max_new_tokens
            if needed > self.capacity:
                raise ContextError(
                    f"a context of {needed} tokens does not fit the cache of {self.capacity}; "
                    "raise agent.max_context_tokens or shorten turns"
                )
        for slot, (row, prompt) in enumerate(zip(rows, prompts, strict=True)):
            row.unread.extend(prompt)
            self._exchange(row, self._rows[slot])
        sampled = [_Sampling(row, max_new_tokens) for row in rows]
        active = list(sampled)
        while active:
            logits_BV = self._read_unread([sampling.row for sampling in active])
            self._sample(active, logits_BV, temperature=temperature)
            active = self._retire_finished(active)
        return [sampling.response() for sampling in sampled]

    def _retire_finished(self, active: list[_Sampling]) -> list[_Sampling]:
        """Fills the slots of finished rows with rows that go on; returns those in slot order."""
        for entry in active:
            entry.check(self.stop_rule)
        going_on = [entry for entry in active if not entry.is_over]
        holes = [e.row for e in active if e.is_over and e.row.slot < len(going_on)]
        movers = [e.row for e in going_on if e.row.slot >= len(going_on)]
        for hole, mover in zip(holes, movers, strict=True):
            self._exchange(hole, mover)
        return sorted(going_on, key=lambda entry: entry.row.slot)

    def _exchange(self, first: Row, second: Row) -> None:
        if first is second:
            return
        length = max(first.length, second.length)
        for layer in self._layers:
            layer.swap(first.slot, second.slot, length=length)
        self._rows[first.slot], self._rows[second.slot] = second, first
        first.slot, second.slot = second.slot, first.slot

    def _read_unread(self, rows: Sequence[Row]) -> Tensor:
        """Feeds every row's unread tokens and returns the logits [B, V] after the last of each."""
        device = self.model.device
        width = max(len(row.unread) for row in rows)
        token_ids = np.zeros((len(rows), width), dtype=np.int64)
        positions = np.full((len(rows), width), self.capacity, dtype=np.int64)
        for index, row in enumerate(rows):
            assert row.slot == index
            count = len(row.unread)
            token_ids[index, :count] = row.unread
            positions[index, :count] = np.arange(row.length, row.length + count)
            row.length += count
        last_B = torch.tensor([len(row.unread) - 1 for row in rows], device=device)
        for row in rows:
            row.unread.clear()
        positions_BT = torch.from_numpy(positions).to(device)
        self._view.num_rows, self._view.positions_BT = len(rows), positions_BT
        self._view.length = max(row.length for row in rows)
        mask_BTL = self._places[None, None, : self._view.length] <= positions_BT[:, :, None]
        hidden_BTH = self.model.hidden_states(
            torch.from_numpy(token_ids).to(device),
            attention_mask=mask_BTL[:, None],
            # Padding stands at a place that a table of learned positions has, too.
            position_ids=positions_BT.clamp(max=self.capacity - 1),
            past_key_values=self._cache,
            use_cache=True,
        )
        return self.model.logits(hidden_BTH[torch.arange(len(rows), device=device), last_B])

    def _sample(
        self, active: Sequence[_Sampling], logits_BV: Tensor, *, temperature: float
    ) -> None:
        logprobs_BV = torch.log_softmax(logits_BV / (temperature or 1.0), dim=-1)
        if temperature == 0:
            tokens_B = logprobs_BV.argmax(-1)
        else:
            uniform_B = torch.tensor([entry.next_draw() for entry in active], dtype=torch.float64)
            tokens_B = inverse_cdf(logprobs_BV, uniform_B.to(logits_BV.device))
        logprobs_B = logprobs_BV.gather(1, tokens_B[:, None])[:, 0]
        for entry, token, logprob in zip(
            active, tokens_B.tolist(), logprobs_B.tolist(), strict=True
        ):
            entry.append(token, logprob)


def inverse_cdf(logprobs_BV: Tensor, uniform_B: Tensor) -> Tensor:
    """The token [B] whose interval of the cumulative distribution holds the uniform draw in [0, 1).

    In float64, scaled by the total and kept below it, so that rounding never selects a token of
    probability zero or one past the last.
    """
    cumulative_BV = logprobs_BV.double().exp().cumsum(-1)
    total_B = cumulative_BV[:, -1]
    below_B = torch.nextafter(total_B, torch.zeros_like(total_B))
    target_B1 = torch.minimum(uniform_B * total_B, below_B)[:, None]
    return torch.searchsorted(cumulative_BV, target_B1, right=True)[:, 0]


class _Sampling:
    """The response of one row while it is being sampled."""

    def __init__(self, row: Row, max_new_tokens: int) -> None:
        self.row, self.max_new_tokens = row, max_new_tokens
        self.draws = row.draws.random(max_new_tokens)
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.stopped = self.is_over = False

    def next_draw(self) -> float:
        return float(self.draws[len(self.token_ids)])

    def append(self, token: int, logprob: float) -> None:
        self.token_ids.append(token)
        self.logprobs.append(logprob)
        self.row.unread.append(token)

    def check(self, rule: StopRule) -> None:
        self.stopped = rule.is_over(self.token_ids)
        self.is_over = self.stopped or len(self.token_ids) == self.max_new_tokens

    def response(self) -> Response:
        return Response(tuple(self.token_ids), tuple(self.logprobs), self.stopped)
