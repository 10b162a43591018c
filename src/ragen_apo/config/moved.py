"""Where the keys of version 0.1 are now, and the few that the source of this project writes.

    apo: {beta: 0.5, v_star_samples: 8, adaptive_vstar: true, learning_rate: 1e-4}

is the style of the project that this one grew from: `present_keys` writes it out in our keys.
Every other key of 0.1 is an error that names the new one; a report of an old run is written from
its translated configuration.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ragen_apo.config.algorithms import ALGORITHMS, DEFAULT, algorithm_class
from ragen_apo.config.removed import removed, without_removed

SOURCE_STYLE: Mapping[str, tuple[str, ...]] = {
    "beta": ("values.beta1", "algorithm.beta2"),
    "v_star_samples": ("values.num_samples",),
    "adaptive_vstar": ("values.adaptive",),
    "learning_rate": ("optimizer.learning_rate",),
}
"""Keys of the source's section `apo`."""

MOVED: Mapping[str, str] = {
    "run": "machine",
    "apo.beta1": "values.beta1",
    "apo.beta2": "algorithm.beta2",
    "apo.num_value_samples": "values.num_samples",
    "apo.adaptive_vstar": "values.adaptive",
    "apo.max_value_samples": "values.max_samples",
    "apo.value_store": "values.store",
    "apo.value_baseline": "values.baseline",
    "apo.temperature": "sampling.temperature",
    "apo.shuffle_returns": "training.shuffle_returns",
    "apo.learning_rate": "optimizer.learning_rate",
    "apo.weight_decay": "optimizer.weight_decay",
    "apo.max_grad_norm": "optimizer.max_grad_norm",
    "apo.warmup_steps": "optimizer.warmup_steps",
    "apo.schedule": "optimizer.schedule",
    "apo.reference_refresh.every_steps": "reference.refresh_every_steps",
    "apo.reference_refresh.max_kl": "reference.refresh_max_kl",
    "apo.loss": "algorithm.loss",
    "apo.length_normalization": "algorithm.length_normalization",
    "apo.advantage_clamp": "algorithm.advantage_clamp",
    "apo.center_residuals": "algorithm.center_residuals",
    "apo.kl_coefficient": "algorithm.kl_coefficient",
    "turn_level": "algorithm",
    "policy_gradient": "algorithm",
    "ppo": "algorithm",
    "gigpo": "algorithm",
    "reward_normalization": "algorithm.reward_normalization",
}
"""Keys and sections of 0.1, with what stands in for them."""
_OLD_SECTIONS = {path.partition(".")[0] for path in MOVED} | {"apo"}


def moved_to(path: str) -> str | None:
    """The present name of a key of 0.1, written with dots; None for others."""
    names = path.split(".")
    for length in range(len(names), 0, -1):
        if new := MOVED.get(".".join(names[:length])):
            return ".".join([new, *names[length:]])
    return None


def became(path: str) -> str | None:
    """What has become of a key of an earlier version, as half a sentence; None for others."""
    new = moved_to(path)
    if gone := removed(new or path):
        return f"it has been removed{f' ({gone.why})' if gone.why else ''}; leave it out"
    return f"it is {new} now" if new else None


def present_keys(layer: Mapping[str, Any], problems: list[str]) -> dict[str, Any]:
    """One source of keys without old ones: the source's style is written out, others are noted."""
    result = without_removed({n: value for n, value in layer.items() if n not in _OLD_SECTIONS})
    apo = layer.get("apo")
    given: Mapping[str, Any] = apo if isinstance(apo, Mapping) else {}
    styled = given.keys() & SOURCE_STYLE.keys()
    old = {name: value for name, value in layer.items() if name in _OLD_SECTIONS}
    for path, value in _leaves({name: value for name, value in old.items() if value is not None}):
        if path.removeprefix("apo.") not in styled:
            problems.append(f"{path}: {_whereabouts(path, value)}")
    for name in sorted(styled):
        clashes = [key for key in SOURCE_STYLE[name] if value_at(layer, key) is not None]
        if clashes:
            problems.append(
                f"apo.{name}: is another name of {' and '.join(SOURCE_STYLE[name])}; remove it or "
                f"{' and '.join(clashes)}"
            )
        else:
            for key in SOURCE_STYLE[name]:
                set_at(result, key, given[name])
    return result


def _whereabouts(path: str, value: Any) -> str:
    """What became of a key of 0.1."""
    if what := became(path):
        return what
    if path == "apo":
        return f"got {value!r:.60}, expected a section with {', '.join(SOURCE_STYLE)}"
    return f"unknown key; the section apo may hold {', '.join(SOURCE_STYLE)}"


def translated(values: Mapping[str, Any]) -> dict[str, Any]:
    """A whole configuration of 0.1 in the present keys, with the options of its algorithm alone.

    A null stood for the algorithm's default, and is left out.
    """
    name = str(values.get("algorithm") or DEFAULT)
    own = {"apo_turn": "turn_level", "apo": None}.get(name, "policy_gradient")
    others = {"turn_level", "policy_gradient", "ppo", "gigpo"} - {own, name}
    result: dict[str, Any] = {}
    for path, value in _leaves({key: v for key, v in values.items() if key not in others}):
        new = moved_to(path) or path
        if path != "algorithm" and not removed(new):
            set_at(result, new, value)
    known = algorithm_class(name).model_fields if name in ALGORITHMS else ()
    if value_at(result, "algorithm.reward_normalization.grouping") == "environment":
        set_at(result, "algorithm.reward_normalization.grouping", "category")
    given = {k: v for k, v in result.pop("algorithm", {}).items() if k in known and v is not None}
    return {**result, "algorithm": {"name": name, **given}}


def is_of_0_1(values: Mapping[str, Any]) -> bool:
    """Whether these are the sections of 0.1's configuration of a run, which had all of them."""
    return {"apo", "run", "turn_level"} <= values.keys()


def value_at(values: Mapping[str, Any], path: str) -> Any:
    """What stands at a key written with dots; None where nothing does."""
    below: Any = values
    for name in path.split("."):
        if not isinstance(below, Mapping):
            return None
        below = below.get(name)
    return below


def set_at(values: dict[str, Any], path: str, value: Any) -> None:
    """Puts a value at a key written with dots; sections on the way are copied, not changed."""
    head, _, rest = path.partition(".")
    if not rest:
        values[head] = value
        return
    below = values.get(head)
    if isinstance(below, str):  # an algorithm by its name alone
        below = {"name": below}
    values[head] = dict(below) if isinstance(below, Mapping) else {}
    set_at(values[head], rest, value)


def _leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
