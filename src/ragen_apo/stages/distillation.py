"""Distillation: before Stage 2 the policy imitates what the reference did well in Stage 1.

    maximise  sum_i w_i log pi(tau_i),   tau_i ~ pi_ref,   w_i = exp((R_i - V_hat(x)) / beta)

Consumes the value store; produces a policy. The weights are pi*/pi_ref. So in the limit of many
samples the maximum over all policies is pi* (docs/algorithm.md). An update uses a batch of the sum.
All batches are divided by the same number, so that they add up.

A task takes part if the reference has solved it at least once, or if its returns are at least beta
apart. For other tasks the store has no episode that is much better than a failure, and each episode
would weigh about 1. With one sample per task V_hat is the return itself, so it would weigh exactly
1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress

from pydantic import TypeAdapter

from ragen_apo.config.values import DistillationConfig
from ragen_apo.plural import counted
from ragen_apo.policy.language_model import LanguageModel
from ragen_apo.seeding import derive_seed
from ragen_apo.session import Session
from ragen_apo.stages.stored_values import stored_trajectories
from ragen_apo.task_order import DrawOrder
from ragen_apo.training.checkpoint import DISTILLATION
from ragen_apo.types import Task, TrainingSample, Trajectory, training_samples
from ragen_apo.values.conditions import SamplingConditions
from ragen_apo.values.estimator import ROUNDING, optimal_policy_weights
from ragen_apo.values.state_values import state_values, turn_weights
from ragen_apo.values.store import ValueStore
from ragen_apo.warm_start.batches import relabel, renamed_token_ids, sample_batches
from ragen_apo.warm_start.supervised import SupervisedBatch, SupervisedPhase, run_supervised_phase

WARMUP_STEPS = 3
MIN_WEIGHT = 0.05
"""What weighs less is left out, as it costs an update as much as what weighs 1, the mean."""
MIN_STATE_VISITS = 2
"""Episodes that make a state's value known, where the algorithm does not say."""


@dataclass(frozen=True)
class WeightedEpisode:
    """An episode of the reference with a weight for each of its turns."""

    trajectory: Trajectory
    turn_weights: tuple[float, ...]


_EPISODES = TypeAdapter(list[WeightedEpisode])


def distil(
    session: Session,
    policy: LanguageModel,
    reference: LanguageModel,
    tasks: Sequence[Task],
    *,
    version: int = 0,
    start: int = 0,
) -> None:
    """Trains `policy` in place on Stage 1's episodes under reference `version`.

    Goes on after update number `start`. Does nothing but say so where no task has an episode that
    is better than others. Raises MissingValueError if the store lacks a task.
    """
    conditions = session.conditions(reference)
    settings = session.config.distillation
    min_visits = session.config.algorithm.min_state_visits or MIN_STATE_VISITS

    def stored() -> list[WeightedEpisode]:
        with session.value_store() as store:
            return weighted_episodes(
                store, conditions, tasks, settings=settings, min_visits=min_visits
            )

    episodes = session.ranks.from_first(stored, "episodes of the store", _EPISODES)
    if session.config.policy.freeze_embeddings:
        policy.freeze_embeddings()
    phase = distillation_phase(session, policy, episodes, version=version)
    session.progress.say(
        f"distillation: {counted(len(episodes), 'episode')} of "
        f"{counted(num_tasks(episodes), 'task')}, {counted(phase.num_steps, 'update')}"
    )
    run_supervised_phase(session, policy, phase, start=start)


def num_tasks(episodes: Sequence[WeightedEpisode]) -> int:
    """Different tasks among the episodes."""
    return len({episode.trajectory.task.task_id for episode in episodes})


def weighted_episodes(
    store: ValueStore,
    conditions: SamplingConditions,
    tasks: Sequence[Task],
    *,
    settings: DistillationConfig,
    min_visits: int,
) -> list[WeightedEpisode]:
    """The stored episodes with pi*/pi_ref of their turns, without small weights.

    Of tasks with a success or with returns that are beta apart. Raises MissingValueError if a task
    has no sample.
    """
    values = store.values(conditions, [task.task_id for task in tasks], beta=settings.beta)
    states = {}
    if settings.credit == "turn":
        trajectories = stored_trajectories(store, conditions, tasks)
        states = state_values(trajectories, beta=settings.beta, min_visits=min_visits)
    kept = []
    for task in tasks:
        episodes = store.trajectories(conditions, task.task_id)
        returns = [episode.episode_return for episode in episodes]
        is_solved = any(episode.success for episode in episodes)
        least = max(settings.beta, ROUNDING)
        if not is_solved and max(returns) - min(returns) < least:
            continue
        weights = optimal_policy_weights(returns, beta=settings.beta)
        for episode, weight in zip(episodes, weights.tolist(), strict=True):
            by_turn = [weight] * len(episode.turns)
            if settings.credit == "turn":
                by_turn = turn_weights(
                    episode,
                    task_value=values[task.task_id],
                    values=states,
                    beta=settings.beta,
                    most=len(episodes),
                )
            by_turn = [each if each >= MIN_WEIGHT else 0.0 for each in by_turn]
            if any(by_turn):
                kept.append(WeightedEpisode(episode, tuple(by_turn)))
    return kept


def distillation_phase(
    session: Session, policy: LanguageModel, episodes: Sequence[WeightedEpisode], *, version: int
) -> SupervisedPhase:
    """The updates on these episodes, in a new random order each epoch."""
    settings = session.config.distillation
    seed = derive_seed(session.config.seed, "distillation", version)
    categories = [episode.trajectory.task.category for episode in episodes]
    weights = session.environments.properties.category_weights
    order = DrawOrder(categories, weights=weights, seed=seed, purpose="distillation-order")
    samples = [training_samples(episode.trajectory) for episode in episodes]
    token_weights = [sample_weights(*each) for each in zip(episodes, samples, strict=True)]
    total_weight = math.fsum(w for parts in token_weights for part in parts for w in part)
    mean_weight = total_weight / max(len(episodes), 1)
    names = renamed_token_ids(
        policy,
        samples,
        relabel=settings.relabel,
        spares=session.config.warm_start.demonstrations.relabel_spares,
    )

    # A context may hold nothing that is imitated: with windows, and credit by turn.
    imitated = [[any(weights) for weights in of_episode] for of_episode in token_weights]
    samples = [list(compress(*each)) for each in zip(samples, imitated, strict=True)]
    token_weights = [list(compress(*each)) for each in zip(token_weights, imitated, strict=True)]

    def batch(step: int) -> list[SupervisedBatch]:
        indices = order.items(step, batch_size=settings.batch_size)
        chosen = [samples[index] for index in indices]
        chosen_weights = [each for index in indices for each in token_weights[index]]
        if names:
            chosen = relabel(chosen, token_ids=names, seed=seed, step=step)
        size = session.config.training.micro_batch_size
        return sample_batches(
            [sample for samples in chosen for sample in samples],
            weights=chosen_weights,
            size=size,
            pad_id=policy.pad_id,
            device=session.device,
            ranks=session.ranks,
        )

    return SupervisedPhase(
        name=DISTILLATION,
        num_steps=math.ceil(settings.num_epochs * len(episodes) / settings.batch_size),
        peak_learning_rate=settings.learning_rate,
        schedule="linear",
        batch=batch,
        seed=seed,
        curve=session.run.distillation,
        labels={"reference_version": version},
        warmup_steps=WARMUP_STEPS,
        log_every=1,
        temperature=session.config.sampling.temperature,
        batch_weight=mean_weight * settings.batch_size,
        has_dropout=False,
        keeps_checkpoints=version == 0,
    )


def sample_weights(
    episode: WeightedEpisode, samples: Sequence[TrainingSample]
) -> list[list[float]]:
    """Of each training sample of the episode, the weight of every token; 0 at those not sampled."""
    of_token = iter(
        [
            weight
            for turn, weight in zip(episode.trajectory.turns, episode.turn_weights, strict=True)
            for _ in turn.response_token_ids
        ]
    )
    return [
        [next(of_token) if is_sampled else 0.0 for is_sampled in sample.loss_mask]
        for sample in samples
    ]
