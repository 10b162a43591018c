"""Each promise of the contract finds what breaks it, and nothing in an environment that keeps it.

The broken ones are a frozen lake with one thing done wrong.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
import sqlite3
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from ragen_apo.environments import contract
from ragen_apo.environments.base import Reply, TextEnvironment, make_environment
from ragen_apo.environments.contract import (
    PROMISES,
    ContractError,
    Promise,
    check_environment,
    episodes_in_threads_are_as_one_by_one,
    policy_table,
)
from ragen_apo.environments.foreign import call_factory
from ragen_apo.environments.toolkit.scripted import MixedPolicy
from ragen_apo.errors import ConfigError, RagenApoError
from ragen_apo.types import Task

_CALLS = itertools.count()


def lake() -> TextEnvironment:
    options = {"slippery": False, "max_turns": 4, "num_train_tasks": 8, "num_test_tasks": 4}
    return make_environment("frozen_lake", options)


class Wrapped:
    """Does what the lake does; what breaks a promise is overridden."""

    def __init__(self) -> None:
        self.lake = lake()

    @property
    def properties(self) -> Any:
        return self.lake.properties

    def tasks(self, split: str) -> Sequence[Task]:
        return self.lake.tasks(split)

    def reset(self, task: Task, *, seed: int) -> tuple[str, dict[str, Any]]:
        return self.lake.reset(task, seed=seed)

    def step(self, action: str) -> tuple[Any, Any, Any, Any, Any]:
        return self.lake.step(action)

    def state_key(self) -> str:
        return self.lake.state_key()

    def scripted_policies(self) -> Mapping[str, Any]:
        return self.lake.scripted_policies()


class NamesTasksByHand(Wrapped):
    def tasks(self, split: str) -> Sequence[Task]:
        numbered = enumerate(self.lake.tasks(split))
        return [dataclasses.replace(task, task_id=str(number)) for number, task in numbered]


class HasAnotherName(Wrapped):
    @property
    def properties(self) -> Any:
        return dataclasses.replace(self.lake.properties, name="a b/c")


class ListsATaskTwice(Wrapped):
    def tasks(self, split: str) -> Sequence[Task]:
        return [*self.lake.tasks(split), self.lake.tasks(split)[0]]


class ListsOtherTasksEachTime(Wrapped):
    def tasks(self, split: str) -> Sequence[Task]:
        return self.lake.tasks(split)[next(_CALLS) % 3 :]


class PlaysTrainingTasksAsTests(Wrapped):
    def tasks(self, split: str) -> Sequence[Task]:
        return [dataclasses.replace(task, split=split) for task in self.lake.tasks("train")]


class HasOnlyTrainingTasks(Wrapped):
    @property
    def properties(self) -> Any:
        return dataclasses.replace(self.lake.properties, splits=("train",))


class HoldsOutUnseenTasks(Wrapped):
    """As ALFWorld's data has it."""

    @property
    def properties(self) -> Any:
        return dataclasses.replace(self.lake.properties, splits=("train", "all", "unseen"))

    def tasks(self, split: str) -> Sequence[Task]:
        names = {"unseen": "test", "all": "train"}
        tasks = self.lake.tasks(names.get(split, split))
        return [dataclasses.replace(task, split=split) for task in tasks]


class HoldsOutNothing(HoldsOutUnseenTasks):
    def tasks(self, split: str) -> Sequence[Task]:
        return [] if split == "unseen" else super().tasks(split)


class PlaysForeignTasks(Wrapped):
    def reset(self, task: Task, *, seed: int) -> tuple[str, dict[str, Any]]:
        known = task.environment == "frozen_lake"
        return self.lake.reset(task if known else self.tasks("train")[0], seed=seed)


class HasEverySplit(Wrapped):
    def tasks(self, split: str) -> Sequence[Task]:
        return self.lake.tasks(split) if split in ("train", "test") else ()


class LooksUpAnySplit(Wrapped):
    def tasks(self, split: str) -> Sequence[Task]:
        return {name: self.lake.tasks(name) for name in ("train", "test")}[split]


class CountsItsEpisodes(Wrapped):
    def reset(self, task: Task, *, seed: int) -> tuple[str, dict[str, Any]]:
        first, info = self.lake.reset(task, seed=seed)
        return f"{first}\nEpisode {next(_CALLS)}", info


class ShowsItsSeed(Wrapped):
    def reset(self, task: Task, *, seed: int) -> tuple[str, dict[str, Any]]:
        first, info = self.lake.reset(task, seed=seed)
        return f"{first}\nSeed {seed}", info


class SaysThatThereIsChance(Wrapped):
    @property
    def properties(self) -> Any:
        return dataclasses.replace(self.lake.properties, deterministic=False)


class RaisesAtLongTexts(Wrapped):
    def step(self, action: str) -> tuple[Any, Any, Any, Any, Any]:
        if len(action) > 1000:
            raise OverflowError("too long")
        return self.lake.step(action)


class RaisesBehindAnAction(Wrapped):
    """As a database does that takes the rest of a command for its query; its rules name none."""

    @property
    def properties(self) -> Any:
        return dataclasses.replace(self.lake.properties, rules="Walk to the goal.")

    def step(self, action: str) -> tuple[Any, Any, Any, Any, Any]:
        verb, _, rest = action.partition(" ")
        if verb in ("Up", "Down", "Left", "Right") and rest:
            rest.encode("utf-8")
        return self.lake.step(action)


class PaysText(Wrapped):
    def step(self, action: str) -> tuple[Any, Any, Any, Any, Any]:
        observation, reward, *rest = self.lake.step(action)
        return (observation, str(reward), *rest)


class TakesAnyTextForAnAction(Wrapped):
    def step(self, action: str) -> tuple[Any, Any, Any, Any, Any]:
        return (*self.lake.step(action)[:4], {"success": False})


class EndsAtOnce(Wrapped):
    def step(self, action: str) -> tuple[Any, Any, Any, Any, Any]:
        observation, reward, _, truncated, info = self.lake.step(action)
        return observation, reward, True, truncated, {**info, "success": False}


class NeverEnds(Wrapped):
    @property
    def properties(self) -> Any:
        return dataclasses.replace(self.lake.properties, max_turns=None)

    def step(self, action: str) -> tuple[Any, Any, Any, Any, Any]:
        observation, reward, *_, info = self.lake.step(action)
        return observation, reward, False, False, info


class LastsLongerThanItDeclares(Wrapped):
    @property
    def properties(self) -> Any:
        return dataclasses.replace(self.lake.properties, max_turns=3)


class ShowsALoneSurrogate(Wrapped):
    def reset(self, task: Task, *, seed: int) -> tuple[str, dict[str, Any]]:
        first, info = self.lake.reset(task, seed=seed)
        return f"{first} \ud83d", info


class BeginsWithADictionary(Wrapped):
    def reset(self, task: Task, *, seed: int) -> tuple[Any, dict[str, Any]]:
        first, info = self.lake.reset(task, seed=seed)
        return {"text": first}, info


class InstructsInBytes(Wrapped):
    @property
    def properties(self) -> Any:
        return dataclasses.replace(self.lake.properties, rules=b"go")


class FlagsANumber(Wrapped):
    def step(self, action: str) -> tuple[Any, Any, Any, Any, Any]:
        *answer, info = self.lake.step(action)
        return (*answer, {**info, "flags": 5})


class PaysTooMuch(Wrapped):
    def step(self, action: str) -> tuple[Any, Any, Any, Any, Any]:
        observation, reward, *rest = self.lake.step(action)
        return (observation, reward + 5.0, *rest)


class PaysTooMuchWithoutPolicies(PaysTooMuch):
    def scripted_policies(self) -> Mapping[str, Any]:
        return {}


class DoesNotSayHowItEnded(Wrapped):
    def step(self, action: str) -> tuple[Any, Any, Any, Any, Any]:
        *answer, info = self.lake.step(action)
        return (*answer, {key: value for key, value in info.items() if key != "success"})


class GetsTired(Wrapped):
    num_steps = 0

    def step(self, action: str) -> tuple[Any, Any, Any, Any, Any]:
        self.num_steps += 1
        observation, *rest = self.lake.step(action)
        return (f"{observation}\n{self.num_steps} steps so far", *rest)


class HoldsAFunction(Wrapped):
    def __init__(self) -> None:
        super().__init__()
        self.function = lambda: None


class HasOneState(Wrapped):
    def state_key(self) -> str:
        return "always"


class NamesStatesByATuple(Wrapped):
    def state_key(self) -> Any:
        return (self.lake.state_key(), 0)


class HasNoBaselines(Wrapped):
    def scripted_policies(self) -> Mapping[str, Any]:
        return {"oracle": self.lake.scripted_policies()["oracle"]}


class CannotReadTheEnd(Wrapped):
    def scripted_policies(self) -> Mapping[str, Any]:
        class Strict:
            def begin(self, task: Task, *, seed: int) -> None: ...

            def act(self, observation: str) -> Any:
                raise KeyError(observation)

        return {**self.lake.scripted_policies(), "strict": Strict}


class ChangesItsVersion(Wrapped):
    @property
    def properties(self) -> Any:
        return dataclasses.replace(self.lake.properties, version=str(next(_CALLS)))


class HasNoRules(Wrapped):
    @property
    def properties(self) -> Any:
        return dataclasses.replace(self.lake.properties, rules="")


BROKEN: Sequence[tuple[Promise, type[Wrapped], str]] = (
    (contract.tasks_are_named_by_their_content, NamesTasksByHand, "is not make_task's"),
    (
        contract.tasks_are_named_by_their_content,
        HasAnotherName,
        "is of the environment 'frozen_lake', and properties.name is 'a b/c'; expected the same",
    ),
    (contract.tasks_are_named_by_their_content, ListsATaskTwice, "twice"),
    (contract.tasks_are_named_by_their_content, ListsOtherTasksEachTime, "list other tasks"),
    (contract.training_tasks_are_no_test_tasks, PlaysTrainingTasksAsTests, "training task, too"),
    (contract.training_tasks_are_no_test_tasks, HasOnlyTrainingTasks, "no split but train"),
    (contract.training_tasks_are_no_test_tasks, HoldsOutNothing, "a training task, too"),
    (
        contract.foreign_tasks_and_splits_are_refused,
        PlaysForeignTasks,
        "reset with a task .* raised no error; .*ConfigError: .* task.environment is not",
    ),
    (
        contract.foreign_tasks_and_splits_are_refused,
        HasEverySplit,
        "tasks of an unknown split .*: raise one for a split that is none of properties.splits",
    ),
    (
        contract.foreign_tasks_and_splits_are_refused,
        LooksUpAnySplit,
        r"raised KeyError\('no such split'\) in .*; expected a ragen_apo.errors.ConfigError",
    ),
    (contract.equal_environments_write_equal_texts, CountsItsEpisodes, "differs"),
    (contract.seeds_matter_where_it_is_declared, ShowsItsSeed, "`deterministic` is declared"),
    (contract.seeds_matter_where_it_is_declared, SaysThatThereIsChance, "changes nothing"),
    (contract.any_text_is_answered, RaisesAtLongTexts, "OverflowError"),
    (contract.any_text_is_answered, PaysText, "the reward is '0.0'"),
    (contract.any_text_is_answered, RaisesBehindAnAction, r"'[\w| ]+ \\ud800' made step raise"),
    (
        contract.a_text_that_is_no_action_is_marked_and_ends_nothing,
        TakesAnyTextForAnAction,
        "invalid_action is not set",
    ),
    (contract.a_text_that_is_no_action_is_marked_and_ends_nothing, EndsAtOnce, "ended the episode"),
    (contract.every_episode_ends, NeverEnds, "not over after 1,000 turns. Set a turn limit"),
    (contract.every_episode_ends, LastsLongerThanItDeclares, "3 turns, which its properties"),
    (contract.answers_can_be_written_down, ShowsALoneSurrogate, "a lone surrogate stands in"),
    (contract.answers_can_be_written_down, BeginsWithADictionary, "is no text"),
    (contract.answers_can_be_written_down, InstructsInBytes, "b'go' is no text"),
    (contract.answers_can_be_written_down, NamesStatesByATuple, "state_key: .* is no text"),
    (contract.answers_can_be_written_down, FlagsANumber, r"info\['flags'\] is 5; expected a list"),
    (contract.returns_lie_in_the_declared_range, PaysTooMuch, "return_range is"),
    (contract.returns_lie_in_the_declared_range, PaysTooMuchWithoutPolicies, "'any text' in task"),
    (contract.returns_lie_in_the_declared_range, DoesNotSayHowItEnded, "has no `success`"),
    (contract.a_reset_leaves_nothing_behind, GetsTired, "begins otherwise"),
    (contract.equal_state_keys_mean_equal_futures, HasOneState, "in the state 'always' led to"),
    (contract.scripted_policies_are_there_and_read_anything, HasNoBaselines, "heuristic and no"),
    (contract.scripted_policies_are_there_and_read_anything, CannotReadTheEnd, "'strict' raised"),
    (contract.properties_do_not_change, ChangesItsVersion, "properties changed"),
    (contract.properties_do_not_change, HasNoRules, "`rules` is empty"),
)


@pytest.mark.parametrize(
    ("promise", "make", "message"), BROKEN, ids=[make.__name__ for _, make, _ in BROKEN]
)
def test_a_broken_promise_is_found(
    promise: Promise, make: Callable[[], TextEnvironment], message: str
) -> None:
    with pytest.raises(ContractError, match=message):
        promise(make)


class TakesSeedsOf32Bits(Wrapped):
    def reset(self, task: Task, *, seed: int) -> tuple[str, dict[str, Any]]:
        np.random.RandomState(seed)
        return self.lake.reset(task, seed=seed)


def test_seeds_are_as_large_as_those_of_runs() -> None:
    """`check` passed what raised in the first episode of a run."""
    (problem, *_) = filter(None, contract.check_environment(TakesSeedsOf32Bits).values())
    assert "Seed must be between 0 and 2**32 - 1" in problem


class ShowsItsSeedWithoutPolicies(ShowsItsSeed):
    def scripted_policies(self) -> Mapping[str, Any]:
        return {}


class BeginsAtRandomWithoutPolicies(Wrapped):
    """Also under equal seeds."""

    def scripted_policies(self) -> Mapping[str, Any]:
        return {}

    def reset(self, task: Task, *, seed: int) -> tuple[str, dict[str, Any]]:
        first, info = self.lake.reset(task, seed=seed)
        return f"{first}\n{next(_CALLS)}", info


def test_without_scripted_policies_the_seed_is_tried_with_a_text_that_is_no_action() -> None:
    seeds_matter = contract.seeds_matter_where_it_is_declared

    class Declares(ShowsItsSeedWithoutPolicies):
        @property
        def properties(self) -> Any:
            return dataclasses.replace(self.lake.properties, deterministic=False)

    class MayHaveChance(Declares):
        """Its first observation has none; whether its actions have cannot be told."""

        def reset(self, task: Task, *, seed: int) -> tuple[str, dict[str, Any]]:
            return self.lake.reset(task, seed=seed)

    seeds_matter(Declares)
    seeds_matter(MayHaveChance)
    with pytest.raises(ContractError, match="`deterministic` is declared"):
        seeds_matter(ShowsItsSeedWithoutPolicies)


def test_without_scripted_policies_an_opening_at_random_breaks_three_promises() -> None:
    found = check_environment(BeginsAtRandomWithoutPolicies)
    for promise in (
        "equal environments write equal texts",
        "seeds matter where it is declared",
        "a reset leaves nothing behind",
    ):
        assert found[promise], promise


def test_held_out_tasks_may_have_another_name() -> None:
    contract.training_tasks_are_no_test_tasks(HoldsOutUnseenTasks)


def test_every_promise_is_broken_by_some_environment_and_kept_by_the_lake() -> None:
    assert {promise for promise, _, _ in BROKEN} == set(PROMISES)
    assert set(check_environment(lake).values()) == {None}


def test_a_check_closes_what_it_has_made_and_says_where_that_raises() -> None:
    held: list[Any] = []

    class Holds(Wrapped):
        def __init__(self) -> None:
            super().__init__()
            held.append(self)
            assert len(held) < 30, "they are closed at the end only"

        def close(self) -> None:
            held.remove(self)

    class Stuck(Wrapped):
        def close(self) -> None:
            raise OSError("gone")

    assert set(check_environment(Holds).values()) == {None}
    assert held == []
    (problem,) = check_environment(Stuck).values()
    assert problem
    assert problem.startswith(f"raised OSError (gone) in {__file__}, line ")


def test_a_check_goes_on_after_an_environment_that_raises() -> None:
    class Raising(Wrapped):
        def reset(self, task: Task, *, seed: int) -> tuple[str, dict[str, Any]]:
            if task.environment != "frozen_lake":
                raise ConfigError("no such task")
            raise ZeroDivisionError

    found = check_environment(Raising)
    raised = str(found["equal environments write equal texts"])
    assert raised.startswith(f"raised ZeroDivisionError() in {__file__}, line ")
    assert found["tasks are named by their content"] is None


class ExitsPolicy:
    def begin(self, task: Task, *, seed: int) -> None: ...

    def act(self, observation: str) -> Any:
        sys.exit(0)


def exits(*_: Any, **__: Any) -> Any:
    sys.exit(0)


@pytest.mark.parametrize("member", ["tasks", "reset", "step", "state_key", "scripted_policies"])
def test_an_environment_that_exits_with_status_0_is_found_and_does_not_end_the_check(
    member: str,
) -> None:
    found = check_environment(type("Exits", (Wrapped,), {member: exits}))
    assert len(found) == len(PROMISES)
    assert any("SystemExit(0)" in str(problem) for problem in found.values())


def test_a_scripted_policy_that_exits_is_found() -> None:
    class HasOneThatExits(Wrapped):
        def scripted_policies(self) -> Mapping[str, Any]:
            return {**self.lake.scripted_policies(), "leaves": ExitsPolicy}

    found = check_environment(HasOneThatExits)
    assert found["scripted policies are there and read anything"] is not None
    assert "'leaves' raised SystemExit(0)" in str(found.values())
    with pytest.raises(ContractError, match=r"'leaves' raised SystemExit\(0\)"):
        policy_table(HasOneThatExits(), num_tasks=1)


def test_an_environment_whose_factory_exits_cannot_be_made_and_is_no_success() -> None:
    found = check_environment(exits)
    (problem,) = found.values()
    assert list(found) == ["the environment can be made"]
    assert str(problem).startswith(f"raised SystemExit(0) in {__file__}, line ")


def test_an_exception_of_100_000_characters_is_told_in_bounded_length() -> None:
    class Shouts(Wrapped):
        def step(self, action: str) -> tuple[Any, Any, Any, Any, Any]:
            raise ValueError("x" * 100_000)

    problems = [problem for problem in check_environment(Shouts).values() if problem]
    assert all("ValueError('xxx" in problem for problem in problems)
    assert max(map(len, problems)) < 500


def test_texts_of_100_000_characters_that_differ_are_told_in_bounded_length() -> None:
    class Rambles(CountsItsEpisodes):
        def step(self, action: str) -> tuple[Any, Any, Any, Any, Any]:
            observation, *rest = self.lake.step(action)
            return (f"{next(_CALLS)}{observation}{'x' * 100_000}", *rest)

    problem = check_environment(Rambles)["equal environments write equal texts"]
    assert problem is not None
    assert len(problem) < 5_000


def test_an_observation_that_is_no_text_is_named_before_a_policy_reads_it() -> None:
    """Otherwise nine promises blame the scripted policies, which expect text."""
    problems = {str(problem) for problem in check_environment(BeginsWithADictionary).values()}
    assert all("is no text" in problem for problem in problems - {"None"})
    assert not any("AttributeError" in problem or "TypeError" in problem for problem in problems)


def test_what_nobody_reads_of_info_may_be_anything() -> None:
    class TellsMore(Wrapped):
        def reset(self, task: Task, *, seed: int) -> tuple[str, dict[str, Any]]:
            first, info = self.lake.reset(task, seed=seed)
            return first, {**info, "episode": next(_CALLS)}

        def step(self, action: str) -> tuple[Any, Any, Any, Any, Any]:
            *answer, info = self.lake.step(action)
            return (*answer, {**info, "connection": object(), "seconds": next(_CALLS)})

    assert set(check_environment(TellsMore).values()) == {None}


def test_truth_values_of_numpy_are_truth_values() -> None:
    class Compares(Wrapped):
        def step(self, action: str) -> tuple[Any, Any, Any, Any, Any]:
            *answer, info = self.lake.step(action)
            truths = {"success", "invalid_action"} & info.keys()
            return (*answer, {**info, **{key: np.bool_(info[key]) for key in truths}})

    assert set(check_environment(Compares).values()) == {None}
    assert policy_table(Compares(), num_tasks=4)["oracle"].success_rate == 1.0


def test_a_metric_may_count_what_the_state_does_not_keep() -> None:
    class CountsItsSteps(Wrapped):
        num_steps = 0

        def step(self, action: str) -> tuple[Any, Any, Any, Any, Any]:
            *answer, info = self.lake.step(action)
            self.num_steps += 1
            return (*answer, {**info, "metrics": {"num_steps": self.num_steps}})

        def reset(self, task: Task, *, seed: int) -> tuple[str, dict[str, Any]]:
            self.num_steps = 0
            return self.lake.reset(task, seed=seed)

    # Steps after the end count, and the state stays what it was.
    assert set(check_environment(CountsItsSteps).values()) == {None}


def test_rewards_in_float32_lie_in_a_range_of_decimals() -> None:
    class PaysATenth(Wrapped):
        @property
        def properties(self) -> Any:
            return dataclasses.replace(self.lake.properties, return_range=(0.0, 0.1))

        def step(self, action: str) -> tuple[Any, Any, Any, Any, Any]:
            observation, _, terminated, truncated, info = self.lake.step(action)
            reward = np.float32(0.1 if info.get("success") else 0.0)
            return observation, reward, terminated, truncated, info

    assert float(np.float32(0.1)) > 0.1 + 1e-9
    contract.returns_lie_in_the_declared_range(PaysATenth)


def test_what_cannot_be_pickled_breaks_no_promise() -> None:
    assert set(check_environment(HoldsAFunction).values()) == {None}


class HoldsAConnection(Wrapped):
    """One that sqlite3 lets only the thread use that made it."""

    def reset(self, task: Task, *, seed: int) -> tuple[str, dict[str, Any]]:
        self.connection = sqlite3.connect(":memory:")
        return super().reset(task, seed=seed)

    def step(self, action: str) -> tuple[Any, Any, Any, Any, Any]:
        self.connection.execute("SELECT 1")
        return super().step(action)


def test_an_environment_that_belongs_to_one_thread_is_found_in_threads() -> None:
    assert set(check_environment(HoldsAConnection).values()) == {None}
    with pytest.raises(ContractError, match=r"ProgrammingError\(.*num_environment_workers"):
        episodes_in_threads_are_as_one_by_one(HoldsAConnection)


def test_environments_that_share_what_they_change_are_found_in_threads() -> None:
    shared, both = lake(), threading.Barrier(2, timeout=60)

    class SharesTheLake(Wrapped):
        def __init__(self) -> None:
            self.lake = shared

        def reset(self, task: Task, *, seed: int) -> tuple[str, dict[str, Any]]:
            answer = super().reset(task, seed=seed)
            if threading.current_thread() is not threading.main_thread():
                both.wait()  # so two have begun before one of them acts
            return answer

    with pytest.raises(ContractError, match=r"in task \w+ differs beside other threads"):
        episodes_in_threads_are_as_one_by_one(SharesTheLake)


def test_the_table_has_means_over_tasks_of_every_kind_where_one_comes_after_another() -> None:
    played: list[Task] = []

    class Plays(Wrapped):
        def reset(self, task: Task, *, seed: int) -> tuple[str, dict[str, Any]]:
            played.append(task)
            return super().reset(task, seed=seed)

    environment = Plays()
    tasks = environment.tasks("train")
    policy_table(environment, num_tasks=3)
    assert played[:3] == [tasks[0], tasks[2], tasks[5]]  # 8 / 3 apart
    played.clear()
    policy_table(environment, num_tasks=100)
    assert played[:8] == list(tasks)


class Drawing:
    """Notes the seed with which it draws."""

    seeds: set[int]

    def begin(self, task: Task, *, seed: int) -> None:
        self.seeds.add(seed)

    def act(self, observation: str) -> Any:
        return Reply(thought="", action="Up")


def test_a_policy_draws_otherwise_in_each_task_and_alike_in_each_check() -> None:
    class Draws(Wrapped):
        def scripted_policies(self) -> Mapping[str, Any]:
            return {"drawing": Drawing}

    found = []
    for _ in range(2):
        Drawing.seeds = set()
        played = list(contract.episodes(Draws))
        assert len(Drawing.seeds) == len(played) == 5 + 4
        found.append(Drawing.seeds)
    assert found[0] == found[1]


class SaysText(Drawing):
    def begin(self, task: Task, *, seed: int) -> None: ...

    def act(self, observation: str) -> Any:
        return "Up"


class BeginsWithoutSeed(Drawing):
    def begin(self, task: Task) -> None: ...  # pyright: ignore[reportIncompatibleMethodOverride]


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (SaysText, "the scripted policy SaysText: act returned str; expected a Reply, such as"),
        (BeginsWithoutSeed, r"BeginsWithoutSeed: begin .*'seed'.*; expected def begin\(self, task"),
        (Drawing(), "'mine' is an object of Drawing; expected what makes one .*the class itself"),
    ],
    ids=["reply", "seed", "object"],
)
@pytest.mark.parametrize("is_mixed", [False, True])
def test_a_policy_that_does_not_fit_is_named(policy: Any, message: str, is_mixed: bool) -> None:
    def mixed() -> MixedPolicy:
        return MixedPolicy(policy, policy, good_share=0.5)

    class Has(Wrapped):
        def scripted_policies(self) -> Mapping[str, Any]:
            return {"mine": mixed if is_mixed and callable(policy) else policy}

    found = check_environment(Has)
    assert re.search(message, str(found["every episode ends"]))
    assert "ragen_apo" not in str(found.values())
    with pytest.raises(RagenApoError, match=message):
        policy_table(Has(), num_tasks=1)


def test_the_table_has_means_over_the_tasks() -> None:
    table = policy_table(lake(), num_tasks=8)
    assert table["oracle"].success_rate == 1.0
    assert table["oracle"].episode_return == 1.0
    assert 1 <= table["oracle"].num_turns <= 4
    assert table["random"].success_rate < 0.5


class ActsWithoutReading(Drawing):
    def act(self) -> Any: ...  # pyright: ignore[reportIncompatibleMethodOverride]


class NeedsAWord(Drawing):
    def __init__(self, word: str) -> None: ...


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (
            ActsWithoutReading,
            r"ActsWithoutReading: act does not take .*; expected def act\(self, ob",
        ),
        (NeedsAWord, r"'mine' cannot be made \(.*'word'\); expected a class or function without"),
        (lambda observation: "Up", r"'mine' cannot be made \(.*'observation'\); expected a class"),
        (lambda: "Up", "'mine' is an object of the type str; expected a class or function without"),
    ],
    ids=["act", "class", "function", "text"],
)
def test_what_makes_no_policy_is_named_once(policy: Any, message: str) -> None:
    """Each promise told of a line of ours, seven times."""

    class Has(Wrapped):
        def scripted_policies(self) -> Mapping[str, Any]:
            return {"mine": policy}

    problems = {problem for problem in check_environment(Has).values() if problem}
    (told,) = (problem for problem in problems if re.search(message, problem))
    assert "ragen_apo/" not in told


def test_a_method_may_be_wrapped() -> None:
    def with_generator(reset: Any) -> Any:
        @functools.wraps(reset)
        def wrapped(self: Any, task: Task, *, seed: int) -> Any:
            return reset(self, task, rng=seed)

        return wrapped

    class Decorated(Wrapped):
        @with_generator
        def reset(self, task: Task, *, rng: int) -> tuple[str, dict[str, Any]]:
            return self.lake.reset(task, seed=rng)

    assert call_factory("mine", Decorated, {}).properties.name == "frozen_lake"  # pyright: ignore[reportAttributeAccessIssue]
