"""`python -m ragen_apo.environments` prints docs/environments.md."""

import sys
from collections.abc import Mapping

from pydantic import BaseModel

from ragen_apo.config.messages import key_table, keys_of
from ragen_apo.environments.bandit.bernoulli import BernoulliOptions
from ragen_apo.environments.bandit.two_armed import TwoArmedOptions
from ragen_apo.environments.countdown.environment import CountdownOptions
from ragen_apo.environments.frozen_lake import FrozenLakeOptions
from ragen_apo.environments.gymnasium import REGISTERED
from ragen_apo.environments.mixture import MixtureOptions
from ragen_apo.environments.questions.options import ArithmeticOptions, DatasetOptions, FileOptions
from ragen_apo.environments.shop.environment import ShopOptions
from ragen_apo.environments.sokoban.environment import SokobanOptions
from ragen_apo.environments.textworld.environment import TextWorldOptions
from ragen_apo.environments.webshop import WebShopOptions

OPTIONS: Mapping[str, tuple[type[BaseModel], ...]] = {
    "bandit": (TwoArmedOptions, BernoulliOptions),
    "countdown": (CountdownOptions,),
    "frozen_lake": (FrozenLakeOptions,),
    "mixture": (MixtureOptions,),
    "questions": (ArithmeticOptions, FileOptions, DatasetOptions),
    "shop": (ShopOptions,),
    "sokoban": (SokobanOptions,),
    "textworld": (TextWorldOptions,),
    "webshop": (WebShopOptions,),
}
"""What each built-in environment accepts; the bandit by its `kind`, questions by their source."""
TASKS: Mapping[str, tuple[str, str, str]] = {
    "bandit": (
        "pulls arms that pay by chance: one of two, told apart by their names, or several in turn",
        "`Rocket`",
        "",
    ),
    "countdown": ("makes a target from given numbers", "`(3 + 5) * 2`", ""),
    "frozen_lake": (
        "walks over ice to a goal and around holes; on slippery ice chance moves it, too",
        "`Right`",
        "`frozen_lake.yaml`",
    ),
    "mixture": (
        "plays several of these in one run ([how](adding_an_environment.md"
        "#several-environments-in-one-run))",
        "",
        "`sokoban_mixture.yaml`",
    ),
    "questions": (
        "answers a question once, or calls functions of yours first ([how](questions.md))",
        "`16`",
        "`arithmetic.yaml`, `arithmetic_smollm2.yaml`, `questions_smollm2.yaml`, `gsm8k_qwen.yaml`",
    ),
    "shop": (
        "searches a catalogue of 497 made-up products and buys the one that the task names",
        "`search denim vest`",
        "`shop.yaml`, `shop_smollm2.yaml`",
    ),
    "sokoban": ("pushes boxes onto targets", "`Up`", "`sokoban.yaml`"),
    "textworld": (
        "plays text adventures of TextWorld and the household tasks of ALFWorld "
        "([how](text_adventures.md))",
        "`go to desk 1`",
        "[two](text_adventures.md)",
    ),
    "webshop": (
        "searches real or generated products and buys one with the asked options "
        "([how](webshop.md))",
        "`click buy now`",
        "[a table](webshop.md#training)",
    ),
}
"""Of each: what the agent does, an action, and configurations in configs/."""


def options_page() -> str:
    """docs/environments.md: every option with its default, what is allowed and what it means."""
    lines = [
        "# Environments and their options",
        "",
        "Options follow the name in the section `environment` of a configuration. They also work",
        "on the command line:",
        "",
        "```",
        "ragen-apo train --config configs/shop.yaml --run-dir runs/one --environment.max_turns 8",
        "ragen-apo play frozen_lake --size 5 --slippery false",
        "```",
        "",
        "| name | the agent | an action | in `configs/` |",
        "|---|---|---|---|",
        *(f"| [{name}](#{name}) | {' | '.join(TASKS[name])} |" for name in OPTIONS),
        "",
        "`ragen-apo play NAME` shows the rules and lets you try. An environment of your own is",
        "named by `path.py:function` ([how](adding_an_environment.md)).",
        "`python -m ragen_apo.environments` prints this page.",
        "",
        "In Gymnasium, the ids below make an environment whose observations and actions are text.",
        "`action_space.sample()` returns random characters. For a random baseline, use the",
        "scripted policy `random` ([an example](adding_an_environment.md#in-gymnasium)).",
    ]
    ids = {name: gymnasium_id for gymnasium_id, name in REGISTERED.items()}
    for name, models in OPTIONS.items():
        lines += ["", f"## {name}", ""]
        lines += [f"In Gymnasium: `ragen_apo.environments.gymnasium:{ids[name]}`."]
        for model in models:
            prefix = f"{name}."
            keys = [key for key in keys_of(model, prefix) if key.has_value or key.field.description]
            role = " ".join((model.__doc__ or "").split())
            lines += ["", role, "", *key_table(keys, within=prefix)]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(options_page())
