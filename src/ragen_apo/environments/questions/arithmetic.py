"""Generated questions: what a row of additions, subtractions and multiplications is.

What is 3 + 4 * 2?        4 * 2 = 8; 3 + 8 = 11
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from ragen_apo.environments.toolkit.task_draws import Description

Operation = Literal["+", "-", "*"]

_INSTRUCTION = re.compile(r"What is (\d+(?: [-+*] \d+)+)\?", re.ASCII)
_APPLIED: dict[str, Callable[[int, int], int]] = {
    "+": lambda left, right: left + right,
    "-": lambda left, right: left - right,
    "*": lambda left, right: left * right,
}


@dataclass(frozen=True)
class Step:
    """One operation carried out."""

    text: str
    result: int


def draw_question(
    min_terms: int,
    max_terms: int,
    max_number: int,
    operations: tuple[Operation, ...],
    draws: np.random.Generator,
) -> str:
    """A random expression, `3 + 4 * 2`; every number of terms is equally likely."""
    num_terms = int(draws.integers(min_terms, max_terms + 1))
    numbers = draws.integers(1, max_number + 1, size=num_terms)
    parts = [str(numbers[0])]
    for number in numbers[1:]:
        parts += [operations[draws.integers(len(operations))], str(number)]
    return " ".join(parts)


def describe_question(expression: str) -> Description:
    """The fields of its task; its category is the number of terms."""
    num_terms = 1 + len(expression.split()) // 2
    return Description(
        instruction=f"What is {expression}?",
        category=f"terms: {num_terms}",
        payload={"answer": str(steps_of(expression)[-1].result)},
    )


def expression_of(instruction: str) -> str | None:
    """The expression that a question asks for; None where it asks something else."""
    found = _INSTRUCTION.search(instruction)
    return found[1] if found else None


def steps_of(expression: str) -> list[Step]:
    """From left to right, multiplications first; one step fewer than there are terms."""
    parts = expression.split()
    numbers, signs = [int(part) for part in parts[::2]], parts[1::2]
    steps = []
    while signs:
        at = signs.index("*") if "*" in signs else 0
        left, right = numbers[at : at + 2]
        result = _APPLIED[signs[at]](left, right)
        steps.append(Step(f"{left} {signs[at]} {right} = {result}", result))
        numbers[at : at + 2] = [result]
        del signs[at]
    return steps
