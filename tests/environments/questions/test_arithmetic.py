import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragen_apo.environments.questions.arithmetic import describe_question, expression_of, steps_of


@st.composite
def expressions(draw: st.DrawFn) -> str:
    parts = [str(draw(st.integers(1, 99)))]
    for _ in range(draw(st.integers(1, 6))):
        parts += [draw(st.sampled_from("+-*")), str(draw(st.integers(1, 99)))]
    return " ".join(parts)


@given(expressions())
def test_the_last_step_has_the_value_that_python_finds(expression: str) -> None:
    steps = steps_of(expression)
    assert steps[-1].result == eval(expression)
    assert len(steps) == len(expression.split()) // 2


@given(expressions())
def test_the_expression_can_be_read_back_from_the_question(expression: str) -> None:
    assert expression_of(describe_question(expression).instruction) == expression


@pytest.mark.parametrize("text", ["", "What is 3?", "What is 3 / 4?", "What is \u0663 + 1?"])
def test_another_question_has_no_expression(text: str) -> None:
    assert expression_of(text) is None


def test_the_category_is_the_number_of_terms() -> None:
    assert describe_question("3 + 4 * 2").category == "terms: 3"
    assert describe_question("3 + 4 * 2").payload == {"answer": "11"}
