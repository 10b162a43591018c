"""Weights & Biases: https://docs.wandb.ai. Its key and address come from the environment alone."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ragen_apo.errors import ConfigError
from ragen_apo.tracking.base import facts, messages
from ragen_apo.types import Trajectory

MAX_UPLOAD_SECONDS = 300.0
"""How long the end of a run waits for what is still to be uploaded; the rest stays on disk."""


class WeightsAndBiases:
    """One run of W&B, whose id is the name of the run."""

    def __init__(
        self, run_name: str, config: Mapping[str, Any], *, project: str, folder: Path
    ) -> None:
        self._wandb: Any = importlib.import_module("wandb")
        self._with_axis: set[str] = set()
        folder.mkdir(parents=True, exist_ok=True)  # wandb takes another folder otherwise
        self._require_key()
        settings = self._wandb.Settings(
            silent=True,
            console="off",
            disable_code=True,
            disable_git=True,
            finish_timeout=MAX_UPLOAD_SECONDS,
        )
        self._run = self._wandb.init(
            project=project,
            id=run_name,
            name=run_name,
            resume="allow",
            config=dict(config),
            dir=str(folder),
            settings=settings,
        )

    def _require_key(self) -> None:
        """Without one, `init` would ask on the terminal and wait."""
        known = self._wandb.setup().settings
        get_netrc_auth = importlib.import_module("requests.utils").get_netrc_auth
        if known.mode == "online" and not (
            known.api_key or known.identity_token_file or get_netrc_auth(known.base_url)
        ):
            raise ConfigError(
                "no key: set WANDB_API_KEY or run `wandb login`; WANDB_MODE=offline needs none"
            )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        row = dict(metrics)
        for name in metrics:
            prefix, slash, _ = name.rpartition("/")
            axis = f"{prefix}{slash}step"
            if name not in self._with_axis:
                self._run.define_metric(name, step_metric=axis)
                self._with_axis.add(name)
            row[axis] = step
        self._run.log(row)

    def log_episodes(self, step: int, episodes: Sequence[Trajectory]) -> None:
        rows = [
            [step, *facts(episode).values(), json.dumps(messages(episode), ensure_ascii=False)]
            for episode in episodes
        ]
        columns = ["step", *facts(episodes[0]), "messages"]
        self._run.log({"episodes": self._wandb.Table(columns=columns, data=rows), "step": step})

    def finish(self, *, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))
