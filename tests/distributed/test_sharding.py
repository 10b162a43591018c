"""Weights, gradients and moments in shares against whole ones: bytes, whole runs, adapters."""

from __future__ import annotations

import contextlib
import gc
import io
import os
import signal
import sys
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from benchmarks import sharding as benchmark
from torch import nn
from torch.distributed.fsdp import FSDPModule

from ragen_apo import api
from ragen_apo.config import resolved_yaml
from ragen_apo.distributed.ranks import Ranks
from ragen_apo.distributed.sharding import Shards, require_fully_shard, share_bytes
from ragen_apo.errors import ConfigError, RanksError
from ragen_apo.policy.language_model import LanguageModel
from ragen_apo.policy.precision import multiplies_bfloat16
from ragen_apo.progress import SilentProgress
from ragen_apo.run_directory import RunDirectory
from ragen_apo.session import open_session
from tests import factories
from tests.distributed.processes import answers, in_ranks
from tests.distributed.runs import (
    assert_same_rows,
    assert_same_run,
    assert_same_weights,
    curves,
    go_on,
)
from tests.factories import AlgorithmRuns

pytestmark = pytest.mark.slow
RUN_KEYS = ("--machine.sharding=full",)


def held_bytes(ranks: Ranks, run: Path, sharding: str) -> dict[str, int]:
    """What a rank holds after a step of PPO; the step counts of AdamW aside."""
    config = factories.config(f"--machine.sharding={sharding}")
    session = open_session(config, RunDirectory(run), SilentProgress())
    trainer = factories.trainer_of(session, "ppo")
    trainer.step(0)

    def weights(module: nn.Module) -> int:
        return sum(map(share_bytes, module.parameters()))

    moments = trainer.optimizer.state_tensors()
    critic = trainer.algorithm.state_tensors()
    return {
        "policy": weights(trainer.policy.model),
        "reference": weights(trainer.reference.model),
        "moments": sum(share_bytes(each) for name, each in moments.items() if "/exp" in name),
        "critic": sum(
            share_bytes(each)
            for name, each in critic.items()
            if not name.endswith("/step") and "head" not in name
        ),
    }


def test_a_rank_holds_its_share_of_weights_and_moments(finished_run: Path) -> None:
    (whole,) = answers(in_ranks(1, held_bytes, finished_run, "none"))
    assert whole["moments"] == 2 * whole["policy"]
    for found in answers(in_ranks(2, held_bytes, finished_run, "full")):
        # All sizes of the tiny model are even; the head of the critic has one row.
        assert {name: 2 * size for name, size in found.items()} == whole


def load_another_model(ranks: Ranks, run: Path, sharding: str) -> str:
    """As if the folder of the second host held another model."""
    config = factories.config(f"--machine.sharding={sharding}")
    session = open_session(config, RunDirectory(run), SilentProgress())
    policy = session.load_policy(session.run.reference(0))
    if ranks.rank == 1:
        policy.model.get_input_embeddings().weight.data[0, 0] += 1
    with pytest.raises(RanksError) as caught:
        session.shard(policy)
    return str(caught.value)


@pytest.mark.parametrize("sharding", ["none", "full"])
def test_ranks_that_load_different_models_end_before_they_mix_them(
    finished_run: Path, sharding: str
) -> None:
    for message in answers(in_ranks(2, load_another_model, finished_run, sharding)):
        assert message.startswith("rank 1 of 2 has loaded another model than rank 0. ")
        assert "policy.revision" in message


def used_once(ranks: Ranks) -> weakref.ref[nn.Module]:
    module = nn.Linear(4, 4)
    shards = Shards(module, [], num_ranks=ranks.size)
    shards.run(lambda: module(torch.ones(4)).sum()).backward()
    return weakref.ref(module)


def sharded_once_more(ranks: Ranks) -> bool:
    """Whether a module that nobody needs is gone when the next one is sharded."""
    gc.disable()
    first = used_once(ranks)
    Shards(nn.Linear(4, 4), [], num_ranks=ranks.size)
    return first() is None


def test_what_is_not_needed_any_more_makes_room_for_the_next_shares() -> None:
    assert answers(in_ranks(2, sharded_once_more)) == [True, True]


def files(folder: Path) -> dict[str, bytes]:
    """Those of a model folder but for its weights."""
    left_out = ("model.safetensors", "SHA256SUMS")
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name not in left_out}


def test_a_run_goes_on_with_two_then_one_then_three_processes(
    copy: Callable[[str], RunDirectory],
) -> None:
    by_one, run = copy("one"), copy("resized")
    assert answers(in_ranks(1, go_on, by_one.path)) == ["trained"]
    survivor, killed = in_ranks(2, go_on, run.path, 3)
    assert killed is None
    assert "rank 0 of 2 is without the others at 'stage 2: weights in shares'" in survivor
    assert "rank 1 was last at 'stage 2: " in survivor
    assert in_ranks(1, go_on, run.path, 4) == [None]
    assert answers(in_ranks(3, go_on, run.path)) == 3 * ["trained"]
    assert_same_run(run, by_one, tolerance=1e-5)
    assert files(run.policy) == files(by_one.policy)


def begin(ranks: Ranks, config: Path, run: Path, killed_at_step: int | None = None) -> str:
    api.train(config, run, until="reference", progress=False)
    return go_on(ranks, run, killed_at_step)


@pytest.mark.parametrize("algorithm", ["ppo", "oapl"])
def test_what_an_algorithm_trains_besides_goes_on_with_another_number_of_processes(
    algorithm: str, algorithm_runs: AlgorithmRuns, tmp_path: Path
) -> None:
    """The critic of PPO with its moments, the lagged policy of OAPL."""
    keys = (
        "--machine.sharding=full",
        "--machine.dtype=float64",
        "--policy.freeze_embeddings=true",
        "--training.tasks_per_step=2",
        "--training.max_steps=3",
    )
    config = tmp_path / "run.yaml"
    config.write_text(resolved_yaml(algorithm_runs.config(algorithm, *keys)))
    by_one, run = RunDirectory(tmp_path / "one"), RunDirectory(tmp_path / "several")
    assert answers(in_ranks(1, begin, config, by_one.path)) == ["trained"]
    assert in_ranks(2, begin, config, run.path, 2)[1] is None
    assert answers(in_ranks(3, go_on, run.path)) == 3 * ["trained"]
    rows = curves(run)["metrics.jsonl"]
    assert_same_rows(rows, curves(by_one)["metrics.jsonl"], tolerance=1e-5)
    assert_same_weights(run.policy, by_one.policy, tolerance=1e-5)


def killed_in_a_pass(ranks: Ranks, run: Path) -> str:
    """The last rank is killed before its first pass with gradients, the others wait in theirs."""
    over_targets = LanguageModel.over_targets

    def dying(model: LanguageModel, *arguments: Any) -> tuple[torch.Tensor, ...]:
        if torch.is_grad_enabled() and ranks.rank == ranks.size - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return over_targets(model, *arguments)

    with patch.object(LanguageModel, "over_targets", dying), pytest.raises(RanksError) as caught:
        api.train(None, run, resume=True, progress=False)
    return str(caught.value)


def test_a_rank_that_dies_in_a_pass_ends_the_others(copy: Callable[[str], RunDirectory]) -> None:
    message, killed = in_ranks(2, killed_in_a_pass, copy("killed").path)
    assert killed is None
    assert message.startswith("rank 0 of 2 is without the others at 'distillation: weights in sha")
    assert "--resume" in message


def pass_without_rank_1(ranks: Ranks, how: str) -> str:
    module = nn.Linear(4, 4)
    shards = Shards(module, [], num_ranks=ranks.size)
    ranks = replace(ranks, sharded=True)
    ranks.enter("stage 2")
    assert ranks.store is not None
    if ranks.rank == 1 and how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if ranks.rank == 1:
        ranks.store.wait(["the other is over"])
        return "hangs"
    with pytest.raises(RanksError) as caught, ranks.naming_failures():
        shards.run(lambda: module(torch.ones(4)).sum()).backward()
    ranks.store.set("the other is over", "")
    return str(caught.value)


@pytest.mark.parametrize("how", ["killed", "hangs"])
def test_a_rank_that_is_missing_in_a_pass_is_said_to_be(how: str) -> None:
    message = in_ranks(2, pass_without_rank_1, how, timeout_seconds=3.0)[0]
    assert message.startswith("rank 0 of 2 is without the others at 'stage 2: weights in shares'")


def own_mistake(ranks: Ranks) -> str:
    ranks.total(1.0, what="both are there")  # who ends before the other has joined breaks that off
    with pytest.raises(RuntimeError) as caught, replace(ranks, sharded=True).naming_failures():
        torch.ones(2) @ torch.ones(3)
    return type(caught.value).__name__


def test_a_mistake_of_a_rank_is_not_taken_for_a_missing_one() -> None:
    assert answers(in_ranks(2, own_mistake)) == 2 * ["RuntimeError"]


def train(ranks: Ranks, config: Path, run: Path) -> None:
    api.train(config, run, progress=False)


def adapter_config(model: Path, folder: Path, sharding: str, dtype: str) -> Path:
    """Adapters: demonstrations, a step, a new reference, a step."""
    config = factories.config(
        f"--machine.sharding={sharding}",
        f"--machine.dtype={dtype}",
        "--machine.gradient_checkpointing=true",
        f"--policy.path={model}",
        "--policy.lora={rank: 3, alpha: 64}",
        "--agent.max_context_tokens=1024",
        "--agent.max_response_tokens=10",
        "--warm_start.copy.max_steps=0",
        "--warm_start.demonstrations.num_steps=2",
        "--values.adaptive=false",
        "--values.baseline=zero",  # returns are equal here, and so are they and V*
        "--optimizer.learning_rate=0.01",
        "--reference.refresh_every_steps=1",
        "--training.max_steps=2",
        "--training.max_tasks=3",
        "--training.tasks_per_step=3",
        "--training.eval_every=null",
    )
    path = folder / f"{sharding}.yaml"
    path.write_text(resolved_yaml(config))
    return path


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_adapters_in_shares_learn_what_whole_ones_learn(
    dtype: str, qwen_folder: Path, tmp_path: Path
) -> None:
    """The reference is the policy without them, then a model of its own."""
    if dtype == "bfloat16" and not multiplies_bfloat16(torch.device("cpu")):
        pytest.skip("weights round to other bfloat16 numbers, by one unit, where it is imitated")
    for name, sharding in (("whole", "none"), ("shares", "full")):
        config = adapter_config(qwen_folder, tmp_path, sharding, dtype)
        answers(in_ranks(2, train, config, tmp_path / name))
    whole, shares = RunDirectory(tmp_path / "whole"), RunDirectory(tmp_path / "shares")
    rows = [factories.rows(run.metrics) for run in (shares, whole)]
    for mine, theirs in zip(*rows, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-4, abs=1e-5)
    for folder in ("references/0", "references/1", "policy"):
        assert_same_weights(shares.path / folder, whole.path / folder, tolerance=1e-5)
    before, after = (factories.tensors(whole.path / each) for each in ("references/0", "policy"))
    assert any((before[name] - after[name]).abs().max() > 1e-3 for name in before)


def measured(ranks: Ranks, *arguments: object) -> list[str]:
    """The cells of the benchmark's line."""
    output = io.StringIO()
    with (
        patch.object(sys, "argv", ["sharding", *map(str, arguments)]),
        contextlib.redirect_stdout(output),
    ):
        benchmark.main()
    return output.getvalue().split("\n")[-2].split(" | ") if ranks.is_first else []


def test_the_benchmark_measures_the_same_steps_twice(qwen_folder: Path, tmp_path: Path) -> None:
    whole, shares = (
        in_ranks(2, measured, qwen_folder, "--sharding", sharding, "--out", tmp_path)[0]
        for sharding in ("none", "full")
    )
    assert len(whole) == len(shares) == benchmark.HEADER.split("\n")[0].count("|") - 1
    for left, right in zip(whole[-2:], shares[-2:], strict=True):  # losses, norms of gradients
        expected = [float(number) for number in left.strip(" |").split(", ")]
        assert [float(each) for each in right.strip(" |").split(", ")] == pytest.approx(
            expected, abs=1e-5
        )
        assert all(expected)


def test_a_torch_without_a_part_of_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    require_fully_shard()
    monkeypatch.delattr(FSDPModule, "set_force_sum_reduction_for_comms")
    with pytest.raises(ConfigError, match="set machine.sharding to none"):
        require_fully_shard()


def own_rows(ranks: Ranks) -> Any:
    return ranks.most(ranks.rank, "rows")


def test_ranks_with_whole_weights_make_as_many_passes_as_they_have() -> None:
    assert answers(in_ranks(2, own_rows)) == [0, 1]
