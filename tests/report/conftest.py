"""A run directory as a finished run leaves it, made up and the same every time.

`python -m tests.report.conftest DIRECTORY` writes it and its report, to be looked at.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ragen_apo.config.algorithms import ALGORITHMS, algorithm_class
from ragen_apo.environments.base import FailureWords
from ragen_apo.environments.shop.environment import FAILURE_WORDS
from ragen_apo.evaluation.summary import episode_rows, outcome_summary, results_document
from ragen_apo.files import write_json_atomically, write_json_lines_atomically
from ragen_apo.seeding import generator
from ragen_apo.types import Trajectory, Turn, TurnFlag
from tests import factories

CATEGORIES = (
    "accessories", "apparel", "books", "electronics", "fitness", "home", "kitchen", "shoes",
)  # fmt: skip
STYLES = ("Classic", "Modern", "Compact", "Vintage", "Deluxe")
GOODS = {
    "accessories": ("Leather Belt", "Wool Scarf"),
    "apparel": ("Denim Jacket", "Linen Shirt"),
    "books": ("Travel Atlas", "Crime Novel"),
    "electronics": ("Wireless Headphones", "Desk Lamp"),
    "fitness": ("Yoga Mat", "Jump Rope"),
    "home": ("Knitted Blanket", "Wall Clock"),
    "kitchen": ("Chef Knife", "Copper Pan"),
    "shoes": ("Running Shoe", "Hiking Boot"),
}
HOSTILE = '</script><script>alert(1)</script><img src=x onerror="alert(2)"> ```` $\\frac$ \u2028 😀'

CONFIG = """\
seed: 0
algorithm: {algorithm}
environment:
  name: shop
  max_turns: 10
warm_start:
  enabled: true
  demonstrations:
    teacher: teacher
    recordings: null
    num_steps: 250
values:
  beta1: 0.5
  num_samples: 4
optimizer:
  learning_rate: 0.0003
training:
  max_steps: 60
  tasks_per_step: 64
  eval_every: 10
evaluation:
  split: test
  num_episodes: 100
  temperature: 0.0
policy:
  lora: {lora}
"""


def make_turn(
    observation: str, action: str, *, thought: str, reward: float, flags: tuple[str, ...] = ()
) -> Turn:
    response = f"<think>{thought}</think><answer>{action}</answer>" if action else thought
    return factories.turn(
        reward,
        observation=observation,
        prompt_token_ids=tuple(range(24)),
        response_token_ids=range(18),
        logprobs=(-0.1,) * 18,
        response=response,
        thought=thought if action else "",
        action=action,
        flags=flags,
    )


def make_trajectory(
    *, number: int, category: str, turns: list[Turn], final: str, success: bool, terminated: bool
) -> Trajectory:
    goal = product(number, category)
    return factories.episode(
        *turns,
        task=factories.task(
            f"User wants to buy {goal.lower()}.",
            split="test",
            category=category,
            payload={"product_id": number, "phrasing": "plain"},
        ),
        terminated=terminated,
        success=success,
        final_observation=final,
        policy_version="step-60",
        seed=number,
    )


def product(number: int, category: str) -> str:
    return f"{STYLES[number % 5]} {GOODS[category][number % 2]}"


def results_page(number: int, category: str, *, with_goal: bool = True) -> str:
    others = [
        f"[{(number * 37 + place) % 497 + 1}] {STYLES[(number + place) % 5]} "
        f"{GOODS[category][(number + place) % 2]} ${19 + 7 * place}.99"
        for place in range(1, 5)
    ]
    goal = [f"[{number}] {product(number, category)} $24.50"] if with_goal else []
    return "Found 7 results. Top 5:\n" + "\n".join(goal + others)


def make_episode(number: int, kind: str) -> Trajectory:
    """One episode of a kind: `success` or the name of a failure pattern."""
    category = CATEGORIES[number % len(CATEGORIES)]
    goal = product(number, category)
    task = f"TASK: User wants to buy {goal.lower()}.\nAvailable: 497 products across 8 categories."
    shown = (TurnFlag.TARGET_SHOWN.value,)
    search = make_turn(
        task, f"search {goal.lower()}", thought=f"I look for the {goal.lower()} first.",
        reward=0.1, flags=shown,
    )  # fmt: skip
    page, other = results_page(number, category), results_page(number, category, with_goal=False)

    def finish(turns: list[Turn], final: str, *, success: bool, terminated: bool) -> Trajectory:
        return make_trajectory(
            number=number, category=category, turns=turns, final=final,
            success=success, terminated=terminated,
        )  # fmt: skip

    if kind == "success":
        buy = make_turn(page, f"buy {number}", thought=f"{number} is the {goal}.", reward=1.0)
        return finish([search, buy], f"You bought {goal}.", success=True, terminated=True)
    if kind == "wrong_final_action":
        buy = make_turn(page, "buy 81", thought="81 fits the description.", reward=-0.1)
        return finish(
            [search, buy], "You bought Modern Wall Clock.", success=False, terminated=True
        )
    if kind == "unreadable":
        text = HOSTILE if number % 2 else "<think>buy the the the"
        turns = [
            make_turn(task, "", thought=text, reward=-0.05, flags=(TurnFlag.FORMAT_ERROR.value,))
        ] * 4
        return finish(turns, "Answer with <answer>…</answer>.", success=False, terminated=False)
    word = {"loop": "warm cosy blanket", "unreachable_target": "gift", "timeout": "item"}
    queries = [
        word[kind] if kind == "loop" else f"{word[kind]} {STYLES[n % 5]} {n}" for n in range(10)
    ]
    pages = [task, *(f"Results for “{query}” {'/'.join(query)}:\n{other}" for query in queries)]
    turns = [
        make_turn(
            pages[n], f"search {query}", thought="Let me try other words.", reward=0.0,
            flags=shown if kind == "timeout" and n == 4 else (),
        )
        for n, query in enumerate(queries)
    ]  # fmt: skip
    return finish(turns, pages[-1], success=False, terminated=False)


def make_evaluation(num_episodes: int = 100) -> list[Trajectory]:
    failures = {
        3: "wrong_final_action", 13: "wrong_final_action", 29: "wrong_final_action",
        42: "wrong_final_action", 18: "loop", 39: "loop", 52: "unreachable_target", 64: "timeout",
        61: "unreadable",
    }  # fmt: skip
    return [
        make_episode(number, failures.get(number, "success"))
        for number in range(1, num_episodes + 1)
    ]


def make_metrics(num_steps: int = 60) -> list[dict[str, Any]]:
    rng = generator(7, "fabricated-metrics")
    rows: list[dict[str, Any]] = []
    for step in range(1, num_steps + 1):
        progress = 1 / (1 + math.exp(-(step - 16) / 6))
        success = float(np.clip(0.34 + 0.6 * progress + rng.normal(0, 0.04), 0, 1))
        row: dict[str, Any] = {
            "step": step,
            "loss": 0.24 * (1 - 0.9 * progress) + abs(rng.normal(0, 0.01)),
            "return_mean": 1.1 * success - 0.06 + rng.normal(0, 0.01),
            "success_rate": success,
            "residual_mean": 0.05 * rng.normal(),
            "residual_variance": 0.23 * (1 - 0.88 * progress) + abs(rng.normal(0, 0.012)),
            "log_ratio_mean": 1.8 * progress,
            "log_ratio_max_abs": 3 + 4 * progress + rng.random(),
            "kl_per_sequence": 2.1 * progress + rng.normal(0, 0.07),
            "kl_per_token": 0.05 * progress,
            "v_star_success_correlation": 0.4 * (1 - progress) if step != 5 else math.nan,
            "logprob_gap_max": 3e-6 * (1 + rng.random()),
            "entropy": 0.6 - 0.4 * progress,
            "truncated_share": 0.2 * (1 - progress),
            "out_of_context_share": 0.05 * (1 - progress),
            "invalid_turn_share": 0.1 * (1 - progress),
            "format_error_share": 0.02 * (1 - progress),
            "num_turns_mean": 4.4 - 2.3 * progress,
            "advantage_mean": 0.01 * rng.normal(),
            "advantage_std": 1 - 0.4 * progress,
            "clip_fraction": 0.1 * progress,
            "shared_state_share": 0.5,
            "value_loss": 0.2 * (1 - progress),
            "explained_variance": 0.8 * progress,
            "critic_gradient_norm": 2.0,
            "num_segments_mean": 2.5,
            "known_turn_share": 0.6 - 0.2 * progress,
            "sampler_lag": step % 4,
            "sampler_log_ratio_mean_abs": 0.3 * progress,
            "gradient_norm": 0.8 + 0.3 * rng.random(),
            "learning_rate": 3e-4,
            "num_episodes": 64,
            "num_episodes_total": 64 * step,
            "num_generated_tokens": 64 * 45,
            "num_generated_tokens_total": 64 * 45 * step,
            "num_context_tokens": 64 * 300,
            "rollout_seconds": 0.5,
            "training_seconds": 0.7,
            "reference_scoring_seconds": 0.1,
        }
        if step % 10 == 0:
            row["eval_success_rate"] = round(min(0.97, success + 0.03), 2)
            row["eval_avg_reward"] = 1.06 * success
            row["eval_avg_steps"] = 4.2 - 2.1 * progress
        rows.append(row)
    return rows


def make_warm_start() -> list[dict[str, Any]]:
    rng = generator(7, "fabricated-warm-start")
    rows: list[dict[str, Any]] = []
    for step in range(10, 610, 10):
        accuracy = 0.04 + 0.94 / (1 + math.exp(-(step - 380) / 30))
        rows.append(
            {"phase": "copy", "step": step, "loss": 6.5 * (1 - accuracy), "accuracy": accuracy,
             "learning_rate": 1e-3, "seconds": 0.11 * step}
        )  # fmt: skip
    for step in range(10, 260, 10):
        loss = 0.5 + 3.2 * math.exp(-step / 45) + abs(rng.normal(0, 0.03))
        rows.append(
            {"phase": "demonstrations", "step": step, "loss": loss, "accuracy": 0.8,
             "learning_rate": 1e-3, "seconds": 0.3 * step}
        )  # fmt: skip
    return rows


def write_run(
    directory: Path,
    *,
    trained: bool = True,
    algorithm: str = "apo",
    lora: str = "null",
    failure_words: FailureWords = FAILURE_WORDS,
) -> Path:
    """Writes a whole run directory and returns it.

    Its metrics are those of all algorithms, so that a report has to choose.
    """
    (directory / "evaluation").mkdir(parents=True)
    section: dict[str, object] = {"name": algorithm}
    if algorithm in ALGORITHMS:
        section = algorithm_class(algorithm)().model_dump()
        section |= {"clip_high": 0.28} if "clip_high" in section else {}
    text = CONFIG.format(algorithm=json.dumps(section), lora=lora)
    (directory / "config.yaml").write_text(text)
    trajectories = make_evaluation()
    failed = [each for each in trajectories if not each.success]
    results = results_document(
        trajectories,
        policy="step-60",
        split="test",
        baselines={
            "random": outcome_summary(failed * 5 + trajectories[:1]),
            "heuristic": outcome_summary(failed * 6 + trajectories[:2] * 5),
            "reference": outcome_summary(failed * 7 + trajectories[:2] * 20),
        },
        pass_at={"1": 0.874, "4": 0.981},
        failure_words=failure_words,
    )
    write_json_atomically(directory / "evaluation" / "results.json", results)
    write_json_lines_atomically(
        directory / "evaluation" / "episodes.jsonl", episode_rows(trajectories, policy="step-60")
    )
    phases = {"copy": 68.0, "demonstrations": 80.2, "stage 1": 21.4}
    phases |= {"stage 2": 93.2} if trained else {}
    write_json_atomically(
        directory / "run.json",
        {
            "phases": {name: {"seconds": seconds} for name, seconds in phases.items()},
            "versions": {"ragen_apo": "0.1.0", "torch": "2.13.0+cpu", "python": "3.11.7"},
        },
    )
    write_json_lines_atomically(directory / "warm_start.jsonl", make_warm_start())
    write_json_atomically(
        directory / "value_report.json",
        {
            "num_tasks": 397,
            "num_samples": 1588,
            "pass_at_k": {"1": 0.262, "4": 0.553, "8": 0.58, "16": 0.59},
            "tasks_by_num_samples": {"4": 397},
            "share_never_solved": 0.447,
            "share_always_solved": 0.05,
            "mean_return": 0.241,
            "mean_v_star": 0.402,
            "beta1": 0.5,
            "advice": "44.7% of the tasks have no success yet. Sample them more often.",
        },
    )
    if trained:
        rows = make_metrics()
        (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return directory


@pytest.fixture
def build_run(tmp_path: Path) -> Callable[..., Path]:
    """Writes the run directory into the test's own folder, with the options of `write_run`."""

    def build(**options: Any) -> Path:
        return write_run(tmp_path / "shop-run", **options)

    return build


if __name__ == "__main__":
    from ragen_apo.report.write import write_report

    for written in write_report(write_run(Path(sys.argv[1]))):
        print(written)
