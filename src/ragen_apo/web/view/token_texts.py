"""The text of each token, by the tokenizer that a run saved. No model, no torch.

A character may take several tokens: the last of them has it, and the others are empty.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from ragen_apo.web.view.episodes import Decode

FILE = "tokenizer.json"
MAX_BYTES = 1 << 26
_UNFINISHED = "\N{REPLACEMENT CHARACTER}"
MAX_PENDING = 8
"""Tokens of one character; more are no character."""


def decoder(path: Path) -> Decode:
    """What tells the text of tokens; their numbers where the file is no tokenizer."""
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception:  # noqa: BLE001 - the library has no class of its own; the numbers are shown
        return numbers

    def decode(token_ids: Sequence[int]) -> list[str]:
        return _texts(tokenizer, token_ids)

    return decode


def numbers(token_ids: Sequence[int]) -> list[str]:
    """Each token as its number."""
    return [f"⟨{token_id}⟩" for token_id in token_ids]


def _texts(tokenizer: Tokenizer, token_ids: Sequence[int]) -> list[str]:
    texts: list[str] = []
    pending: list[int] = []
    for token_id in token_ids:
        pending.append(token_id)
        text = tokenizer.decode(pending, skip_special_tokens=False)
        if text.endswith(_UNFINISHED) and len(pending) < MAX_PENDING:
            texts.append("")
        else:
            texts.append(text)
            pending = []
    if pending:
        texts[-1] = tokenizer.decode(pending, skip_special_tokens=False)
    return texts
