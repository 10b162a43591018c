import itertools
import re
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragen_apo.environments.base import make_environment
from ragen_apo.environments.countdown.arithmetic import (
    OPERATORS,
    ExpressionError,
    Part,
    combine,
    find_expression,
    read_expression,
)
from ragen_apo.types import Task, make_task


def task_of(*numbers: int, target: int) -> Task:
    return make_task(
        environment="countdown",
        instruction=f"Make {target} from {', '.join(map(str, numbers))}.",
        split="train",
        category="",
        payload={"numbers": list(numbers), "target": target},
    )


@pytest.mark.parametrize(
    ("text", "value", "numbers"),
    [
        ("2 + 3 * 4", 14, (2, 3, 4)),
        ("(2+3)*4", 20, (2, 3, 4)),
        ("8 - 3 - 2", 3, (8, 3, 2)),
        ("8 / 4 / 2", 1, (8, 4, 2)),
        ("7 / 2", Fraction(7, 2), (7, 2)),
        ("2 × 3 − 4 ÷ 2", 4, (2, 3, 4, 2)),
        ("((5))", 5, (5,)),
    ],
)
def test_an_expression_has_the_value_that_arithmetic_gives_it(
    text: str, value: Fraction, numbers: tuple[int, ...]
) -> None:
    expression = read_expression(text)
    assert (expression.value, expression.numbers) == (value, numbers)


@pytest.mark.parametrize(
    "text",
    [
        *("", "+", "2 +", "(2", "2)", "2 3", "-2", "2 ** 3", "2 // 3", "1e5", "0x10", "x", "2.5"),
        *("3 / (2 - 2)", "__import__('os')", "a + b", "٣ + 1", "1234567", "(" * 300, "1+" * 300),
        "\ud800",
    ],
)
def test_a_text_that_is_no_expression_is_refused(text: str) -> None:
    with pytest.raises(ExpressionError):
        read_expression(text)


@given(st.text(alphabet="0123456789+-*/() ×÷", max_size=60))
def test_every_text_is_an_expression_or_refused(text: str) -> None:
    try:
        expression = read_expression(text)
    except ExpressionError:
        return
    assert isinstance(expression.value, Fraction)
    assert expression.numbers


@st.composite
def expressions(draw: st.DrawFn, depth: int = 3) -> str:
    if depth == 0 or draw(st.booleans()):
        return str(draw(st.integers(0, 99)))
    left, right = draw(expressions(depth - 1)), draw(expressions(depth - 1))
    return f"({left} {draw(st.sampled_from('+-*/'))} {right})"


@pytest.mark.slow
@given(expressions())
def test_the_reader_agrees_with_python(text: str) -> None:
    exact = re.sub(r"\d+", r"Fraction(\g<0>)", text)
    try:
        expected = eval(exact, {"Fraction": Fraction})
    except ZeroDivisionError:
        with pytest.raises(ExpressionError, match="divides by zero"):
            read_expression(text)
        return
    assert read_expression(text).value == expected


def reachable(numbers: tuple[int, ...]) -> set[int]:
    """All targets that positive whole results lead to, by trying every order and operation."""
    if len(numbers) == 1:
        return {numbers[0]}
    found: set[int] = set()
    for i, j in itertools.permutations(range(len(numbers)), 2):
        rest = [numbers[k] for k in range(len(numbers)) if k not in (i, j)]
        for operator in OPERATORS:
            made = combine(Part(numbers[i], ""), operator, Part(numbers[j], ""))
            if made:
                found |= reachable((made.value, *rest))
    return found


@pytest.mark.parametrize("numbers", [(3, 5, 2), (7, 7, 1), (4, 6, 10), (2, 3, 5, 7)])
def test_the_search_finds_exactly_the_targets_that_can_be_made(numbers: tuple[int, ...]) -> None:
    targets = reachable(numbers)
    for target in range(1, 120):
        found = find_expression(numbers, target)
        assert (found is not None) == (target in targets)
        if found:
            expression = read_expression(found.text)
            assert expression.value == target
            assert sorted(expression.numbers) == sorted(numbers)
            assert found.steps[-1].endswith(f"= {target}")


def test_the_first_attempt_earns_all_or_the_form_or_nothing() -> None:
    environment = make_environment("countdown", {})
    task = task_of(3, 5, 2, target=16)
    for action, reward, success in [
        ("(3 + 5) * 2", 1.0, True),
        ("(3 + 5) * 2 = 16", 1.0, True),
        ("2 * (5 + 3) = 99", 1.0, True),
        ("3 + 5 * 2", 0.1, False),
        ("8 * 2", 0.1, False),
        ("sixteen", 0.0, False),
    ]:
        environment.reset(task, seed=0)
        _, earned, terminated, truncated, info = environment.step(action)
        assert (earned, info["success"]) == (reward, success)
        assert terminated == success
        assert truncated == (not success)


def test_nothing_may_follow_an_expression_however_far_behind() -> None:
    environment = make_environment("countdown", {})
    environment.reset(task_of(3, 5, 2, target=16), seed=0)
    text, reward, *_ = environment.step(f"(3 + 5) * 2 = 16{' ' * 1000}or not")
    assert (text, reward) == ("Invalid expression: it is too long.", 0.0)


def test_more_attempts_do_not_earn_more_than_one() -> None:
    environment = make_environment("countdown", {"max_turns": 4})
    environment.reset(task_of(3, 5, 2, target=16), seed=0)
    answers = [environment.step(text) for text in ("8 * 2", "3 + 5 - 2", "dunno", "(5 + 3) * 2")]
    assert [answer[1] for answer in answers] == pytest.approx([0.1, 0.0, 0.0, 0.9])
    assert [answer[0] for answer in answers] == [
        "Use each of 2, 3, 5 once.",
        "That is 6, not 16.",
        "Invalid expression: only numbers, + - * / and parentheses are read.",
        "That is 16.",
    ]
    assert answers[0][4]["flags"] == ("wrong_numbers",)
    assert answers[2][4]["invalid_action"] is True


@pytest.mark.slow
def test_every_task_can_be_solved_within_its_limits() -> None:
    environment = make_environment("countdown", {"num_numbers": 4, "max_target": 50})
    for task in [*environment.tasks("train")[:50], *environment.tasks("test")[:20]]:
        numbers, target = tuple(task.payload["numbers"]), task.payload["target"]
        assert len(numbers) == 4
        assert 1 <= target <= 50
        assert find_expression(numbers, target) is not None


@pytest.mark.parametrize("text", ["(" * 200, "(" * 100 + "1" + ")" * 99])
def test_parentheses_end_before_the_stack_does(text: str) -> None:
    with pytest.raises(ExpressionError, match="nested too deeply"):
        read_expression(text)


def test_some_nesting_is_read() -> None:
    assert read_expression("(" * 15 + "7" + ")" * 15).value == 7
