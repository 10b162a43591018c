"""Does a small agent learn the real WebShop? The whole run over seeds, splits and rewards.

    python -m benchmarks.webshop_learning --data FOLDER [--seeds 0 1 2] [--splits standard product]

For each split of the goals and each seed: the run of configs/webshop_small.yaml, trained under the
reward `corrected`; then, from the same reference, Stages 1 and 2 under `upstream` (`--rewards
corrected` leaves that out). Reference and policies play the first 500 goals of the split `test`
greedily, and each purchase is scored under both rewards. Results are added to
results/webshop_learning.json; the page and its picture, the curves of Stage 2, show all that are
there: a seed takes an hour or two, so they need not come from one call. Further arguments change
keys of the configuration, such as `--machine.num_threads 1`; `--config
configs/webshop_new_products.yaml` takes the other configuration, whose demonstrations are by
another shopper and have sections of their own. `--name "careful, relabel_spares 0.95"` opens a
section for a configuration with changed keys.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.runs import finished_run, greedy_episodes, minutes, percent
from benchmarks.tables import RESULTS, machine
from benchmarks.webshop_baselines import play
from benchmarks.webshop_rewards import REWARDS, purchases
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ragen_apo.config import load_config
from ragen_apo.environments.webshop import WebShopEnvironment
from ragen_apo.environments.webshop.goals import goal_of_task
from ragen_apo.files import read_json_lines, write_bytes_atomically, write_json_atomically
from ragen_apo.report.drawing import png_bytes, style_axes
from ragen_apo.report.plots import running_mean
from ragen_apo.report.style import ACCENT, MUTED, PAPER, WARM
from ragen_apo.run_directory import RunDirectory
from ragen_apo.types import Trajectory, TurnFlag

Result = dict[str, Any]
CONFIG = Path("configs/webshop_small.yaml")
KEPT = RESULTS / "webshop_learning.json"
CURVES_FILE = RESULTS / "webshop_learning.png"
NUM_GOALS = 500
SPLITS = ("standard", "product")
BASELINES = ("random", "heuristic", "careful")
CURVES = {"success_rate": "Success", "return_mean": "Score"}
REFERENCE = "reference: copying, demonstrations"
NOTES = """The model starts from random weights and sees one episode of a scripted shopper for each
training goal, several times over. Published agents start from a pretrained model and
see no demonstrations.

- **Play** is greedy, at most 15 turns, on the first 500 goals of the split `test`.
  Settings were chosen on the split `validation`.
- **Shoppers.** `careful` knows no more than it reads and is among the baselines.
  `teacher` knows the goal and solves 99.8%. `forgetful` does, too, but sometimes
  misnames the product and goes on as `careful`.
- **Splits.** 95.8% of the standard test goals are about products of training goals.
  Those of the split `product` are about none.
- **Success** is a purchase with score 1. The same purchases are scored under both
  rewards, with the noun rule `rule` and price seed 0. "Trained under" is the reward of
  Stages 1 and 2.
- **Means** and standard deviations are over seeds. Minutes are those of the run up to
  that policy.
- **Published for comparison**: GiGPO with Qwen2.5-7B, 75.2% and 86.2 under `upstream`
  on the standard split (verl-agent's table). Its validation goals are also trained on.
  Nouns are by spaCy, and price limits were drawn without a seed.
- **Sections of `careful`** are from `--config configs/webshop_new_products.yaml`. That
  of the split `standard` is older: 800 steps of demonstrations, relabelled among the
  tokens of their own names alone. `careful, relabel_spares 0.95` has
  `--warm_start.demonstrations.relabel_spares 0.95`, so that more has to be copied and
  less can be known (docs/log.md).
- **Text.** All of it was measured with version 6 of the text of `compact`, without the
  mark ` (opened)` behind the number of a result that was opened."""


def trained(reward: str) -> str:
    """The name of the policy that was trained under a reward."""
    return f"after A\\*-PO under `{reward}`"


def failure(episode: Trajectory, environment: WebShopEnvironment) -> str | None:
    """What went wrong in an episode, in the shop's terms; None for a success."""
    if episode.success:
        return None
    goal = goal_of_task(episode.task, environment.catalog)
    wanted = environment.catalog.product(goal.product)
    if not episode.terminated:
        return "no purchase"
    if wanted.asin not in episode.final_observation:
        was_shown = any(TurnFlag.TARGET_SHOWN.value in turn.flags for turn in episode.turns)
        return "another product, the right one was shown" if was_shown else "never saw the product"
    _, _, selected = episode.final_observation.partition(" with ")
    missing = any(f"{name} = {value}" not in selected for name, value in goal.options)
    return "right product, wrong or missing option" if missing else "right purchase, below 1"


def result(run: RunDirectory, folder: Path) -> Result:
    """Success and score under both rewards, turns and failures of a model folder of a run."""
    options = load_config(run.config).environment.options
    episodes = greedy_episodes(run, folder, split="test", num_episodes=NUM_GOALS)
    rows = [episode.to_json() for episode in episodes]
    environment = WebShopEnvironment(**options)
    failures = Counter(name for e in episodes if (name := failure(e, environment)) is not None)
    scores: Result = purchases(rows, options, split="test")
    return scores | {
        "turns": sum(len(episode.turns) for episode in episodes) / len(episodes),
        "failures": dict(failures.most_common()),
        "machine": machine(),
    }


def after_training(run: RunDirectory) -> Result:
    """The result of a run's policy, with the figures of each step of Stage 2."""
    rows = read_json_lines(run.metrics)
    return result(run, run.policy) | {key: [row[key] for row in rows] for key in CURVES}


def results_of_seed(
    folder: Path,
    config_path: Path,
    overrides: Sequence[str],
    *,
    split: str,
    seed: int,
    rewards: Sequence[str],
) -> Iterator[tuple[str, Result]]:
    """Trains what is not trained yet; yields each policy's name and result when it is there."""
    base = ["--seed", str(seed), "--environment.split_scheme", split, *overrides]
    first = finished_run(folder / f"{split}-{seed}-corrected", load_config(config_path, base))
    before = minutes(first, phases=("copy", "demonstrations"))
    yield REFERENCE, result(first, first.reference(0)) | {"minutes": before}
    yield trained("corrected"), after_training(first) | {"minutes": minutes(first)}
    if "upstream" in rewards:
        reference = ["--warm_start.enabled", "false", "--policy.path", str(first.reference(0))]
        config = load_config(config_path, [*base, *reference, "--environment.reward", "upstream"])
        second = finished_run(folder / f"{split}-{seed}-upstream", config)
        whole = before + minutes(second)
        yield trained("upstream"), after_training(second) | {"minutes": whole}


def baseline(name: str, *, data: str, split: str) -> Result:
    """A scripted policy on the same goals, under both rewards."""
    environment = WebShopEnvironment(data=data, split_scheme=split, max_turns=15)
    return play(environment, name, environment.tasks("test")[:NUM_GOALS])


def keep(found: Result, name: str, *, split: str, section: str, seed: int, data: str) -> None:
    """Adds a policy's result to those that are kept, and the baselines of its section once."""
    results: dict[str, Any] = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    kept = results.setdefault(split, {}).setdefault(section, {"baselines": {}, "seeds": {}})
    for rule in BASELINES:
        if rule not in kept["baselines"]:
            kept["baselines"][rule] = baseline(rule, data=data, split=split)
    kept["seeds"].setdefault(str(seed), {})[name] = found
    write_json_atomically(KEPT, results)


def cells(results: Sequence[Result]) -> list[str]:
    """Success and score under both rewards, and turns: means, with spreads over several seeds."""
    columns = [
        [result[reward][figure] for result in results]
        for reward in REWARDS
        for figure in ("success", "score")
    ]
    columns.append([result["turns"] for result in results])
    if len(results) == 1:
        return [f"{column[0]:.1f}" for column in columns]
    return [percent(value / 100 for value in column) for column in columns]


def table(split: str, section: str, kept: Mapping[str, Any]) -> list[str]:
    """A section: baselines, policies, each seed, and the failures."""
    seeds: dict[str, dict[str, Result]] = kept["seeds"]
    names = [REFERENCE, *(trained(reward) for reward in REWARDS)]
    figures = [f"{reward}: {figure}" for reward in REWARDS for figure in ("success, %", "score")]
    header = ["seeds", *figures, "turns", "minutes"]
    lines = [
        f"## Split `{split}`, demonstrations by {section}",
        "",
        f"| policy | {' | '.join(header)} |",
        f"|---|{'---:|' * len(header)}",
    ]
    for name, outcome in kept["baselines"].items():
        lines.append(f"| {name} | | {' | '.join(cells([outcome]))} | |")
    for name in names:
        results = [of_seed[name] for of_seed in seeds.values() if name in of_seed]
        if len(results) > 1:
            lines.append(f"| {name} | {len(results)} | {' | '.join(cells(results))} | |")
    for seed, of_seed in seeds.items():
        for name in names:
            if found := of_seed.get(name):
                row = [name, f"seed {seed}", *cells([found]), f"{found['minutes']:.0f}"]
                lines.append(f"| {' | '.join(row)} |")
    note = "Failures of all seeds' episodes, by the reward trained under (reference: `corrected`):"
    lines += ["", note, ""]
    for name in names:
        results = [of_seed[name] for of_seed in seeds.values() if name in of_seed]
        failures = sum((Counter(result["failures"]) for result in results), Counter[str]())
        listed = ", ".join(f"{kind} {number}" for kind, number in failures.most_common())
        total = f"{failures.total()} of {NUM_GOALS * len(results)} episodes"
        lines += [f"- {name}: {total}: {listed}"] if results else []
    return [*lines, "", *_machines(seeds), ""]


def _machines(seeds: Mapping[str, Mapping[str, Result]]) -> list[str]:
    """What the seeds' minutes were taken on."""
    found: dict[str, set[str]] = {}
    for seed, of_seed in seeds.items():
        for each in of_seed.values():
            found.setdefault(each["machine"], set()).add(seed)
    return [f"Machine of seed {', '.join(sorted(of))}: {name}" for name, of in found.items()]


def _draw_means(axes: Axes, lines: Sequence[Sequence[float]], *, color: str, label: str) -> None:
    """Each seed's curve faintly, and the running mean of all of them."""
    for line in lines:
        axes.plot(range(1, len(line) + 1), line, color=color, linewidth=0.8, alpha=0.3)
    mean = [fmean(values) for values in zip(*lines, strict=False)]  # as far as all seeds come
    axes.plot(range(1, len(mean) + 1), running_mean(mean, window=2), color=color, label=label)


def curves(sections: Iterable[tuple[str, Mapping[str, Mapping[str, Result]]]]) -> bytes:
    """Sampled success and score on training goals at each step of Stage 2, a row a section."""
    shown = [(name, found) for name, seeds in sections if (found := _by_reward(seeds))]
    size = (9.0, 0.6 + 3.4 * max(1, len(shown)))
    figure = Figure(figsize=size, facecolor=PAPER, layout="constrained")
    grid = figure.subplots(max(1, len(shown)), len(CURVES), squeeze=False)
    for row, (name, found) in zip(grid, shown, strict=False):
        for axes, (key, title) in zip(row, CURVES.items(), strict=True):
            style_axes(axes, f"{title}, {name}")
            for reward, results in found.items():
                lines = [each[key] for each in results]
                color = ACCENT if reward == "corrected" else WARM
                label = f"trained under {reward}, seeds: {len(lines)}"
                _draw_means(axes, lines, color=color, label=label)
            axes.set_xlabel("step of Stage 2", color=MUTED)
            axes.legend(frameon=False, labelcolor=MUTED, fontsize=9)
    return png_bytes(figure)


def _by_reward(seeds: Mapping[str, Mapping[str, Result]]) -> dict[str, list[Result]]:
    """The trained policies of all seeds; a reward that nothing was trained under is left out."""
    found: dict[str, list[Result]] = {}
    for of_seed in seeds.values():
        for reward in REWARDS:
            if trained(reward) in of_seed:
                found.setdefault(reward, []).append(of_seed[trained(reward)])
    return found


def main() -> None:
    """Runs what is asked for, and writes results/webshop_learning.json, .md and .png."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", required=True, help="folder with upstream's files")
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--splits", nargs="+", default=SPLITS, choices=SPLITS)
    parser.add_argument("--rewards", nargs="+", default=REWARDS, choices=REWARDS)
    parser.add_argument("--config", type=Path, default=CONFIG)
    parser.add_argument("--name", help="of the section; the teacher's without it")
    parser.add_argument("--runs", type=Path, default=Path("runs/webshop_learning"))
    arguments, changes = parser.parse_known_args()
    overrides = ["--environment.data", arguments.data, *changes]
    config = load_config(arguments.config, overrides)
    section = arguments.name or config.warm_start.demonstrations.teacher
    for split in arguments.splits:
        for seed in arguments.seeds:
            for policy, found in results_of_seed(
                arguments.runs / section,
                arguments.config,
                overrides,
                split=split,
                seed=seed,
                rewards=arguments.rewards,
            ):
                keep(found, policy, split=split, section=section, seed=seed, data=arguments.data)
    lines = ["# Learning the real WebShop", "", NOTES, ""]
    lines += ["Command: `python -m benchmarks.webshop_learning --data FOLDER`", ""]
    lines += [
        "Stage 2, tasks whose samples in Stage 1 differ, sampled at the run's temperature:",
        "",
    ]
    lines += [f"![curves]({CURVES_FILE.name})", ""]
    sections = [
        (split, name, kept)
        for split, by_name in json.loads(KEPT.read_text()).items()
        for name, kept in by_name.items()
    ]
    for each in sections:
        lines += table(*each)
    picture = curves((f"{split}, {name}", kept["seeds"]) for split, name, kept in sections)
    write_bytes_atomically(CURVES_FILE, picture)
    page = "\n".join(lines)
    (RESULTS / "webshop_learning.md").write_text(page, encoding="utf-8")
    print(page)


if __name__ == "__main__":
    main()
