"""Results of a benchmark as a Markdown page: what was run, on which machine, and the table."""

import os
import platform
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
import transformers

RESULTS = Path(__file__).parent / "results"


def machine() -> str:
    """Processor, cores, threads and versions in one line."""
    processor = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        lines = cpuinfo.read_text(encoding="utf-8").splitlines()
        names = [line.split(": ", 1)[1] for line in lines if line.startswith("model name")]
        processor = names[0] if names else processor
    return (
        f"{processor}, {os.cpu_count()} cores, {torch.get_num_threads()} threads of torch "
        f"{torch.__version__}, transformers {transformers.__version__}, "
        f"Python {platform.python_version()}"
    )


def escaped(cell: object) -> str:
    r"""A cell with the star of A*-PO and V* as `\*`, so that no emphasis begins there."""
    parts = str(cell).split("`")
    parts[::2] = [re.sub(r"\b([AV])\*", r"\1\\*", part) for part in parts[::2]]
    return "`".join(parts)


def write_page(
    name: str,
    *,
    title: str,
    notes: str,
    header: Sequence[str],
    rows: Sequence[Sequence[object]],
    suffix: str = "",
    folder: Path = RESULTS,
) -> None:
    """Prints the page and writes it to FOLDER/NAME.md, a suffix after the name.

    The answer in a sentence, above the table, and what the page does not show are added by hand.
    """
    command = shlex.join(["python", "-m", f"benchmarks.{name}", *sys.argv[1:]])
    lines = [
        f"# {title}",
        "",
        f"| {' | '.join(map(escaped, header))} |",
        f"|{'|'.join(['---'] + ['---:'] * (len(header) - 1))}|",
        *(f"| {' | '.join(escaped(cell) for cell in row)} |" for row in rows),
        "",
        notes.strip(),
        "",
        f"- Command: `{command}`",
        f"- Machine: {machine()}",
        f"- Load of the last minute when the page was written: {os.getloadavg()[0]:.1f}",
        "",
    ]
    folder.mkdir(parents=True, exist_ok=True)
    page = "\n".join(lines)
    (folder / f"{name}{suffix}.md").write_text(page, encoding="utf-8")
    print(page)
