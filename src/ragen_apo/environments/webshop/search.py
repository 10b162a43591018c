"""BM25 search with Lucene's arithmetic: the top products of a memory-mapped index.

`SearchIndex` maps a folder that index_builder.py wrote and answers queries. Equations (k1 = 0.9,
b = 0.4, all float32):

    idf   = ln(1 + (N - df + 0.5) / (df + 0.5))
    norm  = 1 / (k1 ((1 - b) + b L / avgdl))      L: the length as SmallFloat keeps it in a byte
    score = sum over terms of  w - w / (1 + f norm),   w = (count in the query) idf

The sum is taken in float64 and rounded to float32. Order: score descending, ties by document id
ascending; documents are numbered in the order of their ids, so a tie goes to the lower number.

Queries with many postings are answered without scoring every document, with the same result
(MaxScore). A term's largest score bounds what it can add. `threshold` is a score that 50 documents
have reached. Once it exceeds everything that the terms not yet read can add, only documents that
were already seen matter.

Sources: Lucene's BM25Similarity and SmallFloat; Robertson and Zaragoza, "The Probabilistic
Relevance Framework", 2009; Turtle and Flood, "Query Evaluation", 1995.
"""

import bisect
import functools
import json
import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from ragen_apo.environments.webshop.tokens import analyze

NUM_RESULTS = 50
TERM_CACHE_SIZE = 65536
MAX_SCANNED_POSTINGS = 50_000
"""Queries with fewer postings are not worth a shortcut."""
MAX_SHORTCUT_TERMS = 100
"""Queries with more terms are long texts for which a shortcut does not pay."""
NUM_SEEDS = 300
"""Documents whose whole score is worked out to find a threshold."""
_SLACK: Final = 1e-5
"""Bounds are widened by this share: scores are rounded to float32, and ties must not be lost."""

K1: Final = np.float32(0.9)
B: Final = np.float32(0.4)
_EXACT_LENGTHS = 24
"""Lucene's byte holds 0 to 23 as they are; from there on a float of 4 significant bits."""


def length_byte(length: int) -> int:
    """The byte in which Lucene stores a document's length (SmallFloat.intToByte4)."""
    if length < _EXACT_LENGTHS:
        return length
    rest = length - _EXACT_LENGTHS
    shift = rest.bit_length() - 4
    encoded = rest if shift < 0 else ((rest >> shift) & 7) | ((shift + 1) << 3)
    return _EXACT_LENGTHS + encoded


def length_of_byte(byte: int) -> int:
    """The length that a stored byte stands for: at most the true one (SmallFloat.byte4ToInt)."""
    if byte < _EXACT_LENGTHS:
        return byte
    encoded = byte - _EXACT_LENGTHS
    shift = (encoded >> 3) - 1
    return _EXACT_LENGTHS + ((encoded & 7) if shift < 0 else ((encoded & 7) | 8) << shift)


def inverse_norms(average_length: np.float32) -> npt.NDArray[np.float32]:
    """`norm` of the equation for each of the 256 length bytes."""
    lengths = np.array([length_of_byte(byte) for byte in range(256)], dtype=np.float32)
    one = np.float32(1)
    return one / (K1 * ((one - B) + B * lengths / average_length))


def inverse_document_frequency(num_documents: int, frequency: int) -> np.float32:
    """`idf` of the equation: in double precision, then rounded."""
    return np.float32(math.log(1 + (num_documents - frequency + 0.5) / (frequency + 0.5)))


def term_scores(
    weight: np.float32, counts: npt.NDArray[np.int32], norms: npt.NDArray[np.float32]
) -> npt.NDArray[np.float32]:
    """What a term of this weight adds to each document that has it `counts` times."""
    return weight - weight / (np.float32(1) + counts.astype(np.float32) * norms)


@dataclass(frozen=True)
class _Term:
    """A term of a query: its postings, how often the query has it, the most that it can add."""

    start: int
    end: int
    count: int
    bound: float


class SearchIndex:
    """A memory-mapped index, read-only, shared by everything that opens the same folder."""

    def __init__(self, folder: Path) -> None:
        facts = json.loads((folder / "index.json").read_text(encoding="utf-8"))
        self.num_slots: int = facts["num_slots"]
        self._num_documents: int = facts["num_documents"]
        self._norms = inverse_norms(np.float32(facts["average_length"] or 1.0))

        def mapped(name: str) -> npt.NDArray:
            # A plain view of the mapping: np.memmap's own slicing costs a microsecond each time.
            return np.asarray(np.load(folder / f"{name}.npy", mmap_mode="r"))

        self._offsets, self._documents = mapped("offsets"), mapped("documents")
        self._counts, self._scores = mapped("counts"), mapped("scores")
        self._length_bytes = mapped("length_bytes")
        self._term_rows, self._term_ends = mapped("term_rows"), mapped("term_ends")
        self._term_bytes = mapped("term_bytes")
        self._max_scores = mapped("max_scores")
        self._term_of = functools.lru_cache(TERM_CACHE_SIZE)(self._find_term)

    def search(self, query: str) -> npt.NDArray[np.int64]:
        """The numbers of the at most 50 best documents for a lower-cased query, best first."""
        terms = self._terms_of(query)
        if not terms:
            return np.zeros(0, dtype=np.int64)
        num_postings = sum(term.end - term.start for term in terms)
        if num_postings > MAX_SCANNED_POSTINGS and len(terms) <= MAX_SHORTCUT_TERMS:
            hits = _Shortcut(self, terms).candidates()
            values = self.scores_of(hits, terms).astype(np.float32)
        else:
            scores = self._score_all(terms)
            hits = np.flatnonzero(scores)
            values = scores[hits]
        if len(hits) > NUM_RESULTS:
            kth = len(values) - NUM_RESULTS
            best = values >= np.partition(values, kth)[kth]
            hits, values = hits[best], values[best]
        return hits[np.argsort(-values, kind="stable")[:NUM_RESULTS]].astype(np.int64)

    def score(self, query: str) -> npt.NDArray[np.float32] | None:
        """The score of every document, 0 where no term occurs; None where none has a term."""
        terms = self._terms_of(query)
        return self._score_all(terms) if terms else None

    def _terms_of(self, query: str) -> list[_Term]:
        terms: list[_Term] = []
        for text, count in Counter(analyze(query)).items():
            start, end, max_score = self._term_of(text)
            if start < end:
                terms.append(_Term(start, end, count, max_score * count * (1 + _SLACK)))
        return terms

    def _score_all(self, terms: list[_Term]) -> npt.NDArray[np.float32]:
        total = np.zeros(self.num_slots, dtype=np.float64)
        for term in terms:
            total[self.documents_of(term)] += self.all_scores(term)
        return total.astype(np.float32)

    def documents_of(self, term: _Term) -> npt.NDArray[np.int32]:
        """The documents that have a term, ascending."""
        return self._documents[term.start : term.end]

    def all_scores(self, term: _Term) -> npt.NDArray[np.float32]:
        """What a term adds to each of its documents."""
        return self._term_scores(term, slice(term.start, term.end))

    def _term_scores(
        self, term: _Term, indices: slice | npt.NDArray[np.int64]
    ) -> npt.NDArray[np.float32]:
        """What a term adds at these indices of the postings."""
        if term.count == 1:
            return self._scores[indices]
        frequency = term.end - term.start
        weight = np.float32(term.count) * inverse_document_frequency(self._num_documents, frequency)
        norms = self._norms[self._length_bytes[self._documents[indices]]]
        return term_scores(weight, self._counts[indices], norms)

    def looked_up(self, term: _Term, documents: npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:
        """What a term adds to some documents, 0 where one does not have it."""
        of_term = self.documents_of(term)
        indices = np.searchsorted(of_term, documents)
        indices[indices == len(of_term)] = 0
        found = np.flatnonzero(of_term[indices] == documents)
        added = np.zeros(len(documents), dtype=np.float32)
        added[found] = self._term_scores(term, indices[found] + term.start)
        return added

    def scores_of(
        self, documents: npt.NDArray[np.integer], terms: list[_Term]
    ) -> npt.NDArray[np.float64]:
        """The scores of some documents, summed in the order in which all are scored."""
        narrow = documents.astype(np.int32)
        total = np.zeros(len(narrow), dtype=np.float64)
        for term in terms:
            total += self.looked_up(term, narrow)
        return total

    def _find_term(self, term: str) -> tuple[int, int, float]:
        """Where the postings of a term lie, and its largest score; an empty span if unknown."""
        wanted = term.encode("utf-8", "surrogatepass")
        indices = range(len(self._term_rows))
        index = bisect.bisect_left(indices, wanted, key=self._term)
        if index == len(indices) or self._term(index) != wanted:
            return 0, 0, 0.0
        row = int(self._term_rows[index])
        return int(self._offsets[row]), int(self._offsets[row + 1]), float(self._max_scores[row])

    def _term(self, index: int) -> bytes:
        return bytes(
            self._term_bytes[int(self._term_ends[index]) : int(self._term_ends[index + 1])]
        )


class _Shortcut:
    """Finds few documents among which the 50 best of a query are."""

    def __init__(self, index: SearchIndex, terms: list[_Term]) -> None:
        self._index, self._terms = index, terms
        self._total = np.zeros(index.num_slots, dtype=np.float64)
        self._ranked = sorted(terms, key=lambda term: -term.bound)
        bounds = [term.bound for term in self._ranked]
        self._rest = np.append(np.cumsum(bounds[::-1])[::-1], 0.0)[1:].tolist()
        """For each ranked term, what the terms after it can add."""
        self._threshold = 0.0

    def candidates(self) -> npt.NDArray[np.int32]:
        """The documents that may be among the best, ascending."""
        num_read = self._read_until_nothing_new_can_win()
        rest = self._rest[num_read - 1]
        found = np.flatnonzero(self._total >= max(self._threshold - rest, np.finfo(float).tiny))
        documents, partial = found.astype(np.int32), self._total[found]
        for term, rest in zip(self._ranked[num_read:], self._rest[num_read:], strict=True):
            partial += self._index.looked_up(term, documents)
            kept = partial >= self._threshold - rest
            documents, partial = documents[kept], partial[kept]
        return documents

    def _read_until_nothing_new_can_win(self) -> int:
        """Reads whole terms, the weightiest first; gives their number."""
        num_postings, next_look = 0, NUM_SEEDS
        for index, term in enumerate(self._ranked):
            # With these types `add.at` takes half the time of `+=`, which reads and writes in turn.
            scores = self._index.all_scores(term).astype(np.float64)
            np.add.at(self._total, self._index.documents_of(term).astype(np.intp), scores)
            num_postings += term.end - term.start
            if num_postings >= next_look:
                self._raise_threshold(self._ranked[: index + 1])
                next_look = 2 * num_postings
            if self._threshold > self._rest[index]:
                return index + 1
        return len(self._ranked)

    def _raise_threshold(self, read: list[_Term]) -> None:
        """Works out the whole scores of documents that look good and takes the 50th."""
        seeds: list[npt.NDArray[np.int32]] = []
        for term in read:
            documents = self._index.documents_of(term)
            if len(documents) > NUM_SEEDS:
                partial = self._total[documents]
                kth = len(documents) - NUM_SEEDS
                documents = documents[np.argpartition(partial, kth)[kth:]]
            seeds.append(documents)
            if sum(map(len, seeds)) >= 2 * NUM_SEEDS:
                break
        scores = self._index.scores_of(np.unique(np.concatenate(seeds)), self._terms)
        if len(scores) >= NUM_RESULTS:
            kth = len(scores) - NUM_RESULTS
            found = float(np.partition(scores, kth)[kth]) * (1 - _SLACK)
            self._threshold = max(self._threshold, found)
