"""The algorithms that the trainer can run, by the name that a configuration gives them."""

from __future__ import annotations

from ragen_apo.config import RunConfig
from ragen_apo.objectives.policy_gradient import Aggregation
from ragen_apo.policy.critic import Critic
from ragen_apo.policy.language_model import LanguageModel
from ragen_apo.training.algorithms.apo import TrajectoryApo, TurnLevelApo
from ragen_apo.training.algorithms.base import Algorithm
from ragen_apo.training.algorithms.policy_gradient import (
    PolicyGradient,
    PolicyTerm,
    brpo,
    dr_grpo,
    gigpo,
    grpo,
    reinforce_plus_plus,
    rloo,
)
from ragen_apo.training.algorithms.ppo import Ppo

AGGREGATIONS = {
    "ppo": Aggregation.TOKEN_MEAN,
    "grpo": Aggregation.SEQUENCE_MEAN_TOKEN_MEAN,
    "dr_grpo": Aggregation.CONSTANT,
    "rloo": Aggregation.SEQUENCE_MEAN_TOKEN_SUM,
    "reinforce_plus_plus": Aggregation.TOKEN_MEAN,
    "brpo": Aggregation.TOKEN_MEAN,
    "gigpo": Aggregation.SEQUENCE_MEAN_TOKEN_MEAN,
}
"""How each paper makes one number of token losses; `policy_gradient.aggregation` overrides it."""


def make_algorithm(config: RunConfig, start: LanguageModel) -> Algorithm:
    """The configured algorithm; a critic starts as a copy of the policy of the start."""
    name = config.algorithm
    if name == "apo":
        return TrajectoryApo(config.apo)
    if name == "apo_turn":
        return TurnLevelApo(config.apo, config.turn_level)
    term = PolicyTerm(
        config.policy_gradient,
        aggregation=Aggregation(config.policy_gradient.aggregation or AGGREGATIONS[name]),
        max_tokens=config.agent.max_context_tokens,
    )
    if name == "ppo":
        return Ppo(
            term,
            config.ppo,
            critic=Critic(start, freeze_embeddings=config.policy.freeze_embeddings),
            micro_batch_size=config.training.micro_batch_size,
            weight_decay=config.apo.weight_decay,
            max_grad_norm=config.apo.max_grad_norm,
        )
    advantages = {
        "grpo": grpo,
        "dr_grpo": dr_grpo,
        "rloo": rloo,
        "reinforce_plus_plus": reinforce_plus_plus,
        "brpo": brpo,
        "gigpo": gigpo(config.gigpo),
    }
    return PolicyGradient(term, advantages=advantages[name])
