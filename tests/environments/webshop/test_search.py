import itertools
import random
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from ragen_apo.environments.webshop import search as search_module
from ragen_apo.environments.webshop.index_builder import IndexBuilder
from ragen_apo.environments.webshop.search import (
    NUM_RESULTS,
    SearchIndex,
    length_byte,
    length_of_byte,
)
from ragen_apo.environments.webshop.tokens import analyze
from tests.sweeps import quick_first

F = np.float32


def build(
    folder: Path, documents: list[str], *, chunk: int = 10_000, ranks: list[int] | None = None
) -> SearchIndex:
    folder.mkdir(exist_ok=True)
    builder = IndexBuilder(folder, chunk_postings=chunk)
    for text in documents:
        builder.add(text)
    builder.finish(np.array(ranks or range(len(documents)), dtype=np.int32))
    return SearchIndex(folder)


def random_documents(number: int, seed: int = 0) -> list[str]:
    draws = random.Random(seed)
    words = [f"word{rank}" for rank in range(60)]
    weights = [1 / (rank + 1) for rank in range(60)]
    return [
        " ".join(draws.choices(words, weights, k=draws.choice([3, 20, 41, 120])))
        for _ in range(number)
    ]


def recomputed_scores(documents: list[str], query: str) -> list[np.float32]:
    """Lucene's formula for each document by itself, one float32 operation after the other."""
    counts = [Counter(analyze(text)) for text in documents]
    lengths = [sum(count.values()) for count in counts]
    average = F(sum(lengths) / sum(length > 0 for length in lengths))
    scores: list[np.float32] = []
    for count, length in zip(counts, lengths, strict=True):
        total = 0.0
        for term, repeats in Counter(analyze(query)).items():
            if term not in count:
                continue
            frequency = sum(term in other for other in counts)
            num_documents = sum(length > 0 for length in lengths)
            idf = F(np.log(1 + (num_documents - frequency + 0.5) / (frequency + 0.5)))
            weight = F(F(repeats) * idf)
            kept = F(length_of_byte(length_byte(length)))
            norm = F(F(1) / F(F(0.9) * F(F(F(1) - F(0.4)) + F(F(F(0.4) * kept) / average))))
            total += float(F(weight - F(weight / F(F(1) + F(F(count[term]) * norm)))))
        scores.append(F(total))
    return scores


@pytest.mark.parametrize(
    "query", ["word0", "word1 word1 word7", "word59 word3 nothing", "word2 the"]
)
def test_scores_and_order_equal_an_independent_recomputation(tmp_path: Path, query: str) -> None:
    documents = random_documents(120)
    index = build(tmp_path / "index", documents)
    expected = recomputed_scores(documents, query)
    scores = index.score(query)
    assert scores is not None
    assert scores.tolist() == expected
    ranked = sorted((n for n in range(120) if expected[n] > 0), key=lambda n: (-expected[n], n))
    assert index.search(query).tolist() == ranked[:NUM_RESULTS]


def test_equal_documents_come_in_the_order_of_their_ids(tmp_path: Path) -> None:
    index = build(tmp_path / "index", ["red shoe"] * 70 + ["red red shoe"])
    assert index.search("red").tolist() == [70, *range(49)]


def test_an_index_of_many_chunks_equals_one_of_a_single_chunk(tmp_path: Path) -> None:
    documents = random_documents(50, seed=3)
    one = build(tmp_path / "one", documents)
    many = build(tmp_path / "many", documents, chunk=7)
    for query in ("word0 word5", "word1", "word30 word2 word2"):
        assert many.search(query).tolist() == one.search(query).tolist()
    assert not list((tmp_path / "many").glob("chunk-*"))


@pytest.mark.parametrize("num_seeds", quick_first([1, 60]))
def test_the_shortcut_for_many_postings_changes_nothing(
    num_seeds: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    documents = random_documents(1500, seed=1) + ["word0 word1"] * 80 + [""]
    ranks = random.Random(5).sample(range(len(documents)), len(documents))
    index = build(tmp_path / "index", documents, ranks=ranks)
    draws = random.Random(2)
    words = [f"word{rank}" for rank in range(60)]
    queries = [" ".join(draws.choices(words, k=draws.randint(1, 12))) for _ in range(150)]
    queries += ["word0 word1", "word0", "word59 unheardof", " ".join(words * 2)]
    expected = [index.search(query).tolist() for query in queries]
    monkeypatch.setattr(search_module, "MAX_SCANNED_POSTINGS", 0)
    monkeypatch.setattr(search_module, "NUM_SEEDS", num_seeds)
    assert [index.search(query).tolist() for query in queries] == expected


def test_postings_are_ordered_by_document_with_the_largest_score_beside(tmp_path: Path) -> None:
    documents = random_documents(90, seed=4)
    ranks = random.Random(6).sample(range(90), 90)
    build(tmp_path / "index", documents, ranks=ranks, chunk=50)
    names = ("offsets", "documents", "scores", "max_scores")
    offsets, places, scores, largest = (np.load(tmp_path / "index" / f"{n}.npy") for n in names)
    for row, (start, end) in enumerate(itertools.pairwise(offsets)):
        assert (np.diff(places[start:end]) > 0).all()
        assert largest[row] == scores[start:end].max()


@pytest.mark.parametrize("query", ["", "the of and", "unheardof", "☆", "\x00"])
def test_a_query_without_known_terms_finds_nothing(tmp_path: Path, query: str) -> None:
    index = build(tmp_path / "index", ["red shoe", "blue hat"])
    assert index.search(query).tolist() == []


def test_empty_documents_do_not_count(tmp_path: Path) -> None:
    # idf = ln(1 + (1 - 1 + 0.5) / (1 + 0.5)) with N = 1: the empty document is not in N.
    index = build(tmp_path / "index", ["", "red"])
    assert index.search("red").tolist() == [1]
    scores = index.score("red")
    assert scores is not None
    norm = 1 / (0.9 * (0.6 + 0.4 * 1 / 1))
    weight = np.log(1 + 0.5 / 1.5)
    assert scores[1] == pytest.approx(weight - weight / (1 + norm), rel=1e-6)


def test_an_index_without_documents_finds_nothing(tmp_path: Path) -> None:
    assert build(tmp_path / "index", [""]).search("red").tolist() == []


def test_lengths_are_kept_exactly_below_40_and_then_with_a_mantissa_of_3_bits() -> None:
    assert [length_of_byte(length_byte(n)) for n in range(41)] == list(range(41))
    # 41 = 24 + 17, 17 = 10001b keeps 1000: 16 + 24 = 40.
    assert length_of_byte(length_byte(41)) == 40
    # 1000 = 24 + 976, 976 = 1111010000b keeps 1111: 960 + 24 = 984.
    assert length_of_byte(length_byte(1000)) == 984
    assert length_byte(2**31 - 1) <= 255


def test_a_thousand_different_terms_in_a_query_are_allowed(tmp_path: Path) -> None:
    index = build(tmp_path / "index", ["red shoe"])
    query = " ".join(f"term{n}" for n in range(3000)) + " red"
    assert index.search(query).tolist() == [0]


def test_files_hold_no_pickle(tmp_path: Path) -> None:
    build(tmp_path / "index", ["red shoe"])
    for path in (tmp_path / "index").glob("*.npy"):
        np.load(path, allow_pickle=False)


def test_documents_are_numbered_by_the_rank_of_their_ids(tmp_path: Path) -> None:
    documents = ["red shoe and a very long tail of words", "red shoe", "blue"]
    plain = build(tmp_path / "plain", documents)
    turned = build(tmp_path / "turned", documents, ranks=[2, 0, 1])
    assert plain.search("red").tolist() == [1, 0]
    assert turned.search("red").tolist() == [0, 2]
    scores = [index.score("red") for index in (plain, turned)]
    assert scores[0] is not None
    assert scores[1] is not None
    assert scores[0].tolist() == [scores[1][rank] for rank in (2, 0, 1)]
