"""A run that ragen-apo 0.1 has made: its report is written, nothing goes on from it."""

from collections.abc import Callable
from pathlib import Path

import pytest

from ragen_apo.config import RunConfig
from ragen_apo.config.algorithms import ALGORITHMS, algorithm_class
from ragen_apo.report.algorithm import algorithm_of, rollouts_per_task, settings_of
from ragen_apo.report.load import load_run
from ragen_apo.report.write import write_report
from ragen_apo.training.algorithms.policy_gradient import PolicyGradientConfig
from tests.command_line import Command, assert_refused, snapshot

CONFIG = """\
seed: 0
run: {num_threads: 1, device: cpu, dtype: float32, mixed_precision: none}
environment: {name: shop, max_turns: 10}
policy: {path: null, lora: null}
warm_start: {enabled: true, demonstrations: {teacher: teacher, recordings: null, num_steps: 250}}
algorithm: NAME
apo:
  beta1: 0.4
  beta2: 0.02
  num_value_samples: 6
  adaptive_vstar: false
  max_value_samples: 16
  value_store: null
  value_baseline: v_star
  loss: regression
  length_normalization: none
  advantage_clamp: null
  center_residuals: true
  kl_coefficient: 0.0
  temperature: 1.0
  shuffle_returns: false
  learning_rate: 0.0003
  weight_decay: 0.0
  max_grad_norm: 1.0
  warmup_steps: 0
  schedule: constant
  reference_refresh: {every_steps: null, max_kl: null}
  replay: {num_trajectories_per_step: 0, capacity: 1024}
turn_level: {trace: 0.7, min_visits: 3}
policy_gradient:
  group_size: 5
  num_epochs: 1
  num_minibatches: 1
  clip_low: 0.2
  clip_high: 0.28
  dual_clip: null
  aggregation: null
  kl_in: loss
  kl_coefficient: 0.01
  kl_estimator: null
  entropy_coefficient: 0.0
ppo: {critic_learning_rate: 0.001, gamma: 0.99, gae_lambda: 1.0, bi_level_gae: false}
gigpo: {omega: 1.0, gamma: 0.9, scale: std}
rollout_filter: {strategy: none, value: 0.9, score: return, statistic: std}
reward_normalization: {method: identity, grouping: batch}
training: {max_steps: 60, tasks_per_step: 64, eval_every: 10}
monitors: {every_steps: 10, num_thoughts: 16, gradient_buckets: false}
evaluation: {split: test, num_episodes: 100, temperature: 0.0, pass_k: null}
"""
"""What 0.1 (d3d623d) resolved a configuration to, with some keys left out and some changed."""


@pytest.fixture
def old_run(build_run: Callable[..., Path]) -> Callable[[str], Path]:
    """The run directory of an algorithm with the configuration file of 0.1."""

    def old_run(algorithm: str) -> Path:
        directory = build_run()
        text = CONFIG.replace("NAME", algorithm)
        (directory / "config.yaml").write_text(text, encoding="utf-8")
        return directory

    return old_run


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_report_knows_its_algorithm_and_the_options_that_it_had(
    name: str, old_run: Callable[[str], Path]
) -> None:
    run = load_run(old_run(name))
    settings, traits = settings_of(run), algorithm_class(name).traits
    assert settings is not None and algorithm_of(run) == traits
    assert rollouts_per_task(run) == (1 if traits.has_values else 5)
    expected = {
        "beta2": 0.02,
        "center_residuals": True,
        "trace": 0.7,
        "clip_high": 0.28,
        "kl_coefficient": 0.0 if traits.has_values else 0.01,
        "gamma": {"ppo": 0.99, "gigpo": 0.9}.get(name),
    }
    for option in expected.keys() & type(settings).model_fields.keys():
        assert getattr(settings, option) == expected[option], option
    # Its other sections are read as well, and are those of today.
    whole = RunConfig.model_validate(run.config)
    assert (whole.values.beta1, whole.values.num_samples) == (0.4, 6)
    assert whole.machine.num_threads == 1


def test_returns_normalised_by_environment_are_those_by_category(
    old_run: Callable[[str], Path],
) -> None:
    directory = old_run("grpo")
    path = directory / "config.yaml"
    text = path.read_text("utf-8").replace("grouping: batch", "grouping: environment")
    path.write_text(text, encoding="utf-8")
    settings = settings_of(load_run(directory))
    assert isinstance(settings, PolicyGradientConfig)
    assert settings.reward_normalization.grouping == "category"


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
def test_the_whole_report_is_written_in_the_words_of_its_algorithm(
    old_run: Callable[[str], Path],
) -> None:
    directory = old_run("apo")
    write_report(directory)
    page = (directory / "report" / "report.html").read_text("utf-8")
    assert "ragen-apo · A*-PO · policy" in page
    assert "Residual variance, over the steps" in page


@pytest.mark.parametrize("arguments", [["train", "--resume", "--run-dir"], ["evaluate"]])
def test_nothing_goes_on_from_it_and_one_sentence_says_why(
    arguments: list[str], old_run: Callable[[str], Path], command: Command
) -> None:
    directory = old_run("apo")
    before = snapshot(directory)
    result = command(*arguments, directory)
    assert_refused(result, "was written by ragen-apo 0.1", "`ragen-apo report` still reads the run")
    assert snapshot(directory) == before
