"""The database of docs/adding_an_environment.md: read only, bounded, closed with its episode."""

import re
import sqlite3
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ragen_apo.environments.base import make_environment
from ragen_apo.environments.toolkit.game import GameEnvironment
from tests import factories

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "adding_an_environment.md"
LOOP = "WITH n AS (SELECT a.i FROM numbers a, numbers b, numbers c) SELECT count(*) FROM n"


@pytest.fixture
def environment(tmp_path: Path) -> GameEnvironment:
    with sqlite3.connect(tmp_path / "company.sqlite3") as database:
        database.execute("CREATE TABLE numbers (i INTEGER)")
        rows = [(number,) for number in range(150)]
        database.executemany("INSERT INTO numbers VALUES (?)", rows)
    database.close()
    blocks = re.findall(r"^```python\n(.*?)^```", DOCUMENT.read_text("utf-8"), re.M | re.S)
    names: dict[str, Any] = {"__file__": str(tmp_path / "queries.py")}
    exec(next(block for block in blocks if "class Queries" in block), names)
    return GameEnvironment(
        properties=replace(make_environment("bandit", {}).properties, name="queries"),
        tasks={"train": [factories.task("Count.", environment="queries")]},
        start=names["Queries"],
        policies={},
        max_turns=100,
    )


def test_it_reads_and_can_do_nothing_else(environment: GameEnvironment, tmp_path: Path) -> None:
    environment.reset(environment.tasks("train")[0], seed=0)
    assert environment.step("SELECT count(*) FROM numbers WHERE i LIKE '1%'")[0] == "61"
    refused = (
        "DELETE FROM numbers",
        f"ATTACH '{tmp_path / 'other'}' AS other",
        "SELECT random()",
        "SELECT current_time",
        "SELECT '\ud800'",
        "SELECT 1; SELECT 2",
    )
    for text in refused:
        observation, *_, info = environment.step(text)
        assert observation.startswith("Error: ")
        assert info["invalid_action"]
    assert not (tmp_path / "other").exists()
    environment.close()


def test_a_query_is_limited_whatever_came_before_it(environment: GameEnvironment) -> None:
    environment.reset(environment.tasks("train")[0], seed=0)
    assert environment.step(LOOP)[0] == "Error: interrupted"  # 150 ** 3 rows
    shorter = LOOP.replace("numbers c", "(SELECT i FROM numbers LIMIT 3) c")
    answers = [environment.step(shorter)[0] for _ in range(8)]
    assert set(answers) == {str(150 * 150 * 3)}
    environment.close()


def test_each_episode_closes_its_connection(
    environment: GameEnvironment, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[sqlite3.Connection] = []
    connect = sqlite3.connect

    def noted(*arguments: Any, **keys: Any) -> sqlite3.Connection:
        held.append(connect(*arguments, **keys))
        return held[-1]

    monkeypatch.setattr(sqlite3, "connect", noted)
    for seed in range(2):
        environment.reset(environment.tasks("train")[0], seed=seed)
    environment.close()
    assert len(held) == 2
    for connection in held:
        with pytest.raises(sqlite3.ProgrammingError, match="closed database"):
            connection.execute("SELECT 1")
