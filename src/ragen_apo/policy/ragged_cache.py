"""The KV cache of the generation engine, for rows of different lengths.

Each row has a slot and writes its keys and values at its own positions there; what it has not
written is not shown to it, by a mask or because no more than its context is read.

Axes: B rows and T columns of a pass, each token of which may belong to another slot.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

_PLACES_STEP = 64
"""The cache's length is a multiple of this many places."""
_GROWTH = 1.2
"""By how much the cache grows at least when its length no longer suffices."""


@dataclass
class CacheView:
    """What the attention layers of one forward pass read and write."""

    capacity: int
    """The longest row that there can be."""
    slots_BT: Tensor = field(default_factory=lambda: torch.zeros(0, 0, dtype=torch.long))
    """Whose tokens the pass reads."""
    positions_BT: Tensor = field(default_factory=lambda: torch.zeros(0, 0, dtype=torch.long))
    """Where in its slot each of them stands."""
    read: slice = field(default_factory=lambda: slice(None))
    """The slots that attention gets."""
    places: int = 0
    """How many places each slot has; more than any row has needed so far."""
    _flat_index: dict[tuple[int, int], Tensor] = field(default_factory=dict)

    def point_at(self, slots_BT: Tensor, positions_BT: Tensor, *, read: slice) -> None:
        """What the next pass writes and reads."""
        self.slots_BT, self.positions_BT, self.read = slots_BT, positions_BT, read
        self._flat_index.clear()

    def flat_index(self, num_heads: int, num_places: int) -> Tensor:
        """Where new vectors [B, heads, T] go in a store seen as [slots * heads * places]."""
        key = num_heads, num_places
        if key not in self._flat_index:
            heads_H1 = torch.arange(num_heads, device=self.slots_BT.device)[:, None]
            first_BHT = (self.slots_BT[:, None] * num_heads + heads_H1) * num_places
            self._flat_index[key] = (first_BHT + self.positions_BT[:, None]).flatten()
        return self._flat_index[key]

    @property
    def max_places(self) -> int:
        return _whole_steps(self.capacity)

    def reserve(self, length: int) -> None:
        """Makes room for rows of this length."""
        if length > self.places:
            wanted = max(length, int(self.places * _GROWTH))
            self.places = min(_whole_steps(wanted), self.max_places)


def _whole_steps(places: int) -> int:
    return -(-places // _PLACES_STEP) * _PLACES_STEP


class SpareMemory:
    """Main memory that outgrown or finished caches have left, for the next ones.

    Fresh pages are slow, and a cache grows many times. So pieces in main memory are as large as a
    cache can become (pages that were never written take no room), and a store that grows takes the
    piece that the store before it has left. On an accelerator, PyTorch's allocator does the same.
    """

    def __init__(self, *, num_places: int) -> None:
        self.num_places = num_places
        self.free: list[torch.UntypedStorage] = []

    def take(self, like: Tensor, shape: tuple[int, int, int, int]) -> Tensor:
        """A contiguous tensor [rows, heads, places, head_dim]; its content is arbitrary."""
        size = math.prod(shape)
        for index, storage in enumerate(self.free):
            if storage.nbytes() >= size * like.element_size():
                return like.new_empty(0).set_(self.free.pop(index))[:size].view(shape)
        if like.device.type != "cpu":
            return like.new_empty(shape)
        num_rows, heads, places, head_dim = shape
        whole = like.new_empty(num_rows * heads * max(places, self.num_places) * head_dim)
        return whole[:size].view(shape)

    def give(self, store: Tensor | None) -> None:
        if store is not None and store.device.type == "cpu" and store.numel() > 0:
            self.free.append(store.untyped_storage())

    def keep(self, number: int) -> None:
        """Keeps so many of the largest pieces."""
        self.free = sorted(self.free, key=lambda storage: -storage.nbytes())[:number]


class RaggedLayer(CacheLayerMixin):
    """Keys and values [rows, heads, places, head_dim] of one layer.

    There are as many places as the longest row has needed so far: on a CPU, keys that lie close
    together are read two to three times faster than keys spread over the whole capacity.
    What is computed along for other rows is written behind their last token, where no mask shows it
    and their next tokens overwrite it.
    """

    def __init__(self, view: CacheView, memory: SpareMemory, *, num_rows: int) -> None:
        super().__init__()
        self.view, self.memory, self.num_rows = view, memory, num_rows

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.keys, self.values = (
            new.new_empty(self.num_rows, new.shape[1], 0, new.shape[3])
            for new in (key_states, value_states)
        )
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        # Rotation leaves keys in float32 under autocast; the product would round them, every time.
        key_states = key_states.to(value_states.dtype)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None and self.values is not None
        if self.keys.shape[2] < self.view.places:
            self.keys = self._grown(self.keys)
            self.values = self._grown(self.values)
        return self._write(self.keys, key_states), self._write(self.values, value_states)

    def _grown(self, store: Tensor) -> Tensor:
        num_rows, heads, present, head_dim = store.shape
        grown = self.memory.take(store, (num_rows, heads, self.view.places, head_dim))
        grown[:, :, :present] = store
        # A masked place still enters the product with weight zero, so it may hold no NaN.
        grown[:, :, present:] = 0
        self.memory.give(store)
        return grown

    def _write(self, store: Tensor, new: Tensor) -> Tensor:
        _, heads, places, head_dim = store.shape
        index = self.view.flat_index(heads, places)
        store.view(-1, head_dim).index_copy_(0, index, new.reshape(-1, head_dim))
        return store[self.view.read]

    def rearrange(self, sources: Sequence[int], targets: Sequence[int], *, length: int) -> None:
        """Copies the first `length` places of the source rows to the target rows, all at once."""
        if self.is_initialized:
            for store in (self.keys, self.values):
                assert store is not None
                store[targets, :, :length] = store[sources, :, :length]

    def forget(self) -> None:
        """Gives the memory back."""
        self.memory.give(self.keys)
        self.memory.give(self.values)
        self.keys = self.values = None
        self.is_initialized = False

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.view.places, 0

    def get_seq_length(self) -> int:
        return self.view.places

    def get_max_length(self) -> int:
        return -1
