"""Keys that are gone and have nothing in their place, and why (docs/log.md says more).

A run has every key in its config.yaml. Where one that is gone stands at a value that means what is
done without it, a configuration is read as if the key were not there. Any other value is an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Removed:
    """What is said of a key that is gone."""

    why: str = ""
    same: tuple[Any, ...] = ()
    """Its values that mean what is done without it."""


REMOVED: Mapping[str, Removed] = {
    "apo.replay": Removed(),
    "monitors.gradient_buckets": Removed(),
    "algorithm.kl_estimator": Removed(
        "kl_in decides it: k2 in the loss and k1 in the reward are the only estimates whose "
        "gradient is that of KL(pi || pi_ref)",
        same=(None,),
    ),
    "algorithm.dual_clip": Removed("no configuration set it", same=(None,)),
    "algorithm.whiten_advantages": Removed(
        "the advantages of a step have mean 0 and standard deviation 1", same=(True,)
    ),
    "algorithm.omega": Removed("gigpo weighs episode and turn alike", same=(1.0,)),
    "algorithm.scale": Removed("gigpo divides by standard deviations", same=("std",)),
    "rollout_filter.score": Removed("tasks are chosen by their returns", same=("return",)),
    "rollout_filter.statistic": Removed(
        "a task's score is the standard deviation of its returns", same=("std",)
    ),
    "rollout_filter.order": Removed(
        "the tasks whose returns vary most are kept", same=("largest",)
    ),
    "distillation.min_weight": Removed("what weighs less than 0.05 is left out", same=(0.05,)),
    "rollouts.retry_seconds": Removed(
        "the first pause is 2 seconds, each further one twice as long; rollouts.retries says how "
        "many there are",
        same=(2.0,),
    ),
}


def removed(key: str) -> Removed | None:
    """What is said of a key, written with dots, that is gone or in a section that is."""
    return next((what for gone, what in REMOVED.items() if f"{key}.".startswith(f"{gone}.")), None)


def is_passed_over(key: str, value: Any) -> bool:
    """Whether a key, written with dots, is gone, and this value of it changes nothing."""
    return key in REMOVED and value in REMOVED[key].same


def without_removed(values: Mapping[str, Any]) -> dict[str, Any]:
    """Sections without the keys that are passed over.

    Those of `algorithm` stay, as an installed algorithm may have an option of such a name.
    """
    kept = dict(values)
    for section, name in (key.split(".") for key in REMOVED):
        below = kept.get(section)
        if section != "algorithm" and isinstance(below, Mapping):
            kept[section] = {
                key: value
                for key, value in below.items()
                if key != name or not is_passed_over(f"{section}.{key}", value)
            }
    return kept
