"""A second environment in the state of an episode in progress."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from ragen_apo.agent.environment_manager import EnvironmentManager
from ragen_apo.agent.proxy import Episode, EpisodeRequest
from ragen_apo.agent.replay import replayed, require_replayable
from ragen_apo.agent.responses import ParsedResponse
from ragen_apo.environments.base import make_environment
from ragen_apo.errors import ConfigError, EnvironmentFaultError
from ragen_apo.policy.engine import Response
from ragen_apo.types import Task

WORLDS: dict[str, dict[str, Any]] = {
    "shop": {"num_products": 24},
    "sokoban": {"num_train_tasks": 4, "num_test_tasks": 4},
    "frozen_lake": {"num_train_tasks": 4, "num_test_tasks": 4, "slippery": False},
    "countdown": {"num_train_tasks": 4, "num_test_tasks": 4},
}


def manager(name: str, **options: Any) -> EnvironmentManager:
    make = partial(make_environment, name, {**WORLDS[name], **options})
    return EnvironmentManager(make, format_penalty=-0.1, invalid_action_penalty=0.0)


def begun(environments: EnvironmentManager, task: Task, *, num_turns: int) -> Episode:
    """An episode of the heuristic, whose second turn cannot be read."""
    environment, observation = environments.start(task, seed=3)
    episode = Episode(
        0, EpisodeRequest(task, 3), environment, observation, state_key=environment.state_key()
    )
    policy = environments.scripted_policies()["heuristic"]()
    policy.begin(task, seed=3)
    for number in range(num_turns):
        reply = policy.act(episode.observation)
        parsed = ParsedResponse(reply.thought, reply.action, is_valid=True)
        if number == 1:
            parsed = ParsedResponse("", "", is_valid=False)
        outcome = environments.step(environment, parsed)
        episode.record(Response((), (), stopped=True), "", parsed, outcome)
        if outcome.terminated or outcome.truncated:
            break
    episode.state_key = environment.state_key()
    return episode


@pytest.mark.parametrize("name", WORLDS)
@pytest.mark.parametrize("num_turns", [0, 1, 2, 3])
def test_the_second_environment_answers_as_the_first(name: str, num_turns: int) -> None:
    environments = manager(name)
    episode = begun(environments, environments.tasks("test")[1], num_turns=num_turns)
    second = replayed(environments, episode)
    assert second is not episode.environment
    policy = environments.scripted_policies()["random"]()
    policy.begin(episode.request.task, seed=5)
    action = policy.act(episode.observation).action
    assert second.step(action) == episode.environment.step(action)
    assert second.state_key() == episode.environment.state_key()


class FickleLake:
    """Says that it is deterministic, and has other slips in every episode."""

    num_episodes = 0

    def __init__(self) -> None:
        options = {"num_train_tasks": 4, "num_test_tasks": 4, "success_rate": 0.34}
        self._lake = make_environment("frozen_lake", options)
        firm = make_environment("frozen_lake", WORLDS["frozen_lake"])
        self.properties = firm.properties

    def reset(self, task: Task, *, seed: int) -> tuple[str, dict[str, Any]]:
        FickleLake.num_episodes += 1
        return self._lake.reset(task, seed=FickleLake.num_episodes)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lake, name)


def replayed_often(environments: EnvironmentManager, episode: Episode) -> None:
    """One replay may slip as the episode has, by chance."""
    for _ in range(20):
        replayed(environments, episode)


def test_an_environment_that_answers_differently_is_refused() -> None:
    environments = EnvironmentManager(FickleLake, format_penalty=0.0, invalid_action_penalty=0.0)
    require_replayable(environments)
    episode = begun(environments, environments.tasks("test")[0], num_turns=3)
    with pytest.raises(EnvironmentFaultError, match="the same actions led elsewhere"):
        replayed_often(environments, episode)


def test_an_environment_with_chance_is_refused_before_anything_is_played() -> None:
    with pytest.raises(ConfigError, match="'frozen_lake' is not deterministic, so a search cannot"):
        require_replayable(manager("frozen_lake", slippery=True))
