"""MLflow: the server of MLFLOW_TRACKING_URI, else a database in the run's folder."""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ragen_apo.tracking.base import facts, flattened, messages
from ragen_apo.types import Trajectory

MAX_PARAMETERS = 100
"""That MLflow takes in one request."""
MAX_PARAMETER_LENGTH = 500
"""Of the value of a parameter; the whole is in the artifact config.json."""


class MLflow:
    """One run of MLflow, found again by its name in the experiment."""

    def __init__(
        self, run_name: str, config: Mapping[str, Any], *, project: str, folder: Path
    ) -> None:
        self._mlflow: Any = importlib.import_module("mlflow")
        address, artifacts = os.environ.get("MLFLOW_TRACKING_URI"), None
        if not address:
            folder.mkdir(parents=True, exist_ok=True)
            address = f"sqlite:///{(folder / 'mlflow.db').resolve()}"
            artifacts = (folder / "mlflow").resolve().as_uri()
        self._client = self._mlflow.MlflowClient(tracking_uri=address)
        known = self._client.get_experiment_by_name(project)
        experiment = (
            known.experiment_id
            if known
            else self._client.create_experiment(project, artifact_location=artifacts)
        )
        name = f"attributes.run_name = '{run_name}'"
        if found := self._client.search_runs([experiment], filter_string=name, max_results=1):
            self._run = found[0].info.run_id
            self._client.update_run(self._run, status="RUNNING")
            known_parameters = found[0].data.params
        else:
            self._run = self._client.create_run(experiment, run_name=run_name).info.run_id
            known_parameters = {}
        self._note_config(config, known_parameters)

    def _note_config(self, config: Mapping[str, Any], known: Mapping[str, str]) -> None:
        """A parameter keeps its first value, as MLflow wants it; config.json has the newest."""
        parameters = [
            self._mlflow.entities.Param(name, str(value)[:MAX_PARAMETER_LENGTH])
            for name, value in flattened(config, separator=".")
            if name not in known
        ]
        for start in range(0, len(parameters), MAX_PARAMETERS):
            part = parameters[start : start + MAX_PARAMETERS]
            self._client.log_batch(self._run, params=part)
        self._client.log_dict(self._run, dict(config), "config.json")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        rows = [self._mlflow.entities.Metric(*each, now, step) for each in metrics.items()]
        self._client.log_batch(self._run, metrics=rows)

    def log_episodes(self, step: int, episodes: Sequence[Trajectory]) -> None:
        rows = [facts(episode) | {"messages": messages(episode)} for episode in episodes]
        self._client.log_dict(self._run, {"episodes": rows}, f"episodes/step-{step:06}.json")

    def finish(self, *, failed: bool) -> None:
        self._client.set_terminated(self._run, status="FAILED" if failed else "FINISHED")
