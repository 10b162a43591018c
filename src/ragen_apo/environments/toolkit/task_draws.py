"""Tasks drawn at random, in splits that cannot overlap.

A hash of a draw's content decides its split: one in five is in `test`, the others in `train`. So
the splits have one distribution and are disjoint at any size, and a larger split begins with the
tasks of a smaller one.
"""

import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

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
    """The tasks of both splits, in the numbers of `counts`, which is that of `DrawnTasks`.

    Each describes a draw of `draw(*arguments, generator)`, which returns None for an unusable one.
    Draws of equal `content` count as one. Equal arguments give the same object. Raises ConfigError
    if the options do not give enough.
    """
    num_train, num_test, seed = counts
    wanted = {"train": num_train, "test": num_test}
    tasks: dict[str, list[Task]] = {split: [] for split in wanted}
    seen: set[str] = set()
    max_draws = _MIN_DRAWS + _DRAWS_PER_TASK * (num_train + num_test)

    def is_full() -> bool:
        return all(len(tasks[split]) >= count for split, count in wanted.items())

    for number in range(max_draws):
        if is_full():
            break
        drawn = draw(*arguments, generator(seed, environment, "task", number))
        if drawn is None or (text := content(drawn)) in seen:
            continue
        seen.add(text)
        split = split_of(environment, text)
        if len(tasks[split]) < wanted[split]:
            described = describe(drawn)._asdict()
            tasks[split].append(make_task(environment=environment, split=split, **described))
    if is_full():
        return {split: tuple(of_split) for split, of_split in tasks.items()}
    found = ", ".join(f"{len(of_split)} for {split}" for split, of_split in tasks.items())
    raise ConfigError(
        f"environment: {max_draws} draws gave only {found} different tasks of {environment}; ask "
        "for fewer tasks, or for larger or less restricted ones"
    )
