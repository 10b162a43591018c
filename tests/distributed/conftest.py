"""A run that has its reference, and copies of it to go on with."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest

from ragen_apo.run_directory import RunDirectory
from tests import factories
from tests.distributed.processes import answers, in_ranks
from tests.distributed.runs import TWO_LAYERS, config_file, make_reference, with_keys
from tests.factories import AlgorithmRuns, made_once


@pytest.fixture(scope="session")
def finished_run(shared: Path) -> Path:
    """As elsewhere, with two layers: weights in shares are gathered layer by layer. Read only."""
    config = factories.config(*TWO_LAYERS)
    return made_once(shared / "two-layers", partial(factories.run, config))


@pytest.fixture(scope="session")
def algorithm_runs(finished_run: Path, shared: Path) -> AlgorithmRuns:
    return AlgorithmRuns(finished_run / "references" / "0", shared / "two-layers-algorithms")


@pytest.fixture(scope="session")
def with_reference(shared: Path) -> Path:
    """A run of one process that has its reference; read only."""

    def make(run: Path) -> None:
        answers(in_ranks(1, make_reference, config_file(run.parent), run))

    return made_once(shared / "with-reference", make)


@pytest.fixture(scope="module")
def started(
    request: pytest.FixtureRequest, with_reference: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The run, with the module's `RUN_KEYS` if it has some."""
    path = Path(shutil.copytree(with_reference, tmp_path_factory.mktemp("started") / "run"))
    return with_keys(RunDirectory(path), *getattr(request.module, "RUN_KEYS", ())).path


@pytest.fixture
def copy(started: Path, tmp_path: Path) -> Callable[[str], RunDirectory]:
    """Makes a copy of the run of that name."""
    return lambda name: RunDirectory(Path(shutil.copytree(started, tmp_path / name)))


@pytest.fixture(scope="session")
def by_one_process() -> Callable[..., Any]:
    """What a function returns in a fork that is alone; asked again, it is not computed again."""
    return cache(lambda *options: answers(in_ranks(1, *options))[0])
