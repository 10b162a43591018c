"""OpenEnv's own clients against the real server, `ragen-apo serve openenv`: `make test-interop`."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ragen_apo.environments.base import TextEnvironment, make_environment

pytest.importorskip(
    "openenv.core.harness", reason="openenv is not installed here; run `make test-interop`"
)

import httpx
from openenv.core import GenericEnvClient
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect

from ragen_apo.environments.openenv.client import TextAction, TextClient
from ragen_apo.environments.openenv.records import MAX_ACTION_CHARACTERS
from ragen_apo.environments.openenv.serving import MAX_MESSAGE_BYTES
from ragen_apo.environments.openenv.session import NO_EPISODE
from tests.interop.held import still_held, write_held

SHOP = {"num_products": 60, "max_turns": 3}
OPTIONS = ["--num_products", "60", "--max_turns", "3"]
BROKEN = """
import copy

from ragen_apo.environments.base import make_environment


class Broken:
    def __init__(self):
        self.whole = make_environment("shop", {"num_products": 24})

    def __getattr__(self, name):
        return getattr(self.whole, name)

    def step(self, action):
        if action == "exit":
            raise SystemExit(0)
        if action == "surrogate":
            return "\\ud800", 0.0, False, False, {}
        return self.whole.step(action)


def make_broken():
    return Broken()
"""


@contextlib.contextmanager
def served(*arguments: str) -> Iterator[str]:
    """The address of a server in a process of its own."""
    command = [sys.executable, "-m", "ragen_apo", "serve", "openenv", *arguments, "--port", "0"]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stdout is not None
            said = process.stdout.readline()
            found = re.search(r"http://127\.0\.0\.1:\d+", said)
            assert found, said
            yield found[0]
        finally:
            process.terminate()


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with served("shop", *OPTIONS) as address:
        yield address


@pytest.fixture
def shop() -> TextEnvironment:
    return make_environment("shop", SHOP)


def actions(shop: TextEnvironment, split: str, index: int) -> list[str]:
    """A search, no action at all, and the right purchase."""
    product = shop.tasks(split)[index].payload["product_id"]
    return ["search cotton", "nonsense", f"buy {product}"]


def test_an_episode_is_that_of_the_environment(address: str, shop: TextEnvironment) -> None:
    task = shop.tasks("test")[2]
    first, _ = shop.reset(task, seed=0)
    with TextClient(base_url=address).sync() as client:
        result = client.reset(split="test", index=2, seed=0)
        assert (result.observation.text, result.reward, result.done) == (first, None, False)
        assert result.observation.metadata["task_id"] == task.task_id
        earned = 0.0
        for action in actions(shop, "test", 2):
            text, reward, terminated, truncated, info = shop.step(action)
            result = client.step(TextAction(text=action))
            seen, earned = result.observation, earned + reward
            assert (seen.text, result.reward, result.done) == (
                text,
                reward,
                terminated or truncated,
            )
            assert seen.success == info.get("success", False)
            assert seen.invalid_action == info.get("invalid_action", False)
        assert seen.success
        assert seen.done
        state = client.state()
        assert (state.step_count, state.episode_return, state.seed) == (3, earned, 0)
        assert (state.task_id, state.done, state.success) == (task.task_id, True, True)


def test_resets_that_name_a_task_take_none_from_the_order_of_the_others(
    address: str, shop: TextEnvironment
) -> None:
    with TextClient(base_url=address).sync() as client:
        found = []
        for _ in range(3):
            client.reset(split="test", index=2)
            found.append(client.reset().observation.metadata["task_id"])
    ids = [task.task_id for task in shop.tasks("train")]
    first = ids.index(found[0])
    assert found == ids[first : first + 3]


def test_the_client_works_in_asynchronous_programs_and_takes_plain_text(address: str) -> None:
    async def episode() -> bool:
        async with TextClient(base_url=address) as client:
            await client.reset()
            return (await client.step("buy 1")).done

    assert asyncio.run(episode())


def test_twenty_sessions_at_once_do_not_see_each_other(address: str, shop: TextEnvironment) -> None:
    async def episode(index: int) -> tuple[str, str, bool]:
        async with TextClient(base_url=address) as client:
            first = await client.reset(split="train", index=index)
            for action in actions(shop, "train", index):
                result = await client.step(action)
            return (
                first.observation.text,
                (await client.state()).task_id,
                result.observation.success,
            )

    async def all_of_them() -> list[tuple[str, str, bool]]:
        return await asyncio.gather(*(episode(index) for index in range(20)))

    for index, (text, task_id, success) in enumerate(asyncio.run(all_of_them())):
        task = shop.tasks("train")[index]
        assert task.instruction in text
        assert (task_id, success) == (task.task_id, True)


def test_a_task_is_chosen_by_id_by_seed_or_in_turn(address: str, shop: TextEnvironment) -> None:
    with TextClient(base_url=address).sync() as client:

        def task_of(**options: Any) -> str:
            return client.reset(**options).observation.metadata["task_id"]

        wanted = shop.tasks("test")[5].task_id
        assert task_of(task_id=wanted) == wanted
        by_seed = [task_of(seed=seed) for seed in range(6)]
        assert by_seed == [task_of(seed=seed) for seed in range(6)]
        assert len(set(by_seed)) > 1
        in_turn = [task_of() for _ in range(4)]
        order = [task.task_id for task in shop.tasks("train")]
        start = order.index(in_turn[0])
        assert in_turn == [order[(start + number) % len(order)] for number in range(4)]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"task_id": "none"}, "no task has the id 'none'"),
        ({"split": "holdout"}, "the split 'holdout' has no tasks; expected train or test"),
        ({"index": 10**9}, "index must be from 0 to"),
        ({"index": -1}, "reset.index"),
        ({"seed": "x"}, "reset.seed"),
        ({"idx": 3}, "reset.idx"),
        ({"index": 0, "task_id": "x"}, "expected one of the two"),
    ],
)
def test_a_reset_that_cannot_be_is_answered_with_what_can(
    address: str, options: dict[str, Any], words: str
) -> None:
    with TextClient(base_url=address).sync() as client:
        with pytest.raises(RuntimeError, match=re.escape(words)):
            client.reset(**options)
        assert client.reset(index=0).observation.text
    answer = httpx.post(f"{address}/reset", json=options)
    assert answer.status_code in (400, 422)


@pytest.mark.parametrize(
    "action",
    ["", "<script>alert(1)</script>", "\x00\x1b[31m\u202e", "\ud800", "\r\n" * 1000, "x" * 100_000],
    ids=["empty", "markup", "control", "surrogate", "lines", "long"],
)
def test_any_text_is_an_action(address: str, action: str) -> None:
    with TextClient(base_url=address).sync() as client:
        client.reset(index=0)
        assert client.step(action).observation.invalid_action
        assert client.state().step_count == 1


def test_what_is_no_action_is_refused_and_the_session_goes_on(address: str) -> None:
    with GenericEnvClient(base_url=address).sync() as client:
        client.reset(index=0)
        long = {"text": "x" * (MAX_ACTION_CHARACTERS + 1)}
        for action in (long, {}, {"text": 3}, {"text": "buy 1", "more": 1}):
            with pytest.raises(RuntimeError, match="VALIDATION_ERROR"):
                client.step(action)
        assert client.state()["step_count"] == 0
        assert client.step({"text": "buy 1"}).done


def test_a_message_over_the_bound_ends_its_own_session_only(address: str) -> None:
    with TextClient(base_url=address).sync() as other:
        other.reset(index=0)
        with TextClient(base_url=address).sync() as client:
            client.reset(index=0)
            with pytest.raises(ConnectionClosed):
                client.step("x" * (MAX_MESSAGE_BYTES + 1))
        assert other.step("buy 1").done
    body = json.dumps({"action": {"text": "x" * MAX_MESSAGE_BYTES}})
    assert httpx.post(f"{address}/step", content=body).status_code == 413


def test_actions_without_an_episode_say_so(address: str) -> None:
    with TextClient(base_url=address).sync() as client:
        assert client.step("buy 1").observation.text == NO_EPISODE
        client.reset(index=0)
        client.step("buy 1")
        after = client.step("buy 1")
        assert (after.observation.text, after.reward, after.done) == (NO_EPISODE, 0.0, True)
        assert client.state().step_count == 1


def test_plain_http_says_what_there_is(address: str, shop: TextEnvironment) -> None:
    """OpenEnv's requests by HTTP keep no session; they describe, and begin an episode at most."""
    with httpx.Client(base_url=address) as http:
        assert http.get("/health").json() == {"status": "healthy"}
        assert http.get("/metadata").json()["description"] == shop.properties.rules
        assert "text" in http.get("/schema").json()["action"]["properties"]
        splits = [each["name"] for each in http.get("/shop/splits").json()]
        assert splits == list(shop.properties.splits)
        number = http.post("/shop/num_tasks", json={"split": "test"}).json()["num_tasks"]
        assert number == len(shop.tasks("test"))
        task = http.post("/shop/task", json={"split": "test", "index": 1}).json()["task"]
        assert task["task_id"] == shop.tasks("test")[1].task_id
        assert "payload" not in task
        tasks = http.post("/shop/task_range", json={"split": "test", "start": -2}).json()["tasks"]
        assert [each["index"] for each in tasks] == [number - 2, number - 1]
        assert http.post("/shop/task", json={"split": "test", "index": -1}).status_code == 400
        assert http.post("/shop/num_tasks", json={"split": "x"}).status_code == 400
        answer = http.post("/reset", json={"split": "test", "index": 1}).json()
        assert shop.tasks("test")[1].instruction in answer["observation"]["text"]
        answer = http.post("/step", json={"action": {"text": "buy 1"}})
        assert answer.json()["observation"]["text"] == NO_EPISODE
        assert http.post("/step", json={"action": {"text": 1}}).status_code == 422


def test_pages_of_other_sites_are_refused(address: str) -> None:
    evil = {"Origin": "https://evil.example"}
    assert httpx.post(f"{address}/reset", json={}, headers=evil).status_code == 403
    assert httpx.get(f"{address}/health", headers={"Host": "evil.example"}).status_code == 403
    with pytest.raises(InvalidStatus, match="403"):
        connect(f"{address.replace('http', 'ws')}/ws", additional_headers=evil)


def test_one_session_too_many_is_told_so() -> None:
    with served("shop", *OPTIONS, "--max-sessions", "1") as address:
        with TextClient(base_url=address).sync() as client:
            client.reset()
            with (
                TextClient(base_url=address).sync() as second,
                pytest.raises(RuntimeError, match="Server at capacity: 1/1"),
            ):
                second.reset()
        with TextClient(base_url=address).sync() as third:
            assert third.reset().observation.text


def test_a_broken_environment_answers_and_its_server_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "broken.py"
    path.write_text(BROKEN)
    with served(f"{path}:make_broken") as address, TextClient(base_url=address).sync() as client:
        client.reset()
        with pytest.raises(RuntimeError, match=r"the environment raised SystemExit\(0\)"):
            client.step("exit")
        with pytest.raises(RuntimeError, match="a lone surrogate stands in the text"):
            client.step("surrogate")
        assert client.step("search cotton").observation.text


def test_the_environment_of_a_session_is_closed_with_it(tmp_path: Path) -> None:
    with served(write_held(tmp_path)) as address:
        before = still_held(tmp_path)
        for _ in range(2):
            with TextClient(base_url=address).sync() as client:
                client.reset()
                client.step("search cotton")
                assert still_held(tmp_path) == before + 1
            end = time.monotonic() + 30
            while still_held(tmp_path) > before:
                assert time.monotonic() < end
                time.sleep(0.05)


def test_webshop_is_served() -> None:
    webshop = served("webshop", "--data", "generated:200", "--split", "test")
    with webshop as address, TextClient(base_url=address).sync() as client:
        assert "search" in client.reset(seed=3).observation.text
        assert not client.step("search red").observation.invalid_action
