"""The metrics of a step: of its micro-batches, its updates and its episodes.

docs/metrics.md explains every name. Axes: B trajectories, T token positions.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

import safetensors.torch
import torch
from torch import Tensor

from ragen_apo.distributed.ranks import Ranks
from ragen_apo.evaluation.summary import METRIC_PREFIX, metric_means
from ragen_apo.objectives.apo import divergence_metrics, sequence_kl, sequence_log_ratio
from ragen_apo.policy.scoring import TokenScores
from ragen_apo.training.rollouts import MicroBatch
from ragen_apo.training.thoughts import thought_shares
from ragen_apo.types import StopReason, Trajectory, Turn, TurnFlag


@dataclass(frozen=True)
class LossPart:
    """What a micro-batch contributes; only `loss` carries gradients."""

    loss: Tensor
    """Scalar: adds up to the minibatch's loss."""
    per_sequence: Mapping[str, Tensor] = field(default_factory=dict)
    """Vectors [B] of the micro-batch's episodes."""
    sums: Mapping[str, Tensor] = field(default_factory=dict)
    """Scalars that add up over all updates of the step."""


@dataclass
class StepMetrics:
    """Collects them; what belongs to an episode is taken from the first pass over the rollouts."""

    updates: list[Mapping[str, float]] = field(default_factory=list)
    logprob_gap_max: float = 0.0
    """Over the micro-batches before the first update."""
    sums: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Those of the loss parts, and of what is noted of every algorithm."""
    _parts: list[dict[str, Tensor]] = field(default_factory=list)
    """Numbers of the micro-batches of the update in progress, on the device: reading one would wait
    until all that was queued before it is computed."""
    _rows: list[Tensor] = field(default_factory=list)
    _vectors: dict[str, list[Tensor]] = field(default_factory=lambda: defaultdict(list))

    def add_part(
        self, part: LossPart, micro: MicroBatch, scores: TokenScores, *, first_pass: bool
    ) -> None:
        """Notes a micro-batch after its backward pass."""
        numbers = {"loss": part.loss.detach()}
        numbers |= {f"sums/{name}": value.detach() for name, value in part.sums.items()}
        logprobs_BT = scores.logprobs_BT.detach()
        if not self.updates:
            gap_BT = (logprobs_BT - micro.tokens.sampled_logprobs_RT).abs()
            numbers["gap"] = gap_BT.max()
            numbers["sums/logprob_gap"] = gap_BT.sum()
            numbers["sums/logprob_gap_tokens"] = micro.mask_BT.sum()
        if first_pass:
            against = {
                "reference_logprobs_BT": micro.reference_logprobs_BT,
                "mask_BT": micro.mask_BT,
            }
            vectors = {
                "log_ratio": sequence_log_ratio(logprobs_BT, **against),
                "kl": sequence_kl(logprobs_BT, **against),
                "num_tokens": micro.mask_BT.sum(dim=1),
                **part.per_sequence,
            }
            assert scores.entropy_BT is not None
            numbers["sums/entropy"] = scores.entropy_BT.detach().sum()
            self._rows.append(micro.rows)
            for name, vector in vectors.items():
                self._vectors[name].append(vector)
        self._parts.append(numbers)

    def close_update(self, **values: float) -> None:
        """Notes an update, with the loss that led to it."""
        loss = 0.0
        numbers = [each for part in self._parts for each in part.items()]
        # All at once: the host waits for the device once an update.
        found = torch.stack([number.double() for _, number in numbers]).tolist() if numbers else []
        for (name, _), value in zip(numbers, found, strict=True):
            kind, _, of = name.partition("/")
            if kind == "loss":
                loss += value
            elif kind == "gap":
                self.logprob_gap_max = max(self.logprob_gap_max, value)
            else:
                self.sums[of] += value
        self._parts.clear()
        self.updates.append({"loss": loss, **values})

    def of_all(self, ranks: Ranks) -> StepMetrics:
        """Those of all ranks together: each has collected its own micro-batches."""
        if ranks.size == 1:
            return self
        parts = [
            safetensors.torch.load(part)
            for part in ranks.gather(safetensors.torch.save(self._as_tensors()), "step metrics")
        ]
        losses_U = torch.stack([part["losses"] for part in parts]).sum(dim=0).tolist()
        joined = StepMetrics(
            updates=[
                {**update, "loss": loss}
                for update, loss in zip(self.updates, losses_U, strict=True)
            ],
            logprob_gap_max=max(part["logprob_gap_max"].item() for part in parts),
        )
        for part in parts:
            for name, tensor in part.items():
                kind, _, of = name.partition("/")
                if kind == "sums":
                    joined.sums[of] += tensor.item()
                elif kind == "vectors":
                    joined._vectors[of].append(tensor)
            joined._rows.append(part["rows"])
        return joined

    def _as_tensors(self) -> dict[str, Tensor]:
        """What differs from rank to rank."""
        vectors = {f"vectors/{name}": _joined(each) for name, each in self._vectors.items()}
        numbers = {
            "losses": [each["loss"] for each in self.updates],
            "logprob_gap_max": self.logprob_gap_max,
            **{f"sums/{name}": value for name, value in self.sums.items()},
        }
        return {
            **vectors,
            **{name: torch.tensor(each, dtype=torch.float64) for name, each in numbers.items()},
            "rows": _joined(self._rows) if self._rows else torch.empty(0, dtype=torch.int64),
        }

    def vector(self, name: str) -> Tensor:
        """A number per episode [B], in the order of the rollouts."""
        joined = _joined(self._vectors[name])
        ordered = torch.empty_like(joined)
        ordered[_joined(self._rows)] = joined
        return ordered

    def metrics(self) -> dict[str, float | int]:
        """What every algorithm reports; those of updates are means over them."""
        metrics: dict[str, float | int] = {"num_updates": len(self.updates)}
        if self.updates:
            names = self.updates[0]
            metrics |= {name: fmean(update[name] for update in self.updates) for name in names}
            num_tokens_B = self.vector("num_tokens")
            metrics["entropy"] = self.sums["entropy"] / int(num_tokens_B.sum())
            metrics["logprob_gap_max"] = self.logprob_gap_max
            metrics["logprob_gap_mean"] = self.sums["logprob_gap"] / self.sums["logprob_gap_tokens"]
            metrics |= divergence_metrics(
                log_ratio_B=self.vector("log_ratio"),
                kl_B=self.vector("kl"),
                num_tokens_B=num_tokens_B,
            )
        return metrics


def rollout_metrics(
    trajectories: Sequence[Trajectory], *, opening: str = ""
) -> dict[str, float | int]:
    """What the trajectories alone say; `opening` is what the template writes of every response."""
    num_episodes = len(trajectories)
    turns = [turn for trajectory in trajectories for turn in trajectory.turns]
    full = StopReason.CONTEXT_LIMIT
    return {
        "num_episodes": num_episodes,
        "num_generated_tokens": sum(t.num_response_tokens for t in trajectories),
        "num_context_tokens": sum(t.num_context_tokens for t in trajectories),
        "return_mean": sum(t.episode_return for t in trajectories) / num_episodes,
        "success_rate": sum(t.success for t in trajectories) / num_episodes,
        "num_turns_mean": len(turns) / num_episodes,
        "truncated_share": sum(t.truncated for t in trajectories) / num_episodes,
        "out_of_context_share": sum(t.stop_reason is full for t in trajectories) / num_episodes,
        "format_error_share": _share(turns, TurnFlag.FORMAT_ERROR),
        "invalid_turn_share": _share(turns, TurnFlag.INVALID_ACTION),
        **thought_shares(turns, opening=opening),
        **{METRIC_PREFIX + name: mean for name, mean in metric_means(trajectories).items()},
    }


def _joined(vectors: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(vectors)).cpu()


def _share(turns: Sequence[Turn], flag: TurnFlag) -> float:
    return sum(flag.value in turn.flags for turn in turns) / len(turns)
