"""Scripted policies that fit several environments."""

import functools
from collections.abc import Callable, Mapping, Sequence

from ragen_apo.environments.base import Reply, ScriptedPolicy
from ragen_apo.environments.policy_calls import begin_policy, reply_of
from ragen_apo.environments.toolkit.named_actions import join_actions
from ragen_apo.seeding import generator
from ragen_apo.types import Task


class RandomActions:
    """Names random actions, a random number of them in a turn, whatever it reads."""

    def __init__(self, names: Sequence[str], max_per_turn: int) -> None:
        self._names, self._max_per_turn = tuple(names), max_per_turn

    def begin(self, task: Task, *, seed: int) -> None:
        self._generator = generator(seed, "random-actions")

    def act(self, observation: str) -> Reply:
        """One to `max_per_turn` actions."""
        num_actions = 1 + int(self._generator.integers(self._max_per_turn))
        picks = self._generator.integers(len(self._names), size=num_actions)
        return Reply(thought="try", action=join_actions([self._names[pick] for pick in picks]))


class MixedPolicy:
    """Plays as a good policy with probability `good_share`, otherwise as a poor one.

    It chooses anew every turn, or once an episode. Both policies read every observation and reply;
    their replies may not be used.
    """

    def __init__(
        self,
        make_good: Callable[[], ScriptedPolicy],
        make_poor: Callable[[], ScriptedPolicy],
        *,
        good_share: float,
        whole_episodes: bool = False,
    ) -> None:
        self._good, self._poor = make_good(), make_poor()
        self._good_share, self._whole_episodes = good_share, whole_episodes

    def begin(self, task: Task, *, seed: int) -> None:
        begin_policy(self._good, task, seed=seed)
        begin_policy(self._poor, task, seed=seed)
        self._generator = generator(seed, "mixture")
        self._is_good: bool | None = None

    def act(self, observation: str) -> Reply:
        good, poor = reply_of(self._good, observation), reply_of(self._poor, observation)
        if self._is_good is None or not self._whole_episodes:
            self._is_good = self._generator.random() < self._good_share
        return good if self._is_good else poor


def policies_around(
    make_oracle: Callable[[], ScriptedPolicy],
    make_heuristic: Callable[[], ScriptedPolicy],
    *,
    names: Sequence[str],
    max_per_turn: int,
    teacher_good_share: float,
    make_poor: Callable[[], ScriptedPolicy] | None = None,
    whole_episodes: bool = False,
) -> Mapping[str, Callable[[], ScriptedPolicy]]:
    """The policies `teacher`, `oracle`, `random` and `heuristic`.

    The teacher mixes the oracle and `make_poor` (by default random actions); see `MixedPolicy`.
    """
    make_random = functools.partial(RandomActions, tuple(names), max_per_turn)
    return {
        "teacher": functools.partial(
            MixedPolicy,
            make_oracle,
            make_poor or make_random,
            good_share=teacher_good_share,
            whole_episodes=whole_episodes,
        ),
        "oracle": make_oracle,
        "random": make_random,
        "heuristic": make_heuristic,
    }
