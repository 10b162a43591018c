"""The one thread in which models write, and who waits for it.

A turn is a piece of work. Who plays to the end waits again after each turn, so that nobody keeps
the models from the others. A visitor who goes away in the middle of a turn finds it played when he
comes back; to the end is played for those who look.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import torch

from ragen_apo.agent.assembly import build_context
from ragen_apo.config import RunConfig
from ragen_apo.errors import RagenApoError
from ragen_apo.policy.engine import Response
from ragen_apo.progress import SilentProgress
from ragen_apo.run_directory import RunDirectory
from ragen_apo.session import Session, open_session
from ragen_apo.stages.origin import require_same_origin
from ragen_apo.values.state_values import state_values
from ragen_apo.web import sessions
from ragen_apo.web.at_work.episode import Comparison, PlayedEpisode, World
from ragen_apo.web.at_work.policies import Models, Policy, policies_of
from ragen_apo.web.at_work.writer import Writer, draws_of_turn
from ragen_apo.web.sessions import FAULT, told
from ragen_apo.web.view.value_store import trajectories

MAX_VISITS = 50
MAX_UNWATCHED_SECONDS = 60.0
"""Without a request of the visitor, before playing to the end stops."""
BUSY = "The policy is writing, so nothing was done; wait for it, or stop it."


@dataclass(eq=False)
class Writing:
    """A response that is being written, or will be."""

    policy: str
    number: int
    """Of the turn, from 1."""
    is_comparison: bool = False
    until_end: bool = False
    has_begun: bool = False
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    stop: threading.Event = field(default_factory=threading.Event)

    def wrote(self, token_id: int, logprob: float) -> bool:
        """Takes a token; False where it was asked to stop."""
        self.logprobs.append(logprob)
        self.token_ids.append(token_id)
        return not self.stop.is_set()


class Visit(sessions.Visit):
    """One visitor with an episode."""

    def __init__(self, visit_id: str, played: PlayedEpisode) -> None:
        super().__init__(visit_id)
        self.played = played
        self.writing: Writing | None = None
        """What the models do for this visit; nothing else can change it meanwhile."""
        self.num_changes = 0

    @property
    def page_number(self) -> str:
        return str(self.num_changes)

    @property
    def busy(self) -> str:
        return "" if self.writing is None else BUSY


class Visits(sessions.Sessions[Visit]):
    """All visits."""

    def close(self, visit_id: str) -> Visit | None:
        """Ends a visit, and what is written for it."""
        visit = super().close(visit_id)
        if visit is not None and (writing := visit.writing) is not None:
            writing.stop.set()
        return visit


class Workplace:
    """A run whose policies can be watched: its tasks, models and visitors."""

    def __init__(
        self,
        session: Session,
        policies: Mapping[str, Policy],
        *,
        max_visits: int = MAX_VISITS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name, self.policies = session.run.path.resolve().name, policies
        self.config, self.run = session.config, session.run
        self._session = session
        self.visits = Visits(cookie="work", max_visits=max_visits, clock=clock)
        self._models = Models(session, policies)
        self._digests: dict[str, str] = {}
        self._closing = threading.Event()
        self._thread = ThreadPoolExecutor(
            1, thread_name_prefix="models", initializer=self._set_up_thread
        )
        first = self._thread.submit(self._models.writer, next(iter(policies))).result()
        self.world = World(
            session, build_context(session.config.agent, first.model, session.environments)
        )

    def open(self, played: PlayedEpisode) -> Visit:
        """A new visit with an episode; raises FullError where there are too many."""
        return self.visits.add(lambda visit_id: Visit(visit_id, played))

    def act(self, visit: Visit, *, until_end: bool) -> None:
        """Has the policy write the next turn, or all that are left. The visit's lock is held."""
        played = visit.played
        self._begin(visit, Writing(played.choice.policy, played.number, until_end=until_end))

    def compare(self, visit: Visit, number: int, policy: str) -> None:
        """Asks another policy about a turn that was played. The visit's lock is held."""
        self._begin(visit, Writing(policy, number, is_comparison=True))

    def close(self) -> None:
        """Ends what is being written; nothing more can be asked for."""
        self._closing.set()
        self._thread.shutdown(cancel_futures=True)

    def _set_up_thread(self) -> None:
        if (num_threads := self.config.machine.num_threads) is not None:
            torch.set_num_threads(num_threads)  # a setting of each thread

    def _begin(self, visit: Visit, writing: Writing) -> None:
        visit.writing = writing
        visit.num_changes += 1
        self._thread.submit(self._work, visit, writing)

    def _work(self, visit: Visit, writing: Writing) -> None:
        """Writes, and changes the visit. Whatever goes wrong is told and ends this alone."""
        played, notice = None, ""
        try:
            played = self._after(visit.played, writing)
        except RagenApoError as error:
            notice = told(error)
        except Exception:  # noqa: BLE001 - of an environment or a model; the thread is everybody's
            traceback.print_exc()
            notice = FAULT
        with visit.lock:
            visit.played = played or visit.played
            visit.notice = notice or visit.notice
            visit.num_changes += 1
            if writing.until_end and played is not None:
                self._go_on(visit, writing)
            if visit.writing is writing:  # last, as those who wait for it do not take the lock
                visit.writing = None

    def _go_on(self, visit: Visit, writing: Writing) -> None:
        if visit.played.is_over or writing.stop.is_set() or self._closing.is_set():
            return
        if self.visits.idle_seconds(visit) > MAX_UNWATCHED_SECONDS:
            visit.notice = "Nobody has looked for a minute, so the policy has stopped here."
            return
        self.act(visit, until_end=True)

    def _after(self, played: PlayedEpisode, writing: Writing) -> PlayedEpisode | None:
        """The episode with the response that was asked for; None where it was broken off."""
        if writing.stop.is_set():
            return None
        writing.has_begun = True
        writer, temperature = self._models.writer(writing.policy), played.choice.temperature
        draws = draws_of_turn(
            played.episode.request.seed,
            writing.number,
            max_response_tokens=self.config.agent.max_response_tokens,
        )

        def wrote(token_id: int, logprob: float) -> bool:
            return writing.wrote(token_id, logprob) and not self._closing.is_set()

        prompt = played.context(writing.number)
        response = writer.write(prompt, draws, temperature=temperature, wrote=wrote)
        if response is None:
            return None
        if not writing.is_comparison:
            return self.world.play(played, response)
        comparison = self._comparison(writer, played, writing, response)
        return replace(played, comparisons={**played.comparisons, writing.number: comparison})

    def _comparison(
        self, writer: Writer, played: PlayedEpisode, writing: Writing, response: Response
    ) -> Comparison:
        turn = played.turns[writing.number - 1]
        context = self.world.context
        text = context.decode(response.token_ids)
        parsed = context.parse(text, is_cut_off=not response.stopped)
        logprobs = writer.score(
            played.context(writing.number),
            turn.response_token_ids,
            temperature=played.choice.temperature,
        )
        v_star = None
        if is_reference := self.policies[writing.policy].reference_version is not None:
            task_id = played.episode.request.task.task_id
            v_star = self._v_stars(writing.policy, writer, task_id).get(turn.state_key or "")
        return Comparison(writing.policy, is_reference, response, text, parsed, logprobs, v_star)

    def _v_stars(self, reference: str, writer: Writer, task_id: str) -> Mapping[str, float]:
        """V* of the states that a reference's samples of the task have visited, by their keys."""
        if not self._session.values_path.exists():
            return {}
        if reference not in self._digests:  # its weights are read for it
            self._digests[reference] = self._session.conditions(writer.model).digest
        samples = trajectories(self._session.values_path, self._digests[reference], task_id)
        return state_values(list(samples.values()), beta=self.config.values.beta1, min_visits=1)


def open_workplace(config: RunConfig, run: RunDirectory) -> Workplace:
    """The workplace of a run, with its first policy in memory.

    Raises RunDirectoryError for a run without a model, and for one whose configuration or
    environment was changed; ModelError for a model that cannot be used.
    """
    policies = policies_of(run)
    session = open_session(config, run, SilentProgress())
    require_same_origin(session, but_for=("evaluation",))
    return Workplace(session, policies)
