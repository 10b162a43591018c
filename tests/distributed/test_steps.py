"""Steps of the trainer by several ranks against the same steps by one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from ragen_apo.policy import language_model
from tests.distributed.processes import answers, in_ranks
from tests.distributed.steps import Seen, assert_same_steps, steps

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("algorithm", "sharding", "others"),
    [
        *((name, "none", ()) for name in ("apo", "apo_turn", "ppo", "grpo")),
        # What is in shares is the policy and the reference, and the critic; losses see neither.
        ("apo_turn", "full", ("--values.estimator=regression",)),
        ("ppo", "full", ()),
    ],
)
@pytest.mark.usefixtures("few_random_features")
def test_two_ranks_make_the_steps_of_one_process(
    algorithm: str,
    sharding: str,
    others: tuple[str, ...],
    finished_run: Path,
    by_one_process: Callable[..., Seen],
) -> None:
    options = (finished_run, algorithm, 4, "float64")
    one = by_one_process(steps, *options, "none", *others)
    first, second = answers(in_ranks(2, steps, *options, sharding, *others))
    assert_same_steps(first, one)
    for name, tensor in first.state.items():
        assert np.array_equal(second.state[name], tensor), "ranks must not drift apart"
    assert second.metrics == first.metrics
    assert second.tokens == first.tokens


@pytest.mark.parametrize(("algorithm", "sharding"), [("apo", "full"), ("oapl", "none")])
def test_so_do_more_ranks_than_some_have_work_for(
    algorithm: str, sharding: str, finished_run: Path, by_one_process: Callable[..., Seen]
) -> None:
    num_tasks = 2 if algorithm == "apo" else 1  # a group of three
    options = (finished_run, algorithm, num_tasks, "float64")
    one = by_one_process(steps, *options)
    for seen in answers(in_ranks(4, steps, *options, sharding)):
        assert_same_steps(seen, one)


def test_so_do_ranks_with_shares_that_read_logits_in_pieces(
    finished_run: Path,
    by_one_process: Callable[..., Seen],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Projections of a vocabulary whose weights are in shares are computed again as well."""
    options = (finished_run, "ppo", 4, "float64")
    one = by_one_process(steps, *options)
    monkeypatch.setattr(language_model, "MAX_LOGITS", 7 * 512)
    for seen in answers(in_ranks(2, steps, *options, "full")):
        assert_same_steps(seen, one)
