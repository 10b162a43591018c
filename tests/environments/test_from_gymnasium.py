"""Environments with Gymnasium's methods as text environments, and docs/existing_environments.md."""

import json
import random
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

from ragen_apo.config import load_config
from ragen_apo.environments.base import TextEnvironment, close_environment, make_environment
from ragen_apo.environments.contract import check_environment
from ragen_apo.environments.toolkit.from_gymnasium import from_gymnasium
from ragen_apo.errors import ConfigError, EnvironmentFaultError
from ragen_apo.files import read_json_lines
from tests import factories

PAGE = Path(__file__).resolve().parents[2] / "docs" / "existing_environments.md"


def block(language: str) -> str:
    """The first block of the page in this language."""
    found = re.search(rf"^```{language}\n(.*?)^```", PAGE.read_text("utf-8"), re.M | re.S)
    assert found is not None
    return found[1]


class Dice:
    """Two generators of everybody's: the sum of four throws is to be named."""

    def __init__(self) -> None:
        self.num_closed = 0

    def reset(self, *, seed: int) -> tuple[Any, dict[str, Any]]:
        self.seed, self.thrown = seed, [random.randint(1, 6)]
        return {"thrown": self.thrown}, {}

    def step(self, action: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        if action == "stop":
            return {"thrown": self.thrown}, np.float32(0), False, True, {}
        self.thrown = [*self.thrown, random.randint(1, 6), int(np.random.randint(1, 7))]  # noqa: NPY002
        is_over = str(action) == str(sum(self.thrown))
        info = {"named": action, "odd": not str(action).isdecimal()}
        return {"thrown": self.thrown}, np.float32(is_over), np.bool_(is_over), False, info

    def close(self) -> None:
        self.num_closed += 1


def make_dice(**options: Any) -> TextEnvironment:
    given: dict[str, Any] = {
        "make": Dice,
        "name": "dice",
        "version": "1",
        "rules": "Name the sum of the throws.",
        "instruction": "Name the sum.",
        "splits": {"train": range(5), "test": range(5, 8)},
        "max_turns": 4,
        "return_range": (0.0, 1.0),
        "is_success": lambda reward, info: reward == 1,
    }
    return from_gymnasium(**{**given, **options})


def play(environment: TextEnvironment, texts: Sequence[str], task: int = 0) -> list[Any]:
    first = environment.reset(environment.tasks("train")[task], seed=0)
    return [first, *(environment.step(text) for text in texts)]


@pytest.mark.slow
def test_the_environment_keeps_every_promise_but_what_its_maker_left_out() -> None:
    found = check_environment(make_dice)
    assert {promise for promise, problems in found.items() if problems} == {
        "a text that is no action is marked and ends nothing",
        "scripted policies are there and read anything",
    }
    is_invalid = {"is_invalid": lambda reward, info: info.get("odd", False)}
    marked = check_environment(lambda: make_dice(**is_invalid))
    assert not marked["a text that is no action is marked and ends nothing"]


def test_a_task_has_the_same_draws_every_time_and_another_task_others() -> None:
    one, other = make_dice(), make_dice()
    texts = ["1", "2", "3"]
    alone = play(one, texts)
    assert play(one, texts) == alone
    assert play(one, texts, task=1) != alone
    # Side by side, as episodes of a rollout are.
    firsts = [each.reset(each.tasks("train")[0], seed=0) for each in (one, other)]
    steps = [(one.step(text), other.step(text)) for text in texts]
    assert firsts == [alone[0]] * 2
    assert steps == [(step, step) for step in alone[1:]]


def test_what_a_time_limit_ends_may_be_a_success() -> None:
    """As in CartPole, which is to stand until then."""
    stopped = play(make_dice(is_success=lambda reward, info: True), ["stop"])[1]
    assert stopped[2:] == (False, True, {"success": True})
    at_our_limit = play(make_dice(is_success=lambda reward, info: True), ["no"] * 4)[-1]
    assert at_our_limit[3:] == (True, {"success": False})


class WithoutSeed(Dice):
    def reset(self) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return {}, {}


class Lists(Dice):
    def reset(self, *, seed: int) -> Any:
        return list(super().reset(seed=seed))


class Faulty(Dice):
    def step(self, action: Any) -> Any:
        return action + None


def test_lists_are_read_and_faults_within_are_not_blamed_on_the_form() -> None:
    assert play(make_dice(make=Lists), ["1"]) == play(make_dice(), ["1"])
    with pytest.raises(TypeError, match="NoneType"):
        play(make_dice(make=Faulty), ["1"])


class Flaky(Dice):
    """Its service answers a page of HTML now and then."""

    num_asked = 0

    def reset(self, *, seed: int) -> tuple[Any, dict[str, Any]]:
        Flaky.num_asked += 1
        if Flaky.num_asked % 2:
            json.loads("<html>502</html>")
        return super().reset(seed=seed)


def test_a_reset_that_raises_is_no_wrong_task_and_is_tried_again() -> None:
    environment = make_dice(make=Flaky)
    with pytest.raises(json.JSONDecodeError):
        environment.reset(environment.tasks("train")[0], seed=0)
    assert environment.state_key() == "none"
    environment.reset(environment.tasks("train")[0], seed=0)
    with pytest.raises(json.JSONDecodeError):
        environment.reset(environment.tasks("train")[1], seed=0)
    assert environment.state_key() == "none", "the episode before cannot be gone on with"
    with pytest.raises(ConfigError, match="cannot set up task"):
        environment.reset(factories.task("throw"), seed=0)


def test_an_environment_may_play_another_one() -> None:
    """Both borrow the global generators."""

    class Outer(Dice):
        def reset(self, *, seed: int) -> tuple[Any, dict[str, Any]]:
            inner = make_dice()
            inner.reset(inner.tasks("train")[0], seed=0)
            return super().reset(seed=seed)

    with ThreadPoolExecutor(1) as pool:
        pool.submit(play, make_dice(make=Outer), ["1"]).result(timeout=30)


class OfFourValues(Dice):
    def step(self, action: Any) -> Any:
        return super().step(action)[:4]


class OfOneValue(Dice):
    def reset(self, *, seed: int) -> Any:
        return "begin"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (WithoutSeed, r"WithoutSeed.reset\(seed=...\) raised TypeError.*'seed'.*observation, info"),
        (OfOneValue, r"OfOneValue.reset\(seed=...\) returned str; expected observation, info"),
        (OfFourValues, r"step\(action\) returned 4 values; expected observation, reward, termin"),
    ],
)
def test_methods_of_another_form_are_named_with_what_they_have_to_return(
    make: type[Dice], message: str
) -> None:
    with pytest.raises(EnvironmentFaultError, match=message):
        play(make_dice(make=make), ["1"])


class Drawn(Dice):
    """Draws when it is made, as environments do that play an episode then."""

    def __init__(self) -> None:
        super().__init__()
        self.number = random.random()

    def reset(self, *, seed: int) -> tuple[Any, dict[str, Any]]:
        observation, info = super().reset(seed=seed)
        return {**observation, "number": self.number}, info


def test_what_is_drawn_when_it_is_made_changes_no_episode() -> None:
    one, other = (make_dice(make=Drawn) for _ in range(2))
    first = play(one, ["1", "2"])
    assert play(one, ["1", "2"]) == first, "the first episode, and a later one"
    play(other, ["1"], task=1)
    assert play(other, ["1", "2"]) == first, "in an environment that has begun with another task"


def test_the_global_generators_of_others_are_as_they_were() -> None:
    random.seed(3)
    np.random.seed(3)  # noqa: NPY002
    environment = make_dice()
    expected = random.Random(3).random(), np.random.RandomState(3).random()
    play(environment, ["1", "2"])
    assert (random.random(), np.random.random()) == expected  # noqa: NPY002


def test_without_generators_of_their_own_episodes_share_those_of_the_process() -> None:
    one, other = (make_dice(own_generators=False) for _ in range(2))
    alone = play(one, ["1", "2"])
    one.reset(one.tasks("train")[0], seed=0)
    other.reset(other.tasks("train")[0], seed=0)
    assert [one.step("1"), other.step("1"), one.step("2")][2] != alone[2]


def test_an_episode_says_how_it_ended() -> None:
    environment = make_dice()
    (first, _), second = play(environment, ["0"])
    thrown = eval(second[0])["thrown"]
    assert first.startswith("TASK: Name the sum.\n{'thrown': [")
    *_, (observation, reward, terminated, truncated, info) = play(environment, [str(sum(thrown))])
    assert observation == f"{{'thrown': {thrown}}}"
    assert type(reward) is float and type(terminated) is bool
    assert (reward, terminated, truncated, info) == (1.0, True, False, {"success": True})
    assert play(environment, ["stop"])[-1][1:] == (0.0, False, True, {"success": False})
    assert play(environment, ["0"] * 4)[-1][2:4] == (False, True), "the turn limit"


def test_actions_with_names_are_numbers_and_other_texts_are_not_passed_on() -> None:
    environment = make_dice(actions=("Low", "high"))
    assert set(environment.scripted_policies()) == {"random", "teacher"}
    (_, *steps) = play(environment, [" HIGH ", "2", ""])
    assert steps[0][4] == {} and steps[0][0] != steps[1][0]
    for observation, *_, info in steps[1:]:
        assert observation == "Invalid action. Use one of: Low, high."
        assert info == {"invalid_action": True}
    before = environment.state_key()
    assert environment.step("low")[2:4] == (False, True)
    assert environment.state_key() != before


def test_it_is_made_once_and_closed_once() -> None:
    made: list[Dice] = []
    environment = make_dice(make=lambda: made.append(Dice()) or made[-1])
    assert made == []
    for task in (0, 1, 0):
        play(environment, ["1"], task=task)
    for _ in range(2):
        close_environment(environment)
    assert [each.num_closed for each in made] == [1]
    play(environment, ["1"])
    assert len(made) == 2, "another one after the end"


def test_seeds_that_two_splits_share_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"splits: train and test have seeds in common, such as 4"
    ):
        make_dice(splits={"train": range(5), "test": range(4, 8)})


def test_seeds_are_whole_numbers_also_those_of_numpy() -> None:
    splits = {"train": np.arange(3), "test": [np.int64(7)]}
    assert [task.payload for task in make_dice(splits=splits).tasks("train")] == [
        {"seed": 0},
        {"seed": 1},
        {"seed": 2},
    ]
    with pytest.raises(TypeError, match="str"):
        make_dice(splits={"train": ["one"], "test": [7]})


def test_each_action_has_a_name_of_its_own() -> None:
    with pytest.raises(ConfigError, match=r"actions: two have the same name .* got Low, low "):
        make_dice(actions=("Low", "low "))
    assert play(make_dice(actions=("low ", "high")), ["low"])[-1][4] == {}


# The page


@pytest.fixture
def blackjack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "blackjack.py").write_text(block("python"), encoding="utf-8")
    (tmp_path / "blackjack.yaml").write_text(block("yaml"), encoding="utf-8")
    return tmp_path / "blackjack.yaml"


@pytest.mark.slow
def test_the_blackjack_of_the_page_keeps_every_promise_and_is_gymnasiums(blackjack: Path) -> None:
    name = "./blackjack.py:make_blackjack"
    found = check_environment(lambda: make_environment(name, {}))
    assert [problems for problems in found.values() if problems] == []
    environment, theirs = make_environment(name, {}), gymnasium.make("Blackjack-v1")
    for task in environment.tasks("test")[:50]:
        first, _ = environment.reset(task, seed=0)
        (total, dealer, _), _ = theirs.reset(seed=task.payload["seed"])
        assert f"You hold {total}" in first and f"The dealer shows {dealer}." in first
        for number, action in enumerate(("hit", "stick")):
            expected, got = theirs.step(1 - number), environment.step(action)
            assert got[1:3] == expected[1:3]
            if expected[2]:
                assert got[4]["success"] == (float(expected[1]) > 0)
                break


@pytest.mark.slow
def test_the_configuration_of_the_page_trains(blackjack: Path, tmp_path: Path) -> None:
    from tests import factories

    code = blackjack.with_suffix(".py")
    code.write_text(code.read_text(encoding="utf-8").replace("range(10_000)", "range(50)"))
    short = [
        "--warm_start.demonstrations.num_steps=2",
        "--training.max_tasks=8",
        "--training.tasks_per_step=8",
        "--training.max_steps=1",
        "--evaluation.num_episodes=20",
        "--machine.num_threads=1",
    ]
    run = factories.run(load_config(blackjack, short), tmp_path / "run")
    assert [row["num_episodes"] for row in read_json_lines(run.metrics)] == [8]


@pytest.mark.parametrize("names", [("left",), ("left", "right", "up")])
def test_a_discrete_space_has_as_many_actions_as_there_are_names(names: Sequence[str]) -> None:
    class Turns(Dice):
        action_space = gymnasium.spaces.Discrete(2)

    environment = make_dice(make=Turns, actions=names)
    message = rf"got {len(names)} names?, .* of Turns is Discrete\(2\); expected one for each"
    for _ in range(2):  # it was not kept
        with pytest.raises(EnvironmentFaultError, match=message):
            play(environment, ["left"])
    assert play(make_dice(make=Turns, actions=("left", "right")), ["left"])
    assert play(make_dice(make=Turns), ["left"])  # texts, which are no numbers of actions


def test_numbers_of_actions_begin_at_0_and_what_is_refused_is_closed() -> None:
    closed = []

    class Shifted(Dice):
        action_space = gymnasium.spaces.Discrete(3, start=-1)

        def close(self) -> None:
            closed.append(self)

    with pytest.raises(EnvironmentFaultError, match="Numbers begin at 0 here: shift them"):
        play(make_dice(make=Shifted, actions=("left", "stay", "right")), ["left"])
    assert len(closed) == 1


def test_an_object_in_the_place_of_what_makes_one_is_refused() -> None:
    with pytest.raises(ConfigError, match="dice, make: got an object of Dice; .*without calling"):
        make_dice(make=Dice())
    with pytest.raises(ConfigError, match=r"lambda: gymnasium\.make\('FrozenLake-v1'\)"):
        make_dice(make="FrozenLake-v1")
