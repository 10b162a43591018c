"""The answers so far, one a line of a file, so that none is paid for twice.

A line is on disk before its answer is used. The file only grows; a last line that a kill or a full
disk has cut off is removed when it is opened again. An answer is found by all that it depends on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import json
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter
from pydantic.dataclasses import dataclass as checked

from ragen_apo.files import parse_json, read_records, sync_to_disk
from ragen_apo.policy.chat_api.answer import Answer


@checked(frozen=True)
class _Line:
    key: str
    answer: Answer


_LINE = TypeAdapter(_Line)


def answer_key(conditions: Mapping[str, Any]) -> str:
    """The key of an answer: a hash of all that it depends on, as JSON values."""
    text = json.dumps(dict(conditions), sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


class AnswerLedger:
    """The answers in one file; a context manager that closes it. Threads may share it."""

    def __init__(self, path: Path) -> None:
        """Raises RunDirectoryError for a damaged line other than the last, OSError for no file."""
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        _end_whole(path)
        self._answers = {line.key: line.answer for line in read_records(path, _LINE)}
        self._lock = threading.Lock()
        self._stream = path.open("ab", buffering=0)
        sync_to_disk(path.parent)

    def __len__(self) -> int:
        return len(self._answers)

    def get(self, key: str) -> Answer | None:
        """The answer under this key, if there is one."""
        return self._answers.get(key)

    def add(self, key: str, answer: Answer, **place: int) -> None:
        """Keeps an answer; `place` (episode, turn) is for people who read the file."""
        kept = dataclasses.asdict(answer)
        if not answer.tool_calls:
            del kept["tool_calls"]
        row = {**place, "key": key, "answer": kept}
        line = json.dumps(row, ensure_ascii=True).encode() + b"\n"
        with self._lock:
            self._append(line)
            self._answers[key] = answer

    def _append(self, line: bytes) -> None:
        """The whole line or, on a full disk, none of it."""
        end = self._stream.seek(0, os.SEEK_END)
        try:
            if self._stream.write(line) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path))
            os.fsync(self._stream.fileno())
        except OSError:
            with contextlib.suppress(OSError):
                self._stream.truncate(end)
            raise

    def __enter__(self) -> AnswerLedger:
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.close()


def _end_whole(path: Path) -> None:
    """Removes a last line that was cut off, so that the next one begins on a line of its own."""
    if not path.exists():
        return
    content = path.read_bytes()
    start = content.rfind(b"\n", 0, max(len(content) - 1, 0)) + 1
    last = content[start:]
    try:
        whole = not last or (parse_json(last) is not None and last.endswith(b"\n"))
    except ValueError:
        whole = False
    if not whole:
        with path.open("r+b") as stream:
            stream.truncate(start)
            stream.flush()
            os.fsync(stream.fileno())
