"""Episodes played by scripted policies: demonstrations and baselines.

They go through the same environment manager, context manager, parser and costs as the model, so
their trajectories have the same tokens as a model's would have had. Their log-probabilities are
zeros: nothing was sampled.
"""

from collections.abc import Callable, Iterable

from ragen_apo.agent.context import ContextManager, Prompt, parse_response, render_response
from ragen_apo.agent.environment_manager import EnvironmentManager, Outcome
from ragen_apo.agent.proxy import EpisodeRequest
from ragen_apo.environments.base import Reply, ScriptedPolicy
from ragen_apo.types import StopReason, Trajectory, Turn, TurnFlag

NO_PROMPT = Prompt(token_ids=(), restarts=False)


def play_scripted_episodes(
    make_policy: Callable[[], ScriptedPolicy],
    environments: EnvironmentManager,
    requests: Iterable[EpisodeRequest],
    *,
    policy_version: str,
    context: ContextManager | None = None,
) -> list[Trajectory]:
    """One trajectory a request. Without a context manager the turns carry text and no tokens."""
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
    turns: list[Turn] = []
    while True:
        prompt = context.prompt(turns, observation) if context else NO_PROMPT
        state_key = environment.state_key()
        reply = policy.act(observation)
        text = render_response(thought=reply.thought, action=reply.action)
        response = context.encode_response(text) if context else []
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
        if outcome.terminated or outcome.truncated:
            break
        observation = outcome.observation
    environments.release(environment)
    return Trajectory(
        task=request.task,
        turns=tuple(turns),
        terminated=outcome.terminated,
        truncated=outcome.truncated,
        stop_reason=StopReason.TERMINATED if outcome.terminated else StopReason.TURN_LIMIT,
        success=outcome.success,
        final_observation=outcome.observation,
        policy_version=policy_version,
        seed=request.seed,
    )
