"""The supervised phases of the warm start, with their checkpoints and curves."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from ragen_apo.agent.assembly import build_context
from ragen_apo.config.warm_start import DemonstrationsConfig
from ragen_apo.errors import ConfigError
from ragen_apo.files import append_json_line
from ragen_apo.policy.language_model import LanguageModel
from ragen_apo.policy.passes import seeded_torch
from ragen_apo.seeding import derive_seed
from ragen_apo.session import Session
from ragen_apo.task_order import DrawOrder
from ragen_apo.training.batching import collate, micro_batches
from ragen_apo.training.checkpoint import Position, load_moments, save_checkpoint
from ragen_apo.training.optimization import Optimizer, Schedule, learning_rate_at
from ragen_apo.types import StopReason, TrainingSample, Trajectory, training_samples
from ragen_apo.warm_start.batches import (
    SupervisedBatch,
    accumulate_supervised_gradients,
    copy_batch,
    copyable_token_ids,
    number_token_ids,
    phrase_token_ids,
    play_demonstrations,
    relabel,
)
from ragen_apo.warm_start.recorded_episodes import recorded_demonstrations

WARMUP_STEPS = 20
MAX_GRAD_NORM = 1.0
LOG_EVERY = 10


@dataclass(frozen=True)
class SupervisedPhase:
    """What distinguishes one supervised phase from the other."""

    name: str
    num_steps: int
    peak_learning_rate: float
    schedule: Schedule
    batch: Callable[[int], list[SupervisedBatch]]
    """The batch of a step, in parts that go through the model one after another."""
    target_accuracy: float | None = None
    """The phase ends early when a batch reaches it."""


def copy_phase(session: Session, model: LanguageModel) -> SupervisedPhase:
    """Tiled random segments until copying is learned."""
    config = session.config.warm_start.copy_curriculum
    token_ids = copyable_token_ids(model)

    def batch(step: int) -> list[SupervisedBatch]:
        drawn = copy_batch(config, token_ids=token_ids, seed=session.config.seed, step=step)
        device = session.device
        return [SupervisedBatch(drawn.token_ids_BT.to(device), drawn.target_mask_BT.to(device))]

    return SupervisedPhase(
        name="copy",
        num_steps=config.max_steps,
        peak_learning_rate=config.learning_rate,
        schedule="constant",
        batch=batch,
        target_accuracy=config.target_accuracy,
    )


def demonstrations_phase(session: Session, model: LanguageModel) -> SupervisedPhase:
    """Episodes on training tasks, with the responses of the teacher or of people as targets."""
    config = session.config.warm_start.demonstrations
    trajectories = _demonstrations(session, model)
    _say_what_cannot_be_imitated(session, trajectories)
    episodes = [training_samples(trajectory) for trajectory in trajectories]
    order = DrawOrder(
        [trajectory.task.category for trajectory in trajectories],
        weights=session.environments.properties.category_weights,
        seed=session.config.seed,
        purpose="demonstration-order",
    )
    pad_id = model.pad_id
    names = _names(config, model, [sample for samples in episodes for sample in samples])

    def batch(step: int) -> list[SupervisedBatch]:
        indices = order.items(step, batch_size=config.batch_size)
        chosen = [sample for index in indices for sample in episodes[index]]
        if names:
            share, seed = config.relabel_share, session.config.seed
            chosen = relabel(chosen, token_ids=names, share=share, seed=seed, step=step)
        parts = [
            collate([chosen[index] for index in indices], pad_id=pad_id, device=session.device)
            for indices in micro_batches(
                [(sample,) for sample in chosen], size=session.config.training.micro_batch_size
            )
        ]
        return [SupervisedBatch(part.token_ids_BT, part.loss_mask_BT) for part in parts]

    return SupervisedPhase(
        name="demonstrations",
        num_steps=config.num_steps,
        peak_learning_rate=config.learning_rate,
        schedule="linear",
        batch=batch,
    )


def _names(
    config: DemonstrationsConfig,
    model: LanguageModel,
    samples: Sequence[TrainingSample],
) -> list[int]:
    """The tokens to exchange for each other; none to leave the demonstrations as they are."""
    if config.relabel == "none":
        return []
    if config.relabel == "numbers":
        return number_token_ids(model)
    phrases = phrase_token_ids(samples, share=config.relabel_spares)
    return [token for token in copyable_token_ids(model) if token not in phrases]


def _say_what_cannot_be_imitated(session: Session, trajectories: Sequence[Trajectory]) -> None:
    limits = session.config.agent
    lengths = [len(turn.response_token_ids) for episode in trajectories for turn in episode.turns]
    num_long = sum(length > limits.max_response_tokens for length in lengths)
    if num_long:
        session.progress.say(
            f"{num_long} of {len(lengths)} demonstrated responses are longer than the policy's may "
            f"be (the longest has {max(lengths)} tokens): agent.max_response_tokens is "
            f"{limits.max_response_tokens}"
        )
    num_cut = [episode.stop_reason for episode in trajectories].count(StopReason.CONTEXT_LIMIT)
    if num_cut:
        session.progress.say(
            f"{num_cut} of {len(trajectories)} demonstrations end early, as an episode of the "
            f"policy would: agent.max_context_tokens is {limits.max_context_tokens}"
        )


def _demonstrations(session: Session, model: LanguageModel) -> list[Trajectory]:
    """The recorded episodes if there are any, else the teacher's."""
    config = session.config.warm_start.demonstrations
    context = build_context(session.config.agent, model, session.environments)
    if config.recordings is not None:
        return recorded_demonstrations(session, Path(config.recordings), context)
    policies = session.environments.scripted_policies()
    if config.teacher not in policies:
        raise ConfigError(
            "warm_start.demonstrations.teacher: the environment "
            f"{session.config.environment.name!r} has no scripted policy {config.teacher!r}; "
            f"it has {', '.join(sorted(policies))}"
        )
    return play_demonstrations(
        policies[config.teacher],
        session.environments,
        context,
        session.environments.tasks("train"),
        num_episodes_per_task=config.num_episodes_per_task,
        seed=session.config.seed,
    )


def run_supervised_phase(
    session: Session,
    model: LanguageModel,
    phase: SupervisedPhase,
    *,
    start: int,
    moments: dict[str, Tensor],
) -> None:
    """Trains `model` from update number `start` to the end of the phase and saves checkpoints."""
    optimizer = Optimizer(model.model)
    position = Position(phase.name, start)
    if start > 0:
        load_moments(session.run.checkpoints / position.name, optimizer, moments)
    session.progress.start(phase.name, phase.num_steps)
    model.model.train()
    for step in range(start, phase.num_steps):
        started = time.perf_counter()
        batch = phase.batch(step)
        dropout_seed = derive_seed(session.config.seed, "dropout", phase.name, step)
        with seeded_torch(dropout_seed, device=session.device):
            result = accumulate_supervised_gradients(model, batch)
        learning_rate = learning_rate_at(
            step,
            peak=phase.peak_learning_rate,
            num_steps=phase.num_steps,
            warmup_steps=WARMUP_STEPS,
            schedule=phase.schedule,
        )
        optimizer.update(learning_rate=learning_rate, max_grad_norm=MAX_GRAD_NORM)
        reached = phase.target_accuracy is not None and result.accuracy >= phase.target_accuracy
        position = replace(position, step=step + 1, finished=reached)
        session.progress.update(step + 1, f"loss {result.loss:.3f}  accuracy {result.accuracy:.1%}")
        if reached or (step + 1) % LOG_EVERY == 0 or step + 1 == phase.num_steps:
            append_json_line(
                session.run.warm_start,
                {
                    "phase": phase.name,
                    "step": step + 1,
                    "loss": result.loss,
                    "accuracy": result.accuracy,
                    "learning_rate": learning_rate,
                    "seconds": time.perf_counter() - started,
                },
            )
        if reached:
            break
        if (step + 1) % session.config.warm_start.checkpoint_every == 0:
            _save(session, model, optimizer, position)
    _save(session, model, optimizer, replace(position, finished=True))


def _save(session: Session, model: LanguageModel, optimizer: Optimizer, position: Position) -> None:
    save_checkpoint(
        session.run.checkpoints,
        position=position,
        model=model.model,
        optimizer=optimizer,
        keep=session.config.training.keep_checkpoints,
    )
    session.note_seconds()
