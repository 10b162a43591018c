"""The two-armed bandit: judge the arms by their names.

One arm pays a little for certain, the other much but seldom. One pull ends the episode; success is
to pull the arm that pays more on average. The names of train and test have no word in common. What
the risky arm pays is a function of the episode's seed.
"""

import functools
import re
from typing import Literal

from pydantic import Field

from ragen_apo.config.section import Section
from ragen_apo.environments.base import EnvironmentProperties, Reply
from ragen_apo.environments.toolkit.game import GameEnvironment, chance, digest_of_options
from ragen_apo.environments.toolkit.named_actions import ActionRules, Effect, NamedActionsGame
from ragen_apo.environments.toolkit.scripted import MixedPolicy
from ragen_apo.environments.toolkit.task_draws import SPLITS, DrawnTasks
from ragen_apo.environments.tools import Tool
from ragen_apo.seeding import generator
from ragen_apo.types import Task, make_task

NAME = "bandit"
TEXT_VERSION = 1
"""Raise it whenever the words of an observation or the dynamics change."""
TEACHER_GOOD_SHARE = 0.2
"""How often the teacher goes by the names; otherwise it takes either arm."""

SAFE_NAMES = {
    "train": (
        *("Anchor", "Harbor", "Turtle", "Granite", "Pension", "Umbrella"),
        *("Cushion", "Fence", "Blanket", "Porridge", "Lighthouse", "Savings"),
    ),
    "test": ("Seatbelt", "Helmet", "Oak", "Bakery", "Shelter", "Mattress"),
}
RISKY_NAMES = {
    "train": (
        *("Rocket", "Volcano", "Jackpot", "Pirate", "Comet", "Tiger"),
        *("Lottery", "Storm", "Dynamite", "Casino", "Daredevil", "Wildfire"),
    ),
    "test": ("Dragon", "Roulette", "Tornado", "Gambler", "Meteor", "Gunpowder"),
}

_ARMS = re.compile(r"Arms: (\w+) and (\w+)\.")


class TwoArmedRewards(Section):
    """What a pull pays; the defaults are RAGEN's."""

    safe: float = 0.1
    """The safe arm, always."""
    risky_win: float = 1.0
    """The risky arm where it wins."""
    risky_lose: float = 0.0
    """The risky arm where it loses."""
    invalid_action: float = -0.1
    """A turn with a part that names no arm."""


class TwoArmedOptions(DrawnTasks):
    """The options of the environment `bandit` with `kind: two_armed`."""

    kind: Literal["two_armed"] = "two_armed"
    """This bandit: a safe and a risky arm, told apart by their names."""
    win_share: float = Field(default=0.25, ge=0.0, le=1.0)
    """How often the risky arm wins."""
    max_turns: int = Field(default=1, ge=1, le=1000)
    """The first pull ends the episode; more turns are for those that name no arm."""
    num_train_tasks: int = Field(default=200, ge=1, le=288)
    """Pairs of names in the split `train`."""
    num_test_tasks: int = Field(default=50, ge=1, le=72)
    """Pairs of names in the split `test`; none has a word of those of `train`."""
    reward: TwoArmedRewards = TwoArmedRewards()


class TwoArmedWorld:
    """One pull of one of two arms."""

    def __init__(self, options: TwoArmedOptions, task: Task, *, seed: int) -> None:
        self._options, self._seed = options, seed
        self.arms, self._risky = tuple(task.payload["arms"]), task.payload["risky"]
        if len(set(self.arms)) != 2 or self._risky not in self.arms:
            raise ValueError("the task needs two arms, one of them risky")
        self._result = f"Arms: {self.arms[0]} and {self.arms[1]}."
        self._is_over = False

    def act(self, action: str) -> Effect:
        scheme = self._options.reward
        wins = chance(self._seed, "bandit-pull", action) < self._options.win_share
        risky = scheme.risky_win if wins else scheme.risky_lose
        reward = risky if action == self._risky else scheme.safe
        self._is_over = True
        self._result = f"{action} pays {reward:g}."
        is_better = (action == self._risky) == risky_is_better(self._options)
        return Effect(reward, ended=True, success=is_better)

    def view(self) -> str:
        return self._result

    def key(self) -> str:
        return "pulled" if self._is_over else "new"


def risky_is_better(options: TwoArmedOptions) -> bool:
    """Whether the risky arm pays more on average."""
    scheme = options.reward
    mean = options.win_share * scheme.risky_win + (1 - options.win_share) * scheme.risky_lose
    return mean > scheme.safe


def make_two_armed(options: TwoArmedOptions) -> GameEnvironment:
    """The bandit of this kind under checked options."""
    rewards = options.reward
    payoffs = (0.0, rewards.safe, rewards.risky_win, rewards.risky_lose)
    invalid = options.max_turns * rewards.invalid_action
    properties = EnvironmentProperties(
        name=NAME,
        version=f"two-armed-{TEXT_VERSION}-{options.digest()}",
        reward_version=digest_of_options(rewards),
        deterministic=options.win_share in (0.0, 1.0),
        return_range=(min(payoffs) + min(0.0, invalid), max(payoffs) + max(0.0, invalid)),
        splits=SPLITS,
        rules=(
            "You pull one of two arms, once. What an arm pays has to do with its name. Your action "
            "is the name of the arm that you expect to pay more on average."
        ),
        tools=(Tool("pull", "Pull an arm by its name.", "{arm}", {"arm": {"type": "string"}}),),
    )
    make_good = functools.partial(NameReader, options)
    return GameEnvironment(
        properties=properties,
        tasks=_tasks(*options.counts),
        start=functools.partial(_start, options),
        policies={
            "teacher": functools.partial(
                MixedPolicy, make_good, RandomArm, good_share=TEACHER_GOOD_SHARE
            ),
            "oracle": functools.partial(Oracle, options),
            "random": RandomArm,
            "heuristic": FirstArm,
        },
        max_turns=options.max_turns,
    )


def _start(options: TwoArmedOptions, task: Task, seed: int) -> NamedActionsGame:
    world = TwoArmedWorld(options, task, seed=seed)
    rules = ActionRules(world.arms, 1, 1, options.reward.invalid_action)
    return NamedActionsGame(world, rules, instruction=task.instruction)


@functools.lru_cache(maxsize=16)
def _tasks(num_train: int, num_test: int, task_seed: int) -> dict[str, tuple[Task, ...]]:
    tasks: dict[str, tuple[Task, ...]] = {}
    for split, count in (("train", num_train), ("test", num_test)):
        pairs = [(safe, risky) for safe in SAFE_NAMES[split] for risky in RISKY_NAMES[split]]
        choices = [
            (arms, risky) for safe, risky in pairs for arms in ((safe, risky), (risky, safe))
        ]
        order = generator(task_seed, NAME, "two-armed", split).permutation(len(choices))
        tasks[split] = tuple(
            make_task(
                environment=NAME,
                instruction="Choose an arm.",
                split=split,
                category="two_armed",
                payload={"arms": list(arms), "risky": risky},
            )
            for arms, risky in (choices[index] for index in order[:count])
        )
    return tasks


class _Reader:
    """Remembers the arms from the first observation."""

    def begin(self, task: Task, *, seed: int) -> None:
        self._arms = ("", "")
        self._draws = generator(seed, "bandit-policy")

    def act(self, observation: str) -> Reply:
        found = _ARMS.search(observation)
        self._arms = (found[1], found[2]) if found else self._arms
        return self._choose()

    def _choose(self) -> Reply:
        raise NotImplementedError


class RandomArm(_Reader):
    """Either arm."""

    def _choose(self) -> Reply:
        return Reply("try", self._arms[int(self._draws.integers(2))])


class FirstArm(_Reader):
    """The arm that is named first."""

    def _choose(self) -> Reply:
        return Reply("the first", self._arms[0])


class NameReader(_Reader):
    """Knows which names sound risky, and takes the arm that is better under the options."""

    def __init__(self, options: TwoArmedOptions) -> None:
        self._wants_risky = risky_is_better(options)
        self._risky_names = {name for names in RISKY_NAMES.values() for name in names}

    def _choose(self) -> Reply:
        risky, safe = self._arms if self._arms[0] in self._risky_names else self._arms[::-1]
        arm = risky if self._wants_risky else safe
        return Reply(f"{risky} is risky", arm)


class Oracle(NameReader):
    """Looks up which arm is risky."""

    def begin(self, task: Task, *, seed: int) -> None:
        super().begin(task, seed=seed)
        self._risky_names = {task.payload["risky"]}
