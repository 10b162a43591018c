"""Python's and NumPy's global generators, from which environments of other packages draw."""

import contextlib
import random
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np

_LOCK = threading.RLock()
"""An environment may play another one within its own block."""


@contextlib.contextmanager
def borrowed_generators() -> Iterator[None]:
    """The block may set them and draw; afterwards they are as before. One thread at a time."""
    with _LOCK:
        before = generator_states()
        try:
            yield
        finally:
            set_generators(before)


def seed_generators(seed: int) -> None:
    """Sets both; numbers of any size."""
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 (the generator that others draw from)


def generator_states() -> tuple[Any, Any]:
    """Where both are, for `set_generators`."""
    return random.getstate(), np.random.get_state()  # noqa: NPY002


def set_generators(states: tuple[Any, Any]) -> None:
    """Sets both to where they were."""
    random.setstate(states[0])
    np.random.set_state(states[1])  # noqa: NPY002
