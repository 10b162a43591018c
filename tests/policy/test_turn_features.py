"""The hidden states of each turn, in samples of any shape."""

import torch

from ragen_apo.policy.language_model import LanguageModel
from ragen_apo.policy.turn_features import at_turns, move_reader, state_reader, turn_features
from ragen_apo.stages.value_regression import features_of_turns
from ragen_apo.types import TrainingSample

# Read and sampled tokens, by turn.
SAMPLES = [
    [([5, 6, 7], [8, 9]), ([10], [11]), ([12, 13], [14, 15, 16])],
    [([6, 6], [7])],
    [([9, 8, 7, 6, 5], [4, 4]), ([20, 21], [22])],
]


def batch(samples: list) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and targets, padded on the right."""
    longest = max(sum(len(read) + len(said) for read, said in turns) for turns in samples) + 3
    tokens, targets = (torch.zeros(len(samples), longest, dtype=torch.int64) for _ in range(2))
    for row, turns in enumerate(samples):
        position = 0
        for read, said in turns:
            length = len(read) + len(said)
            tokens[row, position : position + length] = torch.tensor([*read, *said])
            targets[row, position + len(read) : position + length] = 1
            position += length
    return tokens, targets.bool()


def test_of_each_turn_the_state_that_answers_and_the_mean_of_what_is_new(
    tiny_model: LanguageModel,
) -> None:
    """Written down turn by turn, each sample by itself and without padding."""
    expected = []
    for turns in SAMPLES:
        row = torch.tensor([[token for read, said in turns for token in (*read, *said)]])
        with torch.no_grad():
            hidden = tiny_model.hidden_states(row)[0]
        start = position = 0
        for read, said in turns:
            answers = position + len(read)
            expected.append(torch.cat([hidden[answers - 1], hidden[start:answers].mean(0)]))
            start, position = answers, answers + len(said)
    features = turn_features(tiny_model, *batch(SAMPLES), state_reader)
    assert features.shape == (6, 2 * tiny_model.config.hidden_size)
    assert not features.requires_grad
    assert torch.allclose(features, torch.stack(expected), atol=1e-5)


def test_of_each_move_the_states_around_it_and_its_mean(tiny_model: LanguageModel) -> None:
    expected = []
    for turns in SAMPLES:
        row = torch.tensor([[token for read, said in turns for token in (*read, *said)]])
        with torch.no_grad():
            hidden = tiny_model.hidden_states(row)[0]
        position = 0
        for read, said in turns:
            first, position = position + len(read), position + len(read) + len(said)
            parts = [hidden[first - 1], hidden[position - 1], hidden[first:position].mean(0)]
            expected.append(torch.cat(parts))
    features = turn_features(tiny_model, *batch(SAMPLES), move_reader)
    assert features.shape == (6, 3 * tiny_model.config.hidden_size)
    assert torch.allclose(features, torch.stack(expected), atol=1e-5)


def test_a_number_of_each_turn_is_that_of_its_tokens() -> None:
    _, targets = batch(SAMPLES)
    values = torch.arange(1.0, 7.0)
    spread = at_turns(values, targets)
    assert spread[targets].tolist() == [1, 1, 2, 3, 3, 3, 4, 5, 5, 6]
    assert (spread[~targets] == 0).all()


def test_the_contexts_of_a_long_episode_are_read_a_few_at_a_time(tiny_model: LanguageModel) -> None:
    """With a window an episode has one for each turn: memory would grow with their number."""
    samples = [
        TrainingSample(tuple(row.tolist()), tuple(targets.tolist()), (0.0,) * len(row))
        for row, targets in zip(*batch(SAMPLES), strict=True)
    ]
    sizes: list[int] = []
    hook = tiny_model.model.get_input_embeddings().register_forward_hook(
        lambda _, given, __: sizes.append(len(given[0]))
    )
    few, whole = (
        features_of_turns(tiny_model, [samples], state_reader, micro_batch_size=size)[0]
        for size in (2, 16)
    )
    hook.remove()
    assert sizes == [2, 1, 3]
    assert torch.allclose(few, whole, atol=1e-5)
