"""Files with questions."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def question(number: int) -> dict[str, Any]:
    return {"question": f"What is {number} + {number}?", "answer": str(2 * number)}


def write_rows(path: Path, rows: Sequence[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path
