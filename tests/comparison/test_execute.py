"""Playing a comparison: what is run, in which order, what is reused, and what a failure does."""

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import pytest
import torch

from ragen_apo import cli
from ragen_apo.comparison import execute
from ragen_apo.comparison.lifeline import Lifeline
from ragen_apo.comparison.plan import load_comparison
from ragen_apo.config import load_config, resolved_yaml
from ragen_apo.errors import ConfigError, RagenApoError, RunDirectoryError
from ragen_apo.files import write_text_atomically
from ragen_apo.run_directory import RunDirectory
from ragen_apo.stages import disk
from ragen_apo.training.checkpoint import STAGE_TWO, Position
from tests import factories
from tests.forks import Fork
from tests.sweeps import quick_first

COMPARISON = "base: base.yaml\nseeds: [0, 1]\nruns: {one: {}, two: {algorithm: grpo}}\n"

SHARING = """
base: base.yaml
seeds: [1]
share_values: true
runs:
  one: {}
  two: {algorithm: {beta2: 0.1}}
  lower: {values: {beta1: 0.1, baseline: mean}}
  wider: {values: {num_samples: 2}}
  exact: {machine: {dtype: float64}}
  grpo: {algorithm: grpo}
"""


class Runs:
    """Stands for the command line: makes the files that show that a run is done."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.calls: list[str] = []
        self.lock = threading.Lock()
        self.at_once = self.most_at_once = 0
        self.on_gpu: Counter[str | None] = Counter()
        self.most_on_gpu: Counter[str | None] = Counter()
        self.failing, self.failing_with = "", 3

    def __call__(self, command: list[str], *, env: dict[str, str], **_: Any) -> int:
        assert command[2] == "ragen_apo.comparison.lifeline"
        what, *arguments = command[5:]
        path = Path(arguments[0] if what == "evaluate" else arguments[1])
        name = f"{what} {path.relative_to(self.out)}"
        with self.lock:
            self.calls.append(name)
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
            gpu = env.get("CUDA_VISIBLE_DEVICES")
            self.on_gpu[gpu] += 1
            self.most_on_gpu |= self.on_gpu
        if name == self.failing:
            return self.failing_with
        run = RunDirectory(path)
        if what != "evaluate":
            if "--resume" in arguments:
                config = load_config(run.config, arguments[-3:-1])
                run.results.unlink(missing_ok=True)
            else:
                config = load_config(arguments[arguments.index("--config") + 1])
            write_text_atomically(run.config, resolved_yaml(config))
            if what == "train":
                step = Position(STAGE_TWO, config.training.max_steps)
                (run.checkpoints / step.name).mkdir(parents=True)
                write_text_atomically(run.metrics, f'{{"step": {step.step}}}\n')
            (run.policy if what == "train" else run.reference(0)).mkdir(parents=True, exist_ok=True)
        else:
            played = load_config(run.config).evaluation.model_dump(mode="json")
            if "--pass-k" in arguments:
                played["pass_k"] = int(arguments[arguments.index("--pass-k") + 1])
            write_text_atomically(run.results, json.dumps({"evaluation": played}))
        with self.lock:
            self.at_once -= 1
            self.on_gpu[gpu] -= 1
        return 0


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Runs:
    (tmp_path / "base.yaml").write_text("seed: 0\n")
    (tmp_path / "compare.yaml").write_text(COMPARISON)
    fake = Runs(tmp_path / "out")
    monkeypatch.setattr(subprocess, "call", fake)
    return fake


def play(runs: Runs, **options: Any) -> dict[tuple[str, int], RunDirectory]:
    comparison = load_comparison(runs.out.parent / "compare.yaml")
    return execute.play_comparison(comparison, runs.out, **{"say": lambda _: None, **options})


@pytest.mark.parametrize("parallel", [1, 3])
def test_every_reference_comes_before_the_runs_that_start_from_it(
    runs: Runs, parallel: int
) -> None:
    found = play(runs, parallel=parallel)
    assert list(found) == [("one", 0), ("two", 0), ("one", 1), ("two", 1)]
    assert set(runs.calls[:2]) == {"warm-start seed-0/reference", "warm-start seed-1/reference"}
    assert sorted(runs.calls[2:]) == sorted(
        f"{what} seed-{seed}/{name}"
        for what in ("train", "evaluate")
        for name in ("one", "two")
        for seed in (0, 1)
    )
    assert runs.most_at_once <= parallel


@pytest.mark.parametrize(
    ("visible", "parallel", "most"),
    [
        (None, 2, {"0": 1, "1": 1}),
        (None, 4, {"0": 2, "1": 2}),
        ("3, GPU-5a", 2, {"3": 1, "GPU-5a": 1}),
        ("3,7,9", 2, {"3": 1, "7": 1}),  # CUDA sees two of them
    ],
)
def test_runs_at_the_same_time_are_dealt_out_to_the_gpus(
    runs: Runs,
    monkeypatch: pytest.MonkeyPatch,
    visible: str | None,
    parallel: int,
    most: dict[str, int],
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    play(runs, parallel=parallel)
    assert set(runs.most_on_gpu) <= set(most)
    assert all(runs.most_on_gpu[gpu] <= most[gpu] for gpu in most)
    assert len(runs.calls) == 10


@pytest.mark.parametrize(
    ("num_gpus", "parallel", "base"),
    [(2, 1, "seed: 0"), (1, 2, "seed: 0"), (0, 2, "seed: 0"), (2, 2, "machine: {device: cpu}")],
)
def test_a_run_sees_what_the_comparison_sees_where_nothing_is_to_be_dealt_out(
    runs: Runs, monkeypatch: pytest.MonkeyPatch, num_gpus: int, parallel: int, base: str
) -> None:
    (runs.out.parent / "base.yaml").write_text(base)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    play(runs, parallel=parallel)
    assert set(runs.most_on_gpu) == {None}


def test_seeds_that_were_played_apart_are_joined_without_another_run(runs: Runs) -> None:
    file = runs.out.parent / "compare.yaml"
    for seeds in ("[0]", "[1]"):
        file.write_text(COMPARISON.replace("[0, 1]", seeds))
        play(runs)
    file.write_text(COMPARISON)
    runs.calls.clear()
    assert len(play(runs)) == 4
    assert runs.calls == []


@pytest.mark.slow
def test_runs_that_are_done_are_reused_and_a_lost_evaluation_is_made_up_for(runs: Runs) -> None:
    found = play(runs)
    runs.calls.clear()
    found["two", 1].results.unlink()
    play(runs, parallel=2)
    assert runs.calls == ["evaluate seed-1/two"]


def test_a_reference_that_was_removed_is_made_again_only_where_a_run_has_to_start_from_it(
    runs: Runs,
) -> None:
    found = play(runs)
    for seed in (0, 1):
        shutil.rmtree(runs.out / f"seed-{seed}" / "reference")
    shutil.rmtree(found["one", 1].path)
    runs.calls.clear()
    play(runs)
    assert runs.calls == ["warm-start seed-1/reference", "train seed-1/one", "evaluate seed-1/one"]


@pytest.mark.parametrize(
    "played",
    quick_first(
        [
            {"split": "train"},
            {"num_episodes": 20},
            {"search": {"method": "beam", "width": 2}},
            {"pass_k": 4},
        ]
    ),
)
def test_a_run_that_was_evaluated_otherwise_since_is_evaluated_again(
    runs: Runs, played: dict[str, object]
) -> None:
    found = play(runs)
    results = found["one", 0].results
    before = results.read_text()
    document = json.loads(before)
    document["evaluation"] |= played
    results.write_text(json.dumps(document))
    runs.calls.clear()
    play(runs)
    assert runs.calls == ["evaluate seed-0/one"]
    assert results.read_text() == before


@pytest.mark.slow
def test_results_that_do_not_say_how_they_were_made_are_made_again(runs: Runs) -> None:
    found = play(runs)
    found["two", 0].results.write_text('{"success_rate": 0.5, "split": "test"}')
    runs.calls.clear()
    play(runs)
    assert runs.calls == ["evaluate seed-0/two"]


def test_a_run_that_its_environment_refuses_is_named_before_any_begins(runs: Runs) -> None:
    (runs.out.parent / "base.yaml").write_text("environment: {name: frozen_lake}")
    (runs.out.parent / "compare.yaml").write_text(
        "base: base.yaml\nseeds: [0]\nruns: {one: {}, two: {algorithm: {name: apo_turn}}}\n"
    )
    with pytest.raises(ConfigError, match="^two: the environment 'frozen_lake': it is stochastic"):
        play(runs)
    assert runs.calls == []


def test_a_run_that_was_killed_has_no_message_to_look_for(runs: Runs) -> None:
    runs.failing, runs.failing_with = "train seed-0/one", -9
    with pytest.raises(RagenApoError, match=r"was killed \(signal 9\), perhaps for want of memory"):
        play(runs)


def test_a_failure_is_raised_and_nothing_new_is_begun(runs: Runs) -> None:
    runs.failing = "train seed-0/one"
    with pytest.raises(RagenApoError, match="status 3"):
        play(runs)
    assert runs.calls[-1] == "train seed-0/one"
    runs.failing = ""
    play(runs)
    assert len([call for call in runs.calls if call.startswith("evaluate")]) == 4


def test_runs_that_may_fill_the_disk_are_announced(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    gib, said = 2**30, list[str]()
    comparison = load_comparison(runs.out.parent / "compare.yaml")
    reference = RunDirectory(runs.out / "seed-0" / "reference").reference(0)
    write_weights(reference, gib)
    # Two models and three checkpoints with two moments: (2 + 3 * 3) GiB for each of four runs.
    monkeypatch.setattr(disk, "free_disk", lambda _: 44 * gib)
    execute.play_comparison(comparison, runs.out, say=said.append)
    assert not [line for line in said if "disk" in line]
    shutil.rmtree(runs.out)
    write_weights(reference, gib)
    monkeypatch.setattr(disk, "free_disk", lambda _: 43 * gib)
    execute.play_comparison(comparison, runs.out, say=said.append)
    (line,) = [line for line in said if "disk" in line]
    assert line.startswith("disk: 4 runs may need 44.0 GiB more, and 43.0 GiB are free.")


def write_weights(folder: Path, num_bytes: int) -> None:
    """A file that says that it is so large, and takes no room."""
    folder.mkdir(parents=True)
    with (folder / "model.safetensors").open("wb") as file:
        file.truncate(num_bytes)


def test_another_configuration_is_not_continued(runs: Runs) -> None:
    play(runs)
    text = COMPARISON.replace("one: {}", "one: {values: {beta1: 0.7}}")
    (runs.out.parent / "compare.yaml").write_text(text)
    with pytest.raises(RunDirectoryError, match=r"now: values\.beta1 was 0\.5 and is 0\.7\. Put"):
        play(runs)


def test_another_algorithm_is_not_continued_whatever_code_the_run_names(runs: Runs) -> None:
    """The message had asked for --trust-remote-code, which `compare` does not have."""
    folder = runs.out.parent
    base = "from ragen_apo.training.algorithms.grpo import Grpo\n"
    (folder / "own.py").write_text(f"{base}class Own(Grpo):\n    name: str = 'own'\n")
    named = COMPARISON.replace("one: {}", f"one: {{algorithm: '{folder}/own.py:Own'}}")
    (folder / "compare.yaml").write_text(named)
    play(runs)
    status = {"algorithm_files": {f"{folder}/own.py": "that of before"}}
    done = RunDirectory(runs.out / "seed-0" / "one")
    done.note(**status)
    said: list[str] = []
    play(runs, say=said.append)
    (edited,) = [line for line in said if "own.py was edited since this run started" in line]
    assert "made with the old file" in edited and str(done.path) in edited
    (folder / "compare.yaml").write_text(COMPARISON)
    with pytest.raises(RunDirectoryError, match=r"algorithm\.name was .*own\.py:Own.* is \"apo\""):
        play(runs)


def test_another_model_is_not_taken_for_that_of_the_runs_that_are_done(runs: Runs) -> None:
    base = runs.out.parent / "base.yaml"
    base.write_text("policy: {path: one}\nwarm_start: {copy: {max_steps: 0}}\n")
    play(runs)
    base.write_text(base.read_text().replace("one", "another"))
    with pytest.raises(RunDirectoryError, match='policy.path was "one" and is "another"'):
        play(runs)


def test_runs_that_have_ended_go_on_if_they_are_given_more_steps(runs: Runs) -> None:
    play(runs)
    runs.calls.clear()
    file = runs.out.parent / "compare.yaml"
    file.write_text(COMPARISON + "shared: {training: {max_steps: 90}}\n")
    # A kill when the new number was written down, and nothing else was.
    killed = RunDirectory(runs.out / "seed-0" / "one").config
    killed.write_text(resolved_yaml(load_config(killed, ["--training.max_steps=90"])))
    play(runs)
    assert runs.calls == [
        f"{what} seed-{seed}/{name}"
        for seed in (0, 1)
        for name in ("one", "two")
        for what in ("train", "evaluate")
    ]
    play(runs)
    assert len(runs.calls) == 8, "once"
    file.write_text(COMPARISON + "shared: {training: {max_steps: 80}}\n")
    with pytest.raises(RunDirectoryError, match=r"training\.max_steps was 90 and is 80"):
        play(runs)


def test_runs_whose_learning_rate_has_fallen_do_not_go_on(runs: Runs) -> None:
    falling = "shared: {optimizer: {schedule: linear}, training: {max_steps: 60}}\n"
    file = runs.out.parent / "compare.yaml"
    file.write_text(COMPARISON + falling)
    play(runs)
    file.write_text(COMPARISON + falling.replace("60", "90"))
    with pytest.raises(RunDirectoryError, match=r"training\.max_steps was 60 and is 90"):
        play(runs)


@pytest.mark.slow
def test_pass_at_k_can_be_asked_for_when_all_runs_are_done(runs: Runs) -> None:
    play(runs)
    runs.calls.clear()
    text = COMPARISON + "shared: {evaluation: {pass_k: 8}}\n"
    (runs.out.parent / "compare.yaml").write_text(text)
    found = play(runs)
    assert len(runs.calls) == 4
    assert all(call.startswith("evaluate") for call in runs.calls)
    played = json.loads(found["two", 1].results.read_text())["evaluation"]
    assert played["pass_k"] == 8
    play(runs)
    assert len(runs.calls) == 4, "once"


def test_a_comparison_that_was_moved_is_reused(runs: Runs) -> None:
    play(runs)
    runs.calls.clear()
    runs.out = runs.out.rename(runs.out.with_name("moved"))
    found = play(runs)
    assert runs.calls == []
    config = found["one", 0].config
    kept = config.read_text()
    assert str(runs.out.with_name("out") / "seed-0" / "reference" / "references" / "0") in kept
    config.write_text(kept.replace("seed-0/reference", "seed-1/reference"))
    with pytest.raises(RunDirectoryError, match=r'policy\.path was ".*seed-1.* and is ".*seed-0'):
        play(runs)


@pytest.mark.slow
def test_runs_that_share_values_wait_for_the_first_and_take_its_store(runs: Runs) -> None:
    (runs.out.parent / "compare.yaml").write_text(SHARING)
    found = play(runs, parallel=4)
    train = [call.split("/")[1] for call in runs.calls if call.startswith("train")]
    assert train[0] == "one"
    stores = {
        name: load_config(run.config).values.store
        for (name, seed), run in found.items()
        if seed == 1
    }
    own = str((runs.out / "seed-1" / "one" / "values.sqlite").resolve())
    alone = dict.fromkeys(["one", "wider", "exact", "grpo"])
    assert stores == {**alone, "two": own, "lower": own}, "what is made of the samples may differ"
    runs.calls.clear()
    runs.out = runs.out.rename(runs.out.with_name("moved"))
    play(runs)
    assert runs.calls == []


@pytest.mark.slow
def test_a_run_that_sampled_its_own_stage_one_keeps_it(runs: Runs) -> None:
    """As those of a comparison that was begun when another beta1 shared no samples."""
    file = runs.out.parent / "compare.yaml"
    file.write_text(SHARING.replace("share_values: true\n", ""))
    play(runs)
    file.write_text(SHARING)
    runs.calls.clear()
    found = play(runs)
    assert runs.calls == []
    assert load_config(found["two", 1].config).values.store is None


SLEEPER = """
import time

print("sleeping", flush=True)
time.sleep(60)
"""


@contextlib.contextmanager
def parent_of(output: Path, work: Callable[[], object]) -> Iterator[tuple[Fork, IO[str]]]:
    """A process with children, and what they all print: it ends when the last of them does."""
    reading, writing = os.pipe()

    def print_there() -> None:
        os.close(reading)
        os.dup2(writing, 1)
        os.close(writing)
        work()

    parent = Fork(output, print_there)
    os.close(writing)
    with open(reading) as printed:
        yield parent, printed


def assert_all_end(parent: Fork, printed: IO[str]) -> None:
    """In less time than the sleeper sleeps."""
    end = time.monotonic() + 30
    while select.select([printed], [], [], end - time.monotonic())[0]:
        if not os.read(printed.fileno(), 4096):
            break
    else:
        pytest.fail("somebody goes on")
    parent.ended()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP", "SIGKILL"])
def test_children_end_when_the_parent_is_ended_by_any_signal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (tmp_path / "base.yaml").write_text("seed: 0\n")
    (tmp_path / "compare.yaml").write_text(COMPARISON)
    (tmp_path / "sleeper.py").write_text(SLEEPER)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))

    def sleep(*_: object, lifeline: Lifeline, **__: object) -> None:
        lifeline.call("sleeper", [])

    def play() -> None:
        os.chdir(tmp_path)
        execute.finish_run = sleep
        execute.play_comparison(load_comparison(Path("compare.yaml")), Path("out"), say=print)

    with parent_of(tmp_path / "output", play) as (parent, printed):
        assert printed.readline() == "sleeping\n"
        parent.send(signal.Signals[name])
        assert_all_end(parent, printed)
    assert parent.returncode != 0


@pytest.mark.slow
def test_a_comparison_that_is_terminated_leaves_no_run_behind_that_goes_on_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # So many steps that nothing but a signal ends the run.
    endless = factories.TINY_CONFIG.replace("max_steps: 12,", "max_steps: 1000000,")
    assert endless != factories.TINY_CONFIG
    (tmp_path / "base.yaml").write_text(endless)
    (tmp_path / "compare.yaml").write_text(COMPARISON)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))

    def compare() -> None:
        where = ("--config", str(tmp_path / "compare.yaml"), "--out", str(tmp_path / "out"))
        sys.argv = ["ragen-apo", "compare", *where]
        cli.main()

    with parent_of(tmp_path / "output", compare) as (parent, printed):
        for line in printed:
            if "copying" in line:
                break
        parent.send(signal.SIGTERM)
        assert_all_end(parent, printed)
    assert parent.returncode == 143
    # The lock of the run is free.
    with RunDirectory(tmp_path / "out" / "seed-0" / "reference").locked():
        pass
