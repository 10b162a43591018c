"""Memory and seconds of a rank with whole weights and with its share of them (FSDP2).

    torchrun --nproc-per-node 2 -m benchmarks.sharding models/smollm2-135m --sharding none --out OUT
    torchrun --nproc-per-node 2 -m benchmarks.sharding models/smollm2-135m --sharding full --out OUT

Steps of A*-PO on a pretrained model, whose returns are not compared with V*, so that no Stage 1 is
needed. A call prints its line of the table: what the tensors of a rank take between updates and
gradients at the update, the most that any rank's process took in rollouts and in the rest of the
steps (Linux), and the seconds of the last step. Losses and norms of gradients of the two calls
should agree.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from unittest.mock import patch

from torch import Tensor

from ragen_apo import api
from ragen_apo.config import load_run_config
from ragen_apo.distributed.sharding import share_bytes
from ragen_apo.progress import SilentProgress
from ragen_apo.run_directory import RunDirectory
from ragen_apo.session import open_session
from ragen_apo.stages.training import make_trainer
from ragen_apo.training.checkpoint import STAGE_TWO, Position
from ragen_apo.types import Trajectory

HEADER = (
    "| sharding | ranks | weights | reference | gradients | moments | process, playing "
    "| process, training | rollout | training | losses | norms |\n"
    "|---|---|---|---|---|---|---|---|---|---|---|---|"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--sharding", choices=["none", "full"], required=True)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    run = RunDirectory(arguments.out / arguments.sharding)
    api.train(configuration(arguments), run.path, until="reference", progress=False)
    session = open_session(load_run_config(run.config), run, SilentProgress())
    policy = session.shard(session.load_policy(run.reference(0)))
    trainer = make_trainer(
        session, policy, session.training_tasks(), position=Position(STAGE_TWO, 0)
    )
    update, rollout, gradients, peaks = trainer.optimizer.update, trainer.proxy.rollout, 0, []

    def seen_rollout(*positional: Any, **options: Any) -> list[Trajectory]:
        peaks.append(peak_since_last_call())
        played = rollout(*positional, **options)
        peaks.append(peak_since_last_call())
        return played

    def seen_update(**options: Any) -> float:
        nonlocal gradients
        gradients = size(p.grad for p in policy.model.parameters() if p.grad is not None)
        return update(**options)

    with (
        patch.object(trainer.optimizer, "update", seen_update),
        patch.object(trainer.proxy, "rollout", seen_rollout),
    ):
        rows = [trainer.step(step).metrics for step in range(arguments.steps)]
    peaks.append(peak_since_last_call())
    held = [
        size(policy.model.parameters()),
        size(trainer.reference.model.parameters()),
        gradients,
        size(trainer.optimizer.state_tensors().values()),
        max(peaks[1::2]),
        max(peaks[2::2]),
    ]
    of_all = [json.loads(each) for each in session.ranks.gather(json.dumps(held).encode(), "sizes")]
    largest = [max(sizes) for sizes in zip(*of_all, strict=True)]
    cells = [
        arguments.sharding,
        session.ranks.size,
        *(f"{number / 1e6:.0f} MB" for number in largest),
        *(f"{rows[-1][name]:.1f} s" for name in ("rollout_seconds", "training_seconds")),
        *(", ".join(f"{row[name]:.6f}" for row in rows) for name in ("loss", "gradient_norm")),
    ]
    if session.ranks.is_first:
        print(f"{HEADER}\n| {' | '.join(map(str, cells))} |")


def peak_since_last_call() -> int:
    """The most bytes of main memory that this process had; 0 where the system does not say."""
    status, reset = Path("/proc/self/status"), Path("/proc/self/clear_refs")
    if not reset.exists():
        return 0
    found = re.search(r"VmHWM:\s+(\d+) kB", status.read_text())
    reset.write_text("5")
    return int(found[1]) * 1024 if found else 0


def size(tensors: Iterable[Tensor]) -> int:
    return sum(map(share_bytes, tensors))


def configuration(arguments: argparse.Namespace) -> dict[str, Any]:
    return {
        "machine": {
            "num_threads": 1,
            "device": arguments.device,
            "sharding": arguments.sharding,
        },
        "environment": {"name": "bandit", "num_train_tasks": 4, "num_test_tasks": 4},
        "agent": {"max_response_tokens": 24, "max_context_tokens": 512},
        "policy": {"path": str(arguments.model)},
        "warm_start": {"enabled": False},
        "values": {"baseline": "zero"},
        "optimizer": {"learning_rate": 1e-6},
        "reference": {"refresh_every_steps": None},
        "training": {
            "max_steps": arguments.steps,
            "tasks_per_step": 4,
            "micro_batch_size": 1,
            "num_rows": 4,
            "eval_every": None,
        },
    }


if __name__ == "__main__":
    main()
