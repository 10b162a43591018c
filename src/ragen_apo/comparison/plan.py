"""The file that `ragen-apo compare` reads: a base configuration, and the changes of each run.

base: shop.yaml            # beside this file: environment, agent, model, warm start, evaluation
seeds: [0, 1, 2]
budget: {seconds: 600, tokens: 1500000}   # curve and costs do not look at later evaluations
target: [0.9, 0.98]        # success rates whose time and tokens are reported; one or several
shared: {training: {eval_every: 10}}      # changed for all
runs:
  A*-PO: {}                # names are free; each holds sections as a configuration does
  GRPO: {algorithm: {name: grpo, num_minibatches: 2}}
sweep:                     # each run is made with each combination of these values
  optimizer.learning_rate: [5.0e-4, 1.0e-3]
share_values: true         # runs of a seed with the same Stage 1 sample it once
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError

from ragen_apo.config import RunConfig
from ragen_apo.config.load import config_of
from ragen_apo.config.messages import describe_problems
from ragen_apo.config.moved import value_at
from ragen_apo.config.overrides import merge, nested
from ragen_apo.config.section import Count, PathText, Positive, Section, Seed
from ragen_apo.config.shipped import configuration_file, in_place_of
from ragen_apo.config.yaml_text import parse_yaml, read_yaml
from ragen_apo.errors import ConfigError

REFERENCE = "reference"
"""Folder of the warm start beside the folders of a seed's runs."""
SHARED = ("seed", "warm_start", "policy.path", "policy.revision", "policy.small")
"""Keys that make the reference, which all runs of a seed share."""
MAX_NAME_LENGTH = 100
"""File systems take 255 bytes, and the names of files beside a run's folder are a little longer."""


def _distinct(seeds: list[int]) -> list[int]:
    if len(set(seeds)) < len(seeds):
        raise ValueError("a seed is there twice; its run would count twice, so remove one")
    return seeds


def _ascending(targets: list[float]) -> list[float]:
    """Each once, as far as the names of columns tell them apart."""
    return sorted({f"{target:.6g}": target for target in sorted(targets, reverse=True)}.values())


class BudgetConfig(Section):
    """Limits of one run's Stage 1 and Stage 2; null for none."""

    seconds: Positive | None = None
    """Without evaluations and without the warm start, which all runs share."""
    tokens: Count | None = None
    """Generated tokens."""

    @property
    def is_set(self) -> bool:
        return self.seconds is not None or self.tokens is not None


class ComparisonConfig(Section):
    """The keys of a comparison."""

    base: PathText
    """Path of the configuration that all runs change, relative to this file."""
    seeds: Annotated[list[Seed], Field(min_length=1), AfterValidator(_distinct)]
    budget: BudgetConfig = BudgetConfig()
    target: Annotated[
        list[Annotated[float, Field(gt=0, le=1)]],
        BeforeValidator(lambda value: value if isinstance(value, list) else [value]),
        Field(min_length=1),
        AfterValidator(_ascending),
    ] = [0.9]  # noqa: RUF012 (pydantic copies it)
    """Success rates of an evaluation during training, one or several."""
    shared: dict[str, Any] = Field(default={})
    """Keys that all runs change in the base."""
    runs: Annotated[dict[str, dict[str, Any] | None], Field(min_length=1)]
    """Keys that a run changes besides, by the name of the run."""
    sweep: dict[str, Annotated[list[Any], Field(min_length=1)]] = Field(default={})
    """Keys with dots, each with a list of values: every run is made with every combination, whose
    values its name then ends with."""
    share_values: bool = False
    """Of the runs of a seed whose Stage 1 is the same, the first samples it, and the others take V*
    from its store: their costs lack its samples."""


EVALUATED_BY = (
    "environment",
    "training.eval_episodes",
    "evaluation.split",
    "evaluation.num_episodes",
    "evaluation.temperature",
    "evaluation.search",
)
"""What success is measured on and by: the same in all runs."""


@dataclass(frozen=True)
class Comparison:
    """A comparison whose configurations have all been checked."""

    settings: ComparisonConfig
    """With a run for every combination of the sweep."""
    base: Mapping[str, Any]
    file: Path
    """Where it was read."""
    given: ComparisonConfig
    """What the file says, with the defaults."""
    swept: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """By the name of a run, its keys out of the sweep."""
    values_of: Mapping[str, str] = field(default_factory=dict)
    """By the name of a run that takes V* from another's store, the name of that one."""

    def reference(self, seed: int) -> RunConfig:
        """The run that ends with its warm start: its reference is that of all runs."""
        layers = [self.base, self.settings.shared, {"seed": seed}]
        return config_of(layers, source=f"the reference of seed {seed}", may_import=True)

    def configs(self) -> dict[str, RunConfig]:
        """Every run with the first seed, by its name; the path of its reference is made up."""
        seed = self.settings.seeds[0]
        return {
            name: self.run(name, seed, reference=Path(REFERENCE)) for name in self.settings.runs
        }

    def run(self, name: str, seed: int, *, reference: Path, store: Path | None = None) -> RunConfig:
        """One run from that reference; `store` is that of the run in `values_of`."""
        last: dict[str, Any] = {
            "seed": seed,
            "policy": {"path": str(reference), "revision": None},
            "warm_start": {"enabled": False},
        }
        if store is not None:
            last["values"] = {"store": str(store)}
        own, swept = self.settings.runs[name] or {}, self.swept.get(name, {})
        layers = [self.base, self.settings.shared, own, swept, last]
        return config_of(layers, source=f"run {name!r}", may_import=True)


def folder_name(name: str) -> str:
    """The run's name as a part of a path."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def load_comparison(path: Path) -> Comparison:
    """Reads and checks a comparison with every configuration in it.

    The path may be the name of one that comes with the package. Raises ConfigError before anything
    is computed.
    """
    path = configuration_file(path)
    given = _settings(path)
    settings, swept = _every_run(given)
    _check_names(list(settings.runs), path, is_swept=bool(settings.sweep))
    _check_shared(settings, swept, path)
    comparison = Comparison(settings, _base(settings, path), path, given, swept)
    comparison.reference(settings.seeds[0])
    configs = comparison.configs()
    _check_evaluations(configs, path)
    if settings.share_values:
        return replace(comparison, values_of=_values_of(configs))
    return comparison


def _settings(path: Path) -> ComparisonConfig:
    """The keys of the file, before any configuration is made of them."""
    values = _mapping(path, comparison=True)
    if RunConfig.model_fields.keys() & values.keys() and not {"base", "runs"} & values.keys():
        raise ConfigError(
            f"{path} is the configuration of a run: ragen-apo train --config {path}. A comparison "
            f"changes one for each of its runs, such as {{base: {path.name}, seeds: [0], "
            "runs: {A*-PO: {algorithm: apo}, GRPO: {algorithm: grpo}}} (docs/comparison.md)"
        )
    try:
        return ComparisonConfig.model_validate(values)
    except ValidationError as error:
        problems = [f"  - {each}" for each in describe_problems(error, ComparisonConfig)]
        raise ConfigError("\n".join([f"{path} cannot be used:", *problems])) from error


def _every_run(settings: ComparisonConfig) -> tuple[ComparisonConfig, dict[str, dict[str, Any]]]:
    """The settings with a run for every combination of the sweep, and the swept keys of each."""
    combinations = _combinations(settings.sweep)
    swept = {name + label: keys for name in settings.runs for label, keys in combinations}
    runs = {name + label: own for name, own in settings.runs.items() for label, _ in combinations}
    return settings.model_copy(update={"runs": runs}), swept


def _base(settings: ComparisonConfig, path: Path) -> dict[str, Any]:
    base = _mapping(configuration_file(settings.base, beside=path.parent), comparison=False)
    if {"base", "runs"} & base.keys():
        raise ConfigError(
            f"{path}: base {settings.base} is a comparison; name the configuration of a run, such "
            "as the base of that one"
        )
    return base


def _values_of(configs: Mapping[str, RunConfig]) -> dict[str, str]:
    """For each run but the first with the same Stage 1, the name of that first one."""
    firsts: dict[str, str] = {}
    found = {}
    for name, config in configs.items():
        if not config.has_stage_one or config.values.store or config.reference.is_refreshed:
            continue
        same = (config.machine, config.environment, config.agent, config.rollouts)
        same += (config.sampling,)
        values = config.values.model_dump(include={"num_samples", "adaptive", "max_samples"})
        key = json.dumps([*(e.model_dump() for e in same), values, config.training.max_tasks])
        if (first := firsts.setdefault(key, name)) != name:
            found[name] = first
    return found


def _problem_with_evaluation(
    config: RunConfig, other: RunConfig, *, name_of_other: str
) -> str | None:
    """Why this run's success cannot be compared with that of another; None where it can."""
    if config.training.eval_every is None:
        return "training.eval_every is null, no curve to draw"
    if config.training.eval_split not in (None, config.evaluation.split):
        return (
            f"training.eval_split is {config.training.eval_split!r}, and curves begin with the "
            f"reference's success on evaluation.split ({config.evaluation.split!r}); leave it out, "
            "and training.keep_best with it"
        )
    evaluation = config.evaluation
    if evaluation.search is not None and evaluation.search.rank_by == "reward":
        return (
            "evaluation.search ranks by reward, an upper bound that no agent reaches; set rank_by "
            "to values or likelihood, or search to null"
        )
    for key in EVALUATED_BY:
        if value_at(config.model_dump(), key) != value_at(other.model_dump(), key):
            return (
                f"{key} is not that of run {name_of_other!r}, so that their success cannot be "
                "compared; set it in base or shared"
            )
    return None


def _check_shared(
    settings: ComparisonConfig, swept: Mapping[str, Mapping[str, Any]], path: Path
) -> None:
    """Raises ConfigError where a run changes what makes the reference."""
    if "seed" in settings.shared:
        raise ConfigError(f"{path}: shared.seed would be ignored; set it in seeds")
    for name, own in settings.runs.items():
        keys = merge(own or {}, swept[name])
        if ignored := [key for key in SHARED if value_at(keys, key) is not None]:
            where = "seeds" if ignored[0] == "seed" else "base or shared"
            raise ConfigError(
                f"{path}, run {name!r}: {' and '.join(ignored)} cannot differ between runs, which "
                f"start from one reference a seed; set {ignored[0]} in {where}"
            )


def _check_evaluations(configs: Mapping[str, RunConfig], path: Path) -> None:
    """Raises ConfigError unless the success of all runs can be compared."""
    first = next(iter(configs))
    for name, config in configs.items():
        if problem := _problem_with_evaluation(config, configs[first], name_of_other=first):
            raise ConfigError(f"{path}, run {name!r}: {problem}")
    ks = {k for config in configs.values() if (k := config.evaluation.pass_k) is not None}
    if len(ks) > 1:
        raise ConfigError(
            f"{path}: evaluation.pass_k is {' or '.join(map(str, sorted(ks)))}, and the column of "
            "pass@k has one k; set it in base or shared, or leave it out in a run"
        )


def _combinations(sweep: Mapping[str, Sequence[Any]]) -> list[tuple[str, dict[str, Any]]]:
    """What the name of a run ends with, and its keys; one that is empty where nothing is swept."""
    found = []
    for values in itertools.product(*sweep.values()):
        label, keys = "", {}
        for key, value in zip(sweep, values, strict=True):
            label += f", {key.rpartition('.')[2]} {value}"
            keys = merge(keys, nested(key, value))
        found.append((label, keys))
    return found


def _check_names(names: Sequence[str], path: Path, *, is_swept: bool) -> None:
    """Raises ConfigError unless every run can have a folder of its own beside the reference."""
    names_of: dict[str, str] = {}
    advice = "choose another name"
    if is_swept:
        advice += ", or write the runs of the sweep out under `runs`, by names of your own"
    for name in names:
        folder = folder_name(name)
        problem = None
        if not name.isprintable() or "/" in name or "\\" in name:
            problem = "a name has no slashes and no control characters"
        elif not folder:
            problem = "a name needs a letter from a to z or a digit, from which its folder is made"
        elif len(name) > MAX_NAME_LENGTH:
            problem = f"a name has at most {MAX_NAME_LENGTH} characters, this one {len(name)}"
        elif folder == REFERENCE:
            problem = f"the folder {REFERENCE!r} holds the warm start that all runs share"
        elif folder in names_of:
            problem = f"its folder {folder!r} is that of run {names_of[folder]!r} already"
        if problem:
            raise ConfigError(f"{path}, run {name!r:.120}: {problem}; {advice}")
        names_of[folder] = name


def _mapping(path: Path, *, comparison: bool) -> dict[str, Any]:
    try:
        text = read_yaml(path)
    except FileNotFoundError as error:
        raise ConfigError(
            f"there is no {'comparison' if comparison else 'base'} {path}; "
            f"{in_place_of(path, comparison=comparison)}"
        ) from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as text: {error}") from error
    try:
        values, problems = parse_yaml(text)
    except ValueError as error:
        raise ConfigError(f"{path} {error}") from error
    if problems or not isinstance(values, dict):
        raise ConfigError(f"{path}: {'; '.join(problems) or 'expected a mapping of keys'}")
    return values
