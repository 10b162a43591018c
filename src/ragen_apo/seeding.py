"""Randomness as a function of seed, purpose and counters.

Every random choice of a run draws from a generator that is made on the spot from the run's seed, a
purpose and counters: `generator(seed, "task-order", epoch)`. Nothing carries generator state from
one step to the next, so the counters in a checkpoint are the state of all generators, and a resumed
run continues with the same draws. Python's `hash()` and global generators are never used.
"""

import hashlib

import numpy as np


def derive_seed(*parts: int | str) -> int:
    """A 63-bit seed from the parts, the same in every process and on every platform."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def generator(*parts: int | str) -> np.random.Generator:
    """A private counter-based generator (Philox) for the purpose named by the parts."""
    return np.random.Generator(np.random.Philox(derive_seed(*parts)))
