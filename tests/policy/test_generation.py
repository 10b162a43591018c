"""The generation engine against separate forward passes over whole, unpadded rows."""

import copy
import dataclasses
import itertools
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from ragen_apo.errors import ContextError, ModelError
from ragen_apo.policy import attention, generation, ragged_cache
from ragen_apo.policy import rows as engine_rows
from ragen_apo.policy.engine import Response
from ragen_apo.policy.generation import GenerationEngine
from ragen_apo.policy.language_model import LanguageModel
from ragen_apo.policy.ragged_cache import SpareMemory
from ragen_apo.policy.rows import PADDED_TOKENS_PER_PASS, TOKENS_PER_PASS, Row, read_together
from ragen_apo.policy.sampling import StopRule, inverse_cdf
from ragen_apo.seeding import generator
from tests.chat_templates import GEMMA, with_template
from tests.generating import respond
from tests.sweeps import quick_first

CAPACITY = 128
NUM_TURNS = 3
MAX_NEW_TOKENS = 9


@dataclasses.dataclass
class Conversation:
    """One row's prompts, turn by turn, and what was sampled."""

    name: int
    prompts: list[list[int]]
    responses: list[Response] = dataclasses.field(default_factory=list)

    @property
    def token_ids(self) -> list[int]:
        turns = zip(self.prompts, self.responses, strict=True)
        return [token for prompt, response in turns for token in (*prompt, *response.token_ids)]

    @property
    def sampled_positions(self) -> list[int]:
        positions: list[int] = []
        end = 0
        for prompt, response in zip(self.prompts, self.responses, strict=True):
            start = end + len(prompt)
            end = start + len(response.token_ids)
            positions += range(start, end)
        return positions

    @property
    def logprobs(self) -> list[float]:
        return [logprob for response in self.responses for logprob in response.logprobs]


def conversations(names: Sequence[int], vocab_size: int) -> list[Conversation]:
    """Prompts of 1 to 12 tokens that depend on the name of the row only."""
    found = []
    for name in names:
        draws = np.random.default_rng(name)
        lengths = draws.integers(1, 12, size=NUM_TURNS, endpoint=True)
        found.append(
            Conversation(name, [draws.integers(8, vocab_size, n).tolist() for n in lengths])
        )
    return found


def play(
    model: LanguageModel, names: Sequence[int], *, temperature: float = 1.0, num_turns: int = 3
) -> list[Conversation]:
    """Plays the rows side by side; a third of the vocabulary ends a response."""
    engine = GenerationEngine(model, num_rows=len(names), capacity=CAPACITY)
    engine.stop_rule.end_ids |= set(range(0, len(model.tokenizer), 3))
    played = conversations(names, len(model.tokenizer))
    rows = [engine.open_row(generator(row.name, "draws")) for row in played]
    for turn in range(num_turns):
        responses = respond(
            engine,
            rows,
            [row.prompts[turn] for row in played],
            max_new_tokens=MAX_NEW_TOKENS,
            temperature=temperature,
        )
        for row, response in zip(played, responses, strict=True):
            row.responses.append(response)
    for row in played:
        del row.prompts[num_turns:]
    return played


@torch.no_grad()
def logits_of(model: LanguageModel, row: Conversation) -> torch.Tensor:
    """Logits [sampled tokens, V] from the whole model on this row alone."""
    whole = model.model(input_ids=torch.tensor([row.token_ids])).logits[0]
    return whole[torch.tensor(row.sampled_positions) - 1]


def sampled_tokens(row: Conversation) -> list[int]:
    return [row.token_ids[position] for position in row.sampled_positions]


@pytest.mark.slow
@pytest.mark.parametrize(("temperature", "matrix_units"), [(1.0, True), (0.5, False), (2.0, False)])
def test_logprobs_equal_those_of_separate_forward_passes(
    any_model: LanguageModel,
    temperature: float,
    matrix_units: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On processors of both kinds: with matrix units, PyTorch's kernel attends."""
    monkeypatch.setattr(attention, "has_matrix_units", lambda: matrix_units)
    for row in play(any_model, range(7), temperature=temperature):
        expected = torch.log_softmax(logits_of(any_model, row) / temperature, dim=-1)
        expected = expected.gather(1, torch.tensor(sampled_tokens(row))[:, None])[:, 0]
        # A rounding error of the logits is divided by the temperature, too.
        atol = 1e-5 / min(temperature, 1.0)
        torch.testing.assert_close(torch.tensor(row.logprobs), expected, atol=atol, rtol=0)


def test_greedy_tokens_equal_those_of_separate_forward_passes(any_model: LanguageModel) -> None:
    for row in play(any_model, range(7), temperature=0.0):
        logits = logits_of(any_model, row)
        assert sampled_tokens(row) == logits.argmax(-1).tolist()
        expected = torch.log_softmax(logits, dim=-1).amax(-1)
        torch.testing.assert_close(torch.tensor(row.logprobs), expected, atol=1e-5, rtol=0)


def test_a_copied_row_goes_on_as_one_that_has_read_the_same_context(
    any_model: LanguageModel,
) -> None:
    """Copied from a row between others, before and after its first response."""
    engine = GenerationEngine(any_model, num_rows=6, capacity=CAPACITY)
    engine.stop_rule.end_ids |= set(range(0, len(any_model.tokenizer), 3))
    first, second, third = conversations([1, 2, 3], len(any_model.tokenizer))
    rows = [engine.open_row(generator(each.name)) for each in (first, second)]
    settings = {"max_new_tokens": MAX_NEW_TOKENS, "temperature": 0.0}
    second.responses += respond(engine, rows, [first.prompts[0], second.prompts[0]], **settings)[1:]
    copied = copy.deepcopy(second)
    copied.prompts[1] = third.prompts[0]
    copies = [engine.copy_row(rows[1], generator(9)) for _ in range(2)]
    engine.close_row(rows[0])
    responses = respond(
        engine,
        [rows[1], *copies],
        [second.prompts[1], copied.prompts[1], second.prompts[1]],
        **settings,
    )
    assert responses[0].token_ids == responses[2].token_ids
    for played, response in ((second, responses[0]), (copied, responses[1])):
        played.responses.append(response)
        del played.prompts[2:]
        logits = logits_of(any_model, played)
        assert sampled_tokens(played) == logits.argmax(-1).tolist()
        expected = torch.log_softmax(logits, dim=-1).amax(-1)
        torch.testing.assert_close(torch.tensor(played.logprobs), expected, atol=1e-5, rtol=0)


def test_copies_draw_their_own_tokens(tiny_model: LanguageModel) -> None:
    engine = GenerationEngine(tiny_model, num_rows=3, capacity=CAPACITY)
    row = engine.open_row(generator(1))
    rows = [row, *(engine.copy_row(row, generator(seed)) for seed in (1, 2))]
    same, again, other = respond(
        engine, rows, [[5, 6, 7]] * 3, max_new_tokens=MAX_NEW_TOKENS, temperature=1.0
    )
    assert same.token_ids == again.token_ids != other.token_ids


def test_sampled_tokens_follow_the_rows_own_draws(any_model: LanguageModel) -> None:
    for row in play(any_model, range(7), temperature=0.7):
        draws = generator(row.name, "draws")
        uniform = [draws.random(MAX_NEW_TOKENS)[: len(r.token_ids)] for r in row.responses]
        logprobs = torch.log_softmax(logits_of(any_model, row) / 0.7, dim=-1)
        expected = inverse_cdf(logprobs, torch.from_numpy(np.concatenate(uniform)))
        assert sampled_tokens(row) == expected.tolist()


def test_responses_have_different_lengths(llama: LanguageModel) -> None:
    """Otherwise the tests above would not see a ragged cache."""
    lengths = {
        len(response.token_ids) for row in play(llama, range(7)) for response in row.responses
    }
    assert len(lengths) > 4


@pytest.mark.parametrize(
    "names", quick_first([[3], [5, 3], [3, 5, 0, 1], [6, 5, 4, 3, 2, 1, 0], [9, 3, 8]])
)
def test_a_trajectory_does_not_depend_on_its_neighbours(
    llama: LanguageModel, names: list[int]
) -> None:
    together = {row.name: row for row in play(llama, range(7))}
    for row in play(llama, names):
        if row.name in together:
            assert row.token_ids == together[row.name].token_ids
            np.testing.assert_allclose(row.logprobs, together[row.name].logprobs, atol=1e-5)


def play_without_waiting(
    model: LanguageModel, names: Sequence[int], *, num_rows: int
) -> list[Conversation]:
    """Each row goes on with its next turn, and its slot with the next row, at once."""
    engine = GenerationEngine(model, num_rows=num_rows, capacity=CAPACITY)
    engine.stop_rule.end_ids |= set(range(0, len(model.tokenizer), 3))
    played = conversations(names, len(model.tokenizer))
    unopened, row_of = list(played), {}
    while unopened or row_of:
        while unopened and engine.num_free_rows:
            row = unopened.pop(0)
            opened = engine.open_row(generator(row.name, "draws"))
            row_of[opened] = row
            engine.submit(opened, row.prompts[0], max_new_tokens=MAX_NEW_TOKENS)
        for opened, response in engine.step(temperature=1.0):
            row = row_of[opened]
            row.responses.append(response)
            if len(row.responses) < NUM_TURNS:
                prompt = row.prompts[len(row.responses)]
                engine.submit(opened, prompt, max_new_tokens=MAX_NEW_TOKENS)
            else:
                engine.close_row(opened)
                del row_of[opened]
    return played


@pytest.fixture(scope="module")
def together(any_model: LanguageModel) -> list[Conversation]:
    """What twelve rows that wait for each other write; read only."""
    return play(any_model, range(12))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_rows", "tokens_per_pass"), [(1, TOKENS_PER_PASS), (2, 5), (5, TOKENS_PER_PASS), (20, 5)]
)
def test_rows_that_go_on_at_once_write_what_rows_that_wait_for_each_other_write(
    any_model: LanguageModel,
    together: list[Conversation],
    num_rows: int,
    tokens_per_pass: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where the prompts need several passes, and some are longer than a pass should be."""
    monkeypatch.setattr(engine_rows, "TOKENS_PER_PASS", tokens_per_pass)
    for row, expected in zip(
        play_without_waiting(any_model, range(12), num_rows=num_rows), together, strict=True
    ):
        assert row.token_ids == expected.token_ids
        np.testing.assert_allclose(row.logprobs, expected.logprobs, atol=1e-5)


def test_a_row_that_is_done_goes_on_while_others_still_write(llama: LanguageModel) -> None:
    engine = GenerationEngine(llama, num_rows=2, capacity=CAPACITY)
    engine.stop_rule.end_ids.clear()
    slow, fast = (engine.open_row(generator(index)) for index in range(2))
    engine.submit(slow, [9], max_new_tokens=20)
    for _ in range(3):
        engine.submit(fast, [9], max_new_tokens=2)
        finished = [row for _ in range(3) for row, _ in engine.step(temperature=1.0)]
        assert finished == [fast]
    assert slow.sampling and len(slow.sampling.token_ids) > 3


@pytest.mark.slow
@given(lengths=st.lists(st.integers(1, 6000), min_size=1, max_size=30))
def test_prompts_are_read_in_as_few_passes_as_their_order_allows(lengths: list[int]) -> None:
    rows = [Row(slot, np.random.default_rng(0), unread=[9] * n) for slot, n in enumerate(lengths)]
    groups = list(read_together(rows))
    assert [row for group in groups for row in group] == rows
    counts = [[len(row.unread) for row in group] for group in groups]
    assert all(sum(group) <= TOKENS_PER_PASS or len(group) == 1 for group in counts)
    for group, (first, *_) in itertools.pairwise(counts):
        assert sum(group) + first > TOKENS_PER_PASS


@given(lengths=st.lists(st.integers(1, 6000), min_size=1, max_size=300))
def test_padded_prompts_are_read_shortest_first(lengths: list[int]) -> None:
    rows = [Row(slot, np.random.default_rng(0), unread=[9] * n) for slot, n in enumerate(lengths)]
    groups = list(read_together(rows, padded=True))
    assert sorted(row.slot for group in groups for row in group) == list(range(len(rows)))
    counts = [[len(row.unread) for row in group] for group in groups]
    assert [n for group in counts for n in group] == sorted(lengths)
    for group in counts:
        assert len(group) * max(group) <= PADDED_TOKENS_PER_PASS or len(group) == 1


def stores(engine: GenerationEngine) -> list[torch.Tensor]:
    """The keys and the values of all layers."""
    found = [store for layer in engine.layers for store in (layer.keys, layer.values)]
    return [store for store in found if store is not None]


@pytest.fixture
def spare(monkeypatch: pytest.MonkeyPatch) -> list[SpareMemory]:
    """The spare memory of each engine, in the order in which they are made."""
    made: list[SpareMemory] = []

    def make(**options: int) -> SpareMemory:
        made.append(SpareMemory(**options))
        return made[-1]

    monkeypatch.setattr(generation, "SpareMemory", make)
    return made


def test_the_last_row_leaves_its_memory_to_the_next(
    llama: LanguageModel, spare: list[SpareMemory]
) -> None:
    engine = GenerationEngine(llama, num_rows=2, capacity=CAPACITY)

    def used_memory() -> set[int]:
        rows = [engine.open_row(generator(index)) for index in range(2)]
        respond(engine, rows, [[9] * 70, [9, 9]], max_new_tokens=3, temperature=1.0)
        found = {store.untyped_storage().data_ptr() for store in stores(engine)}
        engine.close_row(rows[0])
        assert len(stores(engine)) == 2 * len(engine.layers)
        engine.close_row(rows[1])
        assert not stores(engine)
        return found

    used = used_memory()
    assert used <= {storage.data_ptr() for storage in spare[0].free}
    assert used_memory() == used


@pytest.mark.parametrize(("limit", "num_returns"), [(2**28, 1), (0, 3)])
def test_memory_goes_back_to_the_system_unless_little_of_it_is_kept(
    llama: LanguageModel,
    spare: list[SpareMemory],
    monkeypatch: pytest.MonkeyPatch,
    limit: int,
    num_returns: int,
) -> None:
    returns: list[int] = []
    monkeypatch.setattr(ragged_cache, "MAX_SPARE_BYTES", limit)
    monkeypatch.setattr(
        generation, "return_freed_memory", lambda: returns.append(len(spare[0].free))
    )
    engine = GenerationEngine(llama, num_rows=2, capacity=CAPACITY)
    for _ in range(3):
        with engine.rollout():
            row = engine.open_row(generator(0))
            respond(engine, [row], [[9, 9]], max_new_tokens=3, temperature=1.0)
        assert bool(spare[0].free) == (limit > 0)
    assert returns == [0] * num_returns


@pytest.mark.slow
def test_a_cache_that_grows_to_its_capacity_takes_one_spare_piece_of_memory(
    llama: LanguageModel, spare: list[SpareMemory]
) -> None:
    engine = GenerationEngine(llama, num_rows=2, capacity=1000)
    row = engine.open_row(generator(0))
    lengths = []
    for _ in range(27):
        respond(engine, [row], [[9] * 34], max_new_tokens=3, temperature=1.0)
        lengths.append(stores(engine)[0].shape[2])
    assert row.length == 27 * 37 - 1
    assert len(set(lengths)) > 8
    assert lengths[-1] == 1024, "the capacity in whole steps of 64"
    assert len(spare[0].free) == 1


def test_in_mixed_precision_the_cache_holds_what_the_products_read(llama: LanguageModel) -> None:
    mixed = dataclasses.replace(llama, autocast=torch.bfloat16)
    engine = GenerationEngine(mixed, num_rows=1, capacity=CAPACITY)
    respond(engine, [engine.open_row(generator(0))], [[9, 8, 7]], max_new_tokens=2, temperature=1.0)
    for layer in engine.layers:
        assert layer.keys is not None and layer.values is not None
        assert layer.keys.dtype == layer.values.dtype == torch.bfloat16
    (row,) = play(mixed, [1])
    with torch.no_grad():
        whole = mixed.logits(mixed.hidden_states(torch.tensor([row.token_ids]))[0])
    expected = whole[torch.tensor(row.sampled_positions) - 1].log_softmax(-1)
    expected = expected.gather(1, torch.tensor(sampled_tokens(row))[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(row.logprobs), expected, atol=0.05, rtol=0)


class ConvertedWeights(TorchDispatchMode):
    """Notes which of a model's weights are converted to another format."""

    def __init__(self, model: LanguageModel) -> None:
        super().__init__()
        self._names = {weight.data_ptr(): name for name, weight in model.model.named_parameters()}
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._to_copy.default and args[0].data_ptr() in self._names:
            self.names.append(self._names[args[0].data_ptr()])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("trained", [True, False], ids=["trained", "frozen"])
def test_in_a_rollout_each_weight_is_converted_once(llama: LanguageModel, trained: bool) -> None:
    mixed = dataclasses.replace(
        llama, model=copy.deepcopy(llama.model).requires_grad_(trained), autocast=torch.bfloat16
    )
    engine = GenerationEngine(mixed, num_rows=1, capacity=CAPACITY)
    with ConvertedWeights(mixed) as converted, engine.rollout():
        respond(engine, [engine.open_row(generator(0))], [[9]], max_new_tokens=5, temperature=1.0)
    num_linear_layers = 7 * len(engine.layers)
    assert len(converted.names) == len(set(converted.names)) == num_linear_layers
    assert all(weight.requires_grad is trained for weight in mixed.model.parameters())
    assert all(weight.grad is None for weight in mixed.model.parameters())


def test_a_rollout_after_an_update_uses_the_new_weights(llama: LanguageModel) -> None:
    mixed = dataclasses.replace(llama, model=copy.deepcopy(llama.model), autocast=torch.bfloat16)
    old_engine = GenerationEngine(mixed, num_rows=1, capacity=CAPACITY)

    def written(engine: GenerationEngine) -> Response:
        with engine.rollout():
            row = engine.open_row(generator(0))
            (response,) = respond(engine, [row], [[9]], max_new_tokens=9, temperature=1.0)
        return response

    before = written(old_engine)
    with torch.no_grad():
        for weight in mixed.model.parameters():
            weight.mul_(1.5)
    assert written(old_engine) == written(GenerationEngine(mixed, num_rows=1, capacity=CAPACITY))
    assert written(old_engine) != before


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_are_an_error(llama: LanguageModel, temperature: float) -> None:
    diverged = dataclasses.replace(llama, model=copy.deepcopy(llama.model))
    diverged.model.get_input_embeddings().weight.data[9] = float("nan")
    engine = GenerationEngine(diverged, num_rows=1, capacity=CAPACITY)
    row = engine.open_row(generator(0))
    with pytest.raises(ModelError, match="logits are not finite"):
        respond(engine, [row], [[9]], max_new_tokens=2, temperature=temperature)


@pytest.mark.slow
def test_a_model_in_half_precision_errs_no_more_than_separate_passes_do(
    llama: LanguageModel,
) -> None:
    half = dataclasses.replace(llama, model=copy.deepcopy(llama.model).to(torch.bfloat16))
    errors: dict[str, list[torch.Tensor]] = {"engine": [], "separate": []}
    for row in play(half, range(20)):
        tokens = torch.tensor(sampled_tokens(row))[:, None]
        separate, exact = (
            logits_of(model, row).float().log_softmax(-1).gather(1, tokens)[:, 0]
            for model in (half, llama)
        )
        errors["separate"].append((separate - exact).abs())
        errors["engine"].append((torch.tensor(row.logprobs) - exact).abs())
    engine, separate = (torch.cat(found).mean() for found in errors.values())
    # One logit has a step of 0.06 in bfloat16, so a largest error says little; means do.
    assert engine < 1.25 * separate < 0.05


def test_few_finished_rows_are_computed_along(
    llama: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows_per_pass: list[int] = []
    hidden_states = llama.hidden_states

    def counted(token_ids_BT: torch.Tensor, **kwargs):
        rows_per_pass.append(len(token_ids_BT))
        return hidden_states(token_ids_BT, **kwargs)

    monkeypatch.setattr(llama, "hidden_states", counted)
    played = play(llama, range(30), num_turns=1)
    lengths = [len(row.responses[0].token_ids) for row in played]
    # Pass k computes the rows that sample a k-th token, and at most a third as many more.
    needed = [sum(n > k for n in lengths) for k in range(1, max(lengths))]
    assert rows_per_pass[0] == 1, "the prompts are slices of one long row"
    assert len(rows_per_pass) == 1 + len(needed)
    spare = [computed - n for computed, n in zip(rows_per_pass[1:], needed, strict=True)]
    assert all(0 <= s <= n / 3 for s, n in zip(spare, needed, strict=True))
    assert any(spare), "otherwise rows are moved whenever one ends"


def test_nothing_is_read_twice(llama: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    passes = tokens_of_passes(llama, monkeypatch)
    (row,) = play(llama, [3])
    assert [*itertools.chain(*passes)] == row.token_ids[:-1]


def test_what_prompts_have_in_common_is_read_once(
    any_model: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A system prompt of all rows, and below it a task of each group of eight."""
    engine = GenerationEngine(any_model, num_rows=33, capacity=CAPACITY)
    draws = np.random.default_rng(0)
    system, *tasks = (draws.integers(8, len(any_model.tokenizer), n).tolist() for n in [20] * 5)
    prompts = [[*system, *task] for task in tasks for _ in range(8)]
    rows = [engine.open_row(generator(index, "draws")) for index in range(33)]
    passes = tokens_of_passes(any_model, monkeypatch)
    responses = respond(engine, rows[:32], prompts, max_new_tokens=1, temperature=1.0)
    # The first task whole, beside it nothing; the other tasks; the last token of all the others.
    assert [len(read) for read in passes] == [40, 7 + 3 * 20, 3 * 7]
    for prompt, response in zip(prompts, responses, strict=True):
        check_logprobs(any_model, prompt, response)

    passes.clear()
    late = [*system, *tasks[2][:16], 9, 10]
    check_logprobs(any_model, late, engine_response(engine, rows[32], late, temperature=1.0))
    assert passes[0] == [9, 10]


def test_little_in_common_is_read_again(
    llama: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No pass is made for it, nothing is copied."""
    engine = GenerationEngine(llama, num_rows=20, capacity=CAPACITY)
    rows = [engine.open_row(generator(index, "draws")) for index in range(20)]
    passes = tokens_of_passes(llama, monkeypatch)
    respond(engine, rows[:9], [[*range(8, 38), 9]] * 9, max_new_tokens=1, temperature=1.0)
    assert [len(read) for read in passes] == [9 * 31], "eight rows save 240 tokens"
    passes.clear()
    respond(engine, rows[9:], [[*range(8, 23), 40]] * 11, max_new_tokens=1, temperature=1.0)
    assert [len(read) for read in passes] == [11 * 16], "15 tokens in common"


def tokens_of_passes(model: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The tokens of each forward pass from now on."""
    passes: list[list[int]] = []
    hidden_states = model.hidden_states

    def recorded(token_ids_BT: torch.Tensor, **kwargs):
        passes.append(token_ids_BT.flatten().tolist())
        return hidden_states(token_ids_BT, **kwargs)

    monkeypatch.setattr(model, "hidden_states", recorded)
    return passes


def check_logprobs(model: LanguageModel, prompt: list[int], response: Response) -> None:
    """Against a forward pass over the whole row."""
    row = Conversation(0, [prompt], [response])
    expected = torch.log_softmax(logits_of(model, row), dim=-1)
    expected = expected.gather(1, torch.tensor(sampled_tokens(row))[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(row.logprobs), expected, atol=1e-5, rtol=0)


def test_a_context_that_restarts_is_answered_like_a_new_one_and_reads_what_is_new(
    any_model: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside a row that goes on."""
    engine = GenerationEngine(any_model, num_rows=2, capacity=CAPACITY)
    rows = [engine.open_row(generator(name, "draws")) for name in range(2)]
    prompts = [[9, 10, 11, 12], [20, 21]]
    respond(engine, rows, prompts, max_new_tokens=6, temperature=1.0)
    restarted = [9, 10, 11, 30, 31]
    num_read = 0
    hidden_states = any_model.hidden_states

    def counted(token_ids_BT: torch.Tensor, **kwargs):
        nonlocal num_read
        num_read += int((token_ids_BT != any_model.pad_id).sum())
        return hidden_states(token_ids_BT, **kwargs)

    engine.submit(rows[1], [22, 23], max_new_tokens=1)
    engine.submit(rows[0], restarted, max_new_tokens=6, restarts=True)
    with monkeypatch.context() as patch:
        patch.setattr(any_model, "hidden_states", counted)
        responses = dict(engine.step(temperature=1.0))
    # The last response and two tokens of the row that goes on, and 30, 31 behind 9, 10, 11.
    assert num_read == 3 + 2
    while len(responses) < 2:
        responses.update(engine.step(temperature=1.0))
    check_logprobs(any_model, restarted, responses[rows[0]])


def test_a_context_that_restarts_as_it_was_is_read_from_its_last_token(
    llama: LanguageModel,
) -> None:
    engine = GenerationEngine(llama, num_rows=1, capacity=12)
    row = engine.open_row(generator(0, "draws"))
    first, again = (
        engine_response(engine, row, [9, 10, 11], restarts=restarts) for restarts in (False, True)
    )
    assert first.token_ids == again.token_ids
    with pytest.raises(ContextError, match="13 tokens does not fit the cache of 12"):
        engine.submit(row, [9] * 9, max_new_tokens=4, restarts=True)


def engine_response(
    engine: GenerationEngine,
    row: Row,
    prompt: list[int],
    *,
    restarts: bool = False,
    temperature: float = 0.0,
) -> Response:
    engine.submit(row, prompt, max_new_tokens=4, restarts=restarts)
    while not (finished := engine.step(temperature=temperature)):
        pass
    return finished[0][1]


def test_a_slot_that_was_freed_starts_empty(llama: LanguageModel) -> None:
    engine = GenerationEngine(llama, num_rows=2, capacity=CAPACITY)

    def fresh_response(name: int) -> Response:
        (row,) = conversations([name], len(llama.tokenizer))
        opened = engine.open_row(generator(name))
        prompt = row.prompts[0]
        (response,) = respond(engine, [opened], [prompt], max_new_tokens=6, temperature=1.0)
        engine.close_row(opened)
        return response

    fresh = fresh_response(1)
    fresh_response(2)
    assert fresh_response(1).token_ids == fresh.token_ids
    assert engine.num_free_rows == 2


def test_rows_of_a_call_may_be_any_of_the_open_ones(llama: LanguageModel) -> None:
    """Some rows rest for a turn, in another order than they were opened."""
    expected = {row.name: row for row in play(llama, range(4))}
    engine = GenerationEngine(llama, num_rows=4, capacity=CAPACITY)
    engine.stop_rule.end_ids |= set(range(0, len(llama.tokenizer), 3))
    played = conversations(range(4), len(llama.tokenizer))
    rows = [engine.open_row(generator(row.name, "draws")) for row in played]
    for name in (2, 0, 3, 3, 1, 0, 2, 1, 2, 0, 3, 1):
        row = played[name]
        prompt = row.prompts[len(row.responses)]
        (response,) = respond(
            engine, [rows[name]], [prompt], max_new_tokens=MAX_NEW_TOKENS, temperature=1.0
        )
        row.responses.append(response)
    for row in played:
        assert row.token_ids == expected[row.name].token_ids


def test_a_context_that_does_not_fit_is_refused_and_changes_nothing(llama: LanguageModel) -> None:
    engine = GenerationEngine(llama, num_rows=2, capacity=20)
    rows = [engine.open_row(generator(index)) for index in range(2)]
    # 12 prompt tokens and 8 sampled ones fill the cache of 20 exactly; one more does not fit.
    with pytest.raises(ContextError, match="21 tokens does not fit the cache of 20"):
        engine.submit(rows[1], [9] * 13, max_new_tokens=8)
    assert rows[1].unread == []
    responses = respond(engine, rows, [[9] * 3, [9] * 12], max_new_tokens=8, temperature=1.0)
    assert len(responses) == 2


def test_a_response_ends_at_the_token_limit(llama: LanguageModel, say: Callable) -> None:
    token_ids = llama.tokenizer.encode("<think>a</think><answer>buy 3</answer>")
    say(llama, token_ids)
    engine = GenerationEngine(llama, num_rows=1, capacity=64)
    row = engine.open_row(generator(0))
    (cut,) = respond(engine, [row], [[9]], max_new_tokens=3, temperature=1.0)
    assert cut.token_ids == tuple(token_ids[:3])
    assert not cut.stopped


def test_a_response_ends_after_the_closing_tag(llama: LanguageModel, say: Callable) -> None:
    token_ids = llama.tokenizer.encode("<think>a</think><answer>buy 3</answer>")
    say(llama, [*token_ids, 9, 9])
    engine = GenerationEngine(llama, num_rows=1, capacity=64)
    row = engine.open_row(generator(0))
    (response,) = respond(engine, [row], [[9]], max_new_tokens=30, temperature=1.0)
    assert response == Response(tuple(token_ids), (0.0,) * len(token_ids), stopped=True)


@pytest.fixture(scope="session")
def chat_model(llama: LanguageModel, chatml_tokenizer) -> LanguageModel:
    return LanguageModel(llama.model, chatml_tokenizer)


@pytest.mark.parametrize("ending", ["</answer>", "</answer>\n"])
def test_a_closing_tag_of_several_tokens_ends_a_response(
    chat_model: LanguageModel, say: Callable, ending: str
) -> None:
    token_ids = chat_model.tokenizer.encode(f"<think>a</think><answer>buy 3{ending}")
    tag_ids = chat_model.tokenizer.encode("</answer>")
    assert len(tag_ids) > 1
    say(chat_model, [*token_ids, 9, 9, 9])
    engine = GenerationEngine(chat_model, num_rows=1, capacity=64)
    row = engine.open_row(generator(0))
    (response,) = respond(engine, [row], [[9]], max_new_tokens=50, temperature=1.0)
    assert response.stopped
    closed = "<think>a</think><answer>buy 3</answer>"
    assert chat_model.tokenizer.decode(list(response.token_ids)).rstrip() == closed


def test_a_closing_tag_spelled_in_single_characters_is_recognised(chat_model) -> None:
    vocabulary = chat_model.tokenizer.get_vocab()
    spelled = [vocabulary[character] for character in "</answer>"]
    rule = StopRule(chat_model)
    assert [rule.is_over(spelled[: n + 1]) for n in range(9)] == [False] * 8 + [True]


def test_other_tags_do_not_end_a_response(chat_model: LanguageModel) -> None:
    rule = StopRule(chat_model)
    for text in ("<think>", "</think>", "<answer>", "a > b", "/answer>"):
        assert not rule.is_over(chat_model.tokenizer.encode(text)), text


def test_end_tokens_of_the_tokenizer_and_of_the_model_end_a_response(
    chat_model: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_model.model.generation_config, "eos_token_id", [40, 41])
    rule = StopRule(chat_model)
    end_id = chat_model.tokenizer.eos_token_id
    assert all(rule.is_over([50, token]) for token in (40, 41, end_id))
    assert not rule.is_over([40, 50])


def test_the_token_by_which_a_template_ends_a_turn_ends_a_response(
    llama: LanguageModel, chatml_tokenizer
) -> None:
    """Gemma's and Phi's is not the end token of the tokenizer."""
    model = LanguageModel(llama.model, with_template(chatml_tokenizer, GEMMA))
    end_of_turn = model.tokenizer.convert_tokens_to_ids("<end_of_turn>")
    assert model.tokenizer.eos_token == "<|im_end|>"
    assert set(model.end_ids) == {end_of_turn, model.tokenizer.eos_token_id}
    assert StopRule(model).is_over([50, end_of_turn])


PROBABILITIES = [0.5, 0.0, 0.25, 0.25, 0.0]


@pytest.mark.parametrize(
    ("uniform", "token"),
    [
        (0.0, 0),
        (0.5 - 1e-6, 0),
        (0.5 + 1e-6, 2),  # token 1 has probability 0: its interval is empty
        (0.75 + 1e-6, 3),
        (np.nextafter(1.0, 0.0), 3),  # never token 4
        (1.0, 3),  # outside of [0, 1), and still a token that is possible
    ],
)
def test_inverse_cdf_finds_the_interval_of_a_draw(uniform: float, token: int) -> None:
    logprobs = torch.tensor([PROBABILITIES]).log()
    assert inverse_cdf(logprobs, torch.tensor([uniform], dtype=torch.float64)).item() == token


def test_inverse_cdf_skips_leading_tokens_of_probability_zero() -> None:
    logprobs = torch.tensor([[0.0, 0.0, 1.0]]).log()
    assert inverse_cdf(logprobs, torch.zeros(1, dtype=torch.float64)).item() == 2


def test_evenly_spaced_draws_reproduce_the_distribution() -> None:
    num_draws = 20_000
    logprobs = torch.log_softmax(3 * torch.randn(1, 40, generator=torch.manual_seed(0)), dim=-1)
    uniform = (torch.arange(num_draws, dtype=torch.float64) + 0.5) / num_draws
    tokens = inverse_cdf(logprobs.expand(num_draws, -1), uniform)
    shares = torch.bincount(tokens, minlength=40) / num_draws
    # An interval of length p holds p N evenly spaced draws, give or take one.
    assert (shares - logprobs.exp()[0]).abs().max() < 1.5 / num_draws


@pytest.mark.slow
@given(
    logits=st.lists(st.floats(-50, 50, width=32), min_size=1, max_size=30),
    uniform=st.floats(0, 1, exclude_max=True),
)
def test_no_draw_selects_an_impossible_token(logits: list[float], uniform: float) -> None:
    logprobs = torch.log_softmax(torch.tensor([logits]), dim=-1)
    token = inverse_cdf(logprobs, torch.tensor([uniform], dtype=torch.float64)).item()
    assert logprobs[0, int(token)].double().exp() > 0
