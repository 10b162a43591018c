import pytest

from ragen_apo.types import Trajectory
from ragen_apo.values.estimator import soft_value
from ragen_apo.values.state_values import segments, state_coverage, state_values
from tests import factories


def episode(*turns: tuple[str | None, float]) -> Trajectory:
    """An episode from (state key, reward) pairs."""
    return factories.episode(
        *(factories.turn(reward, state_key=state_key) for state_key, reward in turns)
    )


EPISODES = [
    episode(("start", 0.1), ("found", 1.0)),
    episode(("start", 0.1), ("found", -0.1)),
    episode(("start", 0.0), ("lost", 0.0), ("found", 1.0)),
    episode(("start", 0.0), ("lost", 0.0)),
]


def test_a_state_has_the_soft_value_of_the_returns_to_go_of_all_that_visit_it() -> None:
    values = state_values(EPISODES, beta=0.5, min_visits=1)
    assert values == pytest.approx(
        {
            "start": soft_value([1.1, 0.0, 1.0, 0.0], beta=0.5),
            "found": soft_value([1.0, -0.1, 1.0], beta=0.5),
            "lost": soft_value([1.0, 0.0], beta=0.5),
        }
    )


def test_a_state_with_too_few_visits_has_no_value() -> None:
    assert set(state_values(EPISODES, beta=0.5, min_visits=3)) == {"start", "found"}
    with pytest.raises(ValueError, match="min_visits must be at least 1"):
        state_values(EPISODES, beta=0.5, min_visits=0)


def test_a_state_that_an_episode_comes_back_to_counts_once_from_the_first_visit() -> None:
    loop = episode(("start", 0.1), ("start", 0.2), (None, 0.4))
    assert state_values([loop], beta=0.0, min_visits=1) == pytest.approx({"start": 0.7})


def test_coverage_counts_states_and_the_later_turns_that_others_make_known() -> None:
    coverage = state_coverage(EPISODES, min_visits=2)
    # Visits: start 4, found 3, lost 2.
    assert (coverage["num_states"], coverage["num_known_states"]) == (3, 3)
    # Later turns: three found, two lost. Without its own visit a turn in lost finds only one other.
    assert coverage["share_turns_known"] == pytest.approx(3 / 5)
    assert state_coverage(EPISODES, min_visits=1)["share_turns_known"] == 1.0
    assert state_coverage(EPISODES, min_visits=3)["share_turns_known"] == 0.0


def test_a_later_turn_without_a_key_is_unknown_and_without_later_turns_nothing_is_said() -> None:
    loop = [episode(("start", 0.0), (None, 0.0), ("start", 0.0))] * 2
    assert state_coverage(loop, min_visits=1)["share_turns_known"] == pytest.approx(0.5)
    assert state_coverage([episode(("start", 1.0))], min_visits=1)["share_turns_known"] is None


def test_segments_end_at_known_states_and_telescope() -> None:
    trajectory = episode(("start", 0.1), ("unknown", 0.2), ("found", 0.3), (None, 0.4))
    cut = segments(trajectory, task_value=0.5, values={"found": 0.9, "start": 7.0})
    assert [(s.first_turn, s.num_turns, s.value) for s in cut] == [(0, 2, 0.5), (2, 2, 0.9)]
    assert [s.reward for s in cut] == pytest.approx([0.3, 0.7])
    next_values = [s.value for s in cut[1:]] + [0.0]
    residuals = [s.reward + n - s.value for s, n in zip(cut, next_values, strict=True)]
    assert sum(residuals) == pytest.approx(trajectory.episode_return - 0.5)


def test_without_a_known_state_the_episode_is_one_segment() -> None:
    (only,) = segments(EPISODES[2], task_value=0.5, values={})
    assert (only.first_turn, only.num_turns, only.reward) == (0, 3, pytest.approx(1.0))
