"""A person plays an episode in the terminal: reads what an agent reads, types what it would do.

Works for every text environment. `read` and `write` stand for the keyboard and the screen.
"""

from collections.abc import Callable
from dataclasses import dataclass

from ragen_apo.environments.base import TextEnvironment
from ragen_apo.types import Task

QUIT = "quit"


@dataclass(frozen=True)
class PlayedTurn:
    """What the person read and did, and what it earned."""

    observation: str
    action: str
    reward: float
    invalid: bool


@dataclass(frozen=True)
class PlayedEpisode:
    """An episode played by a person; neither terminated nor truncated when they left early."""

    task: Task
    turns: tuple[PlayedTurn, ...]
    terminated: bool
    truncated: bool
    success: bool
    final_observation: str

    @property
    def episode_return(self) -> float:
        """The undiscounted sum of the rewards."""
        return sum(turn.reward for turn in self.turns)


def play(
    environment: TextEnvironment,
    task: Task,
    *,
    seed: int = 0,
    read: Callable[[str], str] = input,
    write: Callable[[str], object] = print,
) -> PlayedEpisode:
    """Plays one episode until its end, or until the person types `quit`, Ctrl-D or Ctrl-C."""
    if environment.properties.data:
        write(f"{environment.properties.name}: {environment.properties.data}\n")
    write(environment.properties.rules)
    write(f"Type {QUIT} to leave.\n")
    observation, _ = environment.reset(task, seed=seed)
    turns: list[PlayedTurn] = []
    terminated = truncated = success = False
    write(observation)
    while not (terminated or truncated):
        action = _read_action(read)
        if action is None:
            break
        read_before = observation
        observation, reward, terminated, truncated, info = environment.step(action)
        invalid = bool(info.get("invalid_action", False))
        success = bool(info.get("success", False))
        turns.append(PlayedTurn(read_before, action, reward, invalid))
        write(f"{observation}\n[reward {reward:+.2f}]")
    episode = PlayedEpisode(task, tuple(turns), terminated, truncated, success, observation)
    write(_summary(episode))
    return episode


def _read_action(read: Callable[[str], str]) -> str | None:
    """What the person typed, or None when they want to leave."""
    try:
        action = read("> ")
    except (EOFError, KeyboardInterrupt):
        return None
    return None if action.strip().lower() == QUIT else action


def _summary(episode: PlayedEpisode) -> str:
    if episode.success:
        verdict = "Success"
    elif episode.terminated:
        verdict = "No success"
    elif episode.truncated:
        verdict = "No turns left"
    else:
        verdict = "Goodbye"
    num_turns = len(episode.turns)
    unit = "turn" if num_turns == 1 else "turns"
    return f"\n{verdict}: return {episode.episode_return:+.2f} in {num_turns} {unit}."
