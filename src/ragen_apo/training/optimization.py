"""AdamW with clipping, and learning rates that are functions of the step."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ragen_apo.choices import Schedule
from ragen_apo.distributed.sharding import assign, whole_tensor
from ragen_apo.errors import TrainingError
from ragen_apo.training.named_tensors import check_tensors


def learning_rate_at(
    step: int, *, peak: float, num_steps: int, warmup_steps: int, schedule: Schedule
) -> float:
    """The learning rate at `step`, counted from 0; all updates of a step of Stage 2 share it.

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

    def __init__(
        self, model: nn.Module, *, weight_decay: float = 0.0, fused: bool | None = None
    ) -> None:
        """`fused` updates all parameters in one kernel, which rounds differently.

        None does so on a GPU only.
        """
        self._named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        on_gpu = all(parameter.is_cuda for _, parameter in self._named)
        self._fused = on_gpu if fused is None else fused
        self._adamw = torch.optim.AdamW(
            [parameter for _, parameter in self._named],
            lr=0.0,
            weight_decay=weight_decay,
            fused=self._fused,
        )

    def update(self, *, learning_rate: float, max_grad_norm: float) -> float:
        """One step on the accumulated gradients, clipped; returns their norm before clipping.

        Raises TrainingError, without changing the weights, if the norm is not finite.
        """
        parameters = [parameter for _, parameter in self._named]
        gradients = [each.grad for each in parameters if each.grad is not None]
        total = whole_tensor(nn.utils.get_total_norm(gradients))
        nn.utils.clip_grads_with_norm_(parameters, max_grad_norm, total)
        norm = float(total)
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
        """Moments and step counts, named `<parameter>/<moment>`: always those of all parameters.

        They are no copies: the next update changes them. They are in shares where the parameters
        are. Where one has had no gradient yet, they are what AdamW will start with.
        """
        return {
            f"{name}/{key}": value.detach().contiguous()
            for name, parameter in self._named
            for key, value in self._state_of(parameter).items()
        }

    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """The inverse of `state_tensors`; raises ValueError for any others."""
        forms = {
            name: self._first_state(torch.empty(each.shape, dtype=each.dtype, device="meta"))
            for name, each in self._named
        }
        expected = {f"{name}/{key}": form for name in forms for key, form in forms[name].items()}
        check_tensors(tensors, expected)
        for name, parameter in self._named:
            state = self._first_state(parameter.detach())
            for key, moment in state.items():
                assign(moment, tensors[f"{name}/{key}"])
            self._adamw.state[parameter] = state

    def _state_of(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        return self._adamw.state.get(parameter) or self._first_state(parameter)

    def _first_state(self, parameter: Tensor) -> dict[str, Tensor]:
        """What AdamW makes of a parameter at its first gradient.

        The fused one counts its steps on the parameter's device.
        """
        return {
            "step": torch.zeros((), device=parameter.device if self._fused else "cpu"),
            "exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format),
            "exp_avg_sq": torch.zeros_like(parameter, memory_format=torch.preserve_format),
        }
