"""docs/metrics.md names exactly the fields that a run writes."""

import json
import re
from collections.abc import Iterable
from pathlib import Path

import pytest

from ragen_apo.files import read_json_lines
from ragen_apo.session import Session
from ragen_apo.values.state_values import state_coverage
from tests.factories import AlgorithmRuns

PAGE = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"


def documented(heading: str) -> list[str]:
    """The names in the first column of all tables under a heading."""
    section = PAGE.read_text(encoding="utf-8").split(f"\n## {heading}\n")[1].split("\n## ")[0]
    return re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)


def fields(rows: Iterable[dict]) -> set[str]:
    return {name for row in rows for name in row}


@pytest.mark.slow
def test_every_metric_of_stage_two_is_documented_once(
    session: Session, algorithm_runs: AlgorithmRuns
) -> None:
    names = documented("metrics.jsonl")
    assert len(names) == len(set(names))
    written = fields(read_json_lines(session.run.metrics))
    for algorithm in ("apo", "apo_turn", "oapl", "ppo", "gigpo"):  # no other has a field of its own
        written |= fields(read_json_lines(algorithm_runs.finished(algorithm).metrics))
    # Absent in a run as short as this one, when no step has a success.
    written |= {"v_star_success_correlation"}
    of_ranks = {"num_ranks", "waiting_seconds", "communication_seconds"}  # none in one process
    of_servers = {"rollout_ahead_seconds"}
    assert set(names) == written | of_ranks | of_servers


@pytest.mark.parametrize("name", ["loss", "residual_variance", "gradient_norm", "entropy"])
def test_metrics_are_finite_numbers_that_move(name: str, session: Session) -> None:
    values = [row[name] for row in read_json_lines(session.run.metrics)]
    assert len(set(values)) == len(values)


def test_every_field_of_the_warm_start_is_documented(session: Session) -> None:
    assert set(documented("warm_start.jsonl")) == fields(read_json_lines(session.run.warm_start))


@pytest.mark.parametrize("version", [0, 1])
def test_every_field_of_the_value_report_is_documented(version: int, session: Session) -> None:
    report = json.loads(session.run.value_report_of(version).read_text())
    of_states = set(state_coverage([], min_visits=1))
    assert set(documented("value_report.json")) == set(report) | of_states


@pytest.mark.slow
def test_the_value_report_of_apo_turn_also_has_what_is_known_of_states(
    algorithm_runs: AlgorithmRuns,
) -> None:
    report = json.loads(algorithm_runs.finished("apo_turn").value_report.read_text())
    assert set(documented("value_report.json")) == set(report)
