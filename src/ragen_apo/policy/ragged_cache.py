"""The KV cache of the generation engine, for rows of different lengths.

Each row has a slot and writes its keys and values at its own positions there. A mask hides the
positions that it has not written, or only its context is read.

Further axis (`ragen_apo.types` has the others): A attention heads. R and T are those of a forward
pass, whose tokens may belong to different slots.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

_POSITIONS_STEP = 64
"""The cache's length is a multiple of this."""
MAX_SPARE_BYTES = 256 * 2**20


@dataclass
class CacheView:
    """The slots and positions that one forward pass reads and writes, shared by all layers."""

    capacity: int
    """The longest context in tokens."""
    slots_RT: Tensor = field(default_factory=lambda: torch.zeros(0, 0, dtype=torch.long))
    """The slot of each token of the pass."""
    positions_RT: Tensor = field(default_factory=lambda: torch.zeros(0, 0, dtype=torch.long))
    """The position of each token in its slot."""
    read: slice = field(default_factory=lambda: slice(None))
    """The slots that attention gets."""
    num_positions: int = 0
    """The length of each slot, at least that of the longest context so far."""
    growth: float = 1.2
    """The smallest factor by which that length grows."""
    _flat_index: dict[tuple[int, int], Tensor] = field(default_factory=dict)

    def point_at(self, slots_RT: Tensor, positions_RT: Tensor, *, read: slice) -> None:
        """Sets what the next pass writes (slots, positions) and reads (`read`)."""
        self.slots_RT, self.positions_RT, self.read = slots_RT, positions_RT, read
        self._flat_index.clear()

    def flat_index(self, num_heads: int, num_positions: int) -> Tensor:
        """Indices of new vectors [R, heads, T] in a store seen as [slots * heads * positions]."""
        key = num_heads, num_positions
        if key not in self._flat_index:
            heads_A1 = torch.arange(num_heads, device=self.slots_RT.device)[:, None]
            first_RAT = (self.slots_RT[:, None] * num_heads + heads_A1) * num_positions
            self._flat_index[key] = (first_RAT + self.positions_RT[:, None]).flatten()
        return self._flat_index[key]

    @property
    def max_positions(self) -> int:
        return _whole_steps(self.capacity)

    def reserve(self, length: int) -> None:
        """Grows the slots to this length at least."""
        if length > self.num_positions:
            wanted = max(length, int(self.num_positions * self.growth))
            self.num_positions = min(_whole_steps(wanted), self.max_positions)


def _whole_steps(length: int) -> int:
    return -(-length // _POSITIONS_STEP) * _POSITIONS_STEP


class SpareMemory:
    """Reuses the main memory of caches that were outgrown or are finished.

    Fresh pages are slow, and a cache grows many times. So a piece is allocated as large as a cache
    can become (unwritten pages take no memory), and the next store to grow takes a free piece. On
    an accelerator, PyTorch's allocator does the same. More than `MAX_SPARE_BYTES` are not kept from
    one rollout to the next, as training has a better use for them.
    """

    def __init__(self, *, num_positions: int) -> None:
        self.num_positions = num_positions
        self.free: list[torch.UntypedStorage] = []

    def take(self, like: Tensor, shape: tuple[int, int, int, int]) -> Tensor:
        """A contiguous tensor [rows, heads, positions, head_dim]; its content is arbitrary."""
        size = math.prod(shape)
        for index, storage in enumerate(self.free):
            if storage.nbytes() >= size * like.element_size():
                return like.new_empty(0).set_(self.free.pop(index))[:size].view(shape)
        if like.device.type != "cpu":
            return like.new_empty(shape)
        num_rows, heads, num_positions, head_dim = shape
        whole = like.new_empty(num_rows * heads * max(num_positions, self.num_positions) * head_dim)
        return whole[:size].view(shape)

    def give(self, store: Tensor | None) -> None:
        if store is not None and store.device.type == "cpu" and store.numel() > 0:
            self.free.append(store.untyped_storage())

    def keep(self, number: int) -> None:
        """Keeps only this number of pieces, the largest; none if they take too much."""
        self.free = sorted(self.free, key=lambda storage: -storage.nbytes())[:number]
        if sum(storage.nbytes() for storage in self.free) > MAX_SPARE_BYTES:
            self.free = []


class RaggedLayer(CacheLayerMixin):
    """Keys and values [rows, heads, positions, head_dim] of one layer.

    They are as long as the longest context so far: on a CPU, keys that lie close together are read
    two to three times faster than keys spread over the whole capacity. A row without a new token
    is written as well, behind its last token, where the mask hides it and the next token overwrites
    it.
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
        if self.keys.shape[2] < self.view.num_positions:
            self.keys = self._grown(self.keys)
            self.values = self._grown(self.values)
        return self._write(self.keys, key_states), self._write(self.values, value_states)

    def _grown(self, store: Tensor) -> Tensor:
        num_rows, heads, present, head_dim = store.shape
        grown = self.memory.take(store, (num_rows, heads, self.view.num_positions, head_dim))
        grown[:, :, :present] = store
        # A masked position still enters the product with weight zero, so it may hold no NaN.
        grown[:, :, present:] = 0
        self.memory.give(store)
        return grown

    def _write(self, store: Tensor, new: Tensor) -> Tensor:
        _, heads, num_positions, head_dim = store.shape
        index = self.view.flat_index(heads, num_positions)
        store.view(-1, head_dim).index_copy_(0, index, new.reshape(-1, head_dim))
        return store[self.view.read]

    def rearrange(self, sources_R: Tensor, targets_R: Tensor, *, length: int) -> None:
        """Copies the first `length` positions of the source rows to the target rows, in one go."""
        if self.is_initialized:
            for store in (self.keys, self.values):
                assert store is not None
                store[targets_R, :, :length] = store[sources_R, :, :length]

    def forget(self) -> None:
        """Gives the memory back."""
        self.memory.give(self.keys)
        self.memory.give(self.values)
        self.keys = self.values = None
        self.is_initialized = False

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.view.num_positions, 0

    def get_seq_length(self) -> int:
        return self.view.num_positions

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length
    """Its name in transformers before 5.13."""
