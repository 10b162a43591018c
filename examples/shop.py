"""Trains the agent of the quick start and tells two of its episodes turn by turn.

    python examples/shop.py [CONFIG [RUN_DIR]]

About five minutes on two cores with configs/shop.yaml. The same call goes on with a run that is
there already.
"""

import sys
from pathlib import Path

import ragen_apo

SHOP = Path(__file__).resolve().parents[1] / "configs" / "shop.yaml"


def main(config=SHOP, run_dir="runs/example_shop"):
    run = ragen_apo.train(config, run_dir, resume=Path(run_dir, "config.yaml").exists())
    results = ragen_apo.evaluate(run)
    reference = results["baselines"]["reference"]
    print(f"success: {results['success_rate']:.0%}, before {reference['success_rate']:.0%}")

    episodes = ragen_apo.episodes(run)
    best = max(episodes, key=lambda episode: episode.episode_return)
    print(f"\nThe best episode\n\n{best}")
    failed = [episode for episode in episodes if not episode.success]
    if failed:
        print(f"\nOne that failed: {failed[0].failure}\n\n{failed[0]}")
    print(f"\nThe report: {ragen_apo.write_report(run)[-1]}")


if __name__ == "__main__":
    main(*sys.argv[1:])
