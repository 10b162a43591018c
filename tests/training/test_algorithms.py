"""Every algorithm of the family in the trainer: what it plays, its gradient, that it runs."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from ragen_apo.config import RunConfig, load_config, parse_config
from ragen_apo.config.algorithms import AlgorithmName
from ragen_apo.errors import ConfigError
from ragen_apo.files import read_json_lines
from ragen_apo.policy.scoring import score_tokens
from ragen_apo.run_directory import RunDirectory
from ragen_apo.training.batching import collate
from ragen_apo.training.trainer import Trainer
from ragen_apo.types import Trajectory, training_samples

ALGORITHMS = get_args(AlgorithmName)
WINDOW = ["--agent.context.mode=last_turns", "--agent.context.num_turns=1"]
CONFIGS = Path(__file__).resolve().parents[2] / "configs"


@pytest.fixture
def trainer_of(trainer_with: Callable[..., Trainer], tiny_config: str) -> Callable[..., Trainer]:
    """A trainer of an algorithm whose policy is the second reference and reference the first."""

    def trainer_of(algorithm: str, *keys: str) -> Trainer:
        overrides = [f"--algorithm={algorithm}", "--training.tasks_per_step=4"]
        if algorithm not in ("apo", "apo_turn"):
            overrides.append("--policy_gradient.group_size=3")
        config = parse_config(tiny_config, source="tiny", overrides=[*overrides, *keys])
        return trainer_with(config)

    return trainer_of


def gradient(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> tuple[torch.Tensor, list]:
    """What reaches the optimizers in step 3, in float64, and the trajectories of the step.

    Returns repeat in a tiny run: those of A*-PO's rivals become different numbers.
    """
    if not trainer.config.needs_values:
        monkeypatch.setattr(trainer, "_returns", lambda episodes, step: numbered(len(episodes)))
    monkeypatch.setattr(trainer.optimizer, "update", lambda **_: 1.0)
    monkeypatch.setattr(trainer.algorithm, "update", lambda **_: {})
    trajectories = trainer.step(3).trajectories
    critic = getattr(trainer.algorithm, "_critic", None)
    parameters = [*trainer.policy.model.parameters(), *(critic.parameters() if critic else [])]
    return flat_gradient(parameters), trajectories


def numbered(num_episodes: int) -> torch.Tensor:
    return torch.arange(num_episodes).square() / num_episodes**2


def flat_gradient(parameters: Any) -> torch.Tensor:
    return torch.cat([p.grad.flatten().double() for p in parameters if p.grad is not None])


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_gradient_does_not_depend_on_the_micro_batch_size(
    algorithm: str, trainer_of: Callable[..., Trainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, parts = (
        gradient(trainer_of(algorithm, f"--training.micro_batch_size={size}"), monkeypatch)[0]
        for size in (16, 3)
    )
    assert whole.norm() > 1e-6
    assert (whole - parts).norm() <= 1e-4 * whole.norm()


@pytest.mark.parametrize("algorithm", sorted(set(ALGORITHMS) - {"apo", "apo_turn"}))
def test_nor_does_it_where_a_trajectory_is_several_samples(
    algorithm: str, trainer_of: Callable[..., Trainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    (whole, trajectories), (parts, _) = (
        gradient(trainer_of(algorithm, *WINDOW, f"--training.micro_batch_size={size}"), monkeypatch)
        for size in (32, 3)
    )
    assert any(len(training_samples(trajectory)) > 1 for trajectory in trajectories)
    assert whole.norm() > 1e-6
    assert (whole - parts).norm() <= 1e-4 * whole.norm()


@pytest.mark.parametrize("algorithm", ["apo", "apo_turn", "ppo", "grpo"])
def test_each_task_of_a_step_is_rolled_out_as_often_as_the_algorithm_wants(
    algorithm: str, trainer_of: Callable[..., Trainer]
) -> None:
    trainer = trainer_of(algorithm)
    rollouts = trainer._gather(trainer._roll_out(0), 0)
    size = 1 if algorithm in ("apo", "apo_turn") else 3
    assert rollouts.group_B.tolist() == [place for place in range(4) for _ in range(size)]
    tasks = Counter(trajectory.task.task_id for trajectory in rollouts.trajectories)
    assert set(tasks.values()) == {size}
    assert [t.task.task_id for t in rollouts.trajectories[:size]] == [
        rollouts.trajectories[0].task.task_id
    ] * size
    assert len({trajectory.seed for trajectory in rollouts.trajectories}) == 4 * size


@pytest.mark.parametrize("algorithm", ["ppo", "gigpo"])
def test_a_step_is_a_function_of_weights_moments_and_its_number(
    algorithm: str, trainer_of: Callable[..., Trainer]
) -> None:
    keys = ["--policy_gradient.num_epochs=2", "--policy_gradient.num_minibatches=2"]
    first, again = trainer_of(algorithm, *keys), trainer_of(algorithm, *keys)
    results = [trainer.step(2) for trainer in (first, again)]
    assert results[0].metrics["num_updates"] == 4
    assert results[0].trajectories == results[1].trajectories
    pairs = zip(first.policy.model.parameters(), again.policy.model.parameters(), strict=True)
    assert all(torch.equal(left, right) for left, right in pairs)
    states = [trainer.algorithm.state_tensors() for trainer in (first, again)]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[1])


def reinforced(trainer: Trainer, trajectories: list[Trajectory], weights: list) -> torch.Tensor:
    """Gradient of -sum over sampled tokens of weight times log pi, one weight list a trajectory."""
    policy = trainer.policy
    policy.model.zero_grad()
    for trajectory, weight in zip(trajectories, weights, strict=True):
        batch = collate(training_samples(trajectory), pad_id=0, device=policy.device)
        scores = score_tokens(policy, batch.token_ids_BT, batch.loss_mask_BT)
        logprobs_N = scores.logprobs_BT[batch.loss_mask_BT]
        (-(torch.tensor(weight) * logprobs_N).sum()).backward()
    return flat_gradient(policy.model.parameters())


@pytest.mark.parametrize("context", [[], WINDOW])
def test_rloo_in_the_first_update_is_reinforce_with_the_mean_of_the_others(
    context: list[str], trainer_of: Callable[..., Trainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = trainer_of("rloo", *context)
    actual, trajectories = gradient(trainer, monkeypatch)
    returns = numbered(len(trajectories)).tolist()
    weights = []
    for place, trajectory in enumerate(trajectories):
        start = place - place % 3
        others = (sum(returns[start : start + 3]) - returns[place]) / 2
        weights.append([(returns[place] - others) / 12] * trajectory.num_response_tokens)
    expected = reinforced(trainer, trajectories, weights)
    assert expected.norm() > 1e-3
    assert (actual - expected).norm() <= 1e-3 * expected.norm()


@pytest.mark.parametrize("context", [[], WINDOW])
def test_ppo_with_a_critic_that_knows_nothing_weighs_tokens_by_the_return_to_go(
    context: list[str], trainer_of: Callable[..., Trainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = trainer_of("ppo", "--ppo.whiten_advantages=false", *context)
    monkeypatch.setattr(trainer.algorithm, "update", lambda **_: {})
    monkeypatch.setattr(trainer.optimizer, "update", lambda **_: 1.0)
    trajectories = trainer.step(3).trajectories
    actual = flat_gradient(trainer.policy.model.parameters())
    num_tokens = sum(trajectory.num_response_tokens for trajectory in trajectories)
    weights = [
        [
            sum(later.reward for later in trajectory.turns[index:]) / num_tokens
            for index, turn in enumerate(trajectory.turns)
            for _ in turn.response_token_ids
        ]
        for trajectory in trajectories
    ]
    expected = reinforced(trainer, trajectories, weights)
    assert expected.norm() > 1e-4
    assert (actual - expected).norm() <= 1e-3 * expected.norm()


def test_turn_level_without_a_known_state_is_the_trajectory_form(
    trainer_of: Callable[..., Trainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, _ = gradient(trainer_of("apo"), monkeypatch)
    trainer = trainer_of("apo_turn", "--turn_level.min_visits=1000")
    assert trainer.values.states == {}
    actual, _ = gradient(trainer, monkeypatch)
    assert (actual - expected).norm() <= 1e-4 * expected.norm()
    assert trainer_of("apo_turn", "--turn_level.min_visits=1").values.states != {}


def test_the_share_of_known_turns_is_that_of_later_turns_in_states_with_a_value(
    trainer_of: Callable[..., Trainer],
) -> None:
    trainer = trainer_of("apo_turn", "--turn_level.min_visits=1")
    later = [turn.state_key for episode in trainer._roll_out(0) for turn in episode.turns[1:]]
    visited = sorted(state for state in set(later) if state is not None)
    known = dict.fromkeys(visited[: len(visited) // 2], 0.0)
    trainer.values = replace(trainer.values, states=known)
    share = sum(state in known for state in later) / len(later)
    assert 0 < share < 1
    assert trainer.step(0).metrics["known_turn_share"] == pytest.approx(share)


def test_the_policy_stays_as_it_is_while_the_critic_warms_up(
    trainer_of: Callable[..., Trainer],
) -> None:
    trainer = trainer_of("ppo", "--ppo.critic_warmup_steps=1")
    policy = trainer.policy.fingerprint()
    critic = trainer.algorithm.state_tensors()["critic/head.bias"].clone()
    first = trainer.step(0).metrics
    assert trainer.policy.fingerprint() == policy
    assert not torch.equal(trainer.algorithm.state_tensors()["critic/head.bias"], critic)
    assert first["gradient_norm"] == 0 and first["critic_gradient_norm"] > 0
    trainer.step(1)
    assert trainer.policy.fingerprint() != policy


def test_a_filter_that_drops_everything_makes_no_update(
    trainer_of: Callable[..., Trainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = trainer_of("grpo", "--rollout_filter.strategy=top_p")
    monkeypatch.setattr(trainer, "_returns", lambda episodes, step: torch.ones(len(episodes)))
    before = trainer.policy.fingerprint()
    metrics = trainer.step(0).metrics
    assert (metrics["num_updates"], metrics["kept_share"]) == (0, 0.0)
    assert trainer.policy.fingerprint() == before


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_algorithm_trains_to_the_end(
    algorithm: str,
    algorithm_runs: Callable[[str], RunDirectory],
    algorithm_config: Callable[[str], RunConfig],
) -> None:
    run = algorithm_runs(algorithm)
    rows = read_json_lines(run.metrics)
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    episodes = 4 * algorithm_config(algorithm).num_rollouts_per_task
    assert all(row["num_episodes"] == episodes for row in rows)
    per_step = 4 if algorithm == "ppo" else 1
    assert all(row["num_updates"] in (0, per_step) for row in rows)
    # Stage 1 is played for those alone that subtract V*.
    assert run.values.exists() == run.value_report.exists() == (algorithm in ("apo", "apo_turn"))
    assert (run.policy / "model.safetensors").exists()


def test_starpo_s_is_ppo_with_bi_level_gae_a_variance_filter_and_clip_higher() -> None:
    config = load_config(CONFIGS / "starpo_s.yaml")
    assert (config.algorithm, config.ppo.bi_level_gae) == ("ppo", True)
    assert config.rollout_filter.statistic == "std"
    assert config.policy_gradient.kl_coefficient == 0
    assert config.policy_gradient.clip_high == 0.28


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (["--algorithm=grp"], "algorithm: got 'grp', expected apo or apo_turn or ppo"),
        (
            ["--rollout_filter.strategy=top_p", "--apo.num_value_samples=1"],
            "as apo.num_value_samples is 1; raise that",
        ),
        (
            ["--rollout_filter.strategy=top_p", "--algorithm=ppo"],
            "rollout_filter needs several rollouts of a task to see variance, and algorithm ppo",
        ),
        (["--algorithm=rloo", "--policy_gradient.group_size=1"], "must be at least 2, got 1"),
        (["--reward_normalization.method=mean"], "compares them with V\\* of unchanged ones"),
        (
            ["--rollout_filter.strategy=top_k", "--rollout_filter.value=0.5", "--algorithm=grpo"],
            "top_k must be a whole number >= 1, got 0.5",
        ),
        (
            [
                "--algorithm=grpo",
                "--rollout_filter.strategy=top_p",
                "--rollout_filter.statistic=mean",
            ],
            "mean returns may be negative",
        ),
        (["--algorithm=apo_turn", "--apo.kl_coefficient=1"], "belong to algorithm apo"),
        (["--algorithm=brpo", "--training.tasks_per_step=1"], "must be at least 2, got 1"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_computed(
    keys: list[str], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_config("", source="run.yaml", overrides=keys)
