"""`ragen-apo evaluate --api-model`: what it prints, where it writes, what it refuses."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from ragen_apo.cli.evaluation import default_folder
from tests.chat_server import perfect_shopper, refuses, serving
from tests.command_line import Command, assert_one_line, assert_refused

SHOP = (
    *("--environment", "shop", "--environment-option", "num_products=24"),
    *("--max-turns", "3", "--split", "all", "--episodes", "4"),
)
KEY = "sk-very-secret-0123456789"


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


@pytest.mark.usefixtures("undrawn")
def test_a_model_is_evaluated_and_reported(command: Command) -> None:
    with serving(perfect_shopper) as server:
        result = command("evaluate", "--api-model", "tiny", "--base-url", server.url, *SHOP)
    assert result.status == 0, result.err
    assert "tiny (API)" in result.out
    assert "100.0%" in result.out
    assert "8 answers cost 56 prompt tokens and 24 completion tokens; 0 without" in result.out
    out = Path("runs/api/tiny-shop")
    assert f"evaluation: {out}" in result.out
    assert command("report", out).status == 0
    assert (out / "report" / "report.html").is_file()


@pytest.mark.slow
def test_the_command_that_a_hint_names_goes_on_without_asking_again(command: Command) -> None:
    options = ("--max-tokens", "9", "--temperature", "0.5", "--out", "a folder")
    with serving(perfect_shopper) as server:
        command("evaluate", "--api-model", "tiny", "--base-url", server.url, *SHOP, *options)
        asked = len(server.requests)
        Path("a folder/evaluation/results.json").unlink()
        refused = command("report", "a folder")
        hint = re.search("Run `ragen-apo (.*)` first", refused.err.replace("\n", " "))
        assert hint is not None, refused.err
        result = command(*shlex.split(hint[1]))
        assert result.status == 0, result.err
        assert "4 episodes of split 'all'" in result.out
        assert len(server.requests) == asked


EXTRA = '{"chat_template_kwargs": {"enable_thinking": false}}'


@pytest.mark.slow
def test_further_keys_of_requests_are_json_and_in_the_hint(command: Command) -> None:
    options = ("--out", "out", "--extra-body", EXTRA)
    with serving(perfect_shopper) as server:
        start = ("evaluate", "--api-model", "tiny", "--base-url", server.url, *SHOP)
        result = command(*start, *options)
        assert result.status == 0, result.err
        asked = len(server.requests)
        assert server.requests[0]["chat_template_kwargs"] == {"enable_thinking": False}
        Path("out/evaluation/results.json").unlink()
        refused = command("report", "out")
        hint = re.search("Run `ragen-apo (.*)` first", refused.err.replace("\n", " "))
        assert hint is not None, refused.err
        assert command(*shlex.split(hint[1])).status == 0
        assert len(server.requests) == asked
    for text in ("{", "[1]", "low"):
        assert_refused(command(*start, "--extra-body", text), "--extra-body takes a JSON object")


def test_the_sections_of_a_configuration_are_used(command: Command, config: Path) -> None:
    """The tiny configuration: the shop with 24 products, 3 turns, 5 episodes of split test."""
    arguments = ("--config", config, "--out", "out", "--temperature", "0.5", "--max-tokens", "9")
    with serving(perfect_shopper) as server:
        result = command("evaluate", "--api-model", "tiny", "--base-url", server.url, *arguments)
    assert result.status == 0, result.err
    assert "5 episodes of split 'test'" in result.out
    assert {(body["temperature"], body["max_tokens"]) for body in server.requests} == {(0.5, 9)}


MEETING = """
import threading

from ragen_apo.environments.shop import ShopEnvironment

EVERYBODY = threading.Barrier(3, timeout=60)


class Meeting(ShopEnvironment):
    def reset(self, task, *, seed):
        EVERYBODY.wait()
        return super().reset(task, seed=seed)
"""


@pytest.mark.slow
def test_environments_act_at_the_same_time_where_they_are_told_to(command: Command) -> None:
    Path("meeting.py").write_text(MEETING)
    start = ("evaluate", "--api-model", "tiny", "--environment", "./meeting.py:Meeting")
    sizes = ("--max-turns", "3", "--split", "all", "--episodes", "3")
    with serving(perfect_shopper) as server:
        asked = (*start, "--base-url", server.url, "--out", "out", *sizes)
        result = command(*asked, "--environment-workers", "3")
        assert result.status == 0, result.err
        refused = command(*asked, "--environment-workers", "1001")
    assert_refused(refused, "rollouts.num_environment_workers")


def test_options_change_the_environment_of_a_configuration(command: Command, config: Path) -> None:
    arguments = ("--config", config, "--out", "out", "--environment-option", "max_turns=1")
    with serving(perfect_shopper) as server:
        result = command("evaluate", "--api-model", "tiny", "--base-url", server.url, *arguments)
    assert result.status == 0, result.err
    settings = Path("out/evaluation.yaml").read_text()
    assert "num_products: 24" in settings
    assert "max_turns: 1" in settings


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ([], ["give a run directory to evaluate, or --api-model and --base-url"]),
        (["--api-model", "m"], ["--base-url is missing"]),
        (["--api-model", "m", "--trust-remote-code"], ["--trust-remote-code goes with a run"]),
        (["--base-url", "http://h/v1"], ["--api-model is missing"]),
        (["--api-model", "m", "--base-url", "h"], ["base_url", "http:// or https://"]),
        (["--api-model", "m", "--base-url", "http://u:p@h"], ["a user name or a password"]),
        (["runs/mine", "--api-model", "m"], ["--api-model: for a model behind an API"]),
        (["--api-model", "m", "--base-url", "http://h", "--pass-k", "2"], ["--pass-k"]),
        (
            ["--api-model", "m", "--base-url", "http://h", "--environment-option", "size"],
            ["--environment-option takes key=value"],
        ),
        (
            ["--api-model", "m", "--base-url", "http://h", "--max-turns", "0"],
            ["--max-turns: got 0"],
        ),
        (
            ["--api-model", "m", "--base-url", "http://h", "--environment", "shopp"],
            ["environment.name", "did you mean 'shop'"],
        ),
        (
            ["--api-model", "m", "--base-url", "http://h", "--api-key-env", "NOT_SET_HERE"],
            ["is not set"],
        ),
        (["--api-model", "", "--base-url", "http://h"], ["--api-model is missing"]),
    ],
)
def test_what_cannot_be_evaluated_is_refused(
    arguments: list[str], parts: list[str], command: Command
) -> None:
    assert_refused(command("evaluate", *arguments), *parts)
    assert not Path("runs").exists()


def test_a_wrong_key_is_one_line_without_the_key(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    with serving(perfect_shopper, *[refuses(401, f"Incorrect API key: {KEY}")] * 8) as server:
        result = command("evaluate", "--api-model", "tiny", "--base-url", server.url, *SHOP)
    assert_one_line(result, "does not accept the key (401: Incorrect API key: [the key])")
    assert KEY not in result.out + result.err


@pytest.mark.parametrize(
    ("model", "environment", "folder"),
    [
        ("Qwen/Qwen3-8B", "webshop", "Qwen-Qwen3-8B-webshop"),
        ("../../etc", "/tmp/my env.py:make", "etc-my-env-make"),
        ("模型", "..", "model"),
    ],
)
def test_the_folder_of_an_evaluation_has_the_names_of_model_and_environment(
    model: str, environment: str, folder: str
) -> None:
    assert default_folder(model, environment) == Path("runs", "api", folder)
