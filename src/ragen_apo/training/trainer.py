"""Stage 2 of A*-PO: one rollout per task, and a regression on the optimal advantage.

Sampling and scoring both run in evaluation mode: dropout would make them two different policies.

    for each step:
        tasks         a slice of this epoch's random order
        trajectories  one rollout of the present policy for each task
        V*            from the value store: log-mean-exp of the reference's returns
        loss          (beta2 (log pi - log pi_ref) - (R - V*))^2 / (2 beta2), mean over trajectories
        update        one optimizer step

Source: Brantley et al., arXiv 2505.20686; `objectives.apo` holds the equations. On-policy: every
trajectory is used once, with the weights that sampled it, so there is no ratio and no clipping.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from ragen_apo.agent.proxy import AgentProxy, EpisodeRequest
from ragen_apo.config import ApoConfig, RunConfig
from ragen_apo.objectives.apo import ApoLoss, ApoSettings, apo_loss, apo_metrics
from ragen_apo.policy.language_model import LanguageModel
from ragen_apo.policy.scoring import score_tokens
from ragen_apo.seeding import derive_seed, generator
from ragen_apo.training.batching import collate, epoch_slice, micro_batches
from ragen_apo.training.optimization import Optimizer, learning_rate_at
from ragen_apo.types import Task, Trajectory, TurnFlag, training_sample


@dataclass(frozen=True)
class StepResult:
    """One step's metrics (see docs/metrics.md) and its trajectories."""

    metrics: dict[str, float | int]
    trajectories: list[Trajectory]


@dataclass
class _BatchFigures:
    """What the micro-batches of one step add up to."""

    loss: float = 0.0
    parts: list[ApoLoss] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    """Which trajectory of the batch each row of `parts` is."""
    entropy_sum: float = 0.0
    logprob_gap_max: float = 0.0

    def vector(self, name: str) -> torch.Tensor:
        """A per-trajectory field of the parts in the order of the batch."""
        joined = torch.cat([getattr(part, name) for part in self.parts]).cpu()
        ordered = torch.empty_like(joined)
        ordered[torch.tensor(self.places)] = joined
        return ordered


class Trainer:
    """Improves `policy` against a frozen `reference` whose values are known for every task."""

    def __init__(
        self,
        config: RunConfig,
        *,
        policy: LanguageModel,
        reference: LanguageModel,
        proxy: AgentProxy,
        tasks: Sequence[Task],
        values: Mapping[str, float],
        optimizer: Optimizer,
    ) -> None:
        self.config, self.apo = config, config.apo
        self.policy, self.reference, self.proxy = policy, reference, proxy
        self.tasks, self.values, self.optimizer = tasks, values, optimizer
        self.objective = objective_settings(config.apo)
        policy.model.eval()

    def step(self, step: int) -> StepResult:
        """Update number `step` (from 0): a function of the weights, the moments and `step`."""
        started = time.perf_counter()
        trajectories = self._roll_out(step)
        rolled_out = time.perf_counter()
        returns = self._returns(trajectories, step)
        v_star = torch.tensor([self.values[t.task.task_id] for t in trajectories])
        figures = self._accumulate_gradients(trajectories, returns, v_star)
        learning_rate = learning_rate_at(
            step,
            peak=self.apo.learning_rate,
            num_steps=self.config.training.max_steps,
            warmup_steps=self.apo.warmup_steps,
            schedule=self.apo.schedule,
        )
        gradient_norm = self.optimizer.update(
            learning_rate=learning_rate, max_grad_norm=self.apo.max_grad_norm
        )
        metrics = _metrics(figures, trajectories, v_star) | {
            "step": step + 1,
            "learning_rate": learning_rate,
            "gradient_norm": gradient_norm,
            "rollout_seconds": rolled_out - started,
            "training_seconds": time.perf_counter() - rolled_out,
        }
        return StepResult(metrics, trajectories)

    def _roll_out(self, step: int) -> list[Trajectory]:
        """One episode for each task of the step, with the present weights."""
        indices = epoch_slice(
            num_items=len(self.tasks),
            batch_size=self.config.training.tasks_per_step,
            step=step,
            seed=self.config.seed,
            purpose="task-order",
        )
        requests = [
            EpisodeRequest(self.tasks[index], derive_seed(self.config.seed, "stage-2", step, place))
            for place, index in enumerate(indices)
        ]
        return self.proxy.rollout(
            requests, temperature=self.apo.temperature, policy_version=f"step-{step}"
        )

    def _returns(self, trajectories: Sequence[Trajectory], step: int) -> torch.Tensor:
        """R of each trajectory [B]; the control experiment hands them out at random."""
        returns = torch.tensor([trajectory.episode_return for trajectory in trajectories])
        if self.apo.shuffle_returns:
            order = generator(self.config.seed, "shuffled-returns", step)
            return returns[torch.from_numpy(order.permutation(len(returns)))]
        return returns

    def _accumulate_gradients(
        self, trajectories: Sequence[Trajectory], returns_B: torch.Tensor, v_star_B: torch.Tensor
    ) -> _BatchFigures:
        """Adds up the gradient of the whole batch's loss over micro-batches."""
        samples = [training_sample(trajectory) for trajectory in trajectories]
        device, pad_id = self.policy.device, self.policy.pad_id
        figures = _BatchFigures()
        for places in micro_batches(samples, size=self.config.training.micro_batch_size):
            batch = collate([samples[place] for place in places], pad_id=pad_id, device=device)
            ids_BT, mask_BT = batch.token_ids_BT, batch.loss_mask_BT
            temperature = self.apo.temperature
            with torch.no_grad():
                frozen = score_tokens(self.reference, ids_BT, mask_BT, temperature=temperature)
            scores = score_tokens(self.policy, ids_BT, mask_BT, temperature=temperature)
            part = apo_loss(
                scores.logprobs_BT,
                reference_logprobs_BT=frozen.logprobs_BT,
                mask_BT=mask_BT,
                returns_B=returns_B[places].to(device),
                v_star_B=v_star_B[places].to(device),
                settings=self.objective,
                num_sequences=len(samples),
            )
            part.loss.backward()
            gap_BT = (scores.logprobs_BT.detach() - batch.sampled_logprobs_BT).abs()
            figures.loss += part.loss.item()
            figures.parts.append(part)
            figures.places += places
            figures.entropy_sum += scores.entropy_BT.sum().item()
            figures.logprob_gap_max = max(figures.logprob_gap_max, gap_BT.max().item())
        return figures


def objective_settings(apo: ApoConfig) -> ApoSettings:
    """The part of the configuration that the loss reads."""
    return ApoSettings(
        beta2=apo.beta2,
        loss=apo.loss,
        length_normalization=apo.length_normalization,
        advantage_clamp=apo.advantage_clamp,
        kl_coefficient=apo.kl_coefficient,
    )


def _metrics(
    figures: _BatchFigures, trajectories: Sequence[Trajectory], v_star_B: torch.Tensor
) -> dict[str, float | int]:
    success_B = torch.tensor([float(trajectory.success) for trajectory in trajectories])
    num_tokens = int(figures.vector("num_tokens").sum())
    return {
        "loss": figures.loss,
        "entropy": figures.entropy_sum / num_tokens,
        "logprob_gap_max": figures.logprob_gap_max,
        "num_generated_tokens": num_tokens,
        **rollout_metrics(trajectories),
        **apo_metrics(
            residual_B=figures.vector("residual"),
            log_ratio_B=figures.vector("log_ratio"),
            kl_B=figures.vector("kl"),
            num_tokens_B=figures.vector("num_tokens"),
            v_star_B=v_star_B,
            success_B=success_B,
        ),
    }


def rollout_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float | int]:
    """What the trajectories alone say."""
    num_episodes = len(trajectories)
    turns = [turn for trajectory in trajectories for turn in trajectory.turns]
    return {
        "num_episodes": num_episodes,
        "return_mean": sum(t.episode_return for t in trajectories) / num_episodes,
        "success_rate": sum(t.success for t in trajectories) / num_episodes,
        "num_turns_mean": len(turns) / num_episodes,
        "truncated_share": sum(t.truncated for t in trajectories) / num_episodes,
        "format_error_share": _share(turns, TurnFlag.FORMAT_ERROR),
        "invalid_turn_share": _share(turns, TurnFlag.INVALID_ACTION),
    }


def _share(turns: Sequence, flag: TurnFlag) -> float:
    return sum(flag.value in turn.flags for turn in turns) / len(turns)
