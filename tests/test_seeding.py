"""Seeds are functions of their parts, the same in every process."""

import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragen_apo.seeding import derive_seed, generator
from tests.sweeps import quick_first

parts = st.lists(
    st.integers() | st.text(alphabet=st.characters(codec="utf-8", exclude_characters="\x1f"))
)


@pytest.mark.parametrize("hash_seed", quick_first(["0", "1", "random"]))
def test_another_process_with_another_hash_seed_derives_the_same(hash_seed: str) -> None:
    program = (
        "from ragen_apo.seeding import derive_seed, generator\n"
        "print(derive_seed(0, 'task-order', 3), generator(7, 'x').integers(2**62))"
    )
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    output = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    ).stdout
    assert output.split() == [
        str(derive_seed(0, "task-order", 3)),
        str(generator(7, "x").integers(2**62)),
    ]


def test_a_seed_stays_what_it_was_in_earlier_versions() -> None:
    # blake2b-64("int:0\x1fstr:task-order\x1fint:3"), big-endian, without its lowest bit
    assert derive_seed(0, "task-order", 3) == 1161358487016321422


@given(parts)
def test_a_seed_has_63_bits(values: list[int | str]) -> None:
    assert 0 <= derive_seed(*values) < 2**63


@given(parts, parts)
def test_different_parts_give_different_seeds(
    left: list[int | str], right: list[int | str]
) -> None:
    assert (derive_seed(*left) == derive_seed(*right)) == (left == right)


def test_a_number_and_its_text_are_different_parts() -> None:
    assert derive_seed(1) != derive_seed("1")
    assert derive_seed("a", "b") != derive_seed("ab")
    assert derive_seed(1, 23) != derive_seed(12, 3)


def test_equal_parts_give_equal_draws_and_other_parts_independent_ones() -> None:
    draws = generator(0, "sampling", 1).random(20_000)
    assert np.array_equal(draws, generator(0, "sampling", 1).random(20_000))
    other = generator(0, "sampling", 2).random(20_000)
    # standard deviation of the correlation of independent pairs: 1 / sqrt(20,000) = .007
    assert abs(np.corrcoef(draws, other)[0, 1]) < 0.035


def test_a_generator_does_not_touch_the_global_one() -> None:
    np.random.seed(0)  # noqa: NPY002
    before = np.random.get_state()[1].copy()  # noqa: NPY002  # pyright: ignore
    generator(0, "x").random(10)
    assert np.array_equal(before, np.random.get_state()[1])  # noqa: NPY002  # pyright: ignore
