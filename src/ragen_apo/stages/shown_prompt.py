"""One scripted episode as the agent of a configuration would read and write it, token by token.

Consumes a configuration and, if there is one, a run whose tokenizer it takes; produces the tokens
of each context and which of them would be trained. No weights are loaded.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from transformers import PreTrainedTokenizerBase

from ragen_apo.agent.assembly import build_environments, context_of_tokenizer
from ragen_apo.agent.environment_manager import EnvironmentManager
from ragen_apo.agent.proxy import EpisodeRequest
from ragen_apo.agent.scripted import play_scripted_episodes
from ragen_apo.config import RunConfig
from ragen_apo.environments.base import task_at
from ragen_apo.errors import ConfigError, RunDirectoryError
from ragen_apo.policy.language_model import check_model, load_tokenizer
from ragen_apo.policy.tokenizer import train_tokenizer
from ragen_apo.run_directory import RunDirectory
from ragen_apo.seeding import derive_seed
from ragen_apo.stages.inputs import check_tools
from ragen_apo.types import Trajectory, training_samples
from ragen_apo.warm_start.batches import play_for_tokenizer, texts_of


@dataclass(frozen=True)
class ShownToken:
    """A token of a context."""

    token_id: int
    text: str
    is_trained: bool
    """Whether the policy writes it, so that the loss counts it; all others it only reads."""


@dataclass(frozen=True)
class ShownPrompt:
    """A scripted episode and its tokens."""

    trajectory: Trajectory
    policy: str
    """Name of the scripted policy that played it."""
    contexts: tuple[tuple[ShownToken, ...], ...]
    """One in the full context; with a window, one for each time that it has moved."""

    @property
    def turns(self) -> list[range]:
        """The turns, from 1, whose responses are trained in each context."""
        turns = self.trajectory.turns
        starts = [n for n, turn in enumerate(turns, 1) if n == 1 or turn.restarts_context]
        return [range(*each) for each in pairwise([*starts, len(turns) + 1])]


def show_prompt(
    config: RunConfig, *, run: RunDirectory | None = None, task: int = 0
) -> ShownPrompt:
    """Plays a training task (counted from 0) with the teacher, or the environment's `random`.

    The tokenizer is that of the run, else of `policy.path`, else the small one that a run would
    train. Raises ConfigError for a task or a teacher that is not there, RunDirectoryError for a run
    without a model, and what `check_model` and `read_chat_template` raise.
    """
    environments = build_environments(config.environment, config.agent)
    check_tools(config, environments)
    chosen = task_at(environments, "train", task)
    teacher = config.warm_start.demonstrations.teacher
    policy = _scripted_policy(environments, teacher=teacher, name=config.environment.name)
    tokenizer = _tokenizer(config, environments, run)
    (trajectory,) = play_scripted_episodes(
        environments.scripted_policies()[policy],
        environments,
        [EpisodeRequest(chosen, derive_seed(config.seed, "show-prompt", chosen.task_id))],
        policy_version=policy,
        context=context_of_tokenizer(config.agent, tokenizer, environments),
    )
    contexts = tuple(
        tuple(
            ShownToken(token_id, str(tokenizer.decode([token_id])), is_trained)
            for token_id, is_trained in zip(sample.token_ids, sample.loss_mask, strict=True)
        )
        for sample in training_samples(trajectory)
    )
    return ShownPrompt(trajectory, policy, contexts)


def _scripted_policy(environments: EnvironmentManager, *, teacher: str, name: str) -> str:
    policies = environments.scripted_policies()
    for policy in (teacher, "random"):
        if policy in policies:
            return policy
    raise ConfigError(
        f"the environment {name!r} has neither the scripted policy {teacher!r} "
        "(warm_start.demonstrations.teacher) nor 'random'; it has "
        f"{', '.join(sorted(policies)) or 'none at all'}"
    )


def _tokenizer(
    config: RunConfig, environments: EnvironmentManager, run: RunDirectory | None
) -> PreTrainedTokenizerBase:
    trust, options = config.policy.trust_remote_code, config.agent.template_options
    if run is not None:
        folders = (run.policy, run.distilled, run.reference(0), run.initial)
        found = next((folder for folder in folders if folder.exists()), None)
        if found is None:
            raise RunDirectoryError(f"{run.path} has no model yet; leave --run out, or train it")
        return load_tokenizer(found, trust_remote_code=trust, template_options=options)
    if config.policy.path is not None:
        path, revision = config.policy.path, config.policy.revision
        length = config.agent.max_context_tokens
        check_model(path, max_context_tokens=length, trust_remote_code=trust, revision=revision)
        return load_tokenizer(
            path, trust_remote_code=trust, revision=revision, template_options=options
        )
    demonstrations = config.warm_start.demonstrations
    played = play_for_tokenizer(demonstrations, environments, seed=config.seed)
    return train_tokenizer(texts_of(played), vocab_size=config.policy.small.vocab_size)
