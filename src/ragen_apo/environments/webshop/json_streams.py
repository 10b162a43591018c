"""JSON documents larger than memory: the values of one array or object, one by one.

`stream_json_array` and `stream_json_object` consume a path and yield each value, or key and value,
with the share of the file read so far. Memory holds one block of the file and one value. What is no
such document, has text behind its end or is nested too deep for Python raises ValueError, at the
latest at its end.
"""

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, TextIO

READ_CHARACTERS = 1 << 20
MAX_RECORD_CHARACTERS = 1 << 24
"""A product's record is far smaller; a file that seems to have a larger one is malformed."""
_BLANKS = " \t\r\n"


def stream_json_array(path: Path) -> Iterator[tuple[Any, float]]:
    """The values of a JSON array."""
    decode = json.JSONDecoder().raw_decode
    return _stream(path, "[]", decode)


def stream_json_object(path: Path) -> Iterator[tuple[tuple[str, Any], float]]:
    """The keys and values of a JSON object."""
    decode = json.JSONDecoder().raw_decode

    def decode_entry(text: str, position: int) -> tuple[tuple[str, Any], int]:
        key, end = decode(text, position)
        end = _skip(text, end, _BLANKS)
        if end < len(text) and text[end] != ":":
            raise ValueError(f"expected : behind the key {str(key)[:80]!r}, got {text[end]!r}")
        value, end = decode(text, _skip(text, end + 1, _BLANKS))
        return (key, value), end

    return _stream(path, "{}", decode_entry)


def _stream(path: Path, brackets: str, decode: Any) -> Iterator[tuple[Any, float]]:
    size = max(path.stat().st_size, 1)
    buffer, position = "", 0
    expected: Literal["opening", "value or end", "value", "comma or end"] = "opening"
    with path.open("rb") as file, io.TextIOWrapper(file, encoding="utf-8-sig") as stream:
        while True:
            position = _skip(buffer, position, _BLANKS)
            following = buffer[position : position + 1]
            if following and expected == "opening":
                if following != brackets[0]:
                    raise ValueError(f"expected {brackets[0]} at its beginning, got {following!r}")
                expected, position = "value or end", position + 1
                continue
            if following == brackets[1] and expected != "value":
                _expect_blanks(buffer[position + 1 :], stream)
                return
            if following and expected == "comma or end":
                if following != ",":
                    raise ValueError(f"expected a comma between its values, got {following!r}")
                expected, position = "value", position + 1
                continue
            if following and following in f",{brackets[1]}":
                raise ValueError(f"expected a value, got {following!r}")
            fault = None
            try:
                value, end = decode(buffer, position)
            except json.JSONDecodeError as error:
                value, end, fault = None, len(buffer), error
                if len(buffer) - position > MAX_RECORD_CHARACTERS:
                    raise
            except RecursionError:
                raise ValueError("a value in it is nested too deep") from None
            if end < len(buffer):
                yield value, file.tell() / size
                expected, position = "comma or end", end
            else:  # A value that ends with what was read may go on.
                # At least as much again, so that a long value is not begun anew too often.
                more = stream.read(max(READ_CHARACTERS, len(buffer) - position))
                if not more:
                    raise ValueError(_why_no_end(fault))
                buffer, position = buffer[position:] + more, 0


def _why_no_end(fault: json.JSONDecodeError | None) -> str:
    """Of a value that could not be read to the end of the file."""
    if fault is None or fault.msg.startswith("Unterminated") or not fault.doc[fault.pos :].strip():
        return "it has no end: the file is cut off"
    around = fault.doc[max(fault.pos - 30, 0) : fault.pos + 30]
    return f"{fault.msg} in {around!r}"


def _expect_blanks(text: str, stream: TextIO) -> None:
    while text:
        if rest := text.strip(_BLANKS):
            raise ValueError(f"expected nothing behind its closing bracket, got {rest[:80]!r}")
        text = stream.read(READ_CHARACTERS)


def _skip(text: str, position: int, characters: str) -> int:
    while position < len(text) and text[position] in characters:
        position += 1
    return position
