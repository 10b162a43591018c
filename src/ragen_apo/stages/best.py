"""Which weights become the policy where `training.keep_best` is set: those of the best evaluation.

Consumes the evaluations during training, which are in rows of distillation.jsonl and metrics.jsonl.
So a resumed run knows what the interrupted one knew. `best/` has the weights in the form of
checkpoints. The last two are kept: a run that was killed may go on from before the newest one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ragen_apo.files import read_json_lines
from ragen_apo.plural import counted
from ragen_apo.policy.language_model import LanguageModel
from ragen_apo.session import Session, require_shared
from ragen_apo.training.checkpoint import (
    DISTILLATION,
    STAGE_TWO,
    Position,
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
        self.num_evaluations = 0
        self._score: tuple[float, float] | None = None
        for row in rows:
            self.note(row)

    def note(self, row: Mapping[str, Any]) -> bool:
        """Whether the row has an evaluation that is the best so far."""
        if _SUCCESS not in row:
            return False
        self.num_evaluations += 1
        score = (float(row[_SUCCESS]), float(row[_REWARD]))
        if self._score is not None and score < self._score:
            return False
        self._score, self.success_rate, self.step = score, score[0], int(row["step"])
        return True


def watch_of(session: Session) -> BestWatch:
    """What the run's rows say so far."""

    def rows() -> list[dict[str, Any]]:
        distilled = read_json_lines(session.run.distillation)
        first = [{**row, "step": 0} for row in distilled if row["reference_version"] == 0]
        return [*first, *read_json_lines(session.run.metrics)]

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
    best, training = watch_of(session), session.config.training
    if best.step is None:
        return
    folder = session.run.best / _position(best.step).name
    require_shared(folder, session.ranks)
    load_weights(folder, model=policy.model)
    if session.ranks.is_first:
        split = training.eval_split or session.config.evaluation.split
        session.run.note(
            best={
                "step": best.step,
                "success_rate": best.success_rate,
                "num_evaluations": best.num_evaluations,
                "split": split,
            }
        )
        session.progress.say(
            f"the policy has the weights after step {best.step}, the best of "
            f"{counted(best.num_evaluations, 'evaluation')} on the split {split!r}: "
            f"{best.success_rate:.1%}"
        )


def _position(step: int) -> Position:
    return Position(STAGE_TWO, step) if step > 0 else Position(DISTILLATION, 0)
