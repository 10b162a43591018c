"""Batched generation over many turns, with one KV cache for the whole episode.

    submit(row, prompt) ... step() -> rows whose response is over ... submit(row, next prompt) ...

A row is an episode in progress; it has a slot in the KV cache and writes keys and values at its own
positions there. A step does one of two things:

- it samples one token for every row that is writing a response, or
- it reads the prompts that wait, concatenated without padding; each attends to its own context.

A row goes on with its next turn without waiting for the others. Slots without a writing row are
computed too and the result is dropped; if there are many, rows move to the front (`_close_ranks`).
A prompt that restarts its row's context keeps the common prefix in the cache. A row that begins
copies what another open row has read of the same prompt: of a group's episodes only the first reads
the task, and a system prompt is read once.

Each row draws its uniform numbers from its own generator, one block a turn. So a trajectory does
not depend on the other rows of its batch, up to floating-point rounding of the matrix products.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import Cache

from ragen_apo.errors import ContextError, ModelError
from ragen_apo.policy.attention import PromptSlice
from ragen_apo.policy.engine import Response
from ragen_apo.policy.language_model import LanguageModel
from ragen_apo.policy.ragged_cache import CacheView, RaggedLayer, SpareMemory
from ragen_apo.policy.tokenizer import CLOSE_ANSWER

_TAIL_TOKENS = 12
"""The number of last tokens that are searched for a closing tag of several tokens."""
_WAITING_SHARE = 1 / 4
"""Prompts are read once this share of the rows with a pending response waits: each pass has a
fixed cost."""
_IDLE_SHARE = 1 / 4
"""The largest share of a pass's slots whose result is dropped."""
_SHARED_TOKENS = 16
"""A shorter common beginning of two prompts is read again: copying has its cost, too."""
_WORTH_A_PASS = 256
"""Rows wait until another row has read the common beginning if that saves so many tokens."""
TOKENS_PER_PASS = 4096
"""The most prompt tokens of a pass, unless one prompt alone has more; more only take memory."""


@dataclass(eq=False)
class Row:
    """One episode in progress."""

    slot: int
    draws: np.random.Generator
    read: list[int] = field(default_factory=list)
    """Tokens of this row whose keys and values are in the cache."""
    unread: list[int] = field(default_factory=list)
    """Tokens that the model has not read yet: a prompt, or the last token sampled."""
    sampling: _Sampling | None = None
    """The response that was asked for, until it is over."""

    @property
    def length(self) -> int:
        """The number of its tokens in the cache."""
        return len(self.read)

    @property
    def to_copy(self) -> list[int]:
        """What of the prompt another row may have read: not the last token, whose logits are those
        of the first one to sample.
        """
        return self.unread[:-1]

    @property
    def is_waiting(self) -> bool:
        """Whether a prompt has to be read before the first token of the response."""
        return self.sampling is not None and not self.sampling.token_ids


class StopRule:
    """A response is over at an end token, or when its text ends with the closing tag."""

    def __init__(self, model: LanguageModel) -> None:
        self._tokenizer = model.tokenizer
        self.end_ids = set(model.end_ids)
        tag_ids = model.tokenizer.encode(CLOSE_ANSWER, add_special_tokens=False)
        if len(tag_ids) == 1:
            self.end_ids.add(tag_ids[0])
            self._may_close: set[int] = set()
        else:
            vocabulary = model.tokenizer.get_vocab()
            self._may_close = {index for text, index in vocabulary.items() if ">" in text}

    @property
    def reads_text(self) -> bool:
        """Whether the closing tag is several tokens, so that text decides as well."""
        return bool(self._may_close)

    def is_over(self, token_ids: Sequence[int]) -> bool:
        """Whether the response ends with its last token."""
        if token_ids[-1] in self.end_ids:
            return True
        if token_ids[-1] not in self._may_close:
            return False
        return CLOSE_ANSWER in self._tokenizer.decode(list(token_ids[-_TAIL_TOKENS:]))


def too_long(num_tokens: int, *, capacity: int) -> ContextError:
    """The error for a row whose context and longest response exceed an engine's capacity."""
    return ContextError(
        f"a context of {num_tokens} tokens does not fit the cache of {capacity}; "
        "raise agent.max_context_tokens or shorten turns"
    )


class GenerationEngine:
    """Generates responses for many rows whose caches live from the first turn to the last.

    `capacity` is the longest context of a row in tokens. Memory: two tensors
    [num_rows, kv_heads, longest context so far, head_dim] a layer. Closing the last row frees the
    memory of an accelerator; main memory is kept for the next rows.
    """

    def __init__(self, model: LanguageModel, *, num_rows: int, capacity: int) -> None:
        self.model, self.num_rows, self.capacity = model, num_rows, capacity
        self.stop_rule = StopRule(model)
        self._view = CacheView(capacity)
        self._memory = SpareMemory(num_positions=self._view.max_positions)
        self.layers = [
            RaggedLayer(self._view, self._memory, num_rows=num_rows)
            for _ in range(model.config.num_hidden_layers)
        ]
        self._cache = Cache(layers=list(self.layers))
        self._slots: list[Row | None] = [None] * num_rows

    @property
    def _mask_dtype(self) -> torch.dtype:
        """That of the products: a mask in it is not converted again in every layer."""
        return self.model.compute_dtype

    @property
    def num_free_rows(self) -> int:
        return self._slots.count(None)

    def open_row(self, draws: np.random.Generator) -> Row:
        """An empty row with its own generator of uniform numbers."""
        assert self.num_free_rows > 0
        row = Row(slot=self._slots.index(None), draws=draws)
        self._slots[row.slot] = row
        return row

    def copy_row(self, row: Row, draws: np.random.Generator) -> Row:
        """Another row with the same context, whose keys and values are copied."""
        assert self._slots[row.slot] is row and row.sampling is None
        copy = self.open_row(draws)
        copy.read, copy.unread = list(row.read), list(row.unread)
        for layer in self.layers:
            layer.rearrange([row.slot], [copy.slot], length=row.length)
        return copy

    def close_row(self, row: Row) -> None:
        """Ends the row and frees its slot."""
        assert self._slots[row.slot] is row
        self._slots[row.slot] = None
        if self.num_free_rows == self.num_rows:
            self._close_all_rows()

    def _close_all_rows(self) -> None:
        """Frees every slot, those of episodes that were broken off included."""
        self._slots = [None] * self.num_rows
        self._view.num_positions = 0
        for layer in self.layers:
            layer.forget()
        self._memory.keep(2 * len(self.layers) + 1)

    @contextlib.contextmanager
    def rollout(self) -> Iterator[None]:
        """Inside, no weight may change; at the end every slot is freed."""
        try:
            with self.model.constant_weights():
                yield
        finally:
            self._close_all_rows()

    def submit(
        self, row: Row, prompt: Sequence[int], *, max_new_tokens: int, restarts: bool = False
    ) -> None:
        """Asks for a response to the row's new prompt tokens; `step` returns it.

        With `restarts` the prompt is the row's whole context from now on. Raises ContextError, and
        changes nothing, if context and longest response exceed the capacity.
        """
        assert self._slots[row.slot] is row and row.sampling is None
        num_present = 0 if restarts else row.length + len(row.unread)
        needed = num_present + len(prompt) + max_new_tokens
        if needed > self.capacity:
            raise too_long(needed, capacity=self.capacity)
        if restarts:
            row.unread = list(prompt)
            num_kept = _num_shared(row.read, row.to_copy)
            del row.read[num_kept:]
            del row.unread[:num_kept]
        else:
            row.unread.extend(prompt)
        assert row.unread
        row.sampling = _Sampling(row.draws.random(max_new_tokens))

    @torch.no_grad()  # in inference mode autocast would convert all weights again in every pass
    def step(self, *, temperature: float) -> list[tuple[Row, Response]]:
        """Samples one token for the rows that write, or the first one for the rows that wait.

        Returns the responses that are now over. Temperature 0 takes the most probable token and
        its log-probability at temperature 1. Raises ModelError for logits that are not finite.
        """
        finished: list[tuple[Row, Response]] = []
        for rows, logits_RV in self._passes():
            entries = [row.sampling for row in rows if row.sampling]
            draws = [entry.draws[len(entry.token_ids)] for entry in entries]
            tokens, logprobs = _sample(logits_RV, draws, temperature=temperature)
            for row, entry, token, logprob in zip(rows, entries, tokens, logprobs, strict=True):
                row.unread.append(token)
                response = entry.append(token, logprob, rule=self.stop_rule)
                if response:
                    finished.append((row, response))
                    row.sampling = None
        return finished

    def _passes(self) -> Iterator[tuple[list[Row], Tensor]]:
        """Each forward pass of a step: its rows, and the logits [R, V] of their next tokens."""
        wanted = [row for row in self._slots if row and row.sampling]
        writing = [row for row in wanted if not row.is_waiting]
        waiting = [row for row in wanted if row.is_waiting]
        if writing and len(waiting) < _WAITING_SHARE * len(wanted):
            yield writing, self._continue(writing)
            return
        while waiting:
            sources = {row: self._longest_prefix(row) for row in waiting if not row.read}
            later = _better_later(sources)
            now = [row for row in waiting if row not in later]
            self._copy_prefixes({row: sources[row] for row in now if row in sources})
            for rows in read_together(now):
                yield rows, self._read_prompts(rows)
            waiting = later

    def _longest_prefix(self, row: Row) -> _Prefix:
        """What another row has read of the prompt of a row that begins; most of it, if several."""
        prompt = row.to_copy
        readers = [other for other in self._slots if other and other.read]
        found = (_Prefix(_num_shared(other.read, prompt), other.slot) for other in readers)
        return max(found, default=_Prefix(0, 0))

    def _copy_prefixes(self, sources: Mapping[Row, _Prefix]) -> None:
        """Gives rows that begin what other rows have read of the same prompt."""
        copies = {row: each for row, each in sources.items() if each.length >= _SHARED_TOKENS}
        if not copies:
            return
        slots = [each.slot for each in copies.values()]
        # Of a shorter prefix more is copied than is shared: the row's own tokens overwrite it.
        length = max(each.length for each in copies.values())
        for layer in self.layers:
            layer.rearrange(slots, [row.slot for row in copies], length=length)
        for row, (length, _) in copies.items():
            row.read, row.unread = row.unread[:length], row.unread[length:]

    def _continue(self, rows: Sequence[Row]) -> Tensor:
        """Reads each row's last token; the slots between them are computed too."""
        device = self.model.device
        self._close_ranks(rows)
        num_slots = 1 + max(row.slot for row in rows)
        lengths = [row.length if row else 0 for row in self._slots[:num_slots]]
        tokens = [self.model.pad_id] * num_slots
        for row in rows:
            (tokens[row.slot],) = row.unread
        # The other slots write behind their row's last token, which its next one overwrites.
        positions_R1 = torch.tensor(lengths, device=device)[:, None]
        slots_R1 = torch.arange(num_slots, device=device)[:, None]
        view = self._view
        view.point_at(slots_R1, positions_R1, read=slice(0, num_slots))
        view.reserve(max(lengths) + 1)
        is_ahead_RT = torch.arange(view.num_positions, device=device) > positions_R1
        mask_RT = torch.zeros(is_ahead_RT.shape, device=device, dtype=self._mask_dtype)
        mask_RT.masked_fill_(is_ahead_RT, float("-inf"))
        hidden_R1H = self._pass(
            torch.tensor(tokens, device=device)[:, None],
            positions_R1,
            attention_mask=mask_RT[:, None, None],
        )
        self._note_read(rows)
        return self.model.logits(hidden_R1H[[row.slot for row in rows], 0])

    def _read_prompts(self, rows: Sequence[Row]) -> Tensor:
        """Reads the unread tokens of all rows in one pass."""
        device = self.model.device
        parts: list[PromptSlice] = []
        end = 0
        for row in rows:
            start, end = end, end + len(row.unread)
            parts.append(PromptSlice(row.slot, slice(start, end), row.length + len(row.unread)))
        slots = [each.slot for each in parts for _ in range(each.num_tokens)]
        positions = [position for each in parts for position in range(each.start, each.length)]
        positions_1T = torch.tensor([positions], device=device)
        self._view.point_at(torch.tensor([slots], device=device), positions_1T, read=slice(None))
        self._view.reserve(max(each.length for each in parts))
        token_ids = [token for row in rows for token in row.unread]
        hidden_1TH = self._pass(
            torch.tensor([token_ids], device=device),
            positions_1T,
            # A mask of four axes is taken as it is; the prompt slices have their own.
            attention_mask=torch.zeros(1, 1, 1, 1, device=device),
            prompt_slices=[each.with_mask(dtype=self._mask_dtype, device=device) for each in parts],
        )
        self._note_read(rows)
        return self.model.logits(hidden_1TH[0, [each.tokens.stop - 1 for each in parts]])

    def _pass(self, token_ids_RT: Tensor, positions_RT: Tensor, **kwargs: Any) -> Tensor:
        return self.model.hidden_states(
            token_ids_RT,
            position_ids=positions_RT,
            past_key_values=self._cache,
            use_cache=True,
            **kwargs,
        )

    def _note_read(self, rows: Sequence[Row]) -> None:
        for row in rows:
            row.read += row.unread
            row.unread.clear()

    def _close_ranks(self, rows: Sequence[Row]) -> None:
        """Moves rows from the end of the cache forward if too many slots before them are idle."""
        if 1 + max(row.slot for row in rows) <= len(rows) / (1 - _IDLE_SHARE):
            return
        chosen = set(rows)
        strays = [row for row in rows if row.slot >= len(rows)]
        idle = [slot for slot in range(len(rows)) if self._slots[slot] not in chosen]
        moves: list[tuple[Row, int]] = []
        for stray, slot in zip(strays, idle, strict=True):
            other = self._slots[slot]
            moves += [(stray, slot), *([(other, stray.slot)] if other else [])]
            self._slots[stray.slot] = None
        moved = [(row, slot) for row, slot in moves if row.length > 0]
        sources, targets = [row.slot for row, _ in moved], [slot for _, slot in moved]
        length = max(row.length for row, _ in moved)
        for layer in self.layers:
            layer.rearrange(sources, targets, length=length)
        for row, slot in moves:
            row.slot = slot
            self._slots[slot] = row


class _Prefix(NamedTuple):
    """The first tokens of a prompt, which the row in this slot has read."""

    length: int
    slot: int


def _better_later(sources: Mapping[Row, _Prefix]) -> list[Row]:
    """Of rows that begin, those that can copy more once others of them have been read."""
    leaders: list[Row] = []
    saved: dict[Row, int] = {}
    for row, present in sources.items():
        prompt = row.to_copy
        expected = max((_num_shared(leader.unread, prompt) for leader in leaders), default=0)
        if expected - present.length >= _SHARED_TOKENS:
            saved[row] = expected - present.length
        else:
            leaders.append(row)
    return list(saved) if sum(saved.values()) >= _WORTH_A_PASS else []


def _num_shared(first: list[int], second: list[int]) -> int:
    """The length of the common prefix, by halving: Python compares slices fast, tokens slowly."""
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def read_together(rows: Sequence[Row]) -> Iterator[list[Row]]:
    """Splits rows, in their order, into passes of at most `TOKENS_PER_PASS` unread tokens."""
    group: list[Row] = []
    num_tokens = 0
    for row in rows:
        num_tokens += len(row.unread)
        if group and num_tokens > TOKENS_PER_PASS:
            yield group
            group, num_tokens = [], len(row.unread)
        group.append(row)
    if group:
        yield group


def _sample(
    logits_RV: Tensor, draws: Sequence[float], *, temperature: float
) -> tuple[list[int], list[float]]:
    """One token a row with its log-probability, by the row's uniform draw."""
    logprobs_RV = torch.log_softmax(logits_RV / (temperature or 1.0), dim=-1)
    if temperature == 0:
        tokens_R = logprobs_RV.argmax(-1)
    else:
        uniform_R = torch.tensor(draws, dtype=torch.float64)
        tokens_R = inverse_cdf(logprobs_RV, uniform_R.to(logits_RV.device))
    logprobs_R = logprobs_RV.gather(1, tokens_R[:, None])[:, 0]
    tokens, logprobs = torch.stack([tokens_R.double(), logprobs_R.double()]).tolist()
    if not all(map(math.isfinite, logprobs)):
        raise ModelError(
            "the model's logits are not finite, so no token can be sampled; its weights have "
            "diverged. Go back to an earlier checkpoint with a lower learning rate"
        )
    return [int(token) for token in tokens], logprobs


def inverse_cdf(logprobs_RV: Tensor, uniform_R: Tensor) -> Tensor:
    """The token [R] whose interval of the cumulative distribution holds the uniform draw in [0, 1).

    The sum is in float64, and the draw is scaled by the total and kept below it, so that rounding
    never selects a token of probability zero. NaN gives the last token.
    """
    device = logprobs_RV.device
    if torch.are_deterministic_algorithms_enabled():
        logprobs_RV = logprobs_RV.cpu()  # a GPU has no deterministic cumulative sum
    cumulative_RV = logprobs_RV.exp().cumsum(-1, dtype=torch.float64).to(device)
    total_R = cumulative_RV[:, -1]
    below_R = torch.nextafter(total_R, torch.zeros_like(total_R))
    target_R1 = torch.minimum(uniform_R * total_R, below_R)[:, None]
    found_R = torch.searchsorted(cumulative_RV, target_R1, right=True)[:, 0]
    return found_R.clamp(max=logprobs_RV.shape[1] - 1)


class _Sampling:
    """The response of one row while it is being sampled."""

    def __init__(self, draws: np.ndarray) -> None:
        self.draws = draws.tolist()
        """One uniform number for each token that the response may have."""
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []

    def append(self, token: int, logprob: float, *, rule: StopRule) -> Response | None:
        """Adds a token and returns the response if it is over."""
        self.token_ids.append(token)
        self.logprobs.append(logprob)
        stopped = rule.is_over(self.token_ids)
        if stopped or len(self.token_ids) == len(self.draws):
            return Response(tuple(self.token_ids), tuple(self.logprobs), stopped)
        return None
