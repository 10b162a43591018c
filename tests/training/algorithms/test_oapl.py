"""OAPL in the trainer: its loss, what is dropped, who plays under a lag, and what it keeps."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from ragen_apo.config.policy import LoraConfig
from ragen_apo.errors import ConfigError
from ragen_apo.policy.language_model import LanguageModel, load_language_model
from ragen_apo.policy.lora import add_adapters, trained_tensors
from ragen_apo.policy.scoring import TokenScores
from ragen_apo.session import Session
from ragen_apo.training.algorithms.oapl import Oapl, OaplAlgorithm
from ragen_apo.training.rollouts import MicroBatch, Rollouts
from ragen_apo.training.trainer import Trainer
from tests import factories
from tests.factories import SeenStep, paying, sampled_logprobs, step_without_update, trainer_of

BETA = 0.5
LAGGED = ["--algorithm.lag=4", "--algorithm.num_epochs=2", "--monitors.every_steps=1"]
DIFFERENT = [number**2 / 144 for number in range(12)]
"""Returns of 4 tasks in groups of 3."""


def two_groups() -> Rollouts:
    """Two tasks of three episodes each, of one to three turns; the sampler recorded -0.5 a token.

    All of the first episode's turns sample two tokens, those of the others one to three.
    """
    rewards = [(1.0,), (0.0, 0.0), (0.0, 0.0, 0.0), (0.25, 0.25), (1.0,), (0.0, 1.0)]
    episodes = [
        factories.episode(
            *(
                factories.turn(each, response_token_ids=(4,) * (1 + (row + index) % 3))
                for index, each in enumerate(parts)
            ),
            task=factories.task(str(row // 3)),
        )
        for row, parts in enumerate(rewards)
    ]
    return factories.rollouts(episodes, group_size=3)


def loss_and_gradient(
    algorithm: OaplAlgorithm, rollouts: Rollouts, logprobs_BT: torch.Tensor, *, size: int
) -> tuple[float, torch.Tensor]:
    """Over micro-batches of at most `size` samples."""
    logprobs_BT = logprobs_BT.clone().requires_grad_()
    targets = algorithm.prepare(rollouts)

    def part(micro: MicroBatch) -> torch.Tensor:
        cut_BT = micro.cut(logprobs_BT)
        return algorithm.loss(targets, micro, TokenScores(cut_BT, torch.zeros_like(cut_BT))).loss

    parts = [part(micro) for micro in rollouts.micro_batches(range(len(rollouts)), size=size)]
    loss = torch.stack(parts).sum()
    (gradient_BT,) = torch.autograd.grad(loss, logprobs_BT)
    return loss.item(), gradient_BT


@pytest.mark.parametrize("size", [6, 2, 1])
@pytest.mark.parametrize("beta2", [None, 0.1])
def test_loss_and_gradient_are_the_ones_derived_by_hand(
    beta2: float | None, size: int, tiny_model: LanguageModel
) -> None:
    rollouts = two_groups()
    mask_BT = rollouts.mask_BT
    settings = Oapl(beta1=BETA, beta2=beta2)
    draws = torch.Generator().manual_seed(0)
    moved_BT = torch.rand(mask_BT.shape, generator=draws, dtype=torch.float64) - 1.0
    # What stands where nothing was sampled must not matter.
    logprobs_BT = torch.where(mask_BT, moved_BT, torch.nan)
    weight = BETA if beta2 is None else beta2
    # V_hat = 0.5 log((e^2 + 1 + 1) / 3) = 0.570 and 0.5 log((e + e^2 + e^2) / 3) = 0.882
    values = [0.5 * math.log((math.exp(2) + 2) / 3)] * 3
    values += [0.5 * math.log((math.exp(1) + 2 * math.exp(2)) / 3)] * 3
    losses, expected_BT = [], torch.zeros_like(moved_BT)
    for row, (value, earned) in enumerate(zip(values, [1, 0, 0, 0.5, 1, 1], strict=True)):
        delta = sum(float(each) + 0.5 for each in moved_BT[row][mask_BT[row]])
        residual = (earned - value) - weight * delta
        losses.append(residual**2 / (2 * weight))
        # d/dlogp A^2 / (2 beta2) = -A at every sampled token, over 6 trajectories
        expected_BT[row][mask_BT[row]] = -residual / 6
    algorithm = OaplAlgorithm(settings, tiny_model)
    loss, gradient_BT = loss_and_gradient(algorithm, rollouts, logprobs_BT, size=size)
    assert loss == pytest.approx(sum(losses) / 6, rel=1e-6)
    torch.testing.assert_close(gradient_BT, expected_BT, rtol=1e-6, atol=1e-8)


@pytest.mark.slow
def test_tasks_whose_returns_are_all_equal_are_dropped_and_give_no_gradient(
    session: Session,
) -> None:
    returns = [0.1, 0.1, 0.1, *DIFFERENT[3:6], 1.0, 1.0, 1.0, *DIFFERENT[9:]]
    trainer = trainer_of(session, "oapl")
    seen = step_without_update(trainer, returns=returns)
    assert seen.result.metrics["kept_share"] == 0.5
    assert seen.rollouts.group_B.tolist() == [1, 1, 1, 3, 3, 3]
    weights = torch.zeros(len(seen.trajectories))
    for start in (3, 9):
        group = torch.tensor(returns[start : start + 3])
        value = BETA * torch.logsumexp(group / BETA, 0) - BETA * math.log(3)
        weights[start : start + 3] = (group - value) / 6
    # At the first update the policy is the one that sampled: Delta is 0, and so is its pull.
    trainer.policy.model.zero_grad()
    for trajectory, weight in zip(seen.trajectories, weights, strict=True):
        (-weight * sampled_logprobs(trainer.policy, trajectory).sum()).backward()
    expected = factories.flat_gradient(trainer)
    assert expected.norm() > 1e-4
    assert (seen.gradient - expected).norm() <= 1e-3 * expected.norm()


@pytest.mark.slow
def test_a_step_of_equal_returns_alone_makes_no_update(session: Session) -> None:
    trainer = trainer_of(session, "oapl", "--algorithm.lag=2")
    before = trainer.policy.fingerprint()
    with paying(trainer, [0.1] * 12):
        metrics = trainer.step(0).metrics
    assert (metrics["num_updates"], metrics["kept_share"]) == (0, 0.0)
    assert trainer.policy.fingerprint() == before


@contextmanager
def watched(trainer: Trainer) -> Iterator[list[str]]:
    """Fingerprints of the policy that plays the rollouts, and that scores the thoughts, by step."""
    seen: list[str] = []
    roll_out = trainer.proxy.rollout

    def played(*args: Any, **options: Any) -> Any:
        seen.append(trainer.policy.fingerprint())
        return roll_out(*args, **options)

    def scored(*args: Any, **options: Any) -> dict[str, float]:
        seen.append(trainer.policy.fingerprint())
        return {}

    with (
        patch.object(trainer.proxy, "rollout", played),
        patch("ragen_apo.training.trainer.cross_scoring_metrics", scored),
        paying(trainer, DIFFERENT),
    ):
        yield seen


@pytest.mark.slow
def test_the_lagged_policy_plays_until_enough_updates_were_made(session: Session) -> None:
    trainer = trainer_of(session, "oapl", *LAGGED)
    policies, steps = [trainer.policy.fingerprint()], []
    with watched(trainer) as seen:
        for step in range(4):
            steps.append(trainer.step(step).metrics)
            policies.append(trainer.policy.fingerprint())
    assert len(set(policies)) == 5, "every step trains the policy"
    # Two updates a step, so every second step begins with a renewal.
    lagged = [policies[0], policies[0], policies[2], policies[2]]
    assert seen == [each for each in lagged for _ in ("rollouts", "thoughts")]
    assert [row["sampler_lag"] for row in steps] == [0, 2, 0, 2]


@pytest.mark.slow
def test_the_log_ratio_is_to_the_probabilities_that_the_lagged_policy_recorded(
    session: Session,
) -> None:
    trainer = trainer_of(session, "oapl", *LAGGED, "--optimizer.learning_rate=3e-3")

    def seen_step(step: int) -> SeenStep:
        return step_without_update(trainer, step, returns=DIFFERENT)

    def moved(seen: SeenStep) -> list[float]:
        recorded = [
            sum(logprob for turn in each.turns for logprob in turn.logprobs)
            for each in seen.trajectories
        ]
        now = [sampled_logprobs(trainer.policy, each).sum().item() for each in seen.trajectories]
        return [abs(left - right) for left, right in zip(now, recorded, strict=True)]

    assert max(moved(seen_step(0))) < 1e-3
    with paying(trainer, DIFFERENT):
        trainer.step(0)
    seen = seen_step(1)
    assert min(moved(seen)) > 1e-3
    metrics = seen.result.metrics
    assert metrics["sampler_log_ratio_mean_abs"] == pytest.approx(sum(moved(seen)) / 12, rel=1e-3)
    assert metrics["sampler_lag"] == 2
    # log_ratio_mean is still that to the run's reference, which neither of the two is.
    assert metrics["log_ratio_mean"] != pytest.approx(metrics["sampler_log_ratio_mean_abs"])


@pytest.mark.slow
def test_rollouts_that_fail_leave_the_trained_policy_in_place(session: Session) -> None:
    trainer = trainer_of(session, "oapl", *LAGGED)
    with paying(trainer, DIFFERENT):
        trainer.step(0)
    trained, playing = trainer.policy.fingerprint(), []

    def fails(*args: Any, **options: Any) -> None:
        playing.append(trainer.policy.fingerprint())
        raise RuntimeError("out of memory")

    with (
        patch.object(trainer.proxy, "rollout", fails),
        pytest.raises(RuntimeError, match="out of memory"),
    ):
        trainer.step(1)
    assert playing != [trained]
    assert trainer.policy.fingerprint() == trained


@pytest.mark.slow
def test_with_adapters_they_alone_are_kept_and_exchanged(qwen_folder: Path) -> None:
    policy = load_language_model(qwen_folder, device=torch.device("cpu"))
    add_adapters(policy.model, LoraConfig(rank=2, alpha=4), seed=0)
    before, plain = policy.fingerprint(), policy.without_adapters().fingerprint()
    algorithm = OaplAlgorithm(Oapl(lag=2), policy)
    adapters = trained_tensors(policy.model)
    assert len(algorithm.state_tensors()) == len(adapters) + 1  # and the number of updates
    with torch.no_grad():
        for tensor in adapters.values():
            tensor.add_(0.1)
    algorithm.update(rate_scale=1.0)
    after = policy.fingerprint()
    with algorithm.sampling():
        assert policy.fingerprint() == before
    assert policy.fingerprint() == after != before
    assert policy.without_adapters().fingerprint() == plain


@pytest.mark.parametrize("adapters", [False, True], ids=["all weights", "adapters"])
def test_the_sampler_is_the_lagged_policy_whatever_is_trained_meanwhile(
    qwen_folder: Path, adapters: bool
) -> None:
    policy = load_language_model(qwen_folder, device=torch.device("cpu"))
    if adapters:
        add_adapters(policy.model, LoraConfig(rank=2, alpha=4), seed=0)
    algorithm = OaplAlgorithm(Oapl(lag=2), policy)
    sampler = algorithm.sampler()
    assert sampler is not None
    before = policy.fingerprint()
    embeddings = policy.model.get_input_embeddings().weight
    for number in range(3):
        assert sampler.fingerprint() == before
        with torch.no_grad():
            for tensor in trained_tensors(policy.model).values():
                tensor.add_(0.1 * torch.randn_like(tensor))
        algorithm.update(rate_scale=1.0)
        if number == 1:
            before = policy.fingerprint()
            assert algorithm.num_steps_of_sampler() == 2, "it has been renewed"
    shares = sampler.model.get_input_embeddings().weight is embeddings
    assert shares is adapters, "what is not trained is there once"
    assert not any(parameter.requires_grad for parameter in sampler.model.parameters())


@pytest.mark.parametrize("settings", [Oapl(lag=1), Oapl(lag=4, num_epochs=2, num_minibatches=2)])
def test_a_sampler_that_stays_for_one_step_is_no_model_of_its_own(
    tiny_model: LanguageModel, settings: Oapl
) -> None:
    assert OaplAlgorithm(settings, tiny_model).sampler() is None


def test_the_steps_of_a_sampler_are_those_that_begin_before_the_lag_is_over(
    tiny_model: LanguageModel,
) -> None:
    algorithm = OaplAlgorithm(Oapl(lag=5, num_epochs=2), tiny_model)
    found = []
    for num_updates in (2, 0, 2, 2, 2):  # the second step drops all its episodes
        found.append(algorithm.num_steps_of_sampler())
        for _ in range(num_updates):
            algorithm.update(rate_scale=1.0)
    assert found == [3, 2, 2, 1, 3]


def test_without_a_lag_nothing_is_copied(tiny_model: LanguageModel) -> None:
    assert OaplAlgorithm(Oapl(num_epochs=4), tiny_model).state_tensors() == {}


def test_tensors_of_a_run_with_another_lag_are_refused(tiny_model: LanguageModel) -> None:
    lagged = OaplAlgorithm(Oapl(lag=2), tiny_model)
    with pytest.raises(ValueError, match=r"lagged/.* is missing"):
        lagged.load_state_tensors({})
    with pytest.raises(ValueError, match="is not expected here"):
        OaplAlgorithm(Oapl(), tiny_model).load_state_tensors(lagged.state_tensors())


REUSED = [["--algorithm.lag=2"], ["--algorithm.num_epochs=2"], ["--algorithm.num_minibatches=2"]]


@pytest.mark.parametrize("reused", REUSED)
def test_a_beta2_above_beta1_is_refused_where_samples_are_used_again(reused: list[str]) -> None:
    keys = ["--algorithm=oapl", "--algorithm.beta1=0.2", "--algorithm.beta2=0.3"]
    factories.config(*keys)
    factories.config(*keys[:2], "--algorithm.beta2=0.1", *reused)
    with pytest.raises(ConfigError, match=r"beta2 must be at most beta1 \(0\.2\) .*, got 0\.3"):
        factories.config(*keys, *reused)


def test_a_lag_is_refused_where_distillation_would_leave_the_lagged_policy_behind() -> None:
    distilled = ["--algorithm=oapl", "--distillation.enabled=true"]
    refreshed = [*distilled, "--reference.refresh_every_steps=3"]
    factories.config(*refreshed)
    factories.config(*distilled, "--reference.refresh_every_steps=null", "--algorithm.lag=2")
    with pytest.raises(ConfigError, match=r"lag is 2, and distillation at a new reference"):
        factories.config(*refreshed, "--algorithm.lag=2")
