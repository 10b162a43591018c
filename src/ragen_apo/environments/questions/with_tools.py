"""Questions that may be answered with the help of Python functions.

    def multiply(a: int, b: int) -> int:
        "The product of two whole numbers."
        return a * b

    def make_products(**options):
        return questions_with_tools([multiply], **options)

In each turn the policy calls a function, or several, and reads what they return; or it answers,
which ends the episode. Questions, options and rewards are those of the environment `questions`. In
the place of functions a class may stand, whose methods are called. Each episode has an object of
it.
"""

import contextlib
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from ragen_apo.environments.base import FailureWords, PatternWords, Reply, ScriptedPolicy
from ragen_apo.environments.questions.comparing import Comparison, comparison
from ragen_apo.environments.questions.environment import QuestionGame, questions_of
from ragen_apo.environments.questions.tool_object import ToolObject, gives_reward, methods_to_call
from ragen_apo.environments.toolkit.game import Answer, GameEnvironment
from ragen_apo.environments.tools import Tool, calls_of, tool_of
from ragen_apo.errors import ConfigError
from ragen_apo.printable import exception_in_words, raised_in_words, shortened
from ragen_apo.types import Task

TEXT_VERSION = 2
"""Raise it whenever the words of an observation or the dynamics change."""
MAX_TURNS = 8
REFUSALS = (ValueError, ArithmeticError, LookupError)
"""What a function raises for arguments that it cannot take: a division by 0, a key that is not
there."""
INTRODUCTION = (
    "You are asked a question. Think step by step. In each turn make one of these calls, with "
    "arguments in this order and texts in double quotes:"
)


class _Answer(Tool):
    """Its text may stand in quotes, as the rules ask of texts."""

    def arguments_of(self, action: str) -> dict[str, Any] | None:
        found = super().arguments_of(action)
        return found and {name: _unquoted(text) for name, text in found.items()}


def _unquoted(text: str) -> str:
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] == '"' else text


ANSWER = _Answer(
    "answer",
    "Answer the question, with the answer alone, such as 42. This ends the episode.",
    "answer({text})",
    {"text": {"type": "string"}},
    is_message=True,
)


@dataclass(frozen=True)
class _Toolbox:
    """What all episodes share."""

    functions: Mapping[str, Callable[..., Any]]
    classes: tuple[type, ...]
    """Of objects with methods to call, one of each for an episode."""
    tools: tuple[Tool, ...]
    """The functions, then `answer`."""
    compare: Comparison
    max_result_characters: int
    max_turns: int

    @property
    def expected(self) -> str:
        """The calls that there are, for a response that is none of them."""
        calls = ", ".join(tool.signature for tool in self.tools)
        schemas = (schema for tool in self.tools[:-1] for schema in tool.parameters.values())
        takes_text = any(schema.get("items", schema)["type"] == "string" for schema in schemas)
        how = ", with arguments in this order and texts in double quotes" if takes_text else ""
        return f"Call one of {calls}{how}."

    def result(self, function: Callable[..., Any], arguments: Mapping[str, Any]) -> str:
        """What a function returns; raises one of `REFUSALS` if it refuses the arguments."""
        try:
            return self.text_of(function(**arguments))
        except REFUSALS:
            raise
        except Exception as error:
            raise RuntimeError(
                f"{function.__name__} raised {raised_in_words(error)}; to refuse arguments, raise "
                "ValueError"
            ) from error

    def text_of(self, value: object) -> str:
        """As text that can be stored and is not too long."""
        text = str(value).encode("utf-8", "replace").decode()
        return shortened(text, self.max_result_characters)


class ToolGame:
    """One question, its calls, and one answer.

    An object that gives a reward judges the episode when it was answered or has no turn left.
    """

    def __init__(self, toolbox: _Toolbox, task: Task, seed: int) -> None:
        self._toolbox = toolbox
        self._question = QuestionGame(toolbox.compare, task, seed)
        self._said: list[tuple[str, str]] = []
        """The calls of each turn so far and what came of them. Where all were refused they count
        only if they may have changed the state of an object."""
        self._num_calls = self._num_turns = 0
        self._answered: str | None = None
        self._objects = [ToolObject(kind) for kind in toolbox.classes]
        self._judge = next((each for each in self._objects if each.gives_reward), None)
        self._functions = dict(toolbox.functions)
        for each in self._objects:
            self._functions |= each.functions
        self._row = {"question": task.instruction, "category": task.category, **task.payload}

    def first_observation(self) -> str:
        said = (each.reset(self._row) for each in self._objects)
        more = (self._toolbox.text_of(text) for text in said if text)
        return "\n".join([self._question.first_observation(), *more])

    def play(self, text: str) -> Answer:
        answer = self._answer(text.strip())
        self._num_turns += 1
        is_over = answer.terminated or self._num_turns == self._toolbox.max_turns
        if self._judge and is_over:
            reward = self._judge.reward(self._answered)
            answer = replace(answer, reward=reward, success=reward == 1)
        return replace(answer, metrics={"num_calls": self._num_calls})

    def _answer(self, text: str) -> Answer:
        calls = calls_of(self._toolbox.tools, text)
        if not calls:
            return Answer(f"No such call. {self._toolbox.expected}", invalid=True)
        tool, arguments = calls[0]
        if tool == ANSWER:
            if self._judge:
                self._answered = arguments["text"]
                return Answer("Thank you.", terminated=True)
            return self._question.play(arguments["text"])
        num_before = self._num_calls
        results = [self._result(*call) for call in calls]
        if len(calls) > 1:
            names = [tool.action_of(arguments) for tool, arguments in calls]
            results = [f"{name}: {said}" for name, said in zip(names, results, strict=True)]
        observation, num_done = "\n".join(results), self._num_calls - num_before
        if num_done or self._objects:
            self._said.append((text, observation))
        return Answer(observation, invalid=num_done < len(calls))

    def _result(self, tool: Tool, arguments: Mapping[str, Any]) -> str:
        """What a call returns, or why it refuses its arguments."""
        try:
            result = self._toolbox.result(self._functions[tool.name], arguments)
        except REFUSALS as error:
            said = str(error) if isinstance(error, ValueError) else exception_in_words(error)
            return f"{tool.name} refused its arguments: {self._toolbox.text_of(said)}"
        self._num_calls += 1
        return result

    def key(self) -> str:
        """What was called and returned, in this order, and whether it was answered."""
        return f"{self._question.key()}:{self._said}"

    def close(self) -> None:
        with contextlib.ExitStack() as stack:  # what one raises keeps no other open
            for each in self._objects:
                stack.callback(each.close)


class _Answering:
    """Answers what a scripted policy of the questions answers, by a call of `answer`."""

    def __init__(self, make_policy: Callable[[], ScriptedPolicy]) -> None:
        self._policy = make_policy()

    def begin(self, task: Task, *, seed: int) -> None:
        self._policy.begin(task, seed=seed)

    def act(self, observation: str) -> Reply:
        reply = self._policy.act(observation)
        return replace(reply, action=ANSWER.action_of({"text": reply.action}) or "")


def questions_with_tools(
    functions: Sequence[Callable[..., Any] | type],
    *,
    version: str = "1",
    policies: Mapping[str, Callable[[], ScriptedPolicy]] | None = None,
    max_result_characters: int = 2000,
    max_turns: int = MAX_TURNS,
    **options: Any,
) -> GameEnvironment:
    """The environment `questions` whose policy may also call these functions.

    Args:
        functions: As `tool_of` reads them. A call returns what `str` makes of the result. One that
            raises one of `REFUSALS` has refused its arguments, and the policy reads why; whatever
            else it raises is a fault of the environment. Equal arguments have to give equal
            results, and any thread may call it (`rollouts.num_environment_workers`). In the place
            of functions a class may stand (`ToolObject`). It is called without arguments for each
            episode, and the object's public methods are the functions; their results may depend on
            the earlier calls of the episode. It may have `reset(question=..., answer=...)`, which
            is told what else the row has as well, and may return text for the first observation;
            `get_reward()` or `get_reward(answer)`, whose number from 0 to 1 is the return in the
            place of the answer's (1 is success); and `close()`.
        version: Change it whenever a function returns something else, `reset` says or `get_reward`
            pays something else, as stored returns depend on it. Names, docstrings and types of the
            functions need no change of it.
        policies: More scripted policies, by name, or others of these names. Those of `questions`
            answer at once, so a `teacher` that shows how to call is one of yours.
        max_result_characters: A longer result, reason of a refusal, or text of `reset` is cut.
        max_turns: Turns, with that of the answer; one may have several calls.
        options: Of the environment `questions`.

    Raises ConfigError for functions that cannot be tools, and what `make_questions` raises.
    """
    if not isinstance(functions, Sequence):
        name = getattr(functions, "__name__", repr(functions))
        raise ConfigError(f"functions: got {name:.80}; expected a list, such as [{name:.80}]")
    classes = tuple(each for each in functions if isinstance(each, type))
    questions = questions_of({"max_turns": max_turns, **options}, keep_columns=bool(classes))
    if max_result_characters < 1:
        raise ConfigError(f"max_result_characters must be at least 1, got {max_result_characters}")
    tools = [tool for each in functions for tool in _tools(each)]
    toolbox = _Toolbox(
        functions={each.__name__: each for each in functions if not isinstance(each, type)},
        classes=classes,
        tools=(*tools, ANSWER),
        compare=comparison(options.get("compare", "auto")),
        max_result_characters=max_result_characters,
        max_turns=max_turns,
    )
    names = [tool.name for tool in toolbox.tools]
    if len(set(names)) < len(names):
        raise ConfigError(
            f"functions: got {', '.join(names[:-1])}; expected different names, none of them answer"
        )
    calls = [line for tool in toolbox.tools for line in _in_the_rules(tool)]
    judges = [kind.__name__ for kind in classes if gives_reward(kind)]
    if len(judges) > 1:
        raise ConfigError(
            f"functions: {', '.join(judges)} have get_reward; expected one class that has it"
        )
    base = questions.properties
    words = replace(base.failure_words, impossible=PatternWords())
    properties = replace(
        base,
        reward_version=f"{judges[0]}-{version}" if judges else base.reward_version,
        version=(
            f"{base.version}-calls{TEXT_VERSION}-{version}-{max_result_characters}"
            f"-{_digest(toolbox)}"
        ),
        rules="\n".join([INTRODUCTION, *calls]),
        failure_words=FailureWords() if judges else words,
        tools=toolbox.tools,
    )
    answering = {
        name: partial(_Answering, make) for name, make in questions.scripted_policies().items()
    }
    return GameEnvironment(
        properties=properties,
        tasks={split: questions.tasks(split) for split in base.splits},
        start=partial(ToolGame, toolbox),
        policies=answering | dict(policies or {}),
        max_turns=max_turns,
    )


def _digest(toolbox: _Toolbox) -> str:
    """Of what can be called and how: with other functions it is another world."""
    schemas = [tool.schema for tool in toolbox.tools]
    names = [kind.__name__ for kind in toolbox.classes]
    text = json.dumps([schemas, names] if names else schemas, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _in_the_rules(tool: Tool) -> list[str]:
    described = {name: schema.get("description") for name, schema in tool.parameters.items()}
    return [
        f"- {tool.signature}: {tool.description}",
        *(f"  {name}: {words}" for name, words in described.items() if words),
    ]


def _tools(given: Callable[..., Any] | type) -> Sequence[Tool]:
    """Of a function, or of the methods of a class."""
    if not callable(given):
        kind = type(given).__name__
        raise ConfigError(
            f"functions: got an object of {kind}; expected functions, or a class, such as {kind} "
            "itself, without calling it"
        )
    try:
        if not isinstance(given, type):
            return [_joinable(given)]
        tools = [_joinable(method) for method in methods_to_call(given).values()]
    except ValueError as error:
        raise ConfigError(f"functions: {error}") from error
    if not tools and not gives_reward(given):
        raise ConfigError(
            f"functions: the class {given.__name__} has no public methods to call, nor get_reward"
        )
    return tools


def _joinable(function: Callable[..., Any]) -> Tool:
    return replace(tool_of(function), is_joinable=True)
