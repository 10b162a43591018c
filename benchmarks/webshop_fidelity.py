"""Replays episodes recorded from the original WebShop and counts the steps that are identical.

    python -m benchmarks.webshop_fidelity --data FOLDER --episodes FILE.json.gz

A step is identical if text, rich text, available actions, reward and end are. Prints one JSON
object: `episodes`, `steps`, `identical_steps` (and the same for prices and reward parts), and
`first_differences` (episode, step, action, field, expected, got; texts from where they differ).
The recordings say which price seed they were made with; every word of a title counted as a noun.
"""

import argparse
import gzip
import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ragen_apo.environments.webshop import WebShopEnvironment

MAX_DIFFERENCES_SHOWN = 10
TEXT_SHOWN = 80
COMPARED = ("text", "rich", "available", "reward", "done")


@dataclass
class Tally:
    """What the replay has found so far."""

    episodes: int = 0
    steps: int = 0
    identical_steps: int = 0
    finished_episodes: int = 0
    identical_reward_parts: int = 0
    first_differences: list[dict[str, Any]] = field(default_factory=list)

    def note(self, **difference: Any) -> None:
        """Keeps a difference, if it is one of the first."""
        if len(self.first_differences) < MAX_DIFFERENCES_SHOWN:
            self.first_differences.append(difference)


def _excerpt(expected: Any, got: Any) -> tuple[Any, Any]:
    """Both values; of long texts what follows the first character that differs."""
    if not isinstance(expected, str) or not isinstance(got, str):
        return expected, got
    pairs = enumerate(zip(expected, got, strict=False))
    same = next((i for i, (a, b) in pairs if a != b), min(len(expected), len(got)))
    start = max(same - 20, 0)
    return expected[start : start + TEXT_SHOWN], got[start : start + TEXT_SHOWN]


def _play(
    text: WebShopEnvironment, rich: WebShopEnvironment, episode: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    """What our environment gives for the recorded goal and actions, in the recording's fields."""
    task = text.goal_task(episode["goal_index"])
    (plain, info), (marked, _) = text.reset(task, seed=0), rich.reset(task, seed=0)
    reward, done = 0.0, False
    for step in episode["steps"]:
        if step["action"] is not None:
            plain, reward, done, _, info = text.step(step["action"])
            marked, *_ = rich.step(step["action"])
        available = info["available_actions"]
        if available is not None:
            available = {**available, "clickables": list(available["clickables"])}
        yield {
            "text": plain,
            "rich": marked,
            "available": available,
            "reward": reward,
            "done": done,
            "reward_parts": info.get("reward_parts"),
        }


def _compare(
    number: int, episode: dict[str, Any], played: Iterator[dict[str, Any]], tally: Tally
) -> None:
    for index, (step, ours) in enumerate(zip(episode["steps"], played, strict=True)):
        tally.steps += 1
        differing = [name for name in COMPARED if step[name] != ours[name]]
        tally.identical_steps += not differing
        for name in differing:
            expected, got = _excerpt(step[name], ours[name])
            place_in_file = {"episode": number, "step": index, "action": step["action"]}
            tally.note(**place_in_file, field=name, expected=expected, got=got)
        if ours["done"]:
            tally.finished_episodes += 1
            tally.identical_reward_parts += ours["reward_parts"] == episode.get("verbose")


def replay(data: Path, episodes: Path, store: Path) -> dict[str, Any]:
    """The result of replaying a file of recorded episodes against the data of a folder."""
    with gzip.open(episodes, "rt", encoding="utf-8") as stream:
        recording = json.load(stream)
    options = {"data": str(data), "store": store, "price_seed": recording["price_seed"]}
    options |= {"reward": "upstream", "nouns": "words", "max_turns": None}
    text = WebShopEnvironment(**options, observation="text")
    rich = WebShopEnvironment(**options, observation="text_rich")
    tally = Tally()
    prices, recorded_prices = text.prices(), recording.get("prices", {})
    for number, episode in enumerate(recording["episodes"]):
        tally.episodes += 1
        _compare(number, episode, _play(text, rich, episode), tally)
    return {
        "episodes": tally.episodes,
        "steps": tally.steps,
        "identical_steps": tally.identical_steps,
        "share_identical": tally.identical_steps / max(tally.steps, 1),
        "goals": text.num_goals,
        "goals_recorded": recording.get("n_goals"),
        "prices": len(recorded_prices),
        "identical_prices": sum(prices.get(a) == price for a, price in recorded_prices.items()),
        "finished_episodes": tally.finished_episodes,
        "identical_reward_parts": tally.identical_reward_parts,
        "first_differences": tally.first_differences,
    }


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--data", type=Path, required=True, help="folder with upstream's files")
    parser.add_argument("--episodes", type=Path, required=True, help="recorded episodes, .json.gz")
    parser.add_argument("--store", type=Path, help="prepared catalogues (temporary)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        store = arguments.store or Path(temporary)
        result = replay(arguments.data, arguments.episodes, store)
        print(json.dumps(result, indent=2, ensure_ascii=False))


if __name__ == "__main__":
    main()
