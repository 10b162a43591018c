"""configs/gsm8k_qwen.yaml from end to end: only model, questions and sizes are smaller."""

import json
from pathlib import Path

import pytest

from ragen_apo.config import load_config
from ragen_apo.files import read_json_lines
from ragen_apo.training.algorithms.apo import ValueConfig
from tests.environments.questions.files import question, write_rows
from tests.factories import shipped_run

CONFIG = Path(__file__).resolve().parents[2] / "configs" / "gsm8k_qwen.yaml"


@pytest.mark.slow
def test_it_runs_from_stage_one_to_the_report(qwen_folder: Path, tmp_path: Path) -> None:
    path = write_rows(tmp_path / "own.jsonl", [question(number) for number in range(30)])
    run = shipped_run(
        CONFIG,
        tmp_path / "run",
        f"--policy.path={qwen_folder}",
        "--environment.dataset=null",
        "--environment.subset=null",
        f"--environment.data={path}",
    )
    assert [row["step"] for row in read_json_lines(run.metrics)] == [1, 2]
    assert json.loads(run.results.read_text())["episodes"] == 3
    page = (run.report / "report.html").read_text(encoding="utf-8")
    assert f"30 questions of {path}" in page


def test_it_has_the_settings_of_the_papers_authors() -> None:
    """scripts/apo_gsm8k.sh and apo_trainer.yaml in github.com/ZhaolinGao/A-PO, commit 637ca6f."""
    config = load_config(CONFIG)
    assert isinstance(config.algorithm, ValueConfig)
    assert (config.values.beta1, config.algorithm.beta2) == (0.5, 1e-3)
    assert (config.values.num_samples, config.optimizer.learning_rate) == (8, 1e-6)
    # Theirs is 1 for the square, which is 2 beta2 times our loss.
    assert config.optimizer.max_grad_norm == 1 / (2 * config.algorithm.beta2)
    assert (config.training.tasks_per_step, config.agent.max_response_tokens) == (256, 1024)
    assert config.training.max_steps == 25 * (7473 // 256)
    assert config.environment.options["dataset"] == "openai/gsm8k"
