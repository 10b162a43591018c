"""Episodes played by a model that reads chat messages: one behind an API.

    requests -> messages -> [ask -> form -> parse -> step -> messages] ... -> trajectories

Environment manager, window, parser and costs are those of `agent.proxy`, and so are tasks and
seeds. Questions run side by side, and the environments of those that are answered as far as the
manager lets them. An episode's questions depend on that episode alone, so their number changes no
result.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from typing import Protocol

from ragen_apo.agent.context import ContextWindow
from ragen_apo.agent.environment_manager import EnvironmentManager, Outcome
from ragen_apo.agent.proxy import Episode, EpisodeRequest, start_episodes, started_again
from ragen_apo.agent.responses import ParsedResponse, parse_response
from ragen_apo.agent.tool_calls import ToolCalls
from ragen_apo.environments.answers import state_key_of
from ragen_apo.environments.tools import Tool
from ragen_apo.policy.call_form import CallForm
from ragen_apo.policy.chat_api.answer import Answer, ToolCall
from ragen_apo.policy.chat_api.client import ContextFullError, Message
from ragen_apo.policy.engine import Response
from ragen_apo.policy.tokenizer import CLOSE_ANSWER, CLOSE_THOUGHT, OPEN_ANSWER, OPEN_THOUGHT
from ragen_apo.types import Trajectory, Turn

NO_ANSWER = "(no answer)"
"""Stands for an empty answer in later messages: some servers refuse empty ones."""
SEE_BELOW = "(the results of all calls follow)"
"""Stands for the result of a call that is not the last of its answer."""
CUT_OFF = ("length", "content_filter")
"""How an answer ends that is not whole."""
_FIRST_OF_TWO_THOUGHTS = re.compile(r"<think>.*?</think>\s*(?=<think>)", re.DOTALL)


@dataclass(frozen=True)
class Question:
    """What the model is asked in one turn."""

    episode: int
    """The number of the episode in the evaluation, from 0."""
    turn: int
    """From 0."""
    seed: int
    """Of the episode's draws."""
    messages: tuple[Message, ...]


class ChatModel(Protocol):
    """Answers questions, several at a time."""

    def answer(self, question: Question) -> Answer:
        """The answer; raises ContextFullError if the conversation has become too long."""
        ...

    def stop(self) -> None:
        """The evaluation ends: questions under way should come to an end."""
        ...


@dataclass(frozen=True)
class ChatEpisode:
    """A finished episode and what the server said in it."""

    trajectory: Trajectory
    answers: tuple[Answer, ...]
    """One a turn."""
    context_full: bool
    """Whether the conversation did not fit into the model's context any more."""


@dataclass(frozen=True)
class Form:
    """An answer in the form of a response."""

    text: str
    """What is parsed and recorded."""
    said: str
    """What later messages quote as the model's own words."""
    parsed: ParsedResponse
    calls: tuple[ToolCall, ...] = ()
    """What later messages quote in the place of words; the observation is the last one's result."""

    def messages(self, observation: str) -> list[Message]:
        """The answer, and what came of it."""
        said: Message = {"role": "assistant", "content": self.said}
        if not self.calls:
            return [said, {"role": "user", "content": observation}]
        quoted: list[Message] = []
        results: list[Message] = []
        for number, call in enumerate(self.calls, start=1):
            function = {"name": call.name, "arguments": call.arguments}
            quoted.append({"id": call.id, "type": "function", "function": function})
            result = observation if number == len(self.calls) else SEE_BELOW
            results.append({"role": "tool", "tool_call_id": call.id, "content": result})
        return [said | {"tool_calls": quoted}, *results]


def read_form(answer: Answer) -> Form:
    """The part of an answer that is to be `<think>...</think><answer>...</answer>`.

    It ends with the first closing tag, where the package's own sampler ends a response. A model
    that thinks before it answers has the form behind its thoughts. Where server or chat template
    have taken the first tag or the whole thought for such thinking, it is put back.
    """
    text, closing, _ = answer.content.partition(CLOSE_ANSWER)
    text += closing
    before, closes_thought, _ = text.partition(CLOSE_THOUGHT)
    if closes_thought and OPEN_THOUGHT not in before:
        text = f"{OPEN_THOUGHT}{text}"
    if first := _FIRST_OF_TWO_THOUGHTS.match(text.lstrip()):
        text = text.lstrip()[first.end() :]
    said = text.strip() or NO_ANSWER
    if answer.reasoning and text.lstrip().startswith(OPEN_ANSWER):
        text = f"{_thought(answer)}{text.lstrip()}"
    return Form(text, said, parse_response(text))


def read_call(answer: Answer, tools: Sequence[Tool]) -> Form:
    """The thought and the calls of an answer, as one response.

    Calls that can be read are quoted later as what they are; other answers are, as words.
    """
    form = CallForm()
    thought = _thought(answer) if answer.reasoning else ""
    written = [form.write(call.name, call.arguments) for call in answer.tool_calls]
    # Some servers leave in the text what they have read out of it.
    content = form.split(answer.content)[0] if written else answer.content
    text = "\n".join([f"{thought}{content}", *written])
    parsed = ToolCalls(tools, form).parse(text, is_cut_off=answer.finish_reason in CUT_OFF)
    said = answer.content.strip()
    calls = answer.tool_calls if parsed.is_valid else ()
    if not calls:
        return Form(text, said or NO_ANSWER, parsed)
    if len({call.id for call in calls} - {""}) < len(calls):  # some have none, or the same
        numbered = enumerate(calls, start=1)
        calls = tuple(replace(call, id=f"call{number}") for number, call in numbered)
    return Form(text, said, parsed, calls)


def _thought(answer: Answer) -> str:
    """What the server has split off as the model's own thinking, as a thought."""
    thought = re.sub(r"</?(?:think|answer)>", "", answer.reasoning).strip()
    return f"{OPEN_THOUGHT}{thought}{CLOSE_THOUGHT}"


def chat_messages(
    turns: Sequence[Turn],
    said: Sequence[Form],
    observation: str,
    *,
    system_prompt: str | None,
    window: ContextWindow,
) -> tuple[Message, ...]:
    """The conversation up to the model's next answer; `said` are its earlier ones.

    The same that `ContextManager.prompt` writes as tokens.
    """
    num_left_out = window.num_left_out(len(turns))
    observations = window.observations(turns, observation)
    messages: list[Message] = []
    if system_prompt:
        messages.append({"role": "system", "content": system_prompt})
    messages.append({"role": "user", "content": observations[0]})
    for form, result in zip(said[num_left_out:], observations[1:], strict=True):
        messages += form.messages(result)
    return tuple(messages)


@dataclass(eq=False)
class _Conversation:
    """An episode in progress."""

    episode: Episode
    outcome: Outcome
    """Of the last turn; before the first one, that nothing has happened."""
    answers: list[Answer] = field(default_factory=list)
    said: list[Form] = field(default_factory=list)
    context_full: bool = False

    @property
    def is_over(self) -> bool:
        return self.outcome.terminated or self.outcome.truncated or self.context_full


def _begun(episode: Episode) -> _Conversation:
    return _Conversation(episode, Outcome(episode.observation))


def play_chat_episodes(
    model: ChatModel,
    environments: EnvironmentManager,
    requests: Sequence[EpisodeRequest],
    *,
    system_prompt: str | None,
    window: ContextWindow,
    concurrency: int,
    policy_version: str,
    on_finished: Callable[[ChatEpisode], None] | None = None,
) -> list[ChatEpisode]:
    """One episode a request, in their order; `concurrency` of them are played at a time.

    An episode whose conversation becomes too long is truncated. Any other error of the model ends
    the evaluation, after the answers under way.
    """
    waiting, finished = deque(enumerate(requests)), dict[int, ChatEpisode]()
    under_way: dict[Future[Answer], _Conversation] = {}
    with ThreadPoolExecutor(max_workers=concurrency, thread_name_prefix="question") as pool:

        def ask(conversation: _Conversation) -> None:
            episode = conversation.episode
            messages = chat_messages(
                episode.turns,
                conversation.said,
                episode.observation,
                system_prompt=system_prompt,
                window=window,
            )
            number, seed = len(episode.turns), episode.request.seed
            question = Question(episode.index, number, seed, messages)
            under_way[pool.submit(model.answer, question)] = conversation

        def finish(conversation: _Conversation) -> None:
            episode = conversation.episode
            environments.release(episode.environment)
            over = ChatEpisode(
                episode.finished(conversation.outcome, policy_version=policy_version),
                tuple(conversation.answers),
                conversation.context_full,
            )
            finished[episode.index] = over
            if on_finished:
                on_finished(over)

        try:
            while waiting or under_way:
                room = min(concurrency - len(under_way), len(waiting))
                begun = [waiting.popleft() for _ in range(room)]
                for episode in start_episodes(begun, environments):
                    ask(_begun(episode))
                done = wait(under_way, return_when=FIRST_COMPLETED).done
                # In the order in which they were asked, so that little depends on the clock.
                futures = [future for future in under_way if future in done]
                answered = [(under_way.pop(future), future) for future in futures]
                for conversation in _play_turns(environments, answered):
                    if conversation.is_over:
                        finish(conversation)
                    else:
                        ask(conversation)
        except BaseException:
            model.stop()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return [finished[index] for index in range(len(requests))]


def _play_turns(
    environments: EnvironmentManager, answered: Sequence[tuple[_Conversation, Future[Answer]]]
) -> Iterator[_Conversation]:
    """One environment step with each answer; none if the conversation has become too long.

    A conversation whose environment raised begins again.
    """

    def step(conversation: _Conversation, form: Form | None) -> Outcome | None:
        return form and environments.step_or_failure(conversation.episode.environment, form.parsed)

    conversations = [conversation for conversation, _ in answered]
    forms = (_read(*each, environments.tools) for each in answered)
    outcomes = environments.map(step, conversations, forms)
    for conversation, outcome in zip(conversations, outcomes, strict=True):
        if outcome and outcome.failure:
            yield _begun(started_again(conversation.episode, outcome.failure, environments))
            continue
        if outcome:
            answer, form = conversation.answers[-1], conversation.said[-1]
            stopped = CLOSE_ANSWER in answer.content or answer.finish_reason != "length"
            response = Response((), (), stopped=stopped)
            conversation.episode.record(response, form.text, form.parsed, outcome)
            conversation.outcome = outcome
        yield conversation


def _read(
    conversation: _Conversation, future: Future[Answer], tools: Sequence[Tool]
) -> Form | None:
    """The answer in its form; None if the conversation has become too long."""
    try:
        answer = future.result()
    except ContextFullError:
        conversation.context_full = True
        return None
    conversation.answers.append(answer)
    conversation.said.append(read_call(answer, tools) if tools else read_form(answer))
    conversation.episode.state_key = state_key_of(conversation.episode.environment)
    return conversation.said[-1]
