"""What Stage 1's samples say of moves, against hand-made sums."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragen_apo.types import Trajectory, TurnFlag
from ragen_apo.values.estimator import soft_value
from ragen_apo.values.moves import Move, move_advantages
from tests import factories

BETA = 0.5


def episode(*turns: tuple[str | None, str, float]) -> Trajectory:
    """An episode from (state key, action, reward) triples."""
    return factories.episode(
        *(
            factories.turn(reward, state_key=state_key, action=action)
            for state_key, action, reward in turns
        )
    )


def test_a_move_gains_its_reward_and_the_value_it_leads_to_over_that_of_its_state() -> None:
    advantages = move_advantages(
        [
            episode(("start", "left", 0.1), ("lake", "jump", -1.0)),
            episode(("start", "right", 0.0), ("road", "go", 1.0)),
            episode(("start", "right", 0.0), ("road", "wait", 0.0)),
        ],
        beta=BETA,
    )
    start = soft_value([-0.9, 1.0, 0.0], beta=BETA)
    road = soft_value([1.0, 0.0], beta=BETA)
    assert advantages == pytest.approx(
        {
            Move("start", "left", True): 0.1 + -1.0 - start,
            Move("start", "right", True): 0.0 + road - start,
            Move("lake", "jump", True): 0.0,  # the only sample is the value of its state
            Move("road", "go", True): 1.0 - road,
            Move("road", "wait", True): 0.0 - road,
        }
    )


def test_an_unreadable_response_is_another_move_than_an_empty_action() -> None:
    unreadable = factories.turn(
        -0.5, state_key="start", action="", flags=(TurnFlag.FORMAT_ERROR.value,)
    )
    advantages = move_advantages(
        [factories.episode(unreadable), episode(("start", "", 0.0))], beta=BETA
    )
    assert advantages[Move("start", "", False)] < advantages[Move("start", "", True)]


def test_turns_without_a_state_are_no_moves() -> None:
    assert move_advantages([episode((None, "left", 1.0))], beta=BETA) == {}


def test_what_leads_to_a_turn_without_a_state_has_no_known_gain() -> None:
    found = move_advantages(
        [episode(("a", "left", 0.0), (None, "on", 0.0), ("b", "go", 1.0))], beta=BETA
    )
    assert found == {Move("b", "go", True): pytest.approx(0.0)}


@pytest.mark.slow
@given(
    st.lists(
        st.lists(st.sampled_from(["left", "right"]), min_size=3, max_size=3), min_size=1, max_size=6
    )
)
def test_along_an_episode_the_advantages_add_up_to_return_less_the_first_value(
    action_lists: list[list[str]],
) -> None:
    """Where a state is what was done so far, and rewards follow from it."""

    def walk(actions: list[str]) -> Trajectory:
        states = ["/".join(actions[:index]) for index in range(len(actions))]
        pairs = zip(states, actions, strict=True)
        rewards = [len(state) / 7 + (action == "left") for state, action in pairs]
        return episode(*zip(states, actions, rewards, strict=True))

    walks = [walk(actions) for actions in action_lists]
    advantages = move_advantages(walks, beta=BETA)
    start = soft_value([each.episode_return for each in walks], beta=BETA)
    for each in walks:
        total = sum(advantages[Move(t.state_key or "", t.action, True)] for t in each.turns)
        assert total == pytest.approx(each.episode_return - start)
