"""`python -m ragen_apo.config` prints docs/configuration.md."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator

from ragen_apo.config.algorithms import ALGORITHMS, AlgorithmConfig, algorithm_class
from ragen_apo.config.messages import Key, key_table, keys_of
from ragen_apo.config.run import RunConfig
from ragen_apo.config.section import Section

HEAD = """# Configuration

`ragen-apo configs` lists the configurations that come with the package, and
`ragen-apo configs shop > mine.yaml` makes a copy of one to change. These are all keys of such a
file. A key that is left out has its default. On the command line the same keys are written with
dots: `--optimizer.learning_rate 1e-4`. The options of an environment are further keys of the
section `environment`. They have [a page of their own](environments.md).
`python -m ragen_apo.config` prints this page.
"""


def configuration_page() -> str:
    """docs/configuration.md: every key of every section, and of every algorithm."""
    keys = list(keys_of(RunConfig))
    lines = [HEAD, *key_table([key for key in keys if "." not in key.path], links=True)]
    for path, section in [(key.path, key.section) for key in keys if key.section]:
        lines += ["", f"## {path}", ""]
        if path == "algorithm":
            lines += _algorithms()
            continue
        inside = [key for key in keys if key.path.rpartition(".")[0] == path and key.has_value]
        lines += [_role(section), "", *key_table(inside, within=f"{path}.", links=True)]
    return _with_stars("\n".join(lines) + "\n")


def _role(section: type) -> str:
    return " ".join((section.__doc__ or "").split())


def _algorithms() -> Iterator[str]:
    """The section `algorithm`: what each one is, its own options, and those that several share."""
    classes = [algorithm_class(name) for name in ALGORITHMS]
    yield "A name alone, `algorithm: grpo`, means its defaults. An option of another algorithm is"
    yield "an error. A comparison or the command line may name another algorithm than the file."
    yield "Then options that both have keep their values; those at their default take the new one."
    yield "`path.py:Class` names [one of your own](adding_an_algorithm.md)."
    yield from ("", "| name | what it does | advantage |", "|---|---|---|")
    for each in classes:
        traits = each.traits
        yield f"| `{each.model_fields['name'].default}` | {traits.sentence} | {traits.advantage} |"
    shared = [
        base
        for base in dict.fromkeys(base for each in classes for base in reversed(each.__mro__))
        if issubclass(base, AlgorithmConfig) and base not in (AlgorithmConfig, *classes)
    ]
    for each in [*classes, *shared]:
        tables: dict[tuple[str, ...], list[Key]] = {}
        for key in _own_keys(each):
            if names := _names_that_take(key, each, classes):
                tables.setdefault(names, []).append(key)
        # The options of all its algorithms first; then those that some of them have otherwise.
        for number, (names, keys) in enumerate(sorted(tables.items(), key=lambda t: -len(t[0]))):
            yield from ("", f"### algorithm: {', '.join(names)}", "")
            if number == 0:
                yield from (_role(each), "")
            yield from key_table(keys, within="algorithm.")


def _own_keys(section: type[Section]) -> list[Key]:
    """Keys with a value that a class itself declares, and those of its sections; not the name."""
    keys = (key for key in keys_of(section, "algorithm.") if _declares(section, key))
    return [key for key in keys if key.path != "algorithm.name" and key.has_value]


def _names_that_take(
    key: Key, declaring: type[AlgorithmConfig], classes: list[type[AlgorithmConfig]]
) -> tuple[str, ...]:
    """The algorithms that have this key as `declaring` declares it, none of their own instead."""
    return tuple(
        each.model_fields["name"].default
        for each in classes
        if next((base for base in each.__mro__ if _declares(base, key)), None) is declaring
    )


def _declares(section: type, key: Key) -> bool:
    return key.path.split(".")[1] in vars(section).get("__annotations__", {})


def _with_stars(page: str) -> str:
    """The page with A*-PO and V* escaped: Markdown takes two plain stars for emphasis."""
    return re.sub(r"(`[^`\n]*`)|(?<=\b[AV])\*", lambda found: found[1] or r"\*", page)


if __name__ == "__main__":
    sys.stdout.write(configuration_page())
