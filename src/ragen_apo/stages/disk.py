"""How much room a run takes on the disk at most, known before anything is computed.

    initial/, references/N/, distilled/, policy/    all weights each, with adapters added to them
    best/           with `training.keep_best` what is trained, twice, and once more while it is
                    written
    checkpoints/    what is trained, its moments, and what the algorithm trains or keeps besides:
                    the newest `training.keep_checkpoints`, and one more while it is written

The value store, curves and reports are not counted, nor are references that
`reference.refresh_max_kl` may ask for. Sizes are in bytes.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ragen_apo.config import RunConfig
from ragen_apo.errors import ConfigError
from ragen_apo.plural import counted
from ragen_apo.run_directory import RunDirectory

_SAVED_ONCE_MORE = ("policy", "adapter", "earlier")
"""Folders of a run whose weights are set aside when it goes on."""


@dataclass(frozen=True)
class Sizes:
    """Bytes of a model."""

    weights: int
    """In a model folder."""
    kept: int
    """Of its tensors in a checkpoint: all weights, or the adapters."""
    learned: int
    """Of those that have moments."""


@dataclass(frozen=True)
class DiskPlan:
    """Model folders and checkpoints of a run when they take the most."""

    num_models: int
    model: int
    """One folder."""
    num_checkpoints: int
    checkpoint: int
    written: int
    """What is there already."""

    @property
    def missing(self) -> int:
        """What still has to be written, and stays."""
        whole = self.num_models * self.model + self.num_checkpoints * self.checkpoint
        return max(0, whole - self.written)

    def sentence(self, free: int) -> str:
        return f"disk: {self._parts}; {_in_words(free)} are free"

    def require(self, free: int, folder: Path) -> None:
        """Raises ConfigError where they do not fit."""
        if self.missing > free:
            raise ConfigError(
                f"{folder} needs {self._parts}, and its disk has {_in_words(free)} free; free "
                "space, take another disk (--run-dir), lower training.keep_checkpoints, or train "
                "adapters (policy.lora)"
            )

    @property
    def _parts(self) -> str:
        return (
            f"{_in_words(self.missing)} more for {counted(self.num_models, 'model')} of "
            f"{_in_words(self.model)} and {counted(self.num_checkpoints, 'checkpoint')} of "
            f"{_in_words(self.checkpoint)}"
        )


def plan_disk(
    config: RunConfig, sizes: Sizes, folder: Path, *, only_reference: bool = False
) -> DiskPlan:
    """The plan of a run in `folder`; `only_reference`: it ends with its warm start."""
    num_models, ever = 1, 0
    warm_start, most = config.warm_start, config.training.keep_checkpoints + 1
    checkpoint = sizes.kept + 2 * sizes.learned
    if config.policy.path is None:
        num_models += 1
    if warm_start.enabled:
        for steps in (warm_start.copy_curriculum.max_steps, warm_start.demonstrations.num_steps):
            ever += math.ceil(steps / warm_start.checkpoint_every)
    if not only_reference:
        training = config.training
        planned = 1 + config.reference.num_after_steps(training.max_steps)
        num_models += max(planned, len(RunDirectory(folder).reference_versions()))
        num_models += config.distillation.enabled
        if training.keep_best and config.policy.lora is None:
            num_models += 3  # two in best/, and one more while it is written
        ever += math.ceil(training.max_steps / training.checkpoint_every)
        if config.distillation.enabled:
            ever += _most_of_distillation(config, most=most)
        if config.algorithm.traits.has_critic:
            checkpoint *= 2
        if config.algorithm.keeps_a_copy:
            checkpoint += sizes.kept
    return DiskPlan(
        num_models=num_models,
        model=sizes.weights,
        num_checkpoints=min(ever, most),
        checkpoint=checkpoint,
        written=_num_written(folder),
    )


def _most_of_distillation(config: RunConfig, *, most: int) -> int:
    """Checkpoints, if all samples were imitated; `most` where nobody has said of how many tasks."""
    values, settings = config.values, config.distillation
    if config.training.max_tasks is None:
        return most
    samples = values.max_samples if values.adaptive else values.num_samples
    num_episodes = config.training.max_tasks * samples
    num_updates = math.ceil(settings.num_epochs * num_episodes / settings.batch_size)
    return math.ceil(num_updates / config.warm_start.checkpoint_every)


def more_than_fits(config_of: Mapping[Path, RunConfig], *, reference: Path) -> str | None:
    """Why runs that begin with `reference` may fill their disk; None if they fit.

    All weights count as learned, so it is an upper bound.
    """
    weights = _num_written(reference)
    folders = list(config_of)
    plans = [
        plan_disk(
            config,
            Sizes(weights, weights, weights)
            if config.policy.lora is None
            else Sizes(weights, 0, 0),
            folder,
        )
        for folder, config in config_of.items()
    ]
    missing, free = sum(plan.missing for plan in plans), free_disk(folders[0])
    if missing <= free:
        return None
    return (
        f"disk: {counted(len(plans), 'run')} may need {_in_words(missing)} more, and "
        f"{_in_words(free)} are free. Free space or lower training.keep_checkpoints: a run without "
        "room stops, and the same command goes on"
    )


def free_disk(folder: Path) -> int:
    """Bytes that are free where `folder` is, or will be."""
    there = folder.resolve()
    while not there.exists():
        there = there.parent
    return shutil.disk_usage(there).free


def _in_words(num_bytes: int) -> str:
    small, large = num_bytes / 2**20, num_bytes / 2**30
    return f"{large:.1f} GiB" if large >= 1 else f"{small:.1f} MiB"


def _num_written(folder: Path) -> int:
    """Bytes of weights, but for the results of a run that goes on: it saves these once more."""
    files = folder.rglob("*.safetensors")
    kept = (file for file in files if file.relative_to(folder).parts[0] not in _SAVED_ONCE_MORE)
    return sum(file.stat().st_size for file in kept)
