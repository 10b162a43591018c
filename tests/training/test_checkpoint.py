import errno
import hashlib
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from ragen_apo.errors import CheckpointError
from ragen_apo.files import PARTIAL_MARK, write_checksums
from ragen_apo.training import checkpoint
from ragen_apo.training.checkpoint import (
    Position,
    list_checkpoints,
    load_latest_checkpoint,
    load_moments,
    save_checkpoint,
)
from ragen_apo.training.optimization import Optimizer


class TiedModel(nn.Module):
    def __init__(self, *, width: int = 3, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(5, width)
        self.head = nn.Linear(width, 5, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("counter", torch.tensor([7 + seed]))


def trained(model: nn.Module) -> Optimizer:
    optimizer = Optimizer(model)
    model.embedding.weight.sum().backward()
    optimizer.update(learning_rate=0.1, max_grad_norm=1.0)
    return optimizer


def save(
    directory: Path,
    *steps: int,
    keep: int = 2,
    algorithm_state: Mapping[str, torch.Tensor] = MappingProxyType({}),
) -> TiedModel:
    model = TiedModel()
    optimizer = trained(model)
    for step in steps:
        position = Position("training", step, counters={"num_episodes": 10 * step})
        save_checkpoint(
            directory,
            position=position,
            model=model,
            optimizer=optimizer,
            keep=keep,
            algorithm_state=algorithm_state,
        )
    return model


def names(directory: Path) -> list[str]:
    return [path.name for path in list_checkpoints(directory)]


def test_weights_buffers_moments_and_position_come_back(tmp_path: Path) -> None:
    model = save(tmp_path, 4)
    other = TiedModel(seed=1)
    loaded = load_latest_checkpoint(tmp_path, model=other)
    assert loaded == Position("training", 4, counters={"num_episodes": 40})
    assert torch.equal(other.embedding.weight, model.embedding.weight)
    assert other.counter.tolist() == [7]
    expected, restored = trained(TiedModel()).state_tensors(), Optimizer(other)
    load_moments(tmp_path / "4-training-000004", restored)
    moments = restored.state_tensors()
    assert moments.keys() == expected.keys()
    assert all(torch.equal(moments[name], expected[name]) for name in expected)


def test_tied_weights_are_stored_once_and_stay_tied(tmp_path: Path) -> None:
    save(tmp_path, 4)
    other = TiedModel(seed=1)
    load_latest_checkpoint(tmp_path, model=other)
    assert other.head.weight is other.embedding.weight
    # 15 float32 of the tied matrix, one int64 of the buffer, and the header: once, not twice.
    file = tmp_path / "4-training-000004/model.safetensors"
    header = int.from_bytes(file.read_bytes()[:8], "little")
    size = file.stat().st_size
    assert size == 8 + header + 15 * 4 + 8


def test_an_optimizer_that_has_made_no_update_can_be_saved(tmp_path: Path) -> None:
    model = TiedModel()
    optimizer = Optimizer(model)
    save_checkpoint(
        tmp_path, position=Position("copy", 0), model=model, optimizer=optimizer, keep=2
    )
    loaded = load_latest_checkpoint(tmp_path, model=model)
    assert loaded == Position("copy", 0)
    load_moments(tmp_path / "1-copy-000000", optimizer)
    assert all(not moment.any() for moment in optimizer.state_tensors().values())


def test_nothing_is_copied_to_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = TiedModel()
    optimizer, critic = trained(model), trained(TiedModel(seed=1))
    # They point to the tensors that AdamW goes on with: the next update changes them.
    seen, before = optimizer.state_tensors(), torch.zeros(5, 3)
    before.copy_(seen["embedding.weight/exp_avg"])
    written: dict[str, set[int]] = {}
    monkeypatch.setattr(
        checkpoint,
        "save_file",
        lambda tensors, path: written.update(
            {path.name: {each.data_ptr() for each in tensors.values()}}
        ),
    )
    save_checkpoint(
        tmp_path,
        position=Position("training", 1),
        model=model,
        optimizer=optimizer,
        keep=1,
        algorithm_state=critic.state_tensors(),
    )
    model.embedding.weight.sum().backward()
    optimizer.update(learning_rate=0.1, max_grad_norm=1.0)
    assert not torch.equal(seen["embedding.weight/exp_avg"], before)
    for file, held in (("optimizer", optimizer), ("algorithm", critic)):
        own = {each.data_ptr() for each in held.state_tensors().values()}
        assert written[f"{file}.safetensors"] == own


def test_the_newest_checkpoints_are_kept(tmp_path: Path) -> None:
    save(tmp_path, 2, 4, 10, keep=2)
    assert names(tmp_path) == ["4-training-000004", "4-training-000010"]


def test_later_phases_come_after_earlier_ones_whatever_their_steps() -> None:
    positions = [
        Position("copy", 10**6),
        Position("demonstrations", 5),
        Position("training", 1),
        Position("training", 999_999),
        Position("training", 10**6),
    ]
    assert sorted(positions, key=lambda position: position.order) == positions


def test_no_checkpoint_is_no_error(tmp_path: Path) -> None:
    assert load_latest_checkpoint(tmp_path / "none", model=TiedModel()) is None


def full_disk(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_is_a_clear_error_and_leaves_the_earlier_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 2)
    monkeypatch.setattr(checkpoint, "save_file", full_disk)
    with pytest.raises(CheckpointError, match=r"000004 could not be written.*No space left"):
        save(tmp_path, 4)
    assert [path.name for path in tmp_path.iterdir()] == ["4-training-000002"]
    loaded = load_latest_checkpoint(tmp_path, model=TiedModel())
    assert loaded is not None and loaded.step == 2


def test_a_write_that_fails_over_an_existing_checkpoint_keeps_that_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 2)
    before = (tmp_path / "4-training-000002/model.safetensors").read_bytes()
    monkeypatch.setattr(checkpoint, "save_file", full_disk)
    with pytest.raises(CheckpointError):
        save(tmp_path, 2)
    assert (tmp_path / "4-training-000002/model.safetensors").read_bytes() == before


def test_what_a_killed_writer_left_is_ignored_and_removed(tmp_path: Path) -> None:
    save(tmp_path, 2)
    leftover = tmp_path / f"4-training-000004{PARTIAL_MARK}0123abcd"
    leftover.mkdir()
    (leftover / "model.safetensors").write_bytes(b"half")
    loaded = load_latest_checkpoint(tmp_path, model=TiedModel())
    assert loaded is not None and loaded.step == 2
    assert not leftover.exists()


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "state.json"])
def test_a_truncated_file_names_the_folder_and_the_checkpoint_before(
    name: str, tmp_path: Path
) -> None:
    save(tmp_path, 2, 4)
    file = tmp_path / "4-training-000004" / name
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(CheckpointError) as raised:
        load_latest_checkpoint(tmp_path, model=TiedModel())
    message = str(raised.value)
    assert str(tmp_path / "4-training-000004") in message
    assert "Remove the folder to continue from the one before it (4-training-000002)" in message


def test_a_missing_file_is_an_error_too(tmp_path: Path) -> None:
    save(tmp_path, 2)
    (tmp_path / "4-training-000002" / "optimizer.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"cannot be read.*None is left"):
        load_latest_checkpoint(tmp_path, model=TiedModel())


def test_a_checkpoint_of_a_model_of_another_shape_is_refused(tmp_path: Path) -> None:
    save(tmp_path, 2)
    with pytest.raises(CheckpointError, match=r"has shape \(5, 3\), expected \(5, 4\)"):
        load_latest_checkpoint(tmp_path, model=TiedModel(width=4))


def test_a_checkpoint_of_another_architecture_is_refused(tmp_path: Path) -> None:
    save(tmp_path, 2)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: tensor .* is missing"):
        load_latest_checkpoint(tmp_path, model=nn.Linear(2, 2))


def test_a_state_with_an_unknown_field_is_refused(tmp_path: Path) -> None:
    save(tmp_path, 2)
    state = tmp_path / "4-training-000002" / "state.json"
    state.write_text(json.dumps({**json.loads(state.read_text()), "epoch": 3}))
    write_checksums(state.parent)
    with pytest.raises(CheckpointError, match="epoch"):
        load_latest_checkpoint(tmp_path, model=TiedModel())


# What others have put there


def test_a_folder_of_the_users_in_checkpoints_is_left_alone(tmp_path: Path) -> None:
    names = [
        "0-mine",
        "4-training-000004 copy",
        "4-training-0000004",
        "2-apo-000004",
        "9-mine-000001",
    ]
    for name in names:
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "weights").write_text("precious")
    for file in (".DS_Store", "4-training-000009", f"notes{PARTIAL_MARK}draft"):
        (tmp_path / file).write_text("mine")
    save(tmp_path, 2, 4, 6, keep=1)
    loaded = load_latest_checkpoint(tmp_path, model=TiedModel())
    assert loaded is not None and loaded.step == 6
    assert [path.name for path in list_checkpoints(tmp_path)] == ["4-training-000006"]
    assert all((tmp_path / name / "weights").read_text() == "precious" for name in names)
    assert (tmp_path / f"notes{PARTIAL_MARK}draft").read_text() == "mine"
    assert (tmp_path / ".DS_Store").exists() and (tmp_path / "4-training-000009").exists()


def test_checkpoints_from_step_one_million_on_come_after_earlier_ones(tmp_path: Path) -> None:
    save(tmp_path, 999_990, 1_000_000, 1_000_010, keep=2)
    assert names(tmp_path) == ["4-training-1000000", "4-training-1000010"]
    loaded = load_latest_checkpoint(tmp_path, model=TiedModel())
    assert loaded is not None and loaded.step == 1_000_010


def test_the_way_back_to_an_earlier_phase_is_said_whole(tmp_path: Path) -> None:
    """Without metrics.jsonl Stage 2 begins again; with it the run would be refused."""
    save(tmp_path, 2)
    first = tmp_path / "4-training-000002"
    shutil.copytree(first, tmp_path / "3-distillation-000007")
    (first / "state.json").write_text("{")
    with pytest.raises(
        CheckpointError, match=r"\(3-distillation-000007\)\. Stage 2 begins .*: move metrics.jsonl"
    ):
        load_latest_checkpoint(tmp_path, model=TiedModel())


# Damage: nothing is taken that was not written


def refusal(directory: Path, model: nn.Module | None = None) -> str:
    """What is said of the newest checkpoint of a run with steps 2 and 4."""
    with pytest.raises(CheckpointError) as raised:
        load_latest_checkpoint(directory, model=model or TiedModel(seed=1))
    message = str(raised.value)
    assert "\n" not in message
    assert f"checkpoint {directory / '4-training-000004'} cannot be read" in message
    assert "Remove the folder to continue from the one before it (4-training-000002)" in message
    return message


FILES = ("model.safetensors", "optimizer.safetensors", "algorithm.safetensors", "state.json")


@pytest.mark.parametrize("name", FILES)
def test_one_flipped_byte_in_a_file_of_a_checkpoint_is_found(name: str, tmp_path: Path) -> None:
    critic = {"critic/weight": torch.ones(3)}
    save(tmp_path, 2, 4, algorithm_state=critic)
    file = tmp_path / "4-training-000004" / name
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert f"{name} is not what was written: its SHA-256 is" in refusal(tmp_path)


@pytest.mark.parametrize("content", [None, b"", b"nonsense\n"])
def test_a_checkpoint_without_checksums_is_refused_and_says_how_to_trust_it(
    content: bytes | None, tmp_path: Path
) -> None:
    save(tmp_path, 2, 4)
    sums = tmp_path / "4-training-000004" / "SHA256SUMS"
    sums.unlink()
    if content is not None:
        sums.write_bytes(content)
    message = refusal(tmp_path)
    assert "SHA256SUMS" in message
    assert content is not None or "run `sha256sum * > SHA256SUMS` in their folder" in message


def test_the_checksums_are_those_of_the_program_sha256sum(tmp_path: Path) -> None:
    path = save_and_path(tmp_path)
    lines = (path / "SHA256SUMS").read_text().splitlines()
    digest = hashlib.sha256((path / "state.json").read_bytes()).hexdigest()
    assert f"{digest}  state.json" in lines and len(lines) == 3


@pytest.mark.parametrize("dtype", [torch.int32, torch.bfloat16, torch.float64])
def test_weights_in_another_format_are_refused_and_change_no_weight(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    save(tmp_path, 2, 4)
    change_tensors(tmp_path / "4-training-000004/model.safetensors", lambda t: t.to(dtype))
    model = TiedModel(seed=1)
    before = model.embedding.weight.clone()
    message = refusal(tmp_path, model)
    assert "model.safetensors: tensor" in message
    assert f"has format {dtype}, expected torch." in message
    assert torch.equal(model.embedding.weight, before)


def test_a_state_of_an_unknown_phase_or_of_another_folder_is_refused(tmp_path: Path) -> None:
    save(tmp_path, 2, 4)
    state = tmp_path / "4-training-000004" / "state.json"
    said = json.loads(state.read_text())
    for changed, problem in (
        (
            {"phase": "rest"},
            "the phase is 'rest', expected one of copy, demonstrations, distillation, training",
        ),
        ({"step": 5}, "the position is 4-training-000005, expected that of the folder's name"),
        ({"step": "many"}, "step: Input should be a valid integer"),
        ({"counters": [1]}, "counters: Input should be a valid"),
    ):
        state.write_text(json.dumps({**said, **changed}))
        write_checksums(state.parent)
        assert f"state.json: {problem}" in refusal(tmp_path)
    for text in ("[" * 5000, "[]", "\x00"):
        state.write_text(text)
        write_checksums(state.parent)
        assert "state.json: " in refusal(tmp_path)


def optimizer_refusal(directory: Path) -> str:
    model = TiedModel(seed=1)
    assert load_latest_checkpoint(directory, model=model) == Position(
        "training", 4, counters={"num_episodes": 40}
    )
    with pytest.raises(CheckpointError) as raised:
        load_moments(directory / "4-training-000004", Optimizer(model))
    assert "Remove the folder to continue from the one before it (4-training-000002)" in str(
        raised.value
    )
    return str(raised.value)


def test_an_optimizer_state_that_lacks_tensors_or_is_of_another_kind_is_refused(
    tmp_path: Path,
) -> None:
    save(tmp_path, 2, 4)
    file = tmp_path / "4-training-000004/optimizer.safetensors"
    whole = load_file(file)
    weights = load_file(file.with_name("model.safetensors"))
    name = "embedding.weight/exp_avg"
    for tensors, problem in (
        ({key: whole[key] for key in whole if key != name}, f"tensor {name} is missing"),
        ({}, f"tensor {name} is missing (2 more like it)"),
        (weights, f"tensor {name} is missing"),
        ({**whole, **weights}, "tensor counter is not expected here"),
        ({**whole, name: whole[name].int()}, f"{name} has format torch.int32, expected torch.f"),
        ({**whole, name: whole[name][:2]}, f"{name} has shape (2, 3), expected (5, 3)"),
    ):
        save_file(tensors, file)
        write_checksums(file.parent)
        assert f"optimizer.safetensors: tensor {problem.removeprefix('tensor ')}" in (
            optimizer_refusal(tmp_path)
        )


def test_moments_of_a_parameter_without_a_gradient_are_saved_as_it_would_start() -> None:
    model = nn.ModuleList([nn.Linear(2, 1, bias=False), nn.Linear(2, 1, bias=False)])
    lazy, restored = Optimizer(model), Optimizer(model)
    model[0].weight.sum().backward()
    lazy.update(learning_rate=0.1, max_grad_norm=1.0)
    restored.load_state_tensors(lazy.state_tensors())
    before = [each.weight.detach().clone() for each in model]
    results = []
    for optimizer in (lazy, restored):
        for each, weight in zip(model, before, strict=True):
            each.weight.data.copy_(weight)
        (model[0].weight.sum() + 2 * model[1].weight.sum()).backward()
        optimizer.update(learning_rate=0.1, max_grad_norm=1.0)
        results.append([each.weight.detach().clone() for each in model])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def save_and_path(directory: Path) -> Path:
    save(directory, 2)
    return directory / "4-training-000002"


def change_tensors(file: Path, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Rewrites a file of tensors, and the checksums with it, so that only the form tells."""
    save_file({name: change(tensor) for name, tensor in load_file(file).items()}, file)
    write_checksums(file.parent)
