"""Environments that act at the same time: they do, and nothing else changes."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ALL_COMPLETED, ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ragen_apo.agent import chat, environment_manager
from ragen_apo.agent.chat import ChatEpisode, Question, play_chat_episodes
from ragen_apo.agent.context import ContextManager, ContextWindow, TokenLimits
from ragen_apo.agent.environment_manager import IN_A_THREAD, EnvironmentManager
from ragen_apo.agent.proxy import AgentProxy, EpisodeRequest
from ragen_apo.agent.scripted import play_scripted_episodes
from ragen_apo.agent.search import TurnSearch
from ragen_apo.config.search import SearchConfig
from ragen_apo.environments.base import Reply, TextEnvironment, make_environment
from ragen_apo.environments.shop import ShopEnvironment
from ragen_apo.environments.toolkit.game import GameEnvironment
from ragen_apo.errors import EnvironmentFaultError
from ragen_apo.policy.chat_api.answer import Answer
from ragen_apo.policy.generation import GenerationEngine
from ragen_apo.policy.language_model import LanguageModel
from ragen_apo.types import Task, Trajectory
from tests import factories
from tests.sweeps import quick_first

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "adding_an_environment.md"
NUM_WORKERS, MAX_TURNS = 4, 3
PATIENCE_SECONDS = 60.0
"""For what happens at once, unless it never happens."""
SHOP: dict[str, Any] = {"num_products": 24, "max_turns": MAX_TURNS}


def manager(make: Callable[[], TextEnvironment], *, num_workers: int) -> EnvironmentManager:
    return EnvironmentManager(
        make, format_penalty=-0.05, invalid_action_penalty=-0.02, num_workers=num_workers
    )


def shop(*, num_workers: int) -> EnvironmentManager:
    return manager(lambda: ShopEnvironment(**SHOP), num_workers=num_workers)


def requests(environments: EnvironmentManager, number: int) -> list[EpisodeRequest]:
    tasks = environments.tasks("all")[:number]
    return [EpisodeRequest(task, 100 + index) for index, task in enumerate(tasks)]


def agent(
    model: LanguageModel,
    environments: EnvironmentManager,
    *,
    num_rows: int = 6,
    lockstep: bool = False,
) -> AgentProxy:
    engine = GenerationEngine(model, num_rows=num_rows, capacity=400)
    # An untrained model never writes the closing tag: let a fifth of the vocabulary end a response.
    engine.stop_rule.end_ids |= set(range(0, len(model.tokenizer), 5))
    limits = TokenLimits(400, 12)
    context = ContextManager(model.tokenizer, system_prompt=None, limits=limits)
    return AgentProxy(engine, environments, context, lockstep=lockstep)


def roll_out(proxy: AgentProxy, number: int) -> list[Trajectory]:
    asked = requests(proxy.environments, number)
    return proxy.rollout(asked, temperature=1.0, policy_version="tiny")


class Silent:
    """A policy that never acts, so that every episode has all its turns."""

    def begin(self, task: Task, *, seed: int) -> None: ...

    def act(self, observation: str) -> Reply:
        return Reply(thought="", action="nothing")


def ask(environments: EnvironmentManager, number: int) -> list[ChatEpisode]:
    """Episodes of a model behind an API that names products by the number of its question."""

    class Model:
        def answer(self, question: Question) -> Answer:
            words = f"{question.episode} {question.turn}"
            return Answer(f"<think>{words}</think><answer>search mug {words}</answer>")

        def stop(self) -> None: ...

    return play_chat_episodes(
        Model(),
        environments,
        requests(environments, number),
        system_prompt=None,
        window=ContextWindow(),
        concurrency=NUM_WORKERS,
        policy_version="m",
    )


def own_threads() -> list[str]:
    names = [thread.name for thread in threading.enumerate()]
    return [name for name in names if name.startswith("environment")]


# They act at the same time


class Meeting(ShopEnvironment):
    """Begins and acts when as many others do, too: alone it would wait for them in vain."""

    def __init__(self, everybody: threading.Barrier) -> None:
        super().__init__(**SHOP)
        self._everybody = everybody

    def reset(self, task: Task, *, seed: int) -> tuple[str, dict[str, Any]]:
        self._everybody.wait()
        return super().reset(task, seed=seed)

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self._everybody.wait()
        return super().step(action)


@pytest.fixture
def meeting() -> Iterator[EnvironmentManager]:
    """Environments that are made, begin and act only together."""
    everybody = threading.Barrier(NUM_WORKERS, timeout=PATIENCE_SECONDS)
    numbers = itertools.count()

    def make() -> TextEnvironment:
        if next(numbers) > 0:  # the first one knows tasks and properties
            everybody.wait()
        return Meeting(everybody)

    yield manager(make, num_workers=NUM_WORKERS)
    assert not own_threads()


@pytest.mark.slow
def test_environments_of_a_policys_episodes_act_at_the_same_time(
    tiny_model: LanguageModel, meeting: EnvironmentManager
) -> None:
    played = roll_out(agent(tiny_model, meeting, num_rows=NUM_WORKERS, lockstep=True), 8)
    assert [len(episode.turns) for episode in played] == [MAX_TURNS] * 8


def test_environments_of_scripted_episodes_act_at_the_same_time(
    meeting: EnvironmentManager,
) -> None:
    played = play_scripted_episodes(Silent, meeting, requests(meeting, 8), policy_version="s")
    assert [len(episode.turns) for episode in played] == [MAX_TURNS] * 8


def test_environments_of_a_model_behind_an_api_act_at_the_same_time(
    meeting: EnvironmentManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat, "FIRST_COMPLETED", ALL_COMPLETED)  # so that all are answered
    assert [len(each.answers) for each in ask(meeting, 8)] == [MAX_TURNS] * 8


def test_the_documented_environment_asks_a_server_for_several_episodes_at_the_same_time() -> None:
    everybody = threading.Barrier(NUM_WORKERS, timeout=PATIENCE_SECONDS)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            everybody.wait()
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps({"text": f"You asked {self.path}"}).encode())

        def log_message(self, format: str, *_: Any) -> None: ...  # noqa: A002

    blocks = re.findall(r"^```python\n(.*?)^```", DOCUMENT.read_text("utf-8"), re.M | re.S)
    names: dict[str, Any] = {}
    exec(next(block for block in blocks if "class LookUp" in block), names)
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}/page"
        tasks = [
            factories.task(f"Question {number}", payload={"address": address})
            for number in range(8)
        ]

        def make() -> TextEnvironment:
            return GameEnvironment(
                properties=ShopEnvironment(**SHOP).properties,
                tasks={"train": tasks},
                start=names["LookUp"],
                policies={},
                max_turns=MAX_TURNS,
            )

        played = play_scripted_episodes(
            Silent,
            manager(make, num_workers=NUM_WORKERS),
            [EpisodeRequest(task, 0) for task in tasks],
            policy_version="s",
        )
        server.shutdown()
    assert {each.final_observation for each in played} == {"You asked /page?q=nothing"}


# The same results


@pytest.mark.parametrize("lockstep", quick_first([False, True]))
def test_the_number_of_workers_changes_no_bit_of_a_rollout(
    tiny_model: LanguageModel, lockstep: bool
) -> None:
    alone = roll_out(agent(tiny_model, shop(num_workers=1), lockstep=lockstep), 9)
    many = roll_out(agent(tiny_model, shop(num_workers=NUM_WORKERS), lockstep=lockstep), 9)
    assert many == alone


@pytest.mark.slow
def test_lockstep_plays_the_same_episodes_up_to_the_rounding_of_a_batch(
    tiny_model: LanguageModel,
) -> None:
    own_pace = roll_out(agent(tiny_model, shop(num_workers=1)), 9)
    together = roll_out(agent(tiny_model, shop(num_workers=1), lockstep=True), 9)
    for one, other in zip(own_pace, together, strict=True):
        for mine, its in zip(one.turns, other.turns, strict=True):
            assert mine.response_token_ids == its.response_token_ids
            assert mine.observation == its.observation
            np.testing.assert_allclose(mine.logprobs, its.logprobs, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "options"),
    quick_first(
        [
            ("shop", SHOP),
            ("webshop", {"data": "generated:40", "max_turns": 6}),
            ("sokoban", {"num_train_tasks": 8, "num_test_tasks": 4}),
            ("frozen_lake", {"num_train_tasks": 8, "num_test_tasks": 4}),
            ("bandit", {"kind": "bernoulli"}),
            ("countdown", {"num_train_tasks": 8, "num_test_tasks": 4}),
            ("questions", {"num_train_tasks": 8, "num_test_tasks": 4}),
            ("mixture", {"parts": {"shop": SHOP, "frozen_lake": {}}}),
        ]
    ),
)
@pytest.mark.parametrize("policy", quick_first(["teacher", "random"]))
def test_scripted_episodes_are_the_same_with_many_workers(
    name: str, options: dict[str, Any], policy: str
) -> None:
    def play(*, num_workers: int) -> list[Trajectory]:
        environments = manager(lambda: make_environment(name, options), num_workers=num_workers)
        asked = [
            EpisodeRequest(task, seed)
            for seed, task in enumerate([*environments.tasks("train")[:8]] * 2)
        ]
        make_policy = environments.scripted_policies()[policy]
        return play_scripted_episodes(make_policy, environments, asked, policy_version=policy)

    assert play(num_workers=5) == play(num_workers=1)


def test_a_model_behind_an_api_plays_the_same_episodes_with_many_workers() -> None:
    assert ask(shop(num_workers=NUM_WORKERS), 9) == ask(shop(num_workers=1), 9)


@pytest.mark.slow
def test_a_search_finds_the_same_episodes_with_many_workers(tiny_model: LanguageModel) -> None:
    def found(*, num_workers: int) -> Any:
        proxy = agent(tiny_model, shop(num_workers=num_workers), num_rows=18)
        settings = SearchConfig(method="beam", width=3, candidates=2, rank_by="likelihood")
        asked = requests(proxy.environments, 5)
        return TurnSearch(proxy, settings).play(asked, policy_version="tiny")

    assert found(num_workers=NUM_WORKERS) == found(num_workers=1)


# Errors and the end


class Faulty(ShopEnvironment):
    """Fails in some episodes; of those that act at the same time, the later ones fail first."""

    def __init__(self, has_failed: threading.Event) -> None:
        super().__init__(**SHOP)
        self._has_failed, self._seed = has_failed, 0

    def reset(self, task: Task, *, seed: int) -> tuple[str, dict[str, Any]]:
        self._seed = seed
        return super().reset(task, seed=seed)

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        if self._seed == 101:
            if threading.current_thread() is not threading.main_thread():
                assert self._has_failed.wait(PATIENCE_SECONDS)
            raise ValueError("the first in order")
        if self._seed == 103:
            self._has_failed.set()
            raise ValueError("the first in time")
        return super().step(action)


@pytest.mark.slow
def test_the_first_error_in_order_is_raised_as_with_one_worker(
    tiny_model: LanguageModel,
) -> None:
    def message(*, num_workers: int) -> str:
        has_failed = threading.Event()
        environments = manager(lambda: Faulty(has_failed), num_workers=num_workers)
        proxy = agent(tiny_model, environments, lockstep=True)
        with pytest.raises(EnvironmentFaultError, match="the first in order") as caught:
            roll_out(proxy, 6)
        assert not own_threads()
        return str(caught.value)

    by_several = message(num_workers=NUM_WORKERS)
    assert IN_A_THREAD in by_several
    assert by_several.replace(IN_A_THREAD, "") == message(num_workers=1)
    assert "seed 101, turn 1, action" in message(num_workers=NUM_WORKERS)


@pytest.mark.skipif(os.name == "nt", reason="signals of Unix")
def test_ctrl_c_waits_for_what_has_begun_and_begins_nothing_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    is_waiting, is_ending = threading.Event(), threading.Event()
    wait, shutdown = environment_manager.wait, ThreadPoolExecutor.shutdown

    def waiting(*futures: Any, **options: Any) -> Any:
        is_waiting.set()
        return wait(*futures, **options)

    def ending(pool: ThreadPoolExecutor, **options: Any) -> None:
        shutdown(pool, **{**options, "wait": False})
        is_ending.set()
        shutdown(pool, **options)

    monkeypatch.setattr(environment_manager, "wait", waiting)
    monkeypatch.setattr(ThreadPoolExecutor, "shutdown", ending)
    begun, ended = list[int](), list[int]()
    everybody = threading.Barrier(2, timeout=PATIENCE_SECONDS)

    def interrupt() -> None:
        """Again where the main thread was just about to wait: Python heeds a signal afterwards."""
        for _ in range(int(PATIENCE_SECONDS)):
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            if is_ending.wait(1):
                return

    def work(number: int) -> None:
        begun.append(number)
        if everybody.wait() == 0:
            assert is_waiting.wait(PATIENCE_SECONDS)
            interrupt()
        assert is_ending.wait(PATIENCE_SECONDS)
        ended.append(number)

    # What a shell starts in the background ignores SIGINT.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            shop(num_workers=2).map(work, range(8))
    finally:
        signal.signal(signal.SIGINT, before)
    assert (sorted(begun), sorted(ended)) == ([0, 1], [0, 1])
    assert not own_threads()


def test_one_worker_works_in_the_callers_thread_when_a_result_is_asked_for() -> None:
    seen: list[tuple[int, threading.Thread]] = []
    numbers: Sequence[int] = range(3)
    results = shop(num_workers=1).map(
        lambda number: seen.append((number, threading.current_thread())), numbers
    )
    assert seen == []
    next(results)
    assert seen == [(0, threading.main_thread())]
