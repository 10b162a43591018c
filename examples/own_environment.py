"""An environment of your own beside the code that trains on it: bring a room to a temperature.

    python examples/own_environment.py [RUN_DIR [NUM_DEMONSTRATION_STEPS [NUM_STEPS]]]

A run keeps where this file is, and `ragen-apo evaluate` imports it: hence `if __name__`.
"""

import re
import sys
from pathlib import Path

import ragen_apo
from ragen_apo.environments.base import EnvironmentProperties, Reply
from ragen_apo.environments.toolkit.game import Answer, GameEnvironment
from ragen_apo.environments.toolkit.scripted import policies_around
from ragen_apo.types import make_task


class Room:
    def __init__(self, task, seed):
        self.now, self.goal = task.payload["now"], task.payload["goal"]

    def first_observation(self):
        return f"It is {self.now} degrees, {self.goal} are wanted."

    def play(self, text):
        change = {"warmer": 1, "cooler": -1}.get(text.strip())
        if change is None:
            return Answer(f"Say warmer or cooler. {self.first_observation()}", invalid=True)
        self.now += change
        done = self.now == self.goal
        return Answer(self.first_observation(), float(done), terminated=done, success=done)

    def key(self):
        return str(self.now)


class Thermostat:
    def begin(self, task, *, seed):
        pass

    def act(self, observation):
        now, goal, *_ = [*map(int, re.findall(r"\d+", observation)), 0, 0]  # it reads anything
        return Reply(thought=f"{now} to {goal}", action="warmer" if now < goal else "cooler")


def make_room(max_turns=4):
    tasks = {"train": [], "test": []}
    for goal in range(15, 25):
        for now in (*range(goal - 4, goal), *range(goal + 1, goal + 5)):
            split = "test" if (now + goal) % 5 == 0 else "train"
            task = {"instruction": "Set the temperature.", "category": "rooms", "split": split}
            payload = {"now": now, "goal": goal}
            tasks[split].append(make_task(environment="room", payload=payload, **task))
    return GameEnvironment(
        properties=EnvironmentProperties(
            name="room",
            version=f"1-turns{max_turns}",
            reward_version="1",
            deterministic=True,
            return_range=(0.0, 1.0),
            splits=("train", "test"),
            rules="Bring the room to the temperature that is wanted: say warmer or cooler.",
        ),
        tasks=tasks,
        start=Room,
        # The teacher does right in half of its turns, and anything in the others.
        policies=policies_around(
            Thermostat,
            Thermostat,
            names=("warmer", "cooler"),
            max_per_turn=1,
            teacher_good_share=0.5,
        ),
        max_turns=max_turns,
    )


CONFIG = {
    "machine": {"num_threads": 1},
    "agent": {"max_response_tokens": 24, "max_context_tokens": 384},
    "policy": {"small": {"vocab_size": 300, "hidden_size": 64, "num_layers": 2, "num_heads": 2}},
    "algorithm": {"name": "apo", "center_residuals": True},
}


def main(run_dir="runs/example_own", num_demonstration_steps=400, num_steps=30):
    run = ragen_apo.train(
        CONFIG,
        run_dir,
        resume=Path(run_dir, "config.yaml").exists(),
        environment=make_room,
        warm_start={
            "copy": {"max_steps": 0},
            "demonstrations": {
                "num_steps": int(num_demonstration_steps),
                "num_episodes_per_task": 10,
                "batch_size": 32,
                "learning_rate": 2e-3,
            },
        },
        training={"max_steps": int(num_steps), "tasks_per_step": 32, "eval_every": None},
    )
    results = ragen_apo.evaluate(run, split="test")
    reference = results["baselines"]["reference"]["success_rate"]
    print(f"success: {results['success_rate']:.0%}, before {reference:.0%}")
    print(ragen_apo.episodes(run)[0])


if __name__ == "__main__":
    main(*sys.argv[1:])
