"""Episodes played by scripted policies: demonstrations and baselines.

Environment manager, context manager, parser and costs are those of the model, so the trajectories
have the tokens that a model with the same responses would have. Their log-probabilities are zeros:
nothing was sampled. The context manager's limits end an episode as they end the model's; a longer
response than the model may write counts with its own length.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace

from ragen_apo.agent.context import ContextManager
from ragen_apo.agent.environment_manager import EnvironmentManager
from ragen_apo.agent.proxy import Episode, EpisodeRequest
from ragen_apo.agent.responses import parse_response, render_response
from ragen_apo.environments.base import ScriptedPolicy
from ragen_apo.policy.engine import Response
from ragen_apo.types import Trajectory, TurnFlag


def play_scripted_episodes(
    make_policy: Callable[[], ScriptedPolicy],
    environments: EnvironmentManager,
    requests: Iterable[EpisodeRequest],
    *,
    policy_version: str,
    context: ContextManager | None = None,
) -> list[Trajectory]:
    """One trajectory a request. Without a context manager the turns carry text and no tokens.

    Raises ContextError if the first turn of an episode exceeds the context manager's limits.
    """
    policy = make_policy()
    return [
        _play_episode(policy, environments, request, policy_version=policy_version, context=context)
        for request in requests
    ]


def _play_episode(
    policy: ScriptedPolicy,
    environments: EnvironmentManager,
    request: EpisodeRequest,
    *,
    policy_version: str,
    context: ContextManager | None,
) -> Trajectory:
    environment, observation = environments.start(request.task, seed=request.seed)
    policy.begin(request.task, seed=request.seed)
    limits = context.limits if context else None
    write = context.write_response if context else render_response
    parse = context.parse if context else parse_response
    episode, outcome = Episode(request, environment, observation), None
    while outcome is None or not (outcome.terminated or outcome.truncated):
        if context:
            episode.prompt = context.prompt(episode.turns, episode.observation)
        episode.state_key = environment.state_key()
        reply = policy.act(episode.observation)
        text = write(thought=reply.thought, action=reply.action)
        tokens = tuple(context.encode_response(text)) if context else ()
        num_read_tokens = episode.num_read_tokens
        if limits and not limits.fit(num_read_tokens, num_response_tokens=len(tokens)):
            if outcome is None:
                raise limits.refusal(request.task, num_read_tokens, num_response_tokens=len(tokens))
            break
        outcome = environments.step(environment, parse(text))
        if reply.is_mistake:
            outcome = replace(outcome, flags=(*outcome.flags, TurnFlag.MISTAKE.value))
        episode.record(Response(tokens, (0.0,) * len(tokens), stopped=True), text, reply, outcome)
    environments.release(environment)
    return episode.finished(outcome, policy_version=policy_version)
