"""The loop of every supervised phase: weighted next-token training, resumable at each checkpoint.

A batch is a function of (seed, phase, step), so a resumed phase sees the batches it would have
seen. Each rank makes its share of the batch's rows; weights and counts are those of all.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from ragen_apo.choices import Schedule
from ragen_apo.distributed.ranks import ALONE, Ranks
from ragen_apo.policy.language_model import LanguageModel
from ragen_apo.policy.passes import seeded_torch
from ragen_apo.seeding import derive_seed
from ragen_apo.session import Session
from ragen_apo.training.checkpoint import Position, load_moments, save_checkpoint
from ragen_apo.training.optimization import Optimizer, learning_rate_at

MAX_GRAD_NORM = 1.0


@dataclass(frozen=True)
class SupervisedBatch:
    """Token ids [B, T] and which of them are to be predicted."""

    token_ids_BT: Tensor
    target_mask_BT: Tensor
    weights_BT: Tensor | None = None
    """How much a target counts; None: all alike."""
    sampled_logprobs_BT: Tensor | None = None
    """log pi of the targets when they were sampled, if a policy of this project sampled them."""


@dataclass(frozen=True)
class SupervisedResult:
    """Weighted means over the targets of a batch."""

    loss: float
    """Cross-entropy in nats."""
    accuracy: float
    """Share of targets, all alike, that were the most probable token."""
    log_ratio: float | None = None
    """log pi now minus when it was sampled, in nats; None where that is unknown."""


@dataclass(frozen=True)
class SupervisedPhase:
    """What distinguishes one supervised phase from the others."""

    name: str
    num_steps: int
    peak_learning_rate: float
    schedule: Schedule
    batch: Callable[[int], list[SupervisedBatch]]
    """This rank's share of the batch of a step, in parts that go through the model one after
    another."""
    seed: int
    curve: Path
    """Where its rows go."""
    labels: Mapping[str, int] = field(default_factory=dict)
    """What its rows say besides."""
    warmup_steps: int = 20
    log_every: int = 10
    target_accuracy: float | None = None
    """The phase ends early when a batch reaches it."""
    temperature: float = 1.0
    """Of the distribution that is trained: the one that will be sampled from."""
    batch_weight: float | None = None
    """What the weighted losses of each batch are divided by; None: by the weights of that batch.
    Only one number for all batches keeps a batch of large weights ahead of one of small ones."""
    has_dropout: bool = True
    """`False` where what is trained on was sampled from this model without it."""
    keeps_checkpoints: bool = True
    """`False`: it is a part of a step of Stage 2, which is made again after a kill."""


def run_supervised_phase(
    session: Session, model: LanguageModel, phase: SupervisedPhase, *, start: int
) -> None:
    """Trains `model` from update number `start` to the end of the phase and saves checkpoints.

    Where `start` is above 0, the run has a checkpoint of that update with its moments.
    """
    optimizer = Optimizer(model.model)
    position = Position(phase.name, start)
    if start > 0:
        load_moments(session.run.checkpoints / position.name, optimizer)
    session.progress.start(phase.name, phase.num_steps)
    model.model.train(phase.has_dropout)
    for step in range(start, phase.num_steps):
        started = time.perf_counter()
        batch = phase.batch(step)
        dropout_seed = derive_seed(phase.seed, "dropout", phase.name, step)
        with seeded_torch(dropout_seed, device=session.device):
            result = accumulate_supervised_gradients(
                model,
                batch,
                temperature=phase.temperature,
                batch_weight=phase.batch_weight,
                ranks=session.ranks,
            )
        learning_rate = learning_rate_at(
            step,
            peak=phase.peak_learning_rate,
            num_steps=phase.num_steps,
            warmup_steps=phase.warmup_steps,
            schedule=phase.schedule,
        )
        optimizer.update(learning_rate=learning_rate, max_grad_norm=MAX_GRAD_NORM)
        reached = phase.target_accuracy is not None and result.accuracy >= phase.target_accuracy
        position = replace(position, step=step + 1, finished=reached)
        session.progress.update(step + 1, f"loss {result.loss:.3f}  accuracy {result.accuracy:.1%}")
        if reached or (step + 1) % phase.log_every == 0 or step + 1 == phase.num_steps:
            row = {
                "phase": phase.name,
                **phase.labels,
                "step": step + 1,
                "loss": result.loss,
                "accuracy": result.accuracy,
                "learning_rate": learning_rate,
                "seconds": time.perf_counter() - started,
            }
            if result.log_ratio is not None:
                row["log_ratio"] = result.log_ratio
            session.note_row(phase.curve, row)
        if reached:
            break
        is_last = step + 1 == phase.num_steps  # saved below, as finished
        if not is_last and (step + 1) % session.config.warm_start.checkpoint_every == 0:
            _save(session, model, optimizer, position, phase)
    _save(session, model, optimizer, replace(position, finished=True), phase)


def _save(
    session: Session,
    model: LanguageModel,
    optimizer: Optimizer,
    position: Position,
    phase: SupervisedPhase,
) -> None:
    if not phase.keeps_checkpoints:
        session.clock.note()
        return
    session.ranks.require_equal_weights([model.model])
    with session.clock.saving():
        save_checkpoint(
            session.run.checkpoints,
            position=position,
            model=model.model,
            optimizer=optimizer,
            keep=session.config.training.keep_checkpoints,
            ranks=session.ranks,
        )


def accumulate_supervised_gradients(
    model: LanguageModel,
    parts: Sequence[SupervisedBatch],
    *,
    temperature: float = 1.0,
    batch_weight: float | None = None,
    ranks: Ranks = ALONE,
) -> SupervisedResult:
    """Adds up the gradient of the weighted cross-entropy over all targets of all parts.

    And of the parts of all ranks, some of which may have none. The sum is divided by
    `batch_weight`; None: by its weights, which makes it their mean, as the result always is.
    """
    num_targets, total_weight = ranks.total(
        sum(int(part.target_mask_BT.sum()) for part in parts),
        sum(float(_weights(part).sum()) for part in parts),
        what="targets",
    )
    divisor = total_weight if batch_weight is None else batch_weight
    loss_sum = num_correct = sampled_sum = 0.0
    for part in parts:
        losses_M, correct_M = _losses(
            model, part.token_ids_BT, part.target_mask_BT, temperature=temperature
        )
        weights_M = _weights(part)
        loss = (losses_M * weights_M).sum()
        (loss / divisor).backward()
        loss_sum += loss.item()
        num_correct += float(correct_M.sum())
        if part.sampled_logprobs_BT is not None:
            sampled_M = part.sampled_logprobs_BT[part.target_mask_BT]
            sampled_sum += float((sampled_M * weights_M).sum())
    for _ in range(ranks.most(len(parts), "passes") - len(parts)):
        _take_part(model)
    ranks.add_gradients([model.model])
    loss_sum, num_correct, sampled_sum = ranks.total(
        loss_sum, num_correct, sampled_sum, what="losses"
    )
    is_sampled = all(part.sampled_logprobs_BT is not None for part in parts)
    return SupervisedResult(
        loss=loss_sum / total_weight,
        accuracy=num_correct / num_targets,
        log_ratio=-(loss_sum + sampled_sum) / total_weight if is_sampled else None,
    )


def _take_part(model: LanguageModel) -> None:
    """A pass that adds nothing to the gradients, while other ranks make one of their parts."""
    token_ids_BT = torch.full((1, 2), model.pad_id, device=model.device)
    targets_BT = torch.tensor([[False, True]], device=model.device)
    losses_M, _ = _losses(model, token_ids_BT, targets_BT)
    (0.0 * losses_M.sum()).backward()


def _losses(
    model: LanguageModel, token_ids_BT: Tensor, target_mask_BT: Tensor, *, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """The cross-entropy of each target [M], and whether it is the likeliest token [M]."""

    def read(hidden_MH: Tensor, targets_M: Tensor) -> tuple[Tensor, Tensor]:
        logits_MV = model.logits(hidden_MH)
        if temperature != 1.0:
            logits_MV = logits_MV / temperature
        losses_M = torch.nn.functional.cross_entropy(logits_MV, targets_M, reduction="none")
        return losses_M, logits_MV.argmax(-1) == targets_M

    losses_M, correct_M = model.over_targets(token_ids_BT, target_mask_BT, read)
    return losses_M, correct_M


def _weights(part: SupervisedBatch) -> Tensor:
    """Of its targets, in their order."""
    if part.weights_BT is None:
        return torch.ones(int(part.target_mask_BT.sum()), device=part.token_ids_BT.device)
    return part.weights_BT[part.target_mask_BT]
