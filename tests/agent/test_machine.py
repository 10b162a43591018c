"""What a configuration sets of the machine; GPUs are looked at by `benchmarks.gpu`."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

import ragen_apo
from ragen_apo.agent.assembly import set_up_machine
from ragen_apo.config.machine import MachineConfig
from ragen_apo.policy.sampling import sample
from tests.pretend_gpu import PretendGpu


class Sums(TorchFunctionMode):
    """Notes whether cumulative sums are made on the GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.are_on_gpu: list[bool] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.cumsum:
            self.are_on_gpu.append(args[0].is_cuda)
        return func(*args, **(kwargs or {}))


@pytest.fixture
def _as_before(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("_as_before")
def test_deterministic_refuses_operations_that_have_no_such_algorithm() -> None:
    assert not torch.are_deterministic_algorithms_enabled()
    set_up_machine(MachineConfig(num_threads=None, device="cpu", deterministic=True))
    assert torch.are_deterministic_algorithms_enabled()


@pytest.mark.usefixtures("_as_before")
@pytest.mark.parametrize("deterministic", [False, True])
def test_deterministic_sampling_sums_on_the_cpu_and_takes_the_same_tokens(
    deterministic: bool,
) -> None:
    """CUDA has no deterministic cumulative sum, and refuses the other one."""
    draws = torch.Generator().manual_seed(7)
    logits = torch.randn(64, 50, generator=draws)
    uniform = torch.rand(64, dtype=torch.float64, generator=draws).tolist()
    expected = sample(logits, uniform, temperature=1.0)
    with PretendGpu(), Sums() as sums:
        there = logits.to("cuda")
        torch.use_deterministic_algorithms(deterministic)
        assert sample(there, uniform, temperature=1.0) == expected
    assert sums.are_on_gpu == [not deterministic]


def test_a_cpu_keeps_the_precision_of_its_products() -> None:
    before = torch.get_float32_matmul_precision()
    set_up_machine(MachineConfig(num_threads=None, device="cpu", tf32=True))
    assert torch.get_float32_matmul_precision() == before


@pytest.fixture
def _products_as_before():
    cuda, cudnn = torch.backends.cuda, torch.backends.cudnn
    before = cuda.matmul.allow_tf32, cudnn.allow_tf32, cuda.cudnn_sdp_enabled()
    yield
    cuda.matmul.allow_tf32, cudnn.allow_tf32 = before[:2]
    cuda.enable_cudnn_sdp(before[2])


@pytest.mark.usefixtures("_products_as_before")
@pytest.mark.parametrize("tf32", [True, False])
def test_a_gpu_has_the_products_that_the_configuration_asks_for(tf32: bool) -> None:
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = not tf32
    with PretendGpu():
        set_up_machine(MachineConfig(num_threads=None, device="cuda", tf32=tf32))
    assert torch.backends.cuda.matmul.allow_tf32 == tf32
    assert torch.backends.cudnn.allow_tf32 == tf32


@pytest.mark.usefixtures("_products_as_before")
def test_a_gpu_does_not_take_the_attention_that_is_planned_anew_for_every_shape() -> None:
    torch.backends.cuda.enable_cudnn_sdp(True)
    with PretendGpu():
        set_up_machine(MachineConfig(num_threads=None, device="cuda"))
    assert not torch.backends.cuda.cudnn_sdp_enabled()


def test_a_gpu_takes_tf32_unless_told_otherwise() -> None:
    assert MachineConfig().tf32


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        ({}, f"GOMP_SPINCOUNT = '{ragen_apo.SPIN_COUNT}'"),
        ({"GOMP_SPINCOUNT": "5"}, "GOMP_SPINCOUNT = '5'"),
        (
            {"OMP_WAIT_POLICY": "active"},
            "GOMP_SPINCOUNT = '30000000000'",
        ),  # libgomp's meaning of it
    ],
)
def test_threads_of_torch_give_their_core_to_others_while_they_wait(
    told: dict[str, str], expected: str
) -> None:
    """Beside a busy process two threads were twenty times slower than alone."""
    library = Path(torch.__file__).parent / "lib" / "libgomp.so.1"
    if not library.exists():
        pytest.skip("torch brings another OpenMP here")
    given = {name: value for name, value in os.environ.items() if "OMP" not in name}
    said = subprocess.run(
        [sys.executable, "-c", f"import ragen_apo, ctypes; ctypes.CDLL({str(library)!r})"],
        env={**given, "OMP_DISPLAY_ENV": "verbose", **told},
        capture_output=True,
        text=True,
        check=True,
    ).stderr
    assert expected in said
