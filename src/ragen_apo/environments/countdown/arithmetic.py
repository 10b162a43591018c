"""Arithmetic with whole numbers as text: a reader that executes nothing, and a search for a target.

    expression := term (("+" | "-") term)*
    term       := factor (("*" | "/") factor)*
    factor     := number | "(" expression ")"

`×`, `÷` and `−` are read as well. Values are exact fractions.
"""

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

MAX_CHARACTERS = 200
"""Longer texts are no expressions; so numbers and results stay small."""
MAX_DEPTH = 20
"""Parentheses within each other; each of them takes several calls of Python's."""

OPERATORS: Mapping[str, Callable[[Fraction, Fraction], Fraction]] = {
    "+": lambda left, right: left + right,
    "-": lambda left, right: left - right,
    "*": lambda left, right: left * right,
    "/": lambda left, right: left / right,
}
_SAME = str.maketrans("×÷−", "*/-")
_TOKEN = re.compile(r"\s*([0-9]{1,6}|[-+*/()])", re.ASCII)


@dataclass(frozen=True)
class Expression:
    """The value of an expression, and its numbers in order."""

    value: Fraction
    numbers: tuple[int, ...]


class ExpressionError(ValueError):
    """The text is no expression; the message tells its writer why."""


def read_expression(text: str) -> Expression:
    """The expression in a text; raises ExpressionError for any other text."""
    if len(text) > MAX_CHARACTERS:
        raise ExpressionError("it is too long")
    reader = _Reader(_tokens(text.translate(_SAME).strip()))
    value = reader.expression()
    if reader.next is not None:
        raise ExpressionError(f"{reader.next} is not expected there")
    return Expression(value, tuple(reader.numbers))


def _tokens(text: str) -> list[str]:
    tokens: list[str] = []
    position = 0
    while position < len(text):
        found = _TOKEN.match(text, position)
        if found is None:
            raise ExpressionError("only numbers, + - * / and parentheses are read")
        tokens.append(found[1])
        position = found.end()
    return tokens


class _Reader:
    """Reads tokens from left to right, one method for each line of the grammar."""

    def __init__(self, tokens: Sequence[str]) -> None:
        self._tokens = tokens
        self._index = self._depth = 0
        self.numbers: list[int] = []

    @property
    def next(self) -> str | None:
        """The token to be read next; None at the end."""
        return self._tokens[self._index] if self._index < len(self._tokens) else None

    def expression(self) -> Fraction:
        return self._chain("+-", self._term)

    def _term(self) -> Fraction:
        return self._chain("*/", self._factor)

    def _chain(self, operators: str, operand: Callable[[], Fraction]) -> Fraction:
        value = operand()
        while self.next is not None and self.next in operators:
            operator = self._take()
            right = operand()
            if operator == "/" and right == 0:
                raise ExpressionError("it divides by zero")
            value = OPERATORS[operator](value, right)
        return value

    def _factor(self) -> Fraction:
        if self.next is None:
            raise ExpressionError("it ends too early")
        token = self._take()
        if token == "(":
            self._depth += 1
            if self._depth > MAX_DEPTH:
                raise ExpressionError("its parentheses are nested too deeply")
            value = self.expression()
            self._depth -= 1
            if self.next != ")":
                raise ExpressionError("a parenthesis is not closed")
            self._take()
            return value
        if not token.isdigit():
            raise ExpressionError(f"{token} is not expected there")
        self.numbers.append(int(token))
        return Fraction(int(token))

    def _take(self) -> str:
        token = self._tokens[self._index]
        self._index += 1
        return token


@dataclass(frozen=True)
class Part:
    """A number, and the expression that makes it."""

    value: int
    text: str
    steps: tuple[str, ...] = ()

    @property
    def as_operand(self) -> str:
        """The text as it stands inside another expression."""
        return f"({self.text})" if self.steps else self.text


def combine(left: Part, operator: str, right: Part) -> Part | None:
    """The two parts joined, or None where the result is no positive whole number."""
    if operator == "/" and (right.value == 0 or left.value % right.value):
        return None
    value = int(OPERATORS[operator](Fraction(left.value), Fraction(right.value)))
    if value < 1:
        return None
    step = f"{left.value} {operator} {right.value} = {value}"
    text = f"{left.as_operand} {operator} {right.as_operand}"
    return Part(value, text, (*left.steps, *right.steps, step))


@functools.lru_cache(maxsize=4096)
def find_expression(numbers: tuple[int, ...], target: int) -> Part | None:
    """A way to make the target from all the numbers by positive whole results, or None."""
    return _search([Part(number, str(number)) for number in sorted(numbers)], target, set())


def _search(parts: list[Part], target: int, failed: set[tuple[int, ...]]) -> Part | None:
    if len(parts) == 1:
        return parts[0] if parts[0].value == target else None
    values = tuple(sorted(part.value for part in parts))
    if values in failed:
        return None
    for first in range(len(parts)):
        for second in range(len(parts)):
            if first == second:
                continue
            rest = [part for index, part in enumerate(parts) if index not in (first, second)]
            for operator in OPERATORS:
                if operator in "+*" and first > second:
                    continue
                made = combine(parts[first], operator, parts[second])
                found = _search([made, *rest], target, failed) if made else None
                if found:
                    return found
    failed.add(values)
    return None
