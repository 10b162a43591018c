"""`ragen-apo serve openenv` to another host: two network namespaces and OpenEnv's own client."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ragen_apo.environments.base import make_environment

pytest.importorskip(
    "openenv.core.harness", reason="openenv is not installed here; run `make test-interop`"
)

from tests.hosts import NEEDS_HOSTS, Host, two_hosts

pytestmark = NEEDS_HOSTS

DATA = "generated:200"
INDEX, SEED = 3, 0
ENVIRONMENT = {**os.environ, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def hosts() -> Iterator[tuple[Host, Host]]:
    with two_hosts() as both:
        yield both


@pytest.fixture(scope="module")
def server(hosts: tuple[Host, Host]) -> Iterator[tuple[str, str]]:
    """The address and the token that a server on the first host prints."""
    command = hosts[0].command(
        *(sys.executable, "-m", "ragen_apo", "serve", "openenv", "webshop", "--data", DATA),
        *("--split", "test", "--host", hosts[0].address, "--port", "0"),
    )
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT) as process:
        try:
            assert process.stdout is not None
            said = process.stdout.readline()
            found = re.search(r"(http://10\.77\.0\.1:\d+), .*Bearer (\S+)", said)
            assert found, said
            yield found[1], found[2]
        finally:
            process.terminate()


def played(
    host: Host, address: str, token: str, actions: list[str]
) -> subprocess.CompletedProcess[str]:
    """The end of a program on this host that plays the episode."""
    asked = {
        "address": address,
        "token": token,
        "reset": {"split": "test", "index": INDEX, "seed": SEED},
        "actions": actions,
    }
    return subprocess.run(
        host.command(sys.executable, str(Path(__file__).with_name("afar.py"))),
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        env=ENVIRONMENT,
        timeout=120,
        check=False,
    )


def a_purchase() -> tuple[list[str], list[Any]]:
    """The actions that buy what the task asks for, and what this process sees of them."""
    webshop = make_environment("webshop", {"data": DATA})
    task = webshop.tasks("test")[INDEX]
    oracle = webshop.scripted_policies()["oracle"]()
    oracle.begin(task, seed=SEED)
    text, _ = webshop.reset(task, seed=SEED)
    actions: list[str] = []
    seen: list[Any] = [(text, None, False)]
    while not seen[-1][2]:
        actions.append(oracle.act(text).action)
        text, reward, terminated, truncated, _ = webshop.step(actions[-1])
        seen.append((text, reward, terminated or truncated))
    return actions, seen


def test_an_episode_is_played_to_a_purchase_from_another_host(
    hosts: tuple[Host, Host], server: tuple[str, str]
) -> None:
    actions, seen = a_purchase()
    assert "buy" in actions[-1].lower()
    far = played(hosts[1], *server, actions)
    assert far.returncode == 0, far.stderr
    results = json.loads(far.stdout)
    assert [(o["text"], reward, done) for o, reward, done in results] == seen
    assert results[-1][0]["success"]


@pytest.mark.parametrize("token", ["", "wrong"])
def test_another_host_without_the_token_is_refused(
    hosts: tuple[Host, Host], server: tuple[str, str], token: str
) -> None:
    far = played(hosts[1], server[0], token, [])
    assert far.returncode != 0
    assert "401" in far.stderr or "403" in far.stderr
