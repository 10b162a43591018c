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
from ragen_apo.environments.questions.options import (
    ArithmeticOptions,
    DatasetOptions,
    FileOptions,
)
from ragen_apo.environments.shop.environment import ShopOptions
from ragen_apo.environments.sokoban.environment import SokobanOptions
from ragen_apo.environments.webshop import WebShopOptions

OPTIONS: Mapping[str, tuple[type[BaseModel], ...]] = {
    "bandit": (TwoArmedOptions, BernoulliOptions),
    "countdown": (CountdownOptions,),
    "frozen_lake": (FrozenLakeOptions,),
    "mixture": (MixtureOptions,),
    "questions": (ArithmeticOptions, FileOptions, DatasetOptions),
    "shop": (ShopOptions,),
    "sokoban": (SokobanOptions,),
    "webshop": (WebShopOptions,),
}
"""What each built-in environment accepts; the bandit by its `kind`, questions by their source."""


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
        "An environment of your own is named by `path.py:function`",
        "([how](adding_an_environment.md)). WebShop has [its own page](webshop.md).",
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
