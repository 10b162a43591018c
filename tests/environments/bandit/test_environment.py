import pytest

from ragen_apo.environments.bandit.two_armed import RISKY_NAMES, SAFE_NAMES
from ragen_apo.environments.base import make_environment
from ragen_apo.errors import ConfigError
from ragen_apo.types import Task, make_task


def two_armed_task() -> Task:
    return make_task(
        environment="bandit",
        instruction="Choose an arm.",
        split="train",
        category="two_armed",
        payload={"arms": ["Anchor", "Rocket"], "risky": "Rocket"},
    )


def bernoulli_task(**win_shares: float) -> Task:
    return make_task(
        environment="bandit",
        instruction="Find the arm that wins most often.",
        split="train",
        category="bernoulli",
        payload={"win_shares": win_shares},
    )


def test_the_safe_arm_pays_for_certain_and_is_no_success() -> None:
    environment = make_environment("bandit", {})
    first, _ = environment.reset(two_armed_task(), seed=0)
    assert first == "TASK: Choose an arm.\nArms: Anchor and Rocket."
    step = environment.step("anchor")
    assert step == ("Anchor pays 0.1.", 0.1, True, False, {"success": False})


def test_the_risky_arm_pays_as_often_as_the_options_say_and_is_the_success() -> None:
    environment = make_environment("bandit", {})
    earned = []
    for seed in range(4000):
        environment.reset(two_armed_task(), seed=seed)
        _, reward, terminated, _, info = environment.step("Rocket")
        assert terminated
        assert info["success"]
        earned.append(reward)
    assert set(earned) == {0.0, 1.0}
    # Three standard deviations of a share of 0.25 in 4000 draws: 3 * sqrt(0.25 * 0.75 / 4000).
    assert sum(earned) / 4000 == pytest.approx(0.25, abs=0.021)


def test_which_arm_is_the_success_follows_from_what_the_arms_pay() -> None:
    environment = make_environment("bandit", {"reward": {"safe": 0.5}})
    environment.reset(two_armed_task(), seed=0)
    assert environment.step("Anchor")[4]["success"]  # 0.5 > 0.25 * 1


def test_the_names_of_train_and_test_have_nothing_in_common() -> None:
    names = [*SAFE_NAMES["train"], *SAFE_NAMES["test"], *RISKY_NAMES["train"], *RISKY_NAMES["test"]]
    assert len(set(names)) == len(names)
    environment = make_environment("bandit", {"num_train_tasks": 288, "num_test_tasks": 72})
    for split in ("train", "test"):
        for task in environment.tasks(split):
            assert set(task.payload["arms"]) <= {*SAFE_NAMES[split], *RISKY_NAMES[split]}
            assert task.payload["risky"] in RISKY_NAMES[split]


def test_a_bernoulli_episode_has_its_number_of_pulls_and_says_what_they_paid() -> None:
    options = {"kind": "bernoulli", "num_pulls": 3, "max_actions_per_turn": 2}
    environment = make_environment("bandit", options)
    task = bernoulli_task(Red=1.0, Blue=0.0)
    first, _ = environment.reset(task, seed=0)
    assert first.endswith("Arms: Red, Blue. Pulls left: 3.")
    observation, reward, terminated, _, _ = environment.step("Red || Blue || Red")
    assert observation == (
        "Only the first 2 actions were carried out.\nRed wins. Blue loses. Pulls left: 1."
    )
    assert (reward, terminated) == (1.0, False)
    observation, reward, terminated, truncated, info = environment.step("Red || Red")
    assert observation == "Red wins. Pulls left: 0."
    assert (reward, terminated, truncated, info) == (1.0, True, False, {"success": True})


def test_more_pulls_than_the_turns_allow_are_refused() -> None:
    options = {"kind": "bernoulli", "num_pulls": 30, "max_turns": 15}
    with pytest.raises(ConfigError, match=r"num_pulls 30, of which its turns allow 15; lower"):
        make_environment("bandit", options)
    make_environment("bandit", {**options, "max_actions_per_turn": 2})


def test_success_is_the_best_arm_in_more_than_half_of_the_pulls_whatever_they_paid() -> None:
    environment = make_environment("bandit", {"kind": "bernoulli", "num_pulls": 2})
    environment.reset(bernoulli_task(Red=0.2, Blue=0.0), seed=0)
    environment.step("Red")
    assert environment.step("Blue")[4] == {"success": False}  # half is not more than half


def test_the_best_arm_stands_out_by_the_gap() -> None:
    environment = make_environment("bandit", {"kind": "bernoulli", "num_arms": 4, "min_gap": 0.3})
    for task in environment.tasks("train"):
        best, second = sorted(task.payload["win_shares"].values(), reverse=True)[:2]
        assert best - second >= 0.3 - 1e-9


def test_an_option_of_the_other_kind_is_an_error_and_so_is_an_unknown_kind() -> None:
    with pytest.raises(ConfigError, match=r"environment.num_arms: unknown key"):
        make_environment("bandit", {"num_arms": 3})
    with pytest.raises(ConfigError, match=r"environment.kind: got 'gauss'"):
        make_environment("bandit", {"kind": "gauss"})


def test_a_task_of_the_other_kind_is_refused() -> None:
    with pytest.raises(ConfigError, match="cannot set up task"):
        make_environment("bandit", {}).reset(bernoulli_task(Red=0.5, Blue=0.1), seed=0)
    with pytest.raises(ConfigError, match="cannot set up task"):
        make_environment("bandit", {"kind": "bernoulli"}).reset(two_armed_task(), seed=0)
