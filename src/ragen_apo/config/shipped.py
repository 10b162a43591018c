"""The configurations that come with the package, by name: `shop` is configs/shop.yaml.

A clone has them in its folder configs/, an installed package inside of itself.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping
from pathlib import Path

import ragen_apo

_PACKAGE = Path(ragen_apo.__file__).resolve().parent
FOLDERS = (_PACKAGE / "configs", _PACKAGE.parents[1] / "configs")
"""Of an installed package, and of a clone."""
_ENDING = ".yaml"


def shipped_configurations() -> Mapping[str, Path]:
    """The files by their names, sorted: configurations of runs, and comparisons."""
    folder = next((each for each in FOLDERS if (each / f"smoke{_ENDING}").is_file()), None)
    return {path.stem: path for path in sorted(folder.glob(f"*{_ENDING}"))} if folder else {}


def configuration_file(given: Path | str, *, beside: Path | None = None) -> Path:
    """The file of this path, or the configuration of this name that comes with the package.

    A relative path starts in the folder `beside`, or in the current one. A folder is no file: a run
    may be called as its configuration.
    """
    path = Path(beside or "", os.path.expanduser(given))
    is_file = path.exists() and not path.is_dir()  # also /dev/stdin
    return path if is_file else shipped_configurations().get(str(given), path)


def in_place_of(missing: Path | str, *, comparison: bool = False) -> str:
    """What to give where there is no such file, in a clause."""
    names = [name for name in shipped_configurations() if name.startswith("compare_") == comparison]
    close = difflib.get_close_matches(Path(missing).stem, names, n=1)
    example = close[0] if close else "compare_shop" if comparison else "shop"
    return (
        f"give the path of a YAML file, or the name of one that comes with ragen-apo, such as "
        f"{example} (`ragen-apo configs` lists them)"
    )


def purpose_of(path: Path) -> str:
    """The first sentence of the comment that a configuration begins with, without a command."""
    lines = path.read_text("utf-8").split("\n")
    end = next((i for i, line in enumerate(lines) if not line.startswith("#")), len(lines))
    comment = " ".join(line.lstrip("# ") for line in lines[:end])
    sentence = re.split(r"\. |: ragen-apo ", re.sub(r"^`ragen-apo [^`]*`: ", "", comment))[0]
    return f"{sentence[:1].upper()}{sentence[1:].rstrip('.')}."
