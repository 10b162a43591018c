"""Checkpoints: everything from which training continues as if it had never stopped.

A checkpoint is a folder that appears by one rename, so it is whole or it is not there:

    checkpoints/2-demonstrations-000100/
      model.safetensors       what is trained: all weights, or the adapters
      optimizer.safetensors   its moments                           state.json
      algorithm.safetensors   what the algorithm trains besides the policy: the critic of PPO
      SHA256SUMS              what all these files were when they were written

What a killed writer left is removed; nothing else in `checkpoints/` is touched. A damaged
checkpoint is an error: a file with other bytes, or a tensor that is missing, unexpected or of
another form.

All random choices derive from (seed, purpose, counters), so the counters in `state.json` are also
the state of every generator, of the task order and of the schedule.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import MappingProxyType

import safetensors
import torch
from pydantic import ConfigDict, TypeAdapter
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ragen_apo.distributed.ranks import ALONE, Ranks
from ragen_apo.distributed.sharding import assign, whole_tensors
from ragen_apo.errors import CheckpointError
from ragen_apo.files import (
    check_checksums,
    directory_written_atomically,
    parse_json,
    parse_record,
    remove_partial_files,
    write_checksums,
)
from ragen_apo.policy.lora import trained_tensors
from ragen_apo.training.named_tensors import check_tensors
from ragen_apo.training.optimization import Optimizer

WARM_START = ("copy", "demonstrations")
DISTILLATION = "distillation"
STAGE_TWO = "training"
"""The name of Stage 2 of any algorithm among the phases."""
PHASES = (*WARM_START, DISTILLATION, STAGE_TWO)
"""The phases that change weights, in their order."""

WEIGHTS_FILE, STATE_FILE = "model.safetensors", "state.json"
OPTIMIZER_FILE, ALGORITHM_FILE = "optimizer.safetensors", "algorithm.safetensors"

_NAME = re.compile(r"[0-9]-([a-z]+)-([0-9]{6,})")


@dataclass(frozen=True)
class Position:
    """How far training has come: `step` updates of `phase` are done."""

    __pydantic_config__ = ConfigDict(extra="forbid")
    phase: str
    step: int
    finished: bool = False
    """The phase is over."""
    counters: Mapping[str, int] = field(default_factory=dict)
    """Running totals that the metrics report, and of the reference its version and its step."""

    @property
    def reference_version(self) -> int:
        return self.counters.get("reference_version", 0)

    @property
    def name(self) -> str:
        return f"{PHASES.index(self.phase) + 1}-{self.phase}-{self.step:06d}"

    @property
    def order(self) -> tuple[int, int]:
        """Later positions are greater; their names, as texts, are not from step 1,000,000 on."""
        return PHASES.index(self.phase), self.step


_POSITION = TypeAdapter(Position)


def save_checkpoint(
    directory: Path,
    *,
    position: Position,
    model: nn.Module,
    optimizer: Optimizer | None,
    keep: int,
    algorithm_state: Mapping[str, Tensor] = MappingProxyType({}),
    ranks: Ranks = ALONE,
) -> None:
    """Writes a checkpoint and removes all but the newest `keep`: the first rank does.

    Without an optimizer training cannot go on from it: it is for `load_weights` alone.
    Tensors in shares are gathered there, for which all ranks have to come. If it cannot be written
    (a full disk), the earlier ones stay and CheckpointError is raised.
    """
    if not ranks.is_saving:
        return
    tensors = {
        WEIGHTS_FILE: trained_tensors(model),
        **({} if optimizer is None else {OPTIMIZER_FILE: optimizer.state_tensors()}),
        **({ALGORITHM_FILE: algorithm_state} if algorithm_state else {}),
    }
    tensors = {file: whole_tensors(each, keep=ranks.is_first) for file, each in tensors.items()}
    if not ranks.is_first:
        return
    path = directory / position.name
    try:
        with directory_written_atomically(path) as partial:
            for file, each in tensors.items():
                save_file(each, partial / file)
            (partial / STATE_FILE).write_text(json.dumps(asdict(position)), encoding="utf-8")
            write_checksums(partial)
    except (OSError, safetensors.SafetensorError) as error:
        raise CheckpointError(
            f"checkpoint {path} could not be written: {error}. Earlier checkpoints are untouched; "
            "see to it (space, permissions) and continue with --resume."
        ) from error
    for old in list_checkpoints(directory)[:-keep]:
        shutil.rmtree(old, ignore_errors=True)  # what stays is removed after the next one


def list_checkpoints(directory: Path) -> list[Path]:
    """The folders named like checkpoints, oldest first; loading one checks what it holds."""
    if not directory.is_dir():
        return []
    found = [(_position_in(path.name), path) for path in directory.iterdir() if path.is_dir()]
    placed = [(position.order, path) for position, path in found if position is not None]
    return [path for _, path in sorted(placed)]


def newest_position(directory: Path) -> Position | None:
    """Phase and step of the newest checkpoint, by its name; None without one."""
    checkpoints = list_checkpoints(directory)
    return _position_in(checkpoints[-1].name) if checkpoints else None


def _position_in(name: str) -> Position | None:
    """The position that has exactly this name, if one has."""
    matched = _NAME.fullmatch(name)
    if matched is None or matched[1] not in PHASES:
        return None
    position = Position(matched[1], int(matched[2]))
    return position if position.name == name else None


def load_latest_checkpoint(directory: Path, *, model: nn.Module) -> Position | None:
    """Puts the newest checkpoint's weights into the model; returns its position, None without one.

    What else it holds is read by whoever needs it, when it does: `load_moments`,
    `algorithm_tensors`. Raises CheckpointError for one that is cut off or belongs to another model;
    none is skipped silently.
    """
    if directory.is_dir():
        remove_partial_files(directory)
    checkpoints = list_checkpoints(directory)
    if not checkpoints:
        return None
    path = checkpoints[-1]
    with checkpoint_errors(path):
        kept = [ALGORITHM_FILE] if (path / ALGORITHM_FILE).exists() else []
        check_checksums(path, [WEIGHTS_FILE, OPTIMIZER_FILE, STATE_FILE, *kept])
    with checkpoint_errors(path, STATE_FILE):
        position = _read_position(path)
    with checkpoint_errors(path, WEIGHTS_FILE):
        load_trained_tensors(model, load_file(path / WEIGHTS_FILE))
    return position


def load_weights(path: Path, *, model: nn.Module) -> None:
    """Puts the weights of the checkpoint `path` into the model.

    Raises CheckpointError for one that is missing, cut off or belongs to another model.
    """
    try:
        check_checksums(path, [WEIGHTS_FILE, STATE_FILE])
        load_trained_tensors(model, load_file(path / WEIGHTS_FILE))
    except (OSError, ValueError, safetensors.SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}.") from error


def load_moments(path: Path, optimizer: Optimizer) -> None:
    """Gives the optimizer its tensors of checkpoint `path`, which no one else holds.

    Raises CheckpointError if they are not exactly those that this optimizer keeps.
    """
    with checkpoint_errors(path, OPTIMIZER_FILE):
        optimizer.load_state_tensors(load_file(path / OPTIMIZER_FILE))


def algorithm_tensors(path: Path) -> dict[str, Tensor]:
    """What the algorithm keeps in checkpoint `path`; nothing where there is no such file."""
    file = path / ALGORITHM_FILE
    return load_file(file) if file.exists() else {}


@contextlib.contextmanager
def checkpoint_errors(path: Path, file: str | None = None) -> Iterator[None]:
    """Turns what goes wrong with (a file of) checkpoint `path` into a CheckpointError."""
    try:
        yield
    except (OSError, ValueError, safetensors.SafetensorError) as error:
        checkpoints = list_checkpoints(path.parent)
        before = checkpoints[: checkpoints.index(path)] if path in checkpoints else []
        way_out = (
            "None is left before it: put an undamaged copy in its place, or start another run."
        )
        if before:
            way_out = f"Remove the folder to continue from the one before it ({before[-1].name})."
            if STAGE_TWO in path.name and STAGE_TWO not in before[-1].name:
                way_out += (
                    " Stage 2 begins again from there: move metrics.jsonl out of the run, too."
                )
        raise CheckpointError(
            f"checkpoint {path} cannot be read: {file + ': ' if file else ''}{error}. Expected "
            f"the files of this run and model as they were written. {way_out}"
        ) from error


def _read_position(path: Path) -> Position:
    """What `state.json` says; ValueError unless it belongs to a folder of this name."""
    position = parse_record(_POSITION, parse_json((path / STATE_FILE).read_bytes()))
    if position.phase not in PHASES:
        raise ValueError(
            f"the phase is {position.phase!r:.80}, expected one of {', '.join(PHASES)}"
        )
    if position.name != path.name:
        raise ValueError(f"the position is {position.name}, expected that of the folder's name")
    return position


def load_trained_tensors(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """The inverse of `trained_tensors`; raises ValueError for tensors of another model."""
    expected = trained_tensors(model)
    check_tensors(weights, expected)
    with torch.no_grad():
        for name, tensor in expected.items():
            assign(tensor, weights[name])
