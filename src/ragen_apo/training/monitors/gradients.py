"""The gradient's norm by how much the returns of a task vary.

Consumes the rollouts of a step and the loss of a micro-batch; produces the norm of the gradient of
each bucket's part of the step's loss, at the weights before the first update. The parts add up to
the whole loss, so the gradients (not their norms) add up to the whole gradient. A task whose
returns are all equal says little about which response is better: where such tasks have most of the
gradient, the update is regularisation and noise (RAGEN, arXiv 2504.20073, filters by variance).

The variance of a task is that of its Stage 1 returns for A*-PO, which plays it once a step, and
that of its rollouts in this step for all others.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

from ragen_apo.objectives.tensors import group_statistics
from ragen_apo.training.rollouts import MicroBatch, Rollouts

BUCKETS = ("zero", "low", "middle", "high")
MAX_EQUAL_STD = 1e-6
"""Standard deviation up to which returns count as equal; sums of the same rewards are rounded."""


def gradient_bucket_metrics(
    rollouts: Rollouts,
    *,
    parameters: Iterable[nn.Parameter],
    loss_of: Callable[[MicroBatch], Tensor],
    micro_batch_size: int,
) -> dict[str, float]:
    """Share of tasks and norm of the gradient of each bucket; no norm of an empty bucket.

    `loss_of` gives what a micro-batch adds to the loss of the step. The parameters must hold no
    gradients, and hold none afterwards; other tensors that the loss depends on get none.
    """
    started = time.perf_counter()
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    assert all(parameter.grad is None for parameter in trained), "a gradient would be lost"
    bucket_B = variance_buckets(return_std(rollouts), group_B=rollouts.group_B.cpu())
    task_of = dict(zip(rollouts.group_B.tolist(), bucket_B, strict=True))
    metrics: dict[str, float] = {}
    for name in BUCKETS:
        places = [place for place, bucket in enumerate(bucket_B) if bucket == name]
        metrics[f"task_share_{name}_variance"] = list(task_of.values()).count(name) / len(task_of)
        if places:
            metrics[f"gradient_norm_{name}_variance"] = _norm_of_part(
                rollouts, places, trained, loss_of, micro_batch_size
            )
    return metrics | {"gradient_monitor_seconds": time.perf_counter() - started}


def return_std(rollouts: Rollouts) -> Tensor:
    """Standard deviation of the returns of each trajectory's task [B].

    Of the episodes' own returns, whatever normalisation makes of them. Raises KeyError if Stage 1
    values are used and a task has no standard deviation among them.
    """
    by_task = rollouts.values.return_std
    if by_task is not None:
        std = [by_task[trajectory.task.task_id] for trajectory in rollouts.trajectories]
        return torch.tensor(std, dtype=torch.float64)
    returns = [trajectory.episode_return for trajectory in rollouts.trajectories]
    returns_B = torch.tensor(returns, dtype=torch.float64)
    return group_statistics(returns_B, group_N=rollouts.group_B.cpu()).std


def variance_buckets(std_B: Tensor, *, group_B: Tensor) -> list[str]:
    """The bucket of each trajectory's task: no variance, or a third of the tasks that have some.

    Tasks of equal variance share a bucket, the lowest that fits, so the thirds may differ in size:
    where all variances that are not zero are equal, they are `low`.
    """
    std_of_group = dict(zip(group_B.tolist(), std_B.tolist(), strict=True))
    varied = [std for std in std_of_group.values() if std > MAX_EQUAL_STD]
    if not varied:
        return ["zero"] * len(std_B)
    thirds = np.quantile(varied, [1 / 3, 2 / 3], method="inverted_cdf")
    limits = (MAX_EQUAL_STD, *thirds.tolist(), math.inf)
    return [
        next(name for name, limit in zip(BUCKETS, limits, strict=True) if std <= limit)
        for std in std_B.tolist()
    ]


def _norm_of_part(
    rollouts: Rollouts,
    places: Sequence[int],
    trained: Sequence[nn.Parameter],
    loss_of: Callable[[MicroBatch], Tensor],
    micro_batch_size: int,
) -> float:
    num_tokens = int(rollouts.mask_BT.sum())
    try:
        for micro in rollouts.micro_batches(places, size=micro_batch_size):
            # A part of the step's loss is divided by the counts of the step, not of the part.
            part = replace(micro, num_sequences=len(rollouts), num_tokens=num_tokens)
            torch.autograd.backward(loss_of(part), inputs=trained)
        return float(nn.utils.get_total_norm([p.grad for p in trained if p.grad is not None]))
    finally:
        for parameter in trained:
            parameter.grad = None
