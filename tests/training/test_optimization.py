import copy
import math

import pytest
import torch
from torch import nn

from ragen_apo.errors import TrainingError
from ragen_apo.training.optimization import Optimizer, learning_rate_at


@pytest.mark.parametrize(
    ("step", "schedule", "expected"),
    [
        # Warm-up of 4 steps to a peak of 1: 1/5, 2/5, 3/5, 4/5, then the peak.
        (0, "constant", 0.2),
        (3, "cosine", 0.8),
        (4, "constant", 1.0),
        (13, "constant", 1.0),
        # Ten steps are left after the warm-up; step 9 is half of them.
        (4, "linear", 1.0),
        (9, "linear", 0.5),
        (13, "linear", 0.1),
        (14, "linear", 0.0),
        (9, "cosine", 0.5),
        # Two of the ten steps: 0.5 (1 + cos(0.2 pi)).
        (6, "cosine", 0.5 * (1 + math.cos(0.2 * math.pi))),
        (14, "cosine", 0.0),
    ],
)
def test_the_learning_rate_rises_and_follows_its_schedule(
    step: int, schedule: str, expected: float
) -> None:
    rate = learning_rate_at(step, peak=1.0, num_steps=14, warmup_steps=4, schedule=schedule)
    assert rate == pytest.approx(expected, abs=1e-12)


def test_without_warm_up_the_first_update_has_the_peak_rate() -> None:
    for schedule in ("constant", "linear", "cosine"):
        rate = learning_rate_at(0, peak=3.0, num_steps=5, warmup_steps=0, schedule=schedule)
        assert rate == 3.0


def tied_model() -> nn.ModuleDict:
    torch.manual_seed(0)
    model = nn.ModuleDict({"embedding": nn.Embedding(5, 3), "head": nn.Linear(3, 5, bias=False)})
    model["head"].weight = model["embedding"].weight
    model["frozen"] = nn.Linear(2, 2).requires_grad_(False)
    return model


def give_gradients(model: nn.Module, *, step: int) -> None:
    model.zero_grad()
    inputs = torch.tensor([step % 5, (step + 1) % 5])
    model["head"](model["embedding"](inputs)).square().sum().backward()


@pytest.mark.parametrize("fused", [False, True])
def test_a_restored_optimizer_makes_bit_identical_updates(*, fused: bool) -> None:
    model = tied_model()
    optimizer = Optimizer(model, weight_decay=0.1, fused=fused)
    for step in range(3):
        give_gradients(model, step=step)
        optimizer.update(learning_rate=0.1, max_grad_norm=1.0)
    twin = copy.deepcopy(model)
    restored = Optimizer(twin, weight_decay=0.1, fused=fused)
    restored.load_state_tensors(optimizer.state_tensors())
    for step in range(3, 6):
        norms = []
        for either, its_optimizer in ((model, optimizer), (twin, restored)):
            give_gradients(either, step=step)
            norms.append(its_optimizer.update(learning_rate=0.1, max_grad_norm=1.0))
        assert norms[0] == norms[1]
    assert torch.equal(model["head"].weight, twin["head"].weight)


def test_the_fused_update_is_the_same_up_to_rounding() -> None:
    models = [tied_model(), tied_model()]
    for model, fused in zip(models, (False, True), strict=True):
        optimizer = Optimizer(model, weight_decay=0.1, fused=fused)
        for step in range(4):
            give_gradients(model, step=step)
            optimizer.update(learning_rate=0.1, max_grad_norm=1.0)
    torch.testing.assert_close(models[0]["head"].weight, models[1]["head"].weight)
    assert not torch.equal(models[0]["head"].weight, tied_model()["head"].weight)


def test_an_optimizer_without_its_moments_makes_another_update() -> None:
    model = tied_model()
    optimizer = Optimizer(model)
    give_gradients(model, step=0)
    optimizer.update(learning_rate=0.1, max_grad_norm=1.0)
    twin = copy.deepcopy(model)
    for either, its_optimizer in ((model, optimizer), (twin, Optimizer(twin))):
        give_gradients(either, step=1)
        its_optimizer.update(learning_rate=0.1, max_grad_norm=1.0)
    assert not torch.equal(model["head"].weight, twin["head"].weight)


def test_the_state_names_trainable_parameters_and_each_of_two_tied_ones_once() -> None:
    model = tied_model()
    optimizer = Optimizer(model)
    give_gradients(model, step=0)
    optimizer.update(learning_rate=0.1, max_grad_norm=1.0)
    moments = ("exp_avg", "exp_avg_sq", "step")
    assert sorted(optimizer.state_tensors()) == [f"embedding.weight/{name}" for name in moments]


def test_the_norm_is_that_before_clipping_and_the_gradients_are_used_up() -> None:
    model = nn.Linear(2, 1, bias=False)
    model.weight.grad = torch.tensor([[3.0, 4.0]])
    norm = Optimizer(model).update(learning_rate=0.0, max_grad_norm=1.0)
    assert norm == pytest.approx(5.0)  # sqrt(9 + 16)
    assert model.weight.grad is None


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_norm_that_is_not_finite_is_refused_and_changes_no_weight(bad: float) -> None:
    model = nn.Linear(2, 1, bias=False)
    before = model.weight.detach().clone()
    model.weight.grad = torch.tensor([[1.0, bad]])
    optimizer = Optimizer(model)
    with pytest.raises(TrainingError, match=r"gradient norm is (nan|inf).*Lower the learning rate"):
        optimizer.update(learning_rate=0.1, max_grad_norm=1.0)
    assert torch.equal(model.weight, before)
    assert all(not moment.any() for moment in optimizer.state_tensors().values())
