"""Successes without their detours, against episodes that went the short way at once."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial

import pytest
from transformers import PreTrainedTokenizerBase

from ragen_apo.agent import detours
from ragen_apo.agent.context import ContextManager, ContextWindow, TokenLimits
from ragen_apo.agent.detours import without_detours
from ragen_apo.agent.environment_manager import EnvironmentManager
from ragen_apo.agent.proxy import EpisodeRequest
from ragen_apo.agent.scripted import play_scripted_episodes
from ragen_apo.environments.base import EnvironmentProperties, Reply
from ragen_apo.environments.toolkit.game import Answer, GameEnvironment
from ragen_apo.errors import EnvironmentRaisedError
from ragen_apo.stages.distillation import WeightedEpisode, shortened
from ragen_apo.types import Task, Trajectory, make_task

GOAL = 2
TASK = make_task(environment="walk", instruction="go", split="train", category="", payload={})
LIMITS = TokenLimits(max_context_tokens=4096, max_response_tokens=64)


class Walk:
    """From 0 to GOAL by `up` and `down`; `gift` pays once, `stay` does nothing."""

    def __init__(self, task: Task, seed: int) -> None:
        self.place, self.has_gift = 0, False

    def first_observation(self) -> str:
        return f"You are at {self.place}."

    def play(self, text: str) -> Answer:
        self.place += {"up": 1, "down": -1}.get(text, 0)
        gift = text == "gift" and not self.has_gift
        self.has_gift = self.has_gift or gift
        done = self.place == GOAL
        reward = float(done) + 0.5 * gift
        return Answer(self.first_observation(), reward, terminated=done, success=done)

    def key(self) -> str:
        return f"{self.place} {self.has_gift}"


def make_walks(start: type[Walk] = Walk, *, num_retries: int = 0) -> EnvironmentManager:
    properties = EnvironmentProperties(
        name="walk",
        version="1",
        reward_version="1",
        deterministic=True,
        return_range=(0.0, 2.0),
        splits=("train",),
        rules="",
    )
    make = partial(
        GameEnvironment,
        properties=properties,
        tasks={"train": [TASK]},
        start=start,
        policies={},
        max_turns=9,
    )
    return EnvironmentManager(
        make, format_penalty=-0.1, invalid_action_penalty=0.0, num_retries=num_retries
    )


@pytest.fixture
def environments() -> EnvironmentManager:
    return make_walks()


@pytest.fixture(params=[None, 1])
def context(
    request: pytest.FixtureRequest, shop_tokenizer: PreTrainedTokenizerBase
) -> ContextManager:
    """With all turns, and with a window that leaves turns out."""
    window = ContextWindow(num_turns=request.param)
    return ContextManager(shop_tokenizer, system_prompt="walk", limits=LIMITS, window=window)


Play = Callable[[Sequence[str]], Trajectory]
PlayIn = Callable[[EnvironmentManager, Sequence[str]], Trajectory]


class Says:
    """A scripted policy that does this, whatever it reads."""

    def __init__(self, actions: Sequence[str]) -> None:
        self._actions = actions

    def begin(self, task: Task, *, seed: int) -> None:
        self._left = iter(self._actions)

    def act(self, observation: str) -> Reply:
        return Reply(thought="", action=next(self._left, "stay"))


@pytest.fixture
def play_in(context: ContextManager) -> PlayIn:
    def played(environments: EnvironmentManager, actions: Sequence[str]) -> Trajectory:
        (found,) = play_scripted_episodes(
            lambda: Says(actions),
            environments,
            [EpisodeRequest(TASK, 5)],
            policy_version="0",
            context=context,
        )
        return found

    return played


@pytest.fixture
def play(play_in: PlayIn, environments: EnvironmentManager) -> Play:
    return partial(play_in, environments)


def test_a_success_is_what_it_would_have_been_without_its_detours(
    play: Play, environments: EnvironmentManager, context: ContextManager
) -> None:
    whole = play(["up", "stay", "down", "up", "stay", "up"])
    found = without_detours(whole, environments, context)
    assert found.trajectory == play(["up", "up"])
    assert found.kept == (0, 5)  # the four turns between are the longest block


def test_every_walk_of_six_turns_becomes_the_shortest(
    play: Play, environments: EnvironmentManager, context: ContextManager
) -> None:
    num_successes = 0
    for actions in itertools.product(["up", "down"], repeat=6):
        whole = play(actions)
        found = without_detours(whole, environments, context)
        num_successes += whole.success
        assert found.trajectory == (play(["up", "up"]) if whole.success else whole)
        if not whole.success:
            assert found.kept == tuple(range(len(whole.turns)))
    assert 10 < num_successes < 64


def test_what_pays_is_no_detour(
    play: Play, environments: EnvironmentManager, context: ContextManager
) -> None:
    whole = play(["up", "gift", "down", "up", "gift", "up"])
    found = without_detours(whole, environments, context)
    assert sorted(turn.action for turn in found.trajectory.turns) == ["gift", "up", "up"]
    assert found.trajectory.episode_return == whole.episode_return == 1.5


def test_a_long_episode_is_given_up_after_some_replays(
    play: Play,
    environments: EnvironmentManager,
    context: ContextManager,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(detours, "MAX_REPLAYS", 2)
    whole = play(["up", "stay", "down", "up", "stay", "up"])
    assert without_detours(whole, environments, context).trajectory == whole


def test_environments_are_given_back(
    play: Play, environments: EnvironmentManager, context: ContextManager
) -> None:
    whole = play(["up", "stay", "up"])
    first, _ = environments.start(TASK, seed=0)
    environments.release(first)
    without_detours(whole, environments, context)
    assert environments.start(TASK, seed=0)[0] is first


def test_turns_keep_their_weights_and_only_what_is_shorter_is_added(
    play: Play, environments: EnvironmentManager, context: ContextManager
) -> None:
    def of(actions: Sequence[str], *weights: float) -> WeightedEpisode | None:
        return shortened(WeightedEpisode(play(actions), weights), environments, context)

    short = WeightedEpisode(play(["up", "up"]), (0.5, 3.0))
    assert of(["up", "stay", "up"], 0.5, 2.0, 3.0) == short
    assert of(["up", "stay", "up"], 0.0, 2.0, 0.0) is None
    assert of(["up", "up"], 1.0, 1.0) is None
    assert of(["down"], *[1.0] * 9) is None


class Forgetful(Walk):
    """Every second walk begins one step further."""

    num_walks = itertools.count()

    def __init__(self, task: Task, seed: int) -> None:
        super().__init__(task, seed)
        self.place = next(self.num_walks) % 2


def test_an_episode_that_takes_another_course_stays_whole(
    play_in: PlayIn, context: ContextManager
) -> None:
    environments = make_walks(Forgetful)
    whole = play_in(environments, ["down", "up", "up", "up"])
    assert whole.success
    assert without_detours(whole, environments, context).trajectory == whole


@pytest.mark.parametrize(("num_retries", "fails"), [(1, False), (0, True)])
def test_an_environment_that_raises_is_tried_again_as_in_a_rollout(
    num_retries: int, fails: bool, play_in: PlayIn, context: ContextManager
) -> None:
    class Flaky(Walk):
        num_left = 1

        def play(self, text: str) -> Answer:
            if text == "stay" and whole and Flaky.num_left:
                Flaky.num_left -= 1
                raise OSError("the line is down")
            return super().play(text)

    environments, whole = make_walks(Flaky, num_retries=num_retries), None
    whole = play_in(environments, ["up", "stay", "up"])
    if fails:
        with pytest.raises(EnvironmentRaisedError, match="the line is down"):
            without_detours(whole, environments, context)
    else:
        found = without_detours(whole, environments, context)
        assert found.trajectory == play_in(environments, ["up", "up"])
