"""The contract of environments: promises, as functions that look for a violation.

A promise takes a factory of new, equal environments and raises `ContractError` with a violation.
`check_environment` tries all `PROMISES`. `policy_table` gives the results of the scripted policies.
`ragen-apo check NAME` does both for any environment, and the tests do so for the built-in ones.
docs/adding_an_environment.md has the reason for each promise.

Only a few tasks are played, with the scripted policies and with odd texts. So an environment
without findings may still break a promise.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from ragen_apo.config.named_code import FOREIGN_FAILURES
from ragen_apo.environments.answers import (
    TRUTHS_OF_INFO,
    endlessness,
    problem_with_reset,
    problem_with_step,
    problem_with_text,
    turn_limit,
)
from ragen_apo.environments.base import (
    Reply,
    ScriptedPolicy,
    TextEnvironment,
    close_environment,
    policies_of,
)
from ragen_apo.environments.policy_calls import begin_policy, made_policy, reply_of
from ragen_apo.environments.tools import Tool, called, calls_of
from ragen_apo.errors import ConfigError, EnvironmentFaultError, RagenApoError
from ragen_apo.plural import counted
from ragen_apo.printable import raised_in_words, shortened
from ragen_apo.seeding import derive_seed
from ragen_apo.types import Task, make_task

Factory = Callable[[], TextEnvironment]
Promise = Callable[[Factory], None]
Situation = tuple[str, str]
"""The key of a state, and an action."""
Future = tuple[Any, ...]
"""The answer of `step`, and the key of the state after it."""

Info = dict[str, Any]
READ_OF_INFO = (*TRUTHS_OF_INFO, "flags", "metrics")
NUM_TASKS = 5
"""Tasks of a split that are played."""
MAX_TURNS = 200
"""Cuts off episodes that their environment does not end, except in `every_episode_ends`."""
MAX_PROBLEM_CHARACTERS = 4_000
CAN_BE_MADE = "the environment can be made"
EPISODES_END = "every episode ends"
SEED = derive_seed("check")
"""Of 63 bits, as those of runs: a generator that takes fewer raises."""
NO_ACTION = "\x00"
LONG_TEXTS = ("9" * 10_000, "word " * 10_000)
ODD_TEXTS = ("", " ", NO_ACTION, "\ud800", "\u202e[a]", "a\nb", "{}", *LONG_TEXTS)
ROUNDING = 1e-6
"""Of a return: rewards may be float32, in which 0.1 is 0.1000000015."""
NUM_WALKS, WALK_LENGTH = 300, 5
MAX_CALLS = 20
"""Of the same tool with the same arguments in one episode."""


ODD_ARGUMENTS = (
    ("", 0),
    ("no such thing", -1),
    ("1 / 0", 1),
    ("'\"(\n", 2),
    ("é" * 500, 10**15),
)
"""A text and a number each, which a model may put into a call."""


class ContractError(RagenApoError):
    """A violation of the contract."""


class Step(NamedTuple):
    """One turn of an episode; equal ones are equal in every respect."""

    reply: Reply
    observation: str
    reward: float
    terminated: bool
    truncated: bool
    info: Mapping[str, Any]
    state_key: str


@dataclass(frozen=True)
class Episode:
    """The episode of a scripted policy in one task."""

    task: Task
    first_observation: str
    steps: tuple[Step, ...]

    @property
    def episode_return(self) -> float:
        return sum(step.reward for step in self.steps)

    @property
    def success(self) -> bool:
        return bool(self.steps) and self.steps[-1].info.get("success") is True


def play(
    environment: TextEnvironment,
    task: Task,
    policy: ScriptedPolicy,
    *,
    seed: int = SEED,
    max_turns: int = MAX_TURNS,
) -> Episode:
    """One episode of a scripted policy, cut off after `max_turns`.

    Its draws are a function of seed and task, so that in several tasks it acts in several ways.
    """
    begin_policy(policy, task, seed=derive_seed(seed, "policy", task.task_id))
    first = _first_observation(environment, task, seed=seed)
    observation, ended, steps = first, False, []
    while not ended and len(steps) < max_turns:
        reply = reply_of(policy, observation)
        step = Step(reply, *_answer(environment, reply.action), environment.state_key())
        steps.append(step)
        observation, ended = step.observation, step.terminated or step.truncated
    return Episode(task, first, tuple(steps))


def _first_observation(environment: TextEnvironment, task: Task, *, seed: int) -> str:
    """That of a reset; raises ContractError for an answer that no episode can begin with."""
    answer = environment.reset(task, seed=seed)
    if problem := problem_with_reset(answer):
        raise ContractError(f"reset of task {task.task_id}: {problem}")
    return answer[0]


def _answer(environment: TextEnvironment, action: str) -> tuple[str, float, bool, bool, Info]:
    """What is read of a step's answer; raises ContractError for one that cannot be.

    Other keys of `info` are the environment's own: a time, a connection, whatever differs.
    """
    answer = environment.step(action)
    if problem := problem_with_step(answer):
        raise ContractError(f"the answer to {_both_ends(action)!r}: {problem}")
    observation, reward, terminated, truncated, info = answer
    read = {key: info[key] for key in READ_OF_INFO if key in info}
    read |= {key: bool(read[key]) for key in TRUTHS_OF_INFO if key in read}  # NumPy has its own
    return observation, float(reward), bool(terminated), bool(truncated), read


def _both_ends(text: str) -> str:
    """An odd text stands behind what an action begins with."""
    return text if len(text) <= 120 else f"{text[:60]} ... {text[-40:]}"


class _SaysNothing:
    """Writes text that is no action in any environment, like an untrained model."""

    def begin(self, task: Task, *, seed: int) -> None: ...

    def act(self, observation: str) -> Reply:
        return Reply(thought="", action=f"{NO_ACTION} no action at all")


def _policies_to_play(environment: TextEnvironment) -> Mapping[str, Callable[[], ScriptedPolicy]]:
    """The scripted policies; of an environment without any, one that says the same text always."""
    return _policies(environment) or {"any text": _SaysNothing}


def _policies(environment: TextEnvironment) -> Mapping[str, Callable[[], ScriptedPolicy]]:
    """The scripted policies, whose makers are checked."""
    return {
        name: partial(made_policy, name, make) for name, make in policies_of(environment).items()
    }


def episodes(make: Factory) -> Iterator[tuple[str, Episode]]:
    """Each scripted policy, by name, in a few tasks of each split; without any, one text."""
    environment = make()
    policies = sorted(_policies_to_play(environment).items())
    for split in environment.properties.splits:
        for task in environment.tasks(split)[:NUM_TASKS]:
            for name, make_policy in policies:
                yield name, play(environment, task, make_policy())


def _tasks(environment: TextEnvironment, number: int) -> Sequence[Task]:
    """At most `number`, from all over the split: one kind of task may come after another."""
    tasks = environment.tasks(first_split(environment))
    number = min(number, len(tasks))
    return [tasks[index * len(tasks) // number] for index in range(number)]


def first_split(environment: TextEnvironment) -> str:
    """`train`, or where that has no task the first split that has any."""
    return next(
        name for name in ("train", *environment.properties.splits) if environment.tasks(name)
    )


def _first_task(environment: TextEnvironment) -> Task:
    return _tasks(environment, 1)[0]


def tasks_are_named_by_their_content(make: Factory) -> None:
    """Ids are unique and hashes of the task (`make_task`), and every split lists them alike."""
    environment, again = make(), make()
    name = environment.properties.name
    for split in environment.properties.splits:
        tasks = environment.tasks(split)
        if list(tasks) != list(again.tasks(split)):
            raise ContractError(f"two environments list other tasks in {split!r}")
        ids = [task.task_id for task in tasks]
        if len(set(ids)) < len(ids):
            raise ContractError(f"a task is in the split {split!r} twice")
        for task in tasks:
            if task.environment != name:
                raise ContractError(
                    f"task {task.task_id} is of the environment {task.environment!r}, and "
                    f"properties.name is {name!r}; expected the same name in make_task(environment="
                    "...) and EnvironmentProperties(name=...)"
                )
            made = make_task(
                environment=name,
                instruction=task.instruction,
                split=task.split,
                category=task.category,
                payload=task.payload,
            )
            if made.task_id != task.task_id:
                raise ContractError(f"task {task.task_id} is not make_task's of {name!r}: {task}")


def held_out_splits(environment: TextEnvironment) -> list[str]:
    """Those that have tasks, and none of the split `train`."""
    train = {(task.instruction, repr(task.payload)) for task in environment.tasks("train")}
    found = []
    for name in environment.properties.splits:
        tasks = environment.tasks(name)
        if tasks and not any((task.instruction, repr(task.payload)) in train for task in tasks):
            found.append(name)
    return found


def training_tasks_are_no_test_tasks(make: Factory) -> None:
    """No task of the split `train` is in `test`; without `test`, in at least one other split."""
    environment = make()
    names = environment.properties.splits
    if "train" not in names:
        raise ContractError("there is no split train")
    expected = ["test"] if "test" in names else [name for name in names if name != "train"]
    if not expected:
        raise ContractError("there is no split but train; expected test, or another name")
    held_out = {*held_out_splits(environment)}
    if any(map(environment.tasks, expected)) and held_out.isdisjoint(expected):
        raise ContractError(f"a task of the split {expected[0]} is a training task, too")


def foreign_tasks_and_splits_are_refused(make: Factory) -> None:
    """A task of another environment and an unknown split raise ConfigError."""
    environment = make()
    foreign = make_task(
        environment="elsewhere", instruction="", split="train", category="", payload={}
    )
    for what, ask, remedy in (
        (
            "reset with a task of another environment",
            lambda: environment.reset(foreign, seed=0),
            "where task.environment is not properties.name",
        ),
        (
            "tasks of an unknown split",
            lambda: environment.tasks("no such split"),
            "for a split that is none of properties.splits",
        ),
    ):
        raised = "no error"
        try:
            ask()
        except ConfigError:
            continue
        except FOREIGN_FAILURES as error:
            raised = raised_in_words(error)
        raise ContractError(
            f"{what} raised {raised}; expected a ragen_apo.errors.ConfigError: raise one {remedy}"
        )


def equal_environments_write_equal_texts(make: Factory) -> None:
    """Two environments with the same options, tasks and actions agree in everything."""
    for (name, one), (_, other) in zip(episodes(make), episodes(make), strict=True):
        for number, (mine, its) in enumerate(zip(one.steps, other.steps, strict=False)):
            if mine != its:
                raise ContractError(
                    f"turn {number + 1} of {name!r} in task {one.task.task_id} differs:\n"
                    f"  {mine}\n  {its}"
                )
        if one != other:
            raise ContractError(f"{name!r} in task {one.task.task_id} differs in length or start")
    _require_equal_answers_to_calls(make(), make())


def _require_equal_answers_to_calls(one: TextEnvironment, other: TextEnvironment) -> None:
    """Of two equal environments to each odd call, which scripted policies may never make."""
    task = _first_task(one)
    for call in _odd_calls(one.properties.tools):
        try:
            mine, its = (_answers(each, task, [call], seed=0)[1:] for each in (one, other))
        except FOREIGN_FAILURES:
            continue  # `any_text_is_answered` says so
        if mine != its:
            raise ContractError(f"the call {_both_ends(call)!r} was answered by {mine} and {its}")


def seeds_matter_where_it_is_declared(make: Factory) -> None:
    """With the same actions the seed changes nothing in an environment that is deterministic.

    In one that is not, it changes something in some task. Where no scripted policy acts, this
    cannot be told: chance may come with actions.
    """
    environment = make()
    policies = _policies_to_play(environment).values()
    differ = False
    for task, make_policy in itertools.product(_tasks(environment, 30), policies):
        actions = [step.reply.action for step in play(environment, task, make_policy()).steps]
        one, same, other = (_answers(environment, task, actions, seed=s) for s in (1, 1, 2))
        if one != same:
            raise ContractError(f"task {task.task_id} goes on otherwise with the same seed")
        differ |= one != other
    if differ and environment.properties.deterministic:
        raise ContractError("`deterministic` is declared, and the seed of `reset` matters")
    if not differ and policies_of(environment) and not environment.properties.deterministic:
        raise ContractError("the seed of `reset` changes nothing; declare `deterministic`")


def _answers(
    environment: TextEnvironment, task: Task, actions: Sequence[str], *, seed: int
) -> list[Any]:
    first = _first_observation(environment, task, seed=seed)
    return [first, *(_answer(environment, action)[:4] for action in actions)]


def any_text_is_answered(make: Factory) -> None:
    """No text makes `step` raise; it answers with text, a finite reward, truth values and info.

    Odd texts also stand behind words of the rules and behind actions of the scripted policies.
    Each tool is called with odd arguments, again and again until the episode is over.
    """
    environment = make()
    task = _first_task(environment)
    verbs = dict.fromkeys(("", *environment.properties.rules.split()[:30]))
    for make_policy in policies_of(environment).values():
        verbs |= {step.reply.action: None for step in play(environment, task, make_policy()).steps}
    texts = [(f"{verb} {odd}", 1) for verb in itertools.islice(verbs, 60) for odd in ODD_TEXTS]
    calls = [(call, MAX_CALLS) for call in _odd_calls(environment.properties.tools)]
    for text, number in texts + calls:
        environment.reset(task, seed=0)
        try:
            for _ in range(number):
                _, _, terminated, truncated, _ = _answer(environment, text)
                if terminated or truncated:
                    break
        except ContractError:
            raise
        except EnvironmentFaultError as error:
            raise ContractError(f"the text {_both_ends(text)!r}: {error}") from error
        except FOREIGN_FAILURES as error:
            raised = raised_in_words(error)
            raise ContractError(
                f"the text {_both_ends(text)!r} made step raise {raised}"
            ) from error


def _odd_calls(tools: Sequence[Tool]) -> Iterator[str]:
    """Calls that fit the tools, and whose arguments nobody had in mind."""
    for tool in tools:
        for odd in ODD_ARGUMENTS:
            arguments = {name: _odd_value(schema, odd) for name, schema in tool.parameters.items()}
            if (action := tool.action_of(arguments)) is not None:
                yield action


def _odd_value(schema: Mapping[str, Any], odd: tuple[str, int]) -> Any:
    """An odd value of this type: any of those that there are, if they are listed."""
    text, number = odd
    if schema["type"] == "array":
        return [_odd_value(schema["items"], odd)] if text else []
    of_type = {"string": (text,), "boolean": (False, True)}.get(schema["type"], (number,))
    values = schema.get("enum", of_type)
    return values[number % len(values)]


def a_text_that_is_no_action_is_marked_and_ends_nothing(make: Factory) -> None:
    """Such a text sets `info["invalid_action"]`; a turn limit may truncate the episode."""
    environment = make()
    environment.reset(_first_task(environment), seed=0)
    _, _, terminated, _, info = _answer(environment, f"{NO_ACTION} no action at all")
    if info.get("invalid_action") is not True:
        raise ContractError(f"invalid_action is not set for a text that is no action: {info}")
    if terminated:
        raise ContractError("a text that is no action ended the episode")


def every_episode_ends(make: Factory) -> None:
    """After `properties.max_turns` turns, or 1,000 where none are declared, whatever is said."""
    environment = make()
    properties, task = environment.properties, _first_task(environment)
    policies = {**policies_of(environment), "no action": _SaysNothing}
    for name, make_policy in sorted(policies.items()):
        limit = turn_limit(properties)
        episode = play(environment, task, make_policy(), max_turns=limit)
        if not (episode.steps and (episode.steps[-1].terminated or episode.steps[-1].truncated)):
            raise ContractError(f"{endlessness(properties)} ({name!r} in task {task.task_id})")


def answers_can_be_written_down(make: Factory) -> None:
    """Rules, instructions, observations, state keys and `flags` are text in UTF-8."""
    environment = make()
    tasks = [task for name in environment.properties.splits for task in environment.tasks(name)]
    texts = [environment.properties.rules, *(task.instruction for task in tasks)]
    if problem := next(filter(None, map(problem_with_text, texts)), None):
        raise ContractError(f"in the rules or an instruction {problem}")
    for _, episode in episodes(make):  # which raises for answers that cannot be
        keys = [step.state_key for step in episode.steps]
        if problem := next(filter(None, map(problem_with_text, keys)), None):
            raise ContractError(f"state_key: {problem}")


def returns_lie_in_the_declared_range(make: Factory) -> None:
    """Wherever an episode is cut off; episodes say `success` where they end."""
    low, high = make().properties.return_range
    for name, episode in episodes(make):
        total = 0.0
        for step in episode.steps:
            total += step.reward
            if not low - ROUNDING <= total <= high + ROUNDING:
                raise ContractError(
                    f"{name!r} in task {episode.task.task_id} has earned {total:g}, and "
                    f"return_range is {low:g} to {high:g}"
                )
        last = episode.steps[-1]
        is_over = last.terminated or last.truncated
        if is_over and not isinstance(last.info.get("success"), bool):
            raise ContractError(f"the last info has no `success`: {last.info}")


def a_reset_leaves_nothing_behind(make: Factory) -> None:
    """An episode after another one, broken off or gone on with, is as in a new environment."""
    environment = make()
    task = _first_task(environment)

    def opening() -> tuple[Any, ...]:
        first = _first_observation(environment, task, seed=3)
        return first, environment.state_key(), _answer(environment, NO_ACTION)

    fresh = opening()
    for make_policy in _policies_to_play(environment).values():
        play(environment, task, make_policy())
        environment.step(NO_ACTION)  # after the end, too
        if opening() != fresh:
            raise ContractError(f"after an episode, task {task.task_id} begins otherwise")


def equal_state_keys_mean_equal_futures(make: Factory) -> None:
    """Under the same seed, on walks of random actions of the scripted policies.

    Metrics may differ: they decide nothing, and counting is about the past.
    """
    future_of: dict[Situation, Future] = {}
    for situation, (*answer, info, key) in random_walks(make):
        future = (*answer, {name: info[name] for name in info if name != "metrics"}, key)
        if future_of.setdefault(situation, future) != future:
            raise ContractError(
                f"the action {situation[1]!r} in the state {situation[0]!r} led to\n"
                f"  {future_of[situation]}\n  {future}"
            )


def random_walks(make: Factory) -> Iterator[tuple[Situation, Future]]:
    """Each situation and its future, on random walks over the actions of scripted policies."""
    environment = make()
    task = _first_task(environment)
    actions = {NO_ACTION}
    for make_policy in policies_of(environment).values():
        actions |= {step.reply.action for step in play(environment, task, make_policy()).steps}
    choices = sorted(actions)
    generator = np.random.default_rng(0)
    for _ in range(NUM_WALKS):
        environment.reset(task, seed=0)
        for index in generator.integers(len(choices), size=WALK_LENGTH):
            situation = environment.state_key(), choices[index]
            yield situation, (*_answer(environment, choices[index]), environment.state_key())


def scripted_policies_are_there_and_read_anything(make: Factory) -> None:
    """`random` and `heuristic` exist, and no policy raises at an observation it does not know."""
    environment = make()
    policies = _policies(environment)
    missing = {"random", "heuristic"} - set(policies)
    if missing:
        raise ContractError(f"there is no scripted policy {' and no '.join(sorted(missing))}")
    task = _first_task(environment)
    for name, make_policy in policies.items():
        policy = make_policy()
        begin_policy(policy, task, seed=0)
        first = _first_observation(environment, task, seed=0)
        for observation in (first, "", "The episode is over.", "#"):
            try:
                action = reply_of(policy, observation).action
            except EnvironmentFaultError:
                raise
            except FOREIGN_FAILURES as error:
                raised, read = raised_in_words(error), shortened(repr(observation), 200)
                raise ContractError(f"{name!r} raised {raised} at {read}") from error
            if not isinstance(action, str):
                raise ContractError(f"{name!r} replied {action!r} to {observation!r}")


def properties_do_not_change(make: Factory) -> None:
    """The declared properties never change, and there are rules."""
    environment = make()
    before = environment.properties
    for make_policy in _policies_to_play(environment).values():
        play(environment, _first_task(environment), make_policy())
    if environment.properties != before:
        raise ContractError(f"properties changed: {before} to {environment.properties}")
    if not before.rules:
        raise ContractError("`rules` is empty; say how to act, for models that were not shown")


PROMISES: tuple[Promise, ...] = (
    tasks_are_named_by_their_content,
    training_tasks_are_no_test_tasks,
    foreign_tasks_and_splits_are_refused,
    equal_environments_write_equal_texts,
    seeds_matter_where_it_is_declared,
    any_text_is_answered,
    a_text_that_is_no_action_is_marked_and_ends_nothing,
    every_episode_ends,
    answers_can_be_written_down,
    returns_lie_in_the_declared_range,
    a_reset_leaves_nothing_behind,
    equal_state_keys_mean_equal_futures,
    scripted_policies_are_there_and_read_anything,
    properties_do_not_change,
)


def check_environment(make: Factory) -> dict[str, str | None]:
    """The violation of each promise, by the promise in words; None for no finding.

    An environment that cannot be made has that as its only finding. Wrong options raise
    ConfigError.
    """
    try:
        with _closing(make) as make_one:
            make_one()
    except EnvironmentFaultError as error:
        return {CAN_BE_MADE: shortened(str(error), MAX_PROBLEM_CHARACTERS)}
    except RagenApoError:
        raise
    except FOREIGN_FAILURES as error:
        return {CAN_BE_MADE: f"raised {raised_in_words(error)}"}
    return {
        promise.__name__.replace("_", " "): _problem_against(promise, make) for promise in PROMISES
    }


def _problem_against(promise: Promise, make: Factory) -> str | None:
    try:
        with _closing(make) as make_one:
            promise(make_one)
    except (ContractError, EnvironmentFaultError) as error:
        return shortened(str(error), MAX_PROBLEM_CHARACTERS)
    except FOREIGN_FAILURES as error:
        return f"raised {raised_in_words(error)}"
    return None


@contextlib.contextmanager
def _closing(make: Factory) -> Iterator[Factory]:
    """The factory; what it has made is closed at the end."""
    with contextlib.ExitStack() as stack:

        def make_one() -> TextEnvironment:
            environment = make()
            stack.callback(close_environment, environment)
            return environment

        yield make_one


class _ByTwoThreads:
    """An environment that two threads call by turns, and the one that made it never."""

    def __init__(self, environment: TextEnvironment, threads: Sequence[ThreadPoolExecutor]) -> None:
        self._environment, self._next = environment, itertools.cycle(threads)
        self.properties = environment.properties
        self.tasks, self.state_key = environment.tasks, environment.state_key
        self.scripted_policies = environment.scripted_policies

    def reset(self, task: Task, *, seed: int) -> tuple[str, Info]:
        return next(self._next).submit(self._environment.reset, task, seed=seed).result()

    def step(self, action: str) -> tuple[str, float, bool, bool, Info]:
        return next(self._next).submit(self._environment.step, action).result()


def episodes_in_threads_are_as_one_by_one(make: Factory, *, num_workers: int = 16) -> None:
    """What `rollouts.num_environment_workers` asks for: environments do not disturb each other.

    Each is reset and stepped by one thread after another, as there.

    None of `PROMISES`: with one worker, an environment may belong to one thread.
    """
    environment = make()
    policies = sorted(_policies_to_play(environment).items())
    jobs = [(*policy, task) for policy in policies for task in _tasks(environment, NUM_TASKS)]
    alone = [play(environment, task, make_policy()) for _, make_policy, task in jobs]

    def played(job: tuple[str, Callable[[], ScriptedPolicy], Task]) -> Episode:
        name, make_policy, task = job
        try:
            with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as other:
                return play(_ByTwoThreads(make(), (one, other)), task, make_policy())
        except ContractError:
            raise
        except FOREIGN_FAILURES as error:
            raised = raised_in_words(error)
            raise ContractError(
                f"{name!r} in task {task.task_id} raised {raised}, called by one thread after "
                "another; it has to work in any, or rollouts.num_environment_workers to stay 1"
            ) from error

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # seconds: threads take turns in the middle of everything
    try:
        with ThreadPoolExecutor(num_workers) as pool:
            together = list(pool.map(played, jobs))
    finally:
        sys.setswitchinterval(interval)
    for (name, _, task), one, other in zip(jobs, alone, together, strict=True):
        if one != other:
            raise ContractError(f"{name!r} in task {task.task_id} differs beside other threads")


def notes_on(make: Factory) -> list[str]:
    """What breaks no promise and is hardly meant, in a sentence each."""
    with _closing(make) as make_one:
        forgotten = _success_that_is_never_said(make_one)
        return [*([forgotten] if forgotten else []), *_tools_that_refuse_all(make_one)]


def _success_that_is_never_said(make: Factory) -> str | None:
    low, high = make().properties.return_range
    played = [episode for _, episode in episodes(make)]
    num_best = sum(
        each.steps[-1].terminated and each.episode_return >= high - ROUNDING for each in played
    )
    if low == high or not num_best or any(each.success for each in played):
        return None
    return (
        f"{num_best} of {counted(len(played), 'episode')} ended with the highest return of "
        f"return_range, {high:g}, and none was a success: every rate of success in training and "
        "evaluations would be 0. Say it where an episode ends well: Answer(..., success=True), or "
        'info["success"]'
    )


def _tools_that_refuse_all(make: Factory) -> Iterator[str]:
    """Those that carried out none of the odd calls, nor one of a scripted policy."""
    environment = make()
    task, tools = _first_task(environment), called(environment.properties.tools)
    steps = [step for _, episode in episodes(make) for step in episode.steps]
    done = [step.reply.action for step in steps if not step.info.get("invalid_action")]
    used = {tool.name for action in dict.fromkeys(done) for tool, _ in calls_of(tools, action)}
    for tool in (tool for tool in tools if tool.name not in used):
        calls = [*_odd_calls([tool])]
        answers = [(environment.reset(task, seed=0), _answer(environment, call)) for call in calls]
        if answers and all(answer[-1].get("invalid_action") for _, answer in answers):
            yield (
                f"The tool {tool.name} refused all of {counted(len(calls), 'call')}, whose "
                "arguments are odd, and no scripted policy called it with success. If it should "
                f"have taken {_both_ends(calls[-1])}, it has a fault: "
                f"{shortened(answers[-1][1][0], 300)}"
            )


class PolicyResult(NamedTuple):
    """Means over the episodes of a scripted policy on training tasks."""

    success_rate: float
    episode_return: float
    num_turns: float


def policy_table(environment: TextEnvironment, *, num_tasks: int) -> dict[str, PolicyResult]:
    """Each scripted policy on tasks from all over the training split.

    Raises ContractError where one raises.
    """
    tasks = _tasks(environment, num_tasks)
    limit = turn_limit(environment.properties)
    table = {}
    for name, make_policy in policies_of(environment).items():
        try:
            played = [
                play(environment, task, make_policy(), seed=seed, max_turns=limit)
                for seed, task in enumerate(tasks)
            ]
        except FOREIGN_FAILURES as error:
            raise ContractError(f"{name!r} raised {raised_in_words(error)}") from error
        values = [(each.success, each.episode_return, len(each.steps)) for each in played]
        table[name] = PolicyResult(*np.mean(values, axis=0).tolist())
    return table
