"""Rules that end a run: each fires and does not fire, and a stopped run is a whole one."""

import json
from pathlib import Path
from typing import Any

import pytest

from ragen_apo.config.training import EarlyStopConfig
from ragen_apo.errors import ConfigError
from ragen_apo.files import read_json_lines
from ragen_apo.stages.early_stop import RULES, EarlyStopWatch
from ragen_apo.training.checkpoint import list_checkpoints
from tests import factories
from tests.factories import AlgorithmRuns

HEALTHY = {
    "return_mean": 1.0,
    "mutual_information": 1.0,
    "entropy": 1.0,
    "kl_per_sequence": 1.0,
    "format_error_share": 0.1,
}


def rows(*changes: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"step": step, **HEALTHY, **change} for step, change in enumerate(changes, 1)]


FIRES = {
    "min_mutual_information": (0.5, {"mutual_information": 0.4}),
    "min_entropy": (0.5, {"entropy": 0.4}),
    "max_entropy": (2.0, {"entropy": 2.1}),
    "max_kl": (2.0, {"kl_per_sequence": 2.1}),
    "max_format_error_share": (0.5, {"format_error_share": 0.6}),
    "max_return_drop": (0.5, {"return_mean": 0.4}),
}
"""A limit and what breaks it; 1.0 was the best return."""


def test_every_key_has_a_rule() -> None:
    assert {rule.key for rule in RULES} == set(FIRES)
    assert set(EarlyStopConfig.model_fields) == {*FIRES, "patience"}


@pytest.mark.parametrize("rule", FIRES)
def test_a_rule_stops_the_run_at_the_last_of_as_many_rows_as_patience_says(rule: str) -> None:
    limit, broken = FIRES[rule]
    watch = EarlyStopWatch(EarlyStopConfig.model_validate({rule: limit, "patience": 2}))
    stopped = []
    for row in rows({}, broken, {}, broken, broken, {}):
        watch.note(row)
        stopped.append(watch.stopped is not None)
    assert stopped == [False, False, False, False, True, True]
    assert watch.stopped is not None
    assert (watch.stopped.rule, watch.stopped.step) == (rule, 5)
    for words in (f"{limit:g}", "2 rows", f"training.early_stop.{rule}"):
        assert words in watch.stopped.reason


@pytest.mark.parametrize("rule", FIRES)
def test_a_rule_does_not_stop_at_its_limit_nor_where_it_is_off(rule: str) -> None:
    limit, broken = FIRES[rule]
    metric = next(iter(broken))
    at_limit = {metric: 1.0 - limit if rule == "max_return_drop" else limit}
    on = EarlyStopConfig.model_validate({rule: limit, "patience": 1})
    assert EarlyStopWatch(on, rows({}, at_limit, at_limit)).stopped is None
    others = {other: values[0] for other, values in FIRES.items() if other != rule}
    elsewhere = EarlyStopConfig.model_validate({**others, "patience": 1})
    assert EarlyStopWatch(elsewhere, rows({}, broken, broken)).stopped is None


def test_the_drop_is_measured_from_the_best_return_of_all_rows() -> None:
    settings = EarlyStopConfig(max_return_drop=0.5, patience=1)
    falling = [{"return_mean": value} for value in (-1.0, 2.0, 1.6, 1.5)]
    assert EarlyStopWatch(settings, rows(*falling)).stopped is None
    watch = EarlyStopWatch(settings, rows(*falling, {"return_mean": 1.49}))
    assert watch.stopped is not None
    assert watch.stopped.reason.startswith(
        "the fall of return_mean from its best (2) was above 0.5 in 1 row, in the last one 0.51"
    )


def test_rows_without_the_metric_neither_go_on_nor_start_again() -> None:
    settings = EarlyStopConfig(min_mutual_information=0.5, patience=2)
    found = rows(*[{"mutual_information": 0.1}] * 4)
    for row in found[1:3]:
        del row["mutual_information"]
    assert EarlyStopWatch(settings, found[:3]).stopped is None
    watch = EarlyStopWatch(settings, found)
    assert watch.stopped is not None and watch.stopped.step == 4


def test_a_watch_that_reads_the_rows_again_knows_what_the_first_one_knew() -> None:
    settings = EarlyStopConfig(max_kl=2.0, max_return_drop=0.3, patience=3)
    found = rows({"return_mean": 3}, *[{"return_mean": 2.5, "kl_per_sequence": 3}] * 3)
    whole = EarlyStopWatch(settings, found)
    for cut in range(len(found)):
        resumed = EarlyStopWatch(settings, json.loads(json.dumps(found[:cut])))
        for row in found[cut:]:
            resumed.note(row)
        assert resumed.stopped == whole.stopped
    assert whole.stopped is not None


def test_limits_that_leave_no_room_for_entropy_are_refused() -> None:
    keys = ["--training.early_stop.min_entropy=2", "--training.early_stop.max_entropy=1"]
    with pytest.raises(ConfigError, match=r"min_entropy \(2\) must be less than max_entropy \(1\)"):
        factories.config(*keys, text="")


def test_a_rule_on_what_is_never_measured_is_refused() -> None:
    keys = ["--monitors.every_steps=null", "--training.early_stop.min_mutual_information=0.1"]
    with pytest.raises(ConfigError, match="set monitors.every_steps"):
        factories.config(*keys, text="")


@pytest.mark.slow
def test_a_stopped_run_is_evaluated_saved_and_stays_stopped(
    algorithm_runs: AlgorithmRuns, tmp_path: Path
) -> None:
    # An untrained policy's entropy is above this at once: stopped after the third of four steps.
    config = algorithm_runs.config(
        "rloo",
        "--training.early_stop.max_entropy=1e-6",
        "--training.early_stop.patience=3",
        "--training.eval_every=100",
    )
    run = factories.run(config, tmp_path / "run")
    found = read_json_lines(run.metrics)
    assert [row["step"] for row in found] == [1, 2, 3]
    assert ["eval_success_rate" in row for row in found] == [False, False, True]
    assert list_checkpoints(run.checkpoints)[-1].name == "4-training-000003"
    assert (run.policy / "model.safetensors").exists()
    why = run.read_status()["early_stop"]
    assert (why["rule"], why["step"]) == ("max_entropy", 3)
    assert why["reason"].startswith("entropy was above 1e-06 in 3 rows in succession")
    before = run.metrics.read_text()
    factories.run(config, run.path)
    assert run.metrics.read_text() == before
