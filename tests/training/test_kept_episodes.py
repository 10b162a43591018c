"""The episodes of a step that are kept for people."""

import json

import pytest

from ragen_apo.session import Session
from ragen_apo.training.kept_episodes import NUM_DIGITS, chosen
from tests import factories


@pytest.mark.parametrize(
    ("returns", "num_episodes", "expected"),
    [
        ([0.0, 1.0, -1.0, 0.5], 4, [0, 1, 2, 3]),
        ([0.0, 0.5, -1.0, 1.0, 0.2], 3, [0, 2, 3]),
        ([0.0, 0.5, -1.0, 1.0, 0.2], 1, [3]),
        ([1.0, 1.0, 1.0], 2, [0, 1]),
        ([1.0, 0.0], 0, []),
    ],
)
def test_the_best_the_worst_and_the_first_are_chosen(
    returns: list[float], num_episodes: int, expected: list[int]
) -> None:
    assert chosen(returns, num_episodes=num_episodes) == expected


@pytest.mark.slow
def test_a_step_keeps_tokens_log_probabilities_and_values(session: Session) -> None:
    trainer = factories.trainer_of(session, "apo_turn", "--algorithm.min_visits=1")
    seen = factories.step_without_update(trainer, returns=[0.0, 3.0, -2.0, 1.0])
    kept = json.loads(json.dumps(seen.result.kept_episodes))
    assert [row["episode"] for row in kept] == [0, 1, 2, 3]
    assert {row["step"] for row in kept} == {1}
    for row, played in zip(kept, seen.trajectories, strict=True):
        assert row["task"]["task_id"] == played.task.task_id
        assert row["return"] == played.episode_return
        assert row["turns"][0]["v_star"] == trainer.values.tasks[played.task.task_id]
        for number, (shown, turn) in enumerate(zip(row["turns"], played.turns, strict=True)):
            assert shown["token_ids"] == list(turn.response_token_ids)
            assert shown["logprobs"] == [round(each, NUM_DIGITS) for each in turn.logprobs]
            if number > 0:
                assert shown["v_star"] == trainer.values.states.get(turn.state_key)


@pytest.mark.slow
def test_the_kept_log_probabilities_of_the_reference_are_its_own(session: Session) -> None:
    trainer = factories.trainer_of(session, "apo")
    seen = factories.step_without_update(trainer)
    for row, played in zip(seen.result.kept_episodes, seen.trajectories, strict=True):
        kept = [value for turn in row["turns"] for value in turn["reference_logprobs"]]
        expected = factories.sampled_logprobs(trainer.reference, played).tolist()
        assert kept == pytest.approx(expected, abs=1e-3)


@pytest.mark.slow
def test_an_episode_that_no_update_sees_has_no_log_probabilities_of_the_reference(
    session: Session,
) -> None:
    """All returns of a group are equal: GRPO drops it."""
    trainer = factories.trainer_of(
        session, "grpo", "--rollout_filter.strategy=top_p", "--training.keep_episodes=12"
    )
    with factories.paying(trainer, [0.0, 0.0, 0.0] + 3 * [0.0, 0.5, 1.0]):
        kept = trainer.step(0).kept_episodes
    assert all(turn["v_star"] is None for row in kept for turn in row["turns"])
    scored = [all(turn["reference_logprobs"] for turn in row["turns"]) for row in kept]
    assert scored == 3 * [False] + 9 * [True]


@pytest.mark.slow
def test_none_is_kept_where_none_is_asked_for(session: Session) -> None:
    trainer = factories.trainer_of(session, "apo", "--training.keep_episodes=0")
    assert trainer.step(0).kept_episodes == []
