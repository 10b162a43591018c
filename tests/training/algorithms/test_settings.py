"""Every option of an algorithm reaches its loss: compared with the objectives called directly.

Each option is changed alone. The log-probabilities of the loss are shifted away from those at which
the tokens were sampled, so that ratios, clips and divergences have something to act on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from ragen_apo.config import RunConfig
from ragen_apo.objectives import ppo
from ragen_apo.objectives.apo import ApoSettings, apo_loss
from ragen_apo.objectives.policy_gradient import (
    aggregate,
    clipped_policy_loss,
    entropy_bonus,
    importance_weights,
    kl_loss,
    penalize_rewards,
)
from ragen_apo.objectives.tensors import group_statistics, token_log_ratio, whiten
from ragen_apo.objectives.turn_level import TurnLevelSettings, turn_level_loss
from ragen_apo.policy.language_model import LanguageModel
from ragen_apo.policy.scoring import TokenScores
from ragen_apo.training.algorithms.apo_turn import TurnTargets
from ragen_apo.training.algorithms.base import Algorithm
from ragen_apo.training.algorithms.gigpo import Gigpo
from ragen_apo.training.algorithms.grpo import Grpo
from ragen_apo.training.algorithms.rloo import Rloo
from ragen_apo.training.rollouts import MicroBatch, Rollouts
from ragen_apo.values.state_values import ReferenceValues
from tests import factories
from tests.sweeps import quick_first

REWARDS = [(1.0,), (0.0, 0.3), (0.0, 0.0, 0.1), (0.25, 0.25), (0.9,), (0.0, 0.2)]
"""Of two tasks with three episodes each."""
STATES = ("start", "page", "page")
MAX_TOKENS = 96

Options = dict[str, Any]


@pytest.fixture
def step() -> Rollouts:
    """Rollouts whose reference and values differ from task to task and from token to token."""
    episodes = [
        factories.episode(
            *(
                factories.turn(
                    reward, response_token_ids=(4,) * (1 + (row + k) % 3), state_key=STATES[k]
                )
                for k, reward in enumerate(rewards)
            ),
            task=factories.task(str(row // 3)),
        )
        for row, rewards in enumerate(REWARDS)
    ]
    task_ids = [factories.task(name).task_id for name in ("0", "1")]
    values = ReferenceValues(dict(zip(task_ids, (0.3, 0.5), strict=True)), {"page": 0.7})
    step = factories.rollouts(episodes, group_size=3, values=values)
    shift_BT = noise(step, seed=1)
    return replace(
        step,
        reference_logprobs_BT=step.old_logprobs_BT + shift_BT * step.mask_BT,
        old_logprobs_BT=step.old_logprobs_BT + noise(step, seed=5) * step.mask_BT,
    )


def noise(step: Rollouts, *, seed: int) -> Tensor:
    draws = torch.Generator().manual_seed(seed)
    return 0.6 * torch.randn(step.mask_BT.shape, generator=draws)


def shifted(step: Rollouts) -> TokenScores:
    """What the policy says of the tokens after an update, and its entropies."""
    logprobs_BT = (step.old_logprobs_BT + noise(step, seed=2)) * step.mask_BT
    return TokenScores(logprobs_BT, entropy_BT=noise(step, seed=3).abs() * step.mask_BT)


def configured(name: str, options: Options) -> RunConfig:
    overrides = [f"--algorithm={name}", f"--agent.max_context_tokens={MAX_TOKENS}"]
    overrides += ["--agent.max_response_tokens=16"]
    written = {key: "null" if value is None else value for key, value in options.items()}
    overrides += [f"--algorithm.{key}={value}".lower() for key, value in written.items()]
    return factories.config(*overrides)


def loss_of(algorithm: Algorithm[Any], step: Rollouts) -> float:
    scores, loss = shifted(step), 0.0
    targets = algorithm.prepare(step)
    for micro in step.micro_batches(range(len(step)), size=4):
        cut = TokenScores(micro.cut(scores.logprobs_BT), micro.cut(scores.entropy_BT))
        loss += algorithm.loss(targets, micro, cut).loss.item()
    return loss


def assert_reaches_the_loss(
    name: str,
    options: Options,
    step: Rollouts,
    *,
    model: LanguageModel,
    expected: Callable[..., Tensor],
    others: Options | None = None,
) -> None:
    """The loss is the expected one of these options, and that without them is another."""
    others = others or {}
    config = configured(name, {**others, **options})
    actual = loss_of(config.algorithm.make(config, model), step)
    assert actual == pytest.approx(expected(step, **{**others, **options}).item(), rel=1e-5)
    assert actual != pytest.approx(expected(step, **others).item(), rel=1e-3)


def penalized(
    step: Rollouts, *, kl_in: str = "loss", kl_coefficient: float = 0.0, **_: Any
) -> tuple[Tensor, Tensor]:
    """Rewards [B, T] and returns [B] after the KL penalty of these options."""
    if kl_in == "loss":
        return step.rewards_BT, step.returns_B
    kl_BT = token_log_ratio(step.old_logprobs_BT, step.reference_logprobs_BT, step.mask_BT)
    rewards_BT = penalize_rewards(
        step.rewards_BT, kl_BT=kl_BT, mask_BT=step.mask_BT, coefficient=kl_coefficient
    )
    return rewards_BT, rewards_BT.sum(dim=1)


def policy_term(
    step: Rollouts,
    advantages_BT: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    importance_cap: float | None = None,
    aggregation: Any = "token_mean",
    kl_in: str = "loss",
    kl_coefficient: float = 0.0,
    entropy_coefficient: float = 0.0,
) -> Tensor:
    scores, mask_BT = shifted(step), step.mask_BT
    loss_BT = clipped_policy_loss(
        scores.logprobs_BT,
        old_logprobs_BT=step.old_logprobs_BT,
        advantages_BT=advantages_BT,
        mask_BT=mask_BT,
        clip_low=clip_low,
        clip_high=clip_high,
    ).loss_BT
    if importance_cap is not None:
        loss_BT = loss_BT * importance_weights(
            step.old_logprobs_BT,
            sampled_logprobs_BT=step.tokens.sampled_logprobs_RT,
            mask_BT=mask_BT,
            cap=importance_cap,
        )
    if kl_in == "loss":
        loss_BT = loss_BT + kl_coefficient * kl_loss(
            scores.logprobs_BT, reference_logprobs_BT=step.reference_logprobs_BT, mask_BT=mask_BT
        )
    loss_BT = loss_BT + entropy_bonus(
        scores.entropy_BT, mask_BT=mask_BT, coefficient=entropy_coefficient
    )
    return aggregate(
        loss_BT,
        mask_BT=mask_BT,
        aggregation=aggregation,
        num_sequences=len(step),
        num_tokens=int(mask_BT.sum()),
        max_tokens=MAX_TOKENS,
    )


def rloo_loss(step: Rollouts, **options: Any) -> Tensor:
    _, returns_B = penalized(step, **options)
    advantages_BT = Rloo().advantages(replace(step, returns_B=returns_B))
    options = {"aggregation": "sequence_mean_token_sum", **options}
    return policy_term(step, advantages_BT, **options)


IN_LOSS, IN_REWARD = {"kl_coefficient": 0.3}, {"kl_coefficient": 0.3, "kl_in": "reward"}


@pytest.mark.parametrize(
    ("option", "value", "others"),
    [
        ("clip_low", 0.05, {}),
        ("clip_high", 0.05, {}),
        ("importance_cap", 1.2, {}),
        ("importance_cap", 2.0, IN_LOSS),
        ("aggregation", "token_mean", {}),
        ("aggregation", "sequence_mean_token_mean", {}),
        ("aggregation", "constant", {}),
        ("kl_coefficient", 0.3, {}),
        ("kl_in", "reward", IN_LOSS),
        ("kl_coefficient", 0.1, IN_REWARD),
        ("entropy_coefficient", 0.1, {}),
    ],
)
def test_options_of_a_clipped_ratio(
    option: str, value: Any, others: Options, step: Rollouts, tiny_model: LanguageModel
) -> None:
    assert_reaches_the_loss(
        "rloo", {option: value}, step, model=tiny_model, expected=rloo_loss, others=others
    )


@pytest.mark.parametrize(
    ("option", "value", "others"),
    quick_first(
        [
            ("clip_high", 0.05, {}),
            ("importance_cap", 1.2, {}),
            ("kl_in", "reward", IN_LOSS),
            ("value_clip", 0.05, {}),
            ("value_clip", None, {}),
            ("gamma", 0.7, {}),
            ("gae_lambda", 0.6, {}),
            ("gae_lambda", 0.6, {"gamma": 0.7}),
            ("bi_level_gae", True, {}),
            ("gamma", 0.7, {"bi_level_gae": True}),
            ("gae_lambda", 0.6, {"bi_level_gae": True}),
            ("gamma_turn", 0.5, {"bi_level_gae": True}),
            ("lambda_turn", 0.4, {"bi_level_gae": True}),
        ]
    ),
)
def test_options_of_ppo(
    option: str, value: Any, others: Options, step: Rollouts, tiny_model: LanguageModel
) -> None:
    """The critic of the loss is one that has moved since the start of the step."""
    config = configured("ppo", {**others, option: value})
    algorithm: Any = config.algorithm.make(config, tiny_model)
    (critic,) = algorithm.other_models
    draws = torch.Generator().manual_seed(4)
    critic.head.weight.data = 0.1 * torch.randn(critic.head.weight.shape, generator=draws)
    prepare = algorithm.prepare

    def values_BT() -> Tensor:
        def of(micro: MicroBatch) -> Tensor:
            samples = micro.samples
            return micro.in_rows(critic(samples.token_ids_RT, samples.loss_mask_RT))

        return step.scored(of, size=4, what="values")

    old_BT = values_BT()

    def prepared(rollouts: Rollouts) -> Any:
        targets = prepare(rollouts)
        critic.head.bias.data += 0.3
        return targets

    algorithm.prepare = prepared
    actual = loss_of(algorithm, step)
    values = {"old_BT": old_BT, "new_BT": values_BT()}
    assert actual == pytest.approx(
        ppo_loss(step, **values, **{**others, option: value}).item(), rel=1e-4
    )
    assert actual != pytest.approx(ppo_loss(step, **values, **others).item(), rel=1e-3)


def ppo_loss(
    step: Rollouts,
    *,
    old_BT: Tensor,
    new_BT: Tensor,
    value_clip: float | None = 0.2,
    gamma: float = 1.0,
    gae_lambda: float = 1.0,
    bi_level_gae: bool = False,
    gamma_turn: float = 0.95,
    lambda_turn: float = 1.0,
    **options: Any,
) -> Tensor:
    rewards_BT, _ = penalized(step, **options)
    by_token = {"gamma": gamma, "gae_lambda": gae_lambda}
    if bi_level_gae:
        by_turn = {"gamma_turn": gamma_turn, "lambda_turn": lambda_turn}
        estimate = ppo.bi_level_gae(
            rewards_BT,
            values_BT=old_BT,
            mask_BT=step.mask_BT,
            turn_index_BT=step.turn_index_BT,
            **by_token,
            **by_turn,
        )
    else:
        estimate = ppo.gae(rewards_BT, values_BT=old_BT, mask_BT=step.mask_BT, **by_token)
    advantages_BT = whiten(estimate.advantages_BT, mask_BT=step.mask_BT)
    value_loss_BT = ppo.clipped_value_loss(
        new_BT,
        old_values_BT=old_BT,
        returns_BT=estimate.returns_BT,
        mask_BT=step.mask_BT,
        clip=value_clip,
    )
    return policy_term(step, advantages_BT, **options) + value_loss_BT.sum() / step.mask_BT.sum()


@pytest.mark.parametrize(
    ("option", "value", "others"),
    [
        ("beta2", 0.4, {}),
        ("loss", "weighted", {}),
        ("length_normalization", "tokens", {}),
        ("advantage_clamp", 0.2, {}),
        ("advantage_clamp", 0.2, {"loss": "weighted"}),
        ("kl_coefficient", 0.3, {}),
    ],
)
def test_options_of_apo(
    option: str, value: Any, others: Options, step: Rollouts, tiny_model: LanguageModel
) -> None:
    assert_reaches_the_loss(
        "apo", {option: value}, step, model=tiny_model, expected=apo_loss_of, others=others
    )


def apo_loss_of(step: Rollouts, **options: Any) -> Tensor:
    return apo_loss(
        shifted(step).logprobs_BT,
        reference_logprobs_BT=step.reference_logprobs_BT,
        mask_BT=step.mask_BT,
        returns_B=step.returns_B,
        v_star_B=torch.tensor([0.3] * 3 + [0.5] * 3),
        settings=ApoSettings(**{"beta2": 0.05, **options}),
        num_sequences=6,
    ).loss


@pytest.mark.parametrize(
    ("option", "value"), [("beta2", 0.4), ("trace", 0.2), ("advantage_clamp", 0.2)]
)
def test_options_of_apo_by_turn(
    option: str, value: float, step: Rollouts, tiny_model: LanguageModel
) -> None:
    def expected(step: Rollouts, **options: Any) -> Tensor:
        config = configured("apo_turn", {})
        targets: TurnTargets = config.algorithm.make(config, tiny_model).prepare(step)
        return turn_level_loss(
            shifted(step).logprobs_BT,
            reference_logprobs_BT=step.reference_logprobs_BT,
            mask_BT=step.mask_BT,
            segment_BT=targets.segment_BT,
            rewards_BS=targets.rewards_BS,
            values_BS=targets.values_BS,
            settings=TurnLevelSettings(**{"beta2": 0.05, "trace": 0.9, **options}),
            num_sequences=6,
        ).loss

    assert_reaches_the_loss("apo_turn", {option: value}, step, model=tiny_model, expected=expected)


def test_options_of_gigpo(step: Rollouts) -> None:
    def expected_BT(gamma: float) -> Tensor:
        turns = [(row, k) for row, rewards in enumerate(REWARDS) for k in range(len(rewards))]
        to_go = [
            sum(gamma**later * reward for later, reward in enumerate(REWARDS[row][k:]))
            for row, k in turns
        ]
        # Two tasks, each with a first state and another one for all later turns.
        anchors = torch.tensor([2 * (row // 3) + min(k, 1) for row, k in turns])
        of_turn_N = group_statistics(torch.tensor(to_go), group_N=anchors).standardized()
        by_turn = dict(zip(turns, of_turn_N.tolist(), strict=True))
        rows = [
            [by_turn[row, k] if k >= 0 else 0.0 for k in indices]
            for row, indices in enumerate(step.turn_index_BT.tolist())
        ]
        return Grpo().advantages(step) + torch.tensor(rows)

    actual_BT = Gigpo(gamma=0.5).advantages(step)
    torch.testing.assert_close(actual_BT, expected_BT(0.5), rtol=1e-5, atol=1e-6)
    assert (actual_BT - expected_BT(0.95)).abs().max() > 1e-3
