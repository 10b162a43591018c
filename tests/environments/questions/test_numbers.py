from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragen_apo.environments.questions.numbers import read_quantity, unboxed, unwrapped


def number_of(text: str) -> Fraction | None:
    quantity = read_quantity(text)
    return quantity and quantity.number


@pytest.mark.parametrize(
    ("text", "number"),
    [
        *(
            ("42", 42),
            ("007", 7),
            ("-5", -5),
            ("\u22125", -5),
            ("+3", 3),
            ("42.", 42),
            (" 42 ", 42),
        ),
        *(("1,234.50", Fraction("1234.5")), ("1{,}000", 1000), (".5", Fraction(1, 2))),
        *(("3/4", Fraction(3, 4)), ("-3/4", Fraction(-3, 4)), ("1 1/2", Fraction(3, 2))),
        *((r"\frac{3}{4}", Fraction(3, 4)), (r"-\dfrac{3}{4}", Fraction(-3, 4))),
        *((r"1\frac{1}{2}", Fraction(3, 2)), (r"\frac34", Fraction(3, 4))),
        *((r"\frac{-1}{2}", Fraction(-1, 2)), ("1.5e3", 1500), ("2E-1", Fraction(1, 5))),
        *(("$18", 18), (r"\$18.00", 18), ("-$5", -5), ("\u20ac 7", 7), ("$7$", 7), ("25%", 25)),
        *(
            ("18 dollars", 18),
            ("$18 per day", 18),
            ("3 m/s", 3),
            ("12 square feet.", 12),
            ("5cm", 5),
            ("100m", 100),
            ("20kWh", 20),
            ("5apples", 5),
            ("12 sq ft", 12),
            ("5 of them", 5),
            ("6 more apples", 6),
        ),
        *((r"5\text{ cm}", 5), (r"10^\circ", 10), ("10\u00b0", 10), (r"$\boxed{42}$", 42)),
        *(("x = 7", 7), ("3 + 4 = 7", 7)),
    ],
)
def test_a_number_is_read_exactly_without_its_signs_and_units(text: str, number: Fraction) -> None:
    assert number_of(text) == number


@pytest.mark.parametrize(
    "text",
    [
        *("", " ", "km", "seven", "3 million", "2 dozen", "7x", "2 pi", "5 e", "7 or eight"),
        *("3 + 4", "7-3", "2^3", "7 or 8", "7, 8", "1,2", "1,23", "1.2.3", "3:30", "2020-01-01"),
        *("4%2", "4$2", "4\u00b02", r"1\$000"),
        *(
            "2xy",
            "6ab",
            "2abc",
            "5 a",
            "2 xy",
            "2 sin x",
            "5 squared",
            "5 factorial",
            "5 choose n",
            "2 thirds",
        ),
        *(
            "3 thousands",
            "7 is wrong",
            "1/0",
            "1/2/3",
            "1e9999",
            "\u0663",
            "\ud800",
            "9" * 501,
            "nan",
            "inf",
        ),
    ],
)
def test_a_text_that_is_no_number_or_more_than_one_is_not_read(text: str) -> None:
    assert read_quantity(text) is None


@pytest.mark.parametrize(
    ("text", "unit"),
    [
        *(("7 PM", "pm"), ("5cm.", "cm"), ("$18 per day", "per day"), ("25% off", "off")),
        *(("$5$ cm", "cm"), ("$5\\text{ cm}$", "cm"), ("25%", ""), ("42.", ""), ("x = $7$", "")),
    ],
)
def test_the_words_behind_a_number_are_its_unit(text: str, unit: str) -> None:
    quantity = read_quantity(text)
    assert quantity is not None and quantity.unit == unit


@given(st.text(alphabet="0123456789+-/., e$%{}\\frac=", max_size=60))
def test_every_text_is_a_number_or_none(text: str) -> None:
    assert isinstance(number_of(text), (Fraction, type(None)))


@pytest.mark.slow
@given(st.fractions(max_denominator=10**6))
def test_a_fraction_is_read_as_python_writes_it(number: Fraction) -> None:
    assert number_of(str(number)) == number


@given(st.integers())
def test_thousands_may_be_separated(number: int) -> None:
    assert number_of(f"{number:,}") == number


def test_the_last_box_counts_with_the_braces_in_it() -> None:
    assert unboxed(r"so \boxed{1}, no, \boxed{\frac{1}{2}}.") == r"\frac{1}{2}"
    assert unboxed(r"\boxed{never closed") == r"\boxed{never closed"
    assert unwrapped(r"\boxed{\text{red}}") == "red"


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"so $\boxed 5$.", "5"),
        (r"so $\boxed {5}$.", "5"),
        (r"so $\fbox{5}$.", "5"),
        (r"$\boxed 12.5$", "12.5"),
        (r"a \boxed 3, then", "3"),
        (r"\boxedx", r"\boxedx"),
        (r"We get $\boxed 1\frac{1}{2}$.", r"1\frac{1}{2}"),
        (r"$\boxed (1, 2)$", "(1, 2)"),
        (r"Thus \boxed{18} is it. That is the \boxed answer here", "18"),
        (r"So $\boxed{7}$, as in \fbox{figure 2} above", "7"),
        (r"the \boxed answer", r"the \boxed answer"),
    ],
)
def test_a_box_may_have_a_space_or_no_braces(text: str, content: str) -> None:
    assert unboxed(text) == content
