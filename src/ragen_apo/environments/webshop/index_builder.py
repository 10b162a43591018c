"""Builds the search index of search.py: documents in, a folder of .npy files (no pickle) out.

`IndexBuilder` consumes documents one by one. Postings are gathered in chunks on disk and merged at
the end, so memory holds one chunk, the vocabulary and the lengths, whatever the number of
documents.
"""

import json
from array import array
from collections import Counter
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ragen_apo.environments.webshop.search import (
    inverse_document_frequency,
    inverse_norms,
    length_byte,
    term_scores,
)
from ragen_apo.environments.webshop.tokens import analyze
from ragen_apo.progress import Progress, SilentProgress

INDEX_FORMAT = 2


class IndexBuilder:
    """Collects documents and writes the index."""

    def __init__(
        self, folder: Path, *, chunk_postings: int = 4_000_000, progress: Progress | None = None
    ) -> None:
        self._folder = folder
        self._progress = progress or SilentProgress()
        self._chunk_postings = chunk_postings
        self._lengths = array("q")
        self._numbers: dict[str, int] = {}
        self._chunk = (array("i"), array("i"), array("i"))
        self._num_chunks = 0

    def add(self, text: str) -> None:
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
        """Merges the chunks; `ranks` has each document's number, in the order of adding."""
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
        self._progress.start("merge words", len(paths))
        for number, path in enumerate(paths):
            terms, chunk_documents, chunk_counts = np.load(path)
            in_chunk = np.bincount(terms, minlength=len(frequencies))
            first = np.cumsum(in_chunk) - in_chunk
            indices = free[terms] + np.arange(len(terms)) - first[terms]
            documents[indices], counts[indices] = ranks[chunk_documents], chunk_counts
            free += in_chunk
            path.unlink()
            self._progress.update(number + 1)
        documents.flush()
        counts.flush()
        np.save(self._folder / "offsets.npy", offsets)
        return offsets

    def _write_vocabulary(self) -> None:
        """The terms in byte order for binary search, and each one's row in `offsets`."""
        rows = {term.encode("utf-8", "surrogatepass"): row for term, row in self._numbers.items()}
        ordered = sorted(rows)
        ends = np.cumsum([0, *map(len, ordered)], dtype=np.int64)
        text = np.frombuffer(b"".join(ordered) or b"\0", np.uint8)
        np.save(self._folder / "term_rows.npy", np.array([rows[t] for t in ordered], np.int64))
        np.save(self._folder / "term_ends.npy", ends)
        np.save(self._folder / "term_bytes.npy", text)

    def _write_scores(self, offsets: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]) -> None:
        """Orders each term's postings by document; adds their scores and each maximum."""
        bytes_of_lengths = np.array([length_byte(int(n)) for n in lengths], dtype=np.uint8)
        num_documents = int(np.count_nonzero(lengths))
        average = float(np.float32(int(lengths.sum()) / max(num_documents, 1)))
        norms = inverse_norms(np.float32(average or 1.0))
        np.save(self._folder / "length_bytes.npy", bytes_of_lengths)
        documents = np.load(self._folder / "documents.npy", mmap_mode="r+")
        counts = np.load(self._folder / "counts.npy", mmap_mode="r+")
        scores = _new_array(self._folder / "scores.npy", np.float32, len(documents))
        max_scores = np.zeros(len(offsets) - 1, dtype=np.float32)
        self._progress.start("score words", len(max_scores))
        for row in range(len(max_scores)):
            span = slice(int(offsets[row]), int(offsets[row + 1]))
            order = np.argsort(documents[span])
            documents[span], counts[span] = documents[span][order], counts[span][order]
            weight = inverse_document_frequency(num_documents, span.stop - span.start)
            norm = norms[bytes_of_lengths[documents[span]]]
            scores[span] = term_scores(weight, counts[span], norm)
            max_scores[row] = scores[span].max()
            if row % 1000 == 0:
                self._progress.update(row)
        for array_on_disk in (documents, counts, scores):
            array_on_disk.flush()
        np.save(self._folder / "max_scores.npy", max_scores)
        self._progress.update(len(max_scores))
        facts = {
            "format": INDEX_FORMAT,
            "num_documents": num_documents,
            "num_slots": len(lengths),
            "average_length": average,
        }
        (self._folder / "index.json").write_text(json.dumps(facts), encoding="utf-8")


def _new_array(path: Path, dtype: npt.DTypeLike, length: int) -> np.memmap:
    return np.lib.format.open_memmap(path, mode="w+", dtype=dtype, shape=(length,))
