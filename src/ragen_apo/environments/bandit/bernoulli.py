"""The Bernoulli bandit: find the best arm by trying.

Each arm wins with an unknown probability that the task fixes. An episode has `num_pulls`
pulls; success is to pull the best arm in more than half of them. Whether a pull wins is a function
of the episode's seed, the arm and the number of pulls so far.
"""

import functools
import re
from typing import Literal

import numpy as np
from pydantic import Field, model_validator

from ragen_apo.config.section import Section
from ragen_apo.environments.base import EnvironmentProperties, Reply
from ragen_apo.environments.toolkit.game import GameEnvironment, chance, digest_of_options
from ragen_apo.environments.toolkit.named_actions import (
    ActionRules,
    Effect,
    NamedActionsGame,
    action_tool,
    join_actions,
)
from ragen_apo.environments.toolkit.scripted import MixedPolicy, RandomActions
from ragen_apo.environments.toolkit.task_draws import SPLITS, Description, DrawnTasks, draw_tasks
from ragen_apo.types import Task

NAME = "bandit"
TEXT_VERSION = 1
"""Raise it whenever the words of an observation or the dynamics change."""
TEACHER_GOOD_SHARE = 0.5
"""How often the teacher goes by the tally; otherwise it takes any arm."""
ARM_NAMES = ["Red", "Blue", "Green", "Yellow", "White", "Black", "Pink", "Brown", "Gray", "Gold"]

_ARM_LIST = re.compile(r"Arms: ([\w, ]+)\.")
_RESULT = re.compile(r"(\w+) (wins|loses)\.")


class BernoulliRewards(Section):
    """What a pull pays."""

    win: float = 1.0
    """A pull that wins."""
    lose: float = 0.0
    """A pull that loses."""
    invalid_action: float = -0.1
    """A turn with a part that names no arm."""


class BernoulliOptions(DrawnTasks):
    """The options of the environment `bandit` with `kind: bernoulli`."""

    kind: Literal["bernoulli"]
    """This bandit: arms that are told apart by trying them."""
    num_arms: int = Field(default=3, ge=2, le=len(ARM_NAMES))
    """Arms of a task."""
    num_pulls: int = Field(default=10, ge=1, le=1000)
    """Pulls of an episode."""
    min_gap: float = Field(default=0.2, gt=0.0, le=0.9)
    """Smallest difference between the win rates of the best arm and the second."""
    max_turns: int = Field(default=20, ge=1, le=1000)
    """Truncates an episode after this many turns."""
    max_actions_per_turn: int = Field(default=1, ge=1, le=100)
    """How many pulls joined by || are carried out in one turn."""
    reward: BernoulliRewards = BernoulliRewards()

    @model_validator(mode="after")
    def _pulls_fit_into_an_episode(self) -> "BernoulliOptions":
        most = self.max_turns * self.max_actions_per_turn
        if self.num_pulls > most:
            raise ValueError(
                f"no episode can succeed: it has num_pulls {self.num_pulls}, of which its turns "
                f"allow {most}; lower num_pulls, or raise max_turns or max_actions_per_turn"
            )
        return self


class BernoulliWorld:
    """Some pulls of arms that win or lose."""

    def __init__(self, options: BernoulliOptions, task: Task, *, seed: int) -> None:
        self._options, self._seed = options, seed
        self._shares: dict[str, float] = {
            str(arm): float(share) for arm, share in task.payload["win_shares"].items()
        }
        if len(self._shares) < 2 or not all(0 <= share <= 1 for share in self._shares.values()):
            raise ValueError("the task needs at least two arms with probabilities from 0 to 1")
        self.arms = tuple(self._shares)
        self._best = max(self._shares, key=lambda arm: self._shares[arm])
        self._num_pulls = self._num_best = 0
        self._results: list[str] = []

    def act(self, action: str) -> Effect:
        wins = chance(self._seed, "bandit-pull", action, self._num_pulls) < self._shares[action]
        self._num_pulls += 1
        self._num_best += action == self._best
        self._results.append(f"{action} {'wins' if wins else 'loses'}.")
        scheme = self._options.reward
        is_over = self._num_pulls >= self._options.num_pulls
        return Effect(
            reward=scheme.win if wins else scheme.lose,
            ended=is_over,
            success=is_over and 2 * self._num_best > self._num_pulls,
        )

    def view(self) -> str:
        """The results of the pulls since the last view, and the number of pulls left."""
        results, self._results = self._results, []
        said = " ".join(results) if results else f"Arms: {', '.join(self._shares)}."
        return f"{said} Pulls left: {self._options.num_pulls - self._num_pulls}."

    def key(self) -> str:
        """The number of pulls, and that of the best arm: success depends on both."""
        return f"{self._num_pulls}:{self._num_best}"


def make_bernoulli(options: BernoulliOptions) -> GameEnvironment:
    """The bandit of this kind under checked options."""
    rewards = options.reward
    payoffs = (0.0, options.num_pulls * rewards.win, options.num_pulls * rewards.lose)
    invalid = options.max_turns * rewards.invalid_action
    names, most = tuple(ARM_NAMES[: options.num_arms]), options.max_actions_per_turn
    several = f", or up to {most} names joined by ||" if most > 1 else ""
    make_random = functools.partial(RandomActions, names, most)
    properties = EnvironmentProperties(
        name=NAME,
        version=f"bernoulli-{TEXT_VERSION}-{options.digest(without=['min_gap'])}",
        reward_version=digest_of_options(rewards),
        deterministic=False,
        return_range=(min(payoffs) + min(0.0, invalid), max(payoffs) + max(0.0, invalid)),
        splits=SPLITS,
        rules=(
            "You pull arms. Each wins with its own probability, which stays the same. Win as often "
            f"as you can. Your action is the name of an arm{several}."
        ),
        tools=(action_tool("pull", "Pull an arm.", "arm", names=names, max_per_turn=most),),
    )
    return GameEnvironment(
        properties=properties,
        tasks=draw_tasks(
            NAME,
            draw_win_shares,
            (options.num_arms, options.min_gap),
            content=repr,
            describe=_description,
            counts=options.counts,
        ),
        start=functools.partial(_start, options),
        policies={
            "teacher": functools.partial(
                MixedPolicy, Tally, make_random, good_share=TEACHER_GOOD_SHARE
            ),
            "oracle": functools.partial(Oracle, most),
            "random": make_random,
            "heuristic": Tally,
        },
        max_turns=options.max_turns,
    )


def _start(options: BernoulliOptions, task: Task, seed: int) -> NamedActionsGame:
    world = BernoulliWorld(options, task, seed=seed)
    rules = ActionRules(
        names=world.arms,
        max_per_turn=options.max_actions_per_turn,
        max_per_episode=options.num_pulls,
        invalid_reward=options.reward.invalid_action,
    )
    return NamedActionsGame(world, rules, instruction=task.instruction)


def _description(shares: tuple[float, ...]) -> Description:
    return Description(
        instruction="Find the arm that wins most often.",
        category=f"bernoulli, arms: {len(shares)}",
        payload={"win_shares": dict(zip(ARM_NAMES, shares, strict=False))},
    )


def draw_win_shares(
    num_arms: int, min_gap: float, draws: np.random.Generator
) -> tuple[float, ...] | None:
    """Probabilities in hundredths, or None if the best arm leads by less than `min_gap`."""
    shares = tuple(int(share) / 100 for share in draws.integers(0, 101, size=num_arms))
    best, second = sorted(shares, reverse=True)[:2]
    return shares if best - second >= min_gap - 1e-9 else None


class Tally:
    """Tries every arm once, then pulls the one with the most wins for its pulls, one a turn."""

    def begin(self, task: Task, *, seed: int) -> None:
        self._num_wins: dict[str, int] = {}
        self._num_pulls: dict[str, int] = {}

    def act(self, observation: str) -> Reply:
        listed = _ARM_LIST.search(observation)
        for arm in listed[1].split(", ") if listed else ():
            self._num_wins.setdefault(arm, 0)
            self._num_pulls.setdefault(arm, 0)
        for arm, result in _RESULT.findall(observation):
            self._num_wins[arm] = self._num_wins.get(arm, 0) + (result == "wins")
            self._num_pulls[arm] = self._num_pulls.get(arm, 0) + 1
        if not self._num_pulls:
            return Reply(thought="try", action=ARM_NAMES[0])
        arm = max(self._num_pulls, key=self._promise)
        num_wins, num_pulls = self._num_wins[arm], self._num_pulls[arm]
        return Reply(thought=f"{arm} {num_wins} of {num_pulls}", action=arm)

    def _promise(self, arm: str) -> float:
        num_pulls = self._num_pulls[arm]
        return (self._num_wins[arm] + 0.5) / (num_pulls + 1) if num_pulls else 2.0


class Oracle:
    """Looks up which arm is best and always pulls it."""

    def __init__(self, max_per_turn: int) -> None:
        self._max_per_turn = max_per_turn

    def begin(self, task: Task, *, seed: int) -> None:
        win_shares = task.payload["win_shares"]
        self._best = max(win_shares, key=lambda arm: win_shares[arm])

    def act(self, observation: str) -> Reply:
        return Reply(self._best, join_actions([self._best] * self._max_per_turn))
