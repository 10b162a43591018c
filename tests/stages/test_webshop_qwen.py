"""configs/webshop_qwen.yaml from end to end: only the model, the data and the sizes are smaller."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2ForCausalLM

from ragen_apo.agent.assembly import build_context
from ragen_apo.config import load_config
from ragen_apo.files import read_json_lines
from ragen_apo.policy.generation import GenerationEngine
from ragen_apo.policy.language_model import load_language_model
from ragen_apo.progress import SilentProgress
from ragen_apo.run_directory import RunDirectory
from ragen_apo.seeding import generator
from ragen_apo.session import open_session
from ragen_apo.training.checkpoint import list_checkpoints
from tests.factories import shipped_run
from tests.generating import respond

pytestmark = pytest.mark.slow

CONFIG = Path(__file__).resolve().parents[2] / "configs" / "webshop_qwen.yaml"


@pytest.fixture(scope="module")
def run(qwen_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """Stage 1, two steps of Stage 2, a new reference between them, evaluation and report."""
    folder = tmp_path_factory.mktemp("qwen")
    return shipped_run(
        CONFIG,
        folder / "run",
        f"--policy.path={qwen_folder}",
        "--environment.data=generated:500",
        "--environment.max_turns=6",
        f"--environment.store={folder / 'store'}",
        "--reference.refresh_every_steps=1",
    )


def test_it_runs_from_stage_one_to_the_report(run: RunDirectory) -> None:
    assert (run.reference(0) / "model.safetensors").exists()
    assert json.loads(run.value_report_of(0).read_text())["num_tasks"] == 4
    rows = read_json_lines(run.metrics)
    assert [row["step"] for row in rows] == [1, 2]
    assert [row["reference_version"] for row in rows] == [0, 1]
    assert all("eval_success_rate" in row for row in rows)
    results = json.loads(run.results.read_text())
    assert results["episodes"] == 3
    measured = {"score", "type_match", "attribute_match", "price_match", "option_match"}
    assert set(results["metrics"]) == set(results["baselines"]["reference"]["metrics"]) == measured
    for kind in ("environment", "eval_environment"):
        assert all(f"{kind}/score" in row for row in rows)
    assert "reference" in results["baselines"]
    assert (run.report / "report.html").exists()
    assert list_checkpoints(run.checkpoints)


def test_the_report_says_where_the_policy_came_from_and_what_its_tasks_are_made_of(
    run: RunDirectory, qwen_folder: Path
) -> None:
    data = "500 generated products"
    assert run.read_status()["data"] == data
    sentence = f"The reference is the model {qwen_folder}; tasks are made of {data}."
    assert sentence in (run.report / "report.html").read_text(encoding="utf-8")
    assert "(warm start)" not in (run.report / "summary.csv").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def prompts(run: RunDirectory) -> list[list[int]]:
    """What the agent reads first in three test episodes."""
    session = open_session(load_config(run.config), run, SilentProgress())
    context = build_context(
        session.config.agent, session.load_model(run.policy), session.environments
    )
    tasks = session.environments.tasks("test")[:3]
    return [context.first_prompt(session.environments.start(task, seed=0)[1]) for task in tasks]


def test_the_model_is_told_the_form_of_an_answer_and_the_actions(
    run: RunDirectory, prompts: list[list[int]]
) -> None:
    text = AutoTokenizer.from_pretrained(run.policy).decode(prompts[0])
    assert text.startswith("<|im_start|>system\nYou shop for a customer in a web shop.")
    assert "<think>your thought</think><answer>action</answer>" in text
    assert text.endswith("<|im_start|>assistant\n")
    assert "helpful assistant" not in text
    played = read_json_lines(run.episodes)[0]["turns"][0]
    assert played["observation"] in text


def test_the_saved_policy_is_a_plain_model_that_writes_the_same_text(
    run: RunDirectory, prompts: list[list[int]]
) -> None:
    plain, info = AutoModelForCausalLM.from_pretrained(run.policy, output_loading_info=True)
    assert isinstance(plain, Qwen2ForCausalLM)
    assert not any(info.values())
    ours = load_language_model(run.policy, device=torch.device("cpu"))
    engine = GenerationEngine(ours, num_rows=len(prompts), capacity=2048)
    rows = [engine.open_row(generator(index)) for index in range(len(prompts))]
    responses = respond(engine, rows, prompts, max_new_tokens=24, temperature=0.0)
    for prompt, response in zip(prompts, responses, strict=True):
        written = plain.generate(torch.tensor([prompt]), max_new_tokens=24, do_sample=False)
        assert written[0, len(prompt) :].tolist() == list(response.token_ids)


def test_the_real_model_fits_the_configuration() -> None:
    """What Qwen/Qwen2.5-1.5B-Instruct says of itself in its config.json."""
    config = load_config(CONFIG)
    assert config.policy.path == "Qwen/Qwen2.5-1.5B-Instruct"
    assert config.agent.max_context_tokens <= 32_768
    assert config.environment.options["max_turns"] == 15
    assert not config.warm_start.enabled
