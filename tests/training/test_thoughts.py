"""Cross-scored thoughts: closed forms, brute force, ties, and where a thought ends."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ragen_apo.policy.language_model import LanguageModel
from ragen_apo.session import Session
from ragen_apo.training.thoughts import (
    cross_scores,
    cross_scoring_metrics,
    first_turns,
    information,
    thought_shares,
    thought_tokens,
)
from ragen_apo.types import Turn
from tests import factories
from tests.factories import step_without_update, trainer_of

NEVER = -math.inf


def scores(rows: list[list[float]]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float64)


@pytest.mark.parametrize("num", [2, 7])
def test_thoughts_that_name_their_task_with_certainty_have_information_log_n(num: int) -> None:
    rows = [[0.0 if i == j else NEVER for j in range(num)] for i in range(num)]
    found = information(scores(rows), num_tokens=5 * num)
    assert found["mutual_information"] == pytest.approx(math.log(num), abs=1e-15)
    assert found["mutual_information_bound"] == math.log(num)
    assert found["conditional_entropy"] == 0
    assert (found["retrieval_accuracy"], found["num_scored_thoughts"]) == (1.0, num)


def test_thoughts_that_do_not_depend_on_the_task_have_information_zero() -> None:
    # Each thought is as probable under any of the four tasks; whose it is can only be guessed.
    rows = [[value] * 4 for value in (-1.0, -20.0, -3.0, -900.0)]
    found = information(scores(rows), num_tokens=77)
    assert found["mutual_information"] == pytest.approx(0, abs=1e-12)
    assert found["retrieval_accuracy"] == 1 / 4
    assert found["conditional_entropy"] == pytest.approx(924 / 4)
    assert found["conditional_entropy_per_token"] == pytest.approx(924 / 77)


def test_the_mean_over_all_draws_is_the_information_between_task_and_thought() -> None:
    # p(z | x) of three tasks and three thoughts; the third thought can come from one task only.
    table = [[0.5, 0.5, 0.0], [0.2, 0.8, 0.0], [0.1, 0.3, 0.6]]
    mixture = [sum(row[z] for row in table) / 3 for z in range(3)]
    expected = sum(
        p * math.log(p / mixture[z]) / 3 for row in table for z, p in enumerate(row) if p
    )
    entropy = -sum(p * math.log(p) / 3 for row in table for p in row if p)
    mean_information = mean_entropy = 0.0
    for drawn in itertools.product(range(3), repeat=3):
        chance = math.prod(row[z] for row, z in zip(table, drawn, strict=True))
        if chance:
            logs = [[math.log(row[z]) if row[z] else NEVER for row in table] for z in drawn]
            found = information(scores(logs), num_tokens=3)
            mean_information += chance * found["mutual_information"]
            mean_entropy += chance * found["conditional_entropy"]
    assert mean_information == pytest.approx(expected, abs=1e-12)
    assert mean_entropy == pytest.approx(entropy, abs=1e-12)


def test_one_estimate_may_lie_below_zero() -> None:
    # Each thought is more probable under the other task: log(0.1 / 0.5) = -1.61.
    log = math.log
    found = information(scores([[log(0.1), log(0.9)], [log(0.9), log(0.1)]]), num_tokens=2)
    assert found["mutual_information"] == pytest.approx(log(0.2))
    assert found["retrieval_accuracy"] == 0


@given(st.lists(st.floats(-2000, 0), min_size=16, max_size=16))
def test_the_information_is_at_most_log_n_and_all_is_finite(values: list[float]) -> None:
    found = information(scores(np.reshape(values, (4, 4)).tolist()), num_tokens=4)
    assert found["mutual_information"] <= math.log(4) + 1e-9
    assert all(math.isfinite(value) for value in found.values())


def test_tasks_with_the_same_prompt_share_the_credit_for_a_thought() -> None:
    # Tasks 0 and 1 read the same; each thought is certain under what its task reads.
    rows = [[0.0, 0.0, NEVER], [0.0, 0.0, NEVER], [NEVER, NEVER, 0.0]]
    found = information(scores(rows), num_tokens=3)
    assert found["retrieval_accuracy"] == pytest.approx((1 / 2 + 1 / 2 + 1) / 3)
    expected = (2 * math.log(3 / 2) + math.log(3)) / 3
    assert found["mutual_information"] == pytest.approx(expected)


def test_rounding_decides_no_retrieval() -> None:
    nearly_equal = [[-5.0, -5.00001, -5.00002], [-7.0, -7.00002, -7.00001], [-1.0, -2.0, -3.0]]
    found = information(scores(nearly_equal), num_tokens=3)
    assert found["retrieval_accuracy"] == pytest.approx((1 / 3 + 1 / 3 + 0) / 3)


def log_probability(model: LanguageModel, prompt: tuple, thought: tuple, temperature: float):
    """One row, all logits, in float64."""
    with torch.no_grad():
        logits = model.model(torch.tensor([prompt + thought])).logits[0].double() / temperature
    logprobs = torch.log_softmax(logits, dim=-1)
    places = range(len(prompt) - 1, len(prompt) + len(thought) - 1)
    return sum(logprobs[at, token].item() for at, token in zip(places, thought, strict=True))


@pytest.mark.parametrize("micro_batch_size", [3, 100])
def test_scores_are_those_of_one_pair_at_a_time(
    micro_batch_size: int, tiny_model: LanguageModel
) -> None:
    prompts = [tuple(range(20, 24 + 3 * n)) for n in range(4)]
    thoughts = [(40, 41, 42), (50,), (60, 61, 62, 63, 64, 65, 66), (40, 41, 43)]
    actual = cross_scores(
        tiny_model,
        thoughts=thoughts,
        prompts=prompts,
        temperature=0.7,
        micro_batch_size=micro_batch_size,
    )
    assert (actual.dtype, actual.requires_grad) == (torch.float64, False)
    for (i, thought), (j, prompt) in itertools.product(enumerate(thoughts), enumerate(prompts)):
        expected = log_probability(tiny_model, prompt, thought, 0.7)
        assert actual[i, j].item() == pytest.approx(expected, abs=1e-4)


def test_equal_prompts_and_equal_thoughts_have_equal_scores_to_the_last_bit(
    tiny_model: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = []
    forward = tiny_model.hidden_states
    monkeypatch.setattr(
        tiny_model,
        "hidden_states",
        lambda ids, **more: (rows.append(len(ids)), forward(ids, **more))[1],
    )
    prompts = [(20, 21), (20, 21), (30, 31, 32), (33,)]
    thoughts = [(40, 41), (40, 41), (50,), (60, 61, 62)]
    actual = cross_scores(
        tiny_model, thoughts=thoughts, prompts=prompts, temperature=1.0, micro_batch_size=2
    )
    assert sum(rows) == 3 * 3
    assert torch.equal(actual[:, 0], actual[:, 1])
    assert torch.equal(actual[0], actual[1])


@pytest.mark.slow
def test_the_metrics_of_rollouts_by_brute_force(session: Session) -> None:
    trainer = trainer_of(session, "grpo", "--sampling.temperature=0.8", group_size=2)
    trajectories = step_without_update(trainer).trajectories
    found = cross_scoring_metrics(
        trainer.policy,
        trajectories,
        num_thoughts=50,
        temperature=0.8,
        micro_batch_size=4,
        rng=np.random.default_rng(0),
    )
    turns = [trajectory.turns[0] for trajectory in trajectories[::2]]
    closing = trainer.policy.tokenizer.convert_tokens_to_ids("</think>")
    thoughts = []
    for turn in turns:
        ids = turn.response_token_ids
        end = ids.index(closing) + 1 if closing in ids else len(ids)
        thoughts.append((ids[:end], turn.logprobs[:end]))
    chances = [
        [math.exp(log_probability(trainer.policy, t.prompt_token_ids, z, 0.8)) for t in turns]
        for z, _ in thoughts
    ]
    # Under its own prompt a thought has the log-probability that it was sampled with.
    own = [sum(logprobs) for _, logprobs in thoughts]
    terms = [value - math.log(sum(row) / 4) for value, row in zip(own, chances, strict=True)]
    best = [row.index(max(row)) == i for i, row in enumerate(chances)]
    assert found["num_scored_thoughts"] == 4
    assert found["mutual_information"] == pytest.approx(sum(terms) / 4, abs=1e-3)
    assert found["conditional_entropy"] == pytest.approx(-sum(own) / 4, rel=1e-4)
    num_tokens = sum(len(z) for z, _ in thoughts)
    assert found["conditional_entropy_per_token"] == pytest.approx(-sum(own) / num_tokens, rel=1e-4)
    assert found["retrieval_accuracy"] == pytest.approx(sum(best) / 4)


@pytest.mark.slow
def test_trajectories_of_a_single_task_say_nothing(session: Session) -> None:
    trainer = trainer_of(session, "grpo", group_size=2)
    trajectories = step_without_update(trainer).trajectories[:2]
    found = cross_scoring_metrics(
        trainer.policy,
        trajectories,
        num_thoughts=4,
        temperature=1.0,
        micro_batch_size=4,
        rng=np.random.default_rng(0),
    )
    assert found == {}


@pytest.mark.slow
def test_first_turns_are_of_different_tasks_drawn_by_the_generator(session: Session) -> None:
    trainer = trainer_of(session, "grpo", group_size=2)
    trajectories = step_without_update(trainer).trajectories
    # A step may hold a task twice: here once more at the end, with another first turn.
    repeated = replace(trajectories[0], turns=trajectories[-1].turns)
    every = [trajectory.turns[0] for trajectory in trajectories[::2]]

    def draw(seed: int, num_tasks: int) -> list[Turn]:
        rng = np.random.default_rng(seed)
        return first_turns([*trajectories, repeated], num_tasks=num_tasks, rng=rng)

    assert sorted(draw(0, 9), key=every.index) == every
    draws = [draw(seed, 3) for seed in (1, 1, 2, 3)]
    assert all(len(turns) == 3 and all(turn in every for turn in turns) for turns in draws)
    assert draws[0] == draws[1]
    assert draws[0] != draws[2] or draws[0] != draws[3]


@pytest.mark.parametrize("name", ["shop_tokenizer", "chatml_tokenizer"])
def test_a_thought_ends_with_the_token_that_completes_its_tag(
    name: str, request: pytest.FixtureRequest
) -> None:
    tokenizer = request.getfixturevalue(name)
    text = "<think>a red cap</think><answer>search[cap]</answer>"
    ids = tuple(tokenizer.encode(text, add_special_tokens=False))
    thought = thought_tokens(ids, tokenizer)
    assert ids[: len(thought)] == thought
    assert "</think>" in tokenizer.decode(list(thought))
    assert "</think>" not in tokenizer.decode(list(thought[:-1]))
    unclosed = tuple(tokenizer.encode("<think>a red cap", add_special_tokens=False))
    assert thought_tokens(unclosed, tokenizer) == unclosed
    assert thought_tokens(thought, tokenizer) == thought
    assert thought_tokens(ids[:1], tokenizer) == ids[:1]


def test_shares_of_empty_and_of_unclosed_thoughts() -> None:
    empty = ["<think></think><answer>a</answer>", "<think> \n</think>"]
    unclosed = ["<think>on and on", "<think>", "<think>red<answer>a</answer>"]
    others = ["<think>red</think>", "no thought", "</think>", "<answer>a</answer>", ""]
    found = thought_shares([factories.turn(response=text) for text in (*empty, *unclosed, *others)])
    assert found == {"empty_thought_share": 2 / 10, "unclosed_thought_share": 3 / 10}


@pytest.mark.parametrize(
    ("opening", "shares"),
    [("<think>\n", (1 / 3, 1 / 3)), ("<think>\n\n</think>\n\n", (0.0, 0.0)), ("", (0.0, 0.0))],
)
def test_a_thought_that_the_template_opens_is_counted_as_opened(
    opening: str, shares: tuple[float, float]
) -> None:
    texts = ["</think><answer>a</answer>", "on and on", "red</think><answer>a</answer>"]
    found = thought_shares([factories.turn(response=text) for text in texts], opening=opening)
    assert tuple(found.values()) == shares


@pytest.mark.slow
def test_thoughts_are_monitored_in_the_first_of_so_many_steps(session: Session) -> None:
    steps = trainer_of(session, "apo", "--monitors.every_steps=2")
    found = ["mutual_information" in steps.step(number).metrics for number in range(4)]
    assert found == [True, False, True, False]
