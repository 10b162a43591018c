"""The benchmarks still fit the interfaces that they measure."""

import argparse
import functools
import itertools
import json
import shutil
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from ragen_apo.run_directory import open_run
from ragen_apo.types import Trajectory

ROOT = Path(__file__).resolve().parent.parent


def test_both_sides_of_the_generation_benchmark_play_the_same_episodes(
    tiny_model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    from benchmarks import generation

    sizes = {"episodes": 5, "rows": 4, "turns": 2, "tokens": 3, "capacity": 256}
    workload = generation.forced(argparse.Namespace(**sizes))
    played: list[list[Trajectory]] = []

    def play(*arguments):
        trajectories, seconds = original(*arguments)
        played.append(trajectories)
        return trajectories, seconds

    original = generation.play
    monkeypatch.setattr(generation, "play", play)
    # Each side is warmed up in one second, then `generate` takes six and our engine two.
    times = itertools.accumulate([0, 1, 0, 1, 0, 6, 0, 2])
    rows = generation.compare(tiny_model, workload, repeats=1, clock=functools.partial(next, times))
    assert [len(episodes) for episodes in played] == [1, 1, 5, 5]
    theirs, ours = played[2:]
    assert [episode.task for episode in theirs] == [episode.task for episode in ours]
    for episode in (*theirs, *ours):
        assert [len(turn.response_token_ids) for turn in episode.turns] == [3, 3]
    read = [[turn.observation for turn in episode.turns] for episode in ours]
    assert read == [[turn.observation for turn in episode.turns] for episode in theirs]
    table = {str(row[0]): row[1:] for row in rows}
    assert list(table) == [
        "forced: `generate`, whole transcript every turn",
        "forced: engine of this project",
    ]
    # Five episodes of two turns and three tokens each: 5 / 6 episodes/s and 5 against 2.5 and 15.
    assert [row[:2] + row[3:] for row in table.values()] == [
        ["2.00", "3.0", "0.83", "5", "1.0"],
        ["2.00", "3.0", "2.50", "15", "3.0"],
    ]
    through = [int(str(row[2])) for row in table.values()]
    assert through[0] > through[1], "the other side reads every turn anew"


def test_episode_rates_are_medians_over_the_steps_of_a_run(
    finished_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    from benchmarks import episode_rates

    shutil.copytree(finished_run, tmp_path / "run")
    run = open_run(tmp_path / "run")
    steps = [
        {"rollout_seconds": seconds, "training_seconds": 2 * seconds}
        | {"num_episodes": 8, "num_generated_tokens": 80, "num_turns_mean": 2.5}
        for seconds in (1.0, 4.0, 100.0)
    ]
    run.metrics.write_text("".join(f"{json.dumps(step)}\n" for step in steps), encoding="utf-8")
    model = AutoModelForCausalLM.from_pretrained(run.reference(0))
    size = f"{model.num_parameters() / 1e6:.2f} M"
    assert episode_rates.row(run) == ["shop, apo", size, 3, "2.5", "10", "2.0", "1.0"]
