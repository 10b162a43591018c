"""Episodes that ranks draw one by one are those of one process, whoever plays them.

In float64, in which the rounding of another batch changes no token.
"""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from ragen_apo import api
from ragen_apo.agent.environment_manager import EnvironmentManager
from ragen_apo.agent.proxy import EpisodeRequest
from ragen_apo.distributed.ranks import Ranks
from ragen_apo.errors import RanksError
from ragen_apo.progress import SilentProgress
from ragen_apo.run_directory import RunDirectory
from ragen_apo.session import open_session
from ragen_apo.types import Task, Trajectory
from tests import factories
from tests.distributed.processes import answers, in_ranks
from tests.distributed.runs import assert_same_run, go_on, stored_tokens, with_keys
from tests.distributed.steps import Seen, assert_same_steps, steps

pytestmark = pytest.mark.slow

DYNAMIC = ("--rollouts.schedule=dynamic", "--training.num_rows=2")
"""Few rows, so that something is left to draw."""

NUM_EPISODES = 20


@dataclass(frozen=True)
class Played:
    """What a rank has of a rollout."""

    trajectories: list[Trajectory]
    num_own: int
    """Episodes that it played itself."""
    saved: list[int]
    """The requests that a caller was told of, in any order."""


def rollout(ranks: Ranks, run: Path, slow_rank: int | None, *keys: str) -> Played:
    """Twenty episodes of one to three turns; the slow rank's first turn lasts until the others,
    which it leaves nothing else, have played theirs."""
    session = open_session(
        factories.config("--machine.dtype=float64", *keys), RunDirectory(run), SilentProgress()
    )
    model = session.load_model(session.run.reference(0))
    proxy = session.proxy(model)
    tasks, num_own, saved = session.environments.tasks("train"), 0, []
    requests = [
        EpisodeRequest(tasks[index % len(tasks)], 100 + index) for index in range(NUM_EPISODES)
    ]
    start, step = EnvironmentManager.start, EnvironmentManager.step

    def counted_start(manager: EnvironmentManager, task: Task, *, seed: int) -> Any:
        nonlocal num_own
        num_own += 1
        return start(manager, task, seed=seed)

    def slow_step(*arguments: Any) -> Any:
        if ranks.rank == slow_rank and ranks.store is not None:
            ranks.store.wait([f"done/{rank}" for rank in range(ranks.size) if rank != slow_rank])
        return step(*arguments)

    def gather(self: Ranks, part: bytes, what: str) -> list[bytes]:
        if self.store is not None:
            self.store.set(f"done/{self.rank}", "")
        return whole_gather(self, part, what)

    whole_gather = Ranks.gather
    with (
        patch.object(EnvironmentManager, "start", counted_start),
        patch.object(EnvironmentManager, "step", slow_step),
        patch.object(Ranks, "gather", gather),
    ):
        trajectories = proxy.rollout(
            requests,
            temperature=1.0,
            policy_version="tiny",
            on_finished=lambda ended: saved.extend(index for index, _ in ended),
        )
    return Played(trajectories, num_own, saved)


def tokens(trajectories: Sequence[Trajectory]) -> list[list[tuple[int, ...]]]:
    return [[turn.response_token_ids for turn in each.turns] for each in trajectories]


@pytest.mark.parametrize(("size", "slow_rank"), [(1, None), (2, 0), (2, 1), (3, 1)])
def test_the_union_is_the_rollout_of_one_process_however_slow_a_rank_is(
    size: int,
    slow_rank: int | None,
    finished_run: Path,
    by_one_process: Callable[..., Played],
) -> None:
    one = by_one_process(rollout, finished_run, None)
    assert len({len(each.turns) for each in one.trajectories}) > 1, "some episodes are longer"
    found = answers(in_ranks(size, rollout, finished_run, slow_rank, *DYNAMIC))
    for played in found:
        assert tokens(played.trajectories) == tokens(one.trajectories)
        assert [each.seed for each in played.trajectories] == [
            100 + index for index in range(NUM_EPISODES)
        ]
        for mine, theirs in zip(played.trajectories, one.trajectories, strict=True):
            assert mine.episode_return == theirs.episode_return
            for ours, wanted in zip(mine.turns, theirs.turns, strict=True):
                assert ours.logprobs == pytest.approx(wanted.logprobs, abs=1e-9)
    assert sorted(found[0].saved) == list(range(NUM_EPISODES)), "every episode is saved once"
    assert all(played.saved == [] for played in found[1:])
    assert sum(played.num_own for played in found) == NUM_EPISODES
    if slow_rank is not None:
        assert found[slow_rank].num_own <= 2, "what it had begun before its first turn"


@pytest.mark.parametrize(("algorithm", "sharding"), [("apo_turn", "full"), ("ppo", "none")])
def test_losses_gradients_and_weights_are_those_of_one_process(
    algorithm: str, sharding: str, finished_run: Path, by_one_process: Callable[..., Seen]
) -> None:
    options = (finished_run, algorithm, 4, "float64")
    one = by_one_process(steps, *options)
    keys = ("--rollouts.schedule=dynamic", "--training.num_rows=1")
    for seen in answers(in_ranks(2, steps, *options, sharding, *keys)):
        assert_same_steps(seen, one)


def killed_while_drawing(ranks: Ranks, work: Callable[[], Any], phase: str, number: int) -> str:
    """The last rank is killed at its draw of this number in a phase; the others say so."""
    draw, num_draws = Ranks.draw, 0

    def dying_draw(self: Ranks, most: int, what: str) -> range:
        nonlocal num_draws
        num_draws += what.startswith(phase)
        if ranks.rank == ranks.size - 1 and num_draws == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return draw(self, most, what)

    with patch.object(Ranks, "draw", dying_draw):
        try:
            work()
        except RanksError as error:
            return str(error)
    return "done"


def go_on_killed(ranks: Ranks, run: Path, phase: str, number: int) -> str:
    def work() -> None:
        api.train(None, run, resume=True, progress=False)

    return killed_while_drawing(ranks, work, phase, number)


def test_a_run_whose_rank_is_killed_while_it_draws_ends_as_that_of_one_process(
    copy: Callable[[str], RunDirectory],
) -> None:
    """First in a step of Stage 2, then in another by another number of processes."""
    by_one, run = copy("one"), with_keys(copy("drawn"), *DYNAMIC)
    assert answers(in_ranks(1, go_on, by_one.path)) == ["trained"]
    survivor, killed = in_ranks(2, go_on_killed, run.path, "trajectories of step-0", 2)
    assert killed is None
    assert "without the others at 'stage 2: trajectories of step-0'" in survivor
    # A rank that comes late finds nothing left and draws once.
    assert in_ranks(3, go_on_killed, run.path, "trajectories of step-3", 1)[2] is None
    assert answers(in_ranks(2, go_on, run.path)) == 2 * ["trained"]
    assert_same_run(run, by_one, tolerance=1e-5)


def estimate(ranks: Ranks, run: Path, killed_at_draw: int = 0) -> str:
    def work() -> None:
        api.estimate_values(run, samples=2, progress=False)

    return killed_while_drawing(ranks, work, "trajectories of ", killed_at_draw)


def test_stage_one_stores_the_same_samples_also_after_a_kill(started: Path, tmp_path: Path) -> None:
    runs: list[RunDirectory] = []
    for name, keys in (("one", ()), ("drawn", DYNAMIC)):
        copied = RunDirectory(Path(shutil.copytree(started, tmp_path / name)))
        copied.values.unlink(missing_ok=True)
        runs.append(with_keys(copied, *keys))
    by_one, drawn = runs
    assert answers(in_ranks(1, estimate, by_one.path)) == ["done"]
    survivor, killed = in_ranks(2, estimate, drawn.path, 5)
    assert killed is None
    assert "rank 0 of 2 is without the others at 'start: trajectories of " in survivor
    expected = stored_tokens(by_one)
    assert 0 < len(stored_tokens(drawn)) < len(expected) == 40
    assert answers(in_ranks(3, estimate, drawn.path)) == 3 * ["done"]
    assert stored_tokens(drawn) == expected
