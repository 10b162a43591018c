"""Scores of recorded tokens: equal to the sampler's, and read at the sampled positions only."""

import pytest
import torch

from ragen_apo.policy.generation import GenerationEngine
from ragen_apo.policy.language_model import LanguageModel
from ragen_apo.policy.scoring import score_tokens, token_logprobs
from ragen_apo.seeding import generator
from tests.generating import respond


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


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
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
