"""The agent proxy: drives a policy through environments and returns trajectories.

    requests -> first prompts -> [respond -> parse -> step -> next prompt] ... -> trajectories

An episode continues as soon as its response is over, and a row whose episode is over takes the next
request at once, so the batch stays full. The order of requests fixes the batches, and with them
every bit of the result where the policy samples in this process. In lockstep an episode waits until
all the others have their response, too, so that their environments can act side by side.

Several ranks deal the requests out among themselves (`WorkQueue`), and each receives all
trajectories. An episode has a generator of its own, so it does not depend on who plays it, up to
the rounding of a batch.

An episode whose environment raised may begin again (`EnvironmentManager.num_retries`), with the
same seed and so with the same draws.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import TypeAdapter

from ragen_apo.agent.context import ContextManager, Prompt
from ragen_apo.agent.environment_manager import EnvironmentManager, Outcome
from ragen_apo.agent.responses import ParsedResponse
from ragen_apo.choices import EpisodeSchedule
from ragen_apo.distributed.ranks import ALONE, Ranks
from ragen_apo.distributed.work_queue import WorkQueue
from ragen_apo.environments.answers import state_key_of
from ragen_apo.environments.base import Reply, TextEnvironment
from ragen_apo.errors import EnvironmentRaisedError
from ragen_apo.policy.engine import Engine, Response
from ragen_apo.seeding import generator
from ragen_apo.types import StopReason, Task, Trajectory, Turn, TurnFlag

NO_PROMPT = Prompt((), restarts=False)
OnFinished = Callable[[Sequence[tuple[int, Trajectory]]], None]
"""Receives (index of the request, trajectory) pairs as soon as they are over."""
_TRAJECTORIES = TypeAdapter(list[tuple[int, Trajectory]])


@dataclass(frozen=True)
class EpisodeRequest:
    """One episode to play: its task, and the seed of all its draws."""

    task: Task
    seed: int


@dataclass(eq=False)
class Episode:
    """An episode in progress."""

    index: int
    """That of its request."""
    request: EpisodeRequest
    environment: TextEnvironment
    observation: str
    prompt: Prompt = NO_PROMPT
    state_key: str = ""
    """The environment's state while the present response is written."""
    num_failures: int = 0
    """How often it has begun and its environment then raised something."""
    num_context_tokens: int = 0
    """Tokens of the context after the last response."""
    turns: list[Turn] = field(default_factory=list)
    metrics: Mapping[str, float] = field(default_factory=dict)
    """The last value of each that the environment has measured."""

    @property
    def num_read_tokens(self) -> int:
        """Tokens of the context before the present response."""
        num_kept = 0 if self.prompt.restarts else self.num_context_tokens
        return num_kept + len(self.prompt.token_ids)

    def record(
        self, response: Response, text: str, reading: ParsedResponse | Reply, outcome: Outcome
    ) -> None:
        """Adds the turn; then the next observation replaces the present one."""
        truncated = () if response.stopped else (TurnFlag.RESPONSE_TRUNCATED.value,)
        self.turns.append(
            Turn(
                observation=self.observation,
                prompt_token_ids=self.prompt.token_ids,
                response_token_ids=response.token_ids,
                logprobs=response.logprobs,
                response=text,
                thought=reading.thought,
                action=reading.action,
                reward=outcome.reward,
                flags=outcome.flags + truncated,
                state_key=self.state_key,
                restarts_context=self.prompt.restarts,
            )
        )
        self.num_context_tokens = self.num_read_tokens + len(response.token_ids)
        self.observation = outcome.observation
        # A new one: the branches of a search begin with the same.
        self.metrics = {**self.metrics, **outcome.metrics}

    def finished(self, last: Outcome, *, policy_version: str) -> Trajectory:
        """The trajectory; an episode that its environment did not end has a full context."""
        at_limit = StopReason.TURN_LIMIT if last.truncated else StopReason.CONTEXT_LIMIT
        return Trajectory(
            task=self.request.task,
            turns=tuple(self.turns),
            terminated=last.terminated,
            truncated=not last.terminated,
            stop_reason=StopReason.TERMINATED if last.terminated else at_limit,
            success=last.success,
            final_observation=last.observation,
            policy_version=policy_version,
            seed=self.request.seed,
            metrics=self.metrics,
        )


Indexed = Sequence[tuple[int, EpisodeRequest]]
"""Requests with their indices."""


def start_episodes(requests: Indexed, environments: EnvironmentManager) -> Iterator[Episode]:
    """The episodes of requests with their first observation, and no prompt yet."""

    def start(numbered: tuple[int, EpisodeRequest]) -> Episode:
        index, request = numbered
        environment, observation = environments.start(request.task, seed=request.seed)
        return Episode(index, request, environment, observation)

    return environments.map(start, requests)


def begin_episodes(
    requests: Indexed, environments: EnvironmentManager, context: ContextManager
) -> Iterator[Episode]:
    """The episodes of requests before their first response, with the prompt of that.

    Raises ContextError if prompt and longest response do not fit into the context.
    """
    for episode in start_episodes(requests, environments):
        _give_first_prompt(episode, context)
        yield episode


def _give_first_prompt(episode: Episode, context: ContextManager) -> None:
    episode.prompt = context.prompt((), episode.observation)
    if not context.limits.fit(episode.num_read_tokens):
        raise context.limits.refusal(episode.request.task, episode.num_read_tokens)
    episode.state_key = state_key_of(episode.environment)


def started_again(
    episode: Episode, failure: EnvironmentRaisedError, environments: EnvironmentManager
) -> Episode:
    """The episode with its first observation, after its environment raised this.

    Raises the failure if the episode may not begin again.
    """
    environments.require_retry(failure, episode.num_failures + 1)
    (again,) = start_episodes([(episode.index, episode.request)], environments)
    again.num_failures = episode.num_failures + 1
    return again


def play_turns(
    answered: Sequence[tuple[Episode, Response, str]],
    environments: EnvironmentManager,
    context: ContextManager,
    *,
    may_fail: bool = False,
) -> Iterator[tuple[Outcome, bool]]:
    """Executes a response, given with its text, in each of some episodes and records the turns.

    Yields the environment's answer, and whether the episode is over; if not, the episode has its
    next prompt. With `may_fail`, and if the environments have retries, an answer may be a failure.
    """
    acting = [episode.environment for episode, _, _ in answered]
    readings = [
        context.parse(text, is_cut_off=not response.stopped) for _, response, text in answered
    ]
    step = environments.step_or_failure if may_fail else environments.step
    outcomes = environments.map(step, acting, readings)
    for (episode, response, text), parsed, outcome in zip(
        answered, readings, outcomes, strict=True
    ):
        if outcome.failure:
            yield outcome, True
            continue
        episode.record(response, text, parsed, outcome)
        if outcome.terminated or outcome.truncated:
            yield outcome, True
            continue
        episode.prompt = context.prompt(episode.turns, episode.observation)
        is_over = not context.limits.fit(episode.num_read_tokens)
        if not is_over:
            episode.state_key = state_key_of(episode.environment)
        yield outcome, is_over


class AgentProxy:
    """Plays episodes with a language model."""

    def __init__(
        self,
        engine: Engine[Any],
        environments: EnvironmentManager,
        context: ContextManager,
        *,
        ranks: Ranks = ALONE,
        schedule: EpisodeSchedule = "static",
        lockstep: bool = False,
    ) -> None:
        """`schedule` decides which of the ranks plays an episode; see `WorkQueue`.

        `lockstep`: all episodes in progress take their turns together.
        """
        self.engine, self.environments, self.context = engine, environments, context
        self.ranks, self.lockstep = ranks, lockstep
        self.schedule: EpisodeSchedule = schedule

    def rollout(
        self,
        requests: Sequence[EpisodeRequest],
        *,
        temperature: float,
        policy_version: str,
        on_finished: OnFinished | None = None,
    ) -> list[Trajectory]:
        """One trajectory a request, in the order of the requests, on every rank.

        `on_finished` lets a caller save trajectories before all are over. With several ranks it is
        called on the first alone, with those of the others at the end.
        """
        ranks, what = self.ranks, f"trajectories of {policy_version}"
        queue = WorkQueue(ranks, len(requests), schedule=self.schedule, what=what)
        own = self._play(
            requests, queue, temperature, policy_version, on_finished if ranks.is_first else None
        )
        if ranks.size == 1:
            return [own[index] for index in range(len(requests))]
        encoded = json.dumps([[index, each.to_json()] for index, each in own.items()]).encode()
        played = own
        for rank, part in enumerate(ranks.gather(encoded, what)):
            received = dict(_TRAJECTORIES.validate_python(json.loads(part)))
            if on_finished and ranks.is_first and rank > 0 and received:
                on_finished(sorted(received.items()))
            played |= received
        return [played[index] for index in range(len(requests))]

    def _play(
        self,
        requests: Sequence[EpisodeRequest],
        queue: WorkQueue,
        temperature: float,
        policy_version: str,
        on_finished: OnFinished | None,
    ) -> dict[int, Trajectory]:
        """What this process plays itself, by the index of the request."""
        active: dict[Any, Episode] = {}
        finished: dict[int, Trajectory] = {}
        with self.engine.rollout():
            while active or not queue.is_empty:
                room = min(self.engine.num_free_rows, queue.width - len(active))
                active |= self._start([(index, requests[index]) for index in queue.take(room)])
                responses = self._responses(len(active), temperature)
                played = [(row, active.pop(row), response) for row, response in responses]
                going_on, ended = self._play_turns(played, policy_version)
                active |= going_on
                finished |= ended
                if on_finished and ended:
                    on_finished(sorted(ended.items()))
        return finished

    def _start(self, requests: Indexed) -> dict[Any, Episode]:
        """The episodes of these requests, by their rows, which have been asked to respond."""
        episodes = begin_episodes(requests, self.environments, self.context)
        return {self._open_row(episode): episode for episode in episodes}

    def _open_row(self, episode: Episode) -> Any:
        """A row that has been asked for the episode's first response."""
        row = self.engine.open_row(generator(episode.request.seed, "sampling"))
        self.submit(row, episode)
        return row

    def _responses(self, num_active: int, temperature: float) -> list[tuple[Any, Response]]:
        """Those that are over after the engine's next step; in lockstep one of every episode."""
        responses = self.engine.step(temperature=temperature) if num_active else []
        while self.lockstep and len(responses) < num_active:
            responses += self.engine.step(temperature=temperature)
        return responses

    def submit(self, row: Any, episode: Episode) -> None:
        """Asks the engine for the next response of an episode."""
        self.engine.submit(
            row,
            episode.prompt.token_ids,
            max_new_tokens=self.context.limits.max_response_tokens,
            restarts=episode.prompt.restarts,
        )

    def _play_turns(
        self, played: Sequence[tuple[Any, Episode, Response]], policy_version: str
    ) -> tuple[dict[Any, Episode], dict[int, Trajectory]]:
        """One environment step for each episode with a response: those that go on, by their rows,
        which have been asked to respond, and those that ended.
        """
        going_on: dict[Any, Episode] = {}
        ended: dict[int, Trajectory] = {}
        answered = [
            (episode, response, self.context.decode(response.token_ids))
            for _, episode, response in played
        ]
        turns = play_turns(answered, self.environments, self.context, may_fail=True)
        for (row, episode, _), (outcome, is_over) in zip(played, turns, strict=True):
            if not is_over:
                self.submit(row, episode)
                going_on[row] = episode
                continue
            self.engine.close_row(row)
            if outcome.failure:
                again = started_again(episode, outcome.failure, self.environments)
                _give_first_prompt(again, self.context)
                going_on[self._open_row(again)] = again
                continue
            ended[episode.index] = episode.finished(outcome, policy_version=policy_version)
            self.environments.release(episode.environment)
        return going_on, ended
