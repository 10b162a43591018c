"""A*-PO makes a small model better at a toy task, and returns that say nothing do not.

The environment shows one of eight words, and the agent has to say it in two turns. The reference is
trained on a teacher that says any word every other time; all beyond has to come from the returns.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from ragen_apo.environments.base import EnvironmentProperties, Reply, ScriptedPolicy
from ragen_apo.files import read_json_lines
from ragen_apo.run_directory import RunDirectory
from ragen_apo.seeding import generator
from ragen_apo.types import Task
from tests import factories

pytestmark = pytest.mark.slow

WORDS = ("apple", "brick", "cloud", "drum", "eagle", "flute", "grape", "horse")


class Distracted:
    """Says the word every other time, else any word."""

    def begin(self, task: Task, *, seed: int) -> None:
        self._draws = generator(seed, "any-word")

    def act(self, observation: str) -> Reply:
        any_word = str(self._draws.choice(WORDS))
        on_purpose = self._draws.random() < 0.5
        return Reply(
            thought="", action=observation.rsplit(maxsplit=1)[-1] if on_purpose else any_word
        )


class EchoEnvironment:
    """A success when the word is said in the first turn and in the second."""

    properties = EnvironmentProperties(
        name="echo",
        version="1",
        reward_version="1",
        deterministic=True,
        return_range=(0.0, 1.0),
        splits=("train", "test"),
        rules="Say the word.",
    )

    def tasks(self, split: str) -> Sequence[Task]:
        return [
            factories.task(word, environment="echo", split=split, category="word") for word in WORDS
        ]

    def reset(self, task: Task, *, seed: int) -> tuple[str, dict[str, Any]]:
        self._word, self._num_turns = task.instruction, 0
        return f"say {self._word}", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self._num_turns += 1
        right = action == self._word
        success = right and self._num_turns == 2
        return (
            f"again {self._word}",
            float(success),
            success or not right,
            False,
            {"success": success},
        )

    def state_key(self) -> str:
        return f"{self._word} {self._num_turns}"

    def scripted_policies(self) -> Mapping[str, Callable[[], ScriptedPolicy]]:
        return {"random": Distracted}


CONFIG = """
seed: 0
machine: {num_threads: 1, device: cpu}
environment: {name: echo}
agent: {max_response_tokens: 8, max_context_tokens: 64}
policy:
  small:
    vocab_size: 400
    hidden_size: 32
    num_layers: 2
    num_heads: 2
    intermediate_size: 64
    max_position: 128
warm_start:
  copy: {max_steps: 300, sequence_length: 16}
  demonstrations:
    teacher: random
    num_episodes_per_task: 40
    num_steps: 200
    batch_size: 32
    learning_rate: 5.0e-3
values: {num_samples: 8, beta1: 0.5}
algorithm: {beta2: 0.05}
optimizer: {learning_rate: 2.0e-3}
training:
  max_steps: 45
  tasks_per_step: 64
  micro_batch_size: 32
  num_rows: 64
  eval_every: null
"""


@pytest.fixture
def learned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., RunDirectory]:
    """Runs by their overrides, in the environment above."""
    monkeypatch.setattr(
        "ragen_apo.agent.assembly.make_environment", lambda name, options: EchoEnvironment()
    )

    def learned(name: str, *keys: str) -> RunDirectory:
        return factories.run(factories.config(*keys, text=CONFIG), tmp_path / name)

    return learned


def success_rates(run: RunDirectory) -> list[float]:
    """Of every step of Stage 2."""
    return [row["success_rate"] for row in read_json_lines(run.metrics)]


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def test_success_rises_far_above_the_reference_but_not_by_shuffled_returns(
    learned: Callable[..., RunDirectory],
) -> None:
    run = learned("run")
    curve = success_rates(run)
    # A reference that copies half the time and guesses else: (1/2 + 1/2 * 1/8)^2 = 0.32.
    assert 0.05 < curve[0] < 0.45
    assert mean(curve[-10:]) > 0.75
    keys = (f"--policy.path={run.reference(0)}", "--warm_start.enabled=false")
    shuffled = success_rates(learned("shuffled", "--training.shuffle_returns=true", *keys))
    assert shuffled[0] == curve[0], "the same episodes"
    assert mean(shuffled[-10:]) < 0.5
