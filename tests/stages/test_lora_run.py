"""A whole run with adapters: what it writes, and that it ends the same after an interruption."""

import functools
import itertools
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import AutoPeftModelForCausalLM
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from ragen_apo.config import RunConfig
from ragen_apo.errors import RunDirectoryError
from ragen_apo.files import read_json_lines
from ragen_apo.policy.lora import has_adapters
from ragen_apo.progress import SilentProgress
from ragen_apo.run_directory import RunDirectory
from ragen_apo.session import Session, open_session
from ragen_apo.stages import training as stage_two
from ragen_apo.training.checkpoint import list_checkpoints
from ragen_apo.training.trainer import Trainer
from ragen_apo.warm_start import supervised
from tests import factories
from tests.factories import rows

pytestmark = pytest.mark.slow

LoraConfig = Callable[..., RunConfig]


@pytest.fixture(scope="module")
def lora_config(qwen_folder: Path) -> LoraConfig:
    """Four updates on demonstrations with dropout, four steps, a new reference after two."""
    return functools.partial(
        factories.config,
        f"--policy.path={qwen_folder}",
        "--policy.lora={rank: 4, alpha: 64, dropout: 0.1}",
        "--machine.gradient_checkpointing=true",
        "--agent.max_context_tokens=1024",
        "--warm_start.copy.max_steps=0",
        "--warm_start.demonstrations.num_steps=4",
        "--warm_start.checkpoint_every=2",
        "--reference.refresh_every_steps=2",
        "--values.baseline=zero",  # returns are equal here, and so are they and V*
        "--optimizer.learning_rate=0.01",
        "--training.max_steps=4",
        "--training.tasks_per_step=4",
        "--training.eval_every=null",
    )


@pytest.fixture(scope="module")
def lora_run(lora_config: LoraConfig, tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """A run without interruption; read only."""
    return factories.run(lora_config(), tmp_path_factory.mktemp("lora") / "run")


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def test_references_and_policy_are_plain_models_that_differ_in_linear_layers_only(
    lora_run: RunDirectory, qwen_folder: Path
) -> None:
    folders = [qwen_folder, lora_run.reference(0), lora_run.reference(1), lora_run.policy]
    for earlier, later in itertools.pairwise(folders):
        before, after = weights(earlier), weights(later)
        assert before.keys() == after.keys()
        changed = {name for name in before if not torch.equal(before[name], after[name])}
        assert changed == {name for name in before if name.endswith("proj.weight")}


def test_peft_loads_the_adapters_onto_the_first_reference(lora_run: RunDirectory) -> None:
    loaded = AutoPeftModelForCausalLM.from_pretrained(lora_run.adapter)
    base = AutoModelForCausalLM.from_pretrained(lora_run.reference(0))
    merged = AutoModelForCausalLM.from_pretrained(lora_run.policy)
    token_ids = AutoTokenizer.from_pretrained(lora_run.policy)("search mug", return_tensors="pt")
    with torch.inference_mode():
        logits = [model(**token_ids).logits for model in (loaded, merged, base)]
    torch.testing.assert_close(logits[0], logits[1], atol=1e-4, rtol=1e-4)
    assert (logits[1] - logits[2]).abs().max() > 1e-3


def test_a_checkpoint_holds_adapters_and_their_moments_only(lora_run: RunDirectory) -> None:
    newest = list_checkpoints(lora_run.checkpoints)[-1]
    names = set(weights(newest))
    assert len(names) == 2 * 7 * 2
    assert all(".lora_" in name for name in names)
    moments = load_file(newest / "optimizer.safetensors")
    assert {name.rpartition("/")[0] for name in moments} == names


@pytest.fixture
def run_until_interrupted(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes a run, or goes on with it, up to the n-th call of a function."""

    def run_until_interrupted(
        config: RunConfig, path: Path, owner: object, name: str, call: int
    ) -> None:
        original, num_calls = getattr(owner, name), 0

        def interrupted(*args, **kwargs):
            nonlocal num_calls
            num_calls += 1
            if num_calls == call:
                raise KeyboardInterrupt
            return original(*args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(owner, name, interrupted)
            with pytest.raises(KeyboardInterrupt):
                factories.run(config, path)

    return run_until_interrupted


INTERRUPTIONS = {
    "demonstrations": (supervised, "accumulate_supervised_gradients", 4, "2-demonstrations-000002"),
    "first reference": (Trainer, "step", 2, "2-demonstrations-000004"),
    "second reference": (Trainer, "step", 4, "4-training-000002"),
    "last checkpoint": (stage_two, "save_checkpoint", 1, "4-training-000002"),
}
"""In the order of a run: at which call since it was resumed, and with which newest checkpoint."""


def test_a_run_that_is_interrupted_again_and_again_ends_with_the_same_weights(
    lora_config: LoraConfig,
    lora_run: RunDirectory,
    tmp_path: Path,
    run_until_interrupted: Callable[..., None],
) -> None:
    run = RunDirectory(tmp_path / "run")
    for name, (*moment, newest) in INTERRUPTIONS.items():
        run_until_interrupted(lora_config(), run.path, *moment)
        assert list_checkpoints(run.checkpoints)[-1].name == newest, name
        torch.manual_seed(99)  # what the global generator holds must not matter
    factories.run(lora_config(), run.path)
    for folder in ("references/0", "references/1", "policy"):
        left, right = weights(run.path / folder), weights(lora_run.path / folder)
        assert all(torch.equal(left[name], right[name]) for name in right)
    assert rows(run.metrics) == rows(lora_run.metrics)


def test_a_warm_start_of_adapters_does_not_go_on_from_another_model_in_the_same_folder(
    lora_config: LoraConfig,
    qwen_folder: Path,
    tmp_path: Path,
    run_until_interrupted: Callable[..., None],
) -> None:
    model = Path(shutil.copytree(qwen_folder, tmp_path / "model"))
    config = lora_config(f"--policy.path={model}")
    run_until_interrupted(config, tmp_path / "run", Session, "save_model", 1)
    tensors = weights(model)
    tensors["model.norm.weight"] += 0.5
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    run = RunDirectory(tmp_path / "run")
    assert list(run.checkpoints.iterdir())
    with pytest.raises(RunDirectoryError, match="another model than this run was started with"):
        factories.run(config, run.path)
    assert not run.reference(0).exists()


def test_the_first_reference_is_the_policy_without_adapters_and_needs_no_second_copy(
    lora_config: LoraConfig, tmp_path: Path, qwen_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pairs = []
    original = Trainer.step

    def watched(trainer: Trainer, step: int):
        pairs.append((trainer.policy.model, trainer.reference, trainer.values))
        return original(trainer, step)

    monkeypatch.setattr(Trainer, "step", watched)
    config = lora_config(
        "--warm_start.enabled=false",
        "--reference.refresh_every_steps=null",
        "--training.max_steps=2",
    )
    run = factories.run(config, tmp_path / "run")
    assert all(reference.model is policy for policy, reference, _ in pairs)
    assert all(has_adapters(policy) for policy, _, _ in pairs)
    plain = open_session(config, run, SilentProgress()).load_model(qwen_folder)
    assert pairs[-1][1].fingerprint() == plain.fingerprint(), "the bare pretrained model"
    first, second = read_json_lines(run.metrics)
    assert first["kl_per_sequence"] == pytest.approx(0, abs=1e-4)
    assert abs(second["kl_per_sequence"]) > 1e-3


def test_ppo_with_adapters_resumes_exactly(
    lora_config: LoraConfig, tmp_path: Path, run_until_interrupted: Callable[..., None]
) -> None:
    config = lora_config(
        "--algorithm=ppo",
        "--values.baseline=v_star",
        "--warm_start.enabled=false",
        "--training.checkpoint_every=1",
    )
    whole = factories.run(config, tmp_path / "whole")
    run_until_interrupted(config, tmp_path / "run", Trainer, "step", 4)
    run = RunDirectory(tmp_path / "run")
    factories.run(config, run.path)
    for folder in (run.policy, list_checkpoints(run.checkpoints)[-1]):
        other = whole.path / folder.relative_to(run.path)
        for file in folder.glob("*.safetensors"):
            left, right = load_file(file), load_file(other / file.name)
            assert left.keys() == right.keys()
            assert all(torch.equal(left[name], right[name]) for name in right)


def test_what_merged_adapters_round_otherwise_makes_no_new_reference(
    lora_config: LoraConfig, tmp_path: Path
) -> None:
    """W x + B A x is not (W + B A) x in bfloat16, so the KL to a new reference begins above 0."""
    keys = ("--machine.mixed_precision=bfloat16", "--reference.refresh_max_kl=1e-5")
    run = factories.run(lora_config(*keys), tmp_path / "run")
    steps = rows(run.metrics)
    assert [row["reference_version"] for row in steps] == [0, 0, 1, 1]
    assert steps[0]["kl_per_sequence"] == 0.0
    assert steps[2]["kl_per_sequence"] > 1e-5
