"""Scores of recorded tokens: equal to the sampler's, and read at the sampled positions only."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ragen_apo.config.policy import LoraConfig
from ragen_apo.policy import language_model
from ragen_apo.policy.generation import GenerationEngine
from ragen_apo.policy.language_model import LanguageModel, load_language_model
from ragen_apo.policy.lora import add_adapters
from ragen_apo.policy.scoring import TokenScores, score_tokens, token_logprobs
from ragen_apo.seeding import generator
from tests.generating import respond
from tests.sweeps import quick_first


def sampled_batch(
    model: LanguageModel, *, temperature: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Token ids, mask and sampler log-probabilities [B, T] of four rows of two turns each."""
    engine = GenerationEngine(model, num_rows=4, capacity=80)
    engine.stop_rule.end_ids |= set(range(0, len(model.tokenizer), 4))
    rows = [engine.open_row(generator(index, "scoring")) for index in range(4)]
    token_ids = torch.full((4, 60), model.pad_id)
    mask = torch.zeros(4, 60, dtype=torch.bool)
    logprobs = torch.zeros(4, 60)
    ends = [0] * 4
    for turn in range(2):
        prompts = [[10 + index + turn] * (2 + index) for index in range(4)]
        responses = respond(engine, rows, prompts, max_new_tokens=12, temperature=temperature)
        for index, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
            start = ends[index] + len(prompt)
            ends[index] = start + len(response.token_ids)
            token_ids[index, start - len(prompt) : start] = torch.tensor(prompt)
            token_ids[index, start : ends[index]] = torch.tensor(response.token_ids)
            mask[index, start : ends[index]] = True
            logprobs[index, start : ends[index]] = torch.tensor(response.logprobs)
    return token_ids, mask, logprobs


@pytest.mark.parametrize("temperature", quick_first([1.0, 0.6, 1.7]))
def test_sampled_logprobs_equal_the_scored_ones(
    any_model: LanguageModel, temperature: float
) -> None:
    token_ids, mask, logprobs = sampled_batch(any_model, temperature=temperature)
    scores = score_tokens(any_model, token_ids, mask, temperature=temperature)
    torch.testing.assert_close(scores.logprobs_BT, logprobs, atol=1e-5, rtol=0)


def test_logprobs_alone_are_the_same(any_model: LanguageModel) -> None:
    token_ids, mask, _ = sampled_batch(any_model, temperature=1.0)
    scores = score_tokens(any_model, token_ids, mask, temperature=0.7)
    alone = token_logprobs(any_model, token_ids, mask, temperature=0.7)
    assert torch.equal(alone, scores.logprobs_BT)


def test_another_temperature_gives_other_scores(llama: LanguageModel) -> None:
    token_ids, mask, logprobs = sampled_batch(llama, temperature=1.0)
    scores = score_tokens(llama, token_ids, mask, temperature=1.5)
    assert (scores.logprobs_BT - logprobs)[mask].abs().max() > 0.01


def test_scores_are_zero_where_nothing_was_sampled(llama: LanguageModel) -> None:
    token_ids, mask, _ = sampled_batch(llama, temperature=1.0)
    scores = score_tokens(llama, token_ids, mask)
    assert not scores.logprobs_BT[~mask].any()
    assert not scores.entropy_BT[~mask].any()
    assert (scores.logprobs_BT[mask] < 0).all()


def test_entropy_equals_the_sum_over_the_vocabulary(llama: LanguageModel) -> None:
    token_ids, mask, _ = sampled_batch(llama, temperature=1.0)
    scores = score_tokens(llama, token_ids, mask, temperature=0.8)
    assert not scores.entropy_BT.requires_grad
    with torch.no_grad():
        logits = llama.model(input_ids=token_ids).logits.double() / 0.8
    for row, position in mask.nonzero().tolist():
        probability = torch.softmax(logits[row, position - 1], dim=-1)
        entropy = -(probability * probability.log()).sum().item()
        assert scores.entropy_BT[row, position].item() == pytest.approx(entropy, abs=1e-4)


def test_padding_changes_nothing(llama: LanguageModel) -> None:
    token_ids, mask, _ = sampled_batch(llama, temperature=1.0)
    scores = score_tokens(llama, token_ids, mask)
    length = int(mask[1].nonzero().max()) + 1
    alone = score_tokens(llama, token_ids[1:2, :length], mask[1:2, :length])
    torch.testing.assert_close(
        alone.logprobs_BT[0], scores.logprobs_BT[1, :length], atol=1e-5, rtol=0
    )
    other = token_ids.clone()
    other[1, length:] = 99
    other_scores = score_tokens(llama, other, mask)
    torch.testing.assert_close(other_scores.logprobs_BT, scores.logprobs_BT, atol=1e-6, rtol=0)


def disturbed(model: LanguageModel, where: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Adds noise to the hidden states of some positions, after the last layer."""
    hidden_states = model.hidden_states
    noise = torch.randn(*where.shape, 32, generator=torch.Generator().manual_seed(3))

    def noisy(token_ids_BT: torch.Tensor, **kwargs):
        return hidden_states(token_ids_BT, **kwargs) + noise * where[:, :, None]

    monkeypatch.setattr(model, "hidden_states", noisy)


def test_only_logits_before_sampled_tokens_matter(
    llama: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    token_ids, mask, _ = sampled_batch(llama, temperature=1.0)
    predicts = torch.zeros_like(mask)
    predicts[:, :-1] = mask[:, 1:]
    expected = score_tokens(llama, token_ids, mask)
    disturbed(llama, ~predicts, monkeypatch)
    scores = score_tokens(llama, token_ids, mask)
    assert torch.equal(scores.logprobs_BT, expected.logprobs_BT)
    assert torch.equal(scores.entropy_BT, expected.entropy_BT)


def test_each_logit_before_a_sampled_token_matters(
    llama: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last token of a turn, which ends it, included."""
    token_ids, mask, _ = sampled_batch(llama, temperature=1.0)
    predicts = torch.zeros_like(mask)
    predicts[:, :-1] = mask[:, 1:]
    expected = score_tokens(llama, token_ids, mask)
    disturbed(llama, predicts, monkeypatch)
    scores = score_tokens(llama, token_ids, mask)
    assert (scores.logprobs_BT[mask] != expected.logprobs_BT[mask]).all()


def test_a_sampled_first_token_is_refused(llama: LanguageModel) -> None:
    token_ids = torch.tensor([[9, 10, 11], [9, 10, 11]])
    mask = torch.tensor([[False, True, True], [True, True, False]])
    with pytest.raises(ValueError, match="nothing predicts it"):
        score_tokens(llama, token_ids, mask)


def test_a_batch_without_sampled_tokens_scores_zero(llama: LanguageModel) -> None:
    token_ids = torch.tensor([[9, 10, 11]])
    scores = score_tokens(llama, token_ids, torch.zeros(1, 3, dtype=torch.bool))
    assert not scores.logprobs_BT.any()


def test_scores_carry_gradients_to_the_weights(llama: LanguageModel) -> None:
    token_ids, mask, _ = sampled_batch(llama, temperature=1.0)
    scores = score_tokens(llama, token_ids, mask)
    (gradient,) = torch.autograd.grad(scores.logprobs_BT.sum(), [next(llama.model.parameters())])
    assert gradient.abs().sum() > 0


# In pieces


def in_full(
    model: LanguageModel,
    token_ids_RT: torch.Tensor,
    mask_RT: torch.Tensor,
    *,
    temperature: float,
    entropy_gradients: bool,
) -> TokenScores:
    """The scores by their definition, with all logits at once."""
    hidden_RTH = model.hidden_states(token_ids_RT, use_cache=False)
    logits_NV = model.logits(hidden_RTH[:, :-1][mask_RT[:, 1:]])
    logprobs_NV = torch.log_softmax(logits_NV / temperature, dim=-1)
    zeros_RT = torch.zeros(mask_RT.shape, dtype=logprobs_NV.dtype)
    chosen_N = logprobs_NV.gather(1, token_ids_RT[mask_RT][:, None])[:, 0]
    with torch.set_grad_enabled(entropy_gradients and torch.is_grad_enabled()):
        entropy_N = -(logprobs_NV.exp() * logprobs_NV).sum(-1)
    return TokenScores(
        zeros_RT.masked_scatter(mask_RT, chosen_N), zeros_RT.masked_scatter(mask_RT, entropy_N)
    )


def rows_to_score(*, num_targets: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and mask [2, num_targets]: half of the targets end each row."""
    token_ids_RT = torch.randint(
        0, 300, (2, num_targets), generator=torch.Generator().manual_seed(0)
    )
    mask_RT = (torch.arange(num_targets) >= num_targets // 2).expand(2, -1)
    return token_ids_RT, mask_RT


Score = Callable[..., TokenScores]


def scores_and_gradients(
    score: Score, model: LanguageModel, *, temperature: float, entropy_gradients: bool
) -> list[torch.Tensor]:
    """Of 40 targets; what a loss gives each weight that is trained."""
    token_ids_RT, mask_RT = rows_to_score(num_targets=40)
    scores = score(
        model, token_ids_RT, mask_RT, temperature=temperature, entropy_gradients=entropy_gradients
    )
    assert scores.entropy_BT.requires_grad == entropy_gradients
    position_T = torch.arange(40) / 40
    loss = (scores.logprobs_BT * position_T).sum()
    if entropy_gradients:
        loss = loss + (scores.entropy_BT * (1 - position_T)).sum()
    trained = [each for each in model.model.parameters() if each.requires_grad]
    gradients = torch.autograd.grad(loss, trained)
    return [scores.logprobs_BT.detach(), scores.entropy_BT.detach(), *gradients]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("entropy_gradients", [False, True])
def test_few_targets_are_scored_to_the_bit_as_with_all_logits(
    any_model: LanguageModel, temperature: float, entropy_gradients: bool
) -> None:
    options = {"temperature": temperature, "entropy_gradients": entropy_gradients}
    actual = scores_and_gradients(score_tokens, any_model, **options)
    expected = scores_and_gradients(in_full, any_model, **options)
    for mine, theirs in zip(actual, expected, strict=True):
        assert torch.equal(mine, theirs)


def in_pieces_of(num_rows: int, model: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on so many targets make a piece."""
    largest = num_rows * model.vocabulary_size
    monkeypatch.setattr(language_model, "MAX_LOGITS", largest + model.vocabulary_size // 2)


@pytest.mark.parametrize("num_rows", quick_first([1, 7, 39]))
@pytest.mark.parametrize("entropy_gradients", quick_first([False, True]))
def test_pieces_have_the_scores_and_gradients_of_all_logits(
    any_model: LanguageModel,
    num_rows: int,
    entropy_gradients: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options = {"temperature": 0.7, "entropy_gradients": entropy_gradients}
    expected = scores_and_gradients(in_full, any_model, **options)
    in_pieces_of(num_rows, any_model, monkeypatch)
    actual = scores_and_gradients(score_tokens, any_model, **options)
    for mine, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=2e-6 * float(theirs.abs().max()))


def test_pieces_are_the_same_where_only_adapters_are_trained_over_bfloat16(
    qwen_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In mixed precision, with weights that are tied, and layers that are computed again."""
    model = load_language_model(
        qwen_folder,
        device=torch.device("cpu"),
        dtype=torch.bfloat16,
        autocast=torch.bfloat16,
        gradient_checkpointing=True,
    )
    add_adapters(model.model, LoraConfig(rank=4, alpha=8, target_modules=["all-linear"]), seed=0)
    for number, each in enumerate(each for each in model.model.parameters() if each.requires_grad):
        torch.nn.init.normal_(each, std=0.1, generator=torch.Generator().manual_seed(number))
    options = {"temperature": 1.0, "entropy_gradients": True}
    expected = scores_and_gradients(in_full, model, **options)
    in_pieces_of(7, model, monkeypatch)
    actual = scores_and_gradients(score_tokens, model, **options)
    for mine, theirs in zip(actual, expected, strict=True):
        assert float(theirs.abs().max()) > 0
        # A bfloat16 has 8 bits.
        assert float((mine - theirs).norm()) <= 2**-7 * float(theirs.norm())


class Sizes(TorchDispatchMode):
    """Notes the size of the largest tensor of floating-point numbers that an operator makes."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        made = [each for each in tree_leaves(result) if isinstance(each, torch.Tensor)]
        sizes = [each.numel() for each in made if each.is_floating_point()]
        self.largest = max([self.largest, *sizes])
        return result


def sizes_of_a_pass(model: LanguageModel, *, num_targets: int) -> tuple[int, int]:
    """Numbers in the largest tensor of a pass, and in what is kept of logits between its halves."""
    token_ids_RT, mask_RT = rows_to_score(num_targets=num_targets)
    width, kept = model.vocabulary_size, 0

    def note(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal kept
        if tensor.shape[-1:] == (width,):
            kept += tensor.numel()
        return tensor

    with Sizes() as sizes, torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        scores = score_tokens(model, token_ids_RT, mask_RT, entropy_gradients=True)
        (scores.logprobs_BT + scores.entropy_BT).sum().backward()
        token_logprobs(model, token_ids_RT, mask_RT)
    return sizes.largest, kept


@pytest.mark.slow
def test_logits_take_no_more_memory_for_more_targets(
    llama: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = copy.deepcopy(llama)
    width = model.vocabulary_size
    # All at once: log-softmax, and the entropy's probabilities.
    for num_targets in 100, 200:
        largest, kept = sizes_of_a_pass(model, num_targets=num_targets)
        assert largest == num_targets * width
        assert kept >= 2 * num_targets * width
    in_pieces_of(80, model, monkeypatch)
    assert sizes_of_a_pass(model, num_targets=100) == (80 * width, 0)
    assert sizes_of_a_pass(model, num_targets=200) == (80 * width, 0)
