import importlib.util

import pytest

from ragen_apo.environments.questions.comparing import Comparison, Mode, comparison
from ragen_apo.errors import ConfigError

needs_math_verify = pytest.mark.skipif(
    importlib.util.find_spec("math_verify") is None, reason="math-verify is not installed"
)
WITHOUT = {mode: Comparison(mode, None) for mode in ("auto", "text", "number")}


@pytest.mark.parametrize(
    ("answer", "right", "is_right"),
    [
        ("42", "42", True),
        ("42.0", "42", True),
        ("$42", "42 dollars", True),
        ("0.75", "3/4", True),
        ("41", "42", False),
        ("42 or 43", "42", False),
        ("paris.", "Paris", True),
        ("pairs", "Paris", False),
        ("Paris  France", "paris france", True),
        ("(B)", "b", True),
        ("B", "C", False),
        (r"\text{yes}", "Yes", True),
        ("2 + 3", "5", False),
        ("two thirds", "2/3", False),
    ],
)
def test_without_math_verify_numbers_are_compared_as_numbers_and_the_rest_as_text(
    answer: str, right: str, is_right: bool
) -> None:
    assert WITHOUT["auto"].is_right(answer, right) is is_right


@pytest.mark.parametrize("mode", ["auto", "number", "text"])
@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ("5", ".5"),
        ("5", "5!"),
        ("103", "10\u00b3"),
        ("x2", "x\u00b2"),
        ("10112", "1011\u2082"),
        ("11/2", "1\u00bd"),
        ("x <= 7", "x >= 7"),
        ("7", "x != 7"),
        ("2x = 7", "x = 7"),
        ("x^2 = 7", "7"),
    ],
)
def test_a_sign_that_changes_the_number_is_no_decoration(
    mode: Mode, answer: str, right: str
) -> None:
    assert not WITHOUT[mode].is_right(answer, right)
    assert not WITHOUT[mode].is_right(right, answer)


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ("0.5", ".5"),
        ("0.5", "\u00bd"),
        ("3/2", "1\u00bd"),
        ("1.5", "1\u00bd"),
        ("5 m\u00b2", "5 m\u00b2"),
        ("x = 7", "7"),
        ("the answer = 7", "7"),
        ("f(2) = 7", "7"),
        ("3 + 4 = 7", "7"),
        ("x = 3 + 4 = 7", "7"),
        ("5 m + 3 m = 8 m", "8"),
        ("7 apples + 2 apples = 9 apples", "9"),
        (r"\frac{1}{2} \times 4 = 2", "2"),
        ("Yes!", "yes"),
        ("No!", "no"),
        ("'Paris", "Paris"),
        ("dogs'", "dogs"),
        ("6'", "6"),
        (r"$\boxed 3\sqrt{2}$", r"3\sqrt{2}"),
        (r"\boxed{18} in \fbox{a frame}", "18"),
        ("5!", "5!"),
        (r"\(0\)", "0"),
        (r"\[ \frac{1}{2} \]", "1/2"),
        ("**42**", "42"),
        (r"**\(42\)**.", "42"),
        ("**Paris**", "paris"),
        ("**42** apples", "42"),
        ("***42***", "42"),
        ("**New** York", "new york"),
    ],
)
def test_a_number_may_be_written_as_the_end_of_its_computation(answer: str, right: str) -> None:
    assert WITHOUT["auto"].is_right(answer, right)


@needs_math_verify
@pytest.mark.parametrize(
    ("answer", "right"), [("120", "5!"), ("1000", "10\u00b3"), ("4", "2\u00b2"), ("x^2", "x\u00b2")]
)
def test_math_verify_reads_raised_digits_and_factorials(answer: str, right: str) -> None:
    assert comparison("auto").is_right(answer, right)


@pytest.mark.parametrize("mode", ["auto", "number"])
@pytest.mark.parametrize(
    ("answer", "right", "is_right"),
    [
        ("7 am", "7 pm", False),
        ("5 June", "5 May", False),
        ("24 days", "24 hours", False),
        ("3 Blind Mice", "3 Doors Down", False),
        ("10 Main Road", "10 Downing Street", False),
        ("7 PM.", "7 pm", True),
        ("7pm", "7 pm", True),
        ("$18", "18 dollars", True),
        ("3", "3 km", True),
        ("3 km", "3", True),
        ("3km", "3", True),
        ("5days", "5 days", True),
        ("18USD", "18", True),
        ("1", "1 third", False),
        ("2", "2theta", False),
        ("2", "2sinhx", False),
        ("8 quarters", "8", True),
        ("5 meters squared", "5", True),
        ("3m", "3 m", True),
        ("2", "2xy", False),
        ("2xy", "2", False),
    ],
)
def test_units_are_the_same_where_both_answers_have_one(
    mode: Mode, answer: str, right: str, is_right: bool
) -> None:
    assert WITHOUT[mode].is_right(answer, right) is is_right


@pytest.mark.parametrize("mode", WITHOUT)
@pytest.mark.parametrize("answer", ["4%2", "4$2", "4\u00b02", r"4\%2", r"4\left2"])
def test_a_sign_between_digits_does_not_join_them(mode: Mode, answer: str) -> None:
    assert not WITHOUT[mode].is_right(answer, "42")


@needs_math_verify
def test_math_verify_judges_products() -> None:
    auto = comparison("auto")
    assert auto.is_right("2yx", "2xy") and auto.is_right("5 m", "5m")
    assert not auto.is_right("2", "2xy")


@pytest.mark.parametrize("other", ["f'", "f!", "f''"])
def test_primes_and_factorials_make_another_text(other: str) -> None:
    assert not WITHOUT["auto"].is_right(other, "f") and not WITHOUT["auto"].is_right("f", other)


def test_a_text_is_right_although_its_number_cannot_be_read() -> None:
    assert WITHOUT["auto"].is_right('"3 Doors Down"', "3 Doors Down")


def test_text_is_compared_as_text_even_where_it_is_a_number() -> None:
    assert not WITHOUT["text"].is_right("42.0", "42")
    assert WITHOUT["text"].is_right(" 42.", "42")


def test_only_a_number_is_a_number() -> None:
    assert WITHOUT["number"].is_right("1,000", "1000")
    assert not WITHOUT["number"].is_right("red", "red")


@needs_math_verify
@pytest.mark.slow
@pytest.mark.parametrize(
    ("answer", "right", "is_right"),
    [
        ("x(x+1)", "x^2 + x", True),
        (r"\frac{\sqrt{8}}{2}", r"\sqrt{2}", True),
        (r"$\boxed{2\sqrt{2}}$", r"\sqrt{8}", True),
        ("(2,1)", "(1,2)", False),
        (r"\sqrt{3}", r"\sqrt{2}", False),
        (r"\[ \frac{\sqrt{8}}{2} \]", r"\(\sqrt{2}\)", True),
        (r"\left(2,1\right)", "(1,2)", False),
    ],
)
def test_math_verify_compares_what_is_no_number(answer: str, right: str, is_right: bool) -> None:
    assert comparison("auto").is_right(answer, right) is is_right


@needs_math_verify
@pytest.mark.slow
def test_a_sum_is_no_answer_to_what_it_is_except_as_mathematics() -> None:
    assert not comparison("auto").is_right("3 + 4", "7")
    assert comparison("math").is_right("3 + 4", "7")


@needs_math_verify
@pytest.mark.slow
def test_the_letters_of_a_word_are_no_product() -> None:
    assert not comparison("auto").is_right("pairs", "Paris")


def test_asking_for_math_verify_without_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ragen_apo.environments.questions.comparing.LIBRARY", "no-such-package")
    with pytest.raises(ConfigError, match=r"pip install 'ragen-apo\[math\]'"):
        comparison("math")
    assert comparison("auto") == WITHOUT["auto"]


@pytest.mark.parametrize("mode", ["auto", "math"])
@needs_math_verify
def test_the_version_says_whether_and_which_math_verify_judges(mode: Mode) -> None:
    used = comparison(mode)
    assert used.version == f"5-{mode}-math-verify{used.library_version}"
    assert Comparison(mode, None).version == f"5-{mode}"
