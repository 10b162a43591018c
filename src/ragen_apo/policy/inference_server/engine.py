"""Generation by inference servers: the rows of `GenerationEngine`, sampled elsewhere.

    submit(row, prompt) ... step() -> one request a row, answered by a server -> responses

Each request carries the whole context of its row as token ids; the server finds the part that it
knows in its prefix cache. At the start of a rollout the servers get the policy's present weights
(`weights`), and a server that has got other weights is compared with our own scoring (`agreement`).

What comes back is not reproducible: servers batch requests as they arrive and draw their own random
numbers, so an episode played again differs, under the same seed as well. A response counts once its
server has said, after it, that its weights are still those of the rollout.

A request that fails is sent again, with several servers at once to another one; which of them play
is for `rotation` to say. A server that was started again gets its weights again. Where none is left
the run ends with a ServerError.

Several ranks share the servers. The first one gives them the weights while the others wait:

    first rank:  identity -> bring, compare -> identity and servers that play -> all ranks
    each rank:   asks these servers whether they have the weights -> its own episodes

All ranks meet before and after it, so within a rollout no rank changes a server. Each decides for
itself which ones it goes on with. One that was started again plays from the next rollout on.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from pydantic import TypeAdapter

from ragen_apo.config.rollouts import RolloutsConfig
from ragen_apo.distributed.ranks import ALONE, Ranks
from ragen_apo.policy.engine import Response, too_long
from ragen_apo.policy.inference_server.agreement import require_agreement
from ragen_apo.policy.inference_server.configured import require_room, servers_of
from ragen_apo.policy.inference_server.rotation import Member, Rotation, described, no_server_left
from ragen_apo.policy.inference_server.vllm import VllmServer, Wanted, read_completion
from ragen_apo.policy.inference_server.weights import (
    Identity,
    PolicyWeights,
    require_given,
    require_label,
)
from ragen_apo.policy.inference_server.wire import Request, RequestError
from ragen_apo.policy.language_model import LanguageModel
from ragen_apo.policy.sampling import StopRule
from ragen_apo.progress import Progress, SilentProgress


@dataclass(eq=False)
class ServerRow:
    """One episode in progress."""

    context: list[int] = field(default_factory=list)
    member: Member | None = None
    """The server that has the context in its prefix cache, if one has."""
    num_joins: int = 0
    """Of the server, when the present request was sent."""
    max_new_tokens: int = 0
    """Of the response that was asked for; 0 if none is."""
    num_failures: int = 0
    """Of the present request."""
    wanted: Wanted | None = None
    """What is under way."""
    request: Request | None = None


@dataclass(frozen=True)
class Given:
    """What servers have got for a rollout."""

    identity: Identity
    served_names: dict[str, str]
    """By the address of each server that plays: what it calls the model it was started with."""


_GIVEN = TypeAdapter(Given)


class ServerEngine:
    """Samples responses on servers; implements `Engine`, where the methods are described.

    `capacity` is the longest context of a row in tokens; the servers must have room for it.
    """

    def __init__(
        self,
        model: LanguageModel,
        settings: RolloutsConfig,
        *,
        num_rows: int,
        capacity: int,
        temperature: float,
        stops_at_answer: bool = True,
        ranks: Ranks = ALONE,
        progress: Progress | None = None,
    ) -> None:
        """`temperature` is that of training, at which servers are compared with the policy.

        `ranks` play each rollout together; `num_rows` are those of each. `progress` is told of
        servers that fail while others play, and of their return.
        """
        self.model, self.num_rows, self.capacity = model, num_rows, capacity
        self._temperature, self._ranks = temperature, ranks
        self.stop_rule = StopRule(model, stops_at_answer=stops_at_answer)
        self._settings = settings
        self._servers = servers_of(settings)
        self._weights = PolicyWeights(model, settings.model_folder)
        self._served_names: dict[str, str] = {}
        """See `Given`."""
        self._is_bringing = ranks.size == 1
        """Whether a server that lacks weights gets them from this rank."""
        self._unchecked = set(self._servers)
        """Those that have got other weights since they were compared with the policy."""
        self._rows: list[ServerRow] = []
        self._identity: Identity | None = None
        self._pool: ThreadPoolExecutor | None = None
        self._under_way: dict[Future[Any], ServerRow] = {}
        self._is_broken_off = threading.Event()
        self._rotation = Rotation(
            settings,
            self._servers,
            prepare=self._prepare,
            say=(progress or SilentProgress()).say,
            is_broken_off=self._is_broken_off,
        )

    @property
    def num_free_rows(self) -> int:
        return self.num_rows - len(self._rows)

    @contextlib.contextmanager
    def rollout(self) -> Iterator[None]:
        """The servers get the present weights at the beginning.

        At the end no request is under way. All ranks come, at the beginning and at the end. Raises
        ServerError; RanksError for what the first rank has raised there.
        """
        with self.model.whole():
            given = self._ranks.from_first(self._give_weights, "weights for the servers", _GIVEN)
        self._identity, self._served_names = given.identity, given.served_names
        if not self._ranks.is_first:
            self._rotation.begin(able=given.served_names)
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
        self._rotation.tell_of_others(self._ranks)

    def _give_weights(self) -> Given:
        """Has every server play that can, with the present weights. Raises ServerError."""
        self._identity = self._weights.identity()
        self._is_bringing = True
        self._rotation.begin()
        if self._ranks.size > 1:
            self._is_bringing = False
            self._rotation.keep_to_playing()
        self._weights.forget_files(self._identity)
        playing = [member.server.base_url for member in self._rotation.playing]
        return Given(self._identity, {url: self._served_names[url] for url in playing})

    def break_off(self) -> None:
        """Ends the rollout under way, and all later ones, from another thread: ServerError there.

        A computation of the rollout's own, such as an environment's step, comes to its end first.
        """
        self._is_broken_off.set()
        for server in self._servers:
            server.break_off()

    def open_row(self, draws: np.random.Generator) -> ServerRow:
        assert self.num_free_rows > 0
        self._rows.append(ServerRow())
        return self._rows[-1]

    def copy_row(self, row: ServerRow, draws: np.random.Generator) -> ServerRow:
        assert row.max_new_tokens == 0
        copy = self.open_row(draws)
        copy.member, copy.context = row.member, list(row.context)
        return copy

    def close_row(self, row: ServerRow) -> None:
        assert row.wanted is None
        self._rows.remove(row)

    def submit(
        self, row: ServerRow, prompt: Sequence[int], *, max_new_tokens: int, restarts: bool = False
    ) -> None:
        assert row.max_new_tokens == 0 and max_new_tokens > 0 and prompt
        needed = (0 if restarts else len(row.context)) + len(prompt) + max_new_tokens
        if needed > self.capacity:
            raise too_long(needed, capacity=self.capacity)
        if restarts:
            row.context.clear()
        row.context.extend(prompt)
        row.max_new_tokens, row.num_failures = max_new_tokens, 0

    def step(self, *, temperature: float) -> list[tuple[ServerRow, Response]]:
        """Sends what was submitted and waits for at least one response. Raises ServerError."""
        finished: list[tuple[ServerRow, Response]] = []
        while not finished and any(row.max_new_tokens for row in self._rows):
            for row in self._rows:
                if row.max_new_tokens and row.wanted is None:
                    self._send(row, temperature)
            arrived = self._arrived()
            finished = [(row, each) for row, each in arrived if isinstance(each, Response)]
            for row, _ in finished:
                self._rotation.answered(_member(row))
            for row, answer in arrived:
                if isinstance(answer, RequestError):
                    self._failed(row, answer)
        for row, response in finished:
            row.context.extend(response.token_ids)
            row.max_new_tokens = 0
        return finished

    def _send(self, row: ServerRow, temperature: float) -> None:
        assert self._identity and self._pool
        if row.member is None or not row.member.is_playing:
            row.member = self._least_busy()
        row.num_joins = row.member.num_joins
        row.wanted = Wanted(
            model=self._served_name(row.member.server),
            context=tuple(row.context),
            max_new_tokens=row.max_new_tokens,
            temperature=temperature,
            rule=self.stop_rule,
            salt=self._identity.salt,
        )
        row.request = row.member.server.completion(row.wanted)
        self._under_way[self._pool.submit(row.request.send)] = row

    def _least_busy(self) -> Member:
        """The server with the fewest rows, of those that play."""
        num_rows = Counter(row.member for row in self._rows)
        return min(self._rotation.playing, key=lambda member: num_rows[member])

    def _arrived(self) -> list[tuple[ServerRow, Response | RequestError]]:
        """The answers that are there, at least one.

        A response of a server whose weights have changed since is a failure.
        """
        assert self._identity
        done, _ = wait(self._under_way, return_when=FIRST_COMPLETED)
        answers: list[tuple[ServerRow, Response | RequestError]] = []
        # In the order in which they were sent, so that little depends on the clock.
        for future in [each for each in self._under_way if each in done]:
            row = self._under_way.pop(future)
            wanted, row.wanted, row.request = row.wanted, None, None
            assert wanted
            size = self.model.vocabulary_size
            try:
                answer = read_completion(future.result(), wanted, vocabulary_size=size)
            except RequestError as failure:
                answer = failure
            answers.append((row, answer))
        changed: dict[Member, RequestError] = {}
        answered = [row for row, answer in answers if isinstance(answer, Response)]
        for member in dict.fromkeys(map(_member, answered)):
            try:
                require_label(member.server, self._identity)
            except RequestError as failure:
                changed[member] = failure
        return [
            (row, changed.get(_member(row), answer) if isinstance(answer, Response) else answer)
            for row, answer in answers
        ]

    def _failed(self, row: ServerRow, failure: RequestError) -> None:
        """The row's request has to be sent again, where its server or another one plays."""
        member, row.member = _member(row), None
        row.num_failures += 1
        self._rotation.failed(member, failure, num_joins=row.num_joins)
        if row.num_failures >= (self._settings.retries + 1) * len(self._servers):
            problems = [described(member.server, failure, row.num_failures)]
            raise no_server_left(problems) from failure
        assert self._identity
        self._weights.forget_files(self._identity)

    def _prepare(self, server: VllmServer) -> None:
        """Gives a server what it lacks of the rollout's weights, and checks that it has them.

        The first rank does, when a rollout begins; later, and on other ranks, it has to have them.
        Raises RequestError.
        """
        assert self._identity
        if not self._is_bringing:
            require_given(server, self._identity)
            return
        brought = self._weights.bring(server, self._identity)
        self._served_names[server.base_url] = brought.facts.model
        if brought.has_changed:
            self._unchecked.add(server)
            self._take_back(server)
        require_room(brought.facts, self.capacity)
        if server in self._unchecked:
            require_agreement(
                server,
                self.model,
                served_name=self._served_name(server),
                salt=self._identity.salt,
                temperature=self._temperature,
            )
            self._unchecked.discard(server)

    def _take_back(self, server: VllmServer) -> None:
        """Ends what a changed server has under way: it may be of the weights before, or of both."""
        for future, row in list(self._under_way.items()):
            if _member(row).server is server and row.request:
                row.request.break_off()
                row.wanted, row.request = None, None
                del self._under_way[future]

    def _served_name(self, server: VllmServer) -> str:
        assert self._identity
        return self._identity.adapter or self._served_names[server.base_url]


def _member(row: ServerRow) -> Member:
    assert row.member
    return row.member
