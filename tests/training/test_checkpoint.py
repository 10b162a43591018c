import errno
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ragen_apo.errors import CheckpointError
from ragen_apo.files import PARTIAL_MARK
from ragen_apo.training import checkpoint
from ragen_apo.training.checkpoint import (
    Position,
    list_checkpoints,
    load_latest_checkpoint,
    save_checkpoint,
)
from ragen_apo.training.optimization import Optimizer

CPU = torch.device("cpu")


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


def save(directory: Path, *steps: int, keep: int = 2) -> TiedModel:
    model = TiedModel()
    optimizer = trained(model)
    for step in steps:
        position = Position("apo", step, counters={"num_episodes": 10 * step})
        save_checkpoint(directory, position=position, model=model, optimizer=optimizer, keep=keep)
    return model


def names(directory: Path) -> list[str]:
    return [path.name for path in list_checkpoints(directory)]


def test_weights_buffers_moments_and_position_come_back(tmp_path: Path) -> None:
    model = save(tmp_path, 4)
    other = TiedModel(seed=1)
    loaded = load_latest_checkpoint(tmp_path, model=other, device=CPU)
    assert loaded is not None
    position, moments = loaded
    assert position == Position("apo", 4, counters={"num_episodes": 40})
    assert torch.equal(other.embedding.weight, model.embedding.weight)
    assert other.counter.tolist() == [7]
    expected = trained(TiedModel()).state_tensors()
    assert moments.keys() == expected.keys()
    assert all(torch.equal(moments[name], expected[name]) for name in expected)


def test_tied_weights_are_stored_once_and_stay_tied(tmp_path: Path) -> None:
    save(tmp_path, 4)
    other = TiedModel(seed=1)
    load_latest_checkpoint(tmp_path, model=other, device=CPU)
    assert other.head.weight is other.embedding.weight
    # 15 float32 of the tied matrix, one int64 of the buffer, and the header: once, not twice.
    file = tmp_path / "3-apo-000004/model.safetensors"
    header = int.from_bytes(file.read_bytes()[:8], "little")
    size = file.stat().st_size
    assert size == 8 + header + 15 * 4 + 8


def test_an_optimizer_that_has_made_no_update_can_be_saved(tmp_path: Path) -> None:
    model = TiedModel()
    save_checkpoint(
        tmp_path, position=Position("copy", 0), model=model, optimizer=Optimizer(model), keep=2
    )
    assert load_latest_checkpoint(tmp_path, model=model, device=CPU) == (Position("copy", 0), {})


def test_the_newest_checkpoints_are_kept(tmp_path: Path) -> None:
    save(tmp_path, 2, 4, 10, keep=2)
    assert names(tmp_path) == ["3-apo-000004", "3-apo-000010"]


def test_later_phases_come_after_earlier_ones_whatever_their_steps() -> None:
    positions = [Position("copy", 999), Position("demonstrations", 5), Position("apo", 1)]
    assert sorted(positions, key=lambda position: position.name) == positions


def test_no_checkpoint_is_no_error(tmp_path: Path) -> None:
    assert load_latest_checkpoint(tmp_path / "none", model=TiedModel(), device=CPU) is None


def full_disk(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_is_a_clear_error_and_leaves_the_earlier_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 2)
    monkeypatch.setattr(checkpoint, "save_file", full_disk)
    with pytest.raises(CheckpointError, match=r"3-apo-000004 could not be written.*No space left"):
        save(tmp_path, 4)
    assert [path.name for path in tmp_path.iterdir()] == ["3-apo-000002"]
    loaded = load_latest_checkpoint(tmp_path, model=TiedModel(), device=CPU)
    assert loaded is not None and loaded[0].step == 2


def test_a_write_that_fails_over_an_existing_checkpoint_keeps_that_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 2)
    before = (tmp_path / "3-apo-000002/model.safetensors").read_bytes()
    monkeypatch.setattr(checkpoint, "save_file", full_disk)
    with pytest.raises(CheckpointError):
        save(tmp_path, 2)
    assert (tmp_path / "3-apo-000002/model.safetensors").read_bytes() == before


def test_what_a_killed_writer_left_is_ignored_and_removed(tmp_path: Path) -> None:
    save(tmp_path, 2)
    leftover = tmp_path / f"3-apo-000004{PARTIAL_MARK}0123abcd"
    leftover.mkdir()
    (leftover / "model.safetensors").write_bytes(b"half")
    loaded = load_latest_checkpoint(tmp_path, model=TiedModel(), device=CPU)
    assert loaded is not None and loaded[0].step == 2
    assert not leftover.exists()


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "state.json"])
def test_a_truncated_file_names_the_folder_and_the_checkpoint_before(
    name: str, tmp_path: Path
) -> None:
    save(tmp_path, 2, 4)
    file = tmp_path / "3-apo-000004" / name
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(CheckpointError) as raised:
        load_latest_checkpoint(tmp_path, model=TiedModel(), device=CPU)
    message = str(raised.value)
    assert str(tmp_path / "3-apo-000004") in message
    assert "Remove the folder to continue from the one before it (3-apo-000002)" in message


def test_a_missing_file_is_an_error_too(tmp_path: Path) -> None:
    save(tmp_path, 2)
    (tmp_path / "3-apo-000002" / "optimizer.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"cannot be read.*none is left"):
        load_latest_checkpoint(tmp_path, model=TiedModel(), device=CPU)


def test_a_checkpoint_of_a_model_of_another_shape_is_refused(tmp_path: Path) -> None:
    save(tmp_path, 2)
    with pytest.raises(CheckpointError, match=r"has shape \(5, 3\), expected \(5, 4\)"):
        load_latest_checkpoint(tmp_path, model=TiedModel(width=4), device=CPU)


def test_a_checkpoint_of_another_architecture_is_refused(tmp_path: Path) -> None:
    save(tmp_path, 2)
    with pytest.raises(CheckpointError, match=r"its tensors are not those of the model"):
        load_latest_checkpoint(tmp_path, model=nn.Linear(2, 2), device=CPU)


def test_a_state_with_an_unknown_field_is_refused(tmp_path: Path) -> None:
    save(tmp_path, 2)
    state = tmp_path / "3-apo-000002" / "state.json"
    state.write_text(json.dumps({**json.loads(state.read_text()), "epoch": 3}))
    with pytest.raises(CheckpointError, match="epoch"):
        load_latest_checkpoint(tmp_path, model=TiedModel(), device=CPU)
