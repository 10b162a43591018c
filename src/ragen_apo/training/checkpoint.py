"""Checkpoints: everything from which training continues as if it had never stopped.

A checkpoint is a folder that appears by one rename, so it is whole or it is not there:

    checkpoints/2-demonstrations-000100/
      model.safetensors       what is trained: all weights, or the adapters
      optimizer.safetensors   its moments                           state.json
      algorithm.safetensors   what the algorithm trains besides the policy: the critic of PPO
      replay.jsonl.gz         the trajectories of `apo.replay`

All random choices derive from (seed, purpose, counters), so the counters in `state.json` are also
the state of every generator, of the task order and of the schedule.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import MappingProxyType

import safetensors
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ragen_apo.errors import CheckpointError
from ragen_apo.files import PARTIAL_MARK, directory_written_atomically, remove_partial_files
from ragen_apo.policy.lora import trained_tensors
from ragen_apo.training.optimization import Optimizer

STAGE_TWO = "apo"
"""The name of Stage 2 of any algorithm among the phases."""
PHASES = ("copy", "demonstrations", STAGE_TWO)
"""The phases that change weights, in their order."""

ALGORITHM_PREFIX = "algorithm/"
"""Marks the algorithm's tensors among those that are loaded."""


@dataclass(frozen=True)
class Position:
    """How far training has come: `step` updates of `phase` are done."""

    phase: str
    step: int
    finished: bool = False
    """The phase is over."""
    counters: Mapping[str, int] = field(default_factory=dict)
    """Running totals that the metrics report, and the version of the reference."""

    @property
    def name(self) -> str:
        return f"{PHASES.index(self.phase) + 1}-{self.phase}-{self.step:06d}"


def save_checkpoint(
    directory: Path,
    *,
    position: Position,
    model: nn.Module,
    optimizer: Optimizer,
    keep: int,
    algorithm_state: Mapping[str, Tensor] = MappingProxyType({}),
    files: Mapping[str, bytes] = MappingProxyType({}),
) -> Path:
    """Writes a checkpoint, further `files` included, and removes all but the newest `keep`.

    If it cannot be written (a full disk), the earlier ones stay and CheckpointError is raised.
    """
    path = directory / position.name
    try:
        with directory_written_atomically(path) as partial:
            save_file(trained_tensors(model), partial / "model.safetensors")
            save_file(optimizer.state_tensors(), partial / "optimizer.safetensors")
            if algorithm_state:
                save_file(dict(algorithm_state), partial / "algorithm.safetensors")
            for name, content in files.items():
                (partial / name).write_bytes(content)
            (partial / "state.json").write_text(json.dumps(asdict(position)), encoding="utf-8")
    except (OSError, safetensors.SafetensorError) as error:
        raise CheckpointError(
            f"checkpoint {path} could not be written: {error}. Earlier checkpoints are untouched; "
            "free some space and continue with --resume."
        ) from error
    for old in list_checkpoints(directory)[:-keep]:
        shutil.rmtree(old)
    return path


def list_checkpoints(directory: Path) -> list[Path]:
    """The whole checkpoints of a run, oldest first."""
    if not directory.is_dir():
        return []
    return sorted(path for path in directory.iterdir() if PARTIAL_MARK not in path.name)


def load_latest_checkpoint(
    directory: Path, *, model: nn.Module, device: torch.device
) -> tuple[Position, dict[str, Tensor]] | None:
    """Puts the newest checkpoint's weights into the model.

    Returns the position with the optimizer's tensors and, under `ALGORITHM_PREFIX`, the
    algorithm's; None if there is no checkpoint. Raises CheckpointError for one that is cut off or
    belongs to another model; none is skipped silently.
    """
    if directory.is_dir():
        remove_partial_files(directory)
    checkpoints = list_checkpoints(directory)
    if not checkpoints:
        return None
    path = checkpoints[-1]
    try:
        state = json.loads((path / "state.json").read_text(encoding="utf-8"))
        position = Position(**state)
        weights = load_file(path / "model.safetensors", device=str(device))
        moments = load_file(path / "optimizer.safetensors", device="cpu")
        if (path / "algorithm.safetensors").exists():
            kept = load_file(path / "algorithm.safetensors", device="cpu")
            moments |= {f"{ALGORITHM_PREFIX}{name}": tensor for name, tensor in kept.items()}
        load_trained_tensors(model, weights)
    except (OSError, ValueError, TypeError, safetensors.SafetensorError) as error:
        raise CheckpointError(
            f"checkpoint {path} cannot be read: {error}. Expected whole files model.safetensors, "
            f"optimizer.safetensors and state.json of this model. Remove the folder to continue "
            "from the one before it "
            f"({checkpoints[-2].name if len(checkpoints) > 1 else 'none is left'})."
        ) from error
    return position, moments


def load_trained_tensors(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """The inverse of `trained_tensors`; raises ValueError for tensors of another model."""
    expected = trained_tensors(model)
    if expected.keys() != weights.keys():
        difference = sorted(expected.keys() ^ weights.keys())[:3]
        raise ValueError(f"its tensors are not those of the model, for example {difference}")
    with torch.no_grad():
        for name, tensor in expected.items():
            if tensor.shape != weights[name].shape:
                raise ValueError(
                    f"tensor {name} has shape {tuple(weights[name].shape)}, expected "
                    f"{tuple(tensor.shape)}"
                )
            tensor.copy_(weights[name])
