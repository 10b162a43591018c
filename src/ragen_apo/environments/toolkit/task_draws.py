"""Tasks drawn at random, in splits that cannot overlap.

A hash of a draw's content decides its split: one in five is in `test`, the others in `train`. So
the splits have one distribution and are disjoint at any size, and a larger split begins with the
tasks of a smaller one.
"""

import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
from pydantic import Field

from ragen_apo.config.section import Section
from ragen_apo.environments.toolkit.game import digest_of_options
from ragen_apo.errors import ConfigError
from ragen_apo.seeding import derive_seed, generator
from ragen_apo.types import Task, make_task

SPLITS = ("train", "test")
_MIN_DRAWS = 2_000
_DRAWS_PER_TASK = 200

_Draw = TypeVar("_Draw")


class DrawnTasks(Section):
    """Options that decide which tasks there are and nothing about any one of them."""

    num_train_tasks: int = Field(default=400, ge=1, le=100_000)
    """Tasks of the split `train`."""
    num_test_tasks: int = Field(default=100, ge=1, le=100_000)
    """Tasks of the split `test`; none of them is in `train`."""
    task_seed: int = Field(default=0, ge=0)
    """Another seed gives other tasks."""

    @property
    def counts(self) -> tuple[int, int, int]:
        """What `draw_tasks` takes: the tasks of `train`, those of `test`, and the seed."""
        return self.num_train_tasks, self.num_test_tasks, self.task_seed

    def digest(self, *, without: Sequence[str] = ()) -> str:
        """Equal exactly for equal worlds, whatever is rewarded and however many tasks there are."""
        return digest_of_options(self, without=["reward", *DrawnTasks.model_fields, *without])


def split_of(environment: str, content: str) -> str:
    """The split that everything with this content belongs to, in every process."""
    return "test" if derive_seed(environment, "split", content) % 5 == 0 else "train"


def draw_distinct(
    environment: str,
    draw: Callable[[np.random.Generator], _Draw | None],
    *,
    content: Callable[[_Draw], str],
    counts: Mapping[str, int],
    seed: int,
) -> dict[str, list[_Draw]]:
    """Different draws for each split, in the numbers of `counts`.

    `draw` returns None for an unusable draw. Draws of equal `content` count as one. Raises
    ConfigError if the options do not give enough.
    """
    chosen: dict[str, list[_Draw]] = {split: [] for split in counts}
    seen: set[str] = set()
    max_draws = _MIN_DRAWS + _DRAWS_PER_TASK * sum(counts.values())
    for number in range(max_draws):
        if all(len(chosen[split]) >= count for split, count in counts.items()):
            return chosen
        drawn = draw(generator(seed, environment, "task", number))
        if drawn is None or (text := content(drawn)) in seen:
            continue
        seen.add(text)
        split = split_of(environment, text)
        if len(chosen[split]) < counts[split]:
            chosen[split].append(drawn)
    found = ", ".join(f"{len(drawn)} for {split}" for split, drawn in chosen.items())
    raise ConfigError(
        f"environment: {max_draws} draws gave only {found} different tasks of {environment}; ask "
        "for fewer tasks, or for larger or less restricted ones"
    )


class Description(NamedTuple):
    """The fields of a task that describe a draw."""

    instruction: str
    category: str
    payload: Mapping[str, Any]


@functools.lru_cache(maxsize=64)
def draw_tasks(
    environment: str,
    draw: Callable[..., _Draw | None],
    arguments: tuple[Hashable, ...],
    *,
    content: Callable[[_Draw], str],
    describe: Callable[[_Draw], Description],
    counts: tuple[int, int, int],
) -> dict[str, tuple[Task, ...]]:
    """The tasks of both splits, different draws of `draw(*arguments, generator)` (`draw_distinct`).

    `counts` is that of `DrawnTasks`. Equal arguments give the same object.
    """
    num_train, num_test, seed = counts
    drawn = draw_distinct(
        environment,
        functools.partial(draw, *arguments),
        content=content,
        counts={"train": num_train, "test": num_test},
        seed=seed,
    )
    return {
        split: tuple(
            make_task(environment=environment, split=split, **describe(each)._asdict())
            for each in of_split
        )
        for split, of_split in drawn.items()
    }
