"""A finished tiny run to take models from, and the session of a copy of it."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ragen_apo.config import parse_config
from ragen_apo.progress import SilentProgress
from ragen_apo.run_directory import RunDirectory
from ragen_apo.training.session import Session, open_session


@pytest.fixture
def session(finished_run: Path, tiny_config: str, tmp_path: Path) -> Iterator[Session]:
    """Work on a copy of the finished run, with the tiny configuration."""
    shutil.copytree(finished_run, tmp_path / "copy")
    before = torch.get_num_threads()
    config = parse_config(tiny_config, source="tiny")
    yield open_session(config, RunDirectory(tmp_path / "copy"), SilentProgress())
    torch.set_num_threads(before)
