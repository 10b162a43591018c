"""Which of several servers play a rollout, as they fail and come back.

    begin -> playing -> [failed -> brought back at once, or out until the next rollout] ... -> begin

A server plays as soon as it has the rollout's weights, until a request to it fails. While others
play, nothing waits for the failed server. It may come back at once: a restarted server, for
example, lacks only its weights. Otherwise it is out for the rest of the rollout, and the user is
told once. A server that hangs is not tried again while others play. If no server plays, all are
tried again after pauses. If none comes back, the rollout ends with a ServerError.

With several ranks, each has its own rotation: a server that is out for one rank may play for
another. The first rank tells the user.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from ragen_apo.config.rollouts import RolloutsConfig
from ragen_apo.distributed.ranks import Ranks, listed
from ragen_apo.policy.inference_server.configured import described, no_server_left
from ragen_apo.policy.inference_server.vllm import VllmServer
from ragen_apo.policy.inference_server.wire import RequestError

RETRY_SECONDS = 2.0
"""Pause before a server is first tried again; each further one is twice as long, so that
`rollouts.retries` alone sets how long one that is started again may take."""
_GOES_ON = "The other servers go on without it, and it is tried again at the next rollout"


@dataclass(eq=False)
class Member:
    """A configured server, and how it does."""

    server: VllmServer
    is_playing: bool = False
    num_joins: int = 0
    """How often it has begun to play. What was sent before the last time and fails is no news."""
    num_failures: int = 0
    """In a row, since its last response."""
    failure: RequestError | None = None
    """The last one."""
    may_return: bool = True
    """Whether it is worth while to try again in this rollout."""
    is_out: bool = False
    """Whether the user knows that it does not play."""

    @property
    def hangs(self) -> bool:
        """Whether another attempt may take as long as the last one did."""
        return self.failure is not None and self.failure.is_late

    @property
    def problem(self) -> str:
        """Address, cause and advice."""
        assert self.failure
        return described(self.server, self.failure, self.num_failures)


class Rotation:
    """The configured servers, and which of them play."""

    def __init__(
        self,
        settings: RolloutsConfig,
        servers: Sequence[VllmServer],
        *,
        prepare: Callable[[VllmServer], None],
        say: Callable[[str], None],
        is_broken_off: threading.Event,
    ) -> None:
        """`prepare` gives a server what it needs to play, or raises RequestError."""
        self._all = [Member(server) for server in servers]
        self.members = self._all
        """Those that may play in this rollout."""
        self._told: set[str] = set()
        """Addresses of servers of which the user knows that only other ranks lack them."""
        self._settings, self._prepare, self._say = settings, prepare, say
        self._is_broken_off = is_broken_off

    @property
    def playing(self) -> list[Member]:
        """Those that rows may be sent to."""
        return [member for member in self.members if member.is_playing]

    def begin(self, *, able: Collection[str] | None = None) -> None:
        """Has every server play that can; one that was out before is tried only once.

        With `able`, only those at these addresses. Raises ServerError if none can.
        """
        self.members = [each for each in self._all if able is None or each.server.base_url in able]
        all_are_out = all(member.is_out for member in self.members)
        for member in self.members:
            is_doubtful = member.is_out and not all_are_out
            member.is_playing, member.may_return, member.failure = False, True, None
            member.num_failures = self._settings.retries if is_doubtful else 0
        self._try_again(until=lambda: False)

    def keep_to_playing(self) -> None:
        """Until the next rollout no server joins that does not play now."""
        self.members = self.playing

    def failed(self, member: Member, failure: RequestError, *, num_joins: int) -> None:
        """A request failed that was sent when the server had joined `num_joins` times.

        Raises ServerError if no server is left.
        """
        if not member.is_playing or num_joins != member.num_joins:
            return
        self._note(member, failure, is_final=failure.is_refusal)
        if self.playing:
            if member.may_return and not member.hangs:
                self._try(member)
            self._tell()
            return
        for other in self.members:
            if other is not member and not other.may_return:
                other.num_failures, other.may_return = self._settings.retries, True
        self._try_again(until=lambda: bool(self.playing))

    def answered(self, member: Member) -> None:
        """A response came."""
        member.num_failures = 0

    def _try_again(self, *, until: Callable[[], bool]) -> None:
        """Until it is so, or no server is left to be tried."""
        while not until():
            waiting = [
                each
                for each in self.members
                if not each.is_playing and each.may_return and not (self.playing and each.hangs)
            ]
            if not waiting:
                break
            if num_failures := min(member.num_failures for member in waiting):
                self._is_broken_off.wait(RETRY_SECONDS * 2 ** (num_failures - 1))
            for member in waiting:
                self._try(member)
        if not self.playing:
            problems = [member.problem for member in self.members]
            raise no_server_left(problems) from self.members[-1].failure
        self._tell()

    def _try(self, member: Member) -> None:
        try:
            self._prepare(member.server)
        except RequestError as failure:
            self._note(member, failure, is_final=failure.is_refusal or failure.is_unknown_route)
            return
        member.is_playing = True
        member.num_joins += 1
        if member.is_out:
            member.is_out = False
            self._say(f"{member.server.base_url} takes part in rollouts again")

    def _note(self, member: Member, failure: RequestError, *, is_final: bool) -> None:
        member.is_playing, member.failure = False, failure
        member.num_failures += 1
        member.may_return = not is_final and member.num_failures <= self._settings.retries

    def _tell(self) -> None:
        """Says which servers no longer play."""
        for member in self.members:
            if member.is_playing or member.is_out or self._is_broken_off.is_set():
                continue
            member.is_out, member.may_return = True, False
            self._say(f"{member.problem} {_GOES_ON}")

    def tell_of_others(self, ranks: Ranks) -> None:
        """The first rank says, once, which servers no longer play for others and still do for it.

        All ranks come.
        """
        if ranks.size == 1:
            return
        out = {each.server.base_url: each.problem for each in self._all if each.is_out}
        found = [json.loads(part) for part in ranks.gather(json.dumps(out).encode(), "servers")]
        lacked = {url: problem for each in found for url, problem in each.items() if url not in out}
        for url in sorted(lacked.keys() - self._told) if ranks.is_first else ():
            without = [rank for rank, each in enumerate(found) if url in each]
            self._say(f"{listed(without)} of {ranks.size}: {lacked[url]} {_GOES_ON}")
        self._told = set(lacked)
