"""The records that travel along the path task -> rollout -> trajectory -> V* -> loss -> evaluation.

All are frozen. Token ids, log-probabilities and the loss mask are recorded when a token is sampled
and never rebuilt from text.

A tensor's name ends with its axes, as in `logprobs_BT`. In the whole package they are

    B  episodes (trajectories)       M  training samples (contexts of an episode)
    T  token positions               R  rows of a forward pass
    K  turns                         V  vocabulary
    S  segments of an episode        H  hidden width of the model

A digit is a length (`_B1`). Axes that one module needs besides are named in its docstring.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any


class StopReason(str, Enum):
    """Why an episode is over, as a sentence for people."""

    TERMINATED = "the environment ended the episode"
    TURN_LIMIT = "the turn limit was reached"
    CONTEXT_LIMIT = "the context was full"


class TurnFlag(str, Enum):
    """Events of one turn. An environment may add flags of its own as plain strings."""

    FORMAT_ERROR = "format_error"
    """The response did not have the form of `agent.response_format`; no action could be read."""
    INVALID_ACTION = "invalid_action"
    """An action was read, and the environment could not execute it."""
    RESPONSE_TRUNCATED = "response_truncated"
    """The token limit ended the response before its closing tag."""
    TARGET_SHOWN = "target_shown"
    """The environment showed the goal in the observation that followed this turn's action."""
    MISTAKE = "mistake"
    """A scripted teacher erred on purpose, to show how to recover: read, never imitated."""


@dataclass(frozen=True)
class Task:
    """One problem of an environment. Use `make_task`, which computes `task_id` from the content."""

    environment: str
    task_id: str
    instruction: str
    split: str
    category: str
    payload: Mapping[str, Any] = field(default_factory=dict)
    """The data from which the environment sets the task up; JSON values only."""


def make_task(
    *, environment: str, instruction: str, split: str, category: str, payload: Mapping[str, Any]
) -> Task:
    """A task whose id is a hash of its content (environment, instruction, category, payload).

    The split is not part of the id: moving a task between splits leaves its V* valid.
    """
    content = json.dumps([environment, instruction, category, dict(payload)], sort_keys=True)
    task_id = hashlib.sha256(content.encode()).hexdigest()[:16]
    return Task(
        environment=environment,
        task_id=task_id,
        instruction=instruction,
        split=split,
        category=category,
        payload=dict(payload),
    )


@dataclass(frozen=True)
class Turn:
    """One exchange: observation, response, action and reward."""

    observation: str
    """The text that the agent read before it wrote the response."""
    prompt_token_ids: tuple[int, ...]
    """The context before the response: the part that this turn added, or all if it restarts."""
    response_token_ids: tuple[int, ...]
    """Exactly the sampled tokens, the turn's end token included."""
    logprobs: tuple[float, ...]
    """log pi of each sampled token under the policy that sampled it, at the sampling temperature (1
    for a greedy turn)."""
    response: str
    """The response as text, for people; never tokenised again."""
    thought: str
    action: str
    """The text that was executed; empty after a format error."""
    reward: float
    """Of this turn, costs for bad format or invalid actions included."""
    flags: tuple[str, ...] = ()
    state_key: str | None = None
    """Identifies the state in which the response was written, where the environment can say."""
    restarts_context: bool = False
    """Whether the prompt is a new context, without the tokens of earlier turns."""


@dataclass(frozen=True)
class Trajectory:
    """A finished episode."""

    task: Task
    turns: tuple[Turn, ...]
    terminated: bool
    truncated: bool
    stop_reason: StopReason
    success: bool
    """Decided by the environment, not by the return."""
    final_observation: str
    """The last observation, which the agent never read."""
    policy_version: str
    seed: int
    """The seed of this episode's draws: environment and sampling."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """What the environment measured besides the reward (`info["metrics"]`), the last value each."""

    @property
    def episode_return(self) -> float:
        """The undiscounted sum of the turns' rewards, R(tau).

        Rounded once: the same rewards in another order are the same return, and no variance.
        """
        return math.fsum(turn.reward for turn in self.turns)

    @property
    def num_response_tokens(self) -> int:
        """The number of sampled tokens of all turns."""
        return sum(len(turn.response_token_ids) for turn in self.turns)

    @property
    def num_context_tokens(self) -> int:
        """The number of tokens of all its contexts, prompts and sampled ones."""
        return self.num_response_tokens + sum(len(turn.prompt_token_ids) for turn in self.turns)

    def to_json(self) -> dict[str, Any]:
        """The record as JSON values; pydantic's `TypeAdapter(Trajectory)` reads it back."""
        return dataclasses.asdict(self)


@dataclass(frozen=True)
class TrainingSample:
    """One context of a trajectory, as the model reads it; all tuples have length T.

    The full context gives one sample a trajectory; a window begins another one whenever it moves.
    """

    token_ids: tuple[int, ...]
    loss_mask: tuple[bool, ...]
    """True exactly at the sampled tokens."""
    logprobs: tuple[float, ...]
    """log pi at sampling time; 0.0 where the mask is False."""


def training_samples(trajectory: Trajectory) -> tuple[TrainingSample, ...]:
    """One sample for each context, with mask and log-probabilities as recorded.

    The mask is True for every sampled token in exactly one sample, not where a later prompt repeats
    it. It is False for a turn that is flagged as a teacher's mistake.
    """
    return samples_of_turns(trajectory.turns)


def samples_of_turns(turns: Sequence[Turn]) -> tuple[TrainingSample, ...]:
    """`training_samples` of an episode so far; before its first turn one that is empty."""
    cuts = [index for index, turn in enumerate(turns) if index > 0 and turn.restarts_context]
    bounds = zip([0, *cuts], [*cuts, len(turns)], strict=True)
    return tuple(_joined(turns[start:end]) for start, end in bounds)


def _joined(turns: Sequence[Turn]) -> TrainingSample:
    token_ids: list[int] = []
    loss_mask: list[bool] = []
    logprobs: list[float] = []
    for turn in turns:
        num_prompt, num_response = len(turn.prompt_token_ids), len(turn.response_token_ids)
        token_ids += turn.prompt_token_ids + turn.response_token_ids
        is_sampled = TurnFlag.MISTAKE.value not in turn.flags
        loss_mask += [False] * num_prompt + [is_sampled] * num_response
        logprobs += (0.0,) * num_prompt + turn.logprobs
    return TrainingSample(tuple(token_ids), tuple(loss_mask), tuple(logprobs))
