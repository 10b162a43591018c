"""Which tokens of a demonstration are exchanged at random before a model imitates it."""

import pytest

from ragen_apo.choices import Relabel
from ragen_apo.policy.language_model import LanguageModel
from ragen_apo.types import TrainingSample
from ragen_apo.warm_start.batches import number_token_ids, renamed_token_ids


def sample(read: list[int], said: list[int]) -> TrainingSample:
    mask = (False,) * len(read) + (True,) * len(said)
    return TrainingSample((*read, *said), mask, (0.0,) * len(mask))


SAMPLES = [
    sample([20, 30, 40], [50, 30]),
    sample([20, 31, 40], [50, 31]),
    sample([20, 32, 40], [50, 32]),
    sample([20, 33], [50, 33]),
]
"""Four pages: 20 is on all and 40 on three of them; 50 is said unread; 30 to 33 are copied."""


@pytest.mark.parametrize(("spares", "kept"), [(0.75, {20, 40, 50}), (1.0, {20, 50})])
def test_what_enough_demonstrations_have_and_what_is_said_unread_keeps_its_meaning(
    spares: float, kept: set[int], tiny_model: LanguageModel
) -> None:
    renamed = renamed_token_ids(tiny_model, SAMPLES, relabel="copied", spares=spares)
    used = {token for each in SAMPLES for token in each.token_ids}
    assert used - set(renamed) == kept


@pytest.mark.parametrize("relabel", ["none", "numbers"])
def test_without_copied_the_demonstrations_do_not_decide(
    relabel: Relabel, tiny_model: LanguageModel
) -> None:
    expected = number_token_ids(tiny_model) if relabel == "numbers" else []
    assert renamed_token_ids(tiny_model, SAMPLES, relabel=relabel, spares=0.5) == expected
