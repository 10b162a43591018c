import pytest

from ragen_apo.environments.webshop.stemming import stem

# From Porter's paper (1980), and the departures that its author published later.
PAPER = {
    "caresses": "caress", "ponies": "poni", "ties": "ti", "caress": "caress", "cats": "cat",
    "feed": "feed", "agreed": "agre", "plastered": "plaster", "bled": "bled", "motoring": "motor",
    "sing": "sing", "conflated": "conflat", "troubled": "troubl", "sized": "size", "hopping": "hop",
    "tanned": "tan", "falling": "fall", "hissing": "hiss", "fizzed": "fizz", "failing": "fail",
    "filing": "file", "happy": "happi", "sky": "sky", "relational": "relat",
    "conditional": "condit", "rational": "ration", "valenci": "valenc", "digitizer": "digit",
    "conformabli": "conform", "radicalli": "radic", "vietnamization": "vietnam",
    "operator": "oper", "feudalism": "feudal", "decisiveness": "decis", "sensibiliti": "sensibl",
    "triplicate": "triplic", "formative": "form", "electrical": "electr", "hopeful": "hope",
    "goodness": "good", "revival": "reviv", "allowance": "allow", "airliner": "airlin",
    "replacement": "replac", "adoption": "adopt", "activate": "activ", "effective": "effect",
    "probate": "probat", "rate": "rate", "cease": "ceas", "controll": "control", "roll": "roll",
}  # fmt: skip


@pytest.mark.parametrize(("word", "expected"), PAPER.items())
def test_the_examples_of_the_paper_are_stemmed_as_printed_there(word: str, expected: str) -> None:
    assert stem(word) == expected


@pytest.mark.parametrize(
    ("word", "expected"),
    [("as", "as"), ("is", "is"), ("possibly", "possibl"), ("archaeology", "archaeolog")],
)
def test_the_later_departures_of_its_author_hold(word: str, expected: str) -> None:
    assert stem(word) == expected


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("ies", "i"),
        ("ion", "ion"),
        ("eed", "eed"),
        ("19.7x31.5in", "19.7x31.5in"),
        ("café", "café"),
    ],
)
def test_words_at_the_edges_of_the_rules_do_not_break_it(word: str, expected: str) -> None:
    assert stem(word) == expected


def test_the_stems_equal_those_of_an_independent_implementation() -> None:
    porter = pytest.importorskip("nltk.stem.porter", reason="nltk is not installed")
    other = porter.PorterStemmer(porter.PorterStemmer.MARTIN_EXTENSIONS)
    suffixes = ["ational", "izing", "ed", "eed", "ies", "ness", "ement", "sion", "logi", "ll", "y"]
    words = [
        start + end for start in ("", "a", "b", "hop", "rel", "try", "oxy") for end in suffixes
    ]
    assert [stem(word) for word in words] == [other.stem(word) for word in words]
