"""One table of policies over environments: a model before training, after it, and behind an API.

    python -m benchmarks.other_environments OUT --told "SmolLM2=models/smollm2-135m" \
        --trained "SmolLM2, trained in the shop=RUN/policy" --webshop-data FOLDER
    python -m benchmarks.other_environments OUT --api smollm2 --base-url http://127.0.0.1:8000/v1
    python -m benchmarks.other_environments OUT --page

Greedy episodes of `test`, the first ones of each environment as its shipped configuration has it.
A model after `--told` is told the rules and the form of a response (`rules_and_format`), as one
behind an API is; one after `--trained` knows them. OUT keeps the episodes of each row. What is
there is not played again, and `--page` makes the table of all of them.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from benchmarks.tables import write_page

from ragen_apo.agent.assembly import build_environments, build_proxy
from ragen_apo.api import evaluate_api, read_config
from ragen_apo.config import RunConfig
from ragen_apo.config.api_model import TOLD
from ragen_apo.config.load import read_values
from ragen_apo.evaluation.evaluate import EvaluationPlan, play_baselines, play_evaluation
from ragen_apo.evaluation.summary import episode_rows, wilson_interval
from ragen_apo.files import read_json_lines, write_json_lines_atomically
from ragen_apo.policy.language_model import load_language_model
from ragen_apo.run_directory import RunDirectory
from ragen_apo.types import TurnFlag

CONFIGS = {
    "shop": "configs/shop.yaml",
    "frozen_lake": "configs/frozen_lake.yaml",
    "sokoban": "configs/sokoban.yaml",
    "webshop": "configs/webshop_reinforce.yaml",
}
"""Whose section `environment` is played."""
MAX_RESPONSE_TOKENS, MAX_CONTEXT_TOKENS = 48, 3072
HEADER = ["environment", "policy", "success", "average reward", "steps", "unreadable", "impossible"]


def configured(environment: str, options: argparse.Namespace, system_prompt: str) -> RunConfig:
    """The environment of its shipped configuration, and an agent with room for its pages."""
    section = dict(read_values(CONFIGS[environment])[0]["environment"])
    if environment == "webshop":
        section["data"] = options.webshop_data
    return read_config(
        {
            "machine": {"num_threads": options.threads},
            "environment": section,
            "agent": {
                "max_response_tokens": MAX_RESPONSE_TOKENS,
                "max_context_tokens": MAX_CONTEXT_TOKENS,
                "system_prompt": system_prompt,
            },
            "policy": {"small": {"max_position": MAX_CONTEXT_TOKENS}},
            "warm_start": {"enabled": False},
            "training": {"num_rows": options.rows},
            "evaluation": {"split": "test", "num_episodes": options.episodes},
        }
    )


def play_here(config: RunConfig, label: str, folder: Path) -> list[dict[str, Any]]:
    """Rows of episodes.jsonl by a model folder."""
    environments = build_environments(config.environment, config.agent)
    device = torch.device("cpu")
    model = load_language_model(folder, device=device, autocast=torch.bfloat16)
    proxy = build_proxy(config, model, environments)
    episodes = play_evaluation(proxy, plan_of(config), policy_version=label)
    return episode_rows(episodes, policy=label)


def play_there(config: RunConfig, label: str, base_url: str, out: Path) -> list[dict[str, Any]]:
    """Rows of episodes.jsonl by a model behind an API."""
    evaluate_api(label, out, base_url=base_url, config=config, max_tokens=MAX_RESPONSE_TOKENS)
    return read_json_lines(RunDirectory(out).episodes)


def plan_of(config: RunConfig) -> EvaluationPlan:
    """Greedy play of the episodes that the configuration evaluates."""
    wanted = config.evaluation
    return EvaluationPlan(wanted.split, wanted.num_episodes, temperature=0.0, seed=config.seed)


def share_of(rows: list[dict[str, Any]], flag: TurnFlag) -> str:
    """Of all turns."""
    return f"{fmean(flag.value in turn['flags'] for row in rows for turn in row['turns']):.0%}"


def percent(successes: int, episodes: int) -> str:
    low, high = wilson_interval(successes, episodes)
    return f"{successes / episodes:.0%} ({low:.1%} to {high:.1%})"


def cells(environment: str, label: str, rows: list[dict[str, Any]]) -> list[str]:
    """A row of the table, of rows of episodes.jsonl."""
    return [
        environment,
        label,
        percent(sum(row["success"] for row in rows), len(rows)),
        f"{fmean(row['return'] for row in rows):.3f}",
        f"{fmean(row['num_turns'] for row in rows):.1f}",
        share_of(rows, TurnFlag.FORMAT_ERROR),
        share_of(rows, TurnFlag.INVALID_ACTION),
    ]


def make_page(options: argparse.Namespace) -> None:
    """The table of everything that OUT holds, with the scripted policies below each environment."""
    table = []
    for environment in options.environments:
        for file in sorted(options.out.glob(f"{environment}/*.jsonl")):
            table.append(cells(environment, file.stem, read_json_lines(file)))
        config = configured(environment, options, "none")
        environments = build_environments(config.environment, config.agent)
        for name, found in play_baselines(environments, plan_of(config)).items():
            outcome = percent(found["successes"], found["episodes"])
            reward, steps = f"{found['avg_reward']:.3f}", f"{found['avg_steps']:.1f}"
            table.append([environment, f"{name} (scripted)", outcome, reward, steps, "", ""])
    notes = (
        "Episodes are greedy and of `test`, one for each of its first tasks. They have the "
        "sections `environment` of the shipped configurations. In brackets is the 95% interval of "
        "Wilson. Unreadable and impossible actions are shares of all turns."
    )
    title = "One model before and after training, and behind an API"
    write_page("other_environments", title=title, notes=notes, header=HEADER, rows=table)


def labelled(text: str) -> tuple[str, Path]:
    """A policy as the command line names it; its label becomes the name of a file."""
    label, _, folder = text.partition("=")
    if not label or not folder or "/" in label:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected LABEL=FOLDER, no / in the label")
    return label, Path(folder)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("out", type=Path)
    policy = {"type": labelled, "metavar": "LABEL=FOLDER", "action": "append", "default": []}
    parser.add_argument("--told", help="a model that is told what to write", **policy)
    parser.add_argument("--trained", help="a model that knows it", **policy)
    parser.add_argument("--api", metavar="NAME", help="a model of the server at --base-url")
    parser.add_argument("--base-url")
    parser.add_argument("--page", action="store_true", help="make the table")
    parser.add_argument("--environments", nargs="+", choices=CONFIGS, default=list(CONFIGS))
    parser.add_argument("--webshop-data", default="auto")
    parser.add_argument("--episodes", type=int, default=100)
    parser.add_argument("--rows", type=int, default=25)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    if options.api and not options.base_url:
        parser.error("--api needs --base-url, such as http://127.0.0.1:8000/v1")
    torch.set_num_threads(options.threads)
    for environment in options.environments:
        folder = options.out / environment
        folder.mkdir(parents=True, exist_ok=True)
        for prompt, policies in ((TOLD, options.told), ("none", options.trained)):
            for label, model in policies:
                if not (file := folder / f"{label}.jsonl").exists():
                    rows = play_here(configured(environment, options, prompt), label, model)
                    write_json_lines_atomically(file, rows)
                    print(cells(environment, label, rows), flush=True)
        name = (options.api or "").replace("/", "-")
        if name and not (file := folder / f"{name} by API.jsonl").exists():
            config = configured(environment, options, TOLD)
            rows = play_there(config, options.api, options.base_url, folder / name)
            write_json_lines_atomically(file, rows)
    if options.page:
        make_page(options)


if __name__ == "__main__":
    main()
