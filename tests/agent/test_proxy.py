"""Episodes of a language model in the shop: order, refilling, limits, and what is recorded."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from ragen_apo.agent.context import FULL_CONTEXT, ContextManager, ContextWindow, TokenLimits
from ragen_apo.agent.environment_manager import EnvironmentManager
from ragen_apo.agent.proxy import AgentProxy, EpisodeRequest
from ragen_apo.agent.scripted import play_scripted_episodes
from ragen_apo.environments.base import Reply
from ragen_apo.environments.shop import ShopEnvironment
from ragen_apo.errors import ContextError, EnvironmentFaultError, EnvironmentRaisedError
from ragen_apo.policy.generation import GenerationEngine
from ragen_apo.policy.language_model import LanguageModel
from ragen_apo.policy.sampling import StopRule
from ragen_apo.policy.scoring import score_tokens
from ragen_apo.types import StopReason, Task, Trajectory, TurnFlag, training_samples
from tests.chat_templates import GEMMA, R1, UNTHINKING, with_template
from tests.factories import NO_LIMITS
from tests.sweeps import quick_first

MAX_RESPONSE_TOKENS = 12
MAX_TURNS = 3


@pytest.fixture
def environments() -> EnvironmentManager:
    return EnvironmentManager(
        lambda: ShopEnvironment(max_turns=MAX_TURNS),
        format_penalty=-0.05,
        invalid_action_penalty=0.0,
    )


@pytest.fixture
def requests(environments: EnvironmentManager) -> list[EpisodeRequest]:
    return [EpisodeRequest(task, 100 + i) for i, task in enumerate(environments.tasks("test")[:7])]


def proxy(
    model: LanguageModel,
    environments: EnvironmentManager,
    *,
    num_rows: int = 8,
    capacity: int = 400,
    max_response_tokens: int = MAX_RESPONSE_TOKENS,
    window: ContextWindow = FULL_CONTEXT,
) -> AgentProxy:
    engine = GenerationEngine(model, num_rows=num_rows, capacity=capacity)
    # An untrained model never writes the closing tag: let a fifth of the vocabulary end a response.
    engine.stop_rule.end_ids |= set(range(0, len(model.tokenizer), 5))
    limits = TokenLimits(capacity, max_response_tokens)
    context = ContextManager(model.tokenizer, system_prompt=None, window=window, limits=limits)
    return AgentProxy(engine, environments, context)


def play(agent: AgentProxy, requests: Sequence[EpisodeRequest], **options) -> list[Trajectory]:
    return agent.rollout(requests, temperature=1.0, policy_version="tiny", **options)


def without_logprobs(trajectory: Trajectory) -> Trajectory:
    turns = tuple(dataclasses.replace(turn, logprobs=()) for turn in trajectory.turns)
    return dataclasses.replace(trajectory, turns=turns)


def assert_same(first: Sequence[Trajectory], second: Sequence[Trajectory]) -> None:
    """Everything equal; log-probabilities up to rounding, which depends on the batch."""
    for one, other in zip(first, second, strict=True):
        assert without_logprobs(one) == without_logprobs(other)
        for turn, other_turn in zip(one.turns, other.turns, strict=True):
            np.testing.assert_allclose(turn.logprobs, other_turn.logprobs, atol=1e-5)


def test_results_come_in_the_order_of_the_requests(
    tiny_model: LanguageModel, environments: EnvironmentManager, requests: list[EpisodeRequest]
) -> None:
    trajectories = play(proxy(tiny_model, environments), requests)
    assert [(t.task, t.seed) for t in trajectories] == [(r.task, r.seed) for r in requests]
    assert {t.policy_version for t in trajectories} == {"tiny"}


@pytest.mark.slow
def test_the_same_requests_give_the_same_bits(
    tiny_model: LanguageModel, environments: EnvironmentManager, requests: list[EpisodeRequest]
) -> None:
    agent = proxy(tiny_model, environments, num_rows=3)
    assert play(agent, requests) == play(agent, requests)
    assert play(proxy(tiny_model, environments, num_rows=3), requests) == play(agent, requests)


@pytest.mark.slow
@pytest.mark.parametrize("num_rows", [1, 2, 5])
def test_few_rows_that_are_refilled_play_what_many_rows_play(
    tiny_model: LanguageModel,
    environments: EnvironmentManager,
    requests: list[EpisodeRequest],
    num_rows: int,
) -> None:
    many = play(proxy(tiny_model, environments, num_rows=16), requests)
    few = play(proxy(tiny_model, environments, num_rows=num_rows), requests)
    assert_same(few, many)


def test_another_seed_gives_another_episode(
    tiny_model: LanguageModel, environments: EnvironmentManager, requests: list[EpisodeRequest]
) -> None:
    task = requests[0].task
    agent = proxy(tiny_model, environments)
    one, same, other = play(agent, [EpisodeRequest(task, seed) for seed in (1, 1, 2)])
    assert without_logprobs(one) == without_logprobs(same)
    assert one.turns[0].response_token_ids != other.turns[0].response_token_ids


@pytest.mark.slow
def test_finished_episodes_are_handed_over_once_and_early(
    tiny_model: LanguageModel, environments: EnvironmentManager, requests: list[EpisodeRequest]
) -> None:
    calls: list[list[tuple[int, Trajectory]]] = []
    agent = proxy(tiny_model, environments, num_rows=2)
    trajectories = play(agent, requests, on_finished=lambda ended: calls.append(list(ended)))
    assert sorted(index for call in calls for index, _ in call) == list(range(7))
    assert all(trajectories[index] is ended for call in calls for index, ended in call)
    assert all(call == sorted(call, key=lambda pair: pair[0]) for call in calls)
    assert len(calls) >= 4, "two rows can end at most two episodes a turn"


def test_no_requests_give_no_trajectories(
    tiny_model: LanguageModel, environments: EnvironmentManager
) -> None:
    assert play(proxy(tiny_model, environments), []) == []


@pytest.mark.parametrize(
    ("window", "num_samples"),
    quick_first(
        [
            (ContextWindow(), 1),
            (ContextWindow(num_turns=1), 2),
            (ContextWindow(num_turns=0, num_actions=1), 3),
        ]
    ),
)
def test_recorded_logprobs_equal_scored_ones(
    window: ContextWindow,
    num_samples: int,
    tiny_model: LanguageModel,
    environments: EnvironmentManager,
    requests: list[EpisodeRequest],
) -> None:
    for trajectory in play(proxy(tiny_model, environments, num_rows=3, window=window), requests):
        samples = training_samples(trajectory)
        assert len(samples) == num_samples
        for sample in samples:
            mask = torch.tensor([sample.loss_mask])
            scores = score_tokens(tiny_model, torch.tensor([sample.token_ids]), mask)
            torch.testing.assert_close(
                scores.logprobs_BT[0], torch.tensor(sample.logprobs), atol=1e-5, rtol=0
            )


@pytest.mark.slow
def test_a_window_keeps_an_episode_going_where_the_full_context_is_full(
    tiny_model: LanguageModel, environments: EnvironmentManager, requests: list[EpisodeRequest]
) -> None:
    whole = play(proxy(tiny_model, environments), requests)
    window = ContextWindow(num_turns=0, num_actions=1)
    (longest,) = play(proxy(tiny_model, environments, window=window), requests[:1])
    capacity = max(len(turn.prompt_token_ids) for turn in longest.turns) + MAX_RESPONSE_TOKENS
    assert len(training_samples(whole[0])[0].token_ids) > capacity
    (fits,) = play(proxy(tiny_model, environments, capacity=capacity, window=window), requests[:1])
    assert_same([fits], [longest])
    (cut,) = play(
        proxy(tiny_model, environments, capacity=capacity - 1, window=window), requests[:1]
    )
    assert cut.stop_reason is StopReason.CONTEXT_LIMIT


def test_the_turn_limit_ends_an_episode(
    tiny_model: LanguageModel, environments: EnvironmentManager, requests: list[EpisodeRequest]
) -> None:
    for trajectory in play(proxy(tiny_model, environments), requests):
        assert len(trajectory.turns) == MAX_TURNS
        assert trajectory.stop_reason is StopReason.TURN_LIMIT
        assert (trajectory.terminated, trajectory.truncated) == (False, True)
        assert all(TurnFlag.FORMAT_ERROR.value in turn.flags for turn in trajectory.turns)


def test_a_response_that_the_token_limit_cuts_is_flagged(
    tiny_model: LanguageModel, environments: EnvironmentManager, requests: list[EpisodeRequest]
) -> None:
    for trajectory in play(proxy(tiny_model, environments), requests):
        for turn in trajectory.turns:
            ended = turn.response_token_ids[-1] % 5 == 0
            assert (TurnFlag.RESPONSE_TRUNCATED.value in turn.flags) is not ended


def test_a_full_context_ends_an_episode(
    tiny_model: LanguageModel, environments: EnvironmentManager, requests: list[EpisodeRequest]
) -> None:
    whole = play(proxy(tiny_model, environments), requests)
    first = max(len(t.turns[0].prompt_token_ids) for t in whole)
    capacity = first + 2 * MAX_RESPONSE_TOKENS + 20
    cut = play(proxy(tiny_model, environments, capacity=capacity), requests)
    assert {t.stop_reason for t in cut} >= {StopReason.CONTEXT_LIMIT}
    for trajectory, full in zip(cut, whole, strict=True):
        (sample,) = training_samples(trajectory)
        num_tokens = len(sample.token_ids)
        assert num_tokens <= capacity
        if trajectory.stop_reason is StopReason.CONTEXT_LIMIT:
            assert (trajectory.terminated, trajectory.truncated) == (False, True)
            next_prompt = full.turns[len(trajectory.turns)].prompt_token_ids
            assert num_tokens + len(next_prompt) + MAX_RESPONSE_TOKENS > capacity
            assert trajectory.final_observation == full.turns[len(trajectory.turns)].observation


def test_a_task_that_never_fits_is_refused_and_leaves_the_agent_usable(
    tiny_model: LanguageModel, environments: EnvironmentManager, requests: list[EpisodeRequest]
) -> None:
    agent = proxy(tiny_model, environments, num_rows=4, capacity=120)
    long_task = dataclasses.replace(requests[2].task, instruction="mug " * 200)
    with pytest.raises(ContextError, match=rf"{long_task.task_id}.*max_context_tokens = 120"):
        play(agent, [*requests[:2], EpisodeRequest(long_task, 0)])
    assert agent.engine.num_free_rows == 4
    assert len(play(agent, requests)) == len(requests)


@pytest.mark.slow
def test_an_interrupted_rollout_leaves_the_agent_usable(
    tiny_model: LanguageModel, environments: EnvironmentManager, requests: list[EpisodeRequest]
) -> None:
    def interrupt(ended: object) -> None:
        raise KeyboardInterrupt

    agent = proxy(tiny_model, environments, num_rows=3)
    with pytest.raises(KeyboardInterrupt):
        play(agent, requests, on_finished=interrupt)
    assert_same(play(agent, requests), play(proxy(tiny_model, environments), requests))


@pytest.mark.slow
def test_recorded_tokens_are_those_that_were_sampled_and_read(
    tiny_model: LanguageModel,
    environments: EnvironmentManager,
    requests: list[EpisodeRequest],
    say: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Responses are spelled in single characters, which no tokenizer would give for their text."""
    vocabulary = tiny_model.tokenizer.get_vocab()
    tags = ("<think>", "</think>", "<answer>", "</answer>")
    think, end_think, answer, end_answer = (vocabulary[tag] for tag in tags)
    letters = [vocabulary[character] for character in "mug"]
    search = [vocabulary[c] for c in "search"] + [vocabulary["\u0120"]]
    response = [think, *letters, end_think, answer, *search, *letters, end_answer]
    say(tiny_model, response * MAX_TURNS)
    read: list[int] = []
    hidden_states = tiny_model.hidden_states

    def recorded(token_ids_BT: torch.Tensor, **kwargs):
        read.extend(token_ids_BT[0].tolist())
        return hidden_states(token_ids_BT, **kwargs)

    monkeypatch.setattr(tiny_model, "hidden_states", recorded)
    agent = proxy(tiny_model, environments, num_rows=1, max_response_tokens=30)
    agent.engine.stop_rule.end_ids = {end_answer}
    (trajectory,) = play(agent, requests[:1])
    assert len(trajectory.turns) == MAX_TURNS
    for turn in trajectory.turns:
        assert turn.response_token_ids == tuple(response)
        assert tiny_model.tokenizer.encode(turn.response) != response
        assert turn.action == "search mug"
        assert turn.flags in {(), (TurnFlag.TARGET_SHOWN.value,)}
    (sample,) = training_samples(trajectory)
    assert tuple(read) == sample.token_ids[:-1]


def test_the_oracle_buys_every_product(environments: EnvironmentManager) -> None:
    requests = [EpisodeRequest(task, 0) for task in environments.tasks("all")]
    trajectories = play_scripted_episodes(
        environments.scripted_policies()["oracle"], environments, requests, policy_version="oracle"
    )
    assert len(trajectories) == 497
    assert all(t.success and t.terminated and len(t.turns) == 2 for t in trajectories)
    # Helpful search 0.10, correct purchase 1.00, two turns at -0.01.
    assert {round(t.episode_return, 9) for t in trajectories} == {1.08}


def test_a_scripted_episode_has_the_tokens_that_the_model_would_have(
    tiny_model: LanguageModel,
    environments: EnvironmentManager,
    requests: list[EpisodeRequest],
    say: Callable[..., None],
) -> None:
    context = ContextManager(tiny_model.tokenizer, system_prompt=None, limits=NO_LIMITS)
    (scripted,) = play_scripted_episodes(
        environments.scripted_policies()["oracle"],
        environments,
        requests[:1],
        policy_version="tiny",
        context=context,
    )
    say(tiny_model, [token for turn in scripted.turns for token in turn.response_token_ids])
    agent = proxy(tiny_model, environments, num_rows=1, max_response_tokens=40)
    agent.engine.stop_rule.end_ids = {tiny_model.tokenizer.eos_token_id}
    assert play(agent, requests[:1]) == [scripted]


@pytest.mark.parametrize(
    "template", quick_first([GEMMA, R1, UNTHINKING]), ids=["gemma", "r1", "unthinking"]
)
def test_a_demonstration_is_what_a_policy_writes_under_templates_of_every_kind(
    tiny_model: LanguageModel,
    chatml_tokenizer,
    environments: EnvironmentManager,
    requests: list[EpisodeRequest],
    say: Callable[..., None],
    template: str,
) -> None:
    """A thought that the template opens is no format error, and is neither sampled nor taught."""
    model = LanguageModel(tiny_model.model, with_template(chatml_tokenizer, template))
    agent = proxy(model, environments, num_rows=1, capacity=1000, max_response_tokens=100)
    agent.engine.stop_rule = StopRule(model)
    (scripted,) = play_scripted_episodes(
        environments.scripted_policies()["oracle"],
        environments,
        requests[:1],
        policy_version="tiny",
        context=agent.context,
    )
    assert scripted.success
    assert not any(TurnFlag.FORMAT_ERROR.value in turn.flags for turn in scripted.turns)
    say(model, [token for turn in scripted.turns for token in turn.response_token_ids])
    assert play(agent, requests[:1]) == [scripted]
    (sample,) = training_samples(scripted)
    text = str(model.tokenizer.decode(list(sample.token_ids)))
    assert text.count("<think>") == len(scripted.turns) * (2 if template is UNTHINKING else 1)
    for turn in scripted.turns:
        assert turn.response.startswith("<think>") == (template is not R1)
        assert turn.thought


class ThreeSearches:
    """Three turns, each with the same response."""

    def begin(self, task: object, *, seed: int) -> None:
        pass

    def act(self, observation: str) -> Reply:
        return Reply(thought="find", action="search blue mug")


def scripted_within(
    limits: TokenLimits,
    model: LanguageModel,
    environments: EnvironmentManager,
    requests: Sequence[EpisodeRequest],
    *,
    window: ContextWindow = FULL_CONTEXT,
) -> list[Trajectory]:
    context = ContextManager(model.tokenizer, system_prompt=None, window=window, limits=limits)
    return play_scripted_episodes(
        ThreeSearches, environments, requests, policy_version="tiny", context=context
    )


@pytest.mark.parametrize("window", [FULL_CONTEXT, ContextWindow(num_turns=0, num_actions=1)])
def test_a_scripted_episode_ends_where_the_context_of_the_model_would_be_full(
    window: ContextWindow,
    tiny_model: LanguageModel,
    environments: EnvironmentManager,
    requests: list[EpisodeRequest],
    say: Callable[..., None],
) -> None:
    (whole,) = scripted_within(NO_LIMITS, tiny_model, environments, requests[:1], window=window)
    assert len(whole.turns) == MAX_TURNS
    response = whole.turns[0].response_token_ids
    read = [len(turn.prompt_token_ids) for turn in whole.turns]
    if window is FULL_CONTEXT:
        read = [sum(read[: n + 1]) + n * len(response) for n in range(MAX_TURNS)]
    longest = len(response) + 4
    first_without_room = read.index(max(read))
    assert first_without_room > 0
    for spare, num_turns in ((0, MAX_TURNS), (-1, first_without_room)):
        capacity = max(read) + longest + spare
        limits = TokenLimits(capacity, longest)
        (cut,) = scripted_within(limits, tiny_model, environments, requests[:1], window=window)
        assert len(cut.turns) == num_turns
        assert cut.turns == whole.turns[:num_turns]
        agent = proxy(
            tiny_model,
            environments,
            num_rows=1,
            capacity=capacity,
            max_response_tokens=longest,
            window=window,
        )
        agent.engine.stop_rule.end_ids = {tiny_model.tokenizer.eos_token_id}
        say(tiny_model, list(response) * num_turns)
        assert play(agent, requests[:1]) == [cut]
    assert (cut.stop_reason, cut.terminated) == (StopReason.CONTEXT_LIMIT, False)
    assert cut.final_observation == whole.turns[first_without_room].observation


def test_a_scripted_response_without_room_is_left_out_however_long_it_is(
    tiny_model: LanguageModel, environments: EnvironmentManager, requests: list[EpisodeRequest]
) -> None:
    (whole,) = scripted_within(NO_LIMITS, tiny_model, environments, requests[:1])
    (sample,) = training_samples(whole)
    limits = TokenLimits(len(sample.token_ids), 1)
    assert scripted_within(limits, tiny_model, environments, requests[:1]) == [whole]
    limits = TokenLimits(len(sample.token_ids) - 1, 1)
    (cut,) = scripted_within(limits, tiny_model, environments, requests[:1])
    assert cut.turns == whole.turns[:2]


def test_a_scripted_episode_whose_first_turn_does_not_fit_is_refused(
    tiny_model: LanguageModel, environments: EnvironmentManager, requests: list[EpisodeRequest]
) -> None:
    (whole,) = scripted_within(NO_LIMITS, tiny_model, environments, requests[:1])
    first = whole.turns[0]
    num_read, num_written = len(first.prompt_token_ids), len(first.response_token_ids)
    for longest in (1, num_written + 5):
        needed = max(longest, num_written)
        message = (
            rf"opens with {num_read} tokens, which with a response of {needed} exceed "
            rf"agent.max_context_tokens = {num_read + needed - 1}"
        )
        with pytest.raises(ContextError, match=message):
            scripted_within(
                TokenLimits(num_read + needed - 1, longest), tiny_model, environments, requests[:1]
            )


class Flaky(ShopEnvironment):
    """Raises in some of its calls, counted over all environments of the test."""

    calls: list[str]
    failing: frozenset[int]

    def _note(self, method: str) -> None:
        self.calls.append(method)
        if len(self.calls) in self.failing:
            raise TimeoutError("the sandbox did not answer")

    def reset(self, task: Task, *, seed: int) -> tuple[str, dict[str, Any]]:
        self._note("reset")
        return super().reset(task, seed=seed)

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self._note("step")
        return super().step(action)


def flaky(
    failing: Iterable[int], *, num_retries: int, num_workers: int = 1
) -> tuple[EnvironmentManager, list[str]]:
    """Environments that raise in these calls, from 1, and what is said about it."""
    said: list[str] = []
    kind = type("Flaky", (Flaky,), {"calls": [], "failing": frozenset(failing)})
    manager = EnvironmentManager(
        lambda: kind(max_turns=MAX_TURNS),
        format_penalty=-0.05,
        invalid_action_penalty=0.0,
        num_retries=num_retries,
        num_workers=num_workers,
        say=said.append,
    )
    return manager, said


@pytest.mark.parametrize("num_workers", [1, 3])
def test_an_episode_whose_environment_raised_begins_again_and_is_the_same(
    tiny_model: LanguageModel,
    environments: EnvironmentManager,
    requests: list[EpisodeRequest],
    num_workers: int,
) -> None:
    """A reset, a first and a later step of several episodes, and one episode twice."""
    whole = play(proxy(tiny_model, environments, num_rows=3), requests)
    failing = (2, 6, 9, 10, 17)
    manager, said = flaky(failing, num_retries=2, num_workers=num_workers)
    agent = proxy(tiny_model, manager, num_rows=3)
    assert_same(play(agent, requests), whole)
    assert len(said) == len(failing)
    assert "it raised TimeoutError (the sandbox did not answer)" in said[0]
    assert "The episode begins again, 1 of 2 times at most" in said[0]
    assert agent.engine.num_free_rows == 3


def test_an_environment_that_raises_once_too_often_ends_the_rollout(
    tiny_model: LanguageModel, requests: list[EpisodeRequest]
) -> None:
    manager, said = flaky([2, 4, 6], num_retries=2)
    with pytest.raises(EnvironmentRaisedError, match="sandbox did not answer.*turn 1"):
        play(proxy(tiny_model, manager), requests[:1])
    assert len(said) == 2
    manager, said = flaky([1, 2, 3], num_retries=2)
    with pytest.raises(EnvironmentRaisedError, match="sandbox did not answer"):
        play(proxy(tiny_model, manager), requests[:1])
    assert len(said) == 2
    manager, said = flaky([2], num_retries=0)
    with pytest.raises(EnvironmentRaisedError, match=r"rollouts\.environment_retries lets such an"):
        play(proxy(tiny_model, manager), requests[:1])
    assert not said


def test_an_answer_that_no_environment_may_give_is_not_asked_for_again(
    tiny_model: LanguageModel, requests: list[EpisodeRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    manager, said = flaky([], num_retries=5)
    monkeypatch.setattr(Flaky, "step", lambda *_: ("text", float("nan"), False, False, {}))
    with pytest.raises(EnvironmentFaultError, match="nan"):
        play(proxy(tiny_model, manager), requests[:1])
    assert not said


def test_a_scripted_episode_whose_environment_raised_begins_again_and_is_the_same(
    environments: EnvironmentManager, requests: list[EpisodeRequest]
) -> None:
    def played(manager: EnvironmentManager) -> list[Trajectory]:
        make_policy = ShopEnvironment(max_turns=MAX_TURNS).scripted_policies()["teacher"]
        return play_scripted_episodes(make_policy, manager, requests, policy_version="teacher")

    manager, said = flaky([1, 4, 7, 8], num_retries=2)
    assert played(manager) == played(environments)
    assert len(said) == 4
