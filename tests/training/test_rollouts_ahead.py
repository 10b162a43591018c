"""Steps that a server plays ahead: the same ones, beside training, and never with other weights."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import pytest

from ragen_apo.agent.proxy import AgentProxy, EpisodeRequest
from ragen_apo.errors import ServerError
from ragen_apo.session import Session
from ragen_apo.training.trainer import StepResult, Trainer
from tests import factories
from tests.factories import with_keys
from tests.fake_vllm import FakeVllm, HangupError, StallError, content_seed, serving
from tests.worlds import ticketed_shop

pytestmark = pytest.mark.slow

NUM_STEPS, LAG = 5, 3
"""So the weights that sample are those of steps 0 and 3; one update a step."""
PATIENCE_SECONDS = 200.0


@pytest.fixture
def server(session: Session) -> Iterator[tuple[FakeVllm, str]]:
    with serving(session.run.reference(0)) as (fake, url):
        fake.seed_of = content_seed
        yield fake, url


MakeTrainer = Callable[..., Trainer]


@pytest.fixture
def make_trainer(session: Session, server: tuple[FakeVllm, str]) -> MakeTrainer:
    """A trainer of OAPL with a lag, two tasks a step in groups of two, played by the server."""

    def make(*keys: str) -> Trainer:
        asking = with_keys(
            session,
            f"--policy.path={session.run.reference(0)}",
            "--warm_start.enabled=false",
            "--algorithm=oapl",
            "--algorithm.group_size=2",
            f"--algorithm.lag={LAG}",
            f"--training.max_steps={NUM_STEPS}",
            "--training.tasks_per_step=2",
            "--agent.max_response_tokens=8",
            "--rollouts.engine=vllm",
            f"--rollouts.base_url={server[1]}",
            "--rollouts.retries=0",
            *keys,
            environment=ticketed_shop.SECTION,
        )
        return factories.trainer(asking, policy=asking.load_policy(session.run.reference(1)))

    return make


def without_seconds(result: StepResult) -> dict[str, float | int]:
    return {name: n for name, n in result.metrics.items() if not name.endswith("_seconds")}


def take_steps(trainer: Trainer, steps: Sequence[int] = range(NUM_STEPS)) -> list[StepResult]:
    with closing(trainer):
        return [trainer.step(step) for step in steps]


@dataclass
class Played:
    """What was played, in this order, by which weights, and in which thread."""

    begun: list[str] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)
    weights: list[str] = field(default_factory=list)
    threads: list[str] = field(default_factory=list)
    has_changed: threading.Condition = field(default_factory=threading.Condition)

    def wait_for(self, version: str) -> None:
        """Until these rollouts are there, which is never where nothing plays beside."""
        with self.has_changed:
            assert self.has_changed.wait_for(lambda: version in self.ended, PATIENCE_SECONDS)


@contextmanager
def watched() -> Iterator[Played]:
    """All rollouts, whoever plays them."""
    seen, roll_out = Played(), AgentProxy.rollout

    def played(proxy: AgentProxy, *args: Any, **options: Any) -> Any:
        seen.begun.append(options["policy_version"])
        seen.weights.append(proxy.engine.model.fingerprint())
        seen.threads.append(threading.current_thread().name)
        trajectories = roll_out(proxy, *args, **options)
        with seen.has_changed:
            seen.ended.append(options["policy_version"])
            seen.has_changed.notify_all()
        return trajectories

    with patch.object(AgentProxy, "rollout", played):
        yield seen


@contextmanager
def before_each_update(trainer: Trainer, call: Callable[[int], None]) -> Iterator[None]:
    """Calls with the number of the update, in the middle of a step."""
    update, numbers = trainer.optimizer.update, iter(range(NUM_STEPS))

    def updated(**options: float) -> float:
        call(next(numbers))
        return update(**options)

    with patch.object(trainer.optimizer, "update", updated):
        yield


@pytest.mark.parametrize(
    "keys",
    [[], ["--policy.lora.rank=2"], ["--monitors.every_steps=1", "--training.num_rows=3"]],
    ids=["all weights", "adapters", "few rows and thoughts monitored"],
)
def test_trajectories_metrics_and_weights_are_those_of_a_trainer_that_waits(
    make_trainer: MakeTrainer, keys: list[str]
) -> None:
    waiting, running = make_trainer(*keys, "--rollouts.ahead=false"), make_trainer(*keys)
    with watched() as seen:
        expected = take_steps(waiting)
    assert set(seen.threads) == {threading.current_thread().name}
    with watched() as seen:
        found = take_steps(running)
    assert threading.current_thread().name not in seen.threads
    for one, other in zip(found, expected, strict=True):
        assert one.trajectories == other.trajectories
        assert without_seconds(one) == without_seconds(other)
    assert [each.metrics["sampler_lag"] for each in found] == [0, 1, 2, 0, 1]
    assert all(each.metrics["gradient_norm"] > 0 for each in found)
    assert running.policy.fingerprint() == waiting.policy.fingerprint()


def test_all_steps_of_a_sampler_are_played_while_the_first_one_is_trained_and_no_further_one(
    make_trainer: MakeTrainer,
) -> None:
    trainer, policies = make_trainer(), list[str]()

    def wait_for_the_last(number: int) -> None:
        policies.append(trainer.policy.fingerprint())
        seen.wait_for("step-2" if number < LAG else "step-4")
        assert len(seen.begun) == (LAG if number < LAG else NUM_STEPS)

    with watched() as seen, before_each_update(trainer, wait_for_the_last):
        results = take_steps(trainer)
    assert seen.begun == [f"step-{step}" for step in range(NUM_STEPS)]
    assert seen.weights == [policies[0]] * LAG + [policies[LAG]] * (NUM_STEPS - LAG)
    assert len(set(policies)) == NUM_STEPS, "the policy itself has moved on"
    ahead = [each.metrics["rollout_ahead_seconds"] for each in results]
    assert [seconds > 0 for seconds in ahead] == [False, True, True, False, True]


def test_where_the_policy_itself_samples_nothing_is_played_ahead(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer("--algorithm.lag=2", "--algorithm.num_epochs=2")
    with watched() as seen:
        (result,) = take_steps(trainer, [0])
    assert (seen.begun, seen.threads) == (["step-0"], [threading.current_thread().name])
    assert "rollout_ahead_seconds" not in result.metrics


def test_while_the_trainer_pauses_its_rollouts_another_policy_may_play(
    make_trainer: MakeTrainer, server: tuple[FakeVllm, str]
) -> None:
    expected = take_steps(make_trainer("--rollouts.ahead=false"))
    trainer, found = make_trainer(), list[StepResult]()
    server[0].delay_seconds = 0.01
    requests = [EpisodeRequest(task, seed=1) for task in trainer.tasks[:2]]
    with watched() as seen, closing(trainer):
        for step in range(NUM_STEPS):
            found.append(trainer.step(step))
            trainer.pause_rollouts()
            assert seen.begun == seen.ended
            num_played = len(seen.ended)
            trainer.proxy.rollout(requests, temperature=1.0, policy_version="evaluation")
            assert seen.ended[num_played:] == ["evaluation"]
    assert [each.trajectories for each in found] == [each.trajectories for each in expected]
    played = [version for version in seen.begun if version != "evaluation"]
    assert played == [f"step-{step}" for step in range(NUM_STEPS)], "nothing is played twice"


def test_a_failure_is_raised_at_the_step_that_needs_the_rollouts(
    make_trainer: MakeTrainer, server: tuple[FakeVllm, str]
) -> None:
    fake, url = server
    trainer = make_trainer()

    def die_in_step_two(path: str, answer: Any) -> Any:
        if "step-2" in seen.begun:
            raise HangupError
        return answer

    fake.spoil = die_in_step_two
    with watched() as seen, closing(trainer):
        for step in range(2):
            assert trainer.step(step).metrics["num_updates"] == 1
        with pytest.raises(ServerError, match=f"{url}: .* failed .* go on with --resume"):
            trainer.step(2)
    assert no_thread_is_left()


@pytest.mark.parametrize("path", ["/v1/completions", "/weight_info", "/v1/models"])
def test_closing_breaks_off_whatever_the_server_is_asked(
    make_trainer: MakeTrainer, server: tuple[FakeVllm, str], path: str
) -> None:
    trainer, is_stalled = make_trainer("--rollouts.retries=5"), threading.Event()

    def stall_in_step_one(asked: str, answer: Any) -> Any:
        if asked == path and "step-1" in seen.begun:
            is_stalled.set()
            raise StallError("60")
        return answer

    server[0].spoil = stall_in_step_one
    with watched() as seen:
        trainer.step(0)
        assert is_stalled.wait(PATIENCE_SECONDS)
        began = time.monotonic()
        trainer.close()
    assert time.monotonic() - began < 5.0
    assert seen.ended == ["step-0"]
    assert no_thread_is_left()


def no_thread_is_left() -> bool:
    return not any(each.name.startswith("rollout") for each in threading.enumerate())
