"""Real trackers, without a network and without accounts."""

import os
import tempfile
from pathlib import Path

import pytest

# Both packages read these once, when they are imported.
os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
TRACKIO_DIR = tempfile.TemporaryDirectory(prefix="ragen-apo-trackio-")
os.environ["TRACKIO_DIR"] = TRACKIO_DIR.name


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in os.environ:
        if name.startswith(("WANDB_", "MLFLOW_TRACKING", "TRACKIO_S")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    monkeypatch.setenv("HOME", str(tmp_path))  # no ~/.netrc
