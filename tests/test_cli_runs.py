"""Runs that are damaged, edited or somebody else's, and starts that fail: nothing is lost."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

import ragen_apo
from ragen_apo.config import load_config
from ragen_apo.config.load import YOUNG_KEYS
from ragen_apo.config.overrides import merge, nested
from ragen_apo.config.removed import REMOVED
from ragen_apo.config.yaml_text import dump_yaml, parse_yaml
from ragen_apo.files import read_json_lines, write_checksums
from ragen_apo.stages.origin import may_change
from tests import factories
from tests.command_line import Command, assert_refused, snapshot
from tests.fake_vllm import HangupError, serving
from tests.sweeps import quick_first

# Resuming


@pytest.mark.parametrize("version", [0, 1])
def test_stage_two_whose_reference_was_removed_is_not_resumed(
    version: int, command: Command, unfinished: Path
) -> None:
    """The policy was trained against it; the log ratio to anything else would be another one."""
    shutil.rmtree(unfinished / "references" / str(version))
    before = snapshot(unfinished)
    result = command("train", "--run-dir", unfinished, "--resume")
    assert_refused(result, f"references/{version} is missing", "Put the folder back")
    notes = {"run.json"}  # the seconds of this attempt
    assert {name for name, _ in snapshot(unfinished).items() ^ before.items()} <= notes


@pytest.mark.parametrize("version", [0, 1])
def test_stage_two_whose_reference_was_replaced_is_not_resumed(
    version: int, command: Command, unfinished: Path
) -> None:
    """By a model that is whole: its own checksums are right."""
    folder = unfinished / "references" / str(version)
    shutil.rmtree(folder)
    shutil.copytree(unfinished / "initial", folder)
    result = command("train", "--run-dir", unfinished, "--resume")
    assert_refused(result, f"references/{version} is another model", "Put the original folder back")


@pytest.mark.slow
def test_a_file_that_is_added_to_a_model_of_the_run_is_found(command: Command, run: Path) -> None:
    (run / "policy" / ".DS_Store").touch()
    assert command("evaluate", run).status == 0
    (run / "policy" / "adapter_config.json").write_text("{}")
    result = command("evaluate", run)
    assert_refused(result, "adapter_config.json was added to what was written")


def test_stage_two_without_references_and_checkpoints_keeps_its_metrics(
    command: Command, unfinished: Path
) -> None:
    for name in ("references", "checkpoints"):
        shutil.rmtree(unfinished / name)
    before = read_json_lines(unfinished / "metrics.jsonl")
    assert_refused(command("train", "--run-dir", unfinished, "--resume"), "references/0 is missing")
    assert read_json_lines(unfinished / "metrics.jsonl") == before != []


def test_a_finished_run_without_checkpoints_is_not_started_again(
    command: Command, run: Path
) -> None:
    shutil.rmtree(run / "checkpoints")
    before = snapshot(run)
    result = command("train", "--run-dir", run, "--resume", "--no-evaluate")
    assert result.status == 0
    assert "is trained already" in result.out
    assert snapshot(run) == before


VERBS = ["train", "evaluate", "estimate-values"]


def going_on(verb: str, run: Path) -> list[object]:
    """The command that goes on with a run in this way."""
    return [verb, *(["--run-dir", run, "--resume", "--no-evaluate"] if verb == "train" else [run])]


@pytest.mark.parametrize("end", ["seed", "  num_threads", "  center_residuals"])
@pytest.mark.parametrize("verb", VERBS)
def test_a_run_whose_configuration_was_emptied_or_cut_off_does_not_go_on_with_defaults(
    end: str, verb: str, command: Command, unfinished: Path
) -> None:
    file = unfinished / "config.yaml"
    whole = file.read_text()
    assert whole.count(end) == 1
    file.write_text(whole.partition(end)[0])
    before = snapshot(unfinished)
    result = command(*going_on(verb, unfinished))
    assert_refused(result, "config.yaml lacks", "of a run's keys", "Put the undamaged file back")
    assert snapshot(unfinished) == before


@pytest.mark.parametrize(
    "older", quick_first(["rollouts:\n(?: .*\n)+", "  ahead: .*\n", "  schedule: static\n"])
)
def test_a_run_that_is_older_than_some_keys_goes_on_with_their_defaults(
    older: str, command: Command, unfinished: Path
) -> None:
    file, notes = unfinished / "config.yaml", unfinished / "run.json"
    text, noted = file.read_text(), json.loads(notes.read_text())
    removed = older, "  sharding: .*\n", "  keep_episodes: .*\n", "  response_format: .*\n"
    for section in removed:
        text, num_removed = re.subn(f"^{section}", "", text, flags=re.MULTILINE)
        assert num_removed == 1
    file.write_text(text)
    del noted["configuration"]["rollouts"]
    del noted["configuration"]["machine"]["sharding"]
    del noted["configuration"]["training"]["keep_episodes"]
    del noted["configuration"]["agent"]["response_format"]
    notes.write_text(json.dumps(noted))
    assert command("train", "--run-dir", unfinished, "--resume", "--no-evaluate").status == 0


def forget(run: Path, section: str, key: str) -> None:
    """Leaves the run as a version did that had no such key."""
    file, notes = run / "config.yaml", run / "run.json"
    text, num_removed = re.subn(f"^  {key}: .*\n", "", file.read_text(), flags=re.MULTILINE)
    assert num_removed == 1
    file.write_text(text)
    noted = json.loads(notes.read_text())
    del noted["configuration"][section][key]
    notes.write_text(json.dumps(noted))


@pytest.mark.parametrize("verb", quick_first(VERBS))
def test_a_run_that_is_older_than_an_option_of_its_algorithm_goes_on_with_the_default(
    verb: str, command: Command, unfinished: Path
) -> None:
    forget(unfinished, "algorithm", "fit_values")
    assert command(*going_on("train", unfinished)).status == 0
    assert command(*going_on(verb, unfinished)).status == 0


@pytest.mark.parametrize("verb", quick_first(VERBS))
def test_a_run_that_has_keys_that_are_gone_goes_on(
    verb: str, command: Command, unfinished: Path
) -> None:
    file, notes = unfinished / "config.yaml", unfinished / "run.json"
    old: dict[str, Any] = parse_yaml(file.read_text())[0]
    for key, gone in REMOVED.items():
        for value in gone.same:
            old = merge(old, nested(key, value))
    file.write_text(dump_yaml(old))
    noted = json.loads(notes.read_text())
    notes.write_text(json.dumps({**noted, "configuration": old}))
    assert command(*going_on("train", unfinished)).status == 0
    assert command(*going_on(verb, unfinished)).status == 0
    file.write_text(file.read_text().replace("min_weight: 0.05", "min_weight: 0.5"))
    result = command(*going_on(verb, unfinished))
    assert_refused(result, "distillation.min_weight: unknown key; it has been removed")


@pytest.mark.parametrize("verb", quick_first(VERBS))
def test_a_key_that_an_older_run_lacks_is_added_with_its_default_and_with_no_other_value(
    verb: str, command: Command, unfinished: Path
) -> None:
    assert command(*going_on("train", unfinished)).status == 0
    forget(unfinished, "optimizer", "max_grad_norm")
    result = command(*going_on(verb, unfinished))
    assert_refused(result, "lacks 1 of a run's keys, such as optimizer.max_grad_norm", "add these")
    file = unfinished / "config.yaml"
    text = file.read_text()
    file.write_text(text.replace("optimizer:\n", "optimizer:\n  max_grad_norm: 0.5\n"))
    result = command(*going_on(verb, unfinished))
    assert_refused(result, "optimizer.max_grad_norm was 1.0 and is 0.5")
    file.write_text(text.replace("optimizer:\n", "optimizer:\n  max_grad_norm: 1.0\n"))
    assert command(*going_on(verb, unfinished)).status == 0


def test_keys_that_an_older_run_lacks_are_keys_that_may_change() -> None:
    for key in YOUNG_KEYS:
        assert may_change(key), key


@pytest.mark.parametrize(
    ("line", "edited", "change"),
    quick_first(
        [
            ("seed: 0", "seed: 1", "seed was 0 and is 1"),
            ("  loss: regression", "  loss: weighted", 'loss was "regression" and is "weighted"'),
            ("  num_products: 24", "  num_products: 23", "num_products was 24 and is 23"),
            ("  num_products: 24\n", "", "environment.num_products was 24 and is null"),
            ("  beta2: 0.05", "  beta2: 0.06", "algorithm.beta2 was 0.05 and is 0.06"),
        ]
    ),
)
def test_a_run_whose_configuration_was_edited_is_not_resumed(
    line: str, edited: str, change: str, command: Command, unfinished: Path
) -> None:
    file = unfinished / "config.yaml"
    text = file.read_text()
    assert text.count(line) == 1
    file.write_text(text.replace(line, edited))
    before = snapshot(unfinished)
    result = command("train", "--run-dir", unfinished, "--resume")
    assert_refused(result, "was edited since this run started", change, "put those back")
    assert snapshot(unfinished) == before
    file.write_text(text)
    assert command("train", "--run-dir", unfinished, "--resume", "--no-evaluate").status == 0


def test_a_half_done_run_without_its_notes_is_not_resumed(
    command: Command, unfinished: Path
) -> None:
    """Without them an edited configuration would pass for the one that the run was started with."""
    (unfinished / "run.json").unlink()
    before = snapshot(unfinished)
    result = command("train", "--run-dir", unfinished, "--resume")
    assert_refused(result, "run.json is missing", "Put it back")
    assert snapshot(unfinished) == before


def test_a_refused_resume_does_not_note_an_edited_configuration(
    command: Command, unfinished: Path
) -> None:
    """As of a run that an earlier version made: without notes of its configuration."""
    file = unfinished / "run.json"
    status = json.loads(file.read_text())
    for key in ("configuration", "environment"):
        del status[key]
    file.write_text(json.dumps(status))
    config = unfinished / "config.yaml"
    text = config.read_text()
    config.write_text(text.replace("seed: 0", "seed: 5"))
    sums = unfinished / "checkpoints" / "4-training-000006" / "SHA256SUMS"
    kept = sums.read_bytes()
    sums.unlink()
    assert_refused(command("train", "--run-dir", unfinished, "--resume"), "SHA256SUMS is missing")
    assert not {"configuration", "environment"} & json.loads(file.read_text()).keys()
    sums.write_bytes(kept)
    config.write_text(text)
    assert command("train", "--run-dir", unfinished, "--resume", "--no-evaluate").status == 0
    assert json.loads(file.read_text())["configuration"]["seed"] == 0


def test_stage_two_without_its_checkpoints_keeps_its_metrics(
    command: Command, unfinished: Path
) -> None:
    shutil.rmtree(unfinished / "checkpoints")
    before = (unfinished / "metrics.jsonl").read_bytes()
    result = command("train", "--run-dir", unfinished, "--resume")
    assert_refused(result, "no checkpoint of it", "Put the checkpoints back")
    assert (unfinished / "metrics.jsonl").read_bytes() == before


@pytest.mark.slow
def test_a_run_that_was_killed_before_its_first_checkpoint_goes_on(
    command: Command, unfinished: Path
) -> None:
    """However often checkpoints are due now, and were before."""
    notes = unfinished / "run.json"
    status = json.loads(notes.read_text())
    assert len(read_json_lines(unfinished / "metrics.jsonl")) > 2, "one every two steps is due"
    del status["phases"]["stage 2"]["checkpoint_seconds"]
    notes.write_text(json.dumps(status))
    for checkpoint in (unfinished / "checkpoints").glob("4-*"):
        shutil.rmtree(checkpoint)
    assert command("train", "--run-dir", unfinished, "--resume", "--no-evaluate").status == 0


@pytest.mark.parametrize("verb", ["evaluate", "estimate-values"])
def test_a_run_whose_environment_was_edited_is_not_measured_on_it(
    verb: str, command: Command, run: Path
) -> None:
    file = run / "config.yaml"
    file.write_text(file.read_text().replace("  num_products: 24", "  num_products: 30"))
    before = snapshot(run)
    assert_refused(command(verb, run), "num_products was 24 and is 30")
    assert snapshot(run) == before


def test_the_split_of_a_curve_may_not_change_within_it(command: Command, unfinished: Path) -> None:
    file = unfinished / "config.yaml"
    file.write_text(file.read_text().replace("  split: test", "  split: train"))
    result = command("train", "--run-dir", unfinished, "--resume")
    assert_refused(result, 'evaluation.split was "test" and is "train"')


@pytest.mark.slow
def test_how_a_run_uses_the_machine_may_be_edited(command: Command, unfinished: Path) -> None:
    file = unfinished / "config.yaml"
    text = file.read_text()
    changes = {
        "  num_threads: 1": "  num_threads: 2",
        "  micro_batch_size: 4": "  micro_batch_size: 2",
    }
    for line, edited in changes.items():
        assert text.count(line) == 1
        text = text.replace(line, edited)
    file.write_text(text)
    assert command("train", "--run-dir", unfinished, "--resume", "--no-evaluate").status == 0


# Code of others

INTRUDER = """
import pathlib
from transformers import LlamaConfig, LlamaForCausalLM

pathlib.Path(__file__).with_name("ran").touch()
pathlib.Path({mark!r}).touch()


class Config(LlamaConfig):
    model_type = "intruder"


class Model(LlamaForCausalLM):
    config_class = Config
"""


@pytest.fixture
def strangers_run(run: Path, tmp_path: Path) -> tuple[Path, Path]:
    """A run that says it may run the code of its model, and the file that this code makes."""
    mark = tmp_path / "the code ran"
    for folder in (run / "policy", run / "references" / "0"):
        (folder / "intruder.py").write_text(INTRUDER.format(mark=str(mark)))
        values = json.loads((folder / "config.json").read_text())
        names = {"AutoConfig": "intruder.Config", "AutoModelForCausalLM": "intruder.Model"}
        values |= {"model_type": "intruder", "auto_map": names}
        (folder / "config.json").write_text(json.dumps(values))
        write_checksums(folder)
    config = run / "config.yaml"
    text = config.read_text()
    assert text.count("trust_remote_code: false") == 1
    config.write_text(text.replace("trust_remote_code: false", "trust_remote_code: true"))
    return run, mark


@pytest.mark.parametrize("verb", ["evaluate", "estimate-values", "train"])
def test_a_strangers_run_does_not_get_its_code_run_by_saying_so_itself(
    verb: str, command: Command, strangers_run: tuple[Path, Path]
) -> None:
    run, mark = strangers_run
    arguments = [run]
    if verb == "train":
        shutil.rmtree(run / "policy")
        arguments = ["--run-dir", run, "--resume"]
    assert_refused(command(verb, *arguments), "Python code of its own", "--trust-remote-code")
    assert not mark.exists()


@pytest.mark.parametrize("verb", ["evaluate", "estimate-values", "train"])
def test_a_strangers_run_gets_no_secret_sent_by_naming_its_variable(
    verb: str, command: Command, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOME_TOKEN", "a-secret")
    given = ["--run-dir", run, "--resume"] if verb == "train" else [run]
    if verb == "estimate-values":
        given += ["--samples", "9"]
    values = parse_yaml((run / "config.yaml").read_text())[0]
    values["training"]["max_steps"] += 1
    with serving(run / "policy") as (server, address):
        server.spoil = _hangs_up
        values["rollouts"] |= {"engine": "vllm", "base_url": [address], "retries": 0}
        values["rollouts"]["api_key_env"] = "SOME_TOKEN"
        (run / "config.yaml").write_text(dump_yaml(values))
        refused = command(verb, *given)
        assert not server.asked
        assert_refused(refused, "sends the value of SOME_TOKEN", address, "--trust-remote-code")
        own_words = [["--trust-remote-code"]]
        if verb == "train":
            own_words.append(["--rollouts.api_key_env", "SOME_TOKEN"])
        for words in own_words:
            assert_refused(command(verb, *given, *words), "the connection failed")
            assert server.asked
            server.asked.clear()


def _hangs_up(path: str, answer: Any) -> Any:
    raise HangupError


@pytest.mark.slow
def test_code_of_a_model_runs_where_the_command_line_trusts_it(
    command: Command, strangers_run: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control of the test above: without the refusal, the code would have run."""
    run, mark = strangers_run
    monkeypatch.setenv("HF_MODULES_CACHE", str(run.parent / "modules"))
    command("evaluate", run, "--trust-remote-code")
    assert mark.exists()


def test_a_new_run_is_told_where_trust_is_said(
    command: Command, config: Path, tmp_path: Path
) -> None:
    start = ("train", "--config", config, "--run-dir", tmp_path / "new", "--trust-remote-code")
    assert_refused(command(*start), "goes with --resume", "--policy.trust_remote_code true")
    assert not (tmp_path / "new").exists()


# Starts that fail


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (("--machine.device", "cuda"), "machine.device is cuda"),
        (("--policy.path", "./nothere", "--warm_start.enabled", "false"), "nothere"),
    ],
)
def test_a_start_that_cannot_work_is_refused_before_a_run_is_made(
    change: tuple[str, ...], part: str, command: Command, config: Path, tmp_path: Path
) -> None:
    result = command("train", "--config", config, "--run-dir", tmp_path / "new", *change)
    assert_refused(result, part)
    assert not (tmp_path / "new").exists()


def test_a_model_that_is_refused_when_it_is_loaded_leaves_no_run_behind(
    command: Command, config: Path, run: Path, tmp_path: Path
) -> None:
    (run / "policy" / "chat_template.jinja").write_text("{{ raise_exception('no') }}")
    write_checksums(run / "policy")
    start = ("train", "--config", config, "--run-dir", tmp_path / "new", "--no-evaluate")
    model = ("--policy.path", run / "policy", "--warm_start.enabled", "false")
    assert_refused(command(*start, *model), "chat template", "fails")
    assert not (tmp_path / "new").exists()
    (tmp_path / "new").mkdir()
    assert_refused(command(*start, *model), "chat template", "fails")
    assert list((tmp_path / "new").iterdir()) == []


def test_a_start_that_failed_after_it_computed_something_is_kept(
    command: Command, config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr("ragen_apo.stages.pipeline.run_supervised_phase", fails)
        result = command("train", "--config", config, "--run-dir", tmp_path / "new")
    assert_refused(result, "Input/output error")
    assert (tmp_path / "new" / "initial").is_dir()
    assert (tmp_path / "new" / "config.yaml").is_file()


def test_a_prompt_is_shown_token_by_token_with_its_mask(
    command: Command, config: Path, run: Path
) -> None:
    result = command("show-prompt", config, "--run", run, "--agent.format_penalty", "-0.5")
    assert result.status == 0
    lines = result.out.splitlines()
    assert "User" in lines[0] and lines[1].startswith("teacher: ")
    first = next(index for index, line in enumerate(lines) if line.startswith("    0 "))
    assert lines[first].split() == ["0", "2", "'<|user|>'"]
    assert "return" in lines[1] and lines[1].endswith(("ended the episode", "limit was reached"))
    opening = re.match(r"context 1 of 1 \(turns 1 to \d\): (\d+) tokens, (\d+)", lines[first - 1])
    assert opening, lines[first - 1]
    num_tokens, num_trained = map(int, opening.groups())
    assert len(lines) - first == num_tokens
    assert sum(line.split()[2] == "*" for line in lines[first:]) == num_trained > 0


# What is missing or in the wrong place


@pytest.mark.parametrize("verb", ["train", "warm-start"])
def test_what_train_lacks_is_named(verb: str, command: Command, tmp_path: Path) -> None:
    config = tmp_path / "tiny.yaml"
    config.write_text(factories.TINY_CONFIG)
    assert_refused(command(verb, "--config", config), "--run-dir is missing; say where the run is")
    assert_refused(command(verb, config), f"--config is missing; write --config {config}")
    assert_refused(command(verb, "--run-dir", tmp_path / "run"), "--config is missing; give a YAML")


def test_a_folder_that_is_no_run_is_not_to_be_resumed(command: Command, run: Path) -> None:
    result = command("train", "--config", run / "config.yaml", "--run-dir", run.parent)
    assert_refused(result, "is not an empty directory. It is no run. Choose another --run-dir")
    assert "--resume" not in result.message
    result = command("train", "--config", run / "config.yaml", "--run-dir", run)
    assert_refused(result, "Continue that run with --resume")


def test_a_comparison_is_not_written_into_a_run(command: Command, run: Path) -> None:
    file = run.parent / "compare.yaml"
    file.write_text(f"base: {run / 'config.yaml'}\nseeds: [0]\nruns: {{a: {{}}}}\n")
    before = snapshot(run)
    result = command("compare", "--config", file, "--out", run)
    assert_refused(result, "is a run, and a comparison has a folder of its own; give another --out")
    assert snapshot(run) == before


@pytest.mark.slow
def test_a_tilde_is_the_users_folder(
    command: Command, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shells leave it as it is in quotes and after `=`; a folder of that name would be a trap."""
    monkeypatch.setenv("HOME", str(run.parent))
    monkeypatch.chdir(tmp_path)
    name = run.name
    assert command("report", f"~/{name}").status == 0
    result = command("train", f"--run-dir=~/{name}", f"--config=~/{name}/config.yaml")
    assert_refused(result, f"{run} exists already")
    assert ragen_apo.episodes(f"~/{name}")
    config = load_config(
        f"~/{name}/config.yaml", ["--policy.path=~/m", "--warm_start.enabled=false"]
    )
    assert config.policy.path == f"{run.parent}/m"
    assert not (tmp_path / "~").exists()
    lone = command("train", "--config", run / "config.yaml", "--run-dir", run, "--values.store=~")
    assert_refused(lone, f"{run} exists already")  # alone it is YAML's null
    base = tmp_path / "compare.yaml"
    base.write_text(f"base: ~/{name}/config.yaml\nseeds: [0]\nruns: {{a: {{}}}}\n")
    assert_refused(command("compare", "--config", base, "--out", run), "is a run")


@pytest.mark.parametrize("option", ["--environment.catalogue", "--policy.path"])
def test_a_tilde_with_the_name_of_nobody_is_no_home(
    option: str, command: Command, run: Path, tmp_path: Path
) -> None:
    path = tmp_path / "new"
    result = command(
        "train", "--config", run / "config.yaml", "--run-dir", path, option, "~no-one/x"
    )
    assert_refused(result, "~no-one/x")
