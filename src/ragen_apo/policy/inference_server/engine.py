"""Generation by inference servers: the rows of `GenerationEngine`, sampled elsewhere.

    submit(row, prompt) ... step() -> one request a row, answered by a server -> responses

Each request carries the whole context of its row as token ids; the server finds the part that it
knows in its prefix cache. At the start of a rollout the servers get the policy's present weights
(`weights`), and a server that has got other weights is compared with our own scoring (`agreement`).

What comes back is not reproducible: servers batch requests as they arrive and draw their own random
numbers, so an episode played again differs, under the same seed as well. A response counts once its
server has said, after it, that its weights are still those of the rollout.

A request that fails is repeated after a pause, with several servers by the next one; a server that
was started again gets its weights again. Then the run ends with a ServerError.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from ragen_apo.config.rollouts import RolloutsConfig
from ragen_apo.errors import ServerError
from ragen_apo.policy.engine import Response, too_long
from ragen_apo.policy.inference_server.agreement import require_agreement
from ragen_apo.policy.inference_server.vllm import (
    ServerFacts,
    VllmServer,
    Wanted,
    read_completion,
)
from ragen_apo.policy.inference_server.weights import Identity, PolicyWeights
from ragen_apo.policy.inference_server.wire import Request, RequestError
from ragen_apo.policy.language_model import LanguageModel
from ragen_apo.policy.sampling import StopRule

_T = TypeVar("_T")
_KEPT = (
    "What the run has saved is kept: go on with --resume once the server is well, or with "
    "rollouts.engine: local in its config.yaml"
)


@dataclass(eq=False)
class ServerRow:
    """One episode in progress."""

    server: VllmServer
    context: list[int] = field(default_factory=list)
    max_new_tokens: int = 0
    """Of the response that was asked for; 0 if none is."""
    num_failures: int = 0
    """Of the present request."""
    wanted: Wanted | None = None
    """What is under way."""
    request: Request | None = None


class ServerEngine:
    """Samples responses on servers; implements `Engine`.

    `capacity` is the longest context of a row in tokens; the servers must have room for it.
    """

    def __init__(
        self, model: LanguageModel, settings: RolloutsConfig, *, num_rows: int, capacity: int
    ) -> None:
        self.model, self.num_rows, self.capacity = model, num_rows, capacity
        self.stop_rule = StopRule(model)
        self._settings = settings
        self._servers = servers_of(settings)
        self._weights = PolicyWeights(model, settings.model_folder)
        self._served_names: dict[str, str] = {}
        """What each server calls the model that it was started with."""
        self._unchecked = set(self._servers)
        self._rows: list[ServerRow] = []
        self._identity: Identity | None = None
        self._pool: ThreadPoolExecutor | None = None
        self._under_way: dict[Future[Any], ServerRow] = {}
        self._is_broken_off = threading.Event()

    @property
    def num_free_rows(self) -> int:
        return self.num_rows - len(self._rows)

    @contextlib.contextmanager
    def rollout(self) -> Iterator[None]:
        """Inside, no weight may change: the servers get the present ones at the beginning.

        At the end every row is closed and no request is under way. Raises ServerError.
        """
        self._identity = self._weights.identity()
        self._bring(self._servers)
        self._pool = ThreadPoolExecutor(self.num_rows, thread_name_prefix="rollout")
        try:
            yield
        finally:
            for row in self._under_way.values():
                if row.request:
                    row.request.break_off()
            self._pool.shutdown(cancel_futures=True)
            self._pool, self._identity = None, None
            self._under_way.clear()
            self._rows.clear()

    def break_off(self) -> None:
        """Ends the rollout under way, and all later ones, from another thread: ServerError there.

        A computation of the rollout's own, such as an environment's step, comes to its end first.
        """
        self._is_broken_off.set()
        for server in self._servers:
            server.break_off()

    def open_row(self, draws: np.random.Generator) -> ServerRow:
        """An empty row on the server with the fewest; the server draws its own random numbers."""
        assert self.num_free_rows > 0
        loads = [sum(row.server is server for row in self._rows) for server in self._servers]
        self._rows.append(ServerRow(self._servers[loads.index(min(loads))]))
        return self._rows[-1]

    def copy_row(self, row: ServerRow, draws: np.random.Generator) -> ServerRow:
        """Another row with the same context, on the server that has it in its prefix cache."""
        assert row.max_new_tokens == 0
        copy = self.open_row(draws)
        copy.server, copy.context = row.server, list(row.context)
        return copy

    def close_row(self, row: ServerRow) -> None:
        """Ends the row."""
        assert row.wanted is None
        self._rows.remove(row)

    def submit(
        self, row: ServerRow, prompt: Sequence[int], *, max_new_tokens: int, restarts: bool = False
    ) -> None:
        """Asks for a response to the row's new prompt tokens; `step` sends it and returns it.

        With `restarts` the prompt is the row's whole context from now on. Raises ContextError, and
        changes nothing, if context and longest response exceed the capacity.
        """
        assert row.max_new_tokens == 0 and max_new_tokens > 0 and prompt
        needed = (0 if restarts else len(row.context)) + len(prompt) + max_new_tokens
        if needed > self.capacity:
            raise too_long(needed, capacity=self.capacity)
        if restarts:
            row.context.clear()
        row.context.extend(prompt)
        row.max_new_tokens, row.num_failures = max_new_tokens, 0

    def step(self, *, temperature: float) -> list[tuple[ServerRow, Response]]:
        """Sends what was submitted and waits until at least one response is there.

        Temperature 0 takes the most probable token. Raises ServerError.
        """
        self._check(temperature)
        for row in self._rows:
            if row.max_new_tokens and row.wanted is None:
                self._send(row, temperature)
        finished: list[tuple[ServerRow, Response]] = []
        while self._under_way and not finished:
            finished, failed = self._arrived()
            if failed:
                self._recover(failed, temperature)
        for row, response in finished:
            row.context.extend(response.token_ids)
            row.max_new_tokens = 0
        return finished

    def _send(self, row: ServerRow, temperature: float) -> None:
        assert self._identity and self._pool
        row.wanted = Wanted(
            model=self._served_name(row.server),
            context=tuple(row.context),
            max_new_tokens=row.max_new_tokens,
            temperature=temperature,
            rule=self.stop_rule,
            salt=self._identity.salt,
        )
        row.request = row.server.completion(row.wanted)
        self._under_way[self._pool.submit(row.request.send)] = row

    def _arrived(
        self,
    ) -> tuple[list[tuple[ServerRow, Response]], list[tuple[ServerRow, RequestError]]]:
        """The answers that are there, at least one: the responses, and what failed."""
        done, _ = wait(self._under_way, return_when=FIRST_COMPLETED)
        responses: list[tuple[ServerRow, Response]] = []
        failed: list[tuple[ServerRow, RequestError]] = []
        # In the order in which they were sent, so that little depends on the clock.
        for future in [each for each in self._under_way if each in done]:
            row = self._under_way.pop(future)
            wanted, row.wanted, row.request = row.wanted, None, None
            assert wanted
            try:
                size = self.model.vocabulary_size
                read = read_completion(future.result(), wanted, vocabulary_size=size)
                responses.append((row, read))
            except RequestError as failure:
                failed.append((row, failure))
        return self._with_right_weights(responses, failed)

    def _with_right_weights(
        self,
        responses: list[tuple[ServerRow, Response]],
        failed: list[tuple[ServerRow, RequestError]],
    ) -> tuple[list[tuple[ServerRow, Response]], list[tuple[ServerRow, RequestError]]]:
        """Moves responses of servers whose weights have changed since to what failed."""
        assert self._identity
        changed: dict[VllmServer, RequestError] = {}
        for server in {row.server: None for row, _ in responses}:
            try:
                self._weights.require(server, self._identity)
            except RequestError as failure:
                changed[server] = failure
        kept = [(row, response) for row, response in responses if row.server not in changed]
        lost = [(row, changed[row.server]) for row, _ in responses if row.server in changed]
        return kept, [*failed, *lost]

    def _recover(
        self, failed: Sequence[tuple[ServerRow, RequestError]], temperature: float
    ) -> None:
        """Sends failed requests again, after a pause and to servers that have the weights."""
        for row, failure in failed:
            row.num_failures += 1
            if failure.is_refusal or row.num_failures > self._settings.retries:
                raise _error(row.server, failure, row.num_failures) from failure
        self._pause(max(row.num_failures for row, _ in failed))
        for row, _ in failed:
            index = self._servers.index(row.server)
            row.server = self._servers[(index + 1) % len(self._servers)]
        rows = [row for row, _ in failed]
        changed = self._bring(
            [each for each in self._servers if any(r.server is each for r in rows)]
        )
        self._check(temperature)
        # What a changed server has under way may be of the weights before, or of both.
        for future, row in list(self._under_way.items()):
            if row.server in changed and row.request:
                row.request.break_off()
                del self._under_way[future]
                rows.append(row)
        for row in rows:
            self._send(row, temperature)

    def _bring(self, servers: Sequence[VllmServer]) -> list[VllmServer]:
        """Gives each server what it lacks of the rollout's weights; returns those that did."""
        identity = self._identity
        assert identity
        changed: list[VllmServer] = []
        for server in servers:
            brought = self._insist(server, lambda s=server: self._weights.bring(s, identity))
            require_room(server, brought.facts, self.capacity)
            self._served_names[server.base_url] = brought.facts.model
            if brought.has_changed:
                changed.append(server)
        self._unchecked.update(changed)
        self._weights.forget_files(identity)
        return changed

    def _check(self, temperature: float) -> None:
        """Compares each server with the policy that has got other weights since the last time."""
        identity = self._identity
        assert identity
        for server in [each for each in self._servers if each in self._unchecked]:
            asked = {
                "served_name": self._served_name(server),
                "salt": identity.salt,
                "temperature": temperature or 1.0,
            }
            self._insist(server, lambda s=server, a=asked: require_agreement(s, self.model, **a))
            self._unchecked.discard(server)

    def _served_name(self, server: VllmServer) -> str:
        assert self._identity
        return self._identity.adapter or self._served_names[server.base_url]

    def _insist(self, server: VllmServer, attempt: Callable[[], _T]) -> _T:
        """Repeats what fails, with pauses in between. Raises ServerError after the last time."""
        num_failures = 0
        while True:
            try:
                return attempt()
            except RequestError as failure:
                num_failures += 1
                is_final = failure.is_refusal or failure.is_unknown_route
                if is_final or num_failures > self._settings.retries:
                    raise _error(server, failure, num_failures) from failure
                self._pause(num_failures)

    def _pause(self, num_failures: int) -> None:
        self._is_broken_off.wait(self._settings.retry_seconds * 2 ** (num_failures - 1))


def servers_of(settings: RolloutsConfig) -> list[VllmServer]:
    """The configured servers."""
    return [VllmServer(url, timeout_seconds=settings.timeout_seconds) for url in settings.base_url]


def require_room(server: VllmServer, facts: ServerFacts, num_tokens: int) -> None:
    """Raises ServerError if a server's longest context is shorter than an episode's may be."""
    if facts.max_context_tokens < num_tokens:
        raise ServerError(
            f"{server.base_url} takes contexts of {facts.max_context_tokens} tokens, and "
            f"agent.max_context_tokens is {num_tokens}; start it with --max-model-len {num_tokens}"
        )


def read_facts(settings: RolloutsConfig, *, num_tokens: int) -> dict[str, ServerFacts]:
    """What each configured server says of itself, by its address, each asked once.

    Raises ServerError for one that does not answer or has no room for an episode.
    """
    found: dict[str, ServerFacts] = {}
    for server in servers_of(settings):
        try:
            facts = server.facts()
            server.label()
        except RequestError as failure:
            raise _error(server, failure, 1) from failure
        require_room(server, facts, num_tokens)
        found[server.base_url] = facts
    return found


def _error(server: VllmServer, failure: RequestError, num_failures: int) -> ServerError:
    times = f" ({num_failures} times in a row)" if num_failures > 1 else ""
    return ServerError(f"{server.base_url}: {failure}{times}. {failure.advice}. {_KEPT}")
