"""One step's rollouts as an algorithm reads them: token batches, rewards, groups, the reference.

    trajectories -> [best of n] -> Rollouts -> [normalise returns] -> [filter] -> micro-batches

Every rank has the rollouts of all ranks. A micro-batch is a part of the rank's own share, with the
counts of the whole batch. So losses and gradients add up over ranks as they do over micro-batches.

The model reads training samples; a trajectory has several if its window moved. An algorithm reads
rows, one per trajectory. A row has the sampled tokens of all samples of its trajectory, in order.
Losses are functions of rows, so they do not know of windows.

Axes: B trajectories, T token positions of a row, M samples, L token positions of a sample. A
`TokenBatch` (R rows, T positions) holds either: the rows of B trajectories, or M samples.
Everything here is constant to the gradient, except what goes through `MicroBatch.in_rows`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ragen_apo.distributed.ranks import ALONE, Ranks
from ragen_apo.objectives.tensors import sampled_or_zero
from ragen_apo.policy.language_model import LanguageModel
from ragen_apo.policy.passes import in_pieces, indices_of, padded_length, to_device
from ragen_apo.training.batching import (
    TokenBatch,
    collate,
    loss_mask_of,
    micro_batches,
    pass_cost,
    shortest,
)
from ragen_apo.types import TrainingSample, Trajectory, training_samples
from ragen_apo.values.state_values import ReferenceValues


@dataclass(frozen=True)
class Rollouts:
    """All episodes that one step trains on."""

    step: int
    trajectories: tuple[Trajectory, ...]
    samples: tuple[tuple[TrainingSample, ...], ...]
    """Of each trajectory, what the model reads."""
    pad_id: int
    tokens: TokenBatch
    """Rows; see `row_of`."""
    turn_index_BT: Tensor
    """int64: the turn, from 0, that sampled a token; -1 at all others."""
    old_logprobs_BT: Tensor
    """log pi_old of the sampled tokens, the denominator of ratios."""
    reference_logprobs_BT: Tensor
    group_B: Tensor
    """int64: the number of the task in the step; rollouts of one task share it."""
    returns_B: Tensor
    rewards_BT: Tensor
    """A turn's reward at its last sampled token; each row adds up to its return."""
    values: ReferenceValues
    state_values_BT: Tensor | None = None
    """V* by regression of the state in which a sampled token's turn was written; 0 elsewhere."""
    ranks: Ranks = ALONE
    """Who shares the work on them."""

    def __len__(self) -> int:
        return len(self.trajectories)

    @property
    def mask_BT(self) -> Tensor:
        """True exactly at the sampled tokens."""
        return self.tokens.loss_mask_RT

    @property
    def v_star_B(self) -> Tensor:
        """V* of each trajectory's task."""
        values = [self.values.tasks[t.task.task_id] for t in self.trajectories]
        return torch.tensor(values, device=self.returns_B.device)

    def with_returns(self, returns_B: Tensor) -> Rollouts:
        """The same episodes with other returns, paid at their last sampled token."""
        position_T = torch.arange(self.mask_BT.shape[1], device=self.mask_BT.device)
        last_B1 = torch.where(self.mask_BT, position_T, -1).amax(dim=1, keepdim=True)
        rewards_BT = torch.where(position_T == last_B1, returns_B[:, None], 0.0)
        return replace(self, returns_B=returns_B, rewards_BT=rewards_BT)

    def spread(self, values_B: Tensor) -> Tensor:
        """Each episode's number at all of its sampled tokens [B, T]; 0 elsewhere."""
        return sampled_or_zero(values_B[:, None], self.mask_BT)

    def take(self, keep_B: Tensor) -> Rollouts:
        """The episodes where the mask is True."""
        kept = keep_B.nonzero()[:, 0].tolist()
        return replace(
            self,
            trajectories=tuple(self.trajectories[index] for index in kept),
            samples=tuple(self.samples[index] for index in kept),
            tokens=self.tokens.rows(keep_B),
            turn_index_BT=self.turn_index_BT[keep_B],
            old_logprobs_BT=self.old_logprobs_BT[keep_B],
            reference_logprobs_BT=self.reference_logprobs_BT[keep_B],
            group_B=self.group_B[keep_B],
            returns_B=self.returns_B[keep_B],
            rewards_BT=self.rewards_BT[keep_B],
            state_values_BT=None if self.state_values_BT is None else self.state_values_BT[keep_B],
        )

    def micro_batches(self, indices: Sequence[int], *, size: int) -> Iterator[MicroBatch]:
        """The episodes of these indices in groups of at most `size` samples, padded to a length.

        This rank's share of them, which may be none. Where weights are in shares and another rank
        has more groups, idle ones follow: the shortest episode again.
        """
        episodes = [self.samples[index] for index in indices]
        device = self.group_B.device
        num_tokens = sum(sum(sample.loss_mask) for samples in episodes for sample in samples)
        cost = pass_cost(device, sharded=self.ranks.sharded)
        groups = micro_batches(episodes, size=size, pass_cost=cost, share=self.ranks.share)
        num_passes = self.ranks.most(len(groups), "micro-batches")
        idle = [[shortest(episodes)]] * (num_passes - len(groups))
        for number, chosen in enumerate([*groups, *idle]):
            rows = to_device(torch.tensor([indices[index] for index in chosen]), device)
            longest = padded_length(max(len(row_of(episodes[index]).token_ids) for index in chosen))
            samples = [sample for index in chosen for sample in episodes[index]]
            batch = collate(samples, pad_id=self.pad_id, device=device)
            yield MicroBatch(
                rows=rows,
                samples=batch,
                targets_ML=loss_mask_of(samples, num_positions=batch.token_ids_RT.shape[1]),
                tokens=self.tokens.rows(rows, num_positions=longest),
                old_logprobs_BT=self.old_logprobs_BT[rows, :longest],
                reference_logprobs_BT=self.reference_logprobs_BT[rows, :longest],
                num_sequences=len(episodes),
                num_tokens=num_tokens,
                is_idle=number >= len(groups),
            )

    def scored(self, score: Callable[[MicroBatch], Tensor], *, size: int, what: str) -> Tensor:
        """A number of each sampled token [B, T] without gradients; 0 elsewhere.

        `score` gives those of a micro-batch. Each rank scores its share and receives the rest.
        """
        return self.scored_by_pass(lambda micro: (score(micro),), num=1, size=size, what=what)[0]

    def scored_by_pass(
        self, score: Callable[[MicroBatch], Sequence[Tensor]], *, num: int, size: int, what: str
    ) -> list[Tensor]:
        """As `scored`: the `num` numbers of each token that `score` makes in one pass."""
        scores = [torch.zeros_like(self.reference_logprobs_BT) for _ in range(num)]
        with torch.no_grad():
            for micro in self.micro_batches(range(len(self)), size=size):
                own = score(micro)
                if micro.is_idle:
                    continue
                for scores_BT, own_BT in zip(scores, own, strict=True):
                    scores_BT[micro.rows, : micro.mask_BT.shape[1]] = own_BT.to(scores_BT.dtype)
        for scores_BT in scores:
            self.ranks.add_up(scores_BT, what)
        return scores


@dataclass(frozen=True)
class MicroBatch:
    """Episodes of one forward pass, with the counts of the whole minibatch that they are part of.

    A loss divided by these counts adds up over the micro-batches.
    """

    rows: Tensor
    """int64 [B]: the episodes' indices among the step's rollouts."""
    samples: TokenBatch
    """All samples of these episodes, one episode's after another's [M, L]."""
    targets_ML: Tensor
    """Their loss mask once more, on the CPU, where it can be counted without waiting for a GPU."""
    tokens: TokenBatch
    """Their rows."""
    old_logprobs_BT: Tensor
    """log pi_old of the sampled tokens."""
    reference_logprobs_BT: Tensor
    """log pi_ref of the sampled tokens."""
    num_sequences: int
    num_tokens: int
    """Sampled ones."""
    is_idle: bool = False
    """Only so that this rank takes part in a pass of others: nothing of it counts."""

    @property
    def mask_BT(self) -> Tensor:
        """True exactly at the sampled tokens."""
        return self.tokens.loss_mask_RT

    def by_pass(
        self, compute: Callable[[Tensor, Tensor], tuple[Tensor, ...]], *, size: int | None
    ) -> tuple[Tensor, ...]:
        """What `compute` makes of tokens and targets, in passes of at most `size` contexts, or one.

        A long episode with a window has more. Its passes are made again for the gradient, so that
        memory does not grow with the number of turns.
        """
        token_ids_ML = self.samples.token_ids_RT
        return in_pieces(compute, token_ids_ML, self.targets_ML, max_rows=size or len(token_ids_ML))

    def in_rows(self, values_ML: Tensor) -> Tensor:
        """A number of each sampled token, moved into the rows [B, T]; 0 elsewhere.

        Both orders are the same: by episode, then as the tokens were sampled. Gradients pass.
        """
        if len(self.samples.token_ids_RT) == len(self.rows):
            # Each episode is one sample.
            return sampled_or_zero(values_ML, self.mask_BT)
        zeros_BT = values_ML.new_zeros(self.mask_BT.shape)
        indices_N = indices_of(self.targets_ML, values_ML.device)
        return zeros_BT.masked_scatter(self.mask_BT, values_ML.flatten()[indices_N])

    def cut(self, values_BT: Tensor) -> Tensor:
        """The part of a tensor over the step's tokens that belongs to these episodes."""
        return values_BT[self.rows, : self.mask_BT.shape[1]]


def contexts_per_pass(model: LanguageModel, *, micro_batch_size: int) -> int | None:
    """`size` of `MicroBatch.by_pass`: None with weights in shares, of which all ranks have to make
    equally many passes.
    """
    return micro_batch_size if model.shards is None else None


def row_of(samples: Sequence[TrainingSample]) -> TrainingSample:
    """A trajectory's samples one after another, without what later ones read before they sample."""
    starts = [0, *(sample.loss_mask.index(True) for sample in samples[1:])]
    parts = list(zip(samples, starts, strict=True))
    return TrainingSample(
        token_ids=tuple(token for each, start in parts for token in each.token_ids[start:]),
        loss_mask=tuple(sampled for each, start in parts for sampled in each.loss_mask[start:]),
        logprobs=tuple(logprob for each, start in parts for logprob in each.logprobs[start:]),
    )


def best_of_each(trajectories: Sequence[Trajectory], *, size: int) -> Sequence[Trajectory]:
    """Of every `size` in succession the one with the highest return, the first of equals.

    Best of n, the plainest of trajectory-search rollouts: "TSR: Trajectory-Search Rollouts for
    Multi-Turn RL of LLM Agents" (2026).
    """
    starts = range(0, len(trajectories), size)
    return [
        max(trajectories[start : start + size], key=lambda each: each.episode_return)
        for start in starts
    ]


def gather_rollouts(
    trajectories: Sequence[Trajectory],
    *,
    step: int,
    group_size: int,
    values: ReferenceValues,
    pad_id: int,
    device: torch.device,
    ranks: Ranks = ALONE,
) -> Rollouts:
    """The rollouts of a step, task after task; the reference is still to be scored (zeros).

    log pi_old is what the sampler recorded.
    """
    samples = tuple(training_samples(trajectory) for trajectory in trajectories)
    rows = [row_of(each) for each in samples]
    tokens = collate(rows, pad_id=pad_id, device=device)
    shape = tokens.loss_mask_RT.shape
    turn_index_BT = torch.full(shape, -1, dtype=torch.int64)
    rewards_BT = torch.zeros(shape)
    for index, (row, trajectory) in enumerate(zip(rows, trajectories, strict=True)):
        sampled = [position for position, is_sampled in enumerate(row.loss_mask) if is_sampled]
        end = 0
        for number, turn in enumerate(trajectory.turns):
            start, end = end, end + len(turn.response_token_ids)
            turn_index_BT[index, sampled[start:end]] = number
            rewards_BT[index, sampled[end - 1]] = turn.reward
    returns_B = torch.tensor([float(trajectory.episode_return) for trajectory in trajectories])
    return Rollouts(
        step=step,
        trajectories=tuple(trajectories),
        samples=samples,
        pad_id=pad_id,
        tokens=tokens,
        turn_index_BT=turn_index_BT.to(device),
        old_logprobs_BT=tokens.sampled_logprobs_RT,
        reference_logprobs_BT=torch.zeros(shape, device=device),
        group_B=(torch.arange(len(samples)) // group_size).to(device),
        returns_B=returns_B.to(device),
        rewards_BT=rewards_BT.to(device),
        values=values,
        ranks=ranks,
    )
