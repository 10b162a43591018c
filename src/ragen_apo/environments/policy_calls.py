"""Calls of scripted policies, which a user may have written: errors say what was expected."""

from collections.abc import Callable
from typing import cast

from ragen_apo.environments.base import Reply, ScriptedPolicy
from ragen_apo.errors import EnvironmentFaultError
from ragen_apo.types import Task


def is_of_the_call(error: TypeError) -> bool:
    """Whether what was called did not take its arguments, and none of its code was run.

    To be asked where the error is caught, right around the call.
    """
    return error.__traceback__ is not None and error.__traceback__.tb_next is None


def made_policy(name: str, make: Callable[[], object]) -> ScriptedPolicy:
    """The policy of that name; raises EnvironmentFaultError for what makes none."""
    expected = (
        "expected a class or function without parameters that makes an object with begin and act"
    )
    try:
        policy = make()
    except TypeError as error:
        if not is_of_the_call(error):
            raise
        raise EnvironmentFaultError(
            f"the scripted policy {name!r} cannot be made ({error}); {expected}"
        ) from error
    if not all(callable(getattr(policy, method, None)) for method in ("begin", "act")):
        raise EnvironmentFaultError(
            f"the scripted policy {name!r} is an object of the type {type(policy).__name__}; "
            f"{expected}"
        )
    return cast(ScriptedPolicy, policy)


def begin_policy(policy: ScriptedPolicy, task: Task, *, seed: int) -> None:
    """Calls `begin`; raises EnvironmentFaultError where it does not take what it is given."""
    try:
        policy.begin(task, seed=seed)
    except TypeError as error:
        if not is_of_the_call(error):
            raise
        raise EnvironmentFaultError(
            f"the scripted policy {type(policy).__name__}: begin does not take what it is given "
            f"({error}); expected def begin(self, task, *, seed)"
        ) from error


def reply_of(policy: ScriptedPolicy, observation: str) -> Reply:
    """What `act` returns; raises EnvironmentFaultError for what is no `Reply`."""
    who = f"the scripted policy {type(policy).__name__}"
    try:
        reply = policy.act(observation)
    except TypeError as error:
        if not is_of_the_call(error):
            raise
        raise EnvironmentFaultError(
            f"{who}: act does not take what it is given ({error}); expected def act(self, "
            "observation)"
        ) from error
    if not isinstance(reply, Reply):
        raise EnvironmentFaultError(
            f"{who}: act returned {type(reply).__name__}; expected a Reply, such as "
            'Reply(thought="", action="...")'
        )
    return reply
