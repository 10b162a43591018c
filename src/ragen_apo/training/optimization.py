"""AdamW with clipping, and learning rates that are functions of the step."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor, nn

from ragen_apo.errors import TrainingError

Schedule = Literal["constant", "linear", "cosine"]


def learning_rate_at(
    step: int, *, peak: float, num_steps: int, warmup_steps: int, schedule: Schedule
) -> float:
    """The learning rate of the update number `step`, counted from 0.

    Rises linearly over the warm-up, then follows the schedule, which reaches 0 after `num_steps`.
    """
    if step < warmup_steps:
        return peak * (step + 1) / (warmup_steps + 1)
    if schedule == "constant":
        return peak
    progress = (step - warmup_steps) / max(num_steps - warmup_steps, 1)
    if schedule == "linear":
        return peak * (1.0 - progress)
    return peak * 0.5 * (1.0 + math.cos(math.pi * progress))


class Optimizer:
    """AdamW over the trainable parameters of a model, whose state is plain named tensors."""

    def __init__(self, model: nn.Module, *, weight_decay: float = 0.0) -> None:
        self._named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        self._adamw = torch.optim.AdamW(
            [parameter for _, parameter in self._named], lr=0.0, weight_decay=weight_decay
        )

    def update(self, *, learning_rate: float, max_grad_norm: float) -> float:
        """One step on the accumulated gradients, clipped; returns their norm before clipping.

        Raises TrainingError, without changing the weights, if the norm is not finite.
        """
        parameters = [parameter for _, parameter in self._named]
        norm = float(nn.utils.clip_grad_norm_(parameters, max_grad_norm))
        if not math.isfinite(norm):
            raise TrainingError(
                f"the gradient norm is {norm}: the update was not made. Lower the learning rate, "
                "or look for a return or a log-probability that is not finite in the last rollout."
            )
        for group in self._adamw.param_groups:
            group["lr"] = learning_rate
        self._adamw.step()
        self._adamw.zero_grad(set_to_none=True)
        return norm

    def state_tensors(self) -> dict[str, Tensor]:
        """Moments and step counts, named `<parameter>/<moment>`."""
        return {
            f"{name}/{key}": value.detach().clone().contiguous()
            for name, parameter in self._named
            for key, value in self._adamw.state[parameter].items()
        }

    def load_state_tensors(self, tensors: dict[str, Tensor]) -> None:
        """The inverse of `state_tensors`; parameters without a state start from nothing."""
        for name, parameter in self._named:
            prefix = f"{name}/"
            state = {
                key.removeprefix(prefix): value
                for key, value in tensors.items()
                if key.startswith(prefix)
            }
            if state:
                self._adamw.state[parameter] = {
                    key: value if key == "step" else value.to(parameter.device)
                    for key, value in state.items()
                }
