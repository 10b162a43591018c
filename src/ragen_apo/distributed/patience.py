"""Questions to a host that may not answer: torch's store has no time limit for most of them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from ragen_apo.errors import RanksError

Answer = TypeVar("Answer")


def answer_within(seconds: float, question: Callable[[], Answer]) -> Answer | None:
    """What `question` returns; None where it takes longer, or fails as a store does.

    The question goes on in a thread that does not keep the process from ending.
    """
    answers: list[Answer] = []

    def ask() -> None:
        try:
            answers.append(question())
        except (RuntimeError, RanksError):
            return

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(seconds)
    return answers[0] if answers else None
