"""A scripted episode as the agent would read and write it, before anything is trained."""

import functools
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from ragen_apo.errors import ConfigError, ModelError, RunDirectoryError
from ragen_apo.run_directory import RunDirectory
from ragen_apo.stages.shown_prompt import ShownPrompt, show_prompt
from tests import factories
from tests.chat_templates import R1, with_template

PRETRAINED = ("--warm_start.copy.max_steps=0", "--agent.max_context_tokens=1024")


def written(shown: ShownPrompt, *, trained: bool = True) -> str:
    tokens = [token for context in shown.contexts for token in context]
    return "".join(token.text for token in tokens if token.is_trained == trained)


def test_the_trained_tokens_are_the_teachers_responses_and_the_others_are_read() -> None:
    shown = show_prompt(factories.config())
    turns = shown.trajectory.turns
    assert shown.policy == "teacher"
    assert len(shown.contexts) == 1
    assert written(shown) == "".join(turn.response for turn in turns)
    read = written(shown, trained=False)
    assert all(f"<|user|>{turn.observation}<|assistant|>" in read for turn in turns)


def test_the_small_tokenizer_is_the_one_that_a_run_would_train(finished_run: Path) -> None:
    run = RunDirectory(finished_run)
    shown = show_prompt(factories.config())
    assert show_prompt(factories.config(), run=run) == shown
    tokenizer = AutoTokenizer.from_pretrained(run.initial)
    ids = [token.token_id for token in shown.contexts[0]]
    assert tokenizer.decode(ids) == "".join(token.text for token in shown.contexts[0])


def test_a_pretrained_model_shows_its_own_template_and_needs_no_weights(
    chatml_tokenizer, qwen_folder: Path, tmp_path: Path
) -> None:
    with_template(chatml_tokenizer, R1).save_pretrained(tmp_path)
    (tmp_path / "config.json").write_bytes((qwen_folder / "config.json").read_bytes())
    shown = show_prompt(factories.config(f"--policy.path={tmp_path}", *PRETRAINED))
    assert "<|im_start|>assistant<think>\n" in written(shown, trained=False)
    assert "<think>" not in written(shown)
    assert written(shown).count("</think>") == len(shown.trajectory.turns)


def test_a_window_that_moves_shows_one_context_each_time() -> None:
    windowed = factories.config("--agent.context={mode: single_turn, num_turns: 2}")
    shown = show_prompt(windowed)
    assert len(shown.contexts) == len(shown.trajectory.turns) > 1
    assert written(shown) == "".join(turn.response for turn in shown.trajectory.turns)


def test_each_context_names_the_turns_that_it_trains() -> None:
    (all_turns,) = show_prompt(factories.config()).turns
    window = "--agent.context={mode: last_turns, num_turns: 1}"
    tasks = (show_prompt(factories.config(window), task=task) for task in range(20))
    shown = next(each for each in tasks if len(each.trajectory.turns) > 2)
    num_turns = len(shown.trajectory.turns)
    assert all_turns.start == 1
    assert shown.turns == [range(1, 3), *(range(n, n + 1) for n in range(3, num_turns + 1))]
    for turns, context in zip(shown.turns, shown.contexts, strict=True):
        said = "".join(token.text for token in context if token.is_trained)
        assert said == "".join(shown.trajectory.turns[number - 1].response for number in turns)


def test_another_task_is_another_conversation() -> None:
    first, second = (show_prompt(factories.config(), task=task) for task in (0, 1))
    assert first.trajectory.task != second.trajectory.task
    with pytest.raises(ConfigError, match="--task must be from 0 to"):
        show_prompt(factories.config(), task=10_000)


def test_what_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match="has no model yet"):
        show_prompt(factories.config(), run=RunDirectory(tmp_path))
    missing = functools.partial(factories.config, f"--policy.path={tmp_path}/nothing", *PRETRAINED)
    with pytest.raises(ModelError, match="there is no such folder"):
        show_prompt(missing())
