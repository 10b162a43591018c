"""A*-PO through a language model: the closed form is reached, masks let through what they should.

The model and its two-turn world are small enough to write down completely. The agent says A or B up
to twice and then END (or is cut off after two tokens), reads one token that depends on its first
word, and speaks once more: 7 x 7 trajectories for each of two tasks.
"""

import itertools
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from ragen_apo.objectives.apo import ApoSettings, apo_loss, regression_loss, residual
from ragen_apo.types import Trajectory, training_samples
from tests import factories

BETA = 0.3
END, A, B, PROMPT_0, PROMPT_1, SAW_A, SAW_B, PAD = range(8)
RESPONSES = [(END,)] + [(word, END) for word in (A, B)] + list(itertools.product((A, B), (A, B)))


class ToyLanguageModel(nn.Module):
    """A GRU over 8 tokens that can say three of them: END, A and B."""

    def __init__(self, *, seed: int, hidden: int = 24):
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(8, hidden)
        self.recurrent = nn.GRU(hidden, hidden, batch_first=True)
        self.head = nn.Linear(hidden, 3)

    def logits(self, tokens_BT):
        """[B, T, 3]; entry t predicts token t from the tokens before it."""
        hidden_BTH, _ = self.recurrent(self.embedding(tokens_BT[:, :-1]))
        first_B1H = torch.zeros_like(hidden_BTH[:, :1])
        return self.head(torch.cat([first_B1H, hidden_BTH], dim=1))


def token_logprobs(logits_BTV, tokens_BT):
    """log pi [B, T] of each token; what stands at tokens that cannot be said has no meaning."""
    sayable_BT = tokens_BT.clamp(max=B)
    return logits_BTV.log_softmax(-1).gather(-1, sayable_BT[..., None])[..., 0]


def trajectory(prompt: int, first: tuple[int, ...], second: tuple[int, ...]) -> Trajectory:
    """The record of one episode, as a rollout would make it."""
    seen = SAW_A if first[0] == A else SAW_B
    turns = (
        factories.turn(prompt_token_ids=(read,), response_token_ids=said)
        for read, said in ((prompt, first), (seen, second))
    )
    return factories.episode(*turns, task=factories.task(str(prompt)))


@dataclass(frozen=True)
class Rows:
    """Padded trajectories: tokens and mask [B, T], task number [B]."""

    tokens_BT: torch.Tensor
    mask_BT: torch.Tensor
    task_B: torch.Tensor


def pad(trajectories: list[Trajectory], *, length: int = 6) -> Rows:
    samples = [sample for episode in trajectories for sample in training_samples(episode)]
    tokens = [s.token_ids + (PAD,) * (length - len(s.token_ids)) for s in samples]
    masks = [s.loss_mask + (False,) * (length - len(s.loss_mask)) for s in samples]
    tokens_BT = torch.tensor(tokens)
    return Rows(tokens_BT, torch.tensor(masks), tokens_BT[:, 0] - PROMPT_0)


def all_trajectories() -> list[Trajectory]:
    """The 98 of them; those of a task stand together."""
    return [
        trajectory(prompt, first, second)
        for prompt in (PROMPT_0, PROMPT_1)
        for first in RESPONSES
        for second in RESPONSES
    ]


def sequence_logprobs(model, rows: Rows):
    logprobs_BT = token_logprobs(model.logits(rows.tokens_BT), rows.tokens_BT)
    return torch.where(rows.mask_BT, logprobs_BT, 0).sum(1)


def test_the_toy_worlds_trajectories_are_all_there_are():
    rows = pad(all_trajectories())
    probability_B = sequence_logprobs(ToyLanguageModel(seed=1), rows).exp()
    assert len(rows.task_B) == 2 * 49
    for task in (0, 1):
        assert probability_B[rows.task_B == task].sum().item() == pytest.approx(1, abs=1e-12)


@dataclass(frozen=True)
class ToyProblem:
    """All trajectories with their returns, and what the reference makes of them."""

    rows: Rows
    returns_B: torch.Tensor
    reference_BT: torch.Tensor
    reference_B: torch.Tensor

    def v_star(self, beta):
        """The exact value of each trajectory's task under the reference [B]."""
        tilted_B = self.reference_B + self.returns_B / beta
        by_task = [tilted_B[self.rows.task_B == task].logsumexp(0) for task in (0, 1)]
        return beta * torch.stack(by_task)[self.rows.task_B]

    def total_variation(self, policy):
        """Between the policy and the optimal one, mean over the two tasks."""
        optimum_B = (self.reference_B + (self.returns_B - self.v_star(BETA)) / BETA).exp()
        with torch.no_grad():
            return (sequence_logprobs(policy, self.rows).exp() - optimum_B).abs().sum() / 2 / 2


@pytest.fixture
def toy():
    rows, reference = pad(all_trajectories()), ToyLanguageModel(seed=1)
    with torch.no_grad():
        return ToyProblem(
            rows=rows,
            returns_B=torch.rand(98, generator=torch.Generator().manual_seed(5)),
            reference_BT=token_logprobs(reference.logits(rows.tokens_BT), rows.tokens_BT),
            reference_B=sequence_logprobs(reference, rows),
        )


def train_on_samples(toy, sample, *, form="regression", num_steps=150):
    """A policy after steps on what `sample(probability_B)` draws: indices of trajectories."""
    rows, policy = toy.rows, ToyLanguageModel(seed=1)
    optimizer = torch.optim.Adam(policy.parameters(), lr=2e-2)
    for _ in range(num_steps):
        logprobs_BT = token_logprobs(policy.logits(rows.tokens_BT), rows.tokens_BT)
        drawn = sample(torch.where(rows.mask_BT, logprobs_BT.detach(), 0).sum(1).exp())
        output = apo_loss(
            logprobs_BT[drawn],
            reference_logprobs_BT=toy.reference_BT[drawn],
            mask_BT=rows.mask_BT[drawn],
            returns_B=toy.returns_B[drawn],
            v_star_B=toy.v_star(BETA)[drawn],
            settings=ApoSettings(beta2=BETA, loss=form),
            num_sequences=len(drawn),
        )
        optimizer.zero_grad()
        output.loss.backward()
        optimizer.step()
    return policy


def draw(probability_B, number, generator):
    """The probabilities of both tasks sum to one each, so a draw has a random task."""
    return torch.multinomial(probability_B, number, replacement=True, generator=generator)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["regression", "weighted"])
def test_a_language_model_trained_on_its_own_samples_reaches_the_closed_form(toy, form):
    draws = torch.Generator().manual_seed(0)
    policy = train_on_samples(toy, lambda policy_B: draw(policy_B, 256, draws), form=form)
    assert toy.total_variation(ToyLanguageModel(seed=1)) > 0.2
    assert toy.total_variation(policy) < 0.02


@pytest.mark.slow
def test_a_language_model_trained_on_a_quarter_new_and_the_rest_old_samples_reaches_it(toy):
    draws, played = torch.Generator().manual_seed(0), []

    def sample(policy_B):
        new, old = draw(policy_B, 64, draws), torch.tensor(played, dtype=torch.int64)
        played.extend(new.tolist())
        chosen = torch.randint(max(len(old), 1), (192 if len(old) else 0,), generator=draws)
        return torch.cat([new, old[chosen]])

    assert toy.total_variation(train_on_samples(toy, sample)) < 0.02


def minimizer(toy, *, beta1, data, num_steps=150):
    """Descends the expected loss over the policy's own, another model's or any trajectories."""
    rows, policy = toy.rows, ToyLanguageModel(seed=1)
    with torch.no_grad():
        another_B = sequence_logprobs(ToyLanguageModel(seed=2), rows).exp()
    optimizer = torch.optim.Adam(policy.parameters(), lr=2e-2)
    for _ in range(num_steps):
        logprob_B = sequence_logprobs(policy, rows)
        left_B = residual(
            logprob_B - toy.reference_B,
            returns_B=toy.returns_B,
            v_star_B=toy.v_star(beta1),
            beta2=BETA,
        )
        weights = {"own": logprob_B.detach().exp(), "another": another_B, "any": torch.ones(98)}
        weight_B = weights[data] / weights[data].sum()
        optimizer.zero_grad()
        (weight_B * regression_loss(left_B, beta2=BETA)).sum().backward()
        optimizer.step()
    return policy


@pytest.mark.slow
@pytest.mark.parametrize("data", ["another", "any"])
def test_with_one_beta_the_minimum_is_the_optimal_policy_on_any_data(toy, data):
    assert toy.total_variation(minimizer(toy, beta1=BETA, data=data)) < 0.02


@pytest.mark.slow
@pytest.mark.parametrize(("beta1", "moved"), [(0.1, 0.223), (1.0, 0.057)])
def test_with_two_betas_it_is_so_on_its_own_data_and_not_on_others(toy, beta1, moved):
    assert toy.total_variation(minimizer(toy, beta1=beta1, data="own")) < 0.02
    other = toy.total_variation(minimizer(toy, beta1=beta1, data="any"))
    assert other.item() == pytest.approx(moved, abs=0.02)


def two_rows() -> Rows:
    """Two episodes: responses that end, one that the limit cuts off, and padding."""
    return pad([trajectory(PROMPT_0, (A, END), (B, A)), trajectory(PROMPT_1, (END,), (B, END))])


def loss_and_gradient(model, rows: Rows, *, added_BTV=0.0, extra_sure_tokens=0):
    logits_BTV = model.logits(rows.tokens_BT) + added_BTV
    logprobs_BT = token_logprobs(logits_BTV, rows.tokens_BT)
    mask_BT = rows.mask_BT
    reference_BT = torch.full_like(logprobs_BT, -1.0).detach()
    if extra_sure_tokens:
        sure_BT = torch.zeros(len(mask_BT), extra_sure_tokens)
        logprobs_BT = torch.cat([logprobs_BT, sure_BT], dim=1)
        reference_BT = torch.cat([reference_BT, sure_BT], dim=1)
        mask_BT = torch.cat([mask_BT, torch.ones_like(sure_BT, dtype=torch.bool)], dim=1)
    output = apo_loss(
        logprobs_BT,
        reference_logprobs_BT=reference_BT,
        mask_BT=mask_BT,
        returns_B=torch.tensor([1.0, 0.0]),
        v_star_B=torch.tensor([0.3, 0.3]),
        settings=ApoSettings(beta2=BETA),
        num_sequences=2,
    )
    gradients = torch.autograd.grad(output.loss, list(model.parameters()))
    return output.loss.detach(), torch.cat([gradient.flatten() for gradient in gradients])


def test_the_mask_is_true_at_exactly_the_sampled_tokens_the_end_token_included():
    # prompt A END seen B A   /   prompt END seen B END pad
    assert two_rows().mask_BT.tolist() == [
        [False, True, True, False, True, True],
        [False, True, False, True, True, False],
    ]


@pytest.mark.parametrize("row", [0, 1])
@pytest.mark.parametrize("position", range(6))
def test_logits_matter_at_sampled_tokens_and_nowhere_else(row, position):
    model, rows = ToyLanguageModel(seed=1), two_rows()
    added_BTV = torch.zeros(2, 6, 3)
    added_BTV[row, position] = torch.tensor([0.5, -0.5, 1.0])
    loss, gradient = loss_and_gradient(model, rows)
    changed_loss, changed_gradient = loss_and_gradient(model, rows, added_BTV=added_BTV)
    if rows.mask_BT[row, position]:
        assert (changed_loss - loss).abs() > 1e-3
        assert (changed_gradient - gradient).norm() > 1e-3
    else:
        assert changed_loss == loss
        assert torch.equal(changed_gradient, gradient)


def test_tokens_of_probability_one_leave_the_loss_unchanged():
    model, rows = ToyLanguageModel(seed=1), two_rows()
    loss, gradient = loss_and_gradient(model, rows)
    longer_loss, longer_gradient = loss_and_gradient(model, rows, extra_sure_tokens=3)
    torch.testing.assert_close(longer_loss, loss)
    torch.testing.assert_close(longer_gradient, gradient)


def test_what_follows_a_row_as_padding_does_not_reach_the_loss():
    model = ToyLanguageModel(seed=1)
    episodes = [trajectory(PROMPT_0, (A, END), (B, A)), trajectory(PROMPT_1, (END,), (B, END))]
    loss, gradient = loss_and_gradient(model, pad(episodes))
    longer_loss, longer_gradient = loss_and_gradient(model, pad(episodes, length=11))
    torch.testing.assert_close(longer_loss, loss)
    torch.testing.assert_close(longer_gradient, gradient)
