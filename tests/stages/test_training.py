"""Stage 2 as a stage of a run: when the policy becomes the new reference, and what is sampled."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import ragen_apo
from ragen_apo.errors import ContextError
from ragen_apo.files import read_json_lines
from ragen_apo.run_directory import RunDirectory
from ragen_apo.stages.values import sample_schedule
from tests import factories
from tests.environments.questions.files import question, write_rows
from tests.factories import AlgorithmRuns


@pytest.mark.slow
@pytest.mark.parametrize(("max_kl", "versions"), [(1e-12, [0, 1, 2, 3]), (1e9, [0, 0, 0, 0])])
def test_a_policy_farther_from_its_reference_than_the_limit_becomes_the_new_one(
    max_kl: float, versions: list[int], algorithm_runs: AlgorithmRuns, tmp_path: Path
) -> None:
    keys = ["--training.checkpoint_every=1", f"--reference.refresh_max_kl={max_kl}"]
    config = algorithm_runs.config("rloo", "--algorithm.num_minibatches=2", *keys)
    rows = read_json_lines(factories.run(config, tmp_path / "run").metrics)
    # The first update starts at the reference, so the second of a step is what leaves it.
    assert [row["reference_version"] for row in rows] == versions
    assert all(row["kl_per_sequence"] < 1e9 for row in rows)


@pytest.mark.slow
def test_steps_without_an_update_are_counted(algorithm_runs: AlgorithmRuns, tmp_path: Path) -> None:
    """A student saw `3/3 success 100%` after three steps, one of which had done nothing."""
    said = factories.Sayings()
    alike = ["--agent.max_response_tokens=1", "--algorithm.center_residuals=true"]
    config = algorithm_runs.config("apo", *alike)
    factories.run(config, tmp_path / "run", progress=said)
    assert "4 of 4 steps made no update" in "\n".join(said.lines)


@pytest.mark.slow
def test_new_references_are_sampled_as_often_as_the_section_reference_says(
    algorithm_runs: AlgorithmRuns, tmp_path: Path
) -> None:
    keys = ["--values.num_samples=3", "--values.adaptive=false"]
    new = ["--reference.refresh_every_steps=2", "--reference.num_samples=2"]
    run = factories.run(algorithm_runs.config("apo", *keys, *new), tmp_path / "run")
    reports = [json.loads(run.value_report_of(version).read_text()) for version in (0, 1)]
    assert [report["tasks_by_num_samples"] for report in reports] == [{"3": 21}, {"2": 21}]
    # By hand it is as configured as well, unless another number is asked for.
    for asked, per_task in ((None, 2), (5, 5)):
        report = ragen_apo.estimate_values(run.path, samples=asked, reference=1, progress=False)
        assert report["num_samples"] == per_task * 21


@pytest.mark.slow
def test_a_run_keeps_as_many_checkpoints_as_asked_for(
    algorithm_runs: AlgorithmRuns, tmp_path: Path
) -> None:
    keys = ["--training.checkpoint_every=1", "--training.keep_checkpoints=1"]
    config = algorithm_runs.config("apo", *keys)
    run = factories.run(config, tmp_path / "run")
    (last,) = run.checkpoints.iterdir()
    assert last.name.endswith(f"{config.training.max_steps:06}")


def test_adaptive_rounds_of_a_new_reference_start_with_its_own_number() -> None:
    settings = factories.config("--values.adaptive=true", "--values.num_samples=8", text="").values
    assert sample_schedule(settings).rounds() == (8, 16)
    assert sample_schedule(settings, num_samples=2).rounds() == (2, 4, 8, 16)


@pytest.mark.slow
@pytest.mark.parametrize("frozen", [True, False])
def test_embeddings_of_a_pretrained_model_stay_in_the_warm_start_if_they_are_frozen(
    frozen: bool, qwen_folder: Path, tmp_path: Path
) -> None:
    config = factories.config(
        f"--policy.path={qwen_folder}",
        f"--policy.freeze_embeddings={frozen}",
        "--agent.max_context_tokens=1024",
        "--warm_start.copy.max_steps=0",
        "--warm_start.demonstrations.num_steps=2",
        "--training.max_steps=0",
    )
    reference = factories.run(config, tmp_path / "run").reference(0)
    name = "model.embed_tokens.weight"
    before, after = (load_file(each / "model.safetensors") for each in (qwen_folder, reference))
    assert torch.equal(before[name], after[name]) is frozen
    assert not torch.equal(*(each["model.layers.0.mlp.up_proj.weight"] for each in (before, after)))


@pytest.mark.slow
@pytest.mark.parametrize("split", ["train", "test"])
def test_a_question_that_does_not_fit_is_refused_before_anything_is_computed(
    split: str, tmp_path: Path
) -> None:
    """It would be played in some later step, or in the evaluation after the last one."""
    rows = [question(number) for number in range(30)]
    rows[29 if split == "test" else 5]["question"] += " Think." * 500
    data = {name: tmp_path / f"{name}.jsonl" for name in ("train", "test")}
    write_rows(data["train"], rows[:20])
    write_rows(data["test"], rows[20:])
    world = {"name": "questions", "data": str(data["train"]), "test_data": str(data["test"])}
    keys = ("--warm_start.enabled=false", "--evaluation.num_episodes=10")
    config = factories.config(*keys, environment=world)
    with pytest.raises(ContextError, match=r"opens with \d+ tokens, .* raise it, or shorten"):
        factories.run(config, tmp_path / "run")
    assert not RunDirectory(tmp_path / "run").reference(0).exists()
    if split == "test":  # the last of ten test questions
        keys = ("--evaluation.num_episodes=9", "--training.eval_episodes=10")
        often = factories.changed(config, *keys)
        with pytest.raises(ContextError, match=r"opens with \d+ tokens"):
            factories.run(often, tmp_path / "often")
        assert not RunDirectory(tmp_path / "often").reference(0).exists()
        fewer = factories.changed(often, "--training.eval_every=null", "--training.max_steps=1")
        assert factories.run(fewer, tmp_path / "fewer").policy.exists()
