"""Several servers: those that fail are left out and come back, and no episode is lost."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from ragen_apo.config.rollouts import RolloutsConfig
from ragen_apo.errors import ServerError
from ragen_apo.policy.inference_server import rotation, vllm
from ragen_apo.policy.inference_server.engine import ServerEngine
from ragen_apo.policy.inference_server.rotation import Rotation
from ragen_apo.policy.inference_server.vllm import VllmServer
from ragen_apo.policy.inference_server.wire import RequestError
from ragen_apo.policy.language_model import LanguageModel
from ragen_apo.seeding import generator
from tests.factories import Sayings
from tests.fake_vllm import FakeVllm, HangupError, RefusalError, content_seed, serving
from tests.served_responses import (
    COMPLETIONS,
    MAX_NEW_TOKENS,
    PROMPTS,
    ROUNDING,
    always,
    change,
    keep_weights,
    largest_gap,
    respond,
    restart_once,
)

pytestmark = pytest.mark.slow

CLOSED = "http://127.0.0.1:9"
MakeEngine = Callable[..., ServerEngine]


@pytest.fixture
def second(fake: FakeVllm) -> Iterator[tuple[FakeVllm, str]]:
    """Another server, whose responses are functions of the context, as are those of the first."""
    with serving(fake.first_folder) as (other, url):
        fake.seed_of = other.seed_of = content_seed
        yield other, url


@pytest.fixture
def other(second: tuple[FakeVllm, str]) -> FakeVllm:
    return second[0]


@pytest.fixture
def urls(url: str, second: tuple[FakeVllm, str]) -> list[str]:
    """Of both servers; the fake is the first."""
    return [url, second[1]]


def die(fake: FakeVllm, *, after: int = 0) -> None:
    """No request is answered any more once so many completions have been."""
    left = [after]

    def hang_up(path: str, answer: Any) -> Any:
        if left[0] <= 0:
            raise HangupError
        left[0] -= path == COMPLETIONS
        return answer

    fake.spoil = hang_up


def revive(fake: FakeVllm) -> None:
    """As a process that was started again."""
    fake.spoil = lambda path, answer: answer
    fake.restart()


def play(engine: ServerEngine, *, num_episodes: int = 5) -> list[list[int]]:
    """The contexts of episodes of two turns, in their order; as many as fit play at once."""
    waiting = list(range(num_episodes))
    active: dict[Any, tuple[int, int]] = {}
    contexts: dict[int, list[int]] = {}
    with engine.rollout():
        while active or waiting:
            while waiting and engine.num_free_rows:
                index = waiting.pop(0)
                row = engine.open_row(generator(index))
                active[row] = (index, 1)
                engine.submit(row, [5 + index, 6], max_new_tokens=6)
            for row, _ in engine.step(temperature=1.0):
                index, turn = active.pop(row)
                if turn == 1:
                    active[row] = (index, 2)
                    engine.submit(row, [7, 8], max_new_tokens=6)
                else:
                    contexts[index] = row.context
                    engine.close_row(row)
    return [contexts[index] for index in range(num_episodes)]


def num_rows_of(fake: FakeVllm, *, max_tokens: int = MAX_NEW_TOKENS) -> int:
    """How many responses to rows were asked for."""
    return sum(p == COMPLETIONS and body["max_tokens"] == max_tokens for p, body in fake.asked)


def test_a_server_that_is_closed_at_the_start_is_said_once_and_left_out(
    make_engine: MakeEngine, model: LanguageModel, fake: FakeVllm, url: str
) -> None:
    said = Sayings()
    engine = make_engine(model, base_url=[CLOSED, url], progress=said)
    for _ in range(3):
        change(model)
        assert largest_gap(model, respond(engine)) < ROUNDING
    assert num_rows_of(fake) == 3 * len(PROMPTS)
    (line,) = said.lines
    assert line.startswith(f"{CLOSED}: /version: the connection failed")
    assert "(3 times in a row)" in line
    assert line.endswith("it is tried again at the next rollout")


def test_a_server_that_was_out_is_tried_only_once_at_a_rollout(
    make_engine: MakeEngine, model: LanguageModel, other: FakeVllm, urls: list[str]
) -> None:
    die(other)
    engine = make_engine(model, base_url=urls)
    respond(engine)
    other.asked.clear()
    respond(engine)
    assert other.paths() == ["/version"]


def test_episodes_are_the_same_when_a_server_dies_within_them(
    make_engine: MakeEngine, model: LanguageModel, fake: FakeVllm, other: FakeVllm, urls: list[str]
) -> None:
    whole = play(make_engine(model, base_url=urls[:1]))
    said = Sayings()
    engine = make_engine(model, base_url=urls, progress=said)
    play(engine)
    fake.asked.clear()
    other.asked.clear()
    die(other, after=1)
    assert play(engine) == whole
    assert num_rows_of(fake, max_tokens=6) >= 9, "all but the one that was answered"
    (line,) = said.lines
    assert line.startswith(f"{urls[1]}: ")


def test_nothing_waits_for_a_server_that_fails_while_another_plays(
    make_engine: MakeEngine, model: LanguageModel, other: FakeVllm, urls: list[str]
) -> None:
    engine = make_engine(model, base_url=urls, pauses=False)
    whole = play(engine)
    die(other)
    engine = make_engine(model, base_url=urls, pauses=False, retries=0)
    assert play(engine) == whole
    revive(other)
    assert play(engine) == whole
    die(other, after=1)
    assert play(engine) == whole


@pytest.mark.parametrize("route", ["/version", "/v1/models", "/weight_info"])
def test_a_server_that_hangs_is_tried_once_while_another_plays(
    make_engine: MakeEngine,
    model: LanguageModel,
    other: FakeVllm,
    urls: list[str],
    route: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It stands first, so that the other one does not play yet when it is tried."""
    monkeypatch.setattr(vllm, "MAX_GREETING_SECONDS", 0.3)

    def hang(path: str, answer: Any) -> Any:
        if path == route:
            other.has_ended.wait(1.0)
        return answer

    said = Sayings()
    engine = make_engine(model, base_url=urls[::-1], pauses=False, retries=3, progress=said)
    whole = play(engine)
    other.spoil = hang
    other.asked.clear()
    assert play(engine) == whole
    assert other.paths().count(route) == 1
    (line,) = said.lines
    assert f"{route} had no whole answer within 0.3 seconds" in line


def test_no_episode_begins_on_a_server_that_is_out(
    make_engine: MakeEngine, model: LanguageModel, other: FakeVllm, urls: list[str]
) -> None:
    engine = make_engine(model, base_url=urls)
    play(engine)
    other.asked.clear()
    die(other)
    play(engine, num_episodes=12)
    assert num_rows_of(other, max_tokens=6) == 0, "it was found out when the rollout began"
    revive(other)
    play(engine)
    other.asked.clear()
    die(other, after=1)
    play(engine, num_episodes=12)
    assert num_rows_of(other, max_tokens=6) <= 3, "those under way at once, of 24"


def test_a_server_that_comes_back_plays_the_next_rollout_with_its_weights(
    make_engine: MakeEngine, model: LanguageModel, other: FakeVllm, urls: list[str]
) -> None:
    said = Sayings()
    engine = make_engine(model, base_url=urls, progress=said)
    die(other)
    respond(engine)
    change(model)
    revive(other)
    other.asked.clear()
    assert largest_gap(model, respond(engine)) < ROUNDING
    assert num_rows_of(other) > 0
    assert other.paths().count("/collective_rpc") == 1
    assert said.lines[1:] == [f"{urls[1]} takes part in rollouts again"]


def test_a_server_that_was_started_again_goes_on_within_the_rollout(
    make_engine: MakeEngine, model: LanguageModel, other: FakeVllm, urls: list[str]
) -> None:
    said = Sayings()
    engine = make_engine(model, base_url=urls, pauses=False, progress=said)
    change(model)
    whole = play(engine)
    other.asked.clear()
    restart_once(other, hangs_up=True)
    assert play(engine) == whole
    assert other.paths().count("/collective_rpc") == 1
    assert not said.lines


def test_the_last_server_is_waited_for_and_so_are_those_that_were_out(
    make_engine: MakeEngine, model: LanguageModel, fake: FakeVllm, other: FakeVllm, urls: list[str]
) -> None:
    engine = make_engine(model, base_url=urls)
    whole = play(engine)
    die(other)
    respond(engine)  # which leaves it out
    die(fake, after=1)
    dying = fake.spoil

    def revive_other(path: str, answer: Any) -> Any:
        try:
            return dying(path, answer)
        except HangupError:
            revive(other)
            raise

    fake.spoil = revive_other
    other.asked.clear()
    assert play(engine) == whole
    assert num_rows_of(other, max_tokens=6) > 0


def test_one_error_names_every_server_when_none_is_left(
    make_engine: MakeEngine, model: LanguageModel, fake: FakeVllm, other: FakeVllm, urls: list[str]
) -> None:
    engine = make_engine(model, base_url=urls)
    play(engine)
    die(fake, after=1)
    die(other, after=2)
    with pytest.raises(ServerError) as caught:
        play(engine)
    message = str(caught.value)
    assert message.startswith("None of 2 servers is left. ")
    assert all(f"{url}: " in message for url in urls)
    assert message.count("go on with --resume") == 1
    revive(fake)
    revive(other)
    assert len(play(engine)) == 5


def test_a_server_of_another_model_is_left_out(
    make_engine: MakeEngine, model: LanguageModel, other: FakeVllm, urls: list[str]
) -> None:
    other.spoil = always("/collective_rpc", RefusalError(500, "no room"))
    said = Sayings()
    engine = make_engine(model, base_url=urls, progress=said)
    change(model)
    assert largest_gap(model, respond(engine)) < ROUNDING
    assert num_rows_of(other) == 0
    assert "status 500: no room" in said.lines[0]


def test_a_server_that_does_not_take_the_weights_over_is_left_out(
    make_engine: MakeEngine, model: LanguageModel, other: FakeVllm, urls: list[str]
) -> None:
    said = Sayings()
    engine = make_engine(model, base_url=urls, progress=said)
    respond(engine)
    keep_weights(other)
    change(model)
    assert largest_gap(model, respond(engine)) < ROUNDING
    assert num_rows_of(other) < len(PROMPTS), "those of the first rollout"
    assert "it computes another model" in said.lines[0]


def test_a_request_that_fails_everywhere_ends_the_rollout(
    make_engine: MakeEngine, model: LanguageModel, fake: FakeVllm, other: FakeVllm, urls: list[str]
) -> None:
    """Although both servers answer other requests all the time."""
    engine = make_engine(model, base_url=urls, retries=1)
    play(engine)

    def refuse_one(path: str, answer: Any) -> Any:
        if path == COMPLETIONS and answer["choices"][0]["prompt_token_ids"] == [5, 6]:
            raise HangupError
        return answer

    fake.spoil = other.spoil = refuse_one
    with pytest.raises(ServerError, match="the connection failed"):
        play(engine, num_episodes=40)


@dataclass
class Turnout:
    """A rotation of two servers with one retry, whose attempts to join fail as often as it says."""

    num_refused: dict[str, int] = field(default_factory=dict)
    """By address."""
    said: list[str] = field(default_factory=list)
    rotation: Rotation = field(init=False)

    def __post_init__(self) -> None:
        settings = RolloutsConfig.model_validate(
            {"engine": "vllm", "base_url": [CLOSED, f"{CLOSED}9"], "retries": 1}
        )
        self.rotation = Rotation(
            settings,
            [VllmServer(url, timeout_seconds=1.0) for url in settings.base_url],
            prepare=self.prepare,
            say=self.said.append,
            is_broken_off=threading.Event(),
        )
        self.rotation.begin()

    def prepare(self, server: VllmServer) -> None:
        if self.num_refused.get(server.base_url, 0):
            self.num_refused[server.base_url] -= 1
            raise RequestError("it does not answer")


def test_requests_that_were_sent_before_a_server_came_back_do_not_throw_it_out() -> None:
    turnout = Turnout()
    member = turnout.rotation.playing[0]
    num_joins = member.num_joins
    for _ in range(3):
        turnout.rotation.failed(member, RequestError("it hung up"), num_joins=num_joins)
    assert (member.is_playing, member.num_joins, turnout.said) == (True, num_joins + 1, [])


@pytest.mark.parametrize("is_answered", [True, False])
def test_failures_with_answers_between_them_do_not_add_up(is_answered: bool) -> None:
    turnout = Turnout()
    member = turnout.rotation.playing[0]
    for _ in range(3):
        turnout.rotation.failed(member, RequestError("it hung up"), num_joins=member.num_joins)
        if is_answered:
            turnout.rotation.answered(member)
    assert member.is_playing is is_answered
    assert len(turnout.said) == (0 if is_answered else 1)


def test_where_all_that_may_play_were_out_each_is_tried_more_than_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on a rank whose only other server the first rank has lost."""
    monkeypatch.setattr(rotation, "RETRY_SECONDS", 0.0)
    turnout = Turnout()
    member = turnout.rotation.playing[0]
    url = member.server.base_url
    turnout.num_refused[url] = 1
    turnout.rotation.failed(member, RequestError("it hung up"), num_joins=member.num_joins)
    assert member.is_out
    turnout.num_refused[url] = 1
    turnout.rotation.begin(able=[url])
    assert turnout.rotation.playing == [member]
    assert turnout.said[1:] == [f"{url} takes part in rollouts again"]
