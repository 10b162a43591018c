"""From YAML and command-line overrides to a `RunConfig`, and back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ragen_apo.config.algorithms import APO_ALIASES, replace_aliases
from ragen_apo.config.messages import Key, describe_problem, keys_of, shown
from ragen_apo.config.overrides import merge, parse_overrides
from ragen_apo.config.run import RunConfig
from ragen_apo.config.yaml_text import dump_yaml, parse_yaml, read_yaml
from ragen_apo.errors import ConfigError

MAX_PROBLEMS = 40
"""So many mistakes are described, each with what was probably meant; of others their number."""


def load_config(path: Path | str, overrides: Sequence[str] = ()) -> RunConfig:
    """The configuration in a YAML file, changed by overrides `--apo.beta2 0.05` or `--seed=3`.

    Raises ConfigError with everything that is wrong, in the file and in the overrides.
    """
    try:
        text = read_yaml(Path(path))
    except FileNotFoundError:
        raise ConfigError(
            f"There is no configuration {path}. Give the path of a YAML file; "
            "examples are in the folder configs/."
        ) from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"The configuration {path} cannot be read as text: {error}") from error
    return parse_config(text, source=str(path), overrides=overrides)


def load_run_config(path: Path) -> RunConfig:
    """The resolved configuration that a run keeps: unlike one that people write, it has every key.

    Raises ConfigError if keys are missing; a file that was cut off must not mean defaults.
    """
    config = load_config(path)
    values, _ = parse_yaml(read_yaml(path))
    missing = list(_missing_keys(config.model_dump(by_alias=True), values or {}))
    if missing:
        raise ConfigError(
            f"{path} lacks {len(missing)} of a run's keys, such as {', '.join(missing[:3])}: it "
            "was cut off or edited, or an earlier version wrote it. Put the undamaged file back, "
            "or add these keys with the values that the run was started with "
            "(docs/configuration.md has the defaults)."
        )
    return config


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
    try:
        values, problems = parse_yaml(text)
    except ValueError as error:
        raise ConfigError(f"{source} {error}") from error
    values = {} if values is None else values
    if not isinstance(values, dict):
        raise ConfigError(
            f"{source} holds {shown(values)}, expected a mapping of sections such as "
            "`apo: {beta2: 0.05}`"
        )
    if {"base", "runs"} <= values.keys():
        raise ConfigError(f"{source} is a comparison: ragen-apo compare --config {source}")
    keys = known_keys()
    changes, override_problems = parse_overrides(overrides, keys=keys, open_section="environment")
    problems += override_problems
    layers = [_without_aliases(layer, problems) for layer in (values, changes)]
    try:
        config = RunConfig.model_validate(merge(*layers))
    except ValidationError as error:
        details = error.errors()
        problems += [describe_problem(detail, keys) for detail in details[:MAX_PROBLEMS]]
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


def resolved_yaml(config: RunConfig) -> str:
    """YAML with every key, defaults included, that loads back to an equal configuration."""
    return dump_yaml(config.model_dump(by_alias=True))


def known_keys() -> dict[str, Key]:
    """Every key written with dots, other names included."""
    keys = {key.path: key for key in keys_of(RunConfig)}
    for alias, names in APO_ALIASES.items():
        keys[f"apo.{alias}"] = Key(f"apo.{alias}", keys[f"apo.{names[-1]}"].field)
    return keys


def _without_aliases(layer: dict[str, Any], problems: list[str]) -> dict[str, Any]:
    """Aliases replaced within one source, so that the next source overrides the keys they set."""
    if "apo" not in layer:
        return layer
    try:
        return {**layer, "apo": replace_aliases(layer["apo"])}
    except ValueError as error:
        problems.append(f"apo: {error}")
        apo = {key: value for key, value in layer["apo"].items() if key not in APO_ALIASES}
        return {**layer, "apo": apo}
