r"""Comparison with math-verify in a process of its own, bounded in time and memory.

math-verify reads LaTeX with sympy, which can compute for ever (`10^{10^{10}}`) or take all memory.
Its own time limits are signals: they work in the main thread only, and not while C code computes.
So a second process does it (`math_worker`), one for each process that asks, started when first
needed. One that does not answer is killed, and what it was asked counts as not equal.
"""

import atexit
import functools
import itertools
import json
import os
import subprocess
import threading

from ragen_apo.environments.questions.math_worker import READY
from ragen_apo.environments.questions.numbers import formula_in
from ragen_apo.environments.toolkit.line_process import LineProcess
from ragen_apo.errors import EnvironmentFaultError

MAX_CHARACTERS = 500
"""Longer answers are not equal to anything."""
MAX_DEPTH = 20
"""Of brackets; nor are more deeply nested answers."""
WALL_SECONDS = 60.0
"""For an answer of a process that gets no processor, so that its limit of that does not end it."""
START_SECONDS = 120.0
_WORKER = "ragen_apo.environments.questions.math_worker"


class _Worker(LineProcess):
    """A running process."""

    def __init__(self) -> None:
        super().__init__(_WORKER, errors=subprocess.DEVNULL)
        if (self.answer(within_seconds=START_SECONDS) or "").strip() != READY:
            self.kill()
            raise EnvironmentFaultError(
                "the process that compares answers with math-verify could not be started; see "
                "whether `python -c 'import math_verify'` works, or choose environment.compare: "
                "text or number"
            )

    def ask(self, answer: str, right: str) -> bool | None:
        """Its answer; None where it gave none, and then it is of no more use."""
        self.send(json.dumps([answer, right]))
        line = self.answer(within_seconds=WALL_SECONDS)
        return None if line is None else json.loads(line)


_lock = threading.Lock()
_workers: dict[int, _Worker] = {}
"""The worker of each process, by its number: a fork does not use its parent's."""


@functools.lru_cache(maxsize=4096)
def equal_as_mathematics(answer: str, right: str) -> bool:
    """Whether math-verify takes the answer for the right one; False where it finds no end.

    Raises EnvironmentFaultError where math-verify cannot be started at all.
    """
    texts = _latex(answer), _latex(right)
    if not all(map(_is_readable, texts)):
        return False
    with _lock:
        worker, equal = _worker(), None
        try:
            equal = worker.ask(*texts)
        finally:
            # Ctrl-C between question and answer, too: the next would read this one's answer.
            if equal is None:
                _workers.pop(os.getpid()).kill()
    return equal is True


def _worker() -> _Worker:
    own = os.getpid()
    if own in _workers and not _workers[own].is_running:
        _workers.pop(own).kill()
    if own not in _workers:
        _workers[own] = _Worker()
    return _workers[own]


def _is_readable(text: str) -> bool:
    """Whether it is worth asking: deep nesting only ends the process."""
    opened = itertools.accumulate(
        {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}.get(character, 0) for character in text
    )
    return 0 < len(text) <= MAX_CHARACTERS and max(opened) <= MAX_DEPTH


def _latex(text: str) -> str:
    """What stands between dollar signs; lone surrogates cannot be sent."""
    return formula_in(text).replace("$", " ").encode("utf-8", "replace").decode("utf-8").strip()


@atexit.register
def _stop() -> None:
    own = _workers.pop(os.getpid(), None)
    if own is not None:
        own.kill()
