"""The environment `bandit`: arms judged by their names (`two_armed`) or by trying (`bernoulli`)."""

from typing import Literal

from pydantic import BaseModel

from ragen_apo.environments.bandit.bernoulli import BernoulliOptions, make_bernoulli
from ragen_apo.environments.bandit.two_armed import TwoArmedOptions, make_two_armed
from ragen_apo.environments.base import validate_options
from ragen_apo.environments.toolkit.game import GameEnvironment


class _Kind(BaseModel):
    """Which of the bandits; the other options are its own."""

    kind: Literal["two_armed", "bernoulli"] = "two_armed"


def make_bandit(**options: object) -> GameEnvironment:
    """A bandit of a kind; raises ConfigError for options that this kind does not accept."""
    kind = validate_options(_Kind, options).kind
    if kind == "bernoulli":
        return make_bernoulli(validate_options(BernoulliOptions, options))
    return make_two_armed(validate_options(TwoArmedOptions, options))
