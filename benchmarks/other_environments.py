"""What a model does in environments that it was not trained in: greedy episodes of `test`.

    python -m benchmarks.other_environments MODEL --environment frozen_lake --max-turns 10 \
        --episodes 50 [--system-prompt rules_and_format] [--option data=generated]

Prints one row of a table, and success of the scripted baselines on the same episodes. `--out` keeps
the episodes.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch

from ragen_apo.agent.assembly import build_environments, build_proxy
from ragen_apo.api import read_config
from ragen_apo.config import RunConfig
from ragen_apo.evaluation.evaluate import EvaluationPlan, play_baselines, play_evaluation
from ragen_apo.evaluation.summary import episode_rows, outcome_summary
from ragen_apo.files import write_json_lines_atomically
from ragen_apo.policy.language_model import load_language_model
from ragen_apo.types import Trajectory, TurnFlag

HEADER = [
    "environment",
    "prompt",
    "turns",
    "episodes",
    "success",
    "average reward",
    "no readable action",
    "impossible action",
    "seconds",
]
MAX_RESPONSE_TOKENS, MAX_CONTEXT_TOKENS = 40, 2048


def configured(options: argparse.Namespace) -> RunConfig:
    """The environment with its options, and an agent with room for its pages."""
    extra = dict(each.split("=", 1) for each in options.option)
    return read_config(
        {
            "environment": {
                "name": options.environment,
                "max_turns": options.max_turns,
                **extra,
            },
            "agent": {
                "max_response_tokens": MAX_RESPONSE_TOKENS,
                "max_context_tokens": MAX_CONTEXT_TOKENS,
                "system_prompt": options.system_prompt,
            },
            "policy": {"path": str(options.model)},
            "warm_start": {"enabled": False},
            "training": {"num_rows": options.rows},
        }
    )


def share_of(episodes: list[Trajectory], flag: TurnFlag) -> float:
    """Of all turns."""
    turns = [turn for episode in episodes for turn in episode.turns]
    return sum(flag.value in turn.flags for turn in turns) / len(turns)


def percent(found: dict[str, Any]) -> str:
    low, high = found["success_ci95"]
    return f"{found['success_rate']:.0%} ({low:.1%} to {high:.1%})"


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--environment", required=True)
    parser.add_argument("--option", action="append", default=[], help="of it, as key=value")
    parser.add_argument("--max-turns", type=int, required=True)
    parser.add_argument("--episodes", type=int, default=50)
    parser.add_argument("--system-prompt", default="none")
    parser.add_argument("--rows", type=int, default=25)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, help="a file for the episodes")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    config = configured(options)
    environments = build_environments(config.environment, config.agent)
    model = load_language_model(options.model, device=torch.device("cpu"))
    proxy = build_proxy(config, model, environments)
    plan = EvaluationPlan("test", options.episodes, temperature=0.0, seed=config.seed)
    started = time.perf_counter()
    episodes = play_evaluation(proxy, plan, policy_version="benchmark")
    seconds = time.perf_counter() - started
    if options.out:
        rows = episode_rows(episodes, policy=str(options.model))
        write_json_lines_atomically(options.out, rows)
    found = outcome_summary(episodes)
    baselines = play_baselines(environments, plan)
    cells = [
        options.environment,
        options.system_prompt,
        options.max_turns,
        len(episodes),
        percent(found),
        f"{found['avg_reward']:.3f}",
        f"{share_of(episodes, TurnFlag.FORMAT_ERROR):.0%}",
        f"{share_of(episodes, TurnFlag.INVALID_ACTION):.0%}",
        f"{seconds:.0f}",
    ]
    print(f"| {' | '.join(HEADER)} |")
    print(f"| {' | '.join(str(cell) for cell in cells)} |")
    print({name: percent(baseline) for name, baseline in baselines.items()}, flush=True)


if __name__ == "__main__":
    main()
