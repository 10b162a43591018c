"""Episodes played by scripted policies: demonstrations and baselines.

Environment manager, context manager, parser and costs are those of the model, so the trajectories
have the tokens that a model with the same responses would have. Their log-probabilities are zeros:
nothing was sampled. The context manager's limits end an episode as they end the model's; a longer
response than the model may write counts with its own length.
"""

from collections.abc import Callable, Iterable

from ragen_apo.agent.context import ContextManager, Prompt, parse_response, render_response
from ragen_apo.agent.environment_manager import EnvironmentManager, Outcome
from ragen_apo.agent.proxy import EpisodeRequest, finished_trajectory
from ragen_apo.environments.base import Reply, ScriptedPolicy
from ragen_apo.types import Trajectory, Turn, TurnFlag

NO_PROMPT = Prompt(token_ids=(), restarts=False)


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


def _flags(reply: Reply, outcome: Outcome) -> tuple[str, ...]:
    mistake = (TurnFlag.MISTAKE.value,) if reply.is_mistake else ()
    return (*outcome.flags, *mistake)


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
    turns: list[Turn] = []
    num_context_tokens, outcome = 0, None
    while outcome is None or not (outcome.terminated or outcome.truncated):
        prompt = context.prompt(turns, observation) if context else NO_PROMPT
        state_key = environment.state_key()
        reply = policy.act(observation)
        text = render_response(thought=reply.thought, action=reply.action)
        response = context.encode_response(text) if context else []
        num_read_tokens = len(prompt.token_ids) + (0 if prompt.restarts else num_context_tokens)
        if limits and not limits.fit(num_read_tokens, num_response_tokens=len(response)):
            if outcome is None:
                raise limits.refusal(
                    request.task, num_read_tokens, num_response_tokens=len(response)
                )
            break
        outcome = environments.step([environment], [parse_response(text)])[0]
        turns.append(
            Turn(
                observation=observation,
                prompt_token_ids=prompt.token_ids,
                response_token_ids=tuple(response),
                logprobs=(0.0,) * len(response),
                response=text,
                thought=reply.thought,
                action=reply.action,
                reward=outcome.reward,
                flags=_flags(reply, outcome),
                state_key=state_key,
                restarts_context=prompt.restarts,
            )
        )
        observation = outcome.observation
        num_context_tokens = num_read_tokens + len(response)
    environments.release(environment)
    return finished_trajectory(request, turns, outcome, policy_version=policy_version)
