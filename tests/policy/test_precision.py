"""`machine.mixed_precision: auto`: what the machine multiplies fast, or what the run began with."""

import pytest
import torch

from ragen_apo.policy import precision

CPU = torch.device("cpu")
GPU = torch.device("cuda")


@pytest.fixture
def processor(monkeypatch: pytest.MonkeyPatch) -> dict[str, bool]:
    """The features that torch finds, to be changed by a test."""
    found: dict[str, bool] = {"avx2": True}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: found, raising=False)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: True)
    return found


@pytest.mark.parametrize("unit", ["avx512_bf16", "amx_bf16"])
def test_auto_takes_bfloat16_where_the_processor_multiplies_it(
    processor: dict[str, bool], unit: str
) -> None:
    processor[unit] = False
    assert precision.chosen_precision("auto", CPU, begun_with=None) == "none"
    processor[unit] = True
    assert precision.chosen_precision("auto", CPU, begun_with=None) == "bfloat16"


@pytest.mark.parametrize(("capability", "chosen"), [((7, 5), "none"), ((8, 0), "bfloat16")])
def test_auto_takes_bfloat16_on_gpus_since_ampere(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], chosen: str
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    assert precision.chosen_precision("auto", GPU, begun_with=None) == chosen


def test_a_torch_that_cannot_say_what_the_processor_has_gets_no_bfloat16(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(torch.cpu, "get_capabilities", raising=False)
    assert precision.chosen_precision("auto", CPU, begun_with=None) == "none"


def test_a_torch_without_onednn_gets_no_bfloat16(
    processor: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    processor["avx512_bf16"] = True
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    monkeypatch.setattr(torch.ops, "mkldnn", object())
    assert precision.chosen_precision("auto", CPU, begun_with=None) == "none"


@pytest.mark.parametrize("begun_with", ["none", "bfloat16"])
def test_a_run_keeps_what_it_began_with_on_every_machine(
    processor: dict[str, bool], begun_with: str
) -> None:
    for processor["avx512_bf16"] in (False, True):
        assert precision.chosen_precision("auto", CPU, begun_with=begun_with) == begun_with


def test_what_is_configured_is_not_asked_of_the_machine(processor: dict[str, bool]) -> None:
    processor["avx512_bf16"] = True
    assert precision.chosen_precision("none", CPU, begun_with="bfloat16") == "none"
    processor["avx512_bf16"] = False
    assert precision.chosen_precision("bfloat16", CPU, begun_with="none") == "bfloat16"
