"""The records that travel along the path task -> rollout -> trajectory -> V* -> loss -> evaluation.

All are frozen. A field keeps its meaning from where it is made to where it is read: token ids,
log-probabilities and the loss mask are recorded when a token is sampled and never rebuilt from
text.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
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
    """What was noticed about one turn. An environment may add flags of its own as plain strings."""

    FORMAT_ERROR = "format_error"
    """The response was not `<think>...</think><answer>...</answer>`; no action could be read."""
    INVALID_ACTION = "invalid_action"
    """An action was read, and the environment could not execute it."""
    RESPONSE_TRUNCATED = "response_truncated"
    """The token limit ended the response before its closing tag."""
    TARGET_SHOWN = "target_shown"
    """The environment showed the goal in the observation that followed this turn's action."""
    MISTAKE = "mistake"
    """A scripted teacher went wrong on purpose, to show how to go on: read, never imitated."""


@dataclass(frozen=True)
class Task:
    """One problem of an environment. Use `make_task`, which computes `task_id` from the content."""

    environment: str
    task_id: str
    instruction: str
    split: str
    category: str
    payload: Mapping[str, Any] = field(default_factory=dict)
    """What the environment needs to set the task up; JSON values only."""


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
    """One exchange: what the agent read, wrote and got."""

    observation: str
    """What the agent read before it wrote the response."""
    prompt_token_ids: tuple[int, ...]
    """What this turn added to the context before the response, or all of it if it restarts."""
    response_token_ids: tuple[int, ...]
    """Exactly the sampled tokens, the turn's end token included."""
    logprobs: tuple[float, ...]
    """log pi of each sampled token at the sampling temperature, from the policy that sampled it."""
    response: str
    """The response as text, for people; never tokenised again."""
    thought: str
    action: str
    """What was executed; empty after a format error."""
    reward: float
    """What the turn earned, costs for bad format or invalid actions included."""
    flags: tuple[str, ...] = ()
    state_key: str | None = None
    """Identifies the state in which the response was written, where the environment can say."""
    restarts_context: bool = False
    """Whether the tokens of earlier turns stand in front of the prompt no longer."""


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
    """What the environment said last; the agent never read it."""
    policy_version: str
    seed: int
    """The seed of this episode's draws: environment and sampling."""

    @property
    def episode_return(self) -> float:
        """The undiscounted sum of the turns' rewards, R(tau)."""
        return sum(turn.reward for turn in self.turns)

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
    """One context of a trajectory as model and loss see it; all tuples have length T.

    The full context gives one sample a trajectory; a window gives another one whenever it moves.
    """

    token_ids: tuple[int, ...]
    loss_mask: tuple[bool, ...]
    """True exactly at the sampled tokens."""
    logprobs: tuple[float, ...]
    """log pi at sampling time; 0.0 where the mask is False."""


def training_samples(trajectory: Trajectory) -> tuple[TrainingSample, ...]:
    """Joins the turns that share a context, mask and log-probabilities as recorded.

    Every sampled token is in exactly one sample; as part of a later prompt it is not sampled. A
    turn that is flagged as a teacher's mistake is read and not sampled.
    """
    turns = trajectory.turns
    cuts = [place for place, turn in enumerate(turns) if place > 0 and turn.restarts_context]
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
