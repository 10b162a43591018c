"""Which tokens of a demonstration are exchanged at random before a model imitates it."""

import copy
import dataclasses

import pytest

from ragen_apo.choices import Relabel
from ragen_apo.policy.language_model import LanguageModel
from ragen_apo.policy.tokenizer import SPECIAL_TOKENS, TAGS
from ragen_apo.types import TrainingSample
from ragen_apo.warm_start.batches import (
    copyable_token_ids,
    number_token_ids,
    phrase_token_ids,
    relabel,
    renamed_token_ids,
)


def sample(read: list[int], said: list[int]) -> TrainingSample:
    mask = (False,) * len(read) + (True,) * len(said)
    return TrainingSample((*read, *said), mask, (0.0,) * len(mask))


SAMPLES = [
    [sample([20, 30, 40], [50, 30])],
    [sample([20, 31, 40], [50, 31])],
    [sample([20, 32, 40], [50, 32])],
    [sample([20, 33], [50, 33])],
]
"""Four pages, each the only context of its episode: 20 is on all and 40 on three of them; 50 is
said unread; 30 to 33 are copied."""


@pytest.mark.parametrize(("spares", "kept"), [(0.75, {20, 40, 50}), (1.0, {20, 50})])
def test_what_enough_demonstrations_have_and_what_is_said_unread_keeps_its_meaning(
    spares: float, kept: set[int], tiny_model: LanguageModel
) -> None:
    renamed = renamed_token_ids(tiny_model, SAMPLES, relabel="copied", spares=spares)
    used = {token for (each,) in SAMPLES for token in each.token_ids}
    assert used - set(renamed) == kept


@pytest.mark.parametrize("kind", ["none", "numbers"])
def test_without_copied_the_demonstrations_do_not_decide(
    kind: Relabel, tiny_model: LanguageModel
) -> None:
    expected = number_token_ids(tiny_model) if kind == "numbers" else []
    assert renamed_token_ids(tiny_model, SAMPLES, relabel=kind, spares=0.5) == expected


def test_a_demonstration_in_several_contexts_is_one() -> None:
    """PRICE is on the last page of each demonstration, so in a half of the contexts."""
    price, names = 60, [30, 31, 32, 33, 34]
    windows = [
        [sample([20, name], [50, name]), sample([20, name, price], [51, name])] for name in names
    ]
    phrases = phrase_token_ids(windows, share=0.95)
    assert phrases == {20, price, 50, 51}
    for seed in range(5):
        for before, after in zip(
            windows, relabel(windows, token_ids=names, seed=seed, step=0), strict=True
        ):
            renamed = {new.token_ids[1] for new in after}
            assert len(renamed) == 1 and renamed <= set(names)
            assert [len(new.token_ids) for new in after] == [len(old.token_ids) for old in before]
    shared = relabel(windows * 40, token_ids=names, share=0.5, seed=0, step=0)
    for before, after in zip(windows * 40, shared, strict=True):
        assert len({new == old for old, new in zip(before, after, strict=True)}) == 1


def test_no_name_becomes_a_token_of_the_chat_template(tiny_model: LanguageModel) -> None:
    tokenizer = copy.deepcopy(tiny_model.tokenizer)
    tokenizer.add_special_tokens({"additional_special_tokens": ["said"]})
    with_added = dataclasses.replace(tiny_model, tokenizer=tokenizer)
    special = {tokenizer.convert_tokens_to_ids(token) for token in (*SPECIAL_TOKENS, "said")}
    tags = {tokenizer.convert_tokens_to_ids(token) for token in TAGS}
    copyable = set(copyable_token_ids(with_added))
    assert copyable == set(range(tiny_model.vocabulary_size)) - special
    assert tags < copyable
