"""Calls of a scripted policy that say what it has to take and to return, where it does not."""

from ragen_apo.environments.base import Reply, ScriptedPolicy
from ragen_apo.errors import EnvironmentFaultError
from ragen_apo.printable import shortened
from ragen_apo.types import Task


def begin_policy(policy: ScriptedPolicy, task: Task, *, seed: int) -> None:
    """Calls `begin`; raises EnvironmentFaultError where it does not take what it is given."""
    try:
        policy.begin(task, seed=seed)
    except TypeError as error:
        if error.__traceback__ and error.__traceback__.tb_next:  # its own code has raised it
            raise
        raise EnvironmentFaultError(
            f"the scripted policy {type(policy).__name__}: begin does not take what it is given "
            f"({error}); expected def begin(self, task, *, seed)"
        ) from error


def reply_of(policy: ScriptedPolicy, observation: str) -> Reply:
    """What `act` returns; raises EnvironmentFaultError for what is no `Reply`."""
    reply = policy.act(observation)
    if not isinstance(reply, Reply):
        raise EnvironmentFaultError(
            f"the scripted policy {type(policy).__name__}: act returned "
            f"{shortened(repr(reply), 80)}; expected a Reply, such as "
            'Reply(thought="", action="...")'
        )
    return reply
