"""Attention made for CPUs against the plain formula in float64."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from ragen_apo.config.policy import SmallModelConfig
from ragen_apo.policy import attention
from ragen_apo.policy.attention import PaddedPrompts, PromptSlice
from ragen_apo.policy.language_model import LanguageModel, build_small_model
from ragen_apo.policy.tokenizer import train_tokenizer

BLOCK = attention.QUERIES_PER_BLOCK
attend: Any = attention.attend


@pytest.fixture(autouse=True)
def no_matrix_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole rows go through the blocks on every processor."""
    monkeypatch.setattr(attention, "has_matrix_units", lambda: False)


def drawn(*shapes: tuple[int, ...]) -> list[Tensor]:
    """Query, key and value as they are in mixed precision."""
    tensors = [
        torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        for seed, shape in enumerate(shapes)
    ]
    formats = (torch.float32, torch.float32, torch.bfloat16)
    return [t.to(dtype).requires_grad_() for t, dtype in zip(tensors, formats, strict=True)]


def exact(query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
    """Causal attention [B, T, H, D] as it is written down."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = scaling * query @ key.transpose(2, 3)
    later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return (scores.masked_fill(later, float("-inf")).softmax(-1) @ value).transpose(1, 2)


@pytest.mark.parametrize("length", [1, 5, BLOCK, BLOCK + 1, 2 * BLOCK + 37])
@pytest.mark.parametrize("key_heads", [4, 2, 1])
@pytest.mark.parametrize("scaling", [None, 0.5])
@pytest.mark.parametrize("has_matrix_units", [False, True])
def test_whole_rows_get_causal_attention_and_its_gradient(
    length: int,
    key_heads: int,
    scaling: float | None,
    has_matrix_units: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By blocks, and where there are matrix units by PyTorch's kernel with gradients of our own."""
    monkeypatch.setattr(attention, "has_matrix_units", lambda: has_matrix_units)
    shapes = [(2, 4, length, 16), (2, key_heads, length, 16), (2, key_heads, length, 16)]
    inputs = drawn(*shapes)
    module = SimpleNamespace(num_key_value_groups=4 // key_heads)
    weight = torch.randn(2, length, 4, 16, generator=torch.Generator().manual_seed(9))
    given, _ = attend(module, *inputs, None, scaling=scaling, dropout=0.0)
    doubles = [tensor.detach().double().requires_grad_() for tensor in inputs]
    wanted = exact(*doubles, scaling=scaling or 0.25)
    rounding = 0.03 if has_matrix_units else 0.01  # the kernel rounds queries and keys, too
    torch.testing.assert_close(given.double(), wanted, rtol=rounding, atol=rounding)
    found = torch.autograd.grad((given.float() * weight).sum(), inputs)
    right = torch.autograd.grad((wanted * weight).sum(), doubles)
    for given, ours, theirs in zip(inputs, found, right, strict=True):
        assert ours.dtype is given.dtype
        if length > 1:  # a single key has weight 1 whatever it is
            assert (ours.double() - theirs).norm() < 0.015 * theirs.norm()


@pytest.mark.parametrize(
    "case",
    [
        *("nothing", "float32", "bfloat16", "mask", "more keys", "dropout"),
        *("matrix units", "matrix units and long rows", "matrix units and two widths"),
        *("matrix units and both ways", "matrix units and gradients"),
    ],
)
def test_anything_else_is_left_to_pytorch(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "sdpa_attention_forward", lambda *_, **__: "left to PyTorch")
    query, key, value = drawn(*[(1, 2, 6, 8)] * 3)
    module, mask = SimpleNamespace(is_causal=True), None
    if case == "float32":
        value = value.float()
    if case == "bfloat16":
        query, key = query.bfloat16(), key.bfloat16()
    if case == "mask":
        mask = torch.zeros(1, 1, 6, 6)
    if case == "more keys":
        _, key, value = drawn(*[(1, 2, 9, 8)] * 3)
    if "two widths" in case:
        _, _, value = drawn(*[(1, 2, 6, 16)] * 3)
    if "both ways" in case:
        module.is_causal = False
    if "long rows" in case:
        query, key, value = drawn(*[(1, 2, attention.NUMBERS_OF_SHORT_HEADS // 8 + 1, 8)] * 3)
    if "matrix units" in case:
        monkeypatch.setattr(attention, "has_matrix_units", lambda: True)
    dropout = 0.1 if case == "dropout" else 0.0
    with torch.set_grad_enabled(case != "matrix units"):
        answer = attend(module, query, key, value, mask, dropout=dropout)
    is_ours = case in ("nothing", "matrix units and gradients")
    assert (answer == "left to PyTorch") == (not is_ours)


@pytest.mark.parametrize("key_heads", [4, 2])
@pytest.mark.parametrize("length", [1, 7, 100])
def test_gradients_of_our_own_change_no_bit_of_a_pass_with_matrix_units(
    length: int, key_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reference is scored without gradients: equal models must have a log ratio of 0."""
    monkeypatch.setattr(attention, "has_matrix_units", lambda: True)
    module = SimpleNamespace(num_key_value_groups=4 // key_heads, is_causal=True)
    inputs = drawn((2, 4, length, 16), *[(2, key_heads, length, 16)] * 2)
    with torch.autocast("cpu", torch.bfloat16):
        trained, _ = attend(module, *inputs, None)
        with torch.no_grad():
            scored, _ = attend(module, *inputs, None)
    assert trained.requires_grad
    assert torch.equal(trained, scored)


@pytest.mark.parametrize("key_heads", [4, 2])
@pytest.mark.parametrize("padded", [False, True])
def test_slices_attend_to_their_own_contexts_alone(key_heads: int, padded: bool) -> None:
    capacity, heads, width = 9, 4, 8
    rows = {2: (4, 4), 0: (3, 7), 1: (1, 5)}  # slot: new tokens, tokens of the context with them
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(1, heads, 8, width, generator=generator)
    keys, values = (torch.randn(3, key_heads, capacity, width, generator=generator) for _ in "kv")
    slices: list[PromptSlice] = []
    expected: list[Tensor] = []
    for slot, (count, length) in rows.items():
        start = slices[-1].tokens.stop if slices else 0
        slices.append(PromptSlice(slot, slice(start, start + count), length))
        queries = torch.zeros(1, heads, length, width)
        queries[:, :, length - count :] = query[:, :, start : start + count]
        context = (store[slot : slot + 1, :, :length] for store in (keys, values))
        expected.append(exact(queries, *context, width**-0.5)[:, length - count :])
    place: Any = {"dtype": torch.float32, "device": torch.device("cpu")}
    ready = PaddedPrompts.of(slices, **place) if padded else [s.with_mask(**place) for s in slices]
    module = SimpleNamespace(num_key_value_groups=heads // key_heads)
    attended, _ = attend(module, query, keys, values, None, prompt_slices=ready)
    torch.testing.assert_close(attended, torch.cat(expected, dim=1))


def mixed_model() -> LanguageModel:
    sizes = SmallModelConfig(
        vocab_size=300, hidden_size=32, num_layers=2, num_heads=2, intermediate_size=64
    )
    model = build_small_model(train_tokenizer(["a b c"], vocab_size=300), sizes, seed=0)
    return LanguageModel(model.model, model.tokenizer, autocast=torch.bfloat16)


def test_a_pass_in_mixed_precision_goes_through_the_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    mixed = mixed_model()
    ids = torch.arange(8, 208)[None]
    with_blocks = mixed.hidden_states(ids, use_cache=False)
    lengths: list[int] = []
    softmax = torch.Tensor.softmax

    def counted(scores: Tensor, *args: Any) -> Tensor:
        lengths.append(scores.shape[-1])
        return softmax(scores, *args)

    monkeypatch.setattr(torch.Tensor, "softmax", counted)
    again = mixed.hidden_states(ids, use_cache=False)
    assert lengths == [BLOCK, 200] * 2
    assert torch.equal(with_blocks, again)


def test_layers_that_are_computed_again_attend_the_same_way_twice() -> None:
    mixed = mixed_model()
    saving = LanguageModel(
        mixed.model, mixed.tokenizer, autocast=torch.bfloat16, gradient_checkpointing=True
    )
    ids = torch.arange(8, 208)[None]
    gradients: list[Tensor] = []
    for model in (mixed, saving):
        model.model.zero_grad()
        model.logits(model.hidden_states(ids, use_cache=False)[0]).logsumexp(-1).sum().backward()
        weight = model.model.get_input_embeddings().weight
        assert isinstance(weight, torch.nn.Parameter) and weight.grad is not None
        gradients.append(weight.grad.clone())
    assert torch.equal(*gradients)


def test_a_saved_model_does_not_ask_for_this_attention(tmp_path: Path) -> None:
    mixed_model().save(tmp_path)
    assert attention.ATTENTION not in (tmp_path / "config.json").read_text()
    loaded = LlamaForCausalLM.from_pretrained(tmp_path)
    assert loaded.config._attn_implementation == "sdpa"
