"""The process of an environment: a line in, a JSON line out (`environments.process`).

It closes the environment and ends when its input does. Code written in C that keeps Python from
running can delay that.
"""

import base64
import contextlib
import json
import os
import pickle
import queue
import threading
import time
from typing import IO, Any

from ragen_apo.environments.answers import problem_with_reset, problem_with_step
from ragen_apo.environments.base import TextEnvironment, close_environment, make_environment
from ragen_apo.environments.process import CLOSE_SECONDS
from ragen_apo.environments.toolkit.line_process import answering
from ragen_apo.errors import RagenApoError
from ragen_apo.printable import raised_in_words

_Answer = tuple[str, Any, str | None]
"""Its kind, what it says and the state key then. The kind is `answer`, `raised`, `problem`, or the
name of an error of ours."""


def main() -> None:
    """Answers lines until there are no more."""
    lines, answers = answering()
    asked: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(lines, asked), daemon=True).start()
    host = _Host()
    with contextlib.suppress(OSError):  # the parent has gone
        while (line := asked.get()) is not None:
            request = pickle.loads(base64.b64decode(line))
            print(json.dumps(host.answer(*request)), file=answers, flush=True)
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
                return "answer", None, None
            return _played(self._environment, what, arguments)
        except RagenApoError as error:
            return type(error).__name__, str(error), None
        except SystemExit as error:
            return "problem", f"it tried to end the process ({error!r:.80})", None
        except BaseException as error:  # noqa: BLE001 - it may raise anything
            return "raised", f"it raised {raised_in_words(error)}", None

    def close(self) -> None:
        """Closes the environment, if there is one; what it raises is shown."""
        if self._environment is not None:
            close_environment(self._environment)


def _played(environment: TextEnvironment, what: str, arguments: tuple[Any, ...]) -> _Answer:
    """What comes of a call, and the state key unless the episode is over."""
    said, is_over, problem = None, False, None
    if what == "reset":
        task, seed = arguments
        answer: Any = environment.reset(task, seed=seed)
        problem = problem_with_reset(answer)
        said = problem or [answer[0], {}]
    elif what == "step":
        answer = environment.step(*arguments)
        problem = problem_with_step(answer)
        if not problem:
            observation, reward, terminated, truncated, info = answer
            is_over = bool(terminated or truncated)
            ends = [bool(terminated), bool(truncated)]
            said = [observation, float(reward), *ends, _told(info)]
    if problem:
        return "problem", problem, None
    key = None if is_over else environment.state_key()
    if not isinstance(key, str | None):
        return "problem", f"state_key answered {key!r:.80}; expected a text", None
    return "answer", said, key


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
