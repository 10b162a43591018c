"""Foreign text cannot steer a terminal, and stays readable."""

import json
import unicodedata
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import ragen_apo
from ragen_apo.errors import ConfigError
from ragen_apo.printable import exception_in_words, printable, raised_in_words, shortened


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[2Jgone", "\\x1b[2Jgone"),
        ("\x9b31mred", "\\x9b31mred"),  # the C1 form of an escape sequence
        ("over\rwritten\x08", "over\\rwritten\\x08"),
        ("\u202egnp.exe\u2066", "\\u202egnp.exe\\u2066"),  # bidirectional override and isolate
        ("a\u200bb\ufeff", "a\\u200bb\\ufeff"),  # invisible
        ("tag \U000e0041", "tag \\U000e0041"),
        ("line\u2028line\x85", "line\\u2028line\\x85"),
        ("lone \ud800", "lone \\ud800"),
    ],
)
def test_what_steers_a_terminal_or_hides_becomes_a_visible_escape(text: str, shown: str) -> None:
    assert printable(text) == shown


@pytest.mark.parametrize(
    "text", ["Größe 你好 שלום", "two\nlines\tand tabs", "می\u200cخواهم", "👩\u200d🔬", "a\\x1bb"]
)
def test_ordinary_text_of_any_language_stays_as_it_is(text: str) -> None:
    assert printable(text) == text


@given(text=st.text(alphabet=st.characters()))
def test_nothing_that_steers_is_left_in_any_text(text: str) -> None:
    left = {unicodedata.category(character) for character in printable(text) if character != "\n"}
    assert not left & {"Cs", "Zl", "Zp"}
    assert "\x1b" not in printable(text)
    assert printable(printable(text)) == printable(text)
    printable(text).encode("utf-8")


def test_a_long_text_says_how_much_is_left_out() -> None:
    assert shortened("abcdef", 6) == "abcdef"
    assert shortened("a" * 2_006, 6) == "aaaaaa ... (2,000 more characters)"


def test_an_exception_is_told_in_bounded_length_also_where_its_repr_raises() -> None:
    class SilentError(Exception):
        def __repr__(self) -> str:
            raise RuntimeError

    assert exception_in_words(KeyError("x")) == "KeyError('x')"
    long = exception_in_words(ValueError("x" * 100_000))
    assert long.startswith("ValueError('xxx")
    assert len(long) <= 300
    assert "SilentError" in exception_in_words(SilentError())


def test_an_error_of_ours_is_its_sentence_in_one_line_without_its_type() -> None:
    assert exception_in_words(ConfigError("no key:\nset one")) == "no key: set one"
    assert len(exception_in_words(ConfigError("x" * 100_000))) < 400


@pytest.mark.parametrize(
    "call",
    [
        lambda: json.loads("{"),
        lambda: int("x"),
        lambda: np.random.default_rng(0).integers(0),  # raises in compiled code
    ],
)
def test_where_a_library_raises_the_line_that_called_it_is_named(
    call: Callable[[], object],
) -> None:
    with pytest.raises(ValueError) as caught:
        call()
    line = call.__code__.co_firstlineno
    assert raised_in_words(caught.value).endswith(f" in {__file__}, line {line}")


def test_where_only_libraries_are_on_the_way_the_last_of_them_is_named() -> None:
    with pytest.raises(ValueError) as caught:
        json.loads("{")
    assert caught.value.__traceback__ is not None
    caught.value.__traceback__ = caught.value.__traceback__.tb_next
    assert f" in {json.decoder.__file__}, line " in raised_in_words(caught.value)


def test_a_folder_whose_name_begins_as_the_package_is_no_part_of_it() -> None:
    mine = f"{Path(ragen_apo.__file__).parent}_of_mine/environment.py"
    with pytest.raises(ValueError) as caught:
        exec(compile("import json; json.loads('{')", mine, "exec"))
    assert caught.value.__traceback__ is not None
    caught.value.__traceback__ = caught.value.__traceback__.tb_next
    assert raised_in_words(caught.value).endswith(f" in {mine}, line 1")
