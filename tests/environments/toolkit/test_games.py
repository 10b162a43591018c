"""What `GameEnvironment` adds to a game."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from ragen_apo.config.named_code import provide
from ragen_apo.environments.base import EnvironmentProperties, close_environment, opened_environment
from ragen_apo.environments.mixture import MixtureEnvironment
from ragen_apo.environments.toolkit.game import Answer, GameEnvironment
from ragen_apo.errors import ConfigError, EnvironmentFaultError
from ragen_apo.types import Task
from tests import factories

PROPERTIES = EnvironmentProperties(
    name="held", version="1", reward_version="1", deterministic=True, return_range=(0.0, 1.0),
    splits=("train",), rules="Go.",
)  # fmt: skip
TASK = factories.task("go", environment="held")


class Held:
    """Holds a number until it is closed."""

    held: list[int]

    def __init__(self, task: Task, seed: int) -> None:
        if seed < 0:
            raise ValueError("no such game")
        assert not self.held, "the game before it still holds what this one needs"
        self.seed = seed
        self.held.append(seed)

    def first_observation(self) -> str:
        return "begin"

    def play(self, text: str) -> Answer:
        return Answer("gone", metrics={"seed": self.seed})

    def key(self) -> str:
        return ""

    def close(self) -> None:
        self.held.remove(self.seed)


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> GameEnvironment:
    monkeypatch.setattr(Held, "held", [], raising=False)
    return GameEnvironment(
        properties=PROPERTIES, tasks={"train": [TASK]}, start=Held, policies={}, max_turns=3
    )


def test_a_game_is_closed_before_the_next_and_at_the_end_and_once(
    environment: GameEnvironment,
) -> None:
    for seed in (3, 4):
        environment.reset(TASK, seed=seed)
        assert Held.held == [seed]
    with pytest.raises(ConfigError, match="cannot set up task"):
        environment.reset(TASK, seed=-1)
    assert Held.held == []
    environment.reset(TASK, seed=5)
    for _ in range(2):
        close_environment(environment)
        assert Held.held == []
    with pytest.raises(RuntimeError, match="has no episode"):
        environment.step("go")


def test_a_task_of_another_environment_is_refused_whatever_the_game_reads(
    environment: GameEnvironment,
) -> None:
    other = factories.task("go", environment="elsewhere")
    with pytest.raises(
        ConfigError, match=rf"held .* task {other.task_id}, .*'elsewhere'; .*'held'"
    ):
        environment.reset(other, seed=1)
    assert Held.held == []


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            {"return_range": (1.0, 0.0)},
            r"'held': return_range is \(1.0, 0.0\); expected a tuple of two",
        ),
        ({"return_range": (0.0, math.inf)}, "two finite numbers, the lowest"),
        ({"return_range": (0.0, math.nan)}, "two finite numbers"),
        ({"return_range": (0.0, 1.0, 2.0)}, "two finite numbers"),
        ({"return_range": 1.0}, "return_range is 1.0; expected a tuple of two finite numbers"),
        ({"max_turns": 0}, "'held': max_turns is 0; expected a whole number from 1"),
        ({"max_turns": 2.5}, "max_turns is 2.5"),
    ],
)
def test_bounds_that_cannot_be_are_refused_where_they_are_declared(
    wrong: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(PROPERTIES, **wrong)


def test_a_game_of_no_turns_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_turns is 0; expected a whole number from 1"):
        GameEnvironment(
            properties=PROPERTIES, tasks={"train": [TASK]}, start=Held, policies={}, max_turns=0
        )


class AnswersWithText(Held):
    def play(self, text: str) -> Any:
        return "gone"


class HasNoKey:
    def __init__(self, task: Task, seed: int) -> None: ...

    def first_observation(self) -> str:
        return "begin"

    def play(self, text: str) -> Answer:
        return Answer("gone")


class TakesNoSeed(HasNoKey):
    def __init__(self, task: Task) -> None: ...


@pytest.mark.parametrize(
    ("start", "message"),
    [
        (AnswersWithText, r"held: AnswersWithText.play returned str; expected an Answer, such"),
        (HasNoKey, "held: the game HasNoKey has no key; expected the methods first_observation"),
        (TakesNoSeed, r"start, TakesNoSeed, cannot be called .*; expected start\(task, seed\)"),
        (lambda task, seed: None, "the game NoneType has no first_observation, no play, no key"),
    ],
    ids=["answer", "key", "seed", "none"],
)
@pytest.mark.usefixtures("environment")
def test_a_game_that_does_not_fit_is_named(start: Any, message: str) -> None:
    environment = GameEnvironment(
        properties=PROPERTIES, tasks={"train": [TASK]}, start=start, policies={}, max_turns=3
    )

    def played() -> None:
        environment.reset(TASK, seed=1)
        environment.step("go")

    with pytest.raises(EnvironmentFaultError, match=message):
        played()
    environment.close()


def test_a_refused_reset_leaves_no_episode_to_go_on_with() -> None:
    class Free(Held):
        close = None  # pyright: ignore[reportAssignmentType]

        def __init__(self, task: Task, seed: int) -> None:
            self.held = []
            super().__init__(task, seed)

    environment = GameEnvironment(
        properties=PROPERTIES, tasks={"train": [TASK]}, start=Free, policies={}, max_turns=3
    )
    environment.reset(TASK, seed=1)
    environment.step("go")
    with pytest.raises(ConfigError, match="cannot set up task"):
        environment.reset(TASK, seed=-1)
    assert environment.state_key() == "none"
    with pytest.raises(RuntimeError, match="reset"):
        environment.step("go")


def test_what_a_game_measures_is_in_info(environment: GameEnvironment) -> None:
    environment.reset(TASK, seed=7)
    assert environment.step("go")[4] == {"metrics": {"seed": 7}}


@pytest.mark.usefixtures("environment")
def test_what_a_subclass_closes_stays_open_from_game_to_game() -> None:
    class Holds(GameEnvironment):
        num_closed = 0

        def close(self) -> None:
            self.num_closed += 1
            super().close()

    environment = Holds(
        properties=PROPERTIES, tasks={"train": [TASK]}, start=Held, policies={}, max_turns=3
    )
    for seed in (1, 2):
        environment.reset(TASK, seed=seed)
    assert environment.num_closed == 0
    close_environment(environment)
    assert (environment.num_closed, Held.held) == (1, [])


def test_a_close_that_raises_is_named_and_hides_no_other_failure() -> None:
    class Stuck(GameEnvironment):
        def close(self) -> None:
            raise PermissionError(13, "Permission denied", "/sandbox")

    def make() -> GameEnvironment:
        return Stuck(
            properties=PROPERTIES, tasks={"train": [TASK]}, start=Held, policies={}, max_turns=3
        )

    def use(split: str) -> None:
        with opened_environment(make, {}) as environment:
            environment.tasks(split)

    with pytest.raises(EnvironmentFaultError, match="'held': closing it raised PermissionError"):
        use("train")
    with pytest.raises(ConfigError, match="no split 'other'"):
        use("other")


def test_a_mixture_that_cannot_be_made_closes_the_parts_that_were(
    environment: GameEnvironment,
) -> None:
    provide("held.py:make_held", lambda **_: environment)
    environment.reset(TASK, seed=1)
    with pytest.raises(ConfigError, match=r"parts\.frozen_lake.*size"):
        MixtureEnvironment(parts={"a": {"name": "held.py:make_held"}, "frozen_lake": {"size": -1}})
    assert Held.held == []


def test_a_mixture_closes_its_parts(environment: GameEnvironment) -> None:
    provide("held.py:make_held", lambda **_: environment)
    lake = {"num_train_tasks": 4, "num_test_tasks": 2}
    mixture = MixtureEnvironment(parts={"frozen_lake": lake, "held": {"name": "held.py:make_held"}})
    environment.reset(TASK, seed=1)
    mixture.close()
    assert Held.held == []
