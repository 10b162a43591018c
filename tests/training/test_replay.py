"""Replay in the trainer: what is kept, what is drawn, what is trained on, what is refused."""

import gzip
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean, pvariance

import pytest

from ragen_apo.config.algorithms import ReplayConfig
from ragen_apo.environments.base import make_environment
from ragen_apo.errors import CheckpointError, ConfigError
from ragen_apo.files import read_json_lines, write_checksums
from ragen_apo.session import Session
from ragen_apo.training.replay import ReplayBuffer, refuse_luck
from ragen_apo.training.trainer import Trainer
from ragen_apo.types import Trajectory
from tests import factories
from tests.factories import (
    AlgorithmRuns,
    config,
    flat_gradient,
    sampled_logprobs,
    step_without_update,
    trainer,
    turn,
    with_keys,
)

BETA = 0.1
KEYS = (
    f"--apo.beta={BETA}",
    "--apo.replay.num_trajectories_per_step=3",
    "--apo.replay.capacity=5",
    "--training.tasks_per_step=4",
    "--training.micro_batch_size=2",
)


def buffer(num_drawn: int = 2, capacity: int = 4, *, seed: int = 0) -> ReplayBuffer:
    settings = ReplayConfig(num_trajectories_per_step=num_drawn, capacity=capacity)
    return ReplayBuffer(settings, seed=seed)


def episode(number: int) -> Trajectory:
    """One that is told from others by its seed, with numbers that JSON has to keep exactly."""
    played = turn(1 / 3, observation="\u2603", logprobs=(-0.1, -1 / 3), flags=("format_error",))
    return factories.episode(played, task=factories.task(payload={"a": [1.5]}), seed=number)


def fill(each: ReplayBuffer, numbers: Sequence[int], step: int) -> None:
    each.add([episode(n) for n in numbers], returns=[n / 3 for n in numbers], step=step)


def drawn(each: ReplayBuffer, step: int) -> list[int]:
    return [stored.trajectory.seed for stored in each.draw(step)]


def test_the_oldest_make_room_and_each_keeps_its_return_and_its_step() -> None:
    each = buffer(num_drawn=4)
    fill(each, [0, 1, 2], step=0)
    fill(each, [3, 4, 5], step=1)
    stored = each.draw(2)
    assert [entry.trajectory.seed for entry in stored] == [2, 3, 4, 5]
    assert [entry.step for entry in stored] == [0, 1, 1, 1]
    assert [entry.episode_return for entry in stored] == [2 / 3, 1.0, 4 / 3, 5 / 3]


def test_draws_are_different_ones_that_depend_on_seed_and_step_alone() -> None:
    first, again, other = buffer(capacity=50), buffer(capacity=50), buffer(capacity=50, seed=1)
    for each in (first, again, other):
        fill(each, range(50), step=0)
    sequence = [drawn(first, step) for step in range(1, 60)]
    assert all(len(set(pair)) == 2 for pair in sequence)
    assert [drawn(again, step) for step in range(59, 0, -1)][::-1] == sequence
    assert [drawn(other, step) for step in range(1, 60)] != sequence
    assert len({number for pair in sequence for number in pair}) > 40


def test_fewer_than_a_step_takes_are_all_taken_and_none_from_an_empty_buffer() -> None:
    each = buffer(num_drawn=4)
    assert each.draw(0) == []
    fill(each, [7, 8], step=0)
    assert drawn(each, 1) == [7, 8]
    each.clear()
    assert each.draw(2) == []


def test_a_buffer_comes_back_from_its_file_as_it_was(tmp_path: Path) -> None:
    each, loaded = buffer(num_drawn=4), buffer(num_drawn=4)
    fill(each, [0, 1, 2], step=0)
    fill(each, [3, 4], step=6)
    for name, content in each.files().items():
        (tmp_path / name).write_bytes(content)
    write_checksums(tmp_path)
    loaded.load(tmp_path)
    assert len(loaded) == 4 and loaded.draw(7) == each.draw(7), "all that there are"
    assert loaded.files() == each.files(), "byte for byte"


@pytest.mark.parametrize(
    "content",
    [None, b"{}", gzip.compress(b"{}\n"), gzip.compress(b"{}\n")[:-9]],
    ids=["missing", "not compressed", "of another form", "cut"],  # gzip writes the time of day
)
def test_a_checkpoint_without_readable_trajectories_is_an_error(
    content: bytes | None, tmp_path: Path
) -> None:
    if content is not None:
        (tmp_path / "replay.jsonl.gz").write_bytes(content)
    write_checksums(tmp_path)
    with pytest.raises(CheckpointError, match=r"cannot be read: replay\.jsonl\.gz: "):
        buffer().load(tmp_path)


def test_a_flipped_byte_in_the_file_is_one_line_of_error(tmp_path: Path) -> None:
    each = buffer()
    fill(each, [0, 1, 2], step=0)
    (content,) = each.files().values()
    for place in (0, len(content) // 2, len(content) - 1):
        damaged = bytearray(content)
        damaged[place] ^= 0x10
        (tmp_path / "replay.jsonl.gz").write_bytes(content)
        write_checksums(tmp_path)
        (tmp_path / "replay.jsonl.gz").write_bytes(damaged)
        with pytest.raises(CheckpointError, match=r"replay\.jsonl\.gz is not what was written"):
            buffer().load(tmp_path)


def test_an_empty_file_in_place_of_trajectories_is_refused(tmp_path: Path) -> None:
    each = buffer()
    fill(each, [0, 1], step=0)
    for name, content in each.files().items():
        (tmp_path / name).write_bytes(content)
    write_checksums(tmp_path)
    (tmp_path / "replay.jsonl.gz").write_bytes(gzip.compress(b""))
    with pytest.raises(CheckpointError, match="is not what was written"):
        buffer().load(tmp_path)


def test_types_that_were_made_by_hand_are_named(tmp_path: Path) -> None:
    each = buffer()
    fill(each, [0], step=0)
    row = json.loads(gzip.decompress(each.files()["replay.jsonl.gz"]))
    row["trajectory"]["turns"] = "none"
    (tmp_path / "replay.jsonl.gz").write_bytes(gzip.compress(json.dumps(row).encode()))
    write_checksums(tmp_path)
    with pytest.raises(CheckpointError, match=r"trajectory\.turns: .* valid tuple, got 'none'"):
        buffer().load(tmp_path)


def test_without_replay_nothing_is_kept_and_nothing_is_written(tmp_path: Path) -> None:
    each = buffer(num_drawn=0)
    fill(each, [0, 1], step=0)
    each.load(tmp_path)
    assert len(each) == 0
    assert each.draw(1) == []
    assert each.files() == {}


def test_luck_is_refused_and_only_where_something_is_replayed() -> None:
    slippery = make_environment("frozen_lake", {}).properties
    with pytest.raises(ConfigError, match="'frozen_lake' with these options is not"):
        refuse_luck(ReplayConfig(num_trajectories_per_step=1), slippery)
    refuse_luck(ReplayConfig(), slippery)
    refuse_luck(ReplayConfig(num_trajectories_per_step=1), make_environment("shop", {}).properties)


def test_a_run_in_an_environment_of_luck_is_refused_before_anything_is_computed(
    tmp_path: Path,
) -> None:
    keys = ["--environment.name=frozen_lake", *KEYS[:2]]
    lucky = config(*keys, text="")
    with pytest.raises(ConfigError, match="needs a deterministic environment"):
        factories.run(lucky, tmp_path / "run")
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["config.yaml"]


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (["--apo.beta1=0.5"], r"apo.beta1 = apo.beta2, got 0.5 and 0.1: .* temperature"),
        (["--algorithm=apo_turn"], "belongs to algorithm apo, got apo_turn"),
        (["--algorithm=grpo"], "belongs to algorithm apo, got grpo"),
        (["--apo.value_baseline=mean"], "needs apo.value_baseline v_star, got mean"),
        (["--apo.length_normalization=tokens"], "needs apo.length_normalization none"),
        (["--apo.kl_coefficient=0.1"], "kl_coefficient 0"),
        (["--apo.replay.capacity=2"], r"per_step \(3\) must be at most capacity \(2\)"),
    ],
)
def test_what_is_wrong_off_policy_is_refused(keys: list[str], words: str) -> None:
    base = ["--apo.beta2=0.1", *KEYS[1:3]]
    beta1 = [] if keys[0].startswith("--apo.beta1") else ["--apo.beta1=0.1"]
    with pytest.raises(ConfigError, match=words):
        config(*base, *beta1, *keys, text="")


@pytest.mark.slow
def test_a_new_reference_empties_the_buffer(algorithm_runs: AlgorithmRuns, tmp_path: Path) -> None:
    run = factories.run(
        algorithm_runs.config("apo", "--apo.reference_refresh.every_steps=2"), tmp_path / "run"
    )
    rows = read_json_lines(run.metrics)
    assert [row["reference_version"] for row in rows] == [0, 0, 1, 1]
    assert [row["num_replayed"] for row in rows] == [0, 3, 0, 3]


def replaying(session: Session, *keys: str) -> Trainer:
    return trainer(with_keys(session, *KEYS, *keys))


@pytest.mark.slow
def test_old_and_new_trajectories_have_one_loss_and_metrics_of_their_own(session: Session) -> None:
    trainer = replaying(session)
    first = step_without_update(trainer, 0).result
    assert first.metrics["num_replayed"] == first.metrics["num_replayed_tokens"] == 0
    assert "replayed_residual_mean" not in first.metrics
    step_without_update(trainer, 1)
    assert len(trainer.replay) == 5, "the newest of 8"
    old = trainer.replay.draw(2)
    second = step_without_update(trainer, 2)

    # Each of 4 + 3 trajectories counts alike: -A log pi / 7, with A recomputed one by one.
    trainer.policy.model.zero_grad()
    residuals = []
    for trajectory in [*second.trajectories, *(each.trajectory for each in old)]:
        logprob, reference = (
            sampled_logprobs(model, trajectory) for model in (trainer.policy, trainer.reference)
        )
        advantage = trajectory.episode_return - trainer.values.tasks[trajectory.task.task_id]
        residuals.append(advantage - BETA * (logprob - reference).sum().item())
        (-residuals[-1] * logprob.sum() / 7).backward()
    expected = flat_gradient(trainer)
    assert expected.norm() > 1e-2
    assert (second.gradient - expected).norm() <= 1e-4 * expected.norm()

    metrics = second.result.metrics
    own, replayed = residuals[:4], residuals[4:]
    assert metrics["residual_mean"] == pytest.approx(fmean(own), abs=1e-5)
    assert metrics["residual_variance"] == pytest.approx(pvariance(own), abs=1e-5)
    assert metrics["replayed_residual_mean"] == pytest.approx(fmean(replayed), abs=1e-5)
    assert metrics["replayed_residual_variance"] == pytest.approx(pvariance(replayed), abs=1e-5)
    assert metrics["num_replayed"] == 3
    assert metrics["replayed_age_mean"] == pytest.approx(fmean(2 - each.step for each in old))
    assert metrics["num_replayed_tokens"] == sum(e.trajectory.num_response_tokens for e in old)
    assert metrics["num_episodes"] == 4


@pytest.mark.slow
def test_metrics_of_the_policys_own_episodes_leave_replayed_ones_out(session: Session) -> None:
    with_replay = replaying(session)
    without = replaying(session, "--apo.replay.num_trajectories_per_step=0")
    # Trajectories that no policy here sampled: their recorded log-probabilities are far off.
    strange = step_without_update(without, 5).trajectories[:3]
    strange = [
        replace(t, turns=tuple(replace(n, logprobs=(-50.0,) * len(n.logprobs)) for n in t.turns))
        for t in strange
    ]
    with_replay.replay.add(strange, returns=[9.0] * 3, step=0)
    rows = [step_without_update(each, 3).result.metrics for each in (with_replay, without)]
    assert rows[0]["num_replayed"] == 3 and "num_replayed" not in rows[1]
    own = ("entropy", "logprob_gap_max", "kl_per_sequence", "log_ratio_mean", "residual_mean")
    for name in own:
        assert rows[0][name] == pytest.approx(rows[1][name], abs=1e-5)
    assert rows[0]["loss"] > 2 * rows[1]["loss"]


@pytest.mark.slow
def test_the_control_experiment_replays_the_returns_that_it_gave(session: Session) -> None:
    trainer = replaying(session, "--apo.shuffle_returns=true")
    numbers = [0.25, 0.5, 0.75, 1.0]
    first = step_without_update(trainer, 0, returns=numbers).rollouts.returns_B.tolist()
    assert sorted(first) == numbers and first != numbers
    old = trainer.replay.draw(1)
    assert len(old) == 3 and {each.episode_return for each in old} <= set(numbers)
    rollouts = step_without_update(trainer, 1).rollouts
    assert rollouts.returns_B[4:].tolist() == [each.episode_return for each in old]
    assert rollouts.rewards_BT.sum(dim=1).tolist() == rollouts.returns_B.tolist()
