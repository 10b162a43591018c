"""A second environment in the state of an episode in progress, by playing its actions again.

Environments are not copied: an instance may hold a catalogue, an index or a process of its own. A
reset with the same task and seed and the same actions lead to the same state in a deterministic
environment, which is checked turn by turn.
"""

from __future__ import annotations

from ragen_apo.agent.environment_manager import EnvironmentManager
from ragen_apo.agent.proxy import Episode
from ragen_apo.agent.responses import ParsedResponse
from ragen_apo.environments.base import HasTasks, TextEnvironment
from ragen_apo.errors import ConfigError, EnvironmentFaultError
from ragen_apo.printable import shortened
from ragen_apo.types import TurnFlag


def require_replayable(environments: HasTasks) -> None:
    """Raises ConfigError for an environment in which the same actions may lead elsewhere."""
    properties = environments.properties
    if not properties.deterministic:
        raise ConfigError(
            f"the environment {properties.name!r} is not deterministic, so a search cannot try two "
            "actions in the same state: what comes of the second one is another draw. Search with "
            "a beam of width 1, which tries one action, or in a deterministic environment (for "
            "frozen_lake: slippery false)"
        )


def replayed(environments: EnvironmentManager, episode: Episode) -> TextEnvironment:
    """Another environment in which everything has happened that has in the episode.

    Raises EnvironmentFaultError where it answers the same actions with another text, or says that
    the state is another one.
    """
    request = episode.request
    observations = [*(turn.observation for turn in episode.turns), episode.observation]
    environment, seen = environments.start(request.task, seed=request.seed)
    _require_same(environments, seen, observations[0], what="its first observation")
    for number, (turn, expected) in enumerate(
        zip(episode.turns, observations[1:], strict=True), start=1
    ):
        is_valid = TurnFlag.FORMAT_ERROR.value not in turn.flags
        parsed = ParsedResponse(turn.thought, turn.action, is_valid)
        seen = environments.step(environment, parsed).observation
        _require_same(environments, seen, expected, what=f"the observation after turn {number}")
    _require_same(environments, environment.state_key(), episode.state_key, what="the state key")
    return environment


def _require_same(environments: EnvironmentManager, got: str, expected: str, *, what: str) -> None:
    if got != expected:
        raise EnvironmentFaultError(
            f"the environment {environments.properties.name!r} says that it is deterministic, and "
            f"the same actions led elsewhere: {what} is {shortened(repr(got), 80)}, expected "
            f"{shortened(repr(expected), 80)}. It has to set itself up from task and seed alone, "
            "or to declare that it is not deterministic"
        )
