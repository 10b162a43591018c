"""Stage 2: one step of any algorithm of the family. `stages.training` repeats it.

`Trainer.step` goes from top to bottom, and the methods below it stand in this order:

    tasks         a slice of this epoch's random order of those worth training on (in a mixture,
                  of each part by its weight)
    rollouts      of the present policy, or of what the algorithm puts in its place, one or a
                  group for each task; servers may have played them ahead
    monitors      of thoughts, in some steps, with the same weights; they change nothing
    choice        of several rollouts for each one the best, if configured
    filter        tasks that are worth an update, with normalised returns, if configured, and
                  those that the algorithm can learn from
    reference     log-probabilities of the same tokens under the frozen reference, and V* of each
                  turn's state where a regression says it; and log-probabilities under the
                  policy, for an algorithm with a ratio whose sampler rounds otherwise
    prepare       the algorithm's advantages, from all rollouts
    for each pass, for each minibatch:
        loss      over micro-batches, whose gradients add up
        update    one optimizer step

A*-PO (`algorithms.apo`) plays each task once and makes one pass with one update. The others differ
in what `prepare` and `loss` do, and in how often rollouts are used. The trainer does not know which
algorithm it runs.

Several ranks play and score a share each (`ragen_apo.distributed`). All of them have all of the
step's trajectories, and the same weights. Sampling and scoring both run in evaluation mode: dropout
would make them two different policies.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from ragen_apo.agent.proxy import AgentProxy, EpisodeRequest
from ragen_apo.config import RunConfig
from ragen_apo.objectives.filters import filter_groups
from ragen_apo.policy.language_model import LanguageModel
from ragen_apo.policy.scoring import TokenScores, score_tokens, token_logprobs, token_logprobs_and
from ragen_apo.policy.turn_features import at_turns, state_reader
from ragen_apo.seeding import derive_seed, generator
from ragen_apo.task_order import DrawOrder
from ragen_apo.training.algorithms.base import Algorithm
from ragen_apo.training.batching import minibatches
from ragen_apo.training.kept_episodes import kept_episodes
from ragen_apo.training.optimization import Optimizer, learning_rate_at
from ragen_apo.training.rollouts import (
    MicroBatch,
    Rollouts,
    best_of_each,
    contexts_per_pass,
    gather_rollouts,
)
from ragen_apo.training.rollouts_ahead import RolloutsAhead
from ragen_apo.training.step_metrics import StepMetrics, rollout_metrics
from ragen_apo.training.thoughts import cross_scoring_metrics
from ragen_apo.types import Task, Trajectory
from ragen_apo.values.regression import ValueFunction
from ragen_apo.values.state_values import ReferenceValues


@dataclass(frozen=True)
class StepResult:
    """One step's metrics (see docs/metrics.md), all trajectories that were played, and what is kept
    of those that were chosen.
    """

    metrics: dict[str, float | int]
    trajectories: list[Trajectory]
    kept_episodes: list[dict[str, Any]]
    """Rows of rollouts.jsonl; see `kept_episodes`."""


class Trainer:
    """Improves `policy` on `tasks`; `reference` is frozen, `values` are what Stage 1 says of it."""

    def __init__(
        self,
        config: RunConfig,
        *,
        policy: LanguageModel,
        reference: LanguageModel,
        proxy: AgentProxy,
        tasks: Sequence[Task],
        values: ReferenceValues,
        algorithm: Algorithm[Any],
        optimizer: Optimizer,
        ahead: RolloutsAhead | None = None,
    ) -> None:
        """`ahead` plays the rollouts, by `algorithm.sampler`; without it `proxy` does."""
        self.config = config
        self.policy, self.proxy = policy, proxy
        self.ranks = proxy.ranks
        self.algorithm, self.optimizer = algorithm, optimizer
        self._ahead = ahead
        self._micro_batch_size = config.training.micro_batch_size
        self.take_reference(reference, tasks=tasks, values=values)
        policy.model.eval()

    def step(self, step: int) -> StepResult:
        """Step number `step` (from 0): a function of the weights, the moments and `step`."""
        started, exchanged = time.perf_counter(), self.ranks.seconds
        trajectories, ahead_seconds = self._roll_out(step, started)
        rolled_out = time.perf_counter()

        metrics = rollout_metrics(trajectories, opening=self.policy.template.opening)
        metrics |= self._monitor_thoughts(trajectories, step)
        rollouts = self._chosen(trajectories, step)
        keep_B = self._keeps(rollouts)
        learning_rate = self._learning_rate(step)
        trained_on: Rollouts | None = None
        if keep_B.any():
            kept = self.config.algorithm.normalized(rollouts).take(keep_B)
            trained_on, for_metrics = self._scored(kept)
            metrics |= for_metrics
            metrics |= self._improve(trained_on, learning_rate=learning_rate)
        else:
            metrics["num_updates"] = 0

        metrics |= {
            "step": step + 1,
            "kept_share": int(keep_B.sum()) / len(rollouts),
            "learning_rate": learning_rate,
            "rollout_seconds": rolled_out - started,
            "training_seconds": time.perf_counter()
            - rolled_out
            - metrics.get("thought_monitor_seconds", 0.0)
            - metrics.get("reference_scoring_seconds", 0.0),
            **ahead_seconds,
            **self.ranks.mean_seconds(since=exchanged),
        }
        episodes = kept_episodes(
            rollouts, scored=trained_on, num_episodes=self.config.training.keep_episodes
        )
        return StepResult(metrics, trajectories, episodes)

    def _requests(self, step: int) -> list[EpisodeRequest]:
        """Tasks of the step's epoch, each as often as it is played."""
        indices = self.order.items(step, batch_size=self.config.training.tasks_per_step)
        repeats = self.config.algorithm.rollouts_per_task * self.config.training.best_of
        tasks = [self.tasks[index] for index in indices for _ in range(repeats)]
        return [
            EpisodeRequest(task, derive_seed(self.config.seed, "stage-2", step, index))
            for index, task in enumerate(tasks)
        ]

    def _roll_out(self, step: int, started: float) -> tuple[list[Trajectory], dict[str, float]]:
        """All episodes of the step, task after task; and for how long they were played ahead."""
        if self._ahead:
            end = min(step + self.algorithm.num_steps_of_sampler(), self.config.training.max_steps)
            self._ahead.request(range(step, end), self._requests)
            played = self._ahead.take(step)
            return played.trajectories, {"rollout_ahead_seconds": played.seconds_before(started)}
        with self._sampling():
            trajectories = self.proxy.rollout(
                self._requests(step),
                temperature=self.config.sampling.temperature,
                policy_version=f"step-{step}",
            )
        return trajectories, {}

    @contextmanager
    def _sampling(self) -> Iterator[LanguageModel]:
        """The model that plays the step's rollouts; it may be the policy with other weights."""
        if self._ahead:
            yield self._ahead.sampler
            return
        with self.algorithm.sampling():
            yield self.policy

    def _monitor_thoughts(
        self, trajectories: Sequence[Trajectory], step: int
    ) -> dict[str, float | int]:
        every = self.config.monitors.every_steps
        if every is None or step % every != 0:
            return {}
        with self._sampling() as sampler:
            return cross_scoring_metrics(
                sampler,
                trajectories,
                num_thoughts=self.config.monitors.num_thoughts,
                temperature=self.config.sampling.temperature,
                micro_batch_size=self._micro_batch_size,
                rng=generator(self.config.seed, "monitored-tasks", step),
            )

    def _chosen(self, trajectories: Sequence[Trajectory], step: int) -> Rollouts:
        """The episodes to learn from; the control experiment hands out returns at random."""
        rollouts = gather_rollouts(
            best_of_each(trajectories, size=self.config.training.best_of),
            step=step,
            group_size=self.config.algorithm.rollouts_per_task,
            values=self.values,
            pad_id=self.policy.pad_id,
            device=self.policy.device,
            ranks=self.ranks,
        )
        if self.config.training.shuffle_returns:
            order = generator(self.config.seed, "shuffled-returns", step).permutation(len(rollouts))
            circle = torch.from_numpy(order)  # each gets the return of its neighbour
            shuffled_B = rollouts.returns_B.clone()
            shuffled_B[circle] = rollouts.returns_B[circle.roll(1)]
            if not torch.equal(shuffled_B, rollouts.returns_B):
                return rollouts.with_returns(shuffled_B)
        return rollouts

    def _keeps(self, rollouts: Rollouts) -> torch.Tensor:
        """Which episodes [B] to train on. A*-PO's tasks were chosen after Stage 1."""
        keep_B = self.algorithm.keeps(rollouts)
        if self.config.needs_values:
            return keep_B
        groups = filter_groups(
            rollouts.returns_B, group_B=rollouts.group_B, settings=self.config.rollout_filter
        )
        return keep_B & groups.keep_G[rollouts.group_B]

    def _learning_rate(self, step: int) -> float:
        settings = self.config.optimizer
        return learning_rate_at(
            step,
            peak=settings.learning_rate,
            num_steps=self.config.training.max_steps,
            warmup_steps=settings.warmup_steps,
            schedule=settings.schedule,
        )

    def _scored(self, rollouts: Rollouts) -> tuple[Rollouts, dict[str, float]]:
        """The rollouts with what the reference says of them, and log pi_old where the sampler's
        differs; and the seconds of the first, if only a metric needs it.

        Ratios to a sampler that rounds otherwise would be of its rounding. So the policy scores the
        tokens as the loss does, before the first update of the step, and its ratios begin at 1.
        """
        size, values_BT, seconds = self._micro_batch_size, None, dict[str, float]()
        started = time.perf_counter()
        if self._value_of is None:
            score = functools.partial(self._logprobs, self.reference)
            logprobs_BT = rollouts.scored(score, size=size, what="reference")
        else:
            score = functools.partial(self._logprobs_and_values, self._value_of)
            logprobs_BT, values_BT = rollouts.scored_by_pass(
                score, num=2, size=size, what="reference"
            )
        scored = replace(rollouts, reference_logprobs_BT=logprobs_BT, state_values_BT=values_BT)
        if not self._needs_reference():
            logprobs_BT[:1, :1].tolist()  # waits for a GPU, whose work would be counted later
            seconds["reference_scoring_seconds"] = time.perf_counter() - started
        is_local = self.config.rollouts.engine == "local"
        rounds_alike = is_local and self.policy.compute_dtype is not torch.bfloat16
        if rounds_alike or not self.algorithm.has_ratio:
            return scored, seconds
        score = functools.partial(self._logprobs, self.policy)
        old_BT = rollouts.scored(score, size=size, what="old policy")
        return replace(scored, old_logprobs_BT=old_BT), seconds

    def _needs_reference(self) -> bool:
        """Whether training needs what the reference says, or only a metric."""
        limits = (self.config.reference.refresh_max_kl, self.config.training.early_stop.max_kl)
        is_limited = any(limit is not None for limit in limits)
        return self.algorithm.uses_reference or self._value_of is not None or is_limited

    def _logprobs_and_values(
        self, value_of: ValueFunction, micro: MicroBatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Of the sampled tokens [B, T] log pi_ref, and V* of the state in which their turn was
        written, from one pass.
        """

        def score(token_ids_ML: torch.Tensor, targets_ML: torch.Tensor) -> tuple[torch.Tensor, ...]:
            logprobs_ML, features_NH = token_logprobs_and(
                state_reader(targets_ML, token_ids_ML.device),
                self.reference,
                token_ids_ML,
                targets_ML,
                temperature=self.config.sampling.temperature,
            )
            return logprobs_ML, at_turns(value_of(features_NH), targets_ML)

        logprobs_ML, values_ML = micro.by_pass(score, size=self._max_contexts(self.reference))
        return micro.in_rows(logprobs_ML), micro.in_rows(values_ML)

    def _improve(self, rollouts: Rollouts, *, learning_rate: float) -> dict[str, float | int]:
        """The updates of one step, by all ranks together; returns what they report."""
        algorithm, settings, collected = self.algorithm, self.config.optimizer, StepMetrics()
        targets = algorithm.prepare(rollouts)
        for epoch in range(algorithm.num_epochs):
            for indices in minibatches(
                len(rollouts),
                num_parts=algorithm.num_minibatches,
                seed=self.config.seed,
                step=rollouts.step,
                epoch=epoch,
            ):
                for micro in rollouts.micro_batches(indices, size=self._micro_batch_size):
                    scores = self._scores(micro, first_pass=epoch == 0)
                    part = algorithm.loss(targets, micro, scores)
                    if micro.is_idle:
                        (0.0 * part.loss).backward()
                        continue
                    part.loss.backward()
                    collected.add_part(part, micro, scores, first_pass=epoch == 0)
                self.ranks.add_gradients([self.policy.model, *algorithm.other_models])
                norm = self.optimizer.update(
                    learning_rate=learning_rate, max_grad_norm=settings.max_grad_norm
                )
                others = algorithm.update(rate_scale=learning_rate / settings.learning_rate)
                collected.close_update(gradient_norm=norm, **others)
        collected = collected.of_all(self.ranks)
        return collected.metrics() | algorithm.metrics(rollouts, targets, collected)

    def _scores(self, micro: MicroBatch, *, first_pass: bool) -> TokenScores:
        """What the policy says about the sampled tokens, in the rows of their episodes.

        The entropy is a metric of the first pass, and later only part of a loss.
        """
        if not (first_pass or self.algorithm.entropy_gradients):
            return TokenScores(self._logprobs(self.policy, micro), entropy_BT=None)

        def score(token_ids_ML: torch.Tensor, targets_ML: torch.Tensor) -> tuple[torch.Tensor, ...]:
            scores = score_tokens(
                self.policy,
                token_ids_ML,
                targets_ML,
                temperature=self.config.sampling.temperature,
                entropy_gradients=self.algorithm.entropy_gradients,
            )
            assert scores.entropy_BT is not None
            return scores.logprobs_BT, scores.entropy_BT

        logprobs_ML, entropy_ML = micro.by_pass(score, size=self._max_contexts(self.policy))
        return TokenScores(micro.in_rows(logprobs_ML), micro.in_rows(entropy_ML))

    def _logprobs(self, model: LanguageModel, micro: MicroBatch) -> torch.Tensor:
        """What a model says about the sampled tokens [B, T]."""

        def score(token_ids_ML: torch.Tensor, targets_ML: torch.Tensor) -> tuple[torch.Tensor, ...]:
            temperature = self.config.sampling.temperature
            return (token_logprobs(model, token_ids_ML, targets_ML, temperature=temperature),)

        (logprobs_ML,) = micro.by_pass(score, size=self._max_contexts(model))
        return micro.in_rows(logprobs_ML)

    def _max_contexts(self, model: LanguageModel) -> int | None:
        return contexts_per_pass(model, micro_batch_size=self._micro_batch_size)

    # Between steps.

    def take_reference(
        self, reference: LanguageModel, *, tasks: Sequence[Task], values: ReferenceValues
    ) -> None:
        """Goes on from this reference with its values, on these tasks, drawn anew from the seed."""
        if self._ahead:
            self._ahead.forget()
        self.reference, self.tasks, self.values = reference, tasks, values
        self._value_of: ValueFunction | None = None
        if values.regression is not None and self.config.algorithm.min_state_visits is not None:
            self._value_of = values.regression.on(self.policy.device)
        self.order = DrawOrder(
            [task.category for task in tasks],
            weights=self.proxy.environments.properties.category_weights,
            seed=self.config.seed,
            purpose="task-order",
        )

    def drop_reference(self) -> None:
        """Makes room for the next one, without which no step can be made."""
        del self.reference

    def pause_rollouts(self) -> None:
        """Until the next step no server plays for the trainer; to be called before others do."""
        if self._ahead:
            self._ahead.pause()

    def close(self) -> None:
        """Ends what is played ahead."""
        if self._ahead:
            self._ahead.close()
