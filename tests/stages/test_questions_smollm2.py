"""configs/questions_smollm2.yaml from end to end: only model, questions and sizes are smaller."""

import json
from pathlib import Path

import pytest

from tests.environments.questions.files import question, write_rows
from tests.factories import shipped_run

CONFIG = Path(__file__).resolve().parents[2] / "configs" / "questions_smollm2.yaml"


@pytest.mark.slow
def test_it_runs_on_questions_of_a_file(qwen_folder: Path, tmp_path: Path) -> None:
    path = write_rows(tmp_path / "own.jsonl", [question(number) for number in range(30)])
    run = shipped_run(
        CONFIG,
        tmp_path / "run",
        f"--policy.path={qwen_folder}",
        f"--environment.data={path}",
        "--warm_start.demonstrations.num_steps=1",
    )
    assert json.loads(run.results.read_text())["episodes"] == 3
