import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragen_apo.environments.webshop.tokens import MAX_TOKEN_LENGTH, STOP_WORDS, analyze, tokenize


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("a cat, two dogs", ["a", "cat", "two", "dogs"]),
        ("19.7x31.5in", ["19.7x31.5in"]),  # . joins digits, letters and digits join
        ("1,000.50;2", ["1,000.50;2"]),
        ("3.in", ["3", "in"]),  # . joins two digits or two letters, not a digit and a letter
        ("a.b:c'd", ["a.b:c'd"]),
        ("size:large", ["size:large"]),
        ("12:30", ["12", "30"]),  # : joins letters only
        ("a,b", ["a", "b"]),  # , joins digits only
        ("color：red", ["color：red"]),  # the full-width colon joins letters
        ("1⁄2 cup", ["1⁄2", "cup"]),  # the fraction slash joins digits
        ("men’s", ["men’s"]),
        ("snake_case _x_ __", ["snake_case", "_x_"]),
        ("t-shirt & slip-on", ["t", "shirt", "slip", "on"]),
        ("lego™ star®", ["lego", "™", "star", "®"]),
        ("▶ play ◀", ["▶", "play", "◀"]),
        ("☆ ✿ ➤ ¼ best", ["best"]),  # symbols that are no pictographs are no tokens
        ("★ ☞ ♡ best", ["★", "☞", "♡", "best"]),  # Extended_Pictographic, though not Emoji
        ("❤dear", ["❤", "dear"]),
        ("👍🏽ok", ["👍🏽", "ok"]),  # an emoji keeps its modifier
        ("👨‍👩‍👧 family", ["👨‍👩‍👧", "family"]),
        ("🇩🇪🇫🇷", ["🇩🇪", "🇫🇷"]),  # flags are pairs
        ("#️⃣ 1️⃣", ["#️⃣", "1️⃣"]),
        ("#\u20e3", ["#\u20e3"]),
        ("e\u0301tude", ["e\u0301tude"]),  # a combining mark stays with its letter
        ("中文 ひら カタカナ", ["中", "文", "ひ", "ら", "カタカナ"]),
        ("カタa", ["カタ", "a"]),
        ("ภาษาไทย", ["ภาษาไทย"]),
        ('רמב"ם', ['רמב"ם']),  # a double quote joins Hebrew letters
        ("", []),
    ],
)
def test_words_are_cut_where_lucene_cuts_them(text: str, tokens: list[str]) -> None:
    assert tokenize(text) == tokens


def test_the_short_pattern_for_ascii_cuts_as_the_full_one() -> None:
    text = "a.b 1,2 x_1 don't 3.5in: u.s.a. 10'6 _a_ a__b 1.a a:1 'q' b'' 7;8"
    full = tokenize(text + " é")
    assert tokenize(text) == full[:-1]


def test_words_longer_than_the_limit_are_cut_into_pieces() -> None:
    assert [len(token) for token in tokenize("a" * 600)] == [255, 255, 90]
    assert [len(token) for token in tokenize("é" * 600)] == [255, 255, 90]
    assert MAX_TOKEN_LENGTH == 255


def test_there_are_as_many_stop_words_as_in_lucene() -> None:
    assert len(STOP_WORDS) == 33


def test_stop_words_and_possessives_go_and_the_rest_is_stemmed() -> None:
    assert analyze("the women's running shoes for men’s and a dog") == [
        *("women", "run", "shoe", "men", "dog")
    ]


@given(st.text(max_size=300))
def test_any_text_gives_tokens_that_occur_in_it_in_order(text: str) -> None:
    position = 0
    for token in tokenize(text):
        assert 0 < len(token) <= MAX_TOKEN_LENGTH
        position = text.index(token, position) + len(token)


@pytest.mark.slow
@pytest.mark.parametrize(
    "piece",
    ["\u0301", "a.", "1,", "\u200d", "😀\u200d", "_", "_\u0301", "a\u0301\u0301.", "🇦", "a'", "ア"],
)
def test_a_hostile_text_of_30_000_characters_takes_well_under_a_minute(piece: str) -> None:
    start = time.perf_counter()
    tokenize(piece * (30_000 // len(piece)) + "é")
    assert time.perf_counter() - start < 20  # a quadratic form needs minutes; this one 0.1 s
