"""V* of a state, from the samples of a reference in the run's value store. Reads only."""

from __future__ import annotations

from pathlib import Path

from pydantic import TypeAdapter

from ragen_apo.errors import RunDirectoryError
from ragen_apo.files import parse_record
from ragen_apo.types import Trajectory
from ragen_apo.values.state_values import state_values
from ragen_apo.web.view.value_store import sample, sample_numbers

_TRAJECTORY = TypeAdapter(Trajectory)


def stored_value(
    store: Path, digest: str, task_id: str, state_key: str, *, beta: float
) -> float | None:
    """V* at `beta` from all samples of the task that visited the state; None without any.

    `digest` names the conditions of the samples. Raises RunDirectoryError for a damaged store.
    """
    if not store.exists():
        return None
    numbers = [number for number, *_ in sample_numbers(store, digest, task_id)]
    rows = (sample(store, digest, task_id, number) for number in numbers)
    try:
        trajectories = [parse_record(_TRAJECTORY, row) for row in rows if row is not None]
    except ValueError as error:
        raise RunDirectoryError(f"{store} is damaged: task {task_id}: {error}") from error
    return state_values(trajectories, beta=beta, min_visits=1).get(state_key)
