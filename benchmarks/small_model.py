"""Model, tokenizer and demonstrations of the default configuration, for the other benchmarks."""

from ragen_apo.agent.assembly import build_context, build_environments
from ragen_apo.config import RunConfig
from ragen_apo.policy.language_model import LanguageModel, build_small_model
from ragen_apo.policy.tokenizer import train_tokenizer
from ragen_apo.types import Trajectory
from ragen_apo.warm_start.batches import play_demonstrations


def default_model(config: RunConfig) -> LanguageModel:
    """The untrained small model, with a tokenizer from the teacher's demonstrations."""
    turns = [turn for episode in _demonstrations(config, None) for turn in episode.turns]
    texts = [text for turn in turns for text in (turn.observation, turn.response)]
    small = config.policy.small
    return build_small_model(
        train_tokenizer(texts, vocab_size=small.vocab_size),
        small,
        seed=config.seed,
    )


def demonstrations(config: RunConfig, model: LanguageModel) -> list[Trajectory]:
    """One episode of the teacher on each training task, in the model's tokens."""
    return _demonstrations(config, model)


def _demonstrations(config: RunConfig, model: LanguageModel | None) -> list[Trajectory]:
    environments = build_environments(config.environment, config.agent)
    return play_demonstrations(
        environments.scripted_policies()["teacher"],
        environments,
        build_context(config.agent, model, environments) if model else None,
        environments.tasks("train"),
        num_episodes_per_task=1,
        seed=config.seed,
    )
