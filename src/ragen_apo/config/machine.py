"""How a run uses the machine."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from ragen_apo.config.section import Positive, Section, whole_number


class MachineConfig(Section):
    """How the run uses the machine."""

    num_threads: Annotated[int, BeforeValidator(whole_number), Field(ge=1, le=4096)] | None = 2
    """CPU threads of torch, of each process; null for its own choice."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the policy runs; auto takes a GPU if there is one."""
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    """Number format of the policy's weights, and without mixed precision of all it computes.
    bfloat16 only with policy.lora: updates of weights in bfloat16 are mostly rounded away. float64
    takes twice the memory; with it the number of processes changes no token of a run."""
    mixed_precision: Literal["none", "bfloat16", "auto"] = "none"
    """Format of the matrix products (autocast); weights, sums and logits keep `dtype`. auto takes
    bfloat16 where the machine that begins the run multiplies it faster (a GPU since Ampere, a
    processor with AVX-512 BF16 or AMX), and the run keeps what it began with."""
    tf32: bool = True
    """On a GPU: float32 matrix products take 10 bits of each factor's mantissa and run on tensor
    cores, several times faster. Nothing changes on a CPU."""
    deterministic: bool = False
    """On a GPU: use only algorithms that give the same bits every time, so that a resumed run ends
    as one that was not interrupted. Some are slower; an operation without one is an error. On a CPU
    a resumed run ends with the same bits anyway."""
    gradient_checkpointing: bool = False
    """Compute each layer a second time for the backward pass instead of keeping what it computed:
    about a third more time, far less memory on long episodes."""
    sharding: Literal["none", "full"] = "none"
    """With torchrun: `full` leaves each process its share of weights, gradients and moments, of the
    policy, the reference and a critic (FSDP2), in place of all of them; one process has all in
    any case. The results are the same. See docs/scaling.md."""
    rank_timeout_seconds: Positive = 1800.0
    """With torchrun: how long a process waits for the others, which may play longer episodes or
    save a large model, before the run ends with a message. See docs/scaling.md."""
