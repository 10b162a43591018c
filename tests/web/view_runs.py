"""Runs that the pages are tested on: written by hand where a test needs texts that no run has."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from starlette.testclient import TestClient

from ragen_apo.evaluation.summary import episode_rows, results_document
from ragen_apo.files import write_json_atomically, write_json_lines_atomically
from ragen_apo.types import Trajectory
from ragen_apo.web.serving import make_app
from ragen_apo.web.view.folder import open_folder
from ragen_apo.web.view.routes import view_routes
from tests.factories import TINY_CONFIG, played

HOSTILE = "<script>alert(1)</script>\x1b[2J\u202e'\"><img src=x onerror=alert(1)> {{ 7 * 7 }}"


def client(folder: Path) -> TestClient:
    """A browser without JavaScript, on the pages of this folder."""
    return TestClient(make_app(view_routes(open_folder(folder))), base_url="http://127.0.0.1")


def get(pages: TestClient, path: str, **parameters: object) -> str:
    """The page, which must be there."""
    given = {name: str(value) for name, value in parameters.items()}
    answer = pages.get(path, params=given or None)  # an empty mapping removes those of `path`
    assert answer.status_code == 200, answer.text
    return answer.text


def write_run(
    path: Path,
    trajectories: Sequence[Trajectory] = (),
    *,
    metrics: Sequence[Mapping[str, Any]] = (),
    config: str = TINY_CONFIG,
) -> Path:
    """A run directory with an evaluation of these episodes."""
    path.mkdir(parents=True)
    (path / "config.yaml").write_text(config)
    if trajectories:
        rows = episode_rows(trajectories, policy="policy")
        write_json_lines_atomically(path / "evaluation" / "episodes.jsonl", rows)
        document = results_document(trajectories, policy="policy", split="test", baselines={})
        write_json_atomically(path / "evaluation" / "results.json", document)
    if metrics:
        text = "".join(json.dumps(row) + "\n" for row in metrics)
        (path / "metrics.jsonl").write_text(text)
    return path


def some_episodes(num_episodes: int, *, every: int = 2) -> list[Trajectory]:
    """Episodes of as many tasks; each `every`-th fails."""
    return [
        played(f"task number {number}", rewards=[-0.5 if number % every == 0 else 1.0])
        for number in range(num_episodes)
    ]
