"""How much the first thoughts of a step say about their tasks, by scoring each under all of them.

Consumes the trajectories of a step and the policy that sampled them; produces metrics. A policy can
keep its entropy while its thoughts turn into a template that fits every task. Then entropy is high
and mutual information is 0. RAGEN (arXiv 2504.20073, and its code) calls this template collapse.

z_i is the thought that the policy wrote after the first prompt x_i of task i, one of N. Only first
turns are used: later contexts hold the policy's own words. With L[i, j] = log p(z_i | x_j) in nats

    I_hat    = mean_i ( L[i, i] - log (1/N) sum_j exp L[i, j] )      mutual information
    H_hat    = -mean_i L[i, i]                                       conditional entropy H(Z|X)
    accuracy = mean_i ( 1 / |B_i| if i is in B_i, else 0 )           B_i: best columns of row i

What I_hat is: draw J evenly from the N tasks and Z from p(. | x_J). Z is then distributed as the
mixture m = (1/N) sum_j p(. | x_j), and given the prompts

    E I_hat = (1/N) sum_i KL( p(. | x_i) || m ) = I(J; Z).

So I_hat is an unbiased estimate of how much a thought says about which of these N tasks it belongs
to.

- Upper bound: the sum over j contains exp L[i, i]. So each term of the mean, and I_hat, is at most
  log N, which is H(J). It is reached if no thought is possible under another task.
- Lower bound: E I_hat >= 0, because it is a mean of divergences. A single estimate may be below 0:
  a thought can be more probable under other tasks than under its own.
- All tasks: let x_1..x_N be drawn like the tasks of a step. Z depends on J and the prompts only
  through x_J. By the chain rule I(x_J; Z) = I(x_1..x_N; Z) + I(J; Z | x_1..x_N). So over draws of
  prompts E I_hat <= I(X; Z). This is InfoNCE (arXiv 1807.03748) with the exact log p(z | x) in
  place of a learned critic (arXiv 1905.06922). More than log N cannot be seen; if a value is near
  it, use a larger N.

A thought is the response up to the token that completes `</think>`, or the whole response if there
is none. Both are stopping times of sampling, so p(. | x) is normalised over thoughts. Broken
thoughts count like any other.
"""

from __future__ import annotations

import itertools
import math
import time
from bisect import bisect_left
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ragen_apo.policy.language_model import LanguageModel
from ragen_apo.policy.scoring import token_logprobs
from ragen_apo.policy.tokenizer import CLOSE_THOUGHT, OPEN_THOUGHT, text_of
from ragen_apo.training.batching import collate, micro_batches, pass_cost
from ragen_apo.types import TrainingSample, Trajectory, Turn

TIE_TOLERANCE = 1e-4
"""Nats. Scores this close count as equal: two scorings of the same tokens differ by as much."""

TokenIds = tuple[int, ...]


def thought_shares(turns: Sequence[Turn], *, opening: str = "") -> dict[str, float]:
    """Shares of turns whose thought is closed with nothing in it, or opened and never closed.

    `opening` is what the chat template has written of every response: it may open the thought.
    """
    template_opens = OPEN_THOUGHT in opening and CLOSE_THOUGHT not in opening
    num_empty = num_unclosed = 0
    for turn in turns:
        text = opening + turn.response if template_opens else turn.response
        _, opened, rest = text.partition(OPEN_THOUGHT)
        thought, closed, _ = rest.partition(CLOSE_THOUGHT)
        num_unclosed += bool(opened and not closed)
        num_empty += bool(closed and not thought.strip())
    return {
        "empty_thought_share": num_empty / len(turns),
        "unclosed_thought_share": num_unclosed / len(turns),
    }


def cross_scoring_metrics(
    policy: LanguageModel,
    trajectories: Sequence[Trajectory],
    *,
    num_thoughts: int,
    temperature: float,
    micro_batch_size: int,
    rng: np.random.Generator,
) -> dict[str, float | int]:
    """Mutual information, conditional entropy and retrieval accuracy; see the module's head.

    `policy` must have the weights and `temperature` that sampled the trajectories. At most
    `num_thoughts` tasks are drawn. Empty for trajectories of a single task.
    """
    started = time.perf_counter()
    turns = first_turns(trajectories, num_tasks=num_thoughts, rng=rng)
    if len(turns) < 2:
        return {}
    thoughts = [thought_tokens(turn.response_token_ids, policy.tokenizer) for turn in turns]
    scores_NN = cross_scores(
        policy,
        thoughts=thoughts,
        prompts=[turn.prompt_token_ids for turn in turns],
        temperature=temperature,
        micro_batch_size=micro_batch_size,
    )
    metrics = information(scores_NN, num_tokens=sum(len(thought) for thought in thoughts))
    return metrics | {"thought_monitor_seconds": time.perf_counter() - started}


def first_turns(
    trajectories: Sequence[Trajectory], *, num_tasks: int, rng: np.random.Generator
) -> list[Turn]:
    """The first turns of up to `num_tasks` different tasks, drawn without replacement.

    Of several trajectories of a task the first one counts.
    """
    of_task: dict[str, Turn] = {}
    for trajectory in trajectories:
        of_task.setdefault(trajectory.task.task_id, trajectory.turns[0])
    turns = list(of_task.values())
    return [turns[index] for index in rng.permutation(len(turns))[:num_tasks].tolist()]


def thought_tokens(response_token_ids: TokenIds, tokenizer: PreTrainedTokenizerBase) -> TokenIds:
    """The sampled tokens up to the one that completes `</think>`; all if none does."""

    def is_closed(length: int) -> bool:
        text = text_of(tokenizer, response_token_ids[:length])
        return CLOSE_THOUGHT in text

    lengths = range(1, len(response_token_ids))
    return response_token_ids[: 1 + bisect_left(lengths, True, key=is_closed)]


def cross_scores(
    policy: LanguageModel,
    *,
    thoughts: Sequence[TokenIds],
    prompts: Sequence[TokenIds],
    temperature: float,
    micro_batch_size: int,
) -> Tensor:
    """The scores log p(thought i | prompt j) in nats [N, N], in float64 and without gradients.

    Equal pairs are scored once: duplicates give equal entries to the last bit.
    """
    pairs = list(dict.fromkeys(itertools.product(thoughts, prompts)))
    samples = [
        TrainingSample(
            token_ids=prompt + thought,
            loss_mask=(False,) * len(prompt) + (True,) * len(thought),
            logprobs=(0.0,) * (len(prompt) + len(thought)),
        )
        for thought, prompt in pairs
    ]
    score_of: dict[tuple[TokenIds, TokenIds], float] = {}
    alone = [(sample,) for sample in samples]
    cost = pass_cost(policy.device, sharded=policy.shards is not None)
    for indices in micro_batches(alone, size=micro_batch_size, pass_cost=cost):
        batch = collate(
            [samples[index] for index in indices], pad_id=policy.pad_id, device=policy.device
        )
        with torch.no_grad():
            logprobs_BT = token_logprobs(
                policy, batch.token_ids_RT, batch.loss_mask_RT, temperature=temperature
            )
        sums = logprobs_BT.double().sum(dim=1).tolist()
        score_of |= {pairs[index]: total for index, total in zip(indices, sums, strict=True)}
    return torch.tensor(
        [[score_of[thought, prompt] for prompt in prompts] for thought in thoughts],
        dtype=torch.float64,
    )


def information(scores_NN: Tensor, *, num_tokens: int) -> dict[str, float | int]:
    """The estimates from L[i, j] in float64; `num_tokens` is the length of all N thoughts together.

    Minus infinity stands for a thought that a task can never lead to; the diagonal is finite.
    """
    num_thoughts = len(scores_NN)
    own_N = scores_NN.diagonal()
    log_mixture_N = torch.logsumexp(scores_NN, dim=1) - math.log(num_thoughts)
    tied_NN = scores_NN >= scores_NN.amax(dim=1, keepdim=True) - TIE_TOLERANCE
    credit_N = tied_NN.diagonal().double() / tied_NN.sum(dim=1)
    return {
        "mutual_information": (own_N - log_mixture_N).mean().item(),
        "mutual_information_bound": math.log(num_thoughts),
        "conditional_entropy": -own_N.mean().item(),
        "conditional_entropy_per_token": -own_N.sum().item() / num_tokens,
        "retrieval_accuracy": credit_N.mean().item(),
        "num_scored_thoughts": num_thoughts,
    }
