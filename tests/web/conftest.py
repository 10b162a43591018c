"""A folder with two runs that were really trained."""

import shutil
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def trained_runs(finished_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The finished run twice, under `first` and `group/second`; read only."""
    folder = tmp_path_factory.mktemp("runs")
    shutil.copytree(finished_run, folder / "first")
    shutil.copytree(finished_run, folder / "group" / "second")
    return folder
