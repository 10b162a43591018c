"""Two algorithms from one reference: the warm start is made once, and each run starts from it.

    python examples/compare_algorithms.py [CONFIG [FOLDER]]

RLOO plays each task eight times, so it gets an eighth of the tasks in each step: both play as many
episodes. The same call goes on with runs that are there already. `ragen-apo compare` does this with
seeds, a budget, curves and a table (docs/comparison.md).
"""

import sys
from pathlib import Path

import ragen_apo

SHOP = Path(__file__).resolve().parents[1] / "configs" / "shop.yaml"


def main(config=SHOP, folder="runs/example_algorithms"):
    path = Path(folder, "reference")
    first = ragen_apo.train(config, path, until="reference", resume=(path / "config.yaml").exists())
    tasks_per_step = first.config.training.tasks_per_step
    for algorithm, share in (("apo", 1), ("rloo", 8)):
        path = Path(folder, algorithm)
        run = ragen_apo.train(
            config,
            path,
            resume=(path / "config.yaml").exists(),
            policy={"path": first.files.reference(0).absolute()},
            warm_start={"enabled": False},
            algorithm={"name": algorithm},
            training={"tasks_per_step": max(1, tasks_per_step // share)},
        )
        results = ragen_apo.evaluate(run)
        low, high = results["success_ci95"]
        print(f"{algorithm}: {results['success_rate']:.1%} ({low:.1%} to {high:.1%})")


if __name__ == "__main__":
    main(*sys.argv[1:])
