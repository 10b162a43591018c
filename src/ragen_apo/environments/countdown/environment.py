"""Countdown: make the target from the given numbers, each used once, with + - * / ( ).

An action is an expression such as `(3 + 5) * 2`; ` = 16` after it is allowed and not read. The
first readable expression earns `well_formed`, and the target the rest up to `correct`, however many
attempts an episode has. Deterministic: seeds are not used.
"""

import functools
import re

import numpy as np
from pydantic import Field, model_validator

from ragen_apo.config.section import Section
from ragen_apo.environments.base import EnvironmentProperties, Reply, validate_options
from ragen_apo.environments.countdown.arithmetic import (
    MAX_CHARACTERS,
    OPERATORS,
    ExpressionError,
    Part,
    combine,
    find_expression,
    read_expression,
)
from ragen_apo.environments.toolkit.game import Answer, GameEnvironment, digest_of_options
from ragen_apo.environments.toolkit.scripted import MixedPolicy
from ragen_apo.environments.toolkit.task_draws import SPLITS, Description, DrawnTasks, draw_tasks
from ragen_apo.environments.tools import Tool
from ragen_apo.seeding import generator
from ragen_apo.types import Task

NAME = "countdown"
TEXT_VERSION = 2
"""Raise it whenever the words of an observation or the dynamics change."""
WRONG_NUMBERS = "wrong_numbers"
"""Flag of a turn whose expression does not use the given numbers once each."""
TEACHER_GOOD_SHARE = 0.35
"""How often the teacher plays as the oracle."""

_RESULT = re.compile(r"\s*=\s*[0-9]{1,9}$", re.ASCII)
_INSTRUCTION = re.compile(r"Make (\d+) from ([\d, ]+)\.")


class CountdownRewards(Section):
    """The rewards of an episode."""

    correct: float = 1.0
    """Altogether, for an episode that makes the target."""
    well_formed: float = 0.1
    """Altogether, for an episode with an expression that can be read."""
    invalid_action: float = 0.0
    """Every turn whose text is no expression."""
    turn: float = 0.0
    """Every turn."""

    def return_range(self, max_turns: int) -> tuple[float, float]:
        """Bounds of the return of an episode cut off anywhere."""
        ends = (0.0, self.well_formed, self.correct)
        per_turn = (0.0, self.turn, self.turn + self.invalid_action)
        return min(ends) + max_turns * min(per_turn), max(ends) + max_turns * max(per_turn)


class CountdownOptions(DrawnTasks):
    """The options of the environment `countdown`."""

    num_numbers: int = Field(default=3, ge=2, le=6)
    """Numbers of a task."""
    max_number: int = Field(default=20, ge=2, le=1000)
    """Numbers are drawn from 1 to this one."""
    max_target: int = Field(default=100, ge=2, le=100_000)
    """The largest number that has to be made."""
    max_turns: int = Field(default=1, ge=1, le=1000)
    """How many attempts an episode has."""
    reward: CountdownRewards = CountdownRewards()

    @model_validator(mode="after")
    def _targets_are_possible(self) -> "CountdownOptions":
        if self.max_target < self.num_numbers:
            raise ValueError("expected max_target to be at least num_numbers")
        return self


class CountdownGame:
    """The attempts at one target."""

    def __init__(self, options: CountdownOptions, task: Task, seed: int) -> None:
        self._rewards = options.reward
        self._instruction = task.instruction
        self._numbers = tuple(sorted(int(number) for number in task.payload["numbers"]))
        self._target = int(task.payload["target"])
        self._was_well_formed = False

    def first_observation(self) -> str:
        return f"TASK: {self._instruction}"

    def play(self, text: str) -> Answer:
        text = text.strip()
        try:
            is_long = len(text) > MAX_CHARACTERS * 5  # the search takes time squared
            expression = read_expression(text if is_long else _RESULT.sub("", text))
        except ExpressionError as error:
            reward = self._rewards.turn + self._rewards.invalid_action
            return Answer(f"Invalid expression: {error}.", reward, invalid=True)
        reward = self._rewards.turn
        if tuple(sorted(expression.numbers)) != self._numbers:
            reward += self._pay_form()
            listed = ", ".join(map(str, self._numbers))
            return Answer(f"Use each of {listed} once.", reward, flags=(WRONG_NUMBERS,))
        if expression.value != self._target:
            reward += self._pay_form()
            return Answer(f"That is {expression.value}, not {self._target}.", reward)
        paid = self._rewards.well_formed if self._was_well_formed else 0.0
        reward += self._rewards.correct - paid
        return Answer(f"That is {self._target}.", reward, terminated=True, success=True)

    def key(self) -> str:
        """Whether the form has been paid for."""
        return "formed" if self._was_well_formed else "new"

    def _pay_form(self) -> float:
        if self._was_well_formed:
            return 0.0
        self._was_well_formed = True
        return self._rewards.well_formed


def make_countdown(**options: object) -> GameEnvironment:
    """The environment `countdown`; raises ConfigError for options it does not accept."""
    checked = validate_options(CountdownOptions, options)
    properties = EnvironmentProperties(
        name=NAME,
        version=f"{NAME}-{TEXT_VERSION}-turns{checked.max_turns}",
        reward_version=digest_of_options(checked.reward),
        deterministic=True,
        return_range=checked.reward.return_range(checked.max_turns),
        splits=SPLITS,
        rules=(
            "You make a target from given numbers. Use each number exactly once, with + - * / and "
            "parentheses. Your action is the expression alone, such as (3 + 5) * 2."
        ),
        tools=(
            Tool(
                "calculate",
                "Calculate an expression that uses each number once, such as (3 + 5) * 2.",
                "{expression}",
                {"expression": {"type": "string"}},
            ),
        ),
    )
    return GameEnvironment(
        properties=properties,
        tasks=draw_tasks(
            NAME,
            draw_puzzle,
            (checked.num_numbers, checked.max_number, checked.max_target),
            content=_content,
            describe=_description,
            counts=checked.counts,
        ),
        start=functools.partial(CountdownGame, checked),
        policies={
            "teacher": functools.partial(
                MixedPolicy, Oracle, RandomCounter, good_share=TEACHER_GOOD_SHARE
            ),
            "oracle": Oracle,
            "random": RandomCounter,
            "heuristic": Heuristic,
        },
        max_turns=checked.max_turns,
    )


Puzzle = tuple[tuple[int, ...], int]
"""The numbers as they are shown, and the target."""


def _content(puzzle: Puzzle) -> str:
    return f"{sorted(puzzle[0])} {puzzle[1]}"


def _description(puzzle: Puzzle) -> Description:
    numbers, target = puzzle
    return Description(
        instruction=f"Make {target} from {', '.join(map(str, numbers))}.",
        category=f"numbers: {len(numbers)}",
        payload={"numbers": list(numbers), "target": target},
    )


def draw_puzzle(
    num_numbers: int, max_number: int, max_target: int, draws: np.random.Generator
) -> Puzzle | None:
    """Random numbers, and a target that random operations make of them; None for a large one."""
    numbers = tuple(int(number) for number in draws.integers(1, max_number + 1, size=num_numbers))
    made = random_part(numbers, draws)
    return (numbers, made.value) if made.value <= max_target else None


def random_part(numbers: tuple[int, ...], draws: np.random.Generator) -> Part:
    """All the numbers joined at random, every result a positive whole number."""
    parts = [Part(number, str(number)) for number in numbers]
    operators = list(OPERATORS)
    while len(parts) > 1:
        left, right = (parts[index] for index in draws.permutation(len(parts))[:2])
        made = combine(left, operators[draws.integers(len(operators))], right)
        if made is not None:
            parts = [part for part in parts if part is not left and part is not right] + [made]
    return parts[0]


class _Counter:
    """Reads the numbers and the target in the task's instruction; no payload is needed."""

    def begin(self, task: Task, *, seed: int) -> None:
        self._draws = generator(seed, "countdown-policy")
        found = _INSTRUCTION.search(task.instruction)
        self._target = int(found[1]) if found else 0
        self._numbers = tuple(int(part) for part in found[2].split(", ")) if found else (1,)

    def act(self, observation: str) -> Reply:
        made = self._choose()
        return Reply(thought="; ".join(made.steps), action=made.text)

    def _choose(self) -> Part:
        raise NotImplementedError


class RandomCounter(_Counter):
    """Joins the numbers at random."""

    def _choose(self) -> Part:
        return random_part(self._numbers, self._draws)


class Oracle(_Counter):
    """Searches until the target is made."""

    def _choose(self) -> Part:
        found = find_expression(self._numbers, self._target)
        return found or random_part(self._numbers, self._draws)


class Heuristic(_Counter):
    """From left to right in the order given, always the operation that comes nearest the target."""

    def _choose(self) -> Part:
        parts = [Part(number, str(number)) for number in self._numbers]
        made = parts[0]
        for part in parts[1:]:
            choices = [combine(made, operator, part) for operator in OPERATORS]
            whole = [choice for choice in choices if choice is not None]
            made = min(whole, key=lambda choice: abs(choice.value - self._target))
        return made
