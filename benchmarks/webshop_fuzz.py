"""Random and hostile actions against WebShop: no exception, no growth of memory.

    python -m benchmarks.webshop_fuzz [--actions 1000000] [--data FOLDER]

Half of the actions are what the open page offers (so that every kind of page is reached), the rest
are random texts: any Unicode, control characters, lone surrogates, nested brackets, the
`search[<r>]` family, and a few of 100,000 characters. The three modes take turns by episode. Prints
one JSON object: actions, episodes, exceptions, and the resident memory after each tenth.
"""

import argparse
import json
import random
import tempfile
from collections import Counter
from pathlib import Path

from ragen_apo.environments.webshop import WebShopEnvironment

MODES = ("compact", "text", "text_rich")
MAX_STEPS = 20
SPECIAL = (
    *(
        "search[<r>]",
        "search[<a> x]",
        "search[<a>]",
        "search[<c>]",
        "search[<c> x]",
        "search[<q> x]",
    ),
    *(
        "",
        "[",
        "]",
        "[]",
        "click[",
        "click[]",
        "search[]",
        "search",
        "click[[a]]",
        "search[[[[]]]]",
    ),
    *("search[\x00\x1b[0m]", "search[\ud800]", "click[search]", "CLICK[BUY NOW]", "search[\n]"),
)
ALPHABETS = (
    "abcdefgh <>[]",
    "\u0301\u200d\ufe0f\u202e\u2028\x00\x07\x1b\r\n\t[]",
    "👍🏽🇩🇪™®☆★中文ひカ한ไทยאب'.:,;_[]",
)


def random_text(draws: random.Random) -> str:
    """Text of one alphabet or of all of Unicode; rarely a very long one."""
    if draws.random() < 0.0002:
        return f"search[{draws.choice(draws.choice(ALPHABETS)) * 100_000}]"
    length = draws.randrange(40)
    if draws.random() < 0.3:
        text = "".join(chr(draws.randrange(0x110000)) for _ in range(length))
    else:
        text = "".join(draws.choices(draws.choice(ALPHABETS), k=length))
    return draws.choice(("{}", "search[{}]", "click[{}]", "search[cotton {}]")).format(text)


def next_action(environment: WebShopEnvironment, draws: random.Random) -> str:
    """Something the page offers, a special case or any text."""
    draw = draws.random()
    available = environment.available_actions()
    if draw < 0.5 and available is not None:
        target = draws.choice(available["clickables"])
        return "search[soft cotton shirt]" if target == "search" else f"click[{target}]"
    return draws.choice(SPECIAL) if draw < 0.6 else random_text(draws)


def resident_mib() -> float:
    """The resident memory of this process now (Linux)."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmRSS"):
            return round(int(line.split()[1]) / 1024, 1)
    return float("nan")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--actions", type=int, default=1_000_000)
    parser.add_argument("--data", default="generated", help="folder with upstream's files")
    arguments = parser.parse_args()
    draws = random.Random(0)
    problems: Counter[str] = Counter()
    memory: list[float] = []
    num_actions = num_episodes = 0
    with tempfile.TemporaryDirectory() as store:
        environments = [
            WebShopEnvironment(
                data=arguments.data, store=Path(store), observation=mode, max_turns=None
            )
            for mode in MODES
        ]
        tasks = environments[0].tasks("test")
        while num_actions < arguments.actions:
            environment = environments[num_episodes % len(environments)]
            environment.reset(draws.choice(tasks), seed=0)
            num_episodes += 1
            terminated = False
            for _ in range(MAX_STEPS):
                action = next_action(environment, draws)
                try:
                    _, _, terminated, _, _ = environment.step(action)
                    environment.state_key()
                except Exception as error:  # noqa: BLE001 - every kind is counted and reported
                    problems[f"{type(error).__name__}: {action[:60]!r}"] += 1
                num_actions += 1
                if num_actions % max(arguments.actions // 10, 1) == 0:
                    memory.append(resident_mib())
                if terminated:
                    break
    result = {"actions": num_actions, "episodes": num_episodes, "resident_mib": memory}
    print(json.dumps({**result, "exceptions": dict(problems)}, indent=2))


if __name__ == "__main__":
    main()
