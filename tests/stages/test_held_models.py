"""What is in memory at each moment of a run: no model, and no moments, that nobody uses any more.

The garbage collector is off: what is let go of is gone at once.
"""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ragen_apo.config import RunConfig
from ragen_apo.progress import SilentProgress
from ragen_apo.run_directory import RunDirectory
from ragen_apo.session import Session, open_session
from ragen_apo.stages import pipeline
from ragen_apo.stages import training as stage_two
from ragen_apo.stages.memory import Peak, plan_memory
from ragen_apo.training import checkpoint
from ragen_apo.training.optimization import Optimizer
from ragen_apo.training.trainer import Trainer
from tests import factories
from tests.factories import AlgorithmRuns

pytestmark = pytest.mark.slow

KEYS = (
    "--warm_start.copy.max_steps=2",
    "--warm_start.demonstrations.num_steps=4",
    "--values.adaptive=false",
    "--distillation.enabled=true",
    "--training.max_tasks=4",
    "--training.max_steps=3",
    "--training.tasks_per_step=4",
    "--training.eval_every=null",
    "--training.checkpoint_every=1",
)


class Held:
    """Notes models, optimizers and what is read of checkpoints, and which of them are alive."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._born: list[tuple[str, weakref.ref[Any]]] = []
        self.seen: list[tuple[str, list[str]]] = []
        """Function that was called, and what was alive then."""
        self._monkeypatch, self._calls_left = monkeypatch, -1
        load_model, load_file, make = Session.load_model, checkpoint.load_file, Optimizer.__init__

        def loaded(session: Session, folder: Path | str) -> Any:
            model = load_model(session, folder)
            name = Path(folder).name
            self._note(f"reference {name}" if name.isdigit() else name, model.model)
            return model

        def read(path: Path) -> Any:
            tensors = load_file(path)
            for tensor in tensors.values():
                self._note(path.stem, tensor)
            return tensors

        def made(optimizer: Optimizer, *args: Any, **options: Any) -> None:
            make(optimizer, *args, **options)
            self._note("moments", optimizer)

        monkeypatch.setattr(Session, "load_model", loaded)
        monkeypatch.setattr(checkpoint, "load_file", read)
        monkeypatch.setattr(Optimizer, "__init__", made)
        for owner, name in (
            (pipeline, "estimate_values"),
            (pipeline, "distil"),
            (Trainer, "step"),
            (stage_two, "estimate_values"),
            (stage_two, "distil"),
        ):
            self._watch(owner, name)

    def _note(self, name: str, thing: object) -> None:
        self._born.append((name, weakref.ref(thing)))

    def _watch(self, owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def watched(*args: Any, **options: Any) -> Any:
            alive = sorted(each for each, born in self._born if born() is not None)
            self.seen.append((name, alive))
            if len(self.seen) == self._calls_left:
                raise KeyboardInterrupt
            return original(*args, **options)

        self._monkeypatch.setattr(owner, name, watched)

    def run(self, config: RunConfig, path: Path, *, calls: int = -1) -> list[tuple[str, list[str]]]:
        """What was seen of a run, or of one that goes on; it is interrupted at the n-th call."""
        self.seen, self._calls_left = [], calls
        self._born.clear()
        with contextlib.suppress(KeyboardInterrupt):
            factories.run(config, path)
        return self.seen


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    gc.collect()
    gc.disable()
    yield Held(monkeypatch)
    gc.enable()


def planned(config: RunConfig, run: Path) -> tuple[dict[str, Peak], int]:
    """The peaks of a run by name, and the bytes of its model."""
    session = open_session(config, RunDirectory(run), SilentProgress())
    policy = session.load_policy(RunDirectory(run).reference(0))
    peaks = plan_memory(config, policy, max_turns=None).peaks
    plain = session.load_model(RunDirectory(run).reference(0))
    size = sum(p.numel() * p.element_size() for p in plain.model.parameters())
    return {each.name: each for each in peaks}, size


def test_a_run_holds_what_it_uses_and_no_more_than_planned(held: Held, tmp_path: Path) -> None:
    config = factories.config(*KEYS, "--reference.refresh_every_steps=1")
    both = ["reference 0", "reference 0"]  # the policy starts from there
    stage_one = [("estimate_values", ["reference 0"]), ("distil", both)]
    assert held.run(config, tmp_path / "run", calls=1) == stage_one[:1]
    # Of the run that goes on, the warm start's policy was loaded, and not its moments.
    steps = [("step", ["moments", *both])]
    for version in (1, 2):
        alive = ["moments", "reference 0", f"reference {version}"]
        steps += [("estimate_values", alive), ("distil", alive), ("step", alive)]
    assert held.run(config, tmp_path / "run", calls=8) == [*stage_one, *steps][:8]
    # Killed at the second refresh, it goes on after step 1 and the first: it looks into the store
    # again, beside the policy, and its reference is the new one.
    assert held.run(config, tmp_path / "run") == [("estimate_values", both), *steps[3:]]

    peaks, size = planned(config, tmp_path / "run")
    assert peaks["stage 1"].models == size
    assert peaks["distillation"].certain == (2 + 3) * size
    assert peaks["rollouts"].certain == (2 + 2) * size
    assert peaks["updates"].certain == (2 + 3) * size
    assert peaks["distillation at a new reference"].certain == (2 + 2 + 3) * size


def test_with_adapters_there_is_one_model(
    held: Held, algorithm_runs: AlgorithmRuns, tmp_path: Path
) -> None:
    keys = (*KEYS, "--policy.lora={rank: 2}")
    config = algorithm_runs.config("apo", *keys, "--warm_start.enabled=false")
    expected = [
        ("estimate_values", ["reference 0"]),
        ("distil", ["reference 0"]),
        *3 * [("step", ["moments", "reference 0"])],
    ]
    assert held.run(config, tmp_path / "run", calls=4) == expected[:4]
    assert held.run(config, tmp_path / "run") == [expected[0], *expected[3:]]

    peaks, size = planned(config, tmp_path / "run")
    assert peaks["stage 1"].models - size == peaks["updates"].training_state / 3
    assert {each.models for each in peaks.values()} - {peaks["saving a model"].models} == {
        peaks["stage 1"].models
    }
