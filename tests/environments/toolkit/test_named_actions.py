import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragen_apo.environments.toolkit.named_actions import ParsedActions, join_actions, parse_actions
from ragen_apo.environments.toolkit.task_draws import Description, draw_tasks, split_of
from ragen_apo.errors import ConfigError

NAMES = ("Up", "Down")


@pytest.mark.parametrize(
    ("text", "names", "has_invalid", "has_too_many"),
    [
        ("Up", ("Up",), False, False),
        (" up||DOWN || Up ", ("Up", "Down", "Up"), False, False),
        ("Up ||", ("Up",), False, False),
        ("Up || Up || Up || Down", ("Up", "Up", "Up"), False, True),
        ("Up || jump || Down", ("Up", "Down"), True, False),
        ("jump || Up || Up || Up", ("Up", "Up", "Up"), True, False),
        ("Up, Down", (), True, False),
        ("", (), True, False),
        ("|| ||", (), True, False),
        ("Up | Down", (), True, False),
    ],
)
def test_actions_are_read_part_by_part(
    text: str, names: tuple[str, ...], has_invalid: bool, has_too_many: bool
) -> None:
    expected = ParsedActions(names, has_invalid, has_too_many)
    assert parse_actions(text, names=NAMES, limit=3) == expected


@pytest.mark.slow
@given(st.lists(st.sampled_from(NAMES), min_size=1, max_size=9))
def test_reading_is_the_inverse_of_joining(names: list[str]) -> None:
    parsed = parse_actions(join_actions(names), names=NAMES, limit=9)
    assert parsed == ParsedActions(tuple(names), False, False)


def draw_number(generator: np.random.Generator) -> int | None:
    number = int(generator.integers(1000))
    return None if number % 7 == 0 else number


def drawn(num_train: int, num_test: int) -> dict[str, list[int]]:
    tasks = draw_tasks(
        "numbers",
        draw_number,
        (),
        content=str,
        describe=lambda number: Description("", "", {"number": number}),
        counts=(num_train, num_test, 0),
    )
    return {split: [task.payload["number"] for task in drawn] for split, drawn in tasks.items()}


def test_draws_go_to_the_split_of_their_content_and_smaller_splits_begin_larger_ones() -> None:
    small, large = drawn(20, 10), drawn(100, 40)
    for split, numbers in large.items():
        assert numbers[: len(small[split])] == small[split]
        assert all(split_of("numbers", str(number)) == split for number in numbers)
        assert len(set(numbers)) == len(numbers)
        assert not any(number % 7 == 0 for number in numbers)
    assert (len(large["train"]), len(large["test"])) == (100, 40)


def test_about_a_fifth_of_all_contents_is_for_testing() -> None:
    shares = [split_of("numbers", str(number)) == "test" for number in range(5000)]
    assert sum(shares) / 5000 == pytest.approx(0.2, abs=0.017)  # three standard deviations


def test_the_last_draw_may_complete_the_splits() -> None:
    """2,400 are made for one task of each split."""
    train = next(n for n in range(1000) if split_of("late", str(n)) == "train")
    test = next(n for n in range(1000) if split_of("late", str(n)) == "test")
    numbers = iter([train] * 2399 + [test])
    tasks = draw_tasks(
        "late",
        lambda _: next(numbers),
        (),
        content=str,
        describe=lambda number: Description("", "", {"number": number}),
        counts=(1, 1, 0),
    )
    assert [tasks[split][0].payload["number"] for split in ("train", "test")] == [train, test]


@pytest.mark.slow
def test_too_few_different_draws_are_an_error_with_what_was_found() -> None:
    with pytest.raises(ConfigError, match=r"gave only \d+ for train, 1\d\d for test.*fewer tasks"):
        drawn(10, 400)
