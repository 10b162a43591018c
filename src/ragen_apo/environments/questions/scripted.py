"""Scripted policies for questions: who works them out, who stops early, who guesses, who knows."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from ragen_apo.environments.base import Reply, ScriptedPolicy
from ragen_apo.environments.questions.arithmetic import expression_of, steps_of
from ragen_apo.environments.toolkit.scripted import MixedPolicy
from ragen_apo.seeding import generator
from ragen_apo.types import Task

TEACHER_GOOD_SHARE = 0.35
"""How often the teacher of arithmetic works a question out to its end."""
MAX_GUESSES = 1_000
"""So many different answers the guessing policy knows."""


def arithmetic_policies(tasks: Sequence[Task]) -> Mapping[str, Callable[[], ScriptedPolicy]]:
    """Those of generated questions; the teacher is right on easy ones, and at times on others."""
    return {
        "teacher": partial(
            MixedPolicy, Reckoner, Hasty, good_share=TEACHER_GOOD_SHARE, whole_episodes=True
        ),
        "oracle": Reckoner,
        "hasty": Hasty,
        "random": partial(Guesser, _different(_answers(tasks))),
        "heuristic": Reckoner,
    }


def known_answer_policies(tasks: Sequence[Task]) -> Mapping[str, Callable[[], ScriptedPolicy]]:
    """Those of questions from elsewhere; `tasks` are those of the training questions."""
    answers = _answers(tasks)
    commonest = Counter(answers).most_common(1)[0][0]
    return {
        "teacher": AnswerKey,
        "oracle": AnswerKey,
        "random": partial(Guesser, _different(answers)),
        "heuristic": partial(Guesser, (commonest,)),
    }


def _answers(tasks: Sequence[Task]) -> list[str]:
    return [str(task.payload["answer"]) for task in tasks]


def _different(answers: Sequence[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(answers))[:MAX_GUESSES]


class Reckoner:
    """Works a generated question out, step by step in its thought; no payload is needed."""

    def begin(self, task: Task, *, seed: int) -> None:
        self._steps = steps_of(expression_of(task.instruction) or "0 + 0")

    def act(self, observation: str) -> Reply:
        thought = "; ".join(step.text for step in self._steps)
        return Reply(thought=thought, action=str(self._steps[-1].result))


class Hasty(Reckoner):
    """Takes the first step for the last: right where there are two terms."""

    def act(self, observation: str) -> Reply:
        return Reply(thought=self._steps[0].text, action=str(self._steps[0].result))


class Guesser:
    """Answers with any of the given answers; with one, always with that."""

    def __init__(self, answers: Sequence[str]) -> None:
        self._answers = tuple(answers)

    def begin(self, task: Task, *, seed: int) -> None:
        self._generator = generator(seed, "question-guess")

    def act(self, observation: str) -> Reply:
        guess = self._answers[int(self._generator.integers(len(self._answers)))]
        return Reply(thought="a guess", action=guess)


class AnswerKey:
    """Knows the answer from the payload, and the derivation where the data has one."""

    def begin(self, task: Task, *, seed: int) -> None:
        self._reply = Reply(
            thought=str(task.payload.get("solution", "the answer is known")),
            action=str(task.payload["answer"]),
        )

    def act(self, observation: str) -> Reply:
        return self._reply
