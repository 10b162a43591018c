"""BM25 search with Lucene's arithmetic: an index on disk, memory-mapped, and its top products.

`IndexBuilder` consumes documents one by one and writes a folder of .npy files (no pickle);
`SearchIndex` maps that folder and answers queries. Equations (k1 = 0.9, b = 0.4, all float32):

    idf   = ln(1 + (N - df + 0.5) / (df + 0.5))
    norm  = 1 / (k1 ((1 - b) + b L / avgdl))      L: the length as SmallFloat keeps it in a byte
    score = sum over terms of  w - w / (1 + f norm),   w = (count in the query) idf

The sum is taken in float64 and rounded to float32. Order: score descending, ties by document id
ascending; documents are numbered in the order of their ids, so a tie goes to the lower number.
Source: Lucene's BM25Similarity and SmallFloat; Robertson and Zaragoza, "The Probabilistic Relevance
Framework", 2009.
"""

import functools
import json
import math
from array import array
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from ragen_apo.environments.webshop.tokens import analyze

NUM_RESULTS = 50
INDEX_FORMAT = 1
TERM_CACHE_SIZE = 65536

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


class IndexBuilder:
    """Collects documents and writes the index; memory holds one chunk and the vocabulary."""

    def __init__(self, folder: Path, *, chunk_postings: int = 4_000_000) -> None:
        self._folder = folder
        self._chunk_postings = chunk_postings
        self._lengths = array("q")
        self._numbers: dict[str, int] = {}
        self._chunk = (array("i"), array("i"), array("i"))
        self._num_chunks = 0

    def add(self, text: str) -> None:
        """Adds the next document."""
        terms = analyze(text)
        document = len(self._lengths)
        self._lengths.append(len(terms))
        numbers = self._numbers
        counts = Counter(terms)
        of_terms, of_documents, of_counts = self._chunk
        of_terms.extend([numbers.setdefault(term, len(numbers)) for term in counts])
        of_documents.extend([document] * len(counts))
        of_counts.extend(counts.values())
        if len(of_terms) >= self._chunk_postings:
            self._write_chunk()

    def finish(self, ranks: npt.NDArray[np.int32]) -> None:
        """Merges the chunks into the final arrays.

        `ranks` has for each document, in the order of adding, the rank of its id: its number.
        """
        self._write_chunk()
        lengths = np.zeros(len(self._lengths), dtype=np.int64)
        lengths[ranks] = np.frombuffer(self._lengths, dtype=np.int64)
        offsets = self._merge_chunks(ranks)
        self._write_vocabulary()
        self._write_scores(offsets, lengths)

    def _write_chunk(self) -> None:
        """Sorts the postings collected so far by term and puts them on disk."""
        if not self._chunk[0]:
            return
        postings = np.stack([np.frombuffer(column, dtype=np.int32) for column in self._chunk])
        postings = postings[:, np.argsort(postings[0], kind="stable")]
        np.save(self._folder / f"chunk-{self._num_chunks}.npy", postings)
        self._num_chunks += 1
        self._chunk = (array("i"), array("i"), array("i"))

    def _merge_chunks(self, ranks: npt.NDArray[np.int32]) -> npt.NDArray[np.int64]:
        """Lays each term's postings side by side; offsets[t] to offsets[t + 1] are those of t."""
        paths = [self._folder / f"chunk-{number}.npy" for number in range(self._num_chunks)]
        frequencies = np.zeros(len(self._numbers), dtype=np.int64)
        for path in paths:
            frequencies += np.bincount(np.load(path)[0], minlength=len(frequencies))
        offsets = np.concatenate([[0], np.cumsum(frequencies)]).astype(np.int64)
        num_postings = max(int(offsets[-1]), 1)
        documents = _new_array(self._folder / "documents.npy", np.int32, num_postings)
        counts = _new_array(self._folder / "counts.npy", np.int32, num_postings)
        free = offsets[:-1].copy()
        for path in paths:
            terms, chunk_documents, chunk_counts = np.load(path)
            in_chunk = np.bincount(terms, minlength=len(frequencies))
            first = np.cumsum(in_chunk) - in_chunk
            places = free[terms] + np.arange(len(terms)) - first[terms]
            documents[places], counts[places] = ranks[chunk_documents], chunk_counts
            free += in_chunk
            path.unlink()
        documents.flush()
        counts.flush()
        np.save(self._folder / "offsets.npy", offsets)
        return offsets

    def _write_vocabulary(self) -> None:
        """The terms in byte order for binary search, and each one's row in `offsets`."""
        encoded = {
            term.encode("utf-8", "surrogatepass"): row for term, row in self._numbers.items()
        }
        ordered = sorted(encoded)
        ends = np.cumsum([0] + [len(term) for term in ordered])
        np.save(self._folder / "term_rows.npy", np.array([encoded[t] for t in ordered], np.int64))
        np.save(self._folder / "term_ends.npy", ends.astype(np.int64))
        np.save(
            self._folder / "term_bytes.npy", np.frombuffer(b"".join(ordered) or b"\0", np.uint8)
        )

    def _write_scores(self, offsets: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]) -> None:
        """Each posting's score for a query that has the term once, and what other counts need."""
        bytes_of_lengths = np.array([length_byte(int(n)) for n in lengths], dtype=np.uint8)
        num_documents = int(np.count_nonzero(lengths))
        average = float(np.float32(int(lengths.sum()) / max(num_documents, 1)))
        norms = inverse_norms(np.float32(average or 1.0))
        np.save(self._folder / "length_bytes.npy", bytes_of_lengths)
        documents = np.load(self._folder / "documents.npy", mmap_mode="r")
        counts = np.load(self._folder / "counts.npy", mmap_mode="r")
        scores = _new_array(self._folder / "scores.npy", np.float32, len(documents))
        for row in range(len(offsets) - 1):
            span = slice(int(offsets[row]), int(offsets[row + 1]))
            weight = inverse_document_frequency(num_documents, span.stop - span.start)
            norm = norms[bytes_of_lengths[documents[span]]]
            scores[span] = term_scores(weight, counts[span], norm)
        scores.flush()
        facts = {
            "format": INDEX_FORMAT,
            "num_documents": num_documents,
            "num_slots": len(lengths),
            "average_length": average,
        }
        (self._folder / "index.json").write_text(json.dumps(facts), encoding="utf-8")


def _new_array(path: Path, dtype: npt.DTypeLike, length: int) -> np.memmap:
    return np.lib.format.open_memmap(path, mode="w+", dtype=dtype, shape=(length,))


def term_scores(
    weight: np.float32, counts: npt.NDArray[np.int32], norms: npt.NDArray[np.float32]
) -> npt.NDArray[np.float32]:
    """What a term of this weight adds to each document that has it `counts` times."""
    return weight - weight / (np.float32(1) + counts.astype(np.float32) * norms)


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
        self._span: Callable[[str], tuple[int, int]] = functools.lru_cache(TERM_CACHE_SIZE)(
            self._find_span
        )

    def search(self, query: str) -> npt.NDArray[np.int64]:
        """The numbers of the at most 50 best documents for a lower-cased query, best first."""
        scores = self.score(query)
        if scores is None:
            return np.zeros(0, dtype=np.int64)
        hits = np.flatnonzero(scores)
        if len(hits) > NUM_RESULTS:
            values = scores[hits]
            place = len(values) - NUM_RESULTS
            hits = hits[values >= np.partition(values, place)[place]]
        order = np.argsort(-scores[hits], kind="stable")[:NUM_RESULTS]
        return hits[order]

    def score(self, query: str) -> npt.NDArray[np.float32] | None:
        """The score of every document, 0 where no term occurs; None where no document has a
        term.
        """
        total: npt.NDArray[np.float64] | None = None
        for term, count in Counter(analyze(query)).items():
            start, end = self._span(term)
            if start == end:
                continue
            if total is None:
                total = np.zeros(self.num_slots, dtype=np.float64)
            total[self._documents[start:end]] += self._scores_of(start, end, count)
        return None if total is None else total.astype(np.float32)

    def _scores_of(self, start: int, end: int, count: int) -> npt.NDArray[np.float32]:
        if count == 1:
            return self._scores[start:end]
        weight = np.float32(count) * inverse_document_frequency(self._num_documents, end - start)
        norms = self._norms[self._length_bytes[self._documents[start:end]]]
        return term_scores(weight, self._counts[start:end], norms)

    def _find_span(self, term: str) -> tuple[int, int]:
        """Where the postings of a term lie; an empty span for an unknown term."""
        wanted = term.encode("utf-8", "surrogatepass")
        low, high = 0, len(self._term_rows)
        while low < high:
            middle = (low + high) // 2
            if self._term(middle) < wanted:
                low = middle + 1
            else:
                high = middle
        if low == len(self._term_rows) or self._term(low) != wanted:
            return 0, 0
        row = int(self._term_rows[low])
        return int(self._offsets[row]), int(self._offsets[row + 1])

    def _term(self, place: int) -> bytes:
        return bytes(
            self._term_bytes[int(self._term_ends[place]) : int(self._term_ends[place + 1])]
        )
