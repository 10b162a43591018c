"""How a run uses the machine."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from ragen_apo.config.section import Positive, Section, whole_number


class MachineConfig(Section):
    """How the run uses the machine."""

    num_threads: Annotated[int, BeforeValidator(whole_number), Field(ge=1, le=4096)] | None = 2
    """CPU threads of torch, of each process; null for its own choice."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the policy runs; auto takes a GPU if there is one."""
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    """Number format of the policy's weights and, without mixed precision, of all computations. Use
    bfloat16 only with policy.lora, because most updates of bfloat16 weights are lost to rounding.
    With float64, which takes twice the memory, the number of processes changes no token of a run.
    """
    mixed_precision: Literal["none", "bfloat16", "auto"] = "none"
    """Format of the matrix products (autocast); weights, sums and logits keep `dtype`. auto uses
    bfloat16 if the machine has bfloat16 units: a GPU since Ampere, or a processor with AVX-512 BF16
    or AMX. A run keeps the choice that it started with."""
    tf32: bool = True
    """On a GPU: float32 matrix products use only 10 bits of each factor's mantissa. They run on
    tensor cores and are several times faster. No effect on a CPU."""
    deterministic: bool = False
    """On a GPU: use only operations that give the same bits every time, so that a resumed run ends
    like one without interruption. Some are slower. An operation without such a form is an error. On
    a CPU a resumed run ends with the same bits anyway."""
    gradient_checkpointing: bool = False
    """Compute each layer again in the backward pass instead of keeping its results: about a third
    more time, far less memory on long episodes."""
    sharding: Literal["none", "full"] = "none"
    """With torchrun: with `full` each process holds only its share of weights, gradients and
    moments (FSDP2), for the policy, the reference and a critic. A single process always holds all
    of them. The results are the same. See docs/scaling.md."""
    rank_timeout_seconds: Positive = 1800.0
    """With torchrun: how long a process waits for the others before the run ends with a message.
    The others may play longer episodes or save a large model. See docs/scaling.md."""

    @model_validator(mode="after")
    def _formats_fit(self) -> MachineConfig:
        if self.dtype == "float64" and self.mixed_precision != "none":
            raise ValueError(
                f"dtype is float64 and mixed_precision {self.mixed_precision}, which leaves "
                "float64 products as they are; set mixed_precision to none, or dtype to float32"
            )
        return self
