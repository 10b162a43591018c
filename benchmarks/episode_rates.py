"""Episodes per second in Stage 2 of real runs: rollouts on one side, training on the other.

    python -m benchmarks.episode_rates RUN [RUN ...]

Reads what the steps of a run have recorded (`metrics.jsonl`) and takes the median of its steps.
Training is everything between two rollouts: scoring by the reference, all passes, the update.
For a clean figure give a run that had the machine to itself, with evaluations left out:

    ragen-apo train --config configs/webshop_small.yaml --warm_start.enabled false \\
        --policy.path REFERENCE --training.max_tasks 64 --rollout_filter.strategy none \\
        --training.max_steps 3 --training.eval_every null --no-evaluate

The aims are for a prototype's episodes of WebShop, 780 tokens each, 52 of them sampled, and a model
of 4 M parameters. REFERENCE is `references/0` of a warm-started run; a model of 4 M has
`--policy.small.hidden_size 256 --policy.small.num_heads 8 --policy.small.intermediate_size 768`.
"""

import argparse
from pathlib import Path
from statistics import median

from benchmarks.tables import write_page
from safetensors.numpy import load_file

from ragen_apo.config import load_config
from ragen_apo.files import read_json_lines
from ragen_apo.run_directory import RunDirectory, open_run

AIMS = (
    "12 episodes/s of rollouts and 10 of training, for episodes of 780 tokens: 9,400 and 7,800 "
    "tokens/s."
)


def num_parameters(folder: Path) -> int:
    """Of the weights in a model folder; tied ones count once."""
    files = folder.glob("*.safetensors")
    return sum(tensor.size for file in files for tensor in load_file(file).values())


def row(run: RunDirectory) -> list[object]:
    """One run's table row."""
    config = load_config(run.config)
    steps = read_json_lines(run.metrics)

    def typical(number: str, per: str) -> float:
        """The median over steps of a number that each step counted, per something else."""
        return median(step[number] / step[per] for step in steps)

    return [
        f"{config.environment.name}, {config.algorithm.name}",
        f"{num_parameters(run.reference(0)) / 1e6:.2f} M",
        len(steps),
        f"{median(step['num_turns_mean'] for step in steps):.1f}",
        f"{typical('num_context_tokens', 'num_episodes'):,.0f}",
        f"{typical('num_generated_tokens', 'num_episodes'):.0f}",
        f"{typical('num_episodes', 'rollout_seconds'):.1f}",
        f"{typical('num_context_tokens', 'rollout_seconds'):,.0f}",
        f"{typical('num_episodes', 'training_seconds'):.1f}",
        f"{typical('num_context_tokens', 'training_seconds'):,.0f}",
    ]


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("runs", type=Path, nargs="+", help="run directories with Stage 2 steps")
    runs = [open_run(path) for path in parser.parse_args().runs]
    write_page(
        "episode_rates",
        title="Episodes per second in Stage 2",
        notes=(
            "Rates are medians over the steps of each run. What is counted is described in "
            "`benchmarks/episode_rates.py`. Tokens are those of the contexts, prompts included. "
            f"Aims for 4 M parameters: {AIMS}"
        ),
        header=[
            "run",
            "parameters",
            "steps",
            "turns per episode",
            "tokens per episode",
            "of them sampled",
            "rollouts, episodes/s",
            "rollouts, tokens/s",
            "training, episodes/s",
            "training, tokens/s",
        ],
        rows=[row(run) for run in runs],
    )


if __name__ == "__main__":
    main()
