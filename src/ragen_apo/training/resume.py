"""What a run needs so that it goes on as the run it was: its configuration and its references.

`run.json` keeps the configuration that the run was started with, because `config.yaml` can be
edited between two attempts, and a run of two configurations is neither of them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from ragen_apo.config import RunConfig
from ragen_apo.errors import RunDirectoryError
from ragen_apo.files import read_json_lines, write_json_atomically
from ragen_apo.run_directory import RunDirectory
from ragen_apo.training.checkpoint import STAGE_TWO, Position

MAY_CHANGE = (
    "run.num_threads",
    "run.device",
    "policy.trust_remote_code",
    "training.micro_batch_size",
    "training.num_rows",
    "training.checkpoint_every",
    "training.keep_checkpoints",
    "evaluation",
)
"""Keys and sections that say how a run uses the machine, or what is measured after it. Another
value adds up the same numbers in another order at most."""


def require_same_configuration(run: RunDirectory, config: RunConfig) -> None:
    """Notes the configuration when a run starts, and raises RunDirectoryError if it has changed."""
    status = run.read_status()
    now = json.loads(json.dumps(config.model_dump(by_alias=True)))
    started = status.get("configuration")
    if started is None:
        write_json_atomically(run.status, status | {"configuration": now})
        return
    changes = [
        f"{key} was {json.dumps(before)} and is {json.dumps(after)}"
        for key, before, after in _differences(started, now)
        if not any(key == free or key.startswith(f"{free}.") for free in MAY_CHANGE)
    ]
    if changes:
        raise RunDirectoryError(
            f"{run.config} was edited since this run started: {'; '.join(changes[:5])}. Its "
            "earlier steps were made with the values before, so put those back, or start another "
            f"run in another --run-dir. What may change is {', '.join(MAY_CHANGE)}."
        )


def require_references(run: RunDirectory, position: Position) -> None:
    """Raises RunDirectoryError if Stage 2 has begun and a reference it compares with is gone.

    The weights of a checkpoint cannot stand in: the log ratio to them would start at 0 again.
    """
    if position.phase != STAGE_TWO and not read_json_lines(run.metrics):
        return
    for version in sorted({0, position.counters.get("reference_version", 0)}):
        if not run.reference(version).is_dir():
            raise RunDirectoryError(
                f"{run.reference(version)} is missing, and the policy of this run is trained "
                "against it. Put the folder back where it was, or start another run in another "
                "--run-dir; weights, checkpoints and metrics are as they were."
            )


def _differences(
    before: Mapping[str, Any], after: Mapping[str, Any], prefix: str = ""
) -> Iterator[tuple[str, Any, Any]]:
    """Each key, with dots, whose value has changed, and both values; null where it is absent."""
    for name in [*before, *(name for name in after if name not in before)]:
        old, new = before.get(name), after.get(name)
        if isinstance(old, dict) and isinstance(new, dict):
            yield from _differences(old, new, f"{prefix}{name}.")
        elif old != new:
            yield f"{prefix}{name}", old, new
