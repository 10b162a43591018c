"""What every phase of a run shares: configuration, directory, environments, machine, progress."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ragen_apo.agent.assembly import (
    build_environments,
    build_proxy,
    sampling_conditions,
    set_up_machine,
)
from ragen_apo.agent.environment_manager import EnvironmentManager
from ragen_apo.agent.proxy import AgentProxy
from ragen_apo.config import RunConfig
from ragen_apo.config.policy import is_hub_name
from ragen_apo.distributed.ranks import ALONE, Ranks
from ragen_apo.distributed.start import join_ranks
from ragen_apo.environments.tools import schemas_of
from ragen_apo.errors import RanksError, RunDirectoryError
from ragen_apo.files import (
    CHECKSUMS,
    appears,
    append_json_line,
    check_checksums,
    directory_written_atomically,
    write_checksums,
)
from ragen_apo.phase_clock import PhaseClock
from ragen_apo.policy.conversation_probe import probe_conversation
from ragen_apo.policy.hub import hub_commit
from ragen_apo.policy.language_model import LanguageModel, load_language_model
from ragen_apo.policy.lora import add_adapters, save_adapters
from ragen_apo.policy.precision import chosen_precision
from ragen_apo.progress import Progress
from ragen_apo.run_directory import RunDirectory
from ragen_apo.seeding import derive_seed
from ragen_apo.task_order import training_tasks
from ragen_apo.tracking.run_tracking import RunTracking
from ragen_apo.types import Task, Trajectory
from ragen_apo.values.conditions import SamplingConditions
from ragen_apo.values.store import ValueStore

_SECONDS_TO_APPEAR = 120.0
"""How long a disk of the network may take to show what another host has written: twice what NFS
takes at most as it is mounted by default (acdirmax)."""
_ERROR_OF_RUST = re.compile(r"\(os error ([0-9]+)\)")


@dataclass(frozen=True)
class Session:
    """One process's work on a run, of which the first rank alone writes files."""

    config: RunConfig
    run: RunDirectory
    environments: EnvironmentManager
    device: torch.device
    dtype: torch.dtype
    progress: Progress
    tracking: RunTracking
    precision: str = "none"
    """machine.mixed_precision with what `auto` has come to: `none` or `bfloat16`."""
    ranks: Ranks = ALONE
    played: list[Trajectory] = field(default_factory=list, compare=False)
    """Demonstrations without tokens, until they are imitated: those of the tokenizer of a model
    that is built here. An environment may be slow, so they are played once."""
    opened: float = field(default_factory=time.perf_counter, compare=False)
    """When this process began with the run."""

    @functools.cached_property
    def clock(self) -> PhaseClock:
        """The seconds of the run's phases."""
        return PhaseClock(self.run, self.ranks)

    def has(self, path: Path) -> bool:
        """Whether the run has this file or folder, as the first rank sees it, on all of them."""
        return self.ranks.from_first(path.exists, f"looking for {path.name}")

    def locked(self) -> contextlib.AbstractContextManager[None]:
        """Refuses a second run in the same directory; the first rank holds the lock for all."""
        return self.run.locked() if self.ranks.is_first else contextlib.nullcontext()

    def training_tasks(self) -> list[Task]:
        """See `task_order.training_tasks`."""
        return training_tasks(
            self.environments,
            name=self.config.environment.name,
            max_tasks=self.config.training.max_tasks,
            seed=self.config.seed,
        )

    @property
    def values_path(self) -> Path:
        """The run's own value store, or the one that the configuration names."""
        configured = self.config.values.store
        return Path(configured) if configured else self.run.values

    def value_store(self) -> ValueStore:
        """The value store, which has to be there."""
        return ValueStore(self.values_path, create=False)

    def conditions(self, reference: LanguageModel) -> SamplingConditions:
        """Under which the samples of this reference are stored."""
        return sampling_conditions(self.config, reference, self.environments)

    def proxy(self, model: LanguageModel) -> AgentProxy:
        """The agent that plays with this model, all ranks together."""
        return build_proxy(
            self.config, model, self.environments, ranks=self.ranks, progress=self.progress
        )

    def load_model(self, folder: Path | str) -> LanguageModel:
        """A model of the run, or the one that the configuration names.

        Raises what `load_language_model` raises for a model that cannot play episodes as long as
        the configured ones. Raises ModelError for a model from outside the run that is computed
        differently from transformers, and RunDirectoryError for a model of the run that differs
        from what the run has saved.
        """
        self._refuse_damage(Path(folder))
        if self.ranks.sharded and self.ranks.size > 1:
            gc.collect()  # models in shares refer to themselves: those let go of are still there
        outside = not Path(folder).is_relative_to(self.run.path)
        model = load_language_model(
            folder,
            revision=self._revision(folder) if outside else None,
            device=self.device,
            dtype=self.dtype,
            autocast=None if self.precision == "none" else getattr(torch, self.precision),
            gradient_checkpointing=self.config.machine.gradient_checkpointing,
            trust_remote_code=self.config.policy.trust_remote_code,
            max_context_tokens=self.config.agent.max_context_tokens,
            template_options=self.config.agent.template_options,
        )
        if outside:
            # Those of the run descend from one that was probed.
            probe_conversation(model, tools=schemas_of(self.environments.tools))
            self._note_commit(model)
        return model

    def _revision(self, path: Path | str) -> str | None:
        """The commit that the run was started with, else that of the configured revision, which on
        all ranks is the same. Of a folder the configured one, to be refused.
        """
        wanted = self.run.read_status().get("model_commit", self.config.policy.revision)
        if not is_hub_name(str(path)):
            return wanted
        return self.ranks.from_first(lambda: hub_commit(path, revision=wanted), "asking the hub")

    def _note_commit(self, model: LanguageModel) -> None:
        """Writes down which commit of the hub the run is made from, for every later attempt."""
        if model.commit is None or not self.ranks.is_first:
            return
        self.run.note(model_commit=model.commit)
        policy = self.config.policy
        if policy.trust_remote_code and policy.revision is None:
            self.progress.say(
                f"policy.trust_remote_code is on, and policy.revision is null: the code of "
                f"{policy.path} is that of commit {model.commit}, to which this run keeps. Another "
                "run would take whatever is newest at the hub then; to rule that out, write "
                f"policy.revision: {model.commit}"
            )

    def _refuse_damage(self, folder: Path) -> None:
        if not folder.is_relative_to(self.run.path) or not (folder / CHECKSUMS).exists():
            return  # not ours, or of a version that wrote no checksums
        try:
            check_checksums(folder)
        except ValueError as error:
            raise RunDirectoryError(
                f"the model in {folder} is damaged: {error}. Put an undamaged copy in its place, "
                f"or remove {CHECKSUMS} there if you have changed it yourself"
            ) from error

    def load_policy(self, folder: Path | str) -> LanguageModel:
        """A model to be trained: with new adapters, if they are configured."""
        model = self.load_model(folder)
        if self.config.policy.lora is not None:
            seed = derive_seed(self.config.seed, "adapters")
            add_adapters(model.model, self.config.policy.lora, seed=seed)
        return model

    def shard(self, model: LanguageModel) -> LanguageModel:
        """The model; this rank keeps its share of the weights alone, if that is configured.

        Raises RanksError where another rank has loaded another model.
        """
        self.ranks.require_equal_model(model.model)
        if self.ranks.sharded and self.ranks.size > 1:
            model.shard(num_ranks=self.ranks.size)
        return model

    def save_model(self, model: LanguageModel, folder: Path) -> None:
        """Writes a model folder, whole or not at all; OSError where it cannot be written.

        The first rank does; the others come back when the folder is there.
        """
        self._write(model, folder, model.save)

    def save_adapters(self, policy: LanguageModel) -> None:
        """Writes the policy's adapters as a folder of peft; as `save_model` does otherwise.

        They belong to the first reference, which without a warm start is the configured model.
        """
        base, is_trained = self.config.policy.path, self.config.warm_start.enabled
        commit = self.run.read_status().get("model_commit")
        if is_trained or commit is None:  # only a model of the hub has one
            base, commit = str(self.run.reference(0).absolute()), None

        def write(folder: Path) -> None:
            # Of the model that is whole now. No tokenizer: peft would cut the embeddings to it.
            save_adapters(policy.model, folder, base=base, revision=commit)

        self._write(policy, self.run.adapter, write)

    def _write(self, model: LanguageModel, folder: Path, write: Callable[[Path], None]) -> None:
        with model.whole():
            self.ranks.from_first(lambda: _write_whole(folder, write), f"saving {folder.name}")
        require_shared(folder, self.ranks)

    def note_row(
        self, curve: Path, row: Mapping[str, Any], *, episodes: Sequence[Trajectory] = ()
    ) -> None:
        """Appends a row to a curve of the run; trackers get it as well, with these episodes.

        The first rank does.
        """
        if self.ranks.is_first:
            append_json_line(curve, row)
            self.tracking.note(curve, row, episodes=episodes)


def open_session(config: RunConfig, run: RunDirectory, progress: Progress) -> Session:
    """Sets the machine up and makes the environments; configuration errors surface here.

    Under torchrun this process joins the others.
    """
    opened = time.perf_counter()
    device, dtype = set_up_machine(config.machine)
    ranks = join_ranks(config.machine)
    require_shared(run.config, ranks)
    configured = config.machine.mixed_precision

    def choose() -> str:
        begun_with = run.read_status().get("mixed_precision")
        return chosen_precision(configured, device, begun_with=begun_with)

    precision = ranks.from_first(choose, "choosing the precision")
    return Session(
        config,
        run,
        build_environments(config.environment, config.agent, config.rollouts, say=progress.warn),
        device,
        dtype,
        progress,
        RunTracking(config, run, progress),
        precision=precision,
        ranks=ranks,
        opened=opened,
    )


def require_shared(path: Path, ranks: Ranks) -> None:
    """Comes back when this rank sees what the first one has written; RanksError if it never does.

    The first rank does not wait for the others.
    """
    if not ranks.is_first and not appears(
        path, seconds=min(_SECONDS_TO_APPEAR, ranks.timeout_seconds / 2)
    ):
        raise RanksError(
            f"{ranks.worker.name} does not find {path.absolute()}, which rank 0 has written. "
            "Expected --run-dir to be a folder on a disk that all hosts share, under the same path"
        )


def _write_whole(folder: Path, write: Callable[[Path], None]) -> None:
    try:
        with directory_written_atomically(folder) as partial:
            write(partial)
            write_checksums(partial)
    except Exception as error:
        # safetensors and tokenizers report a full disk by exceptions of their own.
        code = _ERROR_OF_RUST.search(str(error))
        if isinstance(error, OSError) or code is None:
            raise
        raise OSError(int(code[1]), os.strerror(int(code[1])), str(folder)) from error
