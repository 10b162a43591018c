"""The two phases of the warm start: what each trains on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ragen_apo.agent.assembly import build_context
from ragen_apo.agent.scripted import with_tokens
from ragen_apo.plural import counted
from ragen_apo.policy.language_model import LanguageModel
from ragen_apo.printable import shortened
from ragen_apo.session import Session
from ragen_apo.task_order import DrawOrder
from ragen_apo.types import StopReason, Trajectory, TurnFlag, training_samples
from ragen_apo.warm_start.batches import (
    copy_batch,
    copyable_token_ids,
    play_demonstrations,
    relabel,
    renamed_token_ids,
    sample_batches,
)
from ragen_apo.warm_start.recorded_episodes import recorded_demonstrations
from ragen_apo.warm_start.supervised import SupervisedBatch, SupervisedPhase


def copy_phase(session: Session, model: LanguageModel) -> SupervisedPhase:
    """Tiled random segments until copying is learned."""
    config = session.config.warm_start.copy_curriculum
    token_ids = copyable_token_ids(model)

    def batch(step: int) -> list[SupervisedBatch]:
        drawn = copy_batch(config, token_ids=token_ids, seed=session.config.seed, step=step)
        device, share = session.device, session.ranks.share
        token_ids_BT, target_mask_BT = drawn.token_ids_BT[share], drawn.target_mask_BT[share]
        if len(token_ids_BT) == 0:  # more ranks than rows
            return []
        return [SupervisedBatch(token_ids_BT.to(device), target_mask_BT.to(device))]

    return SupervisedPhase(
        name="copy",
        num_steps=config.max_steps,
        peak_learning_rate=config.learning_rate,
        schedule="constant",
        batch=batch,
        seed=session.config.seed,
        curve=session.run.warm_start,
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
    names = renamed_token_ids(model, episodes, relabel=config.relabel, spares=config.relabel_spares)

    def batch(step: int) -> list[SupervisedBatch]:
        chosen = [episodes[index] for index in order.items(step, batch_size=config.batch_size)]
        if names:
            share, seed = config.relabel_share, session.config.seed
            chosen = relabel(chosen, token_ids=names, share=share, seed=seed, step=step)
        return sample_batches(
            [sample for samples in chosen for sample in samples],
            size=session.config.training.micro_batch_size,
            pad_id=pad_id,
            device=session.device,
            ranks=session.ranks,
        )

    return SupervisedPhase(
        name="demonstrations",
        num_steps=config.num_steps,
        peak_learning_rate=config.learning_rate,
        schedule="linear",
        batch=batch,
        seed=session.config.seed,
        curve=session.run.warm_start,
    )


def _say_what_cannot_be_imitated(session: Session, trajectories: Sequence[Trajectory]) -> None:
    limits, settings = session.config.agent, session.config.warm_start.demonstrations
    solved = [each.success or each.episode_return > 0 for each in trajectories]
    if settings.recordings is None and solved and not any(solved):
        session.progress.say(
            f"The teacher ({settings.teacher}) solved none of its "
            f"{counted(len(solved), 'demonstration')}, so failures are imitated. Name "
            "another as warm_start.demonstrations.teacher, or mend it (`ragen-apo check`)"
        )
    lengths = [len(turn.response_token_ids) for episode in trajectories for turn in episode.turns]
    num_long = sum(length > limits.max_response_tokens for length in lengths)
    if num_long:
        session.progress.say(
            "demonstrated responses that are longer than the policy's may be: "
            f"{num_long} of {len(lengths)} (the longest has {max(lengths)} tokens): "
            f"agent.max_response_tokens is {limits.max_response_tokens}"
        )
    unreadable = [
        turn.response
        for episode in trajectories
        for turn in episode.turns
        if TurnFlag.FORMAT_ERROR.value in turn.flags and TurnFlag.MISTAKE.value not in turn.flags
    ]
    if unreadable:
        session.progress.say(
            "demonstrated responses in which no action can be read, and which are imitated "
            f"nevertheless: {len(unreadable)} of {len(lengths)}, such as "
            f"{shortened(repr(unreadable[0]), 200)}; thoughts and actions must not contain what "
            "encloses them"
        )
    num_turns = [
        len(episode.turns)
        for episode in trajectories
        if episode.stop_reason is StopReason.CONTEXT_LIMIT
    ]
    if num_turns:
        session.progress.say(
            "demonstrations whose end is not imitated, because the context was full: "
            f"{len(num_turns)} of {len(trajectories)}, after {counted(min(num_turns), 'turn')} "
            f"or more. agent.max_context_tokens is {limits.max_context_tokens}: raise it, let the "
            "environment answer with shorter texts, or let the policy read the last turns only "
            "(agent.context.mode: last_turns). Episodes of the policy end as early"
        )


def _demonstrations(session: Session, model: LanguageModel) -> list[Trajectory]:
    """The recorded episodes if there are any, else the teacher's."""
    config = session.config.warm_start.demonstrations
    context = build_context(session.config.agent, model, session.environments)
    if config.recordings is not None:
        return recorded_demonstrations(session, Path(config.recordings), context)
    if session.played:
        played = [with_tokens(trajectory, context) for trajectory in session.played]
        session.played.clear()
        return played
    return play_demonstrations(
        session.environments.scripted_policies()[config.teacher],
        session.environments,
        context,
        session.environments.tasks("train"),
        num_episodes_per_task=config.num_episodes_per_task,
        seed=session.config.seed,
        progress=session.progress,
    )
