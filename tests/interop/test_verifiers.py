"""verifiers' own evaluation on our environments, with a model behind HTTP: `make test-interop`."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from ragen_apo.environments.base import TextEnvironment, make_environment
from ragen_apo.errors import ConfigError

pytest.importorskip(
    "verifiers.v1", reason="verifiers is not installed here; run `make test-interop`"
)

import verifiers.v1 as vf

from ragen_apo.environments.verifiers import (
    ANSWER_FORM,
    TextEnvConfig,
    TextTasksetConfig,
    action_of,
)
from tests.chat_server import ChatServer, refuses, serving
from tests.interop.held import still_held, write_held

SHOP = {"num_products": 60, "max_turns": 3}
SELECTED = 6


@pytest.fixture
def shop() -> TextEnvironment:
    return make_environment("shop", SHOP)


def config(**seat: Any) -> TextEnvConfig:
    taskset = TextTasksetConfig(environment="shop", options=SHOP, split="test")
    return TextEnvConfig(taskset=taskset, **({"player": seat} if seat else {}))


def buyer(shop: TextEnvironment) -> Callable[[Mapping[str, Any]], str]:
    """Says what finds and buys the right product, from the conversation alone."""
    tasks = shop.tasks("test")

    def reply(body: Mapping[str, Any]) -> str:
        asked = [each["content"] for each in body["messages"] if each["role"] == "user"]
        task = next(task for task in tasks if task.instruction in asked[0])
        if len(asked) == 1:
            return "I look for it first. <answer>search cotton</answer>"
        return f"Now I am sure.\n<answer>buy {task.payload['product_id']}</answer>"

    return reply


def evaluated(chosen: TextEnvConfig, server: ChatServer, *, num_tasks: int) -> list[vf.Episode]:
    """What a user's program does: load, serve, run."""
    environment = vf.load_environment(chosen)
    context = vf.ModelContext(
        model="policy",
        client=vf.EvalClientConfig(base_url=server.url, api_key_var="NO_KEY"),
        sampling=vf.SamplingConfig(),
    )

    async def run() -> list[vf.Episode]:
        tasks = environment.taskset.take(num_tasks)
        slots = [slot for task in tasks for slot in environment.slots(task)]
        async with environment.serving():
            return await asyncio.gather(*(environment.run_slot(slot, context) for slot in slots))

    return asyncio.run(run())


def test_every_task_of_the_split_has_its_id_and_the_rules(shop: TextEnvironment) -> None:
    tasks = list(vf.load_environment(config()).taskset)
    assert [task.key for task in tasks] == [task.task_id for task in shop.tasks("test")]
    assert tasks[0].data.system_prompt == f"{shop.properties.rules}\n\n{ANSWER_FORM}"
    assert "product_id" not in tasks[0].data.model_dump_json()


def test_episodes_at_once_earn_the_return_of_the_environment(shop: TextEnvironment) -> None:
    with serving(buyer(shop)) as server:
        episodes = evaluated(config(), server, num_tasks=SELECTED)
    assert [episode.errors for episode in episodes] == [[]] * SELECTED
    for episode, task in zip(episodes, shop.tasks("test"), strict=False):
        (trace,) = episode.traces
        assert (trace.metrics["num_turns"], trace.metrics["num_invalid_actions"]) == (2.0, 0.0)
        first, _ = shop.reset(task, seed=0)
        second, cost, *_ = shop.step("search cotton")
        payment = shop.step(f"buy {task.payload['product_id']}")[1]
        assert (trace.reward, trace.metrics["success"]) == (cost + payment, 1.0)
        said = [each.content for each in trace.messages if each.role == "user"]
        assert said == [first, second]
        assert len(trace.branches) == 1, "one conversation, which a trainer can learn from whole"


def test_an_environment_is_closed_after_its_episode_and_what_it_measures_is_recorded(
    shop: TextEnvironment, tmp_path: Path
) -> None:
    taskset = TextTasksetConfig(environment=write_held(tmp_path), options={}, split="test")
    with serving(buyer(shop)) as server:
        episodes = evaluated(TextEnvConfig(taskset=taskset), server, num_tasks=3)
    for episode, task in zip(episodes, shop.tasks("test"), strict=False):
        bought = f"buy {task.payload['product_id']}"
        assert episode.traces[0].metrics["environment/length"] == len(bought)
    assert still_held(tmp_path) == 1, "the one that lists the tasks"


def test_replies_that_are_no_action_cost_turns() -> None:
    with serving(lambda _: "I do not know.") as server:
        (episode,) = evaluated(config(), server, num_tasks=1)
    (trace,) = episode.traces
    assert trace.reward < 0, "the shop charges for what cannot be done"
    assert trace.metrics["success"] == 0.0
    assert (trace.metrics["num_turns"], trace.metrics["num_invalid_actions"]) == (3.0, 3.0)


def test_the_limits_of_a_seat_end_an_episode(shop: TextEnvironment) -> None:
    with serving(buyer(shop)) as server:
        (episode,) = evaluated(config(max_turns=1), server, num_tasks=1)
    (trace,) = episode.traces
    assert (trace.metrics["num_turns"], trace.metrics["success"]) == (1.0, 0.0)
    assert trace.stop_condition == "max_turns"
    assert episode.ok


def test_a_model_that_fails_is_an_error_of_the_trace_and_no_return(shop: TextEnvironment) -> None:
    with serving(buyer(shop), refuses(401, "no such key")) as server:
        (episode,) = evaluated(config(), server, num_tasks=1)
    assert not episode.ok
    (trace,) = episode.traces
    assert "no such key" in str(trace.errors)
    assert (trace.rewards, trace.metrics) == ({}, {})


def test_the_command_line_of_verifiers_evaluates(shop: TextEnvironment, tmp_path: Path) -> None:
    command = [
        str(Path(sys.executable).with_name("vf-eval")), "ragen-apo-taskset",
        "--env.taskset.environment", "shop", "--env.taskset.options", json.dumps(SHOP),
        "--env.taskset.split", "test", "-n", "2", "--no-push", "--no-rich",
        "--model", "policy", "--client.api-key-var", "NO_KEY", "--output-dir", str(tmp_path),
    ]  # fmt: skip
    with serving(buyer(shop)) as server:
        done = subprocess.run(
            [*command, "--client.base-url", server.url], capture_output=True, text=True, check=False
        )
    assert done.returncode == 0, done.stderr[-2000:]
    (kept,) = tmp_path.rglob("traces.jsonl")
    traces = [json.loads(line) for line in kept.read_text(encoding="utf-8").splitlines()]
    assert len(traces) == 2
    assert kept.read_text(encoding="utf-8").count('"success": 1.0'.replace(" ", "")) >= 1


def test_an_environment_of_ones_own_is_named_by_its_file(tmp_path: Path) -> None:
    path = tmp_path / "own.py"
    path.write_text(
        "from ragen_apo.environments.shop import ShopEnvironment\n\n\n"
        "def make_own(max_turns):\n"
        "    return ShopEnvironment(num_products=24, max_turns=max_turns)\n"
    )
    taskset = TextTasksetConfig(environment=f"{path}:make_own", options={"max_turns": 2})
    with serving(lambda _: "<answer>buy 1</answer>") as server:
        (episode,) = evaluated(TextEnvConfig(taskset=taskset), server, num_tasks=1)
    assert episode.ok
    assert episode.traces[0].metrics["num_turns"] == 1.0


def test_a_split_without_tasks_is_refused() -> None:
    taskset = TextTasksetConfig(environment="shop", options=SHOP, split="holdout")
    with pytest.raises(ConfigError, match="has no tasks; expected train or test"):
        vf.load_environment(TextEnvConfig(taskset=taskset))


@pytest.mark.parametrize(
    ("reply", "action"),
    [
        ("<answer> buy 1 </answer>", "buy 1"),
        ("<think>buy 2?</think><answer>buy 1</answer>", "buy 1"),
        ("I could <answer>buy 2</answer>, but <answer>buy 1</answer>.", "buy 1"),
        ("<answer>buy 1", "buy 1"),
        ("buy 1\n", "buy 1"),
        ("<think>cheap</think>\nbuy 1", "buy 1"),
        ("", ""),
    ],
)
def test_the_action_is_the_last_answer_or_the_whole_reply(reply: str, action: str) -> None:
    assert action_of(reply) == action
