"""A run whose `training.max_steps` was changed: it goes on after its last step, or ends sooner.

A run of 10 steps that goes on to 20 ends with the weights of one that was to make 20 from the
start: what happens between two steps happens after the tenth as well (`stages.training`). That does
not hold for a learning rate that falls until the last step. It has fallen to 0 after the tenth, and
goes on as in a run of 20.
"""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, TypeAdapter

from ragen_apo.config.load import load_run_config
from ragen_apo.config.moved import value_at
from ragen_apo.config.overrides import merge
from ragen_apo.errors import RunDirectoryError
from ragen_apo.files import make_directory, read_records, remove, sync_to_disk
from ragen_apo.run_directory import RunDirectory
from ragen_apo.session import Session
from ragen_apo.training.checkpoint import STAGE_TWO, newest_position

MAX_STEPS = "training.max_steps"


class _Row(BaseModel):
    step: int


_ROW = TypeAdapter(_Row)


def require_possible_steps(session: Session) -> None:
    """Raises RunDirectoryError if the run is to make fewer steps than it has made."""
    run, wanted = session.run, session.config.training.max_steps
    made = _num_made(run)
    if wanted < made:
        raise RunDirectoryError(
            f"{MAX_STEPS} is {wanted}, and {run.path} has made {made} steps already; expected at "
            f"least {made}, with which the run ends there, or a larger number, with which it goes "
            "on."
        )


def changed_rates(session: Session) -> str | None:
    """Says that the learning rates so far were those of another number of steps, if so.

    To be asked before the run's configuration is written anew.
    """
    run, schedule = session.run, session.config.optimizer.schedule
    planned, wanted = _num_planned(run), session.config.training.max_steps
    if schedule == "constant" or planned is None or _num_made(run) == 0:
        return None
    last = load_run_config(run.config).training.max_steps
    others = {planned, last} - {0, wanted}
    if not others:
        return None
    before = " and ".join(map(str, sorted(others)))
    return (
        f"{MAX_STEPS} was {before} and is {wanted}: the learning rate has fallen as in a run of "
        f"{before} steps and goes on as in one of {wanted} (optimizer.schedule: {schedule}), so "
        f"this run will not end like one that was to make {wanted} from the start"
    )


def has_steps_left(run: RunDirectory, *, max_steps: int) -> bool:
    """Whether a trained run is to go on, as it has made fewer steps than it is to make.

    It goes on from its newest checkpoint, and makes the steps after that again. Raises
    RunDirectoryError if it has none from which it could.
    """
    made = _num_made(run)
    if made >= max_steps or run.read_status().get("early_stop"):
        return False
    if made and _checkpoint_step(run) == 0:
        raise RunDirectoryError(
            f"{MAX_STEPS} is {max_steps}, and {run.path} has made {made} steps, but "
            f"{run.checkpoints} has no checkpoint of them to go on from. Put one back, or start "
            "another run from this one's policy: --policy.path RUN/policy "
            "--warm_start.enabled false"
        )
    return True


def set_results_aside(run: RunDirectory) -> tuple[int, Path]:
    """Moves policy, evaluation and report of a run that goes on; returns its steps, and where to.

    The policy comes last: as long as it is there, the run does not go on.
    """
    made = _num_made(run)
    earlier = run.earlier(made)
    make_directory(earlier)
    steps = run.read_status().get("went_on_after", [])
    run.note(went_on_after=sorted({*steps, made}), best=None)
    for path in (run.report, run.results.parent, run.adapter, run.policy):
        if path.exists():
            remove(earlier / path.name)  # of a run that has gone on after this step before
            path.rename(earlier / path.name)
            sync_to_disk(run.path)
    return made, earlier


def note_planned_steps(session: Session) -> None:
    """Notes a changed number of steps, before the first of them: its learning rates are for it.

    Not while the run has a trained policy: the number says how many steps have led to that.
    """
    run, wanted = session.run, session.config.training.max_steps
    if not run.policy.exists() and _num_made(run) == 0 and _num_planned(run) != wanted:
        noted = run.read_status()["configuration"]
        run.note(configuration=merge(noted, {"training": {"max_steps": wanted}}))


def _num_made(run: RunDirectory) -> int:
    """Steps of Stage 2 that are kept whatever happens: those before the newest checkpoint, and all
    those of a trained run. One that has lost its metrics has made those that were planned.
    """
    made = _checkpoint_step(run)
    if not run.policy.exists():
        return made
    rows = read_records(run.metrics, _ROW)
    if rows:
        return max(made, rows[-1].step)
    planned = _num_planned(run)
    return max(made, load_run_config(run.config).training.max_steps if planned is None else planned)


def _num_planned(run: RunDirectory) -> int | None:
    """With how many steps the run was started; None where it has not noted it."""
    return value_at(run.read_status().get("configuration", {}), MAX_STEPS)


def _checkpoint_step(run: RunDirectory) -> int:
    position = newest_position(run.checkpoints)
    return position.step if position is not None and position.phase == STAGE_TWO else 0
