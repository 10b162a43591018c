"""Plays fixed tasks with a policy and the baselines.

Task i of a split always has the same seed, so two policies meet the same episodes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ragen_apo.agent.environment_manager import EnvironmentManager
from ragen_apo.agent.proxy import AgentProxy, EpisodeRequest
from ragen_apo.agent.scripted import play_scripted_episodes
from ragen_apo.evaluation.summary import outcome_summary, pass_at_by_task
from ragen_apo.seeding import derive_seed
from ragen_apo.task_order import untrained_first
from ragen_apo.types import Trajectory

BASELINES = ("heuristic", "random")
"""Scripted policies that every evaluation plays, where the environment has them."""


@dataclass(frozen=True)
class EvaluationPlan:
    """Which episodes an evaluation plays."""

    split: str
    num_episodes: int
    temperature: float
    seed: int
    trained_on: frozenset[str] = frozenset()
    """Ids of tasks that are played last."""

    def requests(
        self, environments: EnvironmentManager, *, repeat: int = 0
    ) -> list[EpisodeRequest]:
        """The split's tasks in order, starting over if there are fewer tasks than episodes.

        Greedy play in a deterministic environment would repeat an episode exactly, which would make
        the interval too narrow: then each task is played once at most.
        """
        tasks = untrained_first(environments.tasks(self.split), self.trained_on)
        num_episodes = self.num_episodes
        if self.temperature == 0 and environments.properties.deterministic:
            num_episodes = min(num_episodes, len(tasks))
        return [
            EpisodeRequest(
                tasks[index % len(tasks)], derive_seed(self.seed, "evaluation", index, repeat)
            )
            for index in range(num_episodes)
        ]


def play_evaluation(
    proxy: AgentProxy, plan: EvaluationPlan, *, policy_version: str
) -> list[Trajectory]:
    """The policy's episodes."""
    proxy.engine.model.model.eval()
    requests = plan.requests(proxy.environments)
    return proxy.rollout(requests, temperature=plan.temperature, policy_version=policy_version)


def play_baselines(
    environments: EnvironmentManager, plan: EvaluationPlan
) -> dict[str, dict[str, Any]]:
    """Outcome of the environment's scripted baselines on the same episodes."""
    requests = plan.requests(environments)
    policies = environments.scripted_policies()
    return {
        name: outcome_summary(
            play_scripted_episodes(policies[name], environments, requests, policy_version=name)
        )
        for name in BASELINES
        if name in policies
    }


def sampled_pass_at(
    proxy: AgentProxy, plan: EvaluationPlan, *, k: int, temperature: float
) -> dict[str, float]:
    """pass@1 ... pass@k (powers of two and k) of k sampled episodes a task."""
    num_tasks = min(plan.num_episodes, len(proxy.environments.tasks(plan.split)))
    sampled = replace(plan, temperature=temperature, num_episodes=num_tasks)
    environments = proxy.environments
    requests = [each for n in range(k) for each in sampled.requests(environments, repeat=n + 1)]
    trajectories = proxy.rollout(requests, temperature=temperature, policy_version=f"pass@{k}")
    ks = sorted({2**power for power in range(k.bit_length()) if 2**power <= k} | {k})
    return pass_at_by_task(trajectories, ks)
