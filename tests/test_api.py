"""The Python interface: runs from scripts and notebooks, environments of their own, refusals."""

import re
import subprocess
import sys
import threading
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ragen_apo
from ragen_apo import api
from ragen_apo.api import read_config
from ragen_apo.config import RunConfig, load_config
from ragen_apo.config.named_code import (
    ENVIRONMENT,
    file_being_imported,
    provide,
    reference_to,
    referenced_code,
)
from ragen_apo.config.yaml_text import dump_yaml
from ragen_apo.environments.frozen_lake import make_frozen_lake
from ragen_apo.environments.shop import ShopEnvironment
from ragen_apo.environments.toolkit.game import GameEnvironment
from ragen_apo.errors import ConfigError, RagenApoError, RunDirectoryError
from ragen_apo.stages import pipeline
from ragen_apo.types import Task
from tests.command_line import Command, snapshot

TINY: dict[str, Any] = {
    "machine": {"num_threads": 1, "device": "cpu"},
    "environment": {"name": "shop", "num_products": 12, "max_turns": 2},
    "agent": {"max_response_tokens": 12, "max_context_tokens": 256},
    "policy": {
        "small": {
            "vocab_size": 400,
            "hidden_size": 32,
            "num_layers": 2,
            "num_heads": 2,
            "intermediate_size": 64,
            "max_position": 256,
        }
    },
    "warm_start": {
        "copy": {"max_steps": 2, "batch_size": 4, "sequence_length": 32},
        "demonstrations": {"num_episodes_per_task": 1, "num_steps": 4, "batch_size": 8},
    },
    "values": {"num_samples": 1},
    "training": {"max_steps": 2, "tasks_per_step": 4, "eval_every": None},
    "evaluation": {"num_episodes": 3},
}
"""Every phase of a run in about a second; nothing is learned."""


SMOKE = Path(__file__).resolve().parents[1] / "configs" / "smoke.yaml"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> ragen_apo.Run:
    """A run that was trained and evaluated from Python."""
    run = ragen_apo.train(TINY, tmp_path_factory.mktemp("api") / "run", progress=False)
    ragen_apo.evaluate(run, progress=False)
    return run


@pytest.fixture
def new(tmp_path: Path) -> Path:
    """Where a test may make a run."""
    return tmp_path / "new"


def make_lake(size: int = 4) -> Any:
    """An environment that a file other than ragen_apo's defines."""
    return make_frozen_lake(size=size)


# Runs


def test_evaluate_returns_what_it_writes(run: ragen_apo.Run) -> None:
    results = ragen_apo.evaluate(run.files.path, split="train", episodes=2, progress=False)
    assert (results["split"], results["episodes"]) == ("train", 2)
    assert {"reference", "random"} <= results["baselines"].keys()
    assert len(ragen_apo.episodes(run)) == 2


@pytest.mark.slow
def test_a_search_by_another_method_has_no_option_of_the_configured_one(run: ragen_apo.Run) -> None:
    beam = {"method": "beam", "width": 1, "candidates": 3, "rank_by": "votes"}
    with_beam = replace(run, config=read_config(run.config, evaluation={"search": beam}))
    asked = {"method": "best_of_n", "width": 2}
    found = ragen_apo.evaluate(with_beam, episodes=1, search=asked, progress=False)["search"]
    assert (found["method"], found["width"], found["rank_by"]) == ("best_of_n", 2, "values")
    found = ragen_apo.evaluate(with_beam, episodes=1, search={"width": 2}, progress=False)["search"]
    assert (found["method"], found["width"], found["candidates"]) == ("beam", 2, 3)


def test_evaluating_waits_for_nobody_who_works_on_the_run(run: ragen_apo.Run) -> None:
    with run.files.locked(), pytest.raises(RunDirectoryError, match="another process is working"):
        ragen_apo.evaluate(run, episodes=2, progress=False)


def test_episodes_are_records_that_print_turn_by_turn(run: ragen_apo.Run) -> None:
    results = ragen_apo.evaluate(run, progress=False)
    episodes = ragen_apo.episodes(run.files.path)
    assert [episode.index for episode in episodes] == list(range(len(episodes)))
    assert len(episodes) == results["episodes"]
    first = episodes[0]
    assert isinstance(first.task, Task)
    assert first.episode_return == pytest.approx(sum(turn.reward for turn in first.turns))
    told = str(first)
    assert first.task.instruction in told
    assert all(f"--- turn {number}" in told for number in range(1, len(first.turns) + 1))


def test_a_text_that_would_steer_a_terminal_is_escaped_where_it_is_printed(
    run: ragen_apo.Run,
) -> None:
    episode = ragen_apo.episodes(run)[0].model_copy(update={"final_observation": "\x1b[2J"})
    assert "\\x1b[2J" in str(episode)
    assert "\x1b" not in str(episode)


def test_a_damaged_line_of_the_episodes_is_named(run: ragen_apo.Run, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").touch()
    (tmp_path / "evaluation").mkdir()
    (tmp_path / "evaluation" / "episodes.jsonl").write_text('{"episode": 0}\n')
    with pytest.raises(RunDirectoryError, match=r"episodes\.jsonl, line 1 cannot be used \(task"):
        ragen_apo.episodes(tmp_path)


def test_episodes_of_a_run_without_evaluation(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").touch()
    with pytest.raises(RunDirectoryError, match="was not evaluated"):
        ragen_apo.episodes(tmp_path)


def test_a_relative_run_is_not_found_from_another_directory_and_says_where_it_looked(
    run: ragen_apo.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(run.files.path.parent)
    relative = ragen_apo.open_run("run")
    monkeypatch.chdir(tmp_path)
    for use in (ragen_apo.evaluate, ragen_apo.episodes):
        with pytest.raises(RunDirectoryError) as caught:
            use(relative)
        assert str(caught.value).startswith(
            f"run is not a run: there is no folder {tmp_path / 'run'}."
        )


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
def test_the_report_is_written(run: ragen_apo.Run) -> None:
    paths = ragen_apo.write_report(run)
    assert paths[-1] == run.files.report / "report.html"
    assert all(path.is_file() for path in paths)


@pytest.mark.slow
def test_values_are_estimated(run: ragen_apo.Run) -> None:
    coverage = ragen_apo.estimate_values(run, samples=2, progress=False)
    assert set(coverage["tasks_by_num_samples"].values()) == {coverage["num_tasks"]}


def test_values_of_a_split_that_is_not_declared_are_refused(
    run: ragen_apo.Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the environment gives tasks of any split that it is asked for."""
    tasks = GameEnvironment.tasks
    monkeypatch.setattr(GameEnvironment, "tasks", lambda self, split: tasks(self, "train"))
    with pytest.raises(ConfigError, match="the split 'nope' has no tasks; expected train or test"):
        ragen_apo.estimate_values(run, split="nope", progress=False)


@pytest.mark.slow
def test_progress_is_shown_unless_it_is_turned_off(
    run: ragen_apo.Run, capsys: pytest.CaptureFixture[str]
) -> None:
    ragen_apo.evaluate(run, episodes=1, progress=False)
    assert capsys.readouterr().out == ""
    ragen_apo.evaluate(run, episodes=1)
    assert "evaluation: 4/4" in capsys.readouterr().out


def test_the_package_is_imported_without_torch() -> None:
    code = "import sys, ragen_apo; ragen_apo.train, ragen_apo.Run; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    stub = (Path(ragen_apo.__file__).parent / "__init__.pyi").read_text(encoding="utf-8")
    declared = re.findall(r" as (\w+)$", stub, re.MULTILINE)
    assert set(declared) < set(dir(ragen_apo))
    assert all(callable(getattr(ragen_apo, name)) for name in declared)
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        ragen_apo.trian  # type: ignore[attr-defined]  # noqa: B018


# The warm start alone, and what goes on from it


@pytest.mark.slow
def test_warm_start_makes_the_reference_and_train_goes_on_to_the_same_weights(
    run: ragen_apo.Run, new: Path, command: Command
) -> None:
    config = new.with_name("tiny.yaml")
    config.write_text(dump_yaml(TINY))
    started = command("warm-start", "--config", config, "--run-dir", new)
    assert started.status == 0, started.err
    assert f"reference: {new}/references/0" in started.out
    assert not (new / "policy").exists()
    assert not (new / "values.sqlite").exists()
    before = snapshot(new)
    again = command("warm-start", "--run-dir", new, "--resume")
    assert "has its reference already" in again.out
    assert snapshot(new) == before
    resumed = ragen_apo.train(run_dir=new, resume=True, progress=False)
    assert snapshot(resumed.files.policy) == snapshot(run.files.policy)
    assert resumed.files.read_status()["attempts"] == 1, "it ended where it was asked to"
    assert run.files.read_status()["attempts"] == 1


def test_a_finished_run_that_is_resumed_counts_no_attempt(run: ragen_apo.Run) -> None:
    before = run.files.status.read_bytes()
    ragen_apo.train(TINY, run.files.path, resume=True, progress=False)
    assert run.files.status.read_bytes() == before


# Configurations


def test_a_configuration_may_be_a_path_a_mapping_or_a_record(tmp_path: Path) -> None:
    path = tmp_path / "tiny.yaml"
    path.write_text(dump_yaml(TINY))
    record = load_config(path)
    assert read_config(path) == read_config(str(path)) == read_config(TINY) == record
    assert read_config(record) == record
    started = {"path": tmp_path, "freeze_embeddings": True}
    with pytest.raises(ConfigError, match=r"warm_start\.copy trains on random tokens"):
        read_config(record, policy=started)
    changed = read_config(record, algorithm="grpo", policy=started, warm_start={"enabled": False})
    assert (changed.algorithm.name, changed.warm_start.enabled) == ("grpo", False)
    assert changed.policy.path == str(tmp_path)
    assert changed.policy.small == record.policy.small


def test_a_second_training_in_another_thread_is_refused_and_makes_no_run(
    new: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As models are not loaded side by side; afterwards another may train."""
    refused: list[str] = []

    def play(*_: Any, **options: Any) -> None:
        def train_too() -> None:
            try:
                ragen_apo.train(SMOKE, new.with_name("other"), progress=False)
            except ConfigError as error:
                refused.append(str(error))

        if not refused:
            thread = threading.Thread(target=train_too)
            thread.start()
            thread.join()

    monkeypatch.setattr(pipeline, "train", play)
    ragen_apo.train(SMOKE, new, progress=False)
    (message,) = refused
    assert "another thread of this process trains a run" in message
    assert new.exists() and not new.with_name("other").exists()
    ragen_apo.train(SMOKE, new.with_name("third"), progress=False)


@pytest.mark.parametrize("given", [[1, 2], 3, b"configs/shop.yaml"])
def test_what_is_no_configuration_is_refused_and_makes_no_run(given: Any, new: Path) -> None:
    expected = "expected the path of a YAML file .*, a mapping of its sections or a RunConfig"
    with pytest.raises(ConfigError, match=re.escape(f"config: got {given!r}, ") + expected):
        ragen_apo.train(given, new)
    assert not new.exists()


@pytest.mark.parametrize("given", [None, ["runs/mine"], 3])
def test_what_is_no_path_is_refused_with_the_argument_s_name(given: Any) -> None:
    for name, call in {
        "run_dir": lambda: ragen_apo.train(SMOKE, given),
        "run": lambda: ragen_apo.evaluate(given),
        "out": lambda: ragen_apo.compare(SMOKE, given),
    }.items():
        with pytest.raises(ConfigError, match=re.escape(f"{name}: got {given!r}, expected a path")):
            call()


@pytest.mark.parametrize("parallel", [0, 2.5, "2", True])
def test_a_number_of_runs_at_a_time_is_a_whole_number(parallel: Any, new: Path) -> None:
    with pytest.raises(ConfigError, match="parallel must be a whole number of at least 1 and at"):
        ragen_apo.compare(SMOKE, new, parallel=parallel)


def test_numbers_of_numpy_are_numbers() -> None:
    given = {"training": {"max_steps": np.int64(3)}, "algorithm": {"beta2": np.float32(0.5)}}
    changed = read_config(given, values={"adaptive": np.bool_(False)})
    assert (changed.training.max_steps, changed.algorithm.beta2) == (3, 0.5)
    assert changed.values.adaptive is False


def test_changes_that_cannot_be_used_are_refused_together_and_make_no_run(new: Path) -> None:
    with pytest.raises(ConfigError, match=r"(?s)seed: got -1.*training\.max_step: unknown"):
        ragen_apo.train(TINY, new, training={"max_step": 3}, seed=-1)
    with pytest.raises(ConfigError, match=r"evaluation\.split: .*'tset'"):
        ragen_apo.train(TINY, new, evaluation={"split": "tset"})
    assert not new.exists()


def test_an_unknown_end_is_refused_and_makes_no_run(new: Path) -> None:
    until: Any = "refrence"
    with pytest.raises(ConfigError, match="until: got 'refrence', expected reference or policy"):
        ragen_apo.train(TINY, new, until=until)
    assert not new.exists()


def test_a_start_that_fails_leaves_nothing_behind(
    new: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise RagenApoError("no")

    monkeypatch.setattr("ragen_apo.stages.pipeline.open_session", fails)
    with pytest.raises(ragen_apo.RagenApoError, match="no"):
        ragen_apo.train(TINY, new, progress=False)
    assert not new.exists()


def test_a_directory_in_use_is_refused_and_says_how_to_continue(run: ragen_apo.Run) -> None:
    with pytest.raises(RunDirectoryError, match="resume=True"):
        ragen_apo.train(TINY, run.files.path)


def test_a_run_is_resumed_as_it_is_or_not_at_all(run: ragen_apo.Run, new: Path) -> None:
    path = run.files.path
    with pytest.raises(RunDirectoryError, match="another configuration.*: seed was 0 and is 1"):
        ragen_apo.train(TINY, path, resume=True, seed=1)
    with pytest.raises(RunDirectoryError, match="another configuration.*: seed was 0 and is 1"):
        ragen_apo.train(None, path, resume=True, seed=1)
    with pytest.raises(ConfigError, match="leave environment out"):
        ragen_apo.train(None, path, resume=True, environment="bandit")
    with pytest.raises(RunDirectoryError, match="is not a run"):
        ragen_apo.train(TINY, new, resume=True)
    with pytest.raises(ConfigError, match="config is None"):
        ragen_apo.train(run_dir=new)
    with pytest.raises(ConfigError, match="run_dir: got None, expected a path"):
        ragen_apo.train(TINY)


@pytest.mark.parametrize("asked", [{"episodes": 0}, {"pass_k": 0}])
def test_numbers_out_of_range_are_refused(run: ragen_apo.Run, asked: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="at least 1|greater than or equal to 1"):
        ragen_apo.evaluate(run, progress=False, **asked)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"concurrency": 2.5}, "concurrency must be a whole number of at least 1 .*, got 2.5"),
        ({"max_tokens": "512"}, "max_tokens must be a whole number .*, got '512'"),
        ({"timeout_seconds": None}, "timeout_seconds must be a number .*, got None"),
        ({"concurrency": True}, "concurrency must be a whole number .*, got True"),
        ({"model": 3}, "model: got 3, expected text"),
        ({"base_url": None}, "base_url: got None, expected text"),
        ({"extra_body": "x"}, "extra_body: got 'x', expected a mapping"),
    ],
)
def test_what_is_no_number_is_refused_before_a_server_is_asked(
    asked: dict[str, Any], words: str, new: Path
) -> None:
    with pytest.raises(ConfigError, match=words):
        ragen_apo.evaluate_api(
            **{"model": "m", "out": new, "base_url": "http://127.0.0.1:9/v1"} | asked, config=TINY
        )


@pytest.mark.parametrize("task", ["0", None, 1.5, -1])
def test_a_task_that_is_no_number_is_refused(task: Any) -> None:
    with pytest.raises(ConfigError, match="task must be a whole number of at least 0"):
        api.show_prompt(TINY, task=task)


def test_a_reference_that_is_no_number_is_refused(run: ragen_apo.Run) -> None:
    with pytest.raises(ConfigError, match="reference must be a whole number of at least 0"):
        ragen_apo.estimate_values(run, reference="0", progress=False)  # type: ignore[arg-type]


def test_an_empty_path_is_not_the_present_folder() -> None:
    with pytest.raises(ConfigError, match="run_dir: got an empty path"):
        ragen_apo.train(TINY, "")


# Environments


def test_the_environment_takes_the_place_of_the_configured_one_and_of_its_options() -> None:
    named = read_config(TINY, environment="bandit").environment
    assert (named.name, named.options) == ("bandit", {})
    section = {"name": make_lake, "size": 4}
    own = read_config(TINY, environment=section).environment
    assert own.name == reference_to(make_lake, ENVIRONMENT) == f"{__name__}:make_lake"
    assert own.options == {"size": 4}
    assert section["name"] is make_lake
    changed = read_config(TINY, environment={"max_turns": 3}).environment
    assert changed.options == {"num_products": 12, "max_turns": 3}


def test_a_reference_leads_to_where_a_function_is_defined(monkeypatch: pytest.MonkeyPatch) -> None:
    def module(name: str, **attributes: Any) -> Any:
        made = types.ModuleType(name)
        monkeypatch.setitem(sys.modules, name, made)
        exec("def make(): ...", made.__dict__)
        vars(made).update(attributes)
        return made.make

    script = module("__main__", __file__="/here/script.py", __package__="pkg")
    assert reference_to(script, ENVIRONMENT) == "/here/script.py:make"
    packaged = module("pkg.worlds", __file__="/there/worlds.py", __package__="pkg")
    assert reference_to(packaged, ENVIRONMENT) == "pkg.worlds:make"
    alone = module("worlds", __file__="/there/worlds.py", __package__="")
    assert reference_to(alone, ENVIRONMENT) == "/there/worlds.py:make"
    notebook = module("__main__")
    assert reference_to(notebook, ENVIRONMENT) == "__main__:make"


@pytest.mark.parametrize("call", ["train({}, 'second')", "compare('compare_shop', 'second')"])
def test_a_script_that_is_imported_for_its_environment_starts_no_second_run(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`evaluate` trained a whole run where the script had no `if __name__ == "__main__"`."""
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "script.py"
    script.write_text(f"import ragen_apo\ndef make_it(): ...\nragen_apo.{call}\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=rf"{script} is being imported.* `if __name__ == "):
        referenced_code(f"{script}:make_it", ENVIRONMENT)
    assert not (tmp_path / "second").exists()
    assert file_being_imported() is None


def test_what_a_notebook_defined_has_to_be_handed_over_again() -> None:
    with pytest.raises(ConfigError, match="defined in a notebook.*environment=make_only_here"):
        referenced_code("__main__:make_only_here", ENVIRONMENT)
    provide("__main__:make_only_here", make_lake)
    assert referenced_code("__main__:make_only_here", ENVIRONMENT) is make_lake


@pytest.mark.parametrize(
    ("factory", "part"),
    [
        (lambda: make_lake(6), "expected a function or class that a file"),
        (object(), "expected a function or class that a file"),
        (ShopEnvironment, "give its name, such as shop"),
    ],
    ids=["lambda", "object", "ours"],
)
def test_what_no_other_process_could_find_is_no_environment(factory: Any, part: str) -> None:
    with pytest.raises(ConfigError, match=part):
        read_config(TINY, environment=factory)


def test_an_environment_that_is_handed_over_can_be_called() -> None:
    """As `open_run(run, environment=...)` does: it once took anything, and evaluating failed."""
    made: Any = make_lake()
    with pytest.raises(ConfigError, match="got <.*GameEnvironment.*expected a function or class"):
        provide("__main__:make_only_here", made)


def test_a_run_of_a_built_in_environment_takes_no_other(run: ragen_apo.Run) -> None:
    with pytest.raises(ConfigError, match="plays 'shop'.*leave environment out"):
        ragen_apo.evaluate(run.files.path, environment=make_lake)


def test_runs_may_be_the_keys_of_a_mapping(run: ragen_apo.Run) -> None:
    assert {run: 1.0}[ragen_apo.open_run(run.files.path)] == 1.0


def test_the_record_of_a_run_holds_its_configuration(run: ragen_apo.Run) -> None:
    assert run.config == RunConfig.model_validate(TINY)
    assert ragen_apo.open_run(run) is run
    assert ragen_apo.open_run(run.files.path) == run
