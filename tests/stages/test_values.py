"""What Stage 1 says of the reference, and what Stage 2 is told of it."""

import csv
import itertools
import math
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from ragen_apo.agent.search import MoveInContext
from ragen_apo.errors import ConfigError, MissingValueError, TrainingError
from ragen_apo.policy.turn_features import move_reader
from ragen_apo.run_directory import RunDirectory
from ragen_apo.session import Session
from ragen_apo.stages import search
from ragen_apo.stages.search import predictor_of_moves
from ragen_apo.stages.stored_values import reference_values, selected_tasks, stored_trajectories
from ragen_apo.stages.value_regression import features_of_turns, fit_to_turns
from ragen_apo.stages.values import estimate_run_values, estimate_values, faults_of
from ragen_apo.types import StopReason, training_samples
from ragen_apo.values.coverage import Faults
from ragen_apo.values.estimator import soft_value
from ragen_apo.values.store import ValueStore
from tests import factories
from tests.factories import Sayings, played, reference, with_keys, with_progress


@pytest.mark.slow
def test_an_untrained_reference_is_told_that_the_prompt_must_state_the_form(
    session: Session,
) -> None:
    said = Sayings()
    untrained = with_progress(session, said)
    model = untrained.load_model(untrained.run.initial)
    report = estimate_values(untrained, model, untrained.training_tasks()[:4])
    assert report["share_unreadable"] > 0.9
    assert 0.0 <= report["share_cut_by_context"] <= 1.0
    (advice,) = [text for text in said.lines if text == report["advice"]]
    assert advice.startswith("No task was solved")
    assert "set agent.system_prompt: rules_and_format" in advice


@pytest.mark.slow
def test_held_out_tasks_are_sampled_without_advice_for_training(session: Session) -> None:
    shutil.rmtree(session.run.reference(0))
    shutil.copytree(session.run.initial, session.run.reference(0))  # it solves nothing
    for split, is_advised in (("test", False), ("train", True)):
        said = Sayings()
        report = estimate_run_values(
            session.config, session.run, version=0, split=split, progress=said
        )
        assert report["advice"] is not None
        assert (report["advice"] in said.lines) == is_advised


@pytest.mark.slow
def test_the_table_has_v_star_of_each_task_and_what_the_filter_made_of_it(
    session: Session,
) -> None:
    keys = ["--rollout_filter.strategy=top_p", "--values.num_samples=2", "--values.adaptive=false"]
    session = with_keys(session, *keys)
    tasks = session.training_tasks()
    report = estimate_values(session, reference(session), tasks, version=1)
    with (session.run.value_table_of(1)).open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["task_id"] for row in rows] == [task.task_id for task in tasks]
    assert [row["instruction"] for row in rows] == [task.instruction for task in tasks]
    assert sum(int(row["samples"]) for row in rows) == report["num_samples"]
    assert {row["stage_2"] for row in rows} >= {"kept", "never_solved"}
    for name, number in report["selection"].items():
        assert [row["stage_2"] for row in rows].count(name) == number
    with ValueStore(session.run.values, create=False) as store:
        conditions, beta = session.conditions(reference(session)), session.config.values.beta1
        values = store.values(conditions, [row["task_id"] for row in rows], beta=beta)
    for row in rows:
        assert float(row["v_star"]) == pytest.approx(values[row["task_id"]], rel=1e-5)
        solved = int(row["successes"]) / int(row["samples"])
        assert (row["stage_2"] == "never_solved") <= (solved == 0)


def test_faults_are_counted_by_turn_and_full_contexts_by_episode() -> None:
    cut = played("a", stop_reason=StopReason.CONTEXT_LIMIT, terminated=False)
    late = played("b", stop_reason=StopReason.TURN_LIMIT, terminated=False)
    flagged = factories.turn(flags=("invalid_action",))
    invalid = factories.episode(flagged, flagged, factories.turn())
    found = faults_of(iter([cut, late, invalid, cut]))  # a turn of `played` has a format error
    assert found == Faults(unreadable=3 / 6, invalid=2 / 6, cut=0.5)
    assert faults_of([]) == Faults()


@pytest.mark.parametrize(("algorithm", "num_kept"), [("apo", 5), ("grpo", 21)])
def test_the_report_counts_as_kept_the_tasks_that_stage_two_trains_on(
    algorithm: str, num_kept: int, session: Session
) -> None:
    """A quarter of 21; without V* the filter chooses among the rollouts of each step instead."""
    filtered = with_keys(
        session,
        f"--algorithm={algorithm}",
        "--distillation.enabled=true",
        "--values.num_samples=2",
        "--rollout_filter={strategy: top_fraction, value: 0.25, zero_variance: keep}",
    )
    model, tasks = reference(session), session.training_tasks()
    kept = estimate_values(filtered, model, tasks)["selection"]["kept"]
    assert kept == len(selected_tasks(filtered, model, tasks)) == num_kept


def test_a_task_without_v_star_is_an_error_and_never_zero(session: Session) -> None:
    tasks = session.environments.tasks("all")  # the held-out ones were not sampled
    with pytest.raises(MissingValueError, match="no sampled return of 3 of 24 tasks"):
        reference_values(session, reference(session), tasks)


@pytest.mark.parametrize(
    ("key", "difference"),
    [
        ("--sampling.temperature=0.5", r"temperature: store has 1\.0, asked for 0\.5"),
        (
            "--agent.context={mode: last_turns, num_turns: 2}",
            "store has 'full', asked for 'last_turns-2'",
        ),
    ],
)
def test_v_star_of_other_conditions_is_missing(key: str, difference: str, session: Session) -> None:
    other, tasks = with_keys(session, key), session.training_tasks()
    with pytest.raises(MissingValueError, match=difference):
        reference_values(other, reference(session), tasks)


def test_the_ablations_use_zero_and_the_mean_of_the_returns(session: Session) -> None:
    model, tasks = reference(session), session.training_tasks()
    v_star, zero, mean = (
        reference_values(with_keys(session, f"--values.baseline={name}"), model, tasks).tasks
        for name in ("v_star", "zero", "mean")
    )
    assert zero == dict.fromkeys([task.task_id for task in tasks], 0.0)
    conditions = session.conditions(model)
    with ValueStore(session.run.values) as store:
        returns = store.returns_by_task(conditions)
    for task_id, value in mean.items():
        assert value == pytest.approx(sum(returns[task_id]) / len(returns[task_id]))
        assert value <= v_star[task_id] + 1e-12
    assert any(value < v_star[task_id] - 1e-6 for task_id, value in mean.items())


@pytest.mark.slow
@pytest.mark.usefixtures("few_random_features")
def test_a_regression_values_a_task_by_the_samples_of_all_and_says_how_well(
    session: Session,
) -> None:
    said, tasks = Sayings(), session.training_tasks()
    asked = with_keys(with_progress(session, said), "--values.estimator=regression")
    model = reference(session)
    found, stored = (reference_values(each, model, tasks) for each in (asked, session))
    assert found.tasks.keys() == stored.tasks.keys()
    assert found.tasks != pytest.approx(stored.tasks)
    assert found.regression is not None and stored.regression is None
    assert found.regression.beta == session.config.values.beta1
    assert found.regression.sentence() in said.lines
    with ValueStore(session.run.values) as store:
        returns = store.returns_by_task(session.conditions(model))
    num_episodes, of_two = (
        sum(len(returns[task.task_id]) for task in each) for each in (tasks, tasks[:2])
    )  # adaptive: two a task, or one
    assert re.fullmatch(
        rf"V\* by regression on \d+ states of {num_episodes} episodes; it leaves \d+% of the "
        "variance of what is earned in held-out episodes of these tasks",
        found.regression.sentence(),
    )
    mean = reference_values(with_keys(asked, "--values.baseline=mean"), model, tasks)
    assert mean.regression is not None and math.isinf(mean.regression.beta)
    with pytest.raises(MissingValueError, match="no sampled return of 3 of 24 tasks"):
        reference_values(asked, model, session.environments.tasks("all"))
    too_few = f"at least 5 episodes .* got {of_two}; train on more tasks"
    with pytest.raises(TrainingError, match=too_few):
        reference_values(asked, model, tasks[:2])


@pytest.mark.slow
@pytest.mark.usefixtures("few_random_features")
def test_moves_are_predicted_as_the_newest_reference_reads_them(session: Session) -> None:
    """Each move by itself, cut out of an episode, against the features of the whole episode."""
    model, tasks = reference(session, 1), session.training_tasks()
    with session.value_store() as store:
        episodes = list(stored_trajectories(store, session.conditions(model), tasks))
    beta, size = session.config.values.beta1, session.config.training.micro_batch_size
    regression, _ = fit_to_turns(
        model, episodes, move_reader, beta=beta, held_out="tasks", micro_batch_size=size
    )
    value_of = regression.on(torch.device("cpu"))
    predictor = predictor_of_moves(session)
    for episode in episodes[:4]:
        (sample,) = training_samples(episode)
        (features_KH,) = features_of_turns(model, [[sample]], move_reader, micro_batch_size=1)
        moves, length = [], 0
        for turn in episode.turns:
            length += len(turn.prompt_token_ids) + len(turn.response_token_ids)
            moves.append(MoveInContext(sample.token_ids[:length], len(turn.response_token_ids)))
        assert predictor.predict(moves) == pytest.approx(value_of(features_KH).tolist(), abs=1e-4)
    assert predictor.predict([]) == []
    ends = [each.turns[-1].reward for each in episodes if each.truncated]
    assert predictor.ran_out == pytest.approx(soft_value(ends, beta=beta))


@pytest.mark.slow
@pytest.mark.usefixtures("few_random_features")
@pytest.mark.parametrize("limit", [-1.0, 1e9])
def test_a_search_warns_where_predictions_are_mostly_noise(
    limit: float, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = Sayings()
    monkeypatch.setattr(search, "MAX_UNEXPLAINED", limit)
    predictor_of_moves(with_progress(session, said))
    assert any("mostly noise" in line for line in said.lines) == (limit < 0)


def test_the_moves_of_a_configured_store_that_is_gone_are_not_sampled_anew(
    session: Session, tmp_path: Path
) -> None:
    gone = with_keys(
        session, f"--values.store={tmp_path / 'v.sqlite'}", "--reference.refresh_every_steps=null"
    )
    with pytest.raises(ConfigError, match=r"v.sqlite has fewer .*; put it back, or set rank_by"):
        predictor_of_moves(gone)


def test_a_kill_in_stage_one_loses_no_more_than_seconds(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its samples stay, and would be nearly free in a comparison."""
    now = itertools.count(0.0, 2.1)  # each look at the clock is so much later
    clock = SimpleNamespace(perf_counter=lambda: next(now))
    monkeypatch.setattr("ragen_apo.phase_clock.time", clock)
    noted: list[float] = []
    monkeypatch.setattr(RunDirectory, "add_seconds", lambda *args, **_: noted.append(args[2]))
    session.run.values.unlink()
    with session.clock.timed("stage 1"):
        estimate_values(session, reference(session), session.training_tasks())
    assert len(noted) > 2
    assert max(noted) < 5.0


def test_a_new_reference_has_values_of_its_own_and_the_old_ones_stay(session: Session) -> None:
    tasks = session.training_tasks()
    values = [
        reference_values(session, reference(session, version), tasks).tasks for version in (0, 1)
    ]
    assert values[0].keys() == values[1].keys()
    assert values[0] != values[1]
