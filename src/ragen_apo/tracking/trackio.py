"""trackio: a local database, or the Space or server of TRACKIO_SPACE_ID or TRACKIO_SERVER_URL.

`trackio show` is its dashboard; https://huggingface.co/docs/trackio.
"""

from __future__ import annotations

import contextlib
import importlib
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ragen_apo.tracking.base import facts, messages
from ragen_apo.types import Trajectory


class Trackio:
    """One run of trackio; all runs of this user are in one database (TRACKIO_DIR), side by side."""

    def __init__(
        self, run_name: str, config: Mapping[str, Any], *, project: str, folder: Path
    ) -> None:
        self._trackio: Any = importlib.import_module("trackio")
        with contextlib.redirect_stdout(io.StringIO()):
            self._run = self._trackio.init(
                project,
                name=run_name,
                resume="allow",
                config=dict(config),
                embed=False,
                auto_log_cpu=False,
                auto_log_gpu=False,
            )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def log_episodes(self, step: int, episodes: Sequence[Trajectory]) -> None:
        traces = [
            self._trackio.Trace(messages=messages(episode), metadata=facts(episode))
            for episode in episodes
        ]
        self._run.log({"episodes": traces}, step=step)

    def finish(self, *, failed: bool) -> None:
        with contextlib.redirect_stdout(io.StringIO()):
            self._trackio.finish()
