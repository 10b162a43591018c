"""Demonstrations by people: recorded episodes, played again to get the tokens of a trajectory.

The first time, the episodes that are used are copied into the run, so that a resumed run trains on
the same ones whatever has been recorded or removed meanwhile.
"""

from __future__ import annotations

from pathlib import Path

from ragen_apo.agent.context import ContextManager
from ragen_apo.agent.proxy import EpisodeRequest
from ragen_apo.agent.scripted import play_scripted_episodes
from ragen_apo.environments.base import Reply
from ragen_apo.environments.human.recordings import Recording, select_recordings
from ragen_apo.errors import EnvironmentDataError
from ragen_apo.files import write_json_lines_atomically
from ragen_apo.plural import counted
from ragen_apo.session import Session, require_shared
from ragen_apo.types import StopReason, Task, Trajectory


def recorded_demonstrations(
    session: Session, path: Path, context: ContextManager
) -> list[Trajectory]:
    """One trajectory for each recorded episode of a training task; the thoughts are empty.

    An episode that does not fit into the context ends where one of the policy would. Raises
    ConfigError if there is none (see `select_recordings`), EnvironmentDataError if an episode takes
    another course than the recorded one.
    """
    keep_recordings(session, path)
    session.has(session.run.recordings)  # the other ranks wait for it
    require_shared(session.run.recordings, session.ranks)
    chosen = select_recordings(session.run.recordings, session.environments)
    return [_play_again(recording, session, context) for recording in chosen.recordings]


def keep_recordings(session: Session, path: Path) -> None:
    """Copies the episodes that are used into the run, unless they are there; the first rank does.

    When the run begins: what is recorded or removed later, kill or not, changes nothing.
    """
    kept = session.run.recordings
    if not session.ranks.is_first or kept.exists():
        return
    chosen = select_recordings(path, session.environments)
    rows = [recording.to_row() for recording in chosen.recordings]
    write_json_lines_atomically(kept, rows)
    left_out = f"; left out: {chosen.left_out}" if chosen.left_out else ""
    session.progress.say(f"{counted(len(rows), 'recorded episode')} from {path}{left_out}")


class _Repetition:
    """A scripted policy that does what was recorded, as long as it reads what was recorded."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording

    def begin(self, task: Task, *, seed: int) -> None:
        self._remaining = iter(self._recording.episode.turns)

    def act(self, observation: str) -> Reply:
        turn = next(self._remaining, None)
        if turn is None or turn.observation != observation:
            raise _other_course(self._recording, observation)
        return Reply(thought="", action=turn.action.strip())


def _play_again(recording: Recording, session: Session, context: ContextManager) -> Trajectory:
    episode = recording.episode
    (trajectory,) = play_scripted_episodes(
        lambda: _Repetition(recording),
        session.environments,
        [EpisodeRequest(episode.task, recording.seed)],
        policy_version="recorded",
        context=context,
    )
    was_cut = trajectory.stop_reason is StopReason.CONTEXT_LIMIT
    if not was_cut and trajectory.final_observation != episode.final_observation:
        raise _other_course(recording, trajectory.final_observation)
    return trajectory


def _other_course(recording: Recording, observation: str) -> EnvironmentDataError:
    task = recording.episode.task
    return EnvironmentDataError(
        f"a recorded episode of task {task.task_id} ({task.environment}, version "
        f"{recording.environment_version}) takes another course when its actions are played again: "
        f"it came to {observation[:80]!r}, which was not recorded. Remove it from "
        "warm_start.demonstrations.recordings"
    )
