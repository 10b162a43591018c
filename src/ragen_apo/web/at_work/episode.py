"""An episode that a policy and a person play together, and going back in it.

Consumes a task and responses, sampled or typed; produces turns as rollouts and evaluations record
them. Task i of a split has the seed that an evaluation gives it, so greedy play repeats that.

To go back is to play again: a fresh environment with the same seed gets the same responses. Where
it does not give the same answers, the way back is refused.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from ragen_apo.agent.context import ContextManager, ParsedResponse
from ragen_apo.agent.environment_manager import Outcome
from ragen_apo.agent.proxy import Episode, begin_episode, play_turn
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
    """The place of the task in its split, from 0."""
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


@dataclass(eq=False)
class PlayedEpisode:
    """An episode in progress, or at its end."""

    choice: Choice
    episode: Episode
    by_hand: list[bool] = field(default_factory=list)
    """Of each turn: whether a person has written the response."""
    outcome: Outcome | None = None
    """The last answer of the environment."""
    is_over: bool = False
    comparisons: dict[int, Comparison] = field(default_factory=dict)
    """By the number of the turn, from 1."""

    @property
    def turns(self) -> Sequence[Turn]:
        return self.episode.turns

    @property
    def number(self) -> int:
        """Of the turn that is to be played, from 1."""
        return len(self.turns) + 1

    @property
    def stop_reason(self) -> StopReason | None:
        """Why it is over."""
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
    """The tasks and the environment of a run, for any number of visitors and threads."""

    def __init__(self, session: Session, context: ContextManager) -> None:
        self.config, self.context = session.config, context
        self._environments = session.environments
        self._lock = threading.Lock()
        """Of the pool of environments and the tokenizer: neither is for several threads."""
        self.num_tasks = {
            split: len(tasks)
            for split in self._environments.properties.splits
            if (tasks := self._environments.tasks(split))
        }
        """Of each split that has tasks."""

    @property
    def properties(self) -> EnvironmentProperties:
        """Those of the environment."""
        return self._environments.properties

    def begin(self, choice: Choice) -> PlayedEpisode:
        """The episode before its first turn.

        Raises ConfigError for a task that is not there, ContextError for one that does not fit.
        """
        num_tasks = self.num_tasks.get(choice.split, 0)
        if not 0 <= choice.task < num_tasks:
            raise ConfigError(
                f"task: got {choice.task} of the split {choice.split!r:.80}, expected one from 0 "
                f"to {num_tasks - 1}"
                if num_tasks
                else f"split: got {choice.split!r:.80}, expected one of {', '.join(self.num_tasks)}"
            )
        plan = EvaluationPlan(
            choice.split, choice.task + 1, choice.temperature, seed=self.config.seed
        )
        with self._lock:
            request = plan.requests(self._environments, repeat=choice.draw)[choice.task]
            return PlayedEpisode(choice, begin_episode(request, self._environments, self.context))

    def play(self, played: PlayedEpisode, response: Response) -> None:
        """Executes a response of a policy."""
        with self._lock:
            text = self.context.decode(response.token_ids)
            self._play(played, response, text, by_hand=False)

    def play_by_hand(self, played: PlayedEpisode, text: str) -> None:
        """Executes what a person has written; raises ConfigError if it does not fit."""
        limits = self.context.limits
        assert limits is not None, "build_context sets them"
        with self._lock:
            tokens = tuple(self.context.encode_response(text))
            num_read = played.episode.num_read_tokens
            if not tokens or not limits.fit(num_read, num_response_tokens=len(tokens)):
                raise ConfigError(
                    f"a response has 1 to {limits.max_context_tokens - num_read} tokens here "
                    f"(agent.max_context_tokens), and this one has {len(tokens)}"
                )
            response = Response(tokens, (0.0,) * len(tokens), stopped=True)
            self._play(played, response, text, by_hand=True)

    def written(self, *, thought: str, action: str) -> str:
        """The response with this thought and action."""
        return self.context.write_response(thought=thought, action=action)

    def parsed(self, response: Response) -> tuple[str, ParsedResponse]:
        """The text of a response, and what is read in it."""
        with self._lock:
            text = self.context.decode(response.token_ids)
            return text, self.context.parse(text)

    def back_to(self, played: PlayedEpisode, number: int) -> PlayedEpisode:
        """The episode as it was before turn `number`, which has been played.

        Raises EnvironmentFaultError where the environment plays it differently now.
        """
        turns = played.turns
        earlier = self.begin(played.choice)
        with self._lock:
            for index in range(number - 1):
                if earlier.is_over or earlier.episode.observation != turns[index].observation:
                    break
                old = turns[index]
                truncated = TurnFlag.RESPONSE_TRUNCATED.value in old.flags
                response = Response(old.response_token_ids, old.logprobs, stopped=not truncated)
                self._play(earlier, response, old.response, by_hand=played.by_hand[index])
                if earlier.turns[-1] != old:
                    break
            is_same = len(earlier.turns) == number - 1 and not earlier.is_over
            if not is_same or earlier.episode.observation != turns[number - 1].observation:
                raise EnvironmentFaultError(
                    f"the way back to turn {number} is not open: the environment "
                    f"{self.properties.name!r}, played again with the same task, seed and actions, "
                    f"did something else in turn {max(1, len(earlier.turns))}. The episode is as "
                    "it was"
                )
        earlier.comparisons = {
            key: value for key, value in played.comparisons.items() if key < number
        }
        return earlier

    def release(self, played: PlayedEpisode) -> None:
        """Gives the environment of an episode back that nobody goes on with."""
        with self._lock:
            self._environments.release(played.episode.environment)

    def _play(self, played: PlayedEpisode, response: Response, text: str, *, by_hand: bool) -> None:
        played.outcome, played.is_over = play_turn(
            played.episode, response, text, self._environments, self.context
        )
        played.by_hand.append(by_hand)
