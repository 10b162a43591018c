"""The policies that a run has, by the names that an evaluation gives them, and their models."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ragen_apo.errors import RunDirectoryError
from ragen_apo.run_directory import RunDirectory
from ragen_apo.session import Session
from ragen_apo.web.at_work.writer import Writer

MAX_LOADED = 3
"""Models in memory: the policy, its reference and another one."""
REFERENCE = "reference"


@dataclass(frozen=True)
class Policy:
    """A policy of a run."""

    folder: Path
    reference_version: int | None = None
    """The number of a reference; None for what is none."""


def policies_of(run: RunDirectory) -> Mapping[str, Policy]:
    """Those that the run has by now, by name, the best trained one first.

    Raises RunDirectoryError where there is none.
    """
    known = {
        "trained": Policy(run.policy),
        "distilled": Policy(run.distilled),
        **{
            f"{REFERENCE} {version}" if version else REFERENCE: Policy(
                run.reference(version), version
            )
            for version in run.reference_versions()
        },
        "initial": Policy(run.initial),
    }
    found = {name: policy for name, policy in known.items() if policy.folder.is_dir()}
    if not found:
        raise RunDirectoryError(f"{run.path} has no model yet; go on with `{run.resume_command}`")
    return found


class Models:
    """The policies' models, loaded when they are asked for. For one thread at a time."""

    def __init__(self, session: Session, policies: Mapping[str, Policy]) -> None:
        self._session, self.policies = session, policies
        self._loaded: OrderedDict[str, Writer] = OrderedDict()

    def writer(self, name: str) -> Writer:
        """What writes the responses of a policy; raises what `Session.load_model` does."""
        if name not in self._loaded:
            while len(self._loaded) >= MAX_LOADED:
                self._loaded.popitem(last=False)
            model = self._session.load_model(self.policies[name].folder)
            self._loaded[name] = Writer(model, self._session.config.agent)
        self._loaded.move_to_end(name)
        return self._loaded[name]
