"""The algorithms by name, and what the settings of every algorithm have in common.

An algorithm is one file in `training/algorithms/` and one row in `ALGORITHMS`. One of your own is
named by its file, `path.py:Class`, or by a package, in the entry points `ragen_apo.algorithms`
(docs/adding_an_algorithm.md). Its class is the section `algorithm` of a configuration, says for
reports what it does, and makes the object that the trainer calls. These classes import torch only
where they compute, so that a configuration and a report are read without it.
"""

from __future__ import annotations

import difflib
import functools
import pkgutil
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import model_validator

from ragen_apo.config.named_code import ALGORITHM, reference_to, referenced_code
from ragen_apo.config.references import TRUST, is_reference, with_absolute_path, with_absolute_paths
from ragen_apo.config.removed import is_passed_over
from ragen_apo.config.section import Section, as_section
from ragen_apo.errors import ConfigError, RagenApoError
from ragen_apo.printable import exception_in_words

if TYPE_CHECKING:
    from ragen_apo.config.run import RunConfig

ALGORITHMS: Mapping[str, str] = {
    "apo": "ragen_apo.training.algorithms.apo:Apo",
    "apo_turn": "ragen_apo.training.algorithms.apo_turn:ApoTurn",
    "oapl": "ragen_apo.training.algorithms.oapl:Oapl",
    "ppo": "ragen_apo.training.algorithms.ppo:Ppo",
    "grpo": "ragen_apo.training.algorithms.grpo:Grpo",
    "dr_grpo": "ragen_apo.training.algorithms.dr_grpo:DrGrpo",
    "rloo": "ragen_apo.training.algorithms.rloo:Rloo",
    "gigpo": "ragen_apo.training.algorithms.gigpo:Gigpo",
    "reinforce_plus_plus": "ragen_apo.training.algorithms.reinforce_plus_plus:ReinforcePlusPlus",
    "brpo": "ragen_apo.training.algorithms.brpo:Brpo",
}
"""Where each built-in algorithm's class is."""
_PAGE = f"{ALGORITHM.page} has an example"
_HAS_TO_BE = "subclass of AlgorithmConfig with traits and a default of its name"
ENTRY_POINT_GROUP = "ragen_apo.algorithms"
DEFAULT = "apo"
OWN: dict[str, type[AlgorithmConfig]] = {}
"""Classes that this process has imported or was handed, by the reference to their code."""


@dataclass(frozen=True)
class Traits:
    """What a reader of a run has to know of its algorithm."""

    label: str
    """Its name in tables and titles."""
    sentence: str
    """What it does; begins with its name."""
    advantage: str = ""
    """What it gives an episode, a turn or a token for its outcome."""
    has_values: bool = False
    """It subtracts V*: it samples the reference in Stage 1 and plays each task once a step."""
    has_critic: bool = False
    """It learns a second model that predicts returns."""
    compares_groups: bool = False
    """It compares several rollouts of one task."""


@dataclass(frozen=True)
class Monitor:
    """How reports show a metric."""

    label: str
    """In the table of monitors."""
    title: str = ""
    """Of its curve, short enough for half of a phone's width; without one it has no curve."""
    share: bool = False
    """Between 0 and 1, written in percent."""


class AlgorithmConfig(Section):
    """The section `algorithm`: a name and the options of that algorithm alone."""

    traits: ClassVar[Traits]
    monitors: ClassVar[Mapping[str, Monitor]] = {}
    """Metrics of its own that reports show, by name."""
    name: str
    """Which algorithm, or `path.py:Class`; its options stand beside the name."""

    @model_validator(mode="after")
    def _the_name_is_its_own(self) -> AlgorithmConfig:
        if self.name != self.short_name and OWN.get(self.name) is not type(self):
            raise ValueError(
                f"name of {type(self).__name__}: got {self.name!r}, expected {self.short_name}"
            )
        return self

    @property
    def short_name(self) -> str:
        """Its name, also where `name` says where its code is."""
        return str(type(self).model_fields["name"].default)

    @property
    def rollouts_per_task(self) -> int:
        """Episodes that a step plays of each of its tasks."""
        return 1

    @property
    def keeps_a_copy(self) -> bool:
        """Whether the algorithm has a copy of the policy's trained weights besides them."""
        return False

    @property
    def min_episodes_per_step(self) -> int:
        """Episodes that a step needs, where it compares them with each other."""
        return 1

    @property
    def min_state_visits(self) -> int | None:
        """Episodes that make a state's value known, where values of states are used."""
        return None

    def formula(self) -> str:
        """The loss in symbols, with the settings that a reader looks for."""
        return ""

    def check(self, config: RunConfig) -> None:
        """Raises ValueError where an option does not go with another section."""

    def check_environment(self, *, deterministic: bool) -> None:
        """Raises ValueError where an option does not go with what the environment declares."""

    def normalized(self, rollouts: Any) -> Any:
        """The step's `training.rollouts.Rollouts`, with normalised returns where configured."""
        return rollouts

    def make(self, config: RunConfig, policy: Any) -> Any:
        """The `training.algorithms.base.Algorithm` that trains `policy`, a LanguageModel."""
        raise NotImplementedError


def algorithm_names() -> tuple[str, ...]:
    """Built-in algorithms, and those of installed packages."""
    return tuple(dict.fromkeys([*ALGORITHMS, *sorted(_installed(tuple(sys.path)))]))


def algorithm_class(name: object) -> type[AlgorithmConfig]:
    """The class of an algorithm; ValueError for a name without one.

    Imports no code that a reference names: `import_algorithm` does, or `provide_algorithm`.
    """
    if str(name) in ALGORITHMS:
        return pkgutil.resolve_name(ALGORITHMS[str(name)])
    if is_reference(str(name)):
        if own := OWN.get(with_absolute_path(str(name))):
            return own
        raise ValueError(f"{name!r} names Python code, and {TRUST}")
    if point := _installed(tuple(sys.path)).get(str(name)):
        return _loaded(point)
    close = difflib.get_close_matches(str(name), algorithm_names(), n=1)
    meant = f" (did you mean {close[0]}?)" if close else ""
    raise ValueError(
        f"got {name!r}{meant}, expected {' or '.join(algorithm_names())}; one of another package "
        "is found once that is installed, and one of your own as path.py:Class "
        "(docs/adding_an_algorithm.md)"
    )


def import_algorithm(reference: str) -> None:
    """Imports the class that a reference names; raises ConfigError for what is no algorithm."""
    reference = with_absolute_path(reference)
    if reference in OWN:
        return
    found = referenced_code(reference, ALGORITHM)
    if not _is_algorithm(found):
        raise ConfigError(f"{ALGORITHM.key}: {reference} is no {_HAS_TO_BE}; {_PAGE}")
    OWN[reference] = found


def provide_algorithm(own: type[AlgorithmConfig], *, reference: str | None = None) -> str:
    """From now on this process knows a caller's class; its name, or the reference to it.

    `reference` is the one under which a run keeps it, if it does. Raises ConfigError for what is no
    algorithm, or what no other process could find.
    """
    if not _is_algorithm(own):
        raise ConfigError(f"algorithm: got {own!r:.80}, expected a name or a {_HAS_TO_BE}; {_PAGE}")
    name = str(own.model_fields["name"].default)
    with suppress(ValueError):
        if algorithm_class(name) is own:
            return name
    if reference is None or not is_reference(reference):
        reference = reference_to(own, ALGORITHM)
    OWN[reference] = own
    return reference


def _is_algorithm(found: object) -> bool:
    return (
        isinstance(found, type)
        and issubclass(found, AlgorithmConfig)
        and isinstance(getattr(found, "traits", None), Traits)
        and isinstance(found.model_fields["name"].default, str)
    )


def algorithm_classes() -> dict[str, type[AlgorithmConfig]]:
    """All classes by name. A package that is broken is an error only where it is named."""
    classes = dict(OWN)
    for name in algorithm_names():
        with suppress(ValueError):
            classes[name] = algorithm_class(name)
    return classes


@functools.lru_cache(maxsize=8)
def _installed(_: tuple[str, ...]) -> Mapping[str, EntryPoint]:
    """Algorithms of installed packages, read once for a `sys.path`: it takes milliseconds."""
    return {point.name: point for point in entry_points(group=ENTRY_POINT_GROUP)}


def _loaded(point: EntryPoint) -> type[AlgorithmConfig]:
    try:
        found = point.load()
        if _is_algorithm(found):
            return found
        raise TypeError(f"expected a {_HAS_TO_BE}")
    except (Exception, SystemExit) as error:
        raise ValueError(
            f"the installed {point.name!r} ({point.value}) cannot be used: "
            f"{exception_in_words(error)}; {_PAGE}"
        ) from error


@contextmanager
def algorithm_errors(settings: AlgorithmConfig) -> Iterator[None]:
    """Turns what a user's algorithm raises into one sentence, where it is called amid our code.

    What others raise stays what it is, and a lack of memory as well, of which more is said.
    """
    own = getattr(sys.modules.get(type(settings).__module__), "__file__", None)
    try:
        yield
    except (RagenApoError, MemoryError):
        raise
    except Exception as error:
        lines = [
            frame.lineno
            for frame in traceback.extract_tb(error.__traceback__)
            if frame.filename == own and settings.name not in ALGORITHMS
        ]
        if not lines or "OutOfMemory" in type(error).__name__:
            raise
        raise ALGORITHM.fault(
            f"the algorithm {settings.name!r} raised {exception_in_words(error)} in {own}, line "
            f"{lines[-1]}; its code has to be repaired"
        ) from error


def read_algorithm(values: Any) -> Any:
    """The settings that a mapping with a name says, or a name alone, which means defaults."""
    if isinstance(values, AlgorithmConfig):
        return values
    section = with_absolute_paths(as_section(values))
    if not isinstance(section, Mapping):
        raise ValueError(
            f"got {values!r}, expected a name or a section such as {{name: {DEFAULT}}}"
        )
    chosen = algorithm_class(section.get("name", DEFAULT))
    given = {
        key: value
        for key, value in section.items()
        if key in chosen.model_fields or not is_passed_over(f"algorithm.{key}", value)
    }
    return chosen.model_validate(given)
