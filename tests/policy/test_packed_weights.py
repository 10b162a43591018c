"""Packed weights multiply as PyTorch does, and leave the model as it was."""

import contextlib
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ragen_apo.policy import packed_weights as module
from ragen_apo.policy.packed_weights import num_packed_bytes, packed_weights
from ragen_apo.policy.precision import multiplies_bfloat16, processor_has

pytestmark = pytest.mark.skipif(
    not (processor_has("avx512_f") and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")),
    reason="weights are packed on processors with AVX-512 only",
)
CPU = torch.device("cpu")


class Products(TorchDispatchMode):
    """Counts the packed products."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.number += func is torch.ops.mkldnn._linear_pointwise.default
        return func(*args, **(kwargs or {}))


@pytest.fixture
def products() -> Iterator[Products]:
    with Products() as counted:
        yield counted


@contextlib.contextmanager
def autocast(dtype: torch.dtype | None) -> Iterator[None]:
    with torch.autocast("cpu", dtype=dtype) if dtype else contextlib.nullcontext():
        yield


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(48, 80), nn.SiLU(), nn.Linear(80, 24, bias=False))


@torch.no_grad()
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("shape", [(48,), (1, 48), (5, 1, 48), (1, 300, 48)])
def test_products_are_those_of_the_layers(
    shape: tuple[int, ...], dtype: torch.dtype | None, products: Products
) -> None:
    if dtype is torch.bfloat16 and not multiplies_bfloat16(CPU):
        pytest.skip("this processor does not multiply bfloat16, so nothing is packed in it")
    layers, inputs = model(), torch.randn(shape)
    with autocast(dtype):
        expected = layers(inputs)
        with packed_weights(layers):
            found = layers(inputs)
    assert products.number == 2
    assert found.dtype == expected.dtype and found.shape == expected.shape
    # One rounding of a bfloat16 number is 2^-8 of it.
    torch.testing.assert_close(found, expected, rtol=1e-5 if dtype is None else 2**-7, atol=1e-5)


@torch.no_grad()
def test_a_weight_that_changed_is_packed_again_the_next_time(products: Products) -> None:
    layers, inputs = model(), torch.randn(3, 48)
    with packed_weights(layers):
        layers(inputs)
    layers[0].weight.mul_(2)
    with packed_weights(layers):
        found = layers(inputs)
    assert products.number == 4
    torch.testing.assert_close(found, layers(inputs), rtol=1e-5, atol=1e-5)


def test_afterwards_and_after_an_error_the_layers_are_as_they_were() -> None:
    layers = model()
    with pytest.raises(RuntimeError), packed_weights(layers), packed_weights(layers):
        raise RuntimeError("in the middle of a rollout")
    assert all("forward" not in vars(layer) for layer in layers.modules())


def test_ctrl_c_between_two_layers_is_still_ctrl_c(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = model()

    def interrupted_at_the_last(layer: nn.Linear, name: str, value: object) -> None:
        if layer is layers[2]:
            raise KeyboardInterrupt
        object.__setattr__(layer, name, value)

    monkeypatch.setattr(nn.Linear, "__setattr__", interrupted_at_the_last)
    with pytest.raises(KeyboardInterrupt), packed_weights(layers):
        raise AssertionError("the block was entered")
    assert all("forward" not in vars(layer) for layer in layers.modules())


def test_what_needs_a_gradient_is_computed_as_ever(products: Products) -> None:
    layers, inputs = model(), torch.randn(3, 48, requires_grad=True)
    with packed_weights(layers):
        layers(inputs).sum().backward()
    assert products.number == 0 and inputs.grad is not None


@torch.no_grad()
def test_other_formats_and_kinds_of_layers_are_left_alone(products: Products) -> None:
    class Own(nn.Linear):
        pass

    layers = nn.Sequential(Own(8, 8), nn.Linear(8, 8)).double()
    with packed_weights(layers):
        layers(torch.randn(2, 8, dtype=torch.float64))
        with pytest.raises(RuntimeError, match="dtype"):  # as without packing
            layers(torch.randn(2, 8))
    assert products.number == 0 and num_packed_bytes(layers) == 0


def test_packed_weights_take_the_memory_of_the_weights() -> None:
    assert num_packed_bytes(model()) == 4 * (48 * 80 + 80 * 24)


@torch.no_grad()
def test_a_model_that_is_too_large_to_have_twice_is_left_alone(
    products: Products, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = model()
    for limit, number in ((num_packed_bytes(layers), 2), (num_packed_bytes(layers) - 1, 2)):
        monkeypatch.setattr(module, "MAX_BYTES", limit)
        with packed_weights(layers):
            layers(torch.randn(48))
        assert products.number == number
    assert num_packed_bytes(layers) == 0
