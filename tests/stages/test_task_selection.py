"""Which tasks Stage 2 of A*-PO trains on, and that none of its episodes is in its own value."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ragen_apo.agent.proxy import EpisodeRequest
from ragen_apo.config.training import RolloutFilterConfig
from ragen_apo.config.values import ValuesConfig
from ragen_apo.distributed.ranks import ALONE
from ragen_apo.errors import MissingValueError, TrainingError
from ragen_apo.files import read_json_lines
from ragen_apo.seeding import derive_seed
from ragen_apo.session import Session
from ragen_apo.stages.collect_values import collect_values
from ragen_apo.stages.stored_values import selected_tasks
from ragen_apo.stages.task_selection import (
    SelectionCounts,
    TaskSelection,
    select_stored_tasks,
    select_tasks,
)
from ragen_apo.stages.values import estimate_values, sample_schedule
from ragen_apo.training.checkpoint import list_checkpoints
from ragen_apo.training.trainer import Trainer
from ragen_apo.types import Task
from ragen_apo.values.conditions import SamplingConditions
from ragen_apo.values.store import ValueStore
from tests import factories
from tests.factories import (
    Sayings,
    episode,
    reference,
    step_without_update,
    task,
    turn,
    with_keys,
    with_progress,
)

RETURNS = {
    "never": [-0.1, -0.1, -0.1, -0.1],
    "always": [1.0, 1.0, 1.0, 1.0],
    "half": [0.0, 1.0, 0.0, 1.0],  # sample standard deviation sqrt(1/3) = 0.577
    "seldom": [0.0, 0.0, 1.0, 0.0],  # 0.5
    "shaped": [0.0, 0.1, 0.0, 0.1],  # 0.058, never solved
    "odd": [0.5, 0.5, 0.5, 0.5],  # a success that earns no more than a failure
}
SUCCESSES = {name: [value > 0.9 for value in returns] for name, returns in RETURNS.items()} | {
    "odd": [True, False, True, False]
}


def selected(**settings: Any) -> TaskSelection:
    tasks = [task(name) for name in RETURNS]
    return select_tasks(
        tasks,
        returns={task(name).task_id: values for name, values in RETURNS.items()},
        successes={task(name).task_id: values for name, values in SUCCESSES.items()},
        settings=RolloutFilterConfig(**settings),
    )


def names(selection: TaskSelection) -> list[str]:
    return [chosen.instruction for chosen in selection.tasks]


def test_tasks_without_variance_are_left_out_and_counted_by_what_they_are() -> None:
    # top_p with p = 1 keeps all that have variance.
    selection = selected(strategy="top_p", value=1.0)
    assert names(selection) == ["half", "seldom", "shaped"]
    assert selection.counts == SelectionCounts(
        kept=3, never_solved=1, always_solved=1, equal_returns=1
    )
    assert selection.counts.sentence() == (
        "rollout_filter: Stage 2 trains on 3 of 6 tasks; left out: 1 never solved, 1 always "
        "solved, 1 equal returns."
    )
    said = {name: selection.verdicts[task(name).task_id] for name in RETURNS}
    assert {name for name, verdict in said.items() if verdict == "kept"} == {*names(selection)}
    assert sorted(said.values()) == sorted(
        ["always_solved", "equal_returns", "kept", "kept", "kept", "never_solved"]
    )
    assert SelectionCounts(kept=1).sentence() == "rollout_filter: Stage 2 trains on 1 of 1 task."


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        # 0.577 + 0.5 = 1.077 of 1.135 is 95%: two tasks hold 90%, one holds 51%.
        ({"strategy": "top_p", "value": 0.9}, ["half", "seldom"]),
        ({"strategy": "top_p", "value": 0.5}, ["half"]),
        ({"strategy": "top_fraction", "value": 0.7}, ["half", "seldom"]),
    ],
)
def test_the_strategy_chooses_among_those_with_variance(settings: dict, kept: list[str]) -> None:
    selection = selected(**settings)
    assert names(selection) == kept
    assert selection.counts.low_score == 3 - len(kept)
    assert selection.counts.total == 6


def test_kept_tasks_without_variance_can_still_be_left_out_by_their_score() -> None:
    selection = selected(strategy="top_fraction", value=0.7, zero_variance="keep")
    # Equal scores in the order of the tasks: "never" is the first of those at 0.
    assert names(selection) == ["never", "half", "seldom", "shaped"]
    assert selection.counts == SelectionCounts(kept=4, low_score=2)


def test_returns_that_differ_by_the_order_of_their_rewards_alone_are_equal() -> None:
    sums = [-0.05 - 0.06 - 0.11, -0.11 - 0.06 - 0.05]
    assert sums[0] != sums[1]
    only = task("only")
    selection = select_tasks(
        [only],
        returns={only.task_id: sums},
        successes={only.task_id: [False, False]},
        settings=RolloutFilterConfig(strategy="top_fraction", value=1.0),
    )
    assert not selection.tasks
    assert selection.counts == SelectionCounts(kept=0, never_solved=1)


class ScriptedReference:
    """Plays a task's samples with the successes that were written down for it."""

    def __init__(self, successes: dict[str, str]) -> None:
        self.engine, self.ranks = SimpleNamespace(num_rows=8), ALONE
        self._success = {
            derive_seed(0, "stage-1", task(name).task_id, index): mark == "S"
            for name, marks in successes.items()
            for index, mark in enumerate(marks)
        }

    def rollout(self, requests: Sequence[EpisodeRequest], **options: Any) -> None:
        played = []
        for index, request in enumerate(requests):
            success = self._success[request.seed]
            turn = factories.turn(float(success))
            episode = factories.episode(turn, task=request.task, success=success)
            played.append((index, episode))
        options["on_finished"](played)


@pytest.mark.parametrize(
    ("adaptive", "kept", "num_never"), [(False, ["mixed"], 2), (True, ["late", "mixed"], 1)]
)
def test_a_task_is_sampled_up_to_the_cap_before_it_counts_as_never_solved(
    adaptive: bool, kept: list[str], num_never: int, tmp_path: Path
) -> None:
    conditions = factories.conditions()
    marks = {"late": "FFFS", "hopeless": "FFFF", "mixed": "SFFF", "easy": "SS"}
    tasks = [task(name) for name in marks]
    settings = ValuesConfig(num_samples=2, adaptive=adaptive, max_samples=4)
    with ValueStore(tmp_path / "values.sqlite") as store:
        collect_values(
            ScriptedReference(marks),  # pyright: ignore[reportArgumentType]
            store,
            tasks,
            conditions=conditions,
            schedule=sample_schedule(settings),
            seed=0,
        )
        selection = select_stored_tasks(
            store, conditions, tasks, RolloutFilterConfig(strategy="top_p", value=1.0)
        )
    assert names(selection) == kept
    assert selection.counts == SelectionCounts(
        kept=len(kept), never_solved=num_never, always_solved=1
    )


# With the tiny run's reference, which has two samples of every task.


TWO_SAMPLES = ("--values.num_samples=2", "--values.adaptive=false")


def trainer(session: Session) -> Trainer:
    """The policy is the reference: what they play differs by their seeds alone."""
    return factories.trainer(session, policy=session.load_model(session.run.reference(0)))


def test_without_a_filter_the_tasks_are_those_that_were_given(session: Session) -> None:
    tasks = session.training_tasks()
    assert selected_tasks(session, reference(session), tasks) is tasks


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["apo", "apo_turn"])
def test_stage_two_plays_the_selected_tasks_and_no_others_epoch_after_epoch(
    algorithm: str, session: Session
) -> None:
    keys = (f"--algorithm={algorithm}", "--training.tasks_per_step=1")
    tasks = session.training_tasks()
    share = 2 / len(tasks)  # of all, as those without variance are kept and come last
    part = with_keys(
        session,
        *TWO_SAMPLES,
        *keys,
        f"--rollout_filter={{strategy: top_fraction, value: {share}, zero_variance: keep}}",
    )
    returns = stored_returns(part)
    deviation = {t.task_id: torch.tensor(returns[t.task_id]).std().item() for t in tasks}
    # How many vary depends on the processor's rounding: 4 of the 21 on one, more on another.
    assert sum(value > 1e-6 for value in deviation.values()) >= 2 < len(tasks)
    expected = {t.task_id for t in sorted(tasks, key=lambda t: -deviation[t.task_id])[:2]}
    one = trainer(part)
    assert {t.task_id for t in one.tasks} == expected
    results = [step_without_update(one, step).result for step in range(4)]
    played = [t.task.task_id for result in results for t in result.trajectories]
    # Four episodes are two epochs of two tasks.
    assert set(played[:2]) == set(played[2:]) == expected
    assert all(result.metrics["kept_share"] == 1.0 for result in results)


def stored_returns(session: Session) -> dict[str, list[float]]:
    conditions = session.conditions(reference(session))
    with ValueStore(session.run.values) as store:
        return store.returns_by_task(conditions)


def test_a_selection_that_leaves_no_task_says_what_to_do(session: Session) -> None:
    part = with_keys(session, *TWO_SAMPLES, "--rollout_filter.strategy=top_p")
    returns = stored_returns(part)
    same = [t for t in part.training_tasks() if len(set(returns[t.task_id])) == 1]
    assert same
    model = reference(part)
    with pytest.raises(TrainingError, match=rf"on 0 of {len(same)} tasks; left out: .*adaptive"):
        selected_tasks(part, model, same)
    kept = with_keys(
        session,
        *TWO_SAMPLES,
        "--rollout_filter.strategy=top_p",
        "--rollout_filter.value=1",
        "--rollout_filter.zero_variance=keep",
    )
    assert list(selected_tasks(kept, model, same)) == same


def test_a_later_reference_that_solves_most_tasks_always_and_one_never_ends_stage_two(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = with_keys(session, *TWO_SAMPLES, "--rollout_filter.strategy=top_p")
    tasks, model = part.training_tasks()[:3], reference(part)

    def selected(**counts: int) -> Sequence[Task]:
        chosen = TaskSelection((), SelectionCounts(kept=0, **counts), {})
        name = "ragen_apo.stages.stored_values.select_stored_tasks"
        monkeypatch.setattr(name, lambda *_: chosen)
        return selected_tasks(part, model, tasks, version=1)

    assert not selected(always_solved=2, never_solved=1)
    with pytest.raises(TrainingError, match=r"on 0 of 3 tasks.* --reference 1"):
        selected(always_solved=1, never_solved=2)  # it may have fallen apart, or need more samples


def test_a_part_of_a_mixture_that_a_later_reference_always_solves_does_not_end_the_run(
    session: Session,
) -> None:
    said = Sayings()
    keys = ("--rollout_filter.strategy=top_fraction", "--rollout_filter.value=1")
    parts = {"name": "mixture", "parts": {"countdown": {"weight": 2}, "bandit": {}}}
    part = with_progress(with_keys(session, *TWO_SAMPLES, *keys, environment=parts), said)
    tasks = part.training_tasks()
    solved = [each for each in tasks if each.category == "bandit"][:3]
    differing = [each for each in tasks if each.category == "countdown"][:3]
    model = reference(part)
    with part.value_store() as store:
        for each in (*solved, *differing):
            returns = (1.0 if each in solved else 0.0, 1.0)
            samples = [episode(turn(value), task=each, success=value > 0.5) for value in returns]
            store.add_many(part.conditions(model), enumerate(samples))
    assert list(selected_tasks(part, model, [*solved, *differing], version=2)) == differing
    assert said.lines[-1] == "None is of bandit; its share goes to the others by their weights"
    with pytest.raises(TrainingError, match=r"None is of bandit.*estimate-values .* --reference 0"):
        selected_tasks(part, model, [*solved, *differing])


def test_a_task_without_samples_is_an_error_and_not_one_without_variance(session: Session) -> None:
    part = with_keys(session, *TWO_SAMPLES, "--rollout_filter.strategy=top_p")
    model = reference(part)
    with pytest.raises(MissingValueError, match="3 of 24 tasks"):
        selected_tasks(part, model, part.environments.tasks("all"))


def test_the_report_of_stage_one_says_how_many_tasks_stage_two_trains_on(session: Session) -> None:
    said = Sayings()
    keys = ("--rollout_filter.strategy=top_p", "--rollout_filter.value=1", "--algorithm=apo_turn")
    part = with_progress(with_keys(session, *TWO_SAMPLES, *keys), said)
    model = reference(part)
    tasks = part.training_tasks()
    report = estimate_values(part, model, tasks)
    assert report["selection"]["kept"] == len(selected_tasks(part, model, tasks))
    assert 0 < report["selection"]["kept"] < sum(report["selection"].values()) == len(tasks)
    assert 0 < report["num_known_states"] < report["num_states"]
    assert said.lines[0].startswith("Stage 1: 42 samples of 21 tasks, pass@1 ")
    assert "of later turns in a state that enough other episodes visited" in said.lines[0]
    assert said.lines[-1].startswith("rollout_filter: Stage 2 trains on ")


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["apo", "apo_turn"])
def test_no_trained_episode_is_among_the_samples_of_its_own_value(
    algorithm: str, session: Session
) -> None:
    part = with_keys(session, *TWO_SAMPLES, f"--algorithm={algorithm}")
    tasks = part.training_tasks()
    one = trainer(part)
    conditions = part.conditions(one.reference)
    with ValueStore(part.run.values) as store:
        before = [t for of in tasks for t in store.trajectories(conditions, of.task_id)]
        trained = one.step(0).trajectories
        after = [t for of in tasks for t in store.trajectories(conditions, of.task_id)]
    assert after == before
    assert {t.policy_version for t in before} == {conditions.reference_fingerprint}
    sampled = {(t.task.task_id, t.seed) for t in before}
    assert len(sampled) == len(before) and len(trained) == 8
    assert not sampled & {(t.task.task_id, t.seed) for t in trained}


def test_rivals_leave_the_choice_to_the_rollouts_of_each_step(session: Session) -> None:
    part = with_keys(session, "--algorithm=grpo", "--rollout_filter.strategy=top_p")
    tasks = part.training_tasks()
    assert selected_tasks(part, reference(part), tasks) is tasks


@pytest.mark.slow
def test_a_new_reference_that_solves_every_task_ends_the_run_and_a_resumed_one(
    session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def select(
        store: ValueStore, conditions: SamplingConditions, tasks: Sequence[Task], _: object
    ) -> TaskSelection:
        ids = [task.task_id for task in tasks]
        if conditions.reference_fingerprint == first:
            kept = SelectionCounts(kept=len(tasks))
            return TaskSelection(tuple(tasks), kept, dict.fromkeys(ids, "kept"))
        solved = SelectionCounts(kept=0, always_solved=len(tasks))
        return TaskSelection((), solved, dict.fromkeys(ids, "always_solved"))

    first = reference(session).fingerprint()
    for module in ("values", "stored_values"):
        monkeypatch.setattr(f"ragen_apo.stages.{module}.select_stored_tasks", select)
    keys = [
        f"--policy.path={session.run.reference(0)}",
        "--warm_start.enabled=false",
        "--rollout_filter.strategy=top_p",
        "--training.max_tasks=8",
    ]
    config = with_keys(session, *TWO_SAMPLES, *keys).config
    for _ in range(2):
        said = Sayings()
        run = factories.run(config, tmp_path / "run", progress=said)
        assert "stopped after step 3 of 6: the new reference solves most" in "\n".join(said.lines)
        stopped = run.read_status()["early_stop"]
        assert (stopped["rule"], stopped["step"]) == ("rollout_filter", 3)
        assert len(read_json_lines(run.metrics)) == 3
        newest = list_checkpoints(run.checkpoints)[-1]
        assert newest.name == "4-training-000003"
        weights = load_file(run.policy / "model.safetensors")
        expected = load_file(run.reference(1) / "model.safetensors")
        assert all(torch.equal(weights[name], expected[name]) for name in expected)
        shutil.rmtree(run.policy)  # as if it had been killed before it was written


def test_a_first_reference_that_solves_every_task_is_an_error(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = with_keys(session, *TWO_SAMPLES, "--rollout_filter.strategy=top_p")
    tasks = part.training_tasks()
    solved = TaskSelection((), SelectionCounts(kept=0, always_solved=len(tasks)), {})
    monkeypatch.setattr("ragen_apo.stages.stored_values.select_stored_tasks", lambda *_: solved)
    model = reference(part)
    with pytest.raises(TrainingError, match=r"21 always solved\. There is nothing to train on"):
        selected_tasks(part, model, tasks)
    assert list(selected_tasks(part, model, tasks, version=1)) == []
