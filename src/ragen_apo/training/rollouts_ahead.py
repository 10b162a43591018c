"""Rollouts of coming steps, played by servers while the trainer updates.

    request(step), request(step + 1), ... -> [one thread plays them in this order] -> take(step)

The sampler is the algorithm's (`Algorithm.sampler`). As long as it stays the same, a step's
rollouts do not depend on the updates before it. So they are the rollouts that the trainer would
have asked for later. The trainer knows which steps these are. Nothing is saved: a resumed run plays
again what was played ahead of its checkpoint.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

from ragen_apo.agent.assembly import build_proxy
from ragen_apo.agent.environment_manager import EnvironmentManager
from ragen_apo.agent.proxy import AgentProxy, EpisodeRequest
from ragen_apo.config import RunConfig
from ragen_apo.policy.inference_server.engine import ServerEngine
from ragen_apo.policy.language_model import LanguageModel
from ragen_apo.progress import Progress
from ragen_apo.training.algorithms.base import Algorithm
from ragen_apo.types import Trajectory

MOST_STEPS_AHEAD = 16
"""Their trajectories are kept in memory, and a trainer that is this far behind waits for none."""


@dataclass(frozen=True)
class PlayedStep:
    """The rollouts of a step, and when they were played, by `time.perf_counter`."""

    trajectories: list[Trajectory]
    began: float
    ended: float

    def seconds_before(self, moment: float) -> float:
        """For how long they were played before this moment."""
        return max(min(moment, self.ended) - self.began, 0.0)


class RolloutsAhead:
    """Plays the rollouts of requested steps in a thread of its own.

    Between `request` and taking its step, do not change the sampler's weights. Only this thread may
    use the servers, except between `pause` and the next `request`.
    """

    def __init__(self, proxy: AgentProxy, engine: ServerEngine, *, temperature: float) -> None:
        """`engine` is that of the proxy; no one else uses the two."""
        self._proxy, self._engine, self._temperature = proxy, engine, temperature
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="rollouts-ahead")
        self._steps: dict[int, Future[PlayedStep]] = {}

    @property
    def sampler(self) -> LanguageModel:
        """The model that plays; anyone may score with it."""
        return self._engine.model

    def request(self, steps: range, requests_of: Callable[[int], Sequence[EpisodeRequest]]) -> None:
        """Has these steps played, if they are not already; all that are requested are among them.

        At most `MOST_STEPS_AHEAD` beyond the first.
        """
        assert all(step in steps for step in self._steps)
        for step in steps[: 1 + MOST_STEPS_AHEAD]:
            if step not in self._steps:
                self._steps[step] = self._thread.submit(self._play, step, requests_of(step))

    def take(self, step: int) -> PlayedStep:
        """The rollouts of a requested step, once they are there; raises what playing raised."""
        return self._steps.pop(step).result()

    def pause(self) -> None:
        """Comes back when nothing is under way; what had not begun has to be requested again."""
        self._steps = {step: each for step, each in self._steps.items() if not each.cancel()}
        wait(self._steps.values())

    def forget(self) -> None:
        """Comes back when nothing is under way; all steps have to be requested again."""
        self.pause()
        self._steps.clear()

    def close(self) -> None:
        """Breaks off what is under way; there is no thread afterwards."""
        self._engine.break_off()
        self._thread.shutdown(cancel_futures=True)

    def _play(self, step: int, requests: Sequence[EpisodeRequest]) -> PlayedStep:
        began = time.perf_counter()
        trajectories = self._proxy.rollout(
            requests, temperature=self._temperature, policy_version=f"step-{step}"
        )
        return PlayedStep(trajectories, began, time.perf_counter())


def rollouts_ahead(
    config: RunConfig,
    algorithm: Algorithm[Any],
    environments: EnvironmentManager,
    *,
    progress: Progress | None = None,
) -> RolloutsAhead | None:
    """Rollouts by the algorithm's sampler; None where it has none, or no server to play them.

    `progress` is told of servers that fail while others play.
    """
    is_wanted = config.rollouts.engine == "vllm" and config.rollouts.ahead
    sampler = algorithm.sampler() if is_wanted else None
    if sampler is None:
        return None
    proxy = build_proxy(config, sampler, environments.with_own_pool(), progress=progress)
    assert isinstance(proxy.engine, ServerEngine)
    return RolloutsAhead(proxy, proxy.engine, temperature=config.sampling.temperature)
