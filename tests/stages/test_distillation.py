"""Distillation: its weights, that it projects pi*, and what it leaves in a run."""

import itertools
import math
import os
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from ragen_apo.config import resolved_yaml
from ragen_apo.config.values import DistillationConfig
from ragen_apo.errors import ConfigError, MissingValueError
from ragen_apo.files import read_json_lines, write_json_lines_atomically
from ragen_apo.policy.language_model import LanguageModel
from ragen_apo.progress import SilentProgress
from ragen_apo.run_directory import RunDirectory
from ragen_apo.session import Session, open_session
from ragen_apo.stages import distillation
from ragen_apo.stages.distillation import (
    MIN_WEIGHT,
    WeightedEpisode,
    distillation_phase,
    sample_weights,
    weighted_episodes,
)
from ragen_apo.training.trainer import StepResult, Trainer
from ragen_apo.types import Trajectory, training_samples
from ragen_apo.values.estimator import optimal_policy_weights
from ragen_apo.values.state_values import state_values, turn_weights
from ragen_apo.values.store import ValueStore
from ragen_apo.warm_start import supervised
from ragen_apo.warm_start.supervised import (
    SupervisedBatch,
    SupervisedResult,
    accumulate_supervised_gradients,
    run_supervised_phase,
)
from tests import factories
from tests.factories import Sayings, assert_same_tensors, conditions, episode, rows, task, turn
from tests.stages.test_metrics_page import documented, fields

WON, LOST = task("a task that is solved"), task("a task that is not")


def store_of(folder: Path, *episodes: Trajectory) -> ValueStore:
    store = ValueStore(folder / "values.sqlite")
    counts: dict[str, int] = {}
    for each in episodes:
        index = counts.get(each.task.task_id, 0)
        store.add_many(conditions(), [(index, each)])
        counts[each.task.task_id] = index + 1
    return store


def weighted(
    store: ValueStore, tasks=(WON, LOST), *, min_weight: float = 0.0, **settings
) -> list[WeightedEpisode]:
    chosen = DistillationConfig(enabled=True, **settings)
    with mock.patch.object(distillation, "MIN_WEIGHT", min_weight):
        return weighted_episodes(store, conditions(), tasks, settings=chosen, min_visits=1)


# Which episodes, with which weights


def test_an_episode_weighs_exp_of_its_advantage(tmp_path: Path) -> None:
    returns = (1.0, 0.0, 0.0, 0.5)
    episodes = [episode(turn(r), task=WON, success=r == 1.0) for r in returns]
    with store_of(tmp_path, *episodes) as store:
        found = weighted(store, tasks=[WON], beta=0.25)
    mean = sum(math.exp(r / 0.25) for r in returns) / 4
    assert [each.turn_weights for each in found] == [
        (pytest.approx(math.exp(r / 0.25) / mean),) for r in returns
    ]


@pytest.mark.parametrize(
    ("beta", "rewards"),
    [
        (0.2, [[0.0], [-0.1]]),  # a slip of form
        (0.0, [[0.3], [0.1 + 0.2]]),  # the same, rounded differently
    ],
)
def test_a_task_whose_failures_are_alike_has_nothing_to_imitate(
    beta: float, rewards: list[list[float]], tmp_path: Path
) -> None:
    solved = episode(turn(1.0), task=WON, success=True)
    failures = [episode(*map(turn, each), task=LOST, success=False) for each in rewards]
    assert failures[0].episode_return != failures[1].episode_return
    with store_of(tmp_path, solved, *failures) as store:
        found = weighted(store, beta=beta)
    assert [each.trajectory for each in found] == [solved]


def test_of_graded_failures_the_better_one_weighs_more(tmp_path: Path) -> None:
    """exp(0.4 / 0.2) = 7.39, against 1."""
    failures = [episode(turn(r), task=LOST, success=False) for r in (0.0, 0.4)]
    with store_of(tmp_path, *failures) as store:
        found = weighted(store, tasks=[LOST], beta=0.2)
    worse, better = (each.turn_weights[0] for each in found)
    assert better / worse == pytest.approx(7.39, abs=0.01)


def test_with_one_sample_a_task_the_successes_are_imitated_alike(tmp_path: Path) -> None:
    tasks = [task(f"task {number}") for number in range(3)]
    episodes = [
        episode(turn(r), task=each, success=won)
        for each, r, won in zip(tasks, (1.0, 0.6, 0.3), (True, True, False), strict=True)
    ]
    with store_of(tmp_path, *episodes) as store:
        found = weighted(store, tasks=tasks)
    assert [each.turn_weights for each in found] == [(1.0,), (1.0,)]


def test_a_task_counts_by_its_number_of_samples(tmp_path: Path) -> None:
    easy = [episode(turn(r), task=WON, success=r == 1.0) for r in (1.0, 0.5)]
    hard = [episode(turn(r), task=LOST, success=r == 1.0) for r in (1.0, 0.0, 0.0, 0.0, 0.0, 0.0)]
    with store_of(tmp_path, *easy, *hard) as store:
        found = weighted(store, beta=0.2)
    for name, number in ((WON, 2.0), (LOST, 6.0)):
        of_task = [each.turn_weights[0] for each in found if each.trajectory.task == name]
        assert sum(of_task) == pytest.approx(number)


def test_small_weights_are_left_out(tmp_path: Path) -> None:
    won = episode(turn(1.0), task=WON, success=True)
    lost = episode(turn(0.0), task=WON, success=False)
    with store_of(tmp_path, won, lost) as store:
        assert len(weighted(store, tasks=[WON], beta=0.2, min_weight=0.0)) == 2
        assert len(weighted(store, tasks=[WON], beta=0.2, min_weight=MIN_WEIGHT)) == 1


def test_a_turn_weighs_by_the_values_after_and_before_it(tmp_path: Path) -> None:
    """A failure that was lost in its second turn still has a good first turn."""
    won = episode(turn(state_key="x"), turn(1.0, state_key="y"), task=WON, success=True)
    lost = episode(turn(state_key="x"), turn(0.0, state_key="y"), task=WON, success=False)
    astray = episode(turn(state_key="x"), turn(0.0, state_key="z"), task=WON, success=False)
    with store_of(tmp_path, won, lost, astray) as store:
        found = weighted(store, tasks=[WON], credit="turn", beta=0.5)
    v_x = 0.5 * math.log((math.exp(2) + 2) / 3)
    v_y, v_z = 0.5 * math.log((math.exp(2) + 1) / 2), 0.0
    expected = [
        ((v_y - v_x) / 0.5, (1 - v_y) / 0.5),
        ((v_y - v_x) / 0.5, (0 - v_y) / 0.5),
        ((v_z - v_x) / 0.5, (0 - v_z) / 0.5),
    ]
    for each, logs in zip(found, expected, strict=True):
        assert each.turn_weights == pytest.approx([math.exp(log) for log in logs])


def test_a_turn_weighs_no_more_than_an_episode_can(tmp_path: Path) -> None:
    """Of the state that it came from only failures are known, of the next one another's success."""
    lost = episode(turn(state_key="x"), turn(0.0, state_key="y"), task=WON, success=False)
    won = episode(turn(state_key="x"), turn(state_key="z"), turn(9.0, state_key="y"), task=WON)
    through = episode(
        turn(state_key="x"), turn(state_key="w"), turn(0.0, state_key="y"), task=WON, success=True
    )
    values = {"w": 0.0, "y": 9.0}
    for each in (lost, won, through):
        weights = turn_weights(each, task_value=0.0, values=values, beta=0.01, most=3)
        assert max(weights) <= 3.0 + 1e-9
    assert weights[1] == pytest.approx(3.0)


def test_the_weights_of_turns_multiply_to_that_of_the_episode() -> None:
    episodes = [
        episode(
            turn(0.1, state_key="x"),
            turn(-0.1, state_key=None),
            turn(r, state_key=f"y{number % 2}"),
        )
        for number, r in enumerate((1.0, 0.0, 0.7, 0.2))
    ]
    values = state_values(episodes, beta=0.3, min_visits=2)
    whole = optimal_policy_weights([each.episode_return for each in episodes], beta=0.3)
    for each, weight in zip(episodes, whole, strict=True):
        parts = turn_weights(each, task_value=values["x"], values=values, beta=0.3, most=1e9)
        assert parts[0] == parts[1], "both turns are of the segment from x"
        assert parts[0] * parts[2] == pytest.approx(weight)


def test_a_task_without_samples_is_an_error(tmp_path: Path) -> None:
    with (
        store_of(tmp_path, episode(turn(1.0), task=WON, success=True)) as store,
        pytest.raises(MissingValueError, match="no sampled return of 1 of 2 tasks"),
    ):
        weighted(store)


def test_every_sampled_token_has_the_weight_of_its_turn() -> None:
    trajectory = episode(
        turn(prompt_token_ids=(1, 2), response_token_ids=(4, 5)),
        turn(prompt_token_ids=(3,), response_token_ids=(6,)),
        turn(prompt_token_ids=(1, 9), response_token_ids=(7, 8), restarts_context=True),
    )
    samples = training_samples(trajectory)
    found = sample_weights(WeightedEpisode(trajectory, (0.5, 2.0, 3.0)), samples)
    assert [sample.token_ids for sample in samples] == [(1, 2, 4, 5, 3, 6), (1, 9, 7, 8)]
    assert found == [[0, 0, 0.5, 0.5, 0, 2.0], [0, 0, 3.0, 3.0]]


# It projects pi*


@pytest.mark.slow
@pytest.mark.parametrize("credit", ["episode", "turn"])
def test_what_maximises_the_weighted_likelihood_is_pi_star(credit: str) -> None:
    """Two turns of three actions each: the closed form from many samples, for all policies."""
    rng = np.random.default_rng(0)
    beta, num_samples = 0.4, 40_000
    first, second = np.array([0.6, 0.3, 0.1]), np.array([[0.5, 0.4, 0.1]] * 3)
    rewards = np.array([[0.0, 0.2, 1.0], [0.3, 0.9, 0.1], [1.0, 0.0, 0.0]])
    reference = first[:, None] * second
    optimal = reference * np.exp(rewards / beta)
    optimal /= optimal.sum()
    drawn = rng.choice(9, size=num_samples, p=reference.ravel())
    episodes = [
        episode(turn(state_key="x"), turn(float(rewards[a, b]), state_key=f"after {a}"))
        for a, b in (divmod(int(index), 3) for index in drawn)
    ]
    if credit == "episode":
        whole = optimal_policy_weights([each.episode_return for each in episodes], beta=beta)
        by_turn = np.stack([whole, whole], axis=1)
    else:
        values = state_values(episodes, beta=beta, min_visits=2)
        by_turn = np.array(
            [
                turn_weights(each, task_value=values["x"], values=values, beta=beta, most=1e9)
                for each in episodes
            ]
        )
    # Over all policies, sum w log pi is largest at the weighted frequencies of each state.
    counts_first, counts_second = np.zeros(3), np.zeros((3, 3))
    for index, weights in zip(drawn, by_turn, strict=True):
        a, b = divmod(int(index), 3)
        counts_first[a] += weights[0]
        counts_second[a, b] += weights[1]
    found = (counts_first / counts_first.sum())[:, None] * (
        counts_second / counts_second.sum(axis=1, keepdims=True)
    )
    assert np.abs(found - optimal).sum() / 2 < 0.015
    assert np.abs(reference - optimal).sum() / 2 > 0.3, "the reference is far from it"


def risky_share(returns: np.ndarray, is_risky: np.ndarray, *, beta: float) -> float:
    """Of the weight of a task's samples, that of the risky arm."""
    weights = optimal_policy_weights(returns, beta=beta)
    return float(weights[is_risky].sum() / weights.sum())


@pytest.mark.parametrize(
    ("beta", "right", "of_16", "of_many"),
    [(0.1, 0.450, 0.617, 0.998), (0.2, 0.475, 0.638, 0.886), (0.5, 0.490, 0.531, 0.553)],
)
def test_with_luck_what_is_distilled_is_not_pi_star(
    beta: float, right: float, of_16: float, of_many: float
) -> None:
    """A safe arm pays 0.1, a risky one 1 in 8 of 100 pulls; the reference pulls both alike.

    pi*: exp(0.08 / beta) to exp(0.1 / beta). Distilled: the mean of exp(R / beta) of each arm.
    """
    assert 1 / (1 + math.exp((0.1 - 0.08) / beta)) == pytest.approx(right, abs=5e-4)
    returns = np.array([0.1] * 100 + [1.0] * 8 + [0.0] * 92)
    is_risky = np.arange(200) >= 100
    assert risky_share(returns, is_risky, beta=beta) == pytest.approx(of_many, abs=5e-4)
    mean_of_16 = 0.0
    for num_risky in range(17):
        for num_won in range(num_risky + 1):
            returns = np.array([0.1] * (16 - num_risky) + [1.0] * num_won)
            returns = np.append(returns, [0.0] * (num_risky - num_won))
            chance = math.comb(16, num_risky) * math.comb(num_risky, num_won) / 2**16
            chance *= 0.08**num_won * 0.92 ** (num_risky - num_won)
            is_risky = np.arange(16) >= 16 - num_risky
            mean_of_16 += chance * risky_share(returns, is_risky, beta=beta)
    assert mean_of_16 == pytest.approx(of_16, abs=5e-4)


def test_a_weight_of_two_is_two_copies(session: Session) -> None:
    model = session.load_model(session.run.reference(0))
    ids = torch.randint(8, 200, (2, 10), generator=torch.Generator().manual_seed(0))
    mask = torch.arange(10)[None, :] >= torch.tensor([[2], [6]])
    weights = torch.tensor([[2.0], [1.0]]).expand(2, 10)
    logprobs = torch.full((2, 10), -1.5)
    copied = [0, 0, 1]
    gradients, results = [], []
    for part in (
        SupervisedBatch(ids, mask, weights, logprobs),
        SupervisedBatch(ids[copied], mask[copied], None, logprobs[copied]),
    ):
        model.model.zero_grad()
        results.append(accumulate_supervised_gradients(model, [part]))
        gradients.append(torch.cat([p.grad.flatten() for p in model.model.parameters()]))
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-6)
    assert results[0].loss == pytest.approx(results[1].loss, rel=1e-6)
    assert results[0].log_ratio == pytest.approx(1.5 - results[0].loss, rel=1e-5)


def test_a_context_in_which_nothing_is_imitated_is_not_read(session: Session) -> None:
    """With windows, and credit by turn."""
    turns = [
        turn(prompt_token_ids=(1, number), response_token_ids=(10,), restarts_context=number > 30)
        for number in (30, 31, 32)
    ]
    episodes = [WeightedEpisode(episode(*turns), (0.0, 2.0, 0.0))]
    given = factories.with_keys(session, "--distillation.batch_size=1")
    (batch,) = distillation_phase(given, Table(40), episodes, version=0).batch(0)
    assert [row[:3] for row in batch.token_ids_BT.tolist()] == [[1, 31, 10]]
    assert batch.weights_BT is not None
    assert batch.weights_BT[:, :3].tolist() == [[0, 0, 2.0]]


class Table:
    """A policy of one turn: logits [V, V] of the token that is said after the one that was read."""

    pad_id = 0

    def __init__(self, num_tokens: int) -> None:
        self.model = torch.nn.Embedding(num_tokens, num_tokens)
        torch.nn.init.zeros_(self.model.weight)

    def logits(self, hidden_NV: torch.Tensor) -> torch.Tensor:
        return hidden_NV

    def over_targets(
        self, ids_BT: torch.Tensor, targets_BT: torch.Tensor, read: Callable[..., Any]
    ) -> tuple[torch.Tensor, ...]:
        return read(self.model(ids_BT[:, :-1][targets_BT[:, 1:]]), ids_BT[targets_BT])


def epoch_gradient(
    session: Session, policy: Any, episodes: list[WeightedEpisode], *, batch_size: int
) -> torch.Tensor:
    """Of all batches of an epoch together, without an update between them."""
    whole = factories.with_keys(session, f"--distillation.batch_size={batch_size}")
    phase = distillation_phase(whole, policy, episodes, version=0)
    policy.model.zero_grad()
    for step in range(len(episodes) // batch_size):
        accumulate_supervised_gradients(policy, phase.batch(step), batch_weight=phase.batch_weight)
    return torch.cat([p.grad.flatten() for p in policy.model.parameters()])


def test_all_batches_of_a_phase_are_divided_by_the_weight_of_a_mean_one(session: Session) -> None:
    weights = (3.0, 0.1, 0.5, 1.0)
    episodes = [
        WeightedEpisode(episode(turn(response_token_ids=(10, 11))), (each,)) for each in weights
    ]
    given = factories.with_keys(session, "--distillation.batch_size=2")
    phase = distillation_phase(given, Table(12), episodes, version=0)
    assert phase.batch_weight == pytest.approx(2 * (2 * sum(weights) / 4))  # two tokens each


def test_the_loop_divides_by_what_the_phase_says(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[float | None] = []

    def accumulate(*_: Any, batch_weight: float | None, **__: Any) -> SupervisedResult:
        seen.append(batch_weight)
        return SupervisedResult(loss=0.0, accuracy=0.0)

    monkeypatch.setattr(supervised, "accumulate_supervised_gradients", accumulate)
    model = session.load_policy(session.run.reference(0))
    episodes = [WeightedEpisode(episode(turn(response_token_ids=(10, 11))), (3.0,))] * 4
    given = factories.with_keys(
        session, "--distillation.batch_size=2", "--distillation.num_epochs=3"
    )
    phase = distillation_phase(given, model, episodes, version=1)
    run_supervised_phase(given, model, phase, start=0)
    assert seen == [phase.batch_weight] * 6


@pytest.mark.parametrize("batch_size", [1, 2, 4, 8])
def test_the_best_episode_has_its_share_of_an_epoch_whatever_the_batch(
    batch_size: int, session: Session, tmp_path: Path
) -> None:
    """exp(1 / 0.2) = 148.4 of 148.4 + 2 x 20.1 + 2 x 4.5 + 3 = 200.5."""
    returns = (1.0, 0.6, 0.6, 0.3, 0.3, 0.0, 0.0, 0.0)
    played = [
        episode(
            turn(r, prompt_token_ids=(read,), response_token_ids=(9,)), task=WON, success=r == 1.0
        )
        for read, r in enumerate(returns, 1)
    ]
    with store_of(tmp_path, *played) as store:
        episodes = weighted(store, tasks=[WON], beta=0.2)
    gradient = epoch_gradient(session, Table(10), episodes, batch_size=batch_size)
    row_norms = gradient.reshape(10, 10).norm(dim=1)  # a row is what one episode has read
    assert row_norms[1] / row_norms.sum() == pytest.approx(0.740, abs=5e-4)


def test_the_gradients_of_the_batches_of_an_epoch_add_up_to_that_of_all_episodes(
    session: Session,
) -> None:
    model = session.load_model(session.run.reference(0))
    lengths_and_weights = [(2, 3.0), (9, 0.1), (1, 0.5), (4, 1.0), (6, 2.0), (3, 0.2)]
    episodes = [
        WeightedEpisode(
            episode(turn(response_token_ids=range(10, 10 + length), prompt_token_ids=(1, number))),
            (weight,),
        )
        for number, (length, weight) in enumerate(lengths_and_weights, 30)
    ]
    whole = epoch_gradient(session, model, episodes, batch_size=6)
    for batch_size in (1, 2, 3):
        parts = epoch_gradient(session, model, episodes, batch_size=batch_size)
        torch.testing.assert_close(parts * batch_size / 6, whole, rtol=1e-4, atol=1e-6)


# In a run

TEXT = resolved_yaml(
    factories.config(
        "--distillation.enabled=true",
        "--distillation.batch_size=2",
        "--distillation.num_epochs=5",
        "--distillation.learning_rate=1.0e-2",
        "--sampling.temperature=0.8",
        "--warm_start.checkpoint_every=2",
        "--values.num_samples=4",
        "--values.adaptive=false",
        "--training.max_tasks=24",
        "--reference.refresh_every_steps=2",
        "--training.max_steps=4",
        "--training.checkpoint_every=3",
        "--policy.freeze_embeddings=true",
        "--policy.small={num_layers: 2, vocab_size: 400}",
        environment={"name": "bandit", "max_turns": 1},
    )
)
"""A bandit whose reference solves a task now and then."""


@pytest.fixture(scope="module")
def told() -> Sayings:
    """What the run said."""
    return Sayings()


@pytest.fixture(scope="module")
def distilled_run(tmp_path_factory: pytest.TempPathFactory, told: Sayings) -> RunDirectory:
    path = tmp_path_factory.mktemp("distilled") / "run"
    return factories.run(factories.config(text=TEXT), path, progress=told)


def imitated_by(session: Session, reference: LanguageModel) -> list[WeightedEpisode]:
    """The episodes of this reference that the run has imitated."""
    with session.value_store() as store:
        return weighted_episodes(
            store,
            session.conditions(reference),
            session.training_tasks(),
            settings=session.config.distillation,
            min_visits=1,
        )


@pytest.mark.slow
@pytest.mark.usefixtures("distilled_run")
def test_where_chance_decides_the_run_says_that_luck_is_imitated(told: Sayings) -> None:
    (sentence,) = [line for line in told.lines if "lucky" in line]
    assert sentence.startswith("distillation: the environment 'bandit' is stochastic")


@pytest.mark.slow
def test_the_curve_has_every_update_of_every_reference(distilled_run: RunDirectory) -> None:
    found = rows(distilled_run.distillation)
    updates = [row for row in found if "loss" in row]
    by_version = [[row for row in updates if row["reference_version"] == v] for v in (0, 1)]
    config = factories.config(text=TEXT)
    session = open_session(config, distilled_run, SilentProgress())
    for version, part in enumerate(by_version):
        imitated = imitated_by(session, session.load_model(distilled_run.reference(version)))
        num_updates = math.ceil(5 * len(imitated) / 2)  # five passes, two episodes an update
        assert num_updates > 5
        assert [row["step"] for row in part] == list(range(1, num_updates + 1))
    (evaluated,) = [row for row in found if "eval_success_rate" in row]
    assert (evaluated["reference_version"], evaluated["step"]) == (0, len(by_version[0]))
    assert {"distillation", "stage 1", "stage 2"} <= set(distilled_run.read_status()["phases"])


@pytest.mark.slow
def test_every_field_of_the_curve_is_documented(distilled_run: RunDirectory) -> None:
    assert set(documented("distillation.jsonl")) == fields(
        read_json_lines(distilled_run.distillation)
    )


@pytest.mark.slow
def test_the_good_episodes_are_likelier_afterwards(distilled_run: RunDirectory) -> None:
    config = factories.config(text=TEXT)
    session = open_session(config, distilled_run, SilentProgress())
    models = [session.load_model(f) for f in (distilled_run.reference(0), distilled_run.distilled)]
    episodes = imitated_by(session, models[0])
    whole = factories.changed(config, f"--distillation.batch_size={len(episodes)}")
    phase = distillation_phase(replace(session, config=whole), models[0], episodes, version=0)
    assert not phase.has_dropout
    before, after = (
        accumulate_supervised_gradients(model, phase.batch(0), temperature=phase.temperature)
        for model in models
    )
    assert before.log_ratio == pytest.approx(0.0, abs=1e-4), "the reference has sampled them"
    assert after.log_ratio is not None and after.log_ratio > 0.03
    assert after.loss == pytest.approx(before.loss - after.log_ratio, abs=1e-4)


@pytest.mark.slow
def test_stage_two_begins_with_what_was_distilled(distilled_run: RunDirectory) -> None:
    reference, distilled = (
        torch.cat([t.flatten() for t in factories.tensors(folder).values()])
        for folder in (distilled_run.reference(0), distilled_run.distilled)
    )
    assert not torch.equal(reference, distilled)
    first = rows(distilled_run.metrics)[0]
    assert first["log_ratio_max_abs"] > 0.1, "the log ratio is to the reference, not to the start"
    assert first["reference_version"] == 0


@pytest.mark.slow
def test_what_is_frozen_in_stage_two_is_frozen_here(distilled_run: RunDirectory) -> None:
    name = "model.embed_tokens.weight"
    before, after = (
        factories.tensors(folder)[name]
        for folder in (distilled_run.reference(0), distilled_run.distilled)
    )
    assert torch.equal(before, after)


@pytest.mark.slow
def test_a_later_distillation_is_not_taken_for_what_stage_two_began_with(
    distilled_run: RunDirectory, tmp_path: Path
) -> None:
    run = RunDirectory(Path(shutil.copytree(distilled_run.path, tmp_path / "run")))
    later = [row for row in read_json_lines(run.distillation) if row["reference_version"] == 1]
    assert later
    # As where reference 0 solved nothing, interrupted after its last step.
    write_json_lines_atomically(run.distillation, later)
    shutil.rmtree(run.policy)
    factories.run(factories.config(text=TEXT), run.path)
    assert run.policy.exists()
    assert read_json_lines(run.distillation) == later


UPDATE = "ragen_apo.warm_start.supervised:accumulate_supervised_gradients"


FAULTS = {
    "between two checkpoints of the distillation": (UPDATE, 12 + 40 + 4),
    "at its evaluation": ("ragen_apo.stages.training:play_evaluation", 1),
    "after its evaluation": ("ragen_apo.stages.training:append_json_line", 1),
    "in the second distillation": ("ragen_apo.stages.distillation:sample_batches", 3),
    "after the second distillation": ("ragen_apo.stages.training:save_checkpoint", 1),
}
"""In the order of a run: where it dies, at which call since it was resumed."""


@pytest.mark.slow
def test_a_run_killed_around_its_distillations_ends_like_one_that_was_not(
    distilled_run: RunDirectory, run_until_killed: Callable[..., int], tmp_path: Path
) -> None:
    for fault, (target, call) in FAULTS.items():
        status = run_until_killed(tmp_path, target=target, call=call, text=TEXT)
        assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, fault
    run = factories.run(factories.config(text=TEXT), tmp_path / "run")
    for path in ("distillation", "metrics"):
        assert rows(getattr(run, path)) == rows(getattr(distilled_run, path))
    for folder in ("distilled", "policy"):
        assert_same_tensors(getattr(run, folder), getattr(distilled_run, folder))


@pytest.mark.slow
def test_the_limit_of_kl_counts_from_where_distillation_has_left_the_policy(
    distilled_run: RunDirectory, run_until_killed: Callable[..., int], tmp_path: Path
) -> None:
    """And so it does in a run that was killed."""
    keys = ["--reference.refresh_every_steps=null", "--reference.refresh_max_kl=1e-4"]
    keys += ["--training.max_steps=5", "--training.checkpoint_every=1"]
    keys += ["--optimizer.learning_rate=1e-2", "--algorithm.beta2=1e-3"]  # so that the KL grows
    keys += [f"--policy.path={distilled_run.reference(0)}", "--warm_start.enabled=false"]
    config = factories.changed(factories.config(text=TEXT), *keys)
    found = rows(factories.run(config, tmp_path / "whole").metrics)
    assert found[0]["kl_per_sequence"] > 1e-2, "the policy has left the reference before a step"
    kl_at_start: dict[int, float] = {}
    for row, after in itertools.pairwise(found):
        version, kl = row["reference_version"], row["kl_per_sequence"]
        is_far = kl - kl_at_start.setdefault(version, kl) > 1e-4
        assert after["reference_version"] == version + is_far
    assert 1 <= found[-1]["reference_version"] <= 2, "at most every second step"
    step = "ragen_apo.training.trainer:Trainer.step"
    text = resolved_yaml(config)
    assert os.WIFSIGNALED(run_until_killed(tmp_path, target=step, call=2, text=text))
    assert rows(factories.run(config, tmp_path / "run").metrics) == found


@pytest.mark.slow
def test_the_limit_of_kl_counts_from_the_first_update_where_the_first_step_made_none(
    distilled_run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = iter([None, 14.4, 14.9, 16.0, 14.4])
    original = Trainer.step

    def step(trainer: Trainer, number: int) -> StepResult:
        made, kl = original(trainer, number), next(measured)
        metrics = {name: value for name, value in made.metrics.items() if "kl_per" not in name}
        return replace(made, metrics=metrics if kl is None else {**metrics, "kl_per_sequence": kl})

    monkeypatch.setattr(Trainer, "step", step)
    keys = ["--reference.refresh_every_steps=null", "--reference.refresh_max_kl=1"]
    keys += ["--training.max_steps=5", "--distillation.num_epochs=1"]
    keys += [f"--policy.path={distilled_run.reference(0)}", "--warm_start.enabled=false"]
    config = factories.changed(factories.config(text=TEXT), *keys)
    found = rows(factories.run(config, tmp_path / "run").metrics)
    assert [row["reference_version"] for row in found] == [0, 0, 0, 0, 1]


@pytest.mark.slow
def test_any_algorithm_can_follow(distilled_run: RunDirectory, tmp_path: Path) -> None:
    """GRPO from the distilled policy: the control of a comparison."""
    config = factories.changed(
        factories.config(text=TEXT),
        f"--policy.path={distilled_run.reference(0)}",
        "--warm_start.enabled=false",
        "--algorithm={name: grpo, group_size: 2}",
        "--reference.refresh_every_steps=null",
        "--training.max_steps=1",
    )
    run = factories.run(config, tmp_path / "grpo")
    assert run.values.exists() and run.distilled.exists()
    assert rows(run.distillation)
    assert len(rows(run.metrics)) == 1


@pytest.mark.slow
def test_a_reference_that_solves_nothing_is_distilled_from_nothing(
    session: Session, tmp_path: Path
) -> None:
    told = Sayings()
    config = factories.config(
        f"--policy.path={session.run.reference(0)}",
        "--warm_start.enabled=false",
        "--distillation.enabled=true",
        "--values.adaptive=false",
        "--training.max_tasks=8",
        "--training.max_steps=1",
        "--agent.max_response_tokens=1",  # too few for any action
    )
    run = factories.run(config, tmp_path / "none", progress=told)
    assert "distillation: 0 episodes of 0 tasks, 0 updates" in told.lines
    assert read_json_lines(run.distillation) == []
    assert_same_tensors(run.distilled, run.reference(0))


def test_weights_of_turns_need_a_temperature() -> None:
    with pytest.raises(ConfigError, match=r"credit turn divides by beta, which is 0"):
        factories.config("--distillation={credit: turn, beta: 0}")
