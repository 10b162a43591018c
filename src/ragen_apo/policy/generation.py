"""Batched generation over many turns, with one KV cache for the whole episode.

    submit(row, prompt) ... step() -> rows whose response is over ... submit(row, next prompt) ...

A row is an episode in progress; it has a slot in the KV cache and writes keys and values at its own
positions there. A step does one of two things:

- it samples one token for every row that is writing a response, or
- it reads the prompts that wait, concatenated; each attends to its own context.

A row continues with its next turn without waiting for the others. Slots without a writing row are
computed too, and the result is dropped. If there are many, rows move to the front (`_close_ranks`).
A prompt that restarts its row's context keeps the common prefix in the cache. A new row copies what
another open row has read of the same prompt. So only the first episode of a group reads the task,
and a system prompt is read once.

Each row draws its uniform numbers from its own generator, one block a turn. So a trajectory does
not depend on the other rows of its batch, up to floating-point rounding of the matrix products.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import Cache

from ragen_apo.policy.attention import PaddedPrompts, PromptSlice, mask_of_later
from ragen_apo.policy.engine import Response, too_long
from ragen_apo.policy.language_model import LanguageModel
from ragen_apo.policy.passes import on_device, return_freed_memory
from ragen_apo.policy.ragged_cache import CacheView, RaggedLayer, SpareMemory
from ragen_apo.policy.recorded_passes import RecordedPasses
from ragen_apo.policy.rows import (
    SHARED_TOKENS,
    Prefix,
    Row,
    better_later,
    longest_prefix,
    num_shared,
    read_together,
)
from ragen_apo.policy.sampling import Sampling, StopRule, sample

_WAITING_SHARE = 1 / 4
"""Prompts are read once this share of the rows with a pending response waits: each pass has a
fixed cost."""
_IDLE_SHARE = 1 / 4
"""The largest share of a pass's slots whose result is dropped."""
_GROWTH_ON_GPU = 1.5
"""Passes are recorded anew for each length of the cache."""


class GenerationEngine:
    """Generates responses for many rows whose caches live from the first turn to the last.

    Implements `Engine`, where the methods are described. `capacity` is the longest context of a row
    in tokens. Memory: two tensors [num_rows, kv_heads, longest context so far, head_dim] a layer.
    Closing the last row frees it. A little main memory is kept for the next rows.
    """

    def __init__(
        self, model: LanguageModel, *, num_rows: int, capacity: int, stops_at_answer: bool = True
    ) -> None:
        self.model, self.num_rows, self.capacity = model, num_rows, capacity
        self.stop_rule = StopRule(model, stops_at_answer=stops_at_answer)
        self._on_gpu = model.device.type == "cuda"
        self._view = CacheView(capacity)
        if self._on_gpu:
            self._view.growth = _GROWTH_ON_GPU
        self._recorded = RecordedPasses()
        self._memory = SpareMemory(num_positions=self._view.max_positions)
        self.layers = [
            RaggedLayer(self._view, self._memory, num_rows=num_rows)
            for _ in range(model.config.num_hidden_layers)
        ]
        self._cache = Cache(layers=list(self.layers))
        self._slots: list[Row | None] = [None] * num_rows

    @property
    def _mask_dtype(self) -> torch.dtype:
        """That of the products now: a mask in it is not converted again in every layer."""
        return self.model.compute_dtype

    @property
    def num_free_rows(self) -> int:
        return self._slots.count(None)

    def open_row(self, draws: np.random.Generator) -> Row:
        assert self.num_free_rows > 0
        row = Row(slot=self._slots.index(None), draws=draws)
        self._slots[row.slot] = row
        return row

    def copy_row(self, row: Row, draws: np.random.Generator) -> Row:
        assert self._slots[row.slot] is row and row.sampling is None
        copy = self.open_row(draws)
        copy.read, copy.unread = list(row.read), list(row.unread)
        self._copy_slots([row.slot], [copy.slot], length=row.length)
        return copy

    def close_row(self, row: Row) -> None:
        assert self._slots[row.slot] is row
        self._slots[row.slot] = None
        if self.num_free_rows == self.num_rows:
            self._close_all_rows()

    def _close_all_rows(self) -> None:
        """Frees every slot, those of episodes that were broken off included."""
        self._slots = [None] * self.num_rows
        self._recorded.forget()
        self._view.num_positions = 0
        for layer in self.layers:
            layer.forget()
        self._memory.keep(2 * len(self.layers) + 1)

    @contextlib.contextmanager
    def rollout(self) -> Iterator[None]:
        if not self._memory.free:
            return_freed_memory()
        try:
            with self.constant_weights():
                yield
        finally:
            self._close_all_rows()

    @contextlib.contextmanager
    def constant_weights(self) -> Iterator[None]:
        """Within it the weights do not change; rows may be open before and after it.

        Afterwards no recorded pass is left, as the addresses of converted weights are in it.
        """
        try:
            with self.model.constant_weights():
                yield
        finally:
            self._recorded.forget()

    def submit(
        self, row: Row, prompt: Sequence[int], *, max_new_tokens: int, restarts: bool = False
    ) -> None:
        assert self._slots[row.slot] is row and row.sampling is None
        num_present = 0 if restarts else row.length + len(row.unread)
        needed = num_present + len(prompt) + max_new_tokens
        if needed > self.capacity:
            raise too_long(needed, capacity=self.capacity)
        if restarts:
            row.unread = list(prompt)
            num_kept = num_shared(row.read, row.to_copy)
            del row.read[num_kept:]
            del row.unread[:num_kept]
        else:
            row.unread.extend(prompt)
        assert row.unread
        row.sampling = Sampling(row.draws.random(max_new_tokens))

    @torch.no_grad()  # in inference mode autocast would convert all weights again in every pass
    def step(self, *, temperature: float) -> list[tuple[Row, Response]]:
        """Samples one token for the rows that write, or the first one for the rows that wait.

        Raises ModelError for logits that are not finite.
        """
        finished: list[tuple[Row, Response]] = []
        for rows, logits_RV in self._passes():
            entries = [row.sampling for row in rows if row.sampling]
            draws = [entry.draws[len(entry.token_ids)] for entry in entries]
            tokens, logprobs = sample(logits_RV, draws, temperature=temperature)
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
            readers = [row for row in self._slots if row and row.read]
            sources = {row: longest_prefix(row, readers) for row in waiting if not row.read}
            later = better_later(sources)
            now = [row for row in waiting if row not in later]
            self._copy_prefixes({row: sources[row] for row in now if row in sources})
            for rows in read_together(now, padded=self._on_gpu):
                yield rows, self._read_prompts(rows)
            waiting = later

    def _copy_prefixes(self, sources: Mapping[Row, Prefix]) -> None:
        """Gives rows that begin what other rows have read of the same prompt."""
        copies = {row: each for row, each in sources.items() if each.length >= SHARED_TOKENS}
        if not copies:
            return
        slots = [each.slot for each in copies.values()]
        # Of a shorter prefix more is copied than is shared: the row's own tokens overwrite it.
        length = max(each.length for each in copies.values())
        self._copy_slots(slots, [row.slot for row in copies], length=length)
        for row, (length, _) in copies.items():
            row.read, row.unread = row.unread[:length], row.unread[length:]

    def _continue(self, rows: Sequence[Row]) -> Tensor:
        """Reads each row's last token; the slots between them are computed too."""
        self._close_ranks(rows)
        num_slots = self._num_slots(rows)
        lengths = [row.length if row else 0 for row in self._slots[:num_slots]]
        tokens = [self.model.pad_id] * num_slots
        for row in rows:
            (tokens[row.slot],) = row.unread
        self._reserve(max(lengths) + 1)
        # The other slots write behind their row's last token, which its next one overwrites.
        inputs = on_device([tokens, lengths], self.model.device)[:, :, None]
        hidden_R1H = self._recorded.run(self._read_last_tokens, [*inputs], key=num_slots)
        self._note_read(rows)
        slots_R = on_device([row.slot for row in rows], self.model.device)
        return self.model.logits(hidden_R1H[slots_R, 0])

    def _num_slots(self, rows: Sequence[Row]) -> int:
        """How many slots a pass of these rows reads: on a GPU one of few numbers."""
        needed = 1 + max(row.slot for row in rows)
        if not self._on_gpu:
            return needed
        return min(1 << (needed - 1).bit_length(), self.num_rows)

    def _read_last_tokens(self, tokens_R1: Tensor, positions_R1: Tensor) -> Tensor:
        """The hidden states [R, 1, H] of one token in each of the first slots."""
        device, view = tokens_R1.device, self._view
        slots_R1 = torch.arange(len(tokens_R1), device=device)[:, None]
        view.point_at(slots_R1, positions_R1, read=slice(0, len(tokens_R1)))
        mask_R1L = mask_of_later(positions_R1, view.num_positions, dtype=self._mask_dtype)
        return self._pass(tokens_R1, positions_R1, attention_mask=mask_R1L[:, None])

    def _reserve(self, length: int) -> None:
        """Makes room for contexts of this length, elsewhere in memory where it takes more."""
        if length > self._view.num_positions:
            self._recorded.forget()
            self._view.reserve(length)

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
        positions_1T = on_device([positions], device)
        self._view.point_at(on_device([slots], device), positions_1T, read=slice(None))
        self._reserve(max(each.length for each in parts))
        token_ids = [token for row in rows for token in row.unread]
        dtype = self._mask_dtype
        if self._on_gpu:
            prompt_slices = PaddedPrompts.of(parts, dtype=dtype, device=device)
        else:
            prompt_slices = [each.with_mask(dtype=dtype, device=device) for each in parts]
        hidden_1TH = self._pass(
            on_device([token_ids], device),
            positions_1T,
            # A mask of four axes is taken as it is; the prompt slices have their own.
            attention_mask=torch.zeros(1, 1, 1, 1, device=device),
            prompt_slices=prompt_slices,
        )
        self._note_read(rows)
        last_R = on_device([each.tokens.stop - 1 for each in parts], device)
        return self.model.logits(hidden_1TH[0, last_R])

    def _pass(self, token_ids_RT: Tensor, positions_RT: Tensor, **kwargs: Any) -> Tensor:
        return self.model.hidden_states(
            token_ids_RT, position_ids=positions_RT, cache=self._cache, **kwargs
        )

    def _note_read(self, rows: Sequence[Row]) -> None:
        for row in rows:
            row.read += row.unread
            row.unread.clear()

    def _copy_slots(self, sources: Sequence[int], targets: Sequence[int], *, length: int) -> None:
        sources_R, targets_R = (on_device(slots, self.model.device) for slots in (sources, targets))
        for layer in self.layers:
            layer.rearrange(sources_R, targets_R, length=length)

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
        self._copy_slots(sources, targets, length=length)
        for row, slot in moves:
            row.slot = slot
            self._slots[slot] = row
