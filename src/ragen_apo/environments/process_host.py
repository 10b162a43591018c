"""The process of an environment: a JSON line in, a JSON line out (`environments.process`).

It closes the environment and ends when its input does.
"""

import contextlib
import json
import os
import queue
import threading
import time
from typing import IO, Any

from ragen_apo.environments.answers import problem_with_reset, problem_with_step
from ragen_apo.environments.base import TextEnvironment, close_environment, make_environment
from ragen_apo.environments.foreign import FOREIGN_FAILURES
from ragen_apo.environments.process import CLOSE_SECONDS
from ragen_apo.environments.toolkit.line_process import answering
from ragen_apo.errors import RagenApoError
from ragen_apo.printable import raised_in_words
from ragen_apo.types import Task

_Answer = tuple[str, Any]
"""Its kind and what it says: `answer`, `raised`, `problem`, or the name of an error of ours."""


def main() -> None:
    """Answers lines until there are no more."""
    lines, answers = answering()
    asked: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(lines, asked), daemon=True).start()
    host = _Host()
    with contextlib.suppress(OSError):  # the parent has gone
        while (line := asked.get()) is not None:
            print(json.dumps(host.answer(*json.loads(line))), file=answers, flush=True)
    host.close()


def _read(lines: IO[str], asked: "queue.SimpleQueue[str | None]") -> None:
    """Passes lines on. When there are no more, the environment has some time to come to its end."""
    for line in lines:
        asked.put(line)
    asked.put(None)
    time.sleep(CLOSE_SECONDS)
    os._exit(1)


class _Host:
    """The environment, once it is made."""

    def __init__(self) -> None:
        self._environment: TextEnvironment | None = None

    def answer(self, what: str, arguments: Any) -> _Answer:
        """What comes of one call; the first names the environment and its options."""
        try:
            if self._environment is None:
                self._environment = make_environment(what, arguments)
                return "answer", None
            return self._played(self._environment, what, arguments)
        except RagenApoError as error:
            return type(error).__name__, str(error)
        except SystemExit as error:
            return "problem", f"it tried to end the process ({error!r:.80})"
        except FOREIGN_FAILURES as error:
            return "raised", f"it raised {raised_in_words(error)}"

    def close(self) -> None:
        """Closes the environment, if there is one; what it raises is shown."""
        if self._environment is not None:
            close_environment(self._environment)

    def _played(self, environment: TextEnvironment, what: str, arguments: list[Any]) -> _Answer:
        if what == "state_key":
            return "answer", environment.state_key()
        if what == "reset":
            task, seed = arguments
            answer: Any = environment.reset(Task(**task), seed=seed)
            problem = problem_with_reset(answer)
            return ("problem", problem) if problem else ("answer", [answer[0], {}])
        answer = environment.step(*arguments)
        problem = problem_with_step(answer)
        if problem:
            return "problem", problem
        observation, reward, terminated, truncated, info = answer
        return "answer", [
            observation,
            float(reward),
            bool(terminated),
            bool(truncated),
            _told(info),
        ]


def _told(info: Any) -> dict[str, Any]:
    """What is read of the info, as JSON values."""
    told: dict[str, Any] = {
        name: bool(info[name]) for name in ("success", "invalid_action") if name in info
    }
    if "flags" in info:
        told["flags"] = [str(flag) for flag in info["flags"]]
    if "metrics" in info:
        told["metrics"] = {name: float(value) for name, value in info["metrics"].items()}
    return told
