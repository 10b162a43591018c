"""An environment in a process of its own (`rollouts.environment_processes`).

    reset, step -> a line -> process_host -> a JSON line -> answer, state key

So environments that compute use several cores, one that crashes ends no run, and one that takes too
long is killed. The answers are those that it would give here.
"""

import base64
import json
import os
import pickle
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from ragen_apo import errors
from ragen_apo.config.references import file_of, is_reference
from ragen_apo.environments.base import EnvironmentProperties, ScriptedPolicy, TextEnvironment
from ragen_apo.environments.toolkit.line_process import LineProcess
from ragen_apo.errors import ConfigError
from ragen_apo.types import Task

START_SECONDS = 120.0
"""At least; where `reset` may take longer, the start may as well."""
CLOSE_SECONDS = 60.0
"""For `close()` of the environment, and for its process to end."""
_HOST = "ragen_apo.environments.process_host"
_ERRORS = {
    name: kind
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, errors.RagenApoError)
}


class EnvironmentProcessError(Exception):
    """What became of a call, in words that follow the name of the environment."""

    def __init__(self, problem: str, *, may_pass: bool) -> None:
        """`may_pass`: another attempt may succeed."""
        super().__init__(problem)
        self.may_pass = may_pass


class ProcessEnvironment:
    """An environment whose episodes are played in a process of its own.

    Properties, tasks and scripted policies are those of one in this process.
    """

    def __init__(
        self,
        name: str,
        options: Mapping[str, Any],
        *,
        like: TextEnvironment,
        timeout_seconds: float | None = None,
    ) -> None:
        """Starts the process, and does not wait for it.

        `timeout_seconds` is how long `reset` and `step` may take. Raises ConfigError for an
        environment that another process cannot find.
        """
        _require_found_elsewhere(name)
        self._like, self._timeout_seconds = like, timeout_seconds
        try:
            self._process = LineProcess(_HOST, variables=_variables())
        except OSError as error:
            raise ConfigError(
                f"rollouts.environment_processes: no process can be started ({error}); raise the "
                "system's limit, or lower training.num_rows, the number of episodes at a time"
            ) from error
        self._process.send(_line(name, dict(options)))
        self._has_started = self._is_waiting = False
        self._state_key: str | None = None

    @property
    def properties(self) -> EnvironmentProperties:
        return self._like.properties

    def tasks(self, split: str) -> Sequence[Task]:
        return self._like.tasks(split)

    def scripted_policies(self) -> Mapping[str, Callable[[], ScriptedPolicy]]:
        return self._like.scripted_policies()

    def reset(self, task: Task, *, seed: int) -> tuple[str, dict[str, Any]]:
        if not self._has_started:
            seconds = max(START_SECONDS, self._timeout_seconds or 0.0)
            self._receive(within_seconds=seconds, doing="its start")
            self._has_started = True
        observation, info = self._ask("reset", task, seed)
        return observation, info

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = self._ask("step", action)
        return observation, reward, terminated, truncated, info

    def state_key(self) -> str:
        """That which came with the last answer; asked for where the episode is over.

        None where the environment does not say, as `state_key_of` takes it in this process.
        """
        if self._state_key is None:
            self._ask("state_key")
        return cast("str", self._state_key)

    def begin_to_close(self) -> None:
        """Lets it close while others do; `close` waits for it."""
        if not self._is_waiting:
            self._process.end_input()

    def close(self) -> None:
        """Closes the environment and waits for its process; one that is at work is killed."""
        self.begin_to_close()
        if not self._is_waiting:
            self._process.ending(within_seconds=CLOSE_SECONDS)
        self._process.kill()

    def _ask(self, what: str, *arguments: Any) -> Any:
        self._process.send(_line(what, arguments))
        return self._receive(within_seconds=self._timeout_seconds, doing=what)

    def _receive(self, *, within_seconds: float | None, doing: str) -> Any:
        self._is_waiting = True
        began = time.monotonic()
        line = self._process.answer(within_seconds=within_seconds)
        if line is None:
            if within_seconds is not None and time.monotonic() - began >= within_seconds:
                problem = (
                    f"{doing} took longer than {within_seconds:g} s, and its process was ended "
                    "(rollouts.environment_timeout_seconds)"
                )
            else:
                problem = f"its process ended during {doing} ({self._process.ending()})"
            raise EnvironmentProcessError(problem, may_pass=True)
        self._is_waiting = False
        kind, said, self._state_key = json.loads(line)
        if kind in _ERRORS:
            raise _ERRORS[kind](said)
        if kind != "answer":
            raise EnvironmentProcessError(said, may_pass=kind == "raised")
        return said


def _line(what: str, arguments: Any) -> str:
    """A request. It holds what JSON would change, such as tuples and whole numbers as keys."""
    return base64.b64encode(pickle.dumps((what, arguments))).decode()


def _variables() -> dict[str, str]:
    """Sets have the same order in all processes, and none computes with more than one thread."""
    seed = os.environ.get("PYTHONHASHSEED", "random")
    return {
        "PYTHONHASHSEED": "0" if seed == "random" else seed,
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }


def _require_found_elsewhere(name: str) -> None:
    """Raises ConfigError for an environment that the script or notebook that runs defines."""
    if not is_reference(name):
        return
    script, file = getattr(sys.modules["__main__"], "__file__", None), file_of(name)
    is_script = name.startswith("__main__:")
    if script and file and os.path.exists(script) and file.exists():
        is_script = file.samefile(script)
    if is_script:
        raise ConfigError(
            f"rollouts.environment_processes: {name} is defined in what runs here, which other "
            "processes would run again; expected an environment that a file of its own defines"
        )
