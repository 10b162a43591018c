"""Visitors of a policy at work: everybody alone, the models for all, and no text that does harm."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from ragen_apo.environments.shop import ShopEnvironment
from ragen_apo.session import Session
from ragen_apo.web.at_work.worker import Visit, Workplace
from tests.factories import threads_restored, with_keys
from tests.sweeps import quick_first
from tests.web.view_runs import HOSTILE
from tests.web.watching import Watcher, workplace_of, workplace_with

SHOP = {"num_products": 24, "max_turns": 3}


@pytest.fixture
def workplace(finished_run: Path) -> Iterator[Workplace]:
    with workplace_of(finished_run) as workplace:
        yield workplace


class Clock:
    """Seconds that pass when a test says so."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Gate:
    """Holds every environment of a server until a test opens it."""

    is_open: threading.Event = field(default_factory=threading.Event)
    is_reached: threading.Event = field(default_factory=threading.Event)

    def environment(self) -> ShopEnvironment:
        return Held(self)


class Held(ShopEnvironment):
    """Answers when the gate is open."""

    def __init__(self, gate: Gate) -> None:
        super().__init__(**SHOP)
        self.gate = gate

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.gate.is_reached.set()
        assert self.gate.is_open.wait(60)
        return super().step(action)


@pytest.mark.slow
def test_visitors_at_once_do_not_see_each_others_episodes(workplace: Workplace) -> None:
    together = threading.Barrier(4)

    def watch_alone(person: int) -> None:
        watcher = Watcher(workplace)
        watcher.begin(split="train", task=person)
        together.wait()
        watcher.send("/work/take", action=f"search person{person}")
        watcher.send("/work/act")
        watcher.send("/work/compare", turn=2, policy="reference")
        for other in range(4):
            assert (f"person{other}" in watcher.page) == (other == person)
        played = watcher.visit.played
        assert played.by_hand == (True, False)
        assert list(played.comparisons) == [2]

    with ThreadPoolExecutor(4) as people:
        list(people.map(watch_alone, range(4)))
    assert len(workplace.visits) == 4


@pytest.mark.slow
def test_who_goes_away_while_he_waits_leaves_the_models_to_the_others(session: Session) -> None:
    gate = Gate()
    with workplace_with(gate.environment, session) as workplace:
        first, second, third = (Watcher(workplace) for _ in range(3))
        first.begin()
        second.begin(task=1)
        third.begin(task=2)
        first.send("/work/act", live=1)
        assert gate.is_reached.wait(60)  # its turn is written, and its environment thinks
        second.send("/work/act", live=1)
        assert "Turn 1: trained writes" in second.text
        assert "Waits for the model." in second.client.get("/work/now").json()["html"]
        gone = second.visit
        second.send("/work/leave")
        gate.is_open.set()
        third.send("/work/act")
        assert len(third.visit.played.turns) == 1
        assert len(first.visit.played.turns) == 1
        assert (gone.played.turns, gone.writing) == ([], None)


@pytest.mark.slow
def test_who_comes_back_finds_the_turn_played(workplace: Workplace) -> None:
    watcher, second = Watcher(workplace), Watcher(workplace)
    watcher.begin()
    watcher.send("/work/act", live=1)
    second.begin(task=1)
    second.send("/work/act")  # after that of the first
    assert "Go back to turn 1" in watcher.look()


@pytest.mark.slow
def test_while_a_turn_is_written_nothing_else_changes_the_episode(session: Session) -> None:
    gate = Gate()
    with workplace_with(gate.environment, session) as workplace:
        watcher = Watcher(workplace)
        watcher.begin()
        watcher.send("/work/act", live=1)
        assert gate.is_reached.wait(60)
        watcher.send("/work/take", action="search tea", live=1)
        assert "The policy is writing, so nothing was done" in watcher.text
        gate.is_open.set()
        watcher.send("/work/stop")  # too late: the turn was written
        assert len(watcher.visit.played.turns) == 1
        assert watcher.visit.played.by_hand == (False,)


@pytest.mark.slow
def test_what_is_stopped_while_it_waits_is_as_if_it_had_not_begun(session: Session) -> None:
    gate = Gate()
    with workplace_with(gate.environment, session) as workplace:
        blocker, watcher = Watcher(workplace), Watcher(workplace)
        blocker.begin()
        watcher.begin(task=1)
        blocker.send("/work/act", live=1)
        assert gate.is_reached.wait(60)
        watcher.send("/work/run", live=1)
        watcher.send("/work/stop", live=1)
        gate.is_open.set()
        watcher.send("/work/stop")  # waits for the end
        watcher.send("/work/take", action="search tea")
        watcher.send("/work/act")
        assert [turn.action for turn in watcher.visit.played.turns[:1]] == ["search tea"]
        assert watcher.visit.played.by_hand == (True, False)


@pytest.mark.slow
def test_nothing_is_played_to_the_end_for_nobody(session: Session) -> None:
    gate, clock = Gate(), Clock()
    with workplace_with(gate.environment, session, clock=clock) as workplace:
        watcher, other = Watcher(workplace), Watcher(workplace)
        watcher.begin()
        watcher.send("/work/run", live=1)
        assert gate.is_reached.wait(60)
        clock.now = 100.0
        gate.is_open.set()
        other.begin()
        other.send("/work/run")
        assert other.visit.played.is_over
        assert "Nobody has looked for a minute" in watcher.look()
        assert len(watcher.visit.played.turns) == 1


def test_an_idle_visit_ends(session: Session) -> None:
    clock = Clock()
    with workplace_with(lambda: ShopEnvironment(**SHOP), session, clock=clock) as workplace:
        watcher = Watcher(workplace)
        watcher.begin()
        clock.now = 3 * 60 * 60.0
        assert "Your visit has ended" in watcher.look()
        assert len(workplace.visits) == 0


def test_a_form_of_an_older_page_changes_nothing(workplace: Workplace) -> None:
    watcher = Watcher(workplace)
    watcher.begin()
    old = watcher.page_number
    watcher.send("/work/act")
    turns = list(watcher.visit.played.turns)
    for address in ("/work/act", "/work/run", "/work/take", "/work/back", "/work/compare"):
        answer = watcher.client.post(address, data={"page": old, "action": "x", "turn": "1"})
        assert "That page was not the newest one of your visit" in answer.text
    assert watcher.visit.played.turns == turns


@pytest.mark.slow
def test_after_the_end_nothing_is_played(workplace: Workplace) -> None:
    watcher = Watcher(workplace)
    watcher.begin()
    watcher.send("/work/run")
    num_turns = len(watcher.visit.played.turns)
    for address in ("/work/act", "/work/run", "/work/take"):
        watcher.send(address, page=watcher.visit.num_changes, action="search tea")
        assert "The episode is over" in watcher.text
    assert len(watcher.visit.played.turns) == num_turns


@pytest.mark.slow
def test_who_waits_for_the_end_does_not_see_a_moment_between_two_turns(
    workplace: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes: list[tuple[str, Any]] = []

    def noted(visit: Visit, name: str, value: Any) -> None:
        changes.append((name, value))
        object.__setattr__(visit, name, value)

    watcher = Watcher(workplace)
    watcher.begin()
    with monkeypatch.context() as patch:
        patch.setattr(Visit, "__setattr__", noted, raising=False)
        watcher.send("/work/run")
    assert len(watcher.visit.played.turns) > 1
    of_the_work = [name for name, _ in changes if name in ("writing", "num_changes", "played")]
    assert changes.count(("writing", None)) == 1
    assert of_the_work[-1] == "writing"


def test_there_are_no_more_visitors_than_there_is_room_for(session: Session) -> None:
    with workplace_with(lambda: ShopEnvironment(**SHOP), session, max_visits=1) as workplace:
        first, second = Watcher(workplace), Watcher(workplace)
        first.begin()
        form = {"policy": "trained", "split": "test", "task": "0", "temperature": "0.0"}
        answer = second.client.post("/begin", data=form)
        assert answer.status_code == 503
        assert "1 people are here" in answer.text
        first.begin(task=1)  # in place of his own episode
        first.send("/work/leave")
        assert second.client.post("/begin", data=form).status_code == 200


def test_a_visit_that_has_ended_leads_to_the_beginning(workplace: Workplace) -> None:
    watcher = Watcher(workplace)
    watcher.begin()
    workplace.visits.close(watcher.visit.id)
    for address in ("/work", "/text?field=instruction"):
        answer = watcher.client.get(address)
        assert "Your visit has ended" in answer.text
    assert watcher.client.get("/work/now").status_code == 404
    assert "Your visit has ended" in watcher.client.post("/work/act").text


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"policy": "../policy"}, "which the run does not have"),
        ({"temperature": "7"}, "which is not offered"),
        ({"task": "-1"}, "expected a whole number from 0"),
        ({"task": "9" * 400}, "expected a whole number from 0"),
        ({"task": "0" * 20 + "9" * 5000}, "expected a whole number from 0"),
        ({"draw": "x"}, "expected a whole number from 0"),
    ],
)
def test_what_no_form_says_is_refused(
    fields: dict[str, str], said: str, workplace: Workplace
) -> None:
    form = {"policy": "trained", "split": "test", "task": "0", "temperature": "0.0", **fields}
    answer = Watcher(workplace).client.post("/begin", data=form)
    assert answer.status_code == 400
    assert said in answer.text


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"task": 3}, "expected one from 0 to 2"),
        ({"split": "nowhere"}, "expected one of train, test, all"),
    ],
)
def test_a_task_that_is_not_there_is_told_on_the_page(
    fields: dict[str, Any], said: str, workplace: Workplace
) -> None:
    watcher = Watcher(workplace)
    watcher.begin(**fields)
    assert said in watcher.text
    assert "Begin the episode" in watcher.text


@pytest.mark.parametrize("turn", quick_first(["0", "2", "x"]))
def test_a_turn_that_was_not_played_is_refused(turn: str, workplace: Workplace) -> None:
    watcher = Watcher(workplace)
    watcher.begin()
    watcher.send("/work/act")
    form = {"page": watcher.page_number, "turn": turn, "policy": "reference"}
    for address in ("/work/back", "/work/compare"):
        assert watcher.client.post(address, data=form).status_code == 400


def test_a_response_that_does_not_fit_is_refused_in_words(workplace: Workplace) -> None:
    watcher = Watcher(workplace)
    watcher.begin()
    watcher.send("/work/take", response="mug " * 3000)
    assert "and a response at most 10,000" in watcher.text
    watcher.send("/work/take", response="mug " * 400)
    assert "agent.max_context_tokens" in watcher.text
    assert watcher.visit.played.turns == []


class Hostile(ShopEnvironment):
    """Says what nobody should say."""

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        _, reward, terminated, truncated, info = super().step(action)
        return HOSTILE, reward, terminated, truncated, info


@pytest.mark.slow
def test_hostile_text_of_environment_and_visitor_stays_text(session: Session) -> None:
    with workplace_with(lambda: Hostile(**SHOP), session) as workplace:
        watcher = Watcher(workplace)
        watcher.begin()
        watcher.send("/work/take", thought=HOSTILE, action=HOSTILE)
        watcher.send("/work/act")
        watcher.send("/work/compare", turn=1, policy="reference")
        observation = watcher.client.get("/text?field=observation&turn=2")
        for page in (watcher.page, observation.text):
            assert "<script>alert" not in page
            assert "<img" not in page
            assert "\x1b" not in page
            assert "\u202e" not in page
            assert "&lt;script&gt;alert(1)" in page
        assert "{{ 7 * 7 }}" in watcher.page


class Endless(ShopEnvironment):
    """Says more than a context has room for."""

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        _, *rest = super().step(action)
        return "so " * 50_000 + "it ends", *rest


def test_a_long_text_is_folded_and_read_in_parts(session: Session) -> None:
    with workplace_with(lambda: Endless(**SHOP), session) as workplace:
        watcher = Watcher(workplace)
        watcher.begin()
        watcher.send("/work/take", action="search tea")
        assert "the context was full" in watcher.text
        assert "all 150,007 characters" in watcher.text
        assert len(watcher.page) < 40_000
        pages = [
            watcher.client.get(f"/text?field=final_observation&page={page}").text
            for page in range(1, 5)
        ]
        assert ["it ends" in page for page in pages] == [False, False, False, True]


class Faulty(ShopEnvironment):
    """Its code has an error."""

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        raise KeyError("a secret of the program")


@pytest.mark.slow
def test_an_error_in_an_environment_ends_neither_the_visit_nor_the_server(
    session: Session, capsys: pytest.CaptureFixture[str]
) -> None:
    with workplace_with(lambda: Faulty(**SHOP), session) as workplace:
        watcher = Watcher(workplace)
        watcher.begin()
        watcher.send("/work/act")
        assert "the terminal of the server shows why" in watcher.text
        assert "secret" not in watcher.page
        assert "a secret of the program" in capsys.readouterr().err
        watcher.begin(task=1)
        assert "Let it act" in watcher.text
        watcher.send("/work/take", action="search tea")
        assert "the terminal of the server shows why" in watcher.text
        assert "secret" not in watcher.page


def test_forms_of_other_sites_are_refused(workplace: Workplace) -> None:
    watcher = Watcher(workplace)
    watcher.begin()
    for address in ("/begin", "/work/act", "/work/take", "/work/leave"):
        answer = watcher.client.post(
            address, data={"page": watcher.page_number}, headers={"Origin": "http://evil.example"}
        )
        assert answer.status_code == 403
    assert watcher.visit.played.turns == []


def test_without_the_token_nobody_watches(workplace: Workplace) -> None:
    watcher = Watcher(workplace, token="right")
    assert "refused" in watcher.page
    assert watcher.client.get("/work").status_code == 403
    assert watcher.client.get("/?token=right").status_code == 200
    watcher.begin()
    assert "Let it act" in watcher.text


class Counting(ShopEnvironment):
    """Notes with how many threads torch computes where it is stepped."""

    num_threads = 0

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        Counting.num_threads = torch.get_num_threads()
        return super().step(action)


def test_models_write_with_the_configured_number_of_threads(session: Session) -> None:
    with threads_restored():
        torch.set_num_threads(1)
        with_two = with_keys(session, "--machine.num_threads=2")
        with workplace_with(lambda: Counting(**SHOP), with_two) as workplace:
            watcher = Watcher(workplace)
            watcher.begin()
            # By hand: where the cores are busy, a model in two threads waits for the second one.
            watcher.send("/work/take", action="search tea")
    assert Counting.num_threads == 2


def test_a_run_is_only_read(finished_run: Path) -> None:
    def state() -> dict[str, tuple[int, int]]:
        files = (each for each in finished_run.rglob("*") if each.is_file())
        return {str(each): (each.stat().st_mtime_ns, each.stat().st_size) for each in files}

    before = state()
    with workplace_of(finished_run) as workplace:
        watcher = Watcher(workplace)
        watcher.begin(split="train")
        watcher.send("/work/act")
        watcher.send("/work/compare", turn=1, policy="reference")
        assert "V*" in watcher.text
    assert state() == before
