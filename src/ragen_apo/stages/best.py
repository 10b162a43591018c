"""Which weights become the policy where `training.keep_best` is set: those of the best evaluation.

Consumes the evaluations during training, which are in rows of distillation.jsonl and metrics.jsonl,
and `best/`, which has the weights in the form of checkpoints. So a resumed run knows what the
interrupted one knew. The last two are kept: a run that was killed may go on from before the newest
one. Evaluations whose weights are not there count for nothing, so every run can be finished.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from ragen_apo.errors import CheckpointError
from ragen_apo.files import read_json_lines, remove
from ragen_apo.policy.language_model import LanguageModel
from ragen_apo.session import Session, require_shared
from ragen_apo.training.checkpoint import (
    DISTILLATION,
    STAGE_TWO,
    Position,
    list_checkpoints,
    load_weights,
    save_checkpoint,
)

_SUCCESS, _REWARD = "eval_success_rate", "eval_avg_reward"
_NUM_KEPT = 2


class BestWatch:
    """Notes rows with evaluations; `step` is that of the best one, 0 after distillation alone.

    The best has the highest success rate, of equal ones the highest average reward, and of those
    the last.
    """

    def __init__(self, rows: Iterable[Mapping[str, Any]] = ()) -> None:
        self.step: int | None = None
        self.success_rate = 0.0
        self._reward = -math.inf
        for row in rows:
            self.note(row)

    def note(self, row: Mapping[str, Any]) -> bool:
        """Whether the row has an evaluation that is the best so far."""
        if _SUCCESS not in row:
            return False
        success, reward = float(row[_SUCCESS]), float(row[_REWARD])
        if (success, reward) < (self.success_rate, self._reward):
            return False
        self.success_rate, self._reward, self.step = success, reward, int(row["step"])
        return True


def begin_watch(session: Session) -> BestWatch:
    """What the run's rows say so far; weights of evaluations that a kill has undone are removed."""
    best = _watch(session)
    kept = None if best.step is None else _position(best.step).name
    for folder in list_checkpoints(session.run.best) if session.ranks.is_first else ():
        if folder.name != kept:
            remove(folder)
    return best


def _watch(session: Session) -> BestWatch:
    """Of the evaluations whose weights are there."""

    def rows() -> list[dict[str, Any]]:
        distilled = read_json_lines(session.run.distillation)
        first = [{**row, "step": 0} for row in distilled if row["reference_version"] == 0]
        kept = {folder.name for folder in list_checkpoints(session.run.best)}
        found = [*first, *read_json_lines(session.run.metrics)]
        return [row for row in found if _position(row["step"]).name in kept]

    return BestWatch(session.ranks.from_first(rows, "evaluations so far"))


def keep_as_best(session: Session, policy: LanguageModel, *, step: int) -> None:
    """Writes the weights of the best evaluation so far, the one after `step`.

    A checkpoint of that step has to follow. That of the best one before is kept until then.
    """
    save_checkpoint(
        session.run.best,
        position=_position(step),
        model=policy.model,
        optimizer=None,
        keep=_NUM_KEPT,
        ranks=session.ranks,
    )


def take_best(session: Session, policy: LanguageModel) -> None:
    """Puts the weights of the best evaluation into the policy, and notes which they are."""
    best = _watch(session)
    if best.step is None:
        return
    folder = session.run.best / _position(best.step).name
    require_shared(folder, session.ranks)
    try:
        load_weights(folder, model=policy.model)
    except CheckpointError as error:
        raise CheckpointError(
            f"{error} Put an undamaged copy in its place. Or remove the folder and continue with "
            "--resume: the policy is then that of the best evaluation whose weights are there, or "
            "of the last step."
        ) from error
    if session.ranks.is_first:
        split = session.config.split_while_training
        note = {"step": best.step, "success_rate": best.success_rate, "split": split}
        session.run.note(best=note)
        session.progress.say(
            f"the policy has the weights after step {best.step}, those of the best evaluation on "
            f"the split {split!r}: {best.success_rate:.1%}"
        )


def _position(step: int) -> Position:
    return Position(STAGE_TWO, step) if step > 0 else Position(DISTILLATION, 0)
