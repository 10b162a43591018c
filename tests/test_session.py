import shutil
import time
from pathlib import Path

import pytest

import ragen_apo
from ragen_apo.agent.assembly import build_proxy
from ragen_apo.distributed.ranks import Ranks
from ragen_apo.errors import ConfigError
from ragen_apo.progress import SilentProgress
from ragen_apo.run_directory import RunDirectory
from ragen_apo.session import Session, open_session
from tests import factories
from tests.factories import with_keys


def limited(session: Session, max_tasks: int, *, seed: int = 0) -> Session:
    return with_keys(session, f"--training.max_tasks={max_tasks}", f"--seed={seed}")


def test_training_tasks_are_a_part_of_the_split_that_depends_on_the_seed(session: Session) -> None:
    every = session.training_tasks()
    assert every == list(session.environments.tasks("train"))
    parts = [limited(session, 5, seed=seed).training_tasks() for seed in (0, 0, 1)]
    assert parts[0] == parts[1] != parts[2]
    for part in parts:
        assert len(part) == 5
        assert [task for task in every if task in part] == part, "in the split's order"


def test_environments_act_side_by_side_and_in_lockstep_where_the_configuration_says_so(
    session: Session,
) -> None:
    keys = (
        "--rollouts.num_environment_workers=3",
        "--rollouts.environment_retries=2",
        "--rollouts.lockstep=true",
    )
    plain = (session.config, (1, 0, False))
    for config, expected in (plain, (factories.config(*keys), (3, 2, True))):
        opened = open_session(config, session.run, SilentProgress())
        model = opened.load_model(opened.run.initial)
        proxy = build_proxy(config, model, opened.environments)
        environments = proxy.environments
        assert (environments.num_workers, environments.num_retries, proxy.lockstep) == expected


def test_a_model_that_is_too_short_for_an_episode_is_refused_when_it_is_loaded(
    session: Session,
) -> None:
    longer = with_keys(
        session, "--agent.max_context_tokens=513", "--policy.small.max_position=1024"
    )
    with pytest.raises(ConfigError, match="at most 512 tokens"):
        longer.load_model(session.run.initial)


def test_a_limit_above_the_split_takes_all_of_it(session: Session) -> None:
    assert limited(session, 10_000).training_tasks() == session.training_tasks()


def test_seconds_of_a_phase_within_another_count_once_and_all_add_up_to_the_clock(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    session.run.status.unlink()
    with session.clock.timed("loading", since=95.0):
        now = 110.0  # 15 s of loading
        with session.clock.timed("stage 2"):
            now = 130.0  # 20 s
            with session.clock.timed("reference refresh"):
                now = 140.0
                session.clock.note(every=10.0)
                now = 145.0
                session.clock.note(every=10.0)
                assert session.run.read_status()["phases"]["reference refresh"]["seconds"] == 10
                now = 200.0  # 70 s
            now = 230.0  # 30 s more of Stage 2
        now = 231.0  # 1 s more of loading
    now = 300.0
    session.clock.note()
    phases = session.run.read_status()["phases"]
    assert phases == {
        "loading": {"seconds": 16},
        "stage 2": {"seconds": 50},
        "reference refresh": {"seconds": 70},
    }
    assert sum(phase["seconds"] for phase in phases.values()) == 231 - 95


def test_checkpoints_waiting_and_communication_are_parts_of_the_phase_they_fall_in(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    session.run.status.unlink()
    exchanged = (1.0, 2.0)
    monkeypatch.setattr(Ranks, "seconds", property(lambda _: exchanged))
    with session.clock.timed("demonstrations"):
        now, exchanged = 110.0, (4.0, 2.5)
        with session.clock.saving():
            now = 113.0
        with session.clock.timed("stage 1"):
            now, exchanged = 120.0, (4.0, 3.0)
        with session.clock.saving():
            now = 121.0
    assert session.run.read_status()["phases"] == {
        "demonstrations": {
            "seconds": 14.0,
            "checkpoint_seconds": 4.0,
            "waiting_seconds": 4.0,
            "communication_seconds": 2.5,
        },
        "stage 1": {"seconds": 7.0, "communication_seconds": 0.5},
    }


def test_a_run_notes_the_seconds_of_loading_and_of_the_evaluation_too(finished_run: Path) -> None:
    phases = RunDirectory(finished_run).read_status()["phases"]
    warm_start = {"copy", "demonstrations"}
    later = {"stage 1", "stage 2", "reference refresh"}
    assert set(phases) == {"loading", "evaluation"} | warm_start | later
    assert all(phase["seconds"] > 0 for phase in phases.values())
    saving = {name for name, phase in phases.items() if "checkpoint_seconds" in phase}
    assert saving == warm_start | {"stage 2"}
    assert all(phases[name]["checkpoint_seconds"] < phases[name]["seconds"] for name in saving)


@pytest.mark.slow
def test_a_later_evaluation_is_none_of_what_the_run_took(
    finished_run: Path, tmp_path: Path
) -> None:
    run = Path(shutil.copytree(finished_run, tmp_path / "run"))
    before = RunDirectory(run).read_status()["phases"]
    ragen_apo.evaluate(run, episodes=1, progress=False)
    assert RunDirectory(run).read_status()["phases"] == before


def test_an_environment_without_training_tasks_gets_no_advice_on_the_shop(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session.environments, "tasks", lambda split: ())
    with pytest.raises(ConfigError, match="no task in the split 'train'") as refused:
        session.training_tasks()
    assert "num_products" not in str(refused.value)
