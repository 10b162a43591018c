"""Episodes played by scripted policies: demonstrations and baselines.

Environment manager, context manager, parser and costs are those of the model, so the trajectories
have the tokens that a model with the same responses would have. Their log-probabilities are zeros:
nothing was sampled. The context manager's limits end an episode as they end the model's; a longer
response than the model may write counts with its own length. As many episodes are in progress as
environments may be at work at the same time.
"""

from collections import deque
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

from ragen_apo.agent.context import ContextManager
from ragen_apo.agent.environment_manager import EnvironmentManager, Outcome
from ragen_apo.agent.proxy import Episode, EpisodeRequest, start_episodes, started_again
from ragen_apo.agent.responses import parse_response, render_response
from ragen_apo.config.named_code import in_one_sentence
from ragen_apo.environments.answers import state_key_of
from ragen_apo.environments.base import Reply, ScriptedPolicy, TextEnvironment
from ragen_apo.environments.policy_calls import begin_policy, reply_of
from ragen_apo.policy.engine import Response
from ragen_apo.types import StopReason, Trajectory, Turn, TurnFlag


@dataclass(eq=False)
class _Playing:
    """An episode in progress."""

    episode: Episode
    policy: ScriptedPolicy
    outcome: Outcome | None = None
    """Of the last turn."""
    is_over: bool = False

    def begin(self, episode: Episode) -> None:
        """The episode from its start."""
        with _in_its_name(episode.environment):
            begin_policy(self.policy, episode.request.task, seed=episode.request.seed)
        self.episode, self.outcome = episode, None


def play_scripted_episodes(
    make_policy: Callable[[], ScriptedPolicy],
    environments: EnvironmentManager,
    requests: Iterable[EpisodeRequest],
    *,
    policy_version: str,
    context: ContextManager | None = None,
    on_finished: Callable[[int], None] = lambda done: None,
) -> list[Trajectory]:
    """One trajectory a request. Without a context manager the turns carry text and no tokens.

    `on_finished` is told how many episodes are over, whenever one more is.
    Raises ContextError if the first turn of an episode exceeds the context manager's limits.
    """
    idle: list[ScriptedPolicy] = []
    waiting = deque(enumerate(requests))
    playing: list[_Playing] = []
    finished: dict[int, Trajectory] = {}
    while waiting or playing:
        room = min(environments.num_workers - len(playing), len(waiting))
        begun = [waiting.popleft() for _ in range(room)]
        for episode in start_episodes(begun, environments):
            with _in_its_name(episode.environment):
                policy = idle.pop() if idle else make_policy()
            playing.append(_Playing(episode, policy))
            playing[-1].begin(episode)
        _play_turns(playing, environments, context)
        for each in (each for each in playing if each.is_over):
            environments.release(each.episode.environment)
            idle.append(each.policy)
            assert each.outcome is not None, "the first turn fits, or ContextError was raised"
            trajectory = each.episode.finished(each.outcome, policy_version=policy_version)
            finished[each.episode.index] = trajectory
            on_finished(len(finished))
        playing = [each for each in playing if not each.is_over]
    return [finished[index] for index in sorted(finished)]


def with_tokens(trajectory: Trajectory, context: ContextManager) -> Trajectory:
    """A trajectory that was played without a context manager, as it is with this one.

    Where the context is full it ends without a success; what was measured until then is not known.
    Raises ContextError if that is so in the first turn.
    """
    turns: list[Turn] = []
    num_tokens = 0
    for turn in trajectory.turns:
        prompt = context.prompt(turns, turn.observation)
        text = context.write_response(thought=turn.thought, action=turn.action)
        response = tuple(context.encode_response(text))
        num_read = len(prompt.token_ids) + (0 if prompt.restarts else num_tokens)
        if not context.limits.fit(num_read, num_response_tokens=len(response)):
            if not turns:
                raise context.limits.refusal(
                    trajectory.task, num_read, num_response_tokens=len(response)
                )
            return replace(
                trajectory,
                turns=tuple(turns),
                terminated=False,
                truncated=True,
                stop_reason=StopReason.CONTEXT_LIMIT,
                success=False,
                final_observation=turn.observation,
                metrics={},
            )
        num_tokens = num_read + len(response)
        turns.append(
            replace(
                turn,
                prompt_token_ids=prompt.token_ids,
                restarts_context=prompt.restarts,
                response=text,
                response_token_ids=response,
                logprobs=(0.0,) * len(response),
            )
        )
    return replace(trajectory, turns=tuple(turns))


def _play_turns(
    playing: Iterable[_Playing], environments: EnvironmentManager, context: ContextManager | None
) -> None:
    """One turn of each episode; one whose turn does not fit into the context is over."""
    replies = [(each, *reply) for each in playing if (reply := _reply(each, context))]
    parse = context.parse if context else parse_response
    outcomes = environments.map(
        environments.step_or_failure,
        [each.episode.environment for each, *_ in replies],
        [parse(text) for _, _, text, _ in replies],
    )
    for (each, reply, text, response), outcome in zip(replies, outcomes, strict=True):
        if outcome.failure:
            each.begin(started_again(each.episode, outcome.failure, environments))
            continue
        mistake = (TurnFlag.MISTAKE.value,) if reply.is_mistake else ()
        each.outcome = replace(outcome, flags=(*outcome.flags, *mistake))
        each.episode.record(response, text, reply, each.outcome)
        each.is_over = outcome.terminated or outcome.truncated


def _reply(playing: _Playing, context: ContextManager | None) -> tuple[Reply, str, Response] | None:
    """What the policy does next, as text and as tokens; None, and the end, where it does not fit.

    Raises ContextError if that is so in the first turn.
    """
    episode = playing.episode
    write = context.write_response if context else render_response
    if context:
        episode.prompt = context.prompt(episode.turns, episode.observation)
    episode.state_key = state_key_of(episode.environment)
    with _in_its_name(episode.environment):
        reply = reply_of(playing.policy, episode.observation)
        thought, action = reply.thought, reply.action
    text = write(thought=thought, action=action)
    tokens = tuple(context.encode_response(text)) if context else ()
    num_read = episode.num_read_tokens
    if context and not context.limits.fit(num_read, num_response_tokens=len(tokens)):
        if playing.outcome is None:
            raise context.limits.refusal(
                episode.request.task, num_read, num_response_tokens=len(tokens)
            )
        playing.is_over = True
        return None
    return reply, text, Response(tokens, (0.0,) * len(tokens), stopped=True)


def _in_its_name(environment: TextEnvironment) -> AbstractContextManager[None]:
    """Says whose scripted policy it is that raises something."""
    return in_one_sentence(environment.properties.name, "a scripted policy")
