"""Episodes as chat messages: the form of an answer, the conversation, the end of an episode."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

import pytest

from ragen_apo.agent.assembly import build_environments
from ragen_apo.agent.chat import (
    SEE_BELOW,
    ChatEpisode,
    Question,
    chat_messages,
    play_chat_episodes,
    read_call,
    read_form,
)
from ragen_apo.agent.context import ContextManager, ContextWindow
from ragen_apo.agent.environment_manager import EnvironmentManager
from ragen_apo.agent.responses import ParsedResponse, parse_response
from ragen_apo.environments.questions.with_tools import ANSWER
from ragen_apo.environments.tools import FunctionTool
from ragen_apo.errors import ApiError
from ragen_apo.evaluation.evaluate import EvaluationPlan
from ragen_apo.policy.chat_api.answer import Answer, ToolCall
from ragen_apo.policy.chat_api.client import ContextFullError
from ragen_apo.policy.tokenizer import train_tokenizer
from ragen_apo.types import StopReason
from tests import factories
from tests.factories import NO_LIMITS

FORM = "<think>a mug</think><answer>search mug</answer>"

# The form of an answer


@pytest.mark.parametrize(
    ("content", "reasoning", "thought"),
    [
        (FORM, "", "a mug"),
        (f"{FORM}\n\nIs that all right?", "", "a mug"),
        (f"{FORM}{FORM}", "", "a mug"),
        (FORM, "long thoughts", "a mug"),
        ("a mug</think><answer>search mug</answer>", "", "a mug"),
        (f"<think>long thoughts</think>\n\n{FORM}", "", "a mug"),
        (f"long thoughts</think>\n\n{FORM}", "", "a mug"),
        (f"{' ' * 100_000}{FORM}", "", "a mug"),
        ("<answer>search mug</answer>", "<think>a mug", "a mug"),
    ],
    ids=[
        "the form",
        "something after it",
        "twice",
        "reasoning beside it",
        "first tag in the template",
        "reasoning before it",
        "reasoning that the template has opened before it",
        "a long run of spaces",
        "thought split off by the server",
    ],
)
def test_the_form_is_found_where_models_and_servers_put_it(
    content: str, reasoning: str, thought: str
) -> None:
    parsed = parse_response(read_form(Answer(content, reasoning=reasoning)).text)
    assert (parsed.is_valid, parsed.action, parsed.thought) == (True, "search mug", thought)


@pytest.mark.parametrize(
    "content",
    ["", "search mug", "<answer>search mug</answer>", f"Sure! {FORM}", "<think>a</think> search"],
)
def test_what_does_not_have_the_form_stays_a_format_error(content: str) -> None:
    assert not parse_response(read_form(Answer(content)).text).is_valid


def test_later_messages_quote_the_answer_without_the_reasoning_that_the_server_split_off() -> None:
    form = read_form(Answer("<answer>search mug</answer>", reasoning="long thoughts"))
    assert form.said == "<answer>search mug</answer>"


def test_an_empty_answer_is_quoted_as_none() -> None:
    assert read_form(Answer(" \n")).said == "(no answer)"


# The conversation


@pytest.mark.parametrize("num_turns", range(4))
@pytest.mark.parametrize(
    "window",
    [ContextWindow(), ContextWindow(num_turns=1), ContextWindow(num_turns=0, num_actions=2)],
    ids=["full", "last turn", "actions"],
)
def test_messages_are_what_the_context_manager_writes_as_tokens(
    window: ContextWindow, num_turns: int
) -> None:
    """With the package's own chat template, read from the first token of the conversation on."""
    tokenizer = train_tokenizer(["a page with a mug", FORM], vocab_size=300)
    context = ContextManager(tokenizer, system_prompt="the rules", window=window, limits=NO_LIMITS)
    said = [f"<think>{n}</think><answer>search {n}</answer>" for n in range(num_turns)]
    turns, read = [], []
    for number, text in enumerate(said):
        prompt = context.prompt(turns, f"page {number}")
        read = [*([] if prompt.restarts else read), *prompt.token_ids]
        ids = context.encode_response(text)
        turns.append(
            factories.turn(
                observation=f"page {number}",
                response_token_ids=ids,
                action=f"search {number}",
            )
        )
        read += ids
    prompt = context.prompt(turns, "the last page")
    read = [*([] if prompt.restarts else read), *prompt.token_ids]
    forms = [read_form(Answer(text)) for text in said]
    messages = chat_messages(
        turns, forms, "the last page", system_prompt="the rules", window=window
    )
    rendered = tokenizer.apply_chat_template(
        list(messages), tokenize=False, add_generation_prompt=True
    )
    assert tokenizer.decode(read, skip_special_tokens=False) == rendered


# Episodes


class Model:
    """Answers by a function of the question."""

    def __init__(self, answer: Callable[[Question], Answer]) -> None:
        self.answer, self.stopped = answer, threading.Event()

    def stop(self) -> None:
        self.stopped.set()


def shop() -> EnvironmentManager:
    config = factories.config()
    return build_environments(config.environment, config.agent)


def play(answer: Callable[[Question], Answer], *, concurrency: int = 4) -> list[ChatEpisode]:
    environments = shop()
    return play_chat_episodes(
        Model(answer),
        environments,
        EvaluationPlan("all", 5, 0.0, seed=0).requests(environments),
        system_prompt="the rules",
        window=ContextWindow(),
        concurrency=concurrency,
        policy_version="m",
    )


def test_a_question_says_which_episode_and_turn_it_is_of() -> None:
    asked: list[tuple[int, int, int]] = []

    def answer(question: Question) -> Answer:
        asked.append((question.episode, question.turn, len(question.messages)))
        return Answer(FORM)

    play(answer, concurrency=1)
    # the system prompt and an observation, then two messages more a turn; three turns at most
    assert asked == [(episode, turn, 2 + 2 * turn) for episode in range(5) for turn in range(3)]


def test_a_full_context_truncates_its_episode_alone() -> None:
    def answer(question: Question) -> Answer:
        if question.episode == 1 and question.turn == 1:
            raise ContextFullError("no room")
        return Answer(FORM)

    episodes = play(answer)
    assert [each.context_full for each in episodes] == [False, True, False, False, False]
    cut = episodes[1].trajectory
    assert (cut.truncated, cut.stop_reason) == (True, StopReason.CONTEXT_LIMIT)
    assert len(cut.turns) == len(episodes[1].answers) == 1


def test_a_task_that_does_not_fit_at_all_is_an_episode_without_turns() -> None:
    def answer(question: Question) -> Answer:
        if question.episode == 0:
            raise ContextFullError("no room")
        return Answer(FORM)

    first = play(answer)[0].trajectory
    assert (first.turns, first.success, first.episode_return) == ((), False, 0)
    assert first.stop_reason == StopReason.CONTEXT_LIMIT


@pytest.mark.parametrize(
    ("answer", "is_valid", "action", "thought"),
    [
        (Answer("42"), True, "answer(42)", ""),
        (Answer("42", "Six times seven."), True, "answer(42)", "Six times seven."),
        (Answer("42", finish_reason="length"), False, "", ""),
        (Answer("42", finish_reason="content_filter"), False, "", ""),
        (Answer("", "Six times seven."), False, "", ""),
    ],
)
def test_an_answer_without_a_call_is_the_message_unless_it_was_cut_off(
    answer: Answer, is_valid: bool, action: str, thought: str
) -> None:
    form = read_call(answer, [ANSWER])
    assert (form.parsed.is_valid, form.parsed.action) == (is_valid, action)
    assert form.calls == ()
    if is_valid:
        assert (form.parsed.thought, form.said) == (thought, "42")


def test_each_of_several_calls_is_quoted_and_the_last_has_the_results() -> None:
    numbers = {"a": {"type": "integer"}, "b": {"type": "integer"}}
    add = FunctionTool("add", "Adds.", "add({a}, {b})", numbers, is_joinable=True)
    answer = Answer(
        "I add.",
        tool_calls=(ToolCall("add", '{"a": 1, "b": 2}'), ToolCall("add", '{"a": 3, "b": 4}')),
    )
    form = read_call(answer, [add, ANSWER])
    assert form.parsed == ParsedResponse("I add.", "add(1, 2)\nadd(3, 4)", is_valid=True)
    repeated = replace(answer, tool_calls=tuple(replace(c, id="x") for c in answer.tool_calls))
    assert read_call(repeated, [add, ANSWER]).calls == form.calls, "servers refuse equal ids"
    both = replace(answer, content=f"{answer.content}{form.text.removeprefix(answer.content)}")
    assert read_call(both, [add, ANSWER]).parsed == form.parsed, "left in the text as well"
    said, first, last = form.messages("add(1, 2): 3\nadd(3, 4): 7")
    assert said["content"] == "I add."
    assert [call["function"]["arguments"] for call in said["tool_calls"]] == [
        '{"a": 1, "b": 2}',
        '{"a": 3, "b": 4}',
    ]
    assert [call["id"] for call in said["tool_calls"]] == ["call1", "call2"]
    assert first == {"role": "tool", "tool_call_id": "call1", "content": SEE_BELOW}
    assert last["tool_call_id"] == "call2"
    assert last["content"].endswith("7")


def test_an_answer_that_the_limit_cut_off_is_flagged() -> None:
    turn = play(lambda _: Answer("<think>so", finish_reason="length"))[0].trajectory.turns[0]
    assert set(turn.flags) == {"format_error", "response_truncated"}


def test_what_a_model_says_after_its_answer_does_not_cut_that_off() -> None:
    turn = play(lambda _: Answer(f"{FORM} And", finish_reason="length"))[0].trajectory.turns[0]
    assert turn.flags == ()


def test_any_other_error_stops_the_model_and_ends_the_evaluation() -> None:
    def answer(question: Question) -> Answer:
        raise ApiError("no such model")

    environments = shop()
    model = Model(answer)
    with pytest.raises(ApiError, match="no such model"):
        play_chat_episodes(
            model,
            environments,
            EvaluationPlan("all", 5, 0.0, seed=0).requests(environments),
            system_prompt=None,
            window=ContextWindow(),
            concurrency=2,
            policy_version="m",
        )
    assert model.stopped.is_set()


def test_no_more_questions_are_under_way_than_asked_for() -> None:
    lock, together = threading.Lock(), [0, 0]
    everybody = threading.Barrier(3, timeout=10)

    def answer(question: Question) -> Answer:
        with lock:
            together[0] += 1
            together[1] = max(together)
        if question.turn == 0 and question.episode < 3:
            everybody.wait()  # three of them are under way at the same time
        with lock:
            together[0] -= 1
        return Answer(FORM)

    play(answer, concurrency=3)
    assert together == [0, 3]
