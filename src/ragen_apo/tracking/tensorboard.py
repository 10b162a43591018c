"""TensorBoard: event files in the run's folder; `tensorboard --logdir runs` shows all runs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ragen_apo.tracking.base import facts, messages
from ragen_apo.types import Trajectory


class TensorBoard:
    """Writes `tensorboard/` in the run's folder of trackers."""

    def __init__(
        self, run_name: str, config: Mapping[str, Any], *, project: str, folder: Path
    ) -> None:
        from torch.utils.tensorboard.writer import SummaryWriter

        self._writer = SummaryWriter(str(folder / "tensorboard"))
        self._writer.add_text("config", _block(json.dumps(config, indent=2)))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def log_episodes(self, step: int, episodes: Sequence[Trajectory]) -> None:
        for number, episode in enumerate(episodes):
            parts = [
                json.dumps(facts(episode), indent=2),
                *(f"{message['role']}: {message['content']}" for message in messages(episode)),
            ]
            self._writer.add_text(f"episode {number}", _block("\n\n".join(parts)), step)

    def finish(self, *, failed: bool) -> None:
        self._writer.close()


def _block(text: str) -> str:
    """As TensorBoard's Markdown shows text unchanged."""
    return "".join(f"    {line}\n" for line in text.splitlines())
