"""The model card of a run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
from huggingface_hub import ModelCard
from markdown_it import MarkdownIt

from ragen_apo.report.load import load_run
from ragen_apo.report.model_card import model_card
from ragen_apo.run_directory import RunDirectory


def test_the_card_has_the_evaluation_for_the_hub_and_for_people(
    build_run: Callable[..., Path],
) -> None:
    run = load_run(build_run())
    card = ModelCard(model_card(run))
    (result,) = card.data.eval_results or []
    assert (result.dataset_name, result.dataset_split) == ("shop", "test")
    assert result.metric_value == run.results["success_rate"]
    assert "apo" in (card.data.tags or [])
    assert "| reference (warm start) | 38.8% |" in card.text
    assert "max_turns: 10" in card.text


@pytest.mark.parametrize("name", ["Qwen/Qwen2.5-0.5B", "tiny-gpt"])
def test_a_commit_that_was_noted_is_in_the_card_and_makes_a_path_a_hub_name(
    name: str, build_run: Callable[..., Path]
) -> None:
    """Without one it may be a folder that is not there any more, or lies elsewhere."""
    directory = build_run()
    config = directory / "config.yaml"
    config.write_text(f"{config.read_text().rstrip()}\n  path: {name}\n")
    card = ModelCard(model_card(load_run(directory)))
    assert card.data.base_model is None
    assert "at commit" not in card.text
    RunDirectory(directory).note(model_commit="a1b2c3")
    card = ModelCard(model_card(load_run(directory)))
    assert card.data.base_model == name
    assert f"Training started from `{name}` at commit `a1b2c3`." in card.text


def test_the_card_says_what_the_template_is_told(build_run: Callable[..., Path]) -> None:
    directory = build_run()
    config = directory / "config.yaml"
    told = "agent:\n  template_options: {enable_thinking: false, effort: low}\n"
    config.write_text(f"{config.read_text().rstrip()}\n{told}")
    text = ModelCard(model_card(load_run(directory))).text
    assert 'It is told `enable_thinking = false, effort = "low"` unless you say otherwise.' in text


def test_a_license_is_named_only_if_it_was_given(build_run: Callable[..., Path]) -> None:
    run = load_run(build_run())
    assert ModelCard(model_card(run, license_id="apache-2.0")).data.license == "apache-2.0"
    assert "license" not in model_card(run)


def test_the_card_does_not_say_whose_home_directory_it_was(build_run: Callable[..., Path]) -> None:
    directory = build_run()
    config = directory / "config.yaml"
    config.write_text(f"{config.read_text().rstrip()}\n  path: {Path.home()}/models/mine\n")
    RunDirectory(directory).note(data=f"{Path.home()}/data/goals.json")
    card = model_card(load_run(directory))
    assert "path: ~/models/mine" in card
    assert "tasks are made of ~/data/goals.json" in card
    assert str(Path.home()) not in card


def test_the_card_does_not_say_where_code_of_ones_own_was(build_run: Callable[..., Path]) -> None:
    directory = build_run()
    config = directory / "config.yaml"
    maker, prompt = "/srv/my secret/shop.py:make_shop", "Read src/main.py:12 first."
    text = config.read_text().replace("name: shop", f"name: {maker}")
    config.write_text(f"{text.rstrip()}\nagent:\n  system_prompt: '{prompt}'\n")
    card = model_card(load_run(directory))
    assert "name: shop.py:make_shop" in card
    assert "secret" not in card
    assert prompt in card


def test_names_are_text_in_the_card(build_run: Callable[..., Path]) -> None:
    """Of categories, baselines and the run; the report's own code stays code."""
    run = load_run(build_run())
    name = "a ` ![x](http://evil/p.png) `` <img src=x> |"
    home = run.results["by_category"]["home"]
    summaries = {name: home, "b": {**home, "success_rate": 1.0}}
    results = {**run.results, "by_category": summaries, "baselines": {name: summaries[name]}}
    card = model_card(dataclasses.replace(run, name=name, results=results))
    html = MarkdownIt("commonmark").enable("table").render(card.partition("---\n\n")[2])
    assert "<img" not in html
    assert html.count("a ` ![x](http://evil/p.png) `` &lt;img src=x&gt; |") >= 3
    assert "<code>shop</code>" in html


def test_a_prompt_with_a_fence_does_not_end_the_configuration(
    build_run: Callable[..., Path],
) -> None:
    directory = build_run()
    config = directory / "config.yaml"
    config.write_text(f"{config.read_text().rstrip()}\nnotes: |\n  ````\n  text\n")
    assert "\n`````yaml\n" in model_card(load_run(directory))


@pytest.mark.parametrize("home", ["/", "/home/ann", "/models"])
def test_a_home_directory_is_left_out_only_where_a_path_begins_with_it(
    home: str, build_run: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = build_run()
    config = directory / "config.yaml"
    paths = ["https://host/home/ann", "/home/ann/mine", "/home/anna/mine", "/data/models/mine"]
    config.write_text(f"{config.read_text().rstrip()}\n  path: {' '.join(paths)}\n")
    monkeypatch.setenv("HOME", home)
    expected = ["~/mine" if home == "/home/ann" and path == paths[1] else path for path in paths]
    assert f"path: {' '.join(expected)}\n" in model_card(load_run(directory))


@pytest.mark.usefixtures("homeless")
def test_a_user_without_a_home_directory_has_a_card(build_run: Callable[..., Path]) -> None:
    directory = build_run()
    config = directory / "config.yaml"
    config.write_text(f"{config.read_text().rstrip()}\n  path: /data/~/mine\n")
    assert "path: /data/~/mine\n" in model_card(load_run(directory))


def test_the_card_says_how_the_model_answers(build_run: Callable[..., Path]) -> None:
    directory = build_run()
    assert "with `<think>...</think><answer>one action</answer>`." in model_card(
        load_run(directory)
    )
    config = directory / "config.yaml"
    config.write_text(f"{config.read_text().rstrip()}\nagent:\n  response_format: tool_call\n")
    assert "with a thought and a call of one of the tools" in model_card(load_run(directory))
