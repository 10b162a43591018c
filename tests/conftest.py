"""How the tests run; what they share is in `tests/fixtures.py`.

Their temporary folders are in memory where there is room. Runs flush each file to the disk, and
beside other work tests waited half of their time for that. An idle machine is no faster by it.
"""

import gc
import os
import shutil
from pathlib import Path

import pytest

from ragen_apo.environments.toolkit.line_process import allow_open_files

os.environ["HF_HUB_OFFLINE"] = "1"

IN_MEMORY = Path("/dev/shm")
ROOM_BYTES = 6 * 2**30


def pytest_configure(config: pytest.Config) -> None:
    allow_open_files()  # tests of catalogues need more than macOS begins with
    if IN_MEMORY.is_dir() and shutil.disk_usage(IN_MEMORY).free >= ROOM_BYTES:
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(IN_MEMORY))
    if config.getoption("dist", "no") == "no":
        # Imports and collection leave no garbage, and there is much to look through.
        gc.disable()
        config.pluginmanager.import_plugin("tests.fixtures")
    # Else this process of pytest-xdist hands out tests and runs none: it needs no torch.


def pytest_collection_finish() -> None:
    """What is there now stays to the end: nobody looks for garbage in it, in no fork either."""
    gc.freeze()
    gc.set_threshold(10_000)
    gc.enable()
