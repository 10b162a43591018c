"""Whether two checkouts of this repository train the same weights, bit for bit.

    python -m benchmarks.same_results OTHER_CHECKOUT [--config NAME ...]
        [--configs FOLDER] [--other-configs FOLDER] [--renamed OLD=NEW ...]
        [--keep FOLDER] [--out FOLDER]

For changes that must not matter. Trains tiny runs of every algorithm in both checkouts, each in a
process of its own with one thread, and compares what they wrote: all rows of `warm_start.jsonl` and
`metrics.jsonl`, seconds aside, and every tensor of `references/0` and `policy`. Exit status 1 on
any difference.

NAME.yaml in `same_results_configs` holds what a configuration changes in `base.yaml` beside it. A
checkout whose keys have other names gets a folder of its own with the same names of files. OLD is
what the other checkout calls a metric that is NEW here.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from benchmarks.tables import write_page
from safetensors import safe_open

from ragen_apo.config.overrides import merge
from ragen_apo.config.yaml_text import parse_yaml
from ragen_apo.files import read_json_lines

ROOT = Path(__file__).resolve().parent.parent
CONFIGS = Path(__file__).parent / "same_results_configs"
BASE = "base"
CURVES = ("warm_start.jsonl", "metrics.jsonl")
MODELS = ("references/0", "policy")
NOTES = """The other checkout is {other}. Rows are those of warm_start.jsonl and metrics.jsonl,
compared exactly and without seconds; weights are all tensors of references/0 and policy."""


@dataclass(frozen=True)
class Outcome:
    """What two runs of one configuration have in common."""

    num_rows: int
    """Rows that were compared."""
    difference: str | None
    """The first one, in words."""
    weights: str | None
    """The first tensor that differs, in words."""

    @property
    def is_same(self) -> bool:
        return self.difference is None and self.weights is None


def names_in(folder: Path) -> list[str]:
    """The configurations in a folder."""
    return sorted(path.stem for path in folder.glob("*.yaml") if path.stem != BASE)


def configuration(folder: Path, name: str) -> dict[str, Any]:
    """The base of a folder with what one of its configurations changes."""
    base, own = (_mapping(folder / f"{stem}.yaml") for stem in (BASE, name))
    return merge(base, own)


def _mapping(path: Path) -> dict[str, Any]:
    values, problems = parse_yaml(path.read_text(encoding="utf-8"))
    if problems or not isinstance(values, dict):
        raise SystemExit(f"{path}: {'; '.join(problems) or 'expected a mapping of keys'}")
    return values


def begin_training(checkout: Path, config: Mapping[str, Any], run: Path) -> subprocess.Popen[bytes]:
    """Starts a training from a checkout's own sources; what it prints goes to a file beside."""
    run.parent.mkdir(parents=True, exist_ok=True)
    path = run.with_name(f"{run.name}.yaml")
    path.write_text(json.dumps(config), encoding="utf-8")  # JSON is YAML
    command = [sys.executable, "-m", "ragen_apo.cli", "train", "--no-evaluate"]
    sources = {"PYTHONPATH": str(checkout / "src"), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with log_of(run).open("wb") as log:
        return subprocess.Popen(
            [*command, "--config", str(path), "--run-dir", str(run)],
            # Not the working directory of this process: `python -m` would import from it.
            cwd=run.parent,
            env=os.environ | sources,
            stdout=log,
            stderr=subprocess.STDOUT,
        )


def log_of(run: Path) -> Path:
    """Where a training prints."""
    return run.with_name(f"{run.name}.log")


def compared(here: Path, there: Path, *, renamed: Mapping[str, str]) -> Outcome:
    """What two finished runs have written; `renamed` holds other names of the one `there`."""
    num_rows, difference = 0, None
    for file in CURVES:
        rows = read_json_lines(here / file)
        others = [
            {renamed.get(key, key): value for key, value in row.items()}
            for row in read_json_lines(there / file)
        ]
        for number, (row, other) in enumerate(zip(rows, others, strict=False), 1):
            num_rows += 1
            difference = difference or _first_difference(row, other, f"{file}, row {number}")
        if len(rows) != len(others):
            numbers = f"{file}: {len(rows)} rows here, {len(others)} there"
            difference = difference or numbers
    if num_rows == 0:
        difference = difference or "no rows were written"
    return Outcome(num_rows, difference, _first_tensor(here, there))


def _first_difference(row: Mapping[str, Any], other: Mapping[str, Any], where: str) -> str | None:
    for key in [*row, *(key for key in other if key not in row)]:
        if key.endswith("seconds"):
            continue
        if key not in row or key not in other:
            return f"{where}: `{key}` only {'here' if key in row else 'there'}"
        # As text, because a NaN is no other than a NaN.
        if json.dumps(row[key]) != json.dumps(other[key]):
            return f"{where}: `{key}` {row[key]} here, {other[key]} there"
    return None


def _first_tensor(here: Path, there: Path) -> str | None:
    for folder in MODELS:
        sums, others = checksums(here / folder), checksums(there / folder)
        for name in [*sums, *(name for name in others if name not in sums)]:
            if sums.get(name) != others.get(name):
                where = "" if name in sums and name in others else ", only in one"
                return f"{folder}: {name}{where}"
        if not sums:
            return f"{folder}: no tensors"
    return None


def checksums(folder: Path) -> dict[str, str]:
    """The sha256 of every tensor of a model folder, with its format and shape, by name."""
    sums: dict[str, str] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for name in sorted(tensors.keys()):
                tensor = tensors.get_tensor(name)
                content = tensor.flatten().contiguous().view(torch.uint8).numpy().tobytes()
                kind = f"{tensor.dtype} {tuple(tensor.shape)} ".encode()
                sums[name] = hashlib.sha256(kind + content).hexdigest()
    return sums


def same_results(
    other: Path,
    *,
    names: Sequence[str],
    configs: tuple[Path, Path],
    renamed: Mapping[str, str],
    folder: Path,
) -> dict[str, Outcome]:
    """Trains each configuration in both checkouts, side by side, and compares them."""
    outcomes: dict[str, Outcome] = {}
    for name in names:
        print(f"{name} ...", flush=True)
        runs = [folder / name / side for side in ("here", "there")]
        with contextlib.ExitStack() as both:
            processes = [
                both.enter_context(begin_training(checkout, configuration(source, name), run))
                for checkout, source, run in zip((ROOT, other), configs, runs, strict=True)
            ]
            statuses = [process.wait() for process in processes]
        failed = [run for run, status in zip(runs, statuses, strict=True) if status]
        if failed:
            outcomes[name] = Outcome(0, "; ".join(map(_failure, failed)), None)
        else:
            outcomes[name] = compared(*runs, renamed=renamed)
    return outcomes


def _failure(run: Path) -> str:
    lines = log_of(run).read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return f"training failed {run.name}: {lines[-1] if lines else 'nothing was printed'}"


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("other", type=Path, help="another checkout of this repository")
    parser.add_argument("--config", nargs="+", metavar="NAME", help="all, if left out")
    parser.add_argument("--configs", type=Path, default=CONFIGS, metavar="FOLDER")
    parser.add_argument("--other-configs", type=Path, metavar="FOLDER", help="if they differ")
    parser.add_argument("--renamed", nargs="+", default=[], metavar="OLD=NEW")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep the runs here")
    parser.add_argument("--out", type=Path, default=Path("runs"), help="folder of the page")
    options = parser.parse_args(arguments)
    known = names_in(options.configs)
    if unknown := [name for name in options.config or [] if name not in known]:
        parser.error(f"no configuration is called {unknown[0]}; there are {', '.join(known)}")
    other = options.other.resolve()
    if not (other / "src" / "ragen_apo").is_dir():
        parser.error(f"{other} is no checkout of this repository: it has no src/ragen_apo")
    if options.keep and options.keep.exists() and any(options.keep.iterdir()):
        parser.error(f"{options.keep} is not empty; remove it or give another folder")
    if wrong := [text for text in options.renamed if text.count("=") != 1]:
        parser.error(f"--renamed takes OLD=NEW, got {wrong[0]}")
    with contextlib.ExitStack() as cleaning:
        folder = options.keep or Path(cleaning.enter_context(tempfile.TemporaryDirectory()))
        outcomes = same_results(
            other,
            names=options.config or known,
            configs=(options.configs, options.other_configs or options.configs),
            renamed=dict(text.split("=") for text in options.renamed),
            folder=folder.resolve(),
        )
    write_page(
        "same_results",
        title="Two checkouts, the same seeds",
        notes=NOTES.format(other=other),
        header=["configuration", "rows compared", "first difference", "weights"],
        rows=[
            [name, outcome.num_rows, outcome.difference or "none", outcome.weights or "equal"]
            for name, outcome in outcomes.items()
        ],
        folder=options.out,
    )
    return 0 if all(outcome.is_same for outcome in outcomes.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
