"""An episode that a policy and a person play together, and going back in it.

Consumes a task and responses, sampled or typed; produces turns as rollouts and evaluations record
them. Task i of a split has the seed that an evaluation gives it, so greedy play repeats that.

To go back is to play again: a fresh environment with the same seed gets the same responses. Where
it does not give the same answers, the way back is refused.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from ragen_apo.agent.context import ContextManager
from ragen_apo.agent.environment_manager import Outcome
from ragen_apo.agent.proxy import Episode, begin_episodes, play_turns
from ragen_apo.agent.responses import ParsedResponse
from ragen_apo.environments.base import EnvironmentProperties
from ragen_apo.errors import ConfigError, EnvironmentFaultError
from ragen_apo.evaluation.evaluate import EvaluationPlan
from ragen_apo.policy.engine import Response
from ragen_apo.session import Session
from ragen_apo.types import StopReason, Turn, TurnFlag


@dataclass(frozen=True)
class Choice:
    """What a visitor wants to see."""

    policy: str
    split: str
    task: int = 0
    """The index of the task in its split."""
    temperature: float = 0.0
    """0 for greedy play."""
    draw: int = 0
    """Another one has another seed: 0 is that of an evaluation, k that of its k-th sample."""


@dataclass(frozen=True)
class Comparison:
    """What another policy of the run says to a turn."""

    policy: str
    is_reference: bool
    response: Response
    """Its own one to the same prompt, with the same random numbers."""
    text: str
    parsed: ParsedResponse
    logprobs: tuple[float, ...]
    """Under it, of the tokens of the turn."""
    v_star: float | None
    """Of the state under it, where it is a reference whose samples have visited the state."""


class _Hold:
    """What all parts of an episode share; its environment is closed once none is left."""


@dataclass(frozen=True, eq=False)
class PlayedEpisode:
    """An episode as far as it was played; a turn makes another one, in the same environment."""

    choice: Choice
    episode: Episode
    by_hand: tuple[bool, ...] = ()
    """Of each turn: whether a person has written the response."""
    outcome: Outcome | None = None
    """The last answer of the environment."""
    is_over: bool = False
    comparisons: Mapping[int, Comparison] = field(default_factory=dict)
    """By the number of the turn, from 1."""
    hold: _Hold = field(default_factory=_Hold)

    @property
    def turns(self) -> Sequence[Turn]:
        return self.episode.turns

    @property
    def number(self) -> int:
        """Of the turn that is to be played, from 1."""
        return len(self.turns) + 1

    @property
    def stop_reason(self) -> StopReason | None:
        if self.outcome is None or not self.is_over:
            return None
        return self.episode.finished(self.outcome, policy_version="").stop_reason

    def context(self, number: int) -> tuple[int, ...]:
        """All tokens that are read before the response of a turn, that of the next one included."""
        prompts = [(turn.prompt_token_ids, turn.restarts_context) for turn in self.turns]
        prompts.append((self.episode.prompt.token_ids, self.episode.prompt.restarts))
        tokens: tuple[int, ...] = ()
        for index, (prompt, restarts) in enumerate(prompts[:number]):
            before = () if restarts or index == 0 else self.turns[index - 1].response_token_ids
            tokens = prompt if restarts else tokens + before + prompt
        return tokens


class World:
    """The tasks and the environment of a run, for any number of visitors and threads.

    Every episode has an environment of its own, which is not given back to the pool: others would
    take from it at the same time. It is closed when no page shows the episode any more.
    """

    def __init__(self, session: Session, context: ContextManager) -> None:
        self.config, self.context = session.config, context
        self._environments = session.environments
        self.num_tasks = {
            split: len(tasks)
            for split in self._environments.properties.splits
            if (tasks := self._environments.tasks(split))
        }
        """Of each split that has tasks."""

    @property
    def properties(self) -> EnvironmentProperties:
        return self._environments.properties

    def begin(self, choice: Choice) -> PlayedEpisode:
        """The episode before its first turn.

        Raises ConfigError for a task that is not there, ContextError for one that does not fit.
        """
        num_tasks = self.num_tasks.get(choice.split)
        if num_tasks is None:
            expected = ", ".join(self.num_tasks)
            raise ConfigError(f"split: got {choice.split!r:.80}, expected one of {expected}")
        if not 0 <= choice.task < num_tasks:
            raise ConfigError(
                f"task: got {choice.task} of {choice.split}, expected one from 0 to {num_tasks - 1}"
            )
        plan = EvaluationPlan(
            choice.split, choice.task + 1, choice.temperature, seed=self.config.seed
        )
        request = plan.requests(self._environments, repeat=choice.draw)[choice.task]
        (episode,) = begin_episodes([(0, request)], self._environments, self.context)
        played = PlayedEpisode(choice, episode)
        discard = weakref.finalize(played.hold, self._environments.discard, episode.environment)
        discard.atexit = False  # the pool closes what is left then
        return played

    def play(self, played: PlayedEpisode, response: Response) -> PlayedEpisode:
        text = self.context.decode(response.token_ids)
        return self._play(played, response, text, by_hand=False)

    def play_by_hand(self, played: PlayedEpisode, text: str) -> PlayedEpisode:
        """Executes what a person has written; raises ConfigError if it does not fit."""
        limits = self.context.limits
        tokens = tuple(self.context.encode_response(text))
        num_read = played.episode.num_read_tokens
        if not tokens or not limits.fit(num_read, num_response_tokens=len(tokens)):
            raise ConfigError(
                "a response has at least 1 token and at most "
                f"{limits.max_context_tokens - num_read} here (agent.max_context_tokens), "
                f"and this one has {len(tokens)}"
            )
        response = Response(tokens, (0.0,) * len(tokens), stopped=True)
        return self._play(played, response, text, by_hand=True)

    def back_to(self, played: PlayedEpisode, number: int) -> PlayedEpisode:
        """The episode as it was before turn `number`, which has been played.

        Raises EnvironmentFaultError where the environment plays it differently now.
        """
        again = self.begin(played.choice)
        for index, old in enumerate(played.turns[: number - 1]):
            truncated = TurnFlag.RESPONSE_TRUNCATED.value in old.flags
            response = Response(old.response_token_ids, old.logprobs, stopped=not truncated)
            again = self._play(again, response, old.response, by_hand=played.by_hand[index])
            following = played.turns[index + 1]
            is_same = again.turns[-1] == old and again.episode.observation == following.observation
            if again.is_over or not is_same:
                raise EnvironmentFaultError(
                    f"the way back to turn {number} is not open: the environment "
                    f"{self.properties.name!r}, played again with the same task, seed and "
                    f"actions, did something else in turn {index + 1}. The episode is as it was"
                )
        earlier = {key: each for key, each in played.comparisons.items() if key < number}
        return replace(again, comparisons=earlier)

    def _play(
        self, played: PlayedEpisode, response: Response, text: str, *, by_hand: bool
    ) -> PlayedEpisode:
        episode = replace(played.episode, turns=list(played.turns))
        answered = [(episode, response, text)]
        ((outcome, is_over),) = play_turns(answered, self._environments, self.context)
        return replace(
            played,
            episode=episode,
            by_hand=(*played.by_hand, by_hand),
            outcome=outcome,
            is_over=is_over,
        )
