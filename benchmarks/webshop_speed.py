"""Steps per second of WebShop on one core, for each observation mode, with and without repeats.

    python -m benchmarks.webshop_speed [--data FOLDER] [--episodes FILE.json.gz] [--seconds 2]

Workload: the actions of recorded episodes (their share of searches, clicks and malformed actions)
or, without a recording, a third each of random, heuristic and teacher episodes. `repeating`: the
same episodes again and again, as in training. `unique`: each search has its words shuffled and two
words of the goals added, so that hardly a query is met twice; clicks on products go to a product of
the new page. Resets count as time, not as steps. Prints one JSON object.
"""

import argparse
import gzip
import json
import random
import resource
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ragen_apo.environments.webshop import WebShopEnvironment
from ragen_apo.types import Task

Episode = tuple[Task, list[str]]
TARGETS = {"compact": (10_000, None), "text": (6_500, 4_000), "text_rich": (None, None)}
"""Aims in steps per second: repeating, unique."""
MAX_STEPS = 15


def recorded_episodes(environment: WebShopEnvironment, path: Path) -> list[Episode]:
    """The actions of a recording, with our tasks of the same goals."""
    with gzip.open(path, "rt", encoding="utf-8") as stream:
        recording = json.load(stream)
    return [
        (environment.goal_task(e["goal_index"]), [s["action"] for s in e["steps"] if s["action"]])
        for e in recording["episodes"]
    ]


def played_episodes(environment: WebShopEnvironment, num_episodes: int = 60) -> list[Episode]:
    """Episodes of three scripted policies in turn."""
    policies = environment.scripted_policies()
    episodes: list[Episode] = []
    for number, task in enumerate(environment.tasks("test")[:num_episodes]):
        policy = policies[("random", "heuristic", "teacher")[number % 3]]()
        policy.begin(task, seed=number)
        observation, _ = environment.reset(task, seed=0)
        actions: list[str] = []
        over = False
        while not over and len(actions) < MAX_STEPS:
            actions.append(policy.act(observation).action)
            observation, _, over, _, _ = environment.step(actions[-1])
        episodes.append((task, actions))
    return episodes


def with_unique_queries(
    episodes: list[Episode], words: list[str], *, seed: str
) -> Iterator[Episode]:
    """The episodes over and over, with every query changed; another seed gives other queries."""
    draws = random.Random(seed)
    while True:
        for task, actions in episodes:
            yield task, [_with_other_words(action, words, draws) for action in actions]


def _with_other_words(action: str, words: list[str], draws: random.Random) -> str:
    if not action.startswith("search[") or len(action) <= len("search[]"):
        return action
    parts = action[len("search[") : -1].split() + draws.sample(words, 2)
    draws.shuffle(parts)
    return f"search[{' '.join(parts)}]"


def forever(episodes: list[Episode]) -> Iterator[Episode]:
    """The episodes over and over."""
    while True:
        yield from episodes


def _retarget(environment: WebShopEnvironment, action: str, index: int) -> str:
    """A click on the product at an index of the open results page, where there is one."""
    shown = environment.visit.shown
    if not shown or not action.lower().startswith("click[b0"):
        return action
    return f"click[{environment.views(shown[index % len(shown)]).link}]"


def steps_per_second(
    environment: WebShopEnvironment, episodes: Iterator[Episode], *, seconds: float, retarget: bool
) -> float:
    """Plays for so long and gives the rate."""
    num_steps = 0
    start = time.perf_counter()
    while time.perf_counter() - start < seconds:
        task, actions = next(episodes)
        environment.reset(task, seed=0)
        for action in actions:
            environment.step(_retarget(environment, action, num_steps) if retarget else action)
        num_steps += len(actions)
    return num_steps / (time.perf_counter() - start)


def measure(options: dict[str, Any], recording: Path | None, seconds: float) -> dict[str, Any]:
    """The rates of all modes and workloads, and what they are measured against."""
    rates: dict[str, Any] = {}
    for mode, aims in TARGETS.items():
        environment = WebShopEnvironment(**options, observation=mode)
        episodes = (
            recorded_episodes(environment, recording) if recording else played_episodes(environment)
        )
        words = sorted({w for task, _ in episodes for w in task.instruction.lower().split()})
        steps_per_second(environment, forever(episodes), seconds=seconds / 4, retarget=False)
        unique = with_unique_queries(episodes, words, seed=mode)
        measured = (
            steps_per_second(environment, forever(episodes), seconds=seconds, retarget=False),
            steps_per_second(environment, unique, seconds=seconds, retarget=True),
        )
        for workload, rate, aim in zip(("repeating", "unique"), measured, aims, strict=True):
            rates[f"{mode}, {workload}"] = {
                "steps_per_second": round(rate),
                "aim": aim,
                "ratio_to_aim": round(rate / aim, 2) if aim else None,
            }
    return rates


def memory_of_environments(options: dict[str, Any], number: int = 256) -> dict[str, float]:
    """The process's largest resident size after holding that many environments in an episode."""
    environments = [WebShopEnvironment(**options) for _ in range(number)]
    tasks = environments[0].tasks("test")
    for index, environment in enumerate(environments):
        environment.reset(tasks[index % len(tasks)], seed=0)
        environment.step(f"search[{tasks[index % len(tasks)].instruction}]")
    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"environments": number, "largest_resident_mib": round(largest, 1)}


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--data", default="generated", help="folder with upstream's files")
    parser.add_argument("--episodes", type=Path, help="recorded episodes, .json.gz")
    parser.add_argument("--store", type=Path, help="prepared catalogues (temporary)")
    parser.add_argument("--seconds", type=float, default=2.0, help="for each of the six rates")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        options = {"data": arguments.data, "store": arguments.store or Path(temporary)}
        options |= {"max_turns": None}
        result = {
            "data": arguments.data,
            "rates": measure(options, arguments.episodes, arguments.seconds),
            "memory": memory_of_environments(options),
        }
        print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
