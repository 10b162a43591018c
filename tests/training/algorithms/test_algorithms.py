"""Every algorithm of the family in the trainer: what it plays, its gradient, that it runs."""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any
from unittest.mock import patch

import pytest
import torch

from ragen_apo.config import load_config, parse_config
from ragen_apo.config.algorithms import ALGORITHMS
from ragen_apo.errors import ConfigError
from ragen_apo.files import read_json_lines
from ragen_apo.session import Session
from ragen_apo.training.algorithms.policy_gradient import PolicyGradientConfig
from ragen_apo.training.algorithms.ppo import Ppo
from ragen_apo.training.rollouts import Rollouts
from ragen_apo.training.step_metrics import StepMetrics
from ragen_apo.training.trainer import Trainer
from ragen_apo.types import Trajectory, training_samples
from tests.factories import (
    SINGLE_ROLLOUT,
    AlgorithmRuns,
    SeenStep,
    changed,
    config,
    flat_gradient,
    paying,
    sampled_logprobs,
    step_without_update,
    trainer_of,
)

RIVALS = sorted(set(ALGORITHMS) - set(SINGLE_ROLLOUT))
WINDOW = ["--agent.context.mode=last_turns", "--agent.context.num_turns=1"]
CONFIGS = Path(__file__).resolve().parents[3] / "configs"
RETURNS = [number**2 / 144 for number in range(12)]
"""Of 4 tasks in groups of 3: those of a tiny run repeat, and a group of equals has no gradient."""


SeeStep = Callable[[Trainer], SeenStep]
PlayOnce = Callable[[Trainer], AbstractContextManager[Any]]


@pytest.fixture(scope="module")
def play_once() -> PlayOnce:
    """Algorithms that play a task equally often play the same episodes: in step 3 once."""
    played: dict[tuple[Any, ...], list[Trajectory]] = {}

    def play_once(trainer: Trainer) -> AbstractContextManager[Any]:
        config, roll_out = trainer.config, trainer.proxy.rollout
        size, precision = config.algorithm.rollouts_per_task, trainer.policy.autocast
        key = config.agent.context.mode, size, precision

        def rollout(*args: Any, **options: Any) -> list[Trajectory]:
            if key not in played:
                played[key] = roll_out(*args, **options)
            return list(played[key])

        return patch.object(trainer.proxy, "rollout", rollout)

    return play_once


@pytest.fixture(scope="module")
def see_step(play_once: PlayOnce) -> SeeStep:
    """Step 3 without an update."""

    def see_step(trainer: Trainer) -> SeenStep:
        returns = RETURNS if trainer.config.algorithm.name in RIVALS else None
        with play_once(trainer):
            return step_without_update(trainer, 3, returns=returns)

    return see_step


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algorithm", "keys"),
    [*((name, []) for name in ALGORITHMS), *((name, WINDOW) for name in RIVALS)],
)
def test_the_gradient_does_not_depend_on_the_micro_batch_size(
    algorithm: str, keys: list[str], session: Session, see_step: SeeStep
) -> None:
    whole, parts = (
        see_step(trainer_of(session, algorithm, *keys, f"--training.micro_batch_size={size}"))
        for size in (32, 3)
    )
    windowed = any(len(training_samples(trajectory)) > 1 for trajectory in whole.trajectories)
    assert windowed is (keys == WINDOW)
    assert whole.gradient.norm() > 1e-6
    assert (whole.gradient - parts.gradient).norm() <= 1e-4 * whole.gradient.norm()


@pytest.mark.slow
@pytest.mark.parametrize("keys", [[], WINDOW])
def test_nor_does_that_of_the_critic(
    keys: list[str], session: Session, play_once: PlayOnce
) -> None:
    moments = []
    for size in (32, 3):
        trainer = trainer_of(session, "ppo", *keys, f"--training.micro_batch_size={size}")
        with play_once(trainer):
            trainer.step(3)
        state = trainer.algorithm.state_tensors()
        # After the first update the first moment is a tenth of the gradient.
        names = [name for name in sorted(state) if name.endswith("exp_avg")]
        moments.append(torch.cat([state[name].flatten().double() for name in names]))
    assert moments[0].norm() > 1e-6
    assert (moments[0] - moments[1]).norm() <= 1e-4 * moments[0].norm()


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["apo", "apo_turn", "ppo", "grpo"])
def test_each_task_of_a_step_is_rolled_out_as_often_as_the_algorithm_wants(
    algorithm: str, session: Session
) -> None:
    rollouts = step_without_update(trainer_of(session, algorithm)).rollouts
    size = 1 if algorithm in SINGLE_ROLLOUT else 3
    assert rollouts.group_B.tolist() == [index for index in range(4) for _ in range(size)]
    task_ids = [trajectory.task.task_id for trajectory in rollouts.trajectories]
    assert set(Counter(task_ids).values()) == {size}
    assert task_ids[:size] == [task_ids[0]] * size
    assert len({trajectory.seed for trajectory in rollouts.trajectories}) == 4 * size


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["ppo", "gigpo"])
def test_a_step_of_several_passes_is_a_function_of_weights_moments_and_its_number(
    algorithm: str, session: Session
) -> None:
    keys = ["--algorithm.num_epochs=2", "--algorithm.num_minibatches=2"]
    first, again = (trainer_of(session, algorithm, *keys) for _ in range(2))
    results = [trainer.step(2) for trainer in (first, again)]
    assert results[0].metrics["num_updates"] == 4
    assert results[0].trajectories == results[1].trajectories
    pairs = zip(first.policy.model.parameters(), again.policy.model.parameters(), strict=True)
    assert all(torch.equal(left, right) for left, right in pairs)
    states = [trainer.algorithm.state_tensors() for trainer in (first, again)]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[1])


def reinforced(
    trainer: Trainer, trajectories: Sequence[Trajectory], weights: list[list[float]]
) -> torch.Tensor:
    """Gradient of -sum over sampled tokens of weight times log pi, one weight list a trajectory."""
    trainer.policy.model.zero_grad()
    for trajectory, weight in zip(trajectories, weights, strict=True):
        logprobs_N = sampled_logprobs(trainer.policy, trajectory)
        (-(torch.tensor(weight) * logprobs_N).sum()).backward()
    return flat_gradient(trainer)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
@pytest.mark.parametrize("where", ["float32", "bfloat16", "server"])
def test_the_rounding_of_a_sampler_makes_no_ratios(
    algorithm: str, where: str, session: Session, play_once: PlayOnce
) -> None:
    """In float32 the local engine and the loss compute the same, and its record is believed."""

    def step(shift: float) -> SeenStep:
        trainer = trainer_of(session, algorithm)
        if where == "bfloat16":
            trainer.policy.autocast = torch.bfloat16
        if where == "server":  # as for the trainer; the local engine plays in its place
            server = ["--rollouts.engine=vllm", "--rollouts.base_url=http://127.0.0.1:1"]
            trainer.config = changed(trainer.config, *server)
        with play_once(trainer):
            roll_out = trainer.proxy.rollout

            def rounded(*args: Any, **options: Any) -> list[Trajectory]:
                return [shifted(each, shift) for each in roll_out(*args, **options)]

            with patch.object(trainer.proxy, "rollout", rounded):
                return step_without_update(trainer, 3, returns=RETURNS)

    exact, rough = step(0.0), step(0.1)
    metrics = rough.result.metrics  # the monitors see the sampler's own
    assert metrics["logprob_gap_mean"] == pytest.approx(0.1, abs=0.03)
    assert metrics["logprob_gap_max"] > 0.09
    differs = (rough.gradient - exact.gradient).norm() > 0.01 * exact.gradient.norm()
    assert differs == (where == "float32")


def shifted(trajectory: Trajectory, shift: float) -> Trajectory:
    """The episode as recorded by a sampler whose log-probabilities are this much higher."""
    turns = [
        replace(each, logprobs=tuple(logprob + shift for logprob in each.logprobs))
        for each in trajectory.turns
    ]
    return replace(trajectory, turns=tuple(turns))


@pytest.mark.slow
@pytest.mark.parametrize("context", [[], WINDOW])
def test_rloo_in_the_first_update_is_reinforce_with_the_mean_of_the_others(
    context: list[str], session: Session, see_step: SeeStep
) -> None:
    trainer = trainer_of(session, "rloo", *context)
    seen = see_step(trainer)
    weights = []
    for index, trajectory in enumerate(seen.trajectories):
        start = index - index % 3
        others = (sum(RETURNS[start : start + 3]) - RETURNS[index]) / 2
        weights.append([(RETURNS[index] - others) / 12] * trajectory.num_response_tokens)
    expected = reinforced(trainer, seen.trajectories, weights)
    assert expected.norm() > 1e-3
    assert (seen.gradient - expected).norm() <= 1e-3 * expected.norm()


@pytest.mark.slow
@pytest.mark.parametrize("context", [[], WINDOW])
def test_ppo_with_a_critic_that_knows_nothing_weighs_tokens_by_the_whitened_return_to_go(
    context: list[str], session: Session, play_once: PlayOnce
) -> None:
    trainer = trainer_of(session, "ppo", *context)
    with play_once(trainer):
        seen = step_without_update(trainer, 3)
    to_go = [
        [
            sum(later.reward for later in trajectory.turns[index:])
            for index, turn in enumerate(trajectory.turns)
            for _ in turn.response_token_ids
        ]
        for trajectory in seen.trajectories
    ]
    of_tokens = [each for row in to_go for each in row]
    mean, scale = fmean(of_tokens), stdev(of_tokens) * len(of_tokens)
    weights = [[(each - mean) / scale for each in row] for row in to_go]
    expected = reinforced(trainer, seen.trajectories, weights)
    assert expected.norm() > 1e-4
    assert (seen.gradient - expected).norm() <= 1e-3 * expected.norm()


@pytest.mark.slow
def test_turn_level_without_a_known_state_is_the_trajectory_form(session: Session) -> None:
    expected = step_without_update(trainer_of(session, "apo"), 3).gradient
    trainer = trainer_of(session, "apo_turn", "--algorithm.min_visits=1000")
    assert trainer.values.states == {}
    actual = step_without_update(trainer, 3).gradient
    assert (actual - expected).norm() <= 1e-4 * expected.norm()
    assert trainer_of(session, "apo_turn", "--algorithm.min_visits=1").values.states != {}


@pytest.mark.slow
def test_the_share_of_known_turns_is_that_of_later_turns_in_states_with_a_value(
    session: Session,
) -> None:
    trainer = trainer_of(session, "apo_turn", "--algorithm.min_visits=1")
    played = step_without_update(trainer).trajectories
    later = [turn.state_key for episode in played for turn in episode.turns[1:]]
    visited = sorted(state for state in set(later) if state is not None)
    known = dict.fromkeys(visited[: len(visited) // 2], 0.0)
    trainer.values = replace(trainer.values, states=known)
    share = sum(state in known for state in later) / len(later)
    assert 0 < share < 1
    assert trainer.step(0).metrics["known_turn_share"] == pytest.approx(share)


@pytest.mark.slow
def test_the_policy_stays_as_it_is_while_the_critic_warms_up(session: Session) -> None:
    trainer = trainer_of(session, "ppo", "--algorithm.critic_warmup_steps=1")
    policy = trainer.policy.fingerprint()
    critic = trainer.algorithm.state_tensors()["critic/head.bias"].clone()
    first = trainer.step(0).metrics
    assert trainer.policy.fingerprint() == policy
    assert not torch.equal(trainer.algorithm.state_tensors()["critic/head.bias"], critic)
    assert first["gradient_norm"] == 0 and first["critic_gradient_norm"] > 0
    trainer.step(1)
    assert trainer.policy.fingerprint() != policy


@pytest.mark.slow
def test_the_critic_learns_at_the_scheduled_rate(session: Session) -> None:
    """Adam's first update is as large as the rate, which is a tenth in the first of ten steps."""

    def change(warmup_steps: int) -> torch.Tensor:
        trainer = trainer_of(session, "ppo", f"--optimizer.warmup_steps={warmup_steps}")
        before = trainer.algorithm.state_tensors()["critic/head.weight"].clone()
        trainer.step(0)
        return trainer.algorithm.state_tensors()["critic/head.weight"] - before

    torch.testing.assert_close(change(9), change(0) / 10, rtol=1e-3, atol=1e-9)


@pytest.mark.slow
def test_a_filter_that_drops_everything_makes_no_update(session: Session) -> None:
    trainer = trainer_of(session, "grpo", "--rollout_filter.strategy=top_p")
    before = trainer.policy.fingerprint()
    with paying(trainer, [1.0] * 12):
        metrics = trainer.step(0).metrics
    assert (metrics["num_updates"], metrics["kept_share"]) == (0, 0.0)
    assert trainer.policy.fingerprint() == before


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_metrics_of_its_own_are_the_monitors_that_it_declares(
    algorithm: str, session: Session, play_once: PlayOnce
) -> None:
    trainer = trainer_of(session, algorithm)
    metrics, own = trainer.algorithm.metrics, set()

    def noted(rollouts: Rollouts, targets: Any, collected: StepMetrics) -> dict[str, float]:
        found = metrics(rollouts, targets, collected)
        own.update(found.keys() - collected.metrics().keys())
        return found

    returns = RETURNS if algorithm in RIVALS else None
    with (
        patch.object(trainer.algorithm, "metrics", noted),
        play_once(trainer),
        paying(trainer, returns),
    ):
        row = trainer.step(3).metrics
    declared = set(trainer.config.algorithm.monitors)
    assert own <= declared
    # What is absent where V* or success is the same for all episodes.
    assert declared - {"v_star_success_correlation"} <= set(row)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_algorithm_trains_to_the_end(algorithm: str, algorithm_runs: AlgorithmRuns) -> None:
    run = algorithm_runs.finished(algorithm)
    rows = read_json_lines(run.metrics)
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    episodes = 4 * algorithm_runs.config(algorithm).algorithm.rollouts_per_task
    assert all(row["num_episodes"] == episodes for row in rows)
    per_step = 4 if algorithm == "ppo" else 1
    assert all(row["num_updates"] in (0, per_step) for row in rows)
    # Stage 1 is played for those alone that subtract V*.
    assert run.values.exists() == run.value_report.exists() == (algorithm in SINGLE_ROLLOUT)
    assert (run.policy / "model.safetensors").exists()


def test_starpo_s_is_ppo_with_bi_level_gae_a_variance_filter_and_clip_higher() -> None:
    starpo_s = load_config(CONFIGS / "starpo_s.yaml")
    assert isinstance(starpo_s.algorithm, Ppo)
    assert starpo_s.algorithm.bi_level_gae
    assert starpo_s.rollout_filter.strategy == "top_fraction"
    discounts = ("gamma", "gae_lambda", "gamma_turn", "lambda_turn")
    assert [getattr(starpo_s.algorithm, name) for name in discounts] == [1.0, 1.0, 0.95, 1.0]
    assert starpo_s.algorithm.kl_coefficient == 0
    assert starpo_s.algorithm.clip_high == 0.28


def test_dapo_as_the_page_of_comparisons_has_it_is_a_configuration() -> None:
    page = (CONFIGS.parent / "docs" / "comparison.md").read_text("utf-8")
    (text,) = re.findall(r"DAPO .*?```yaml\n(.*?)```", page, re.DOTALL)
    dapo = parse_config(text, source="docs/comparison.md")
    assert isinstance(dapo.algorithm, PolicyGradientConfig)
    assert (dapo.algorithm.clip_high, dapo.algorithm.aggregation) == (0.28, "token_mean")
    assert (dapo.rollout_filter.value, dapo.rollout_filter.zero_variance) == (1.0, "drop")


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (["--algorithm=grp"], r"got 'grp' \(did you mean .*\), expected apo or apo_turn or oapl"),
        (
            ["--rollout_filter.strategy=top_p", "--values.num_samples=1"],
            "Stage 1 may take only one; raise values.num_samples, which is 1",
        ),
        (
            ["--rollout_filter.strategy=top_p", "--algorithm=ppo"],
            "to see variance, and algorithm ppo plays each task once a step; "
            "raise algorithm.group_size, which is 1",
        ),
        (["--algorithm=rloo", "--algorithm.group_size=1"], "expected a whole number at least 2"),
        (
            ["--algorithm.reward_normalization.method=mean"],
            "algorithm.reward_normalization: unknown key; it is an option of ppo, grpo",
        ),
        (["--algorithm=apo_turn", "--algorithm.kl_coefficient=1"], "it is an option of apo, ppo"),
        (["--algorithm=brpo", "--training.tasks_per_step=1"], "must be at least 2, got 1"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_computed(
    keys: list[str], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        config(*keys, text="")
