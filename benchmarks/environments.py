"""Steps per second of the catalogue shop on one core, resets included as time.

    python -m benchmarks.environments [--seconds 2]

The actions are recorded first, so a policy's own time does not count: episodes of the teacher (as
in the warm start), of the heuristic, and of random actions. `unique searches` adds a random word of
the tasks to every search of the teacher, so that queries repeat less.
"""

import argparse
import itertools
import random
import time
from collections.abc import Iterator

from benchmarks.tables import write_page

from ragen_apo.agent.environment_manager import EnvironmentManager
from ragen_apo.agent.proxy import EpisodeRequest
from ragen_apo.agent.scripted import play_scripted_episodes
from ragen_apo.environments.shop import ShopEnvironment
from ragen_apo.types import Task

Episode = tuple[Task, list[str]]


def recorded(policy: str) -> list[Episode]:
    """The actions of one episode for each task of the shop."""
    manager = EnvironmentManager(ShopEnvironment, format_penalty=0.0, invalid_action_penalty=0.0)
    requests = [EpisodeRequest(task, seed) for seed, task in enumerate(manager.tasks("all"))]
    episodes = play_scripted_episodes(
        manager.scripted_policies()[policy], manager, requests, policy_version=policy
    )
    return [(episode.task, [turn.action for turn in episode.turns]) for episode in episodes]


def with_unique_searches(episodes: list[Episode]) -> Iterator[Episode]:
    """The episodes over and over, with a random word of a task added to every search."""
    draws = random.Random(0)
    words = sorted({word for task, _ in episodes for word in task.instruction.split()})
    for task, actions in itertools.cycle(episodes):
        yield (
            task,
            [
                f"{action} {draws.choice(words)}" if action.startswith("search") else action
                for action in actions
            ],
        )


def steps_per_second(episodes: Iterator[Episode], *, seconds: float) -> tuple[float, float]:
    """Steps per second and mean steps per episode."""
    environment = ShopEnvironment()
    num_steps = num_episodes = 0
    started = time.perf_counter()
    while time.perf_counter() - started < seconds:
        task, actions = next(episodes)
        environment.reset(task, seed=0)
        for action in actions:
            environment.step(action)
        num_steps += len(actions)
        num_episodes += 1
    return num_steps / (time.perf_counter() - started), num_steps / num_episodes


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seconds", type=float, default=2.0, help="for each row")
    seconds = parser.parse_args().seconds
    teacher = recorded("teacher")
    workloads = {
        "teacher": itertools.cycle(teacher),
        "teacher, unique searches": with_unique_searches(teacher),
        "heuristic": itertools.cycle(recorded("heuristic")),
        "random": itertools.cycle(recorded("random")),
    }
    rows = []
    for name, episodes in workloads.items():
        steps_per_second(episodes, seconds=seconds / 10)
        rate, length = steps_per_second(episodes, seconds=seconds)
        rows.append([name, f"{length:.2f}", f"{rate:.0f}", f"{rate / length:.0f}"])
    write_page(
        "environments",
        title="Catalogue shop: steps per second",
        notes="The catalogue shop has 497 products. Actions were recorded first. Resets are "
        "included.",
        header=["actions of", "steps per episode", "steps/s", "episodes/s"],
        rows=rows,
    )


if __name__ == "__main__":
    main()
