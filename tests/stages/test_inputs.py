"""What the environment lacks is said before anything is computed or written."""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ragen_apo.environments.base import (
    EnvironmentProperties,
    HasTasks,
    ScriptedPolicy,
    make_environment,
)
from ragen_apo.environments.human.play import play
from ragen_apo.environments.human.recordings import Recording, append_recording
from ragen_apo.errors import ConfigError, EnvironmentFaultError, ValueStoreError
from ragen_apo.stages.inputs import caveats, check_run_inputs, check_start
from ragen_apo.types import Task
from tests import factories

parse = functools.partial(factories.config, text="environment: {name: bandit}")


def check(*overrides: str, environment: HasTasks | None = None) -> None:
    config = parse(*overrides)
    made = make_environment(config.environment.name, config.environment.options)
    check_run_inputs(config, environment or made)


def refusal(*overrides: str, environment: HasTasks | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        check(*overrides, environment=environment)
    return str(caught.value)


def test_the_first_rank_alone_looks_for_the_value_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be on a disk of that rank's host (docs/scaling.md)."""
    keys = ("--reference.refresh_every_steps=null", f"--values.store={tmp_path / 'values.sqlite'}")
    config = factories.config(*keys)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    check_start(config)
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ValueStoreError):
        check_start(config)


class Lacking:
    """A bandit without the tasks of a split or without scripted policies."""

    def __init__(self, *, split: str = "", policies: Sequence[str] = ()) -> None:
        self._bandit = make_environment("bandit", {})
        self._split, self._policies = split, policies

    @property
    def properties(self) -> EnvironmentProperties:
        return self._bandit.properties

    def tasks(self, split: str) -> Sequence[Task]:
        return [] if split == self._split else self._bandit.tasks(split)

    def scripted_policies(self) -> Mapping[str, Callable[[], ScriptedPolicy]]:
        policies = self._bandit.scripted_policies()
        return {name: make for name, make in policies.items() if name not in self._policies}


MIXTURE = ("--environment", "{name: mixture, parts: {bandit: {}, countdown: {}}}")


def test_what_is_there_is_accepted() -> None:
    check()
    check(*MIXTURE)
    check("--warm_start.enabled", "false", "--warm_start.demonstrations.teacher", "nobody")


def test_weights_in_bfloat16_are_trained_by_adapters_only() -> None:
    """AdamW on them loses most updates; frozen ones under adapters never change."""
    half = ("--machine.dtype", "bfloat16")
    message = refusal(*half)
    assert message.startswith("machine.dtype is bfloat16 and all weights are trained")
    assert "machine.mixed_precision to bfloat16" in message
    check("--machine.mixed_precision", "bfloat16")
    check(*half, "--policy.path=somewhere", "--policy.lora={}", "--warm_start.enabled=false")


def test_an_evaluation_split_that_does_not_exist_is_refused() -> None:
    assert refusal("--evaluation.split", "nope").startswith("evaluation.split: ")
    assert "nope" in refusal("--evaluation.split", "nope")


def test_an_evaluation_split_without_tasks_is_refused() -> None:
    lacking = Lacking(split="test")
    assert "evaluation.split: the split 'test' has no tasks; expected train" in refusal(
        environment=lacking
    )


@pytest.mark.parametrize(
    ("tasks", "words"),
    [
        (iter, r"iterator object .*; expected a list of tasks"),
        (lambda tasks: {task.task_id: task for task in tasks}, "expected a list"),
        (lambda tasks: [task.instruction for task in tasks], "is among them; expected tasks"),
        (lambda tasks: [replace(tasks[0], environment="b")], "the environment 'b'; .*, 'bandit'"),
        (lambda tasks: [replace(tasks[0], category=3)], "category of task .*: 3 is no text"),
        (lambda tasks: [replace(tasks[0], payload={"n": np.int64(3)})], "payload of .* int64"),
    ],
)
def test_tasks_that_could_not_be_stored_are_refused(tasks: Callable, words: str) -> None:
    class Odd(Lacking):
        def tasks(self, split: str) -> Any:
            return tasks(super().tasks(split))

    with pytest.raises(EnvironmentFaultError, match=rf"'bandit': tasks\('train'\): .*{words}"):
        check(environment=Odd())


@pytest.mark.parametrize("split", ["train", "test"])
def test_what_tasks_raises_is_said_in_the_name_of_the_environment(split: str) -> None:
    class Odd(Lacking):
        def tasks(self, name: str) -> Any:
            if name == split:
                raise KeyError("levels")
            return super().tasks(name)

    with pytest.raises(EnvironmentFaultError, match=r"'bandit': tasks raised KeyError\('levels'\)"):
        check(environment=Odd())


def test_an_evaluation_split_that_is_not_declared_is_refused() -> None:
    class AnySplit(Lacking):
        def tasks(self, split: str) -> Sequence[Task]:
            return super().tasks("train")

    assert "the split 'nope' has no tasks" in refusal(
        "--evaluation.split", "nope", environment=AnySplit()
    )


def test_a_teacher_that_does_not_exist_is_refused() -> None:
    message = refusal("--warm_start.demonstrations.teacher", "nobody")
    assert "'bandit' has no scripted policy 'nobody'; it has " in message
    assert "random" in message


def test_without_a_teacher_the_words_of_a_new_tokenizer_must_come_from_somewhere() -> None:
    off = ("--warm_start.enabled", "false")
    check(*off, environment=Lacking(policies=["teacher"]))
    lacking = Lacking(policies=["teacher", "random"])
    message = refusal(*off, environment=lacking)
    assert "has no scripted policy `random` or 'teacher'" in message
    assert "a pretrained model as policy.path" in message
    check(*off, "--policy.path", "somewhere", environment=lacking)


@pytest.mark.parametrize("key", ["lag", "num_epochs", "num_minibatches"])
def test_oapl_uses_samples_again_in_deterministic_environments_only(key: str) -> None:
    oapl = ("--algorithm", "oapl")
    check(*oapl)
    again = (*oapl, f"--algorithm.{key}", "2")
    message = refusal(*again)
    assert message.startswith("the environment 'bandit': it is stochastic")
    assert "set algorithm.lag, num_epochs and num_minibatches to 1" in message
    check(*again, "--environment.win_share", "1.0")


def test_turn_level_values_are_trusted_only_where_chance_does_not_decide() -> None:
    by_turn = ("--algorithm", "apo_turn")
    message = refusal(*by_turn)
    assert message.startswith("the environment 'bandit': it is stochastic")
    assert "algorithm.trace 0.9 trusts (docs/algorithm.md); set it to 1" in message
    check(*by_turn, "--algorithm.trace", "1")
    check(*by_turn, "--environment.win_share", "1.0")


@pytest.mark.parametrize(
    ("overrides", "number"),
    [
        (["--distillation.enabled=true"], 1),
        (["--distillation.enabled=true", "--environment.win_share=1.0"], 0),
        ([], 0),
    ],
)
def test_distillation_says_where_chance_decides(overrides: list[str], number: int) -> None:
    config = parse(*overrides)
    environment = make_environment(config.environment.name, config.environment.options)
    assert len(caveats(config, environment)) == number


@pytest.mark.parametrize(
    ("prompt", "number"),
    [("Act as <action>go</action>.", 1), ("Say <answer>go</answer>.", 0), ("rules", 0)],
)
def test_a_prompt_that_tells_another_form_is_mentioned(prompt: str, number: int) -> None:
    keys = ("--agent.system_prompt", prompt)
    config = parse(*keys, "--warm_start.enabled", "false")
    environment = make_environment(config.environment.name, config.environment.options)
    assert caveats(parse(*keys), environment) == [], "demonstrations show the form"
    assert [text.startswith("agent.system_prompt") for text in caveats(config, environment)] == [
        True
    ] * number


class OneKindAfterAnother(Lacking):
    """Its test tasks are four red ones, four green ones, four blue ones and one white one."""

    def tasks(self, split: str) -> Sequence[Task]:
        kinds = ["red"] * 4 + ["green"] * 4 + ["blue"] * 4 + ["white"]
        task = super().tasks(split)[0]
        return [replace(task, category=kind) for kind in kinds]


def test_a_run_says_which_categories_its_evaluations_leave_out() -> None:
    def said(*keys: str) -> list[str]:
        return caveats(parse(*keys), OneKindAfterAnother())

    never = "--training.eval_every=null"
    (sentence,) = said(never, "--evaluation.num_episodes=8")
    assert sentence.startswith("evaluation.num_episodes: the first 8 of the 13 tasks")
    assert "none of the category blue, white, so" in sentence
    assert "Raise it to 13" in sentence
    (sentence,) = said("--training.eval_every=5", "--training.eval_episodes=2")
    assert sentence.startswith("training.eval_episodes")
    assert said(never, "--evaluation.num_episodes=9") == []  # chance leaves out a rare one, too


def test_a_training_split_without_tasks_is_refused() -> None:
    assert "has no task in the split 'train'" in refusal(environment=Lacking(split="train"))


def test_fewer_training_tasks_than_categories_are_refused() -> None:
    message = refusal(*MIXTURE, "--training.max_tasks", "1")
    assert "which should come up by its weight; raise training.max_tasks (now 1)" in message
    check(*MIXTURE, "--training.max_tasks", "2")


def test_recordings_of_one_part_of_a_mixture_are_refused(tmp_path: Path) -> None:
    config = parse(*MIXTURE)
    mixture = make_environment("mixture", config.environment.options)
    task = next(task for task in mixture.tasks("train") if task.category == "bandit")
    actions = iter(["Rocket"])
    episode = play(mixture, task, read=lambda _: next(actions), write=lambda _: None)
    append_recording(tmp_path / "a.jsonl", Recording(mixture.properties.version, 0, episode))
    key = ("--warm_start.demonstrations.recordings", str(tmp_path / "a.jsonl"))
    assert "has no episode of countdown, which should come up by its weight" in refusal(
        *MIXTURE, *key
    )


def test_training_asks_before_it_computes(tmp_path: Path) -> None:
    config = parse("--evaluation.split", "nope")
    with pytest.raises(ConfigError, match=r"evaluation\.split"):
        factories.run(config, tmp_path / "run")
    assert {path.name for path in (tmp_path / "run").iterdir()} == {".lock", "config.yaml"}


def test_recordings_that_are_kept_in_the_run_need_not_be_elsewhere() -> None:
    config = parse("--warm_start.demonstrations.recordings", "/nowhere.jsonl")
    bandit = make_environment("bandit", {})
    check_run_inputs(config, bandit, recordings_are_kept=True)
    with pytest.raises(ConfigError, match=r"there is no /nowhere\.jsonl"):
        check_run_inputs(config, bandit)
