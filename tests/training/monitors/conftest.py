"""Trainers whose policy is the second reference of the finished run and reference the first."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from ragen_apo.config import parse_config
from ragen_apo.session import Session
from ragen_apo.stages.values import reference_values
from ragen_apo.training.trainer import Trainer
from ragen_apo.values.reference_values import ReferenceValues

MONITORS = ["--monitors.every_steps=1", "--monitors.gradient_buckets=true"]


@pytest.fixture
def trainer_of(
    session: Session, trainer_with: Callable[..., Trainer], tiny_config: str
) -> Callable[..., Trainer]:
    """A trainer of an algorithm, six tasks a step, two episodes a task except for A*-PO.

    The finished run has one sample of some tasks, too few for a variance: A*-PO is told the
    standard deviations 0, 1, 2, 3 in turn instead.
    """

    def trainer_of(algorithm: str, *keys: str) -> Trainer:
        overrides = [f"--algorithm={algorithm}", "--training.tasks_per_step=6"]
        if algorithm not in ("apo", "apo_turn"):
            overrides.append("--policy_gradient.group_size=2")
        elif "--monitors.gradient_buckets=true" in keys:
            overrides.append("--apo.num_value_samples=2")
        config = parse_config(tiny_config, source="tiny", overrides=[*overrides, *keys])
        reference = session.load_model(session.run.reference(0))
        tasks = session.environments.tasks("train")
        values = ReferenceValues()
        if config.needs_values:
            values = replace(
                reference_values(session, reference, tasks),
                return_std={task.task_id: float(place % 4) for place, task in enumerate(tasks)},
            )
        return trainer_with(config, values=values)

    return trainer_of
