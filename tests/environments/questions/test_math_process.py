"""Hostile answers: neither the training process nor the next answer may suffer from one."""

import threading
import time

import pytest

from ragen_apo.environments.questions.math_process import equal_as_mathematics
from ragen_apo.environments.questions.math_worker import CPU_SECONDS

pytest.importorskip("math_verify", reason="math-verify is not installed")
pytestmark = pytest.mark.slow

HOSTILE = {
    "power": "10**10**10",
    "number_of_many_digits": "9" * 499,
    "braces": "{" * 400,
    "fractions": r"\frac{" * 60 + "1" + "}{2}" * 60,
    "parentheses": "(" * 240 + "x" + ")" * 240,
    "shallow_parentheses": "(" * 20 + "x" + ")" * 20,
    "sum": r"\sum_{n=1}^{10^{9}} \frac{1}{n}",
    "too_long": "1+" * 100_000,
    "surrogate": "\ud800",
    "lines": "1\n2\n3",
    "nothing": "",
    "dollars": "$" * 100,
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_answer_is_wrong_and_the_next_one_is_judged(name: str) -> None:
    started = time.process_time()
    assert not equal_as_mathematics(HOSTILE[name], "5x")
    assert time.process_time() - started < 1.0  # here; the other process has a limit of its own
    assert equal_as_mathematics(f"{len(name)}(x+y)", f"{len(name)}x+{len(name)}y")


def test_a_hostile_right_answer_does_no_harm_either_and_is_judged_once() -> None:
    """A tower of powers, which is as hostile as an answer."""
    assert not equal_as_mathematics("5", r"11^{10^{10}}")
    assert equal_as_mathematics("x+x+x", "3x")
    started = time.monotonic()
    assert not equal_as_mathematics("5", r"11^{10^{10}}")
    assert time.monotonic() - started < CPU_SECONDS / 2


def test_other_threads_can_ask() -> None:
    found: list[bool] = []
    threads = [
        threading.Thread(
            target=lambda n=n: found.append(equal_as_mathematics(f"{n}(a+b)", f"{n}a+{n}b"))
        )
        for n in range(2, 8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 6
