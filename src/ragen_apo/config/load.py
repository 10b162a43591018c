"""From YAML and command-line overrides to a `RunConfig`, and back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from ragen_apo.config.algorithms import (
    DEFAULT,
    AlgorithmConfig,
    algorithm_classes,
    import_algorithm,
)
from ragen_apo.config.messages import Key, describe_problem, keys_of, shown
from ragen_apo.config.moved import SOURCE_STYLE, is_of_0_1, present_keys
from ragen_apo.config.overrides import merge, parse_overrides
from ragen_apo.config.pretrained import is_no_run, with_pretrained
from ragen_apo.config.references import is_reference, with_absolute_paths
from ragen_apo.config.run import RunConfig
from ragen_apo.config.section import NAMED_SECTIONS, as_section
from ragen_apo.config.shipped import configuration_file, in_place_of
from ragen_apo.config.yaml_text import dump_yaml, parse_yaml, read_yaml
from ragen_apo.errors import ConfigError

MAX_PROBLEMS = 40
"""Mistakes that are described, each with what was probably meant; the others are counted."""
YOUNG_KEYS = (
    "rollouts",
    "tracking",
    "evaluation.search",
    "machine.tf32",
    "machine.deterministic",
    "machine.sharding",
    "machine.rank_timeout_seconds",
    "training.keep_episodes",
)
"""Sections and keys that runs of earlier versions do not have. They may change when a run is
resumed, so it loses nothing by their defaults. A run may lack options of its algorithm, too."""
_YOUNG_AND_FIXED = (
    "agent.response_format",
    "agent.template_options",
    "policy.revision",
    "training.best_of",
    "training.eval_split",
    "training.keep_best",
    "values.estimator",
)
"""Those whose default is how such a run was made, and which may not change."""


def load_config(
    path: Path | str,
    overrides: Sequence[str] = (),
    *,
    pretrained: str | None = None,
    may_import: bool = True,
) -> RunConfig:
    """The configuration in a YAML file, changed by overrides `--values.beta1 0.1` or `--seed=3`.

    `pretrained` names a model in place of the small one, and sets what it needs (pretrained.py).
    `may_import` is as in `config_of`. Raises ConfigError with everything that is wrong, in the file
    and in the overrides.
    """
    values, problems = read_values(path)
    return config_of(
        with_pretrained(values, pretrained),
        source=str(path),
        overrides=overrides,
        problems=problems,
        may_import=may_import,
    )


def read_values(path: Path | str) -> tuple[dict[str, Any], list[str]]:
    """What a YAML file says, unchecked, and one sentence for each duplicate key.

    The path may be the name of a configuration that comes with the package.

    Raises ConfigError for what is no configuration at all.
    """
    file = configuration_file(path)
    if is_no_run(file):
        raise ConfigError(
            f"{path} is no configuration of a run: --pretrained MODEL lays it over one, as in "
            "`ragen-apo train --config shop --pretrained MODEL`"
        )
    try:
        text = read_yaml(file)
    except FileNotFoundError:
        raise ConfigError(f"there is no configuration {path}; {in_place_of(path)}") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"The configuration {path} cannot be read as text: {error}") from error
    return _values_in(text, source=str(path))


def load_run_config(path: Path, *, may_import: bool = False) -> RunConfig:
    """The resolved configuration that a run keeps: unlike one that people write, it has every key.

    `may_import` is as in `config_of`: a run may come from somebody else.
    Keys that are younger than the run have their defaults. Raises ConfigError if others are
    missing: a file that was cut off must not mean defaults. One that was cut off among the options
    of its algorithm lacks the sections that follow.
    """
    values, problems = read_values(path)
    if is_of_0_1(values):
        raise ConfigError(
            f"{path} was written by ragen-apo 0.1, whose checkpoints this version does not go on "
            "from; `ragen-apo report` still reads the run, and for everything else install "
            "ragen-apo 0.1."
        )
    config = config_of([values], source=str(path), problems=problems, may_import=may_import)
    missing = [
        key for key in _missing_keys(config.model_dump(by_alias=True), values) if not _may_lack(key)
    ]
    if missing:
        raise ConfigError(
            f"{path} lacks {len(missing)} of a run's keys, such as {', '.join(missing[:3])}: it "
            "was cut off or edited, or an earlier version wrote it. Put the undamaged file back, "
            "or add these keys with the values that the run was started with, which are the "
            "defaults of docs/configuration.md for keys that did not exist."
        )
    return config


def _may_lack(key: str) -> bool:
    """Whether a run of an earlier version may be without this key, whose default it then had."""
    if key.startswith("algorithm."):
        return key != "algorithm.name"
    young = (*YOUNG_KEYS, *_YOUNG_AND_FIXED)
    return any(key == each or key.startswith(f"{each}.") for each in young)


def _missing_keys(
    expected: Mapping[str, Any], values: Mapping[str, Any], prefix: str = ""
) -> Iterator[str]:
    for name, value in expected.items():
        if name not in values:
            yield f"{prefix}{name}"
        elif isinstance(value, dict):
            yield from _missing_keys(value, values[name] or {}, f"{prefix}{name}.")


def parse_config(text: str, *, source: str, overrides: Sequence[str] = ()) -> RunConfig:
    """Like `load_config` with the YAML itself; `source` names it in messages."""
    values, problems = _values_in(text, source=source)
    return config_of(
        [values], source=source, overrides=overrides, problems=problems, may_import=True
    )


def _values_in(text: str, *, source: str) -> tuple[dict[str, Any], list[str]]:
    try:
        values, problems = parse_yaml(text)
    except ValueError as error:
        raise ConfigError(f"{source} {error}") from error
    values = {} if values is None else values
    if not isinstance(values, dict):
        raise ConfigError(
            f"{source} holds {shown(values)}, expected a mapping of sections such as "
            "`optimizer: {learning_rate: 1e-4}`"
        )
    if {"base", "runs"} & values.keys():
        raise ConfigError(f"{source} is a comparison: ragen-apo compare --config {source}")
    return values, problems


def config_of(
    layers: Sequence[Mapping[str, Any]],
    *,
    source: str,
    overrides: Sequence[str] = (),
    problems: Sequence[str] = (),
    may_import: bool = False,
) -> RunConfig:
    """The configuration in mappings of sections, each laid over the ones before.

    `problems` are those known already. `may_import`: the code of an algorithm that these name
    (`path.py:Class`) is imported, because the caller wrote them. Raises ConfigError with everything
    that is wrong.
    """
    changes, override_problems = _read(overrides, layers, may_import=may_import)
    problems = [*problems, *override_problems]
    merged = merge_layers([*layers, changes], problems)
    try:
        config = RunConfig.model_validate(merged)
    except ValidationError as error:
        section, details = as_section(merged.get("algorithm")), error.errors()
        name = section.get("name", DEFAULT) if isinstance(section, Mapping) else DEFAULT
        keys = _keys_with_options_of([algorithm_classes().get(str(name), AlgorithmConfig)])
        problems += [_describe(detail, keys) for detail in details[:MAX_PROBLEMS]]
        problems += [""] * len(details[MAX_PROBLEMS:])
    else:
        if not problems:
            return config
    raise ConfigError(
        f"{source} cannot be used:\n"
        + "\n".join(f"  - {problem}" for problem in problems[:MAX_PROBLEMS])
        + (f"\n  - and {len(problems) - MAX_PROBLEMS} more" if problems[MAX_PROBLEMS:] else "")
        + "\nEvery key, its default and its range: docs/configuration.md."
    )


def _import_algorithms(layers: Sequence[Mapping[str, Any]]) -> bool:
    """Imports the classes that layers name by where the code is; False if none does."""
    sections = [as_section(layer.get("algorithm")) for layer in layers]
    names = [section.get("name") for section in sections if isinstance(section, Mapping)]
    references = [name for name in names if isinstance(name, str) and is_reference(name)]
    for each in references:
        import_algorithm(each)
    return bool(references)


def sections_of(overrides: Sequence[str]) -> dict[str, Any]:
    """The sections that overrides name, unchecked but for their keys; raises ConfigError."""
    sections, problems = _read(overrides, may_import=True)
    if problems:
        raise ConfigError("\n".join(problems))
    return sections


def _read(
    overrides: Sequence[str], layers: Sequence[Mapping[str, Any]] = (), *, may_import: bool
) -> tuple[dict[str, Any], list[str]]:
    """The sections that overrides name, and what is wrong with them.

    With `may_import` also options of classes that the layers, or the overrides, name by their code.
    """

    def read() -> tuple[dict[str, Any], list[str]]:
        return parse_overrides(overrides, keys=override_keys() if overrides else {})

    changes, problems = read()
    is_new = may_import and _import_algorithms([*layers, changes])
    return read() if is_new else (changes, problems)


def _describe(detail: ErrorDetails, keys: Mapping[str, Key]) -> str:
    """A finding of pydantic as a sentence; of an algorithm's option also whose it is."""
    if detail["type"] == "extra_forbidden" and detail["loc"][:-1] == ("algorithm",):
        option = detail["loc"][-1]
        owners = [each for each in algorithm_classes().values() if option in each.model_fields]
        if names := dict.fromkeys(str(each.model_fields["name"].default) for each in owners):
            return f"algorithm.{option}: unknown key; it is an option of {', '.join(names)}"
    return describe_problem(detail, keys)


def resolved_yaml(config: RunConfig) -> str:
    """YAML with every key, defaults included, that loads back to an equal configuration."""
    return dump_yaml(config.model_dump(by_alias=True))


def _keys_with_options_of(algorithms: Iterable[type[AlgorithmConfig]]) -> dict[str, Key]:
    """Every key written with dots; of the section `algorithm` those of these algorithms."""
    keys = {key.path: key for key in keys_of(RunConfig)}
    options = (key for each in algorithms for key in keys_of(each, "algorithm."))
    return keys | {key.path: key for key in options if key.path not in keys}


def override_keys() -> dict[str, Key]:
    """Every key that the command line may set: those of all algorithms, and the source's style."""
    keys = _keys_with_options_of(algorithm_classes().values())
    return keys | {f"apo.{name}": keys[new[-1]] for name, new in SOURCE_STYLE.items()}


def merge_layers(layers: Sequence[Mapping[str, Any]], problems: list[str]) -> dict[str, Any]:
    """Layers of keys, each over the ones before; notes what is wrong with the source's style.

    A layer that names another algorithm keeps those of the options so far that this one has, too.
    An empty section changes nothing; empty `agent.template_options` remove those before.
    """
    merged: dict[str, Any] = {}
    for layer in layers:
        given = present_keys(layer, problems)
        given |= {
            name: with_absolute_paths(as_section(given[name]))
            for name in given.keys() & NAMED_SECTIONS
        }
        if "algorithm" in given:
            merged["algorithm"] = _options_for(given["algorithm"], merged.get("algorithm", {}))
        agent = given.get("agent")
        if isinstance(agent, Mapping) and agent.get("template_options") == {}:
            merged = merge(merged, {"agent": {"template_options": None}})
        merged = merge(merged, given)
    return merged


def _options_for(chosen: Any, before: Any) -> Any:
    """The options so far that the algorithm chosen now has, too, and that were no mere default."""
    if not (isinstance(chosen, Mapping) and isinstance(before, Mapping)):
        return before
    name, old = chosen.get("name"), before.get("name", DEFAULT)
    classes = algorithm_classes()
    if name == old or str(name) not in classes:
        return before
    known = classes[str(name)].model_fields
    of_old = classes[str(old)].model_fields if str(old) in classes else {}
    return {
        key: value
        for key, value in before.items()
        if key not in of_old or (key in known and value != of_old[key].default)
    }
