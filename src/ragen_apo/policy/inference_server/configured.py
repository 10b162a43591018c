"""The servers that a configuration names, and what is said where they cannot play.

`read_facts` asks each of them before anything is played.
"""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import urlsplit

from ragen_apo.addresses import is_loopback
from ragen_apo.config.rollouts import RolloutsConfig
from ragen_apo.distributed.torchrun import this_worker
from ragen_apo.errors import ConfigError, ServerError
from ragen_apo.policy.api_keys import read_key
from ragen_apo.policy.inference_server.vllm import ServerFacts, VllmServer
from ragen_apo.policy.inference_server.wire import RequestError

_KEPT = (
    "What a run has saved is kept. Once the server is well, let a training go on with --resume, "
    "and give any other command again. Without servers a run goes on by `ragen-apo train "
    "--run-dir RUN --resume --rollouts.engine local`"
)


def servers_of(settings: RolloutsConfig) -> list[VllmServer]:
    """The configured servers.

    Raises ConfigError where the key for them is not there, or where several hosts cannot share
    them.
    """
    _require_shared(settings)
    variable, seconds = settings.api_key_env, settings.timeout_seconds
    key = variable and read_key(variable, option="rollouts.api_key_env")
    return [VllmServer(url, timeout_seconds=seconds, key=key) for url in settings.base_url]


def _require_shared(settings: RolloutsConfig) -> None:
    """Raises ConfigError for servers, or their files, that only one of several hosts has."""
    worker = this_worker()
    if worker.local_size == worker.size:
        return
    if settings.model_folder is None:
        raise ConfigError(
            "rollouts.model_folder is null, which is a temporary folder of the first host, and "
            "torchrun has started processes on several hosts. Set it to a folder that has the same "
            "path on the first host and on all machines of the servers"
        )
    own = [url for url in settings.base_url if is_loopback(urlsplit(url).hostname or "")]
    if own:
        raise ConfigError(
            f"rollouts.base_url names {', '.join(own)}, which on each host is another machine, and "
            "torchrun has started processes on several hosts. Give addresses that all of them reach"
        )


def require_room(facts: ServerFacts, num_tokens: int) -> None:
    """Raises RequestError if a server's longest context is shorter than an episode's may be."""
    if facts.max_context_tokens < num_tokens:
        raise RequestError(
            f"it takes contexts of {facts.max_context_tokens} tokens, and "
            f"agent.max_context_tokens is {num_tokens}",
            advice=f"Start it with --max-model-len {num_tokens}",
            is_final=True,
        )


def read_facts(settings: RolloutsConfig, *, num_tokens: int) -> dict[str, ServerFacts]:
    """What each configured server says of itself, by its address, each asked once.

    Those that do not answer, or have no room for an episode, are left out. Raises ServerError if
    that leaves none; ConfigError where the key for them is not there.
    """
    found: dict[str, ServerFacts] = {}
    problems: list[str] = []
    for server in servers_of(settings):
        try:
            facts = server.facts()
            server.label()
            require_room(facts, num_tokens)
        except RequestError as failure:
            problems.append(described(server, failure, 1))
        else:
            found[server.base_url] = facts
    if not found:
        raise no_server_left(problems)
    return found


def described(server: VllmServer, failure: RequestError, num_failures: int) -> str:
    """What failed where, how often, and what can be done about it."""
    times = f" ({num_failures} times in a row)" if num_failures > 1 else ""
    return f"{server.base_url}: {failure}{times}. {failure.advice}."


def no_server_left(problems: Sequence[str]) -> ServerError:
    """The error where every server has a problem; of several ranks it names this one."""
    worker = this_worker()
    rank = f"{worker.name}: " if worker.size > 1 else ""
    head = f"None of {len(problems)} servers is left. " if len(problems) > 1 else ""
    return ServerError(f"{rank}{head}{' '.join(problems)} {_KEPT}")
