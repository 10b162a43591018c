"""`--pretrained MODEL`: a configuration for the small model trains a pretrained one."""

from pathlib import Path

import pytest

from ragen_apo.api import read_config
from ragen_apo.config import load_config
from ragen_apo.config.messages import keys_of
from ragen_apo.config.pretrained import FEWEST, LONGEST
from ragen_apo.config.run import RunConfig
from ragen_apo.errors import ConfigError
from ragen_apo.run_directory import RunDirectory
from tests.command_line import Command, assert_refused

MODEL = "owner/model"


def test_limits_in_tokens_are_the_larger_ones_and_counts_the_smaller() -> None:
    given = {
        "agent": {"max_response_tokens": 10, "max_context_tokens": 9000},
        "training": {"max_steps": 3, "tasks_per_step": 500, "max_tasks": None},
        "values": {"num_samples": 1},
        "reference": {"refresh_every_steps": None},
    }
    config = read_config(given, pretrained=MODEL)
    assert (config.agent.max_response_tokens, config.agent.max_context_tokens) == (96, 9000)
    training = config.training
    assert (training.max_steps, training.tasks_per_step, training.max_tasks) == (3, 32, 256)
    assert config.values.num_samples == 1
    assert (config.reference.refresh_every_steps, training.eval_every) == (None, 5)
    kept = {"values": {"store": "values.sqlite"}, "training": {"eval_every": None}}
    config = read_config(kept, pretrained=MODEL)
    assert (config.reference.refresh_every_steps, config.training.eval_every) == (None, None)
    named = {key.path.rpartition(".")[2] for key in keys_of(RunConfig)}
    assert {*LONGEST, *FEWEST} <= named


def test_it_brings_the_settings_that_were_measured_with_a_real_model() -> None:
    ours = load_config("shop", pretrained=MODEL).model_dump(by_alias=True)
    measured = load_config("shop_smollm2", ["--policy.path", MODEL]).model_dump(by_alias=True)
    for section in ("machine", "optimizer", "reference", "training", "values", "distillation"):
        assert ours[section] == measured[section], section
    assert ours["warm_start"]["demonstrations"] == measured["warm_start"]["demonstrations"]
    assert ours["warm_start"]["copy"]["max_steps"] == 0
    assert ours["policy"]["freeze_embeddings"]
    assert ours["environment"] == measured["environment"]


def test_the_command_line_has_the_last_word_and_the_file_the_rest() -> None:
    config = load_config("sokoban", ["--optimizer.learning_rate=1e-6"], pretrained=MODEL)
    assert config.optimizer.learning_rate == 1e-6
    assert config.policy.path == MODEL
    assert config.algorithm == load_config("sokoban").algorithm
    assert read_config("sokoban", pretrained=MODEL, optimizer={"learning_rate": 1e-6}) == config


def test_a_configuration_for_a_pretrained_model_is_told_the_other_key() -> None:
    with pytest.raises(ConfigError, match=r"names a model itself, models/smollm2-135m"):
        load_config("shop_smollm2", pretrained=MODEL)
    with pytest.raises(ConfigError, match=f"write --policy.path {MODEL}"):
        load_config("shop_smollm2", pretrained=MODEL)
    for wrong in ("", 3):
        with pytest.raises(ConfigError, match=r"expected the folder or the hub name of a model"):
            read_config("shop", pretrained=wrong)  # pyright: ignore[reportArgumentType]


def test_the_settings_alone_are_no_configuration() -> None:
    with pytest.raises(ConfigError, match=r"lays it over one, as in `ragen-apo train --config"):
        load_config("pretrained")


@pytest.mark.slow
def test_one_flag_trains_it(command: Command, qwen_folder: Path, tmp_path: Path) -> None:
    model, run = ("--pretrained", str(qwen_folder)), ("--run-dir", str(tmp_path / "run"))
    shown = command("show-prompt", "smoke", *model)
    assert shown.status == 0, shown.err
    assert "<|im_start|>" in shown.out
    sizes = ("--training.max_steps=1", "--warm_start.demonstrations.num_steps=1")
    trained = command("warm-start", "--config", "smoke", *model, *run, *sizes)
    assert trained.status == 0, trained.err
    assert_refused(command("train", *run, *model, "--resume"), "leave pretrained out")
    trained = command("train", *run, "--resume", "--no-evaluate")
    assert trained.status == 0, trained.err
    kept = load_config(RunDirectory(tmp_path / "run").config)
    assert kept.policy.path == str(qwen_folder.resolve())
    assert kept.optimizer.learning_rate == 2e-5
    assert RunDirectory(tmp_path / "run").policy.is_dir()
