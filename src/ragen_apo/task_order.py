"""Which items a step uses: a function of the seed and the step, which a checkpoint remembers.

    without weights    consecutive pieces of a fresh random order of all items each epoch
    with weights       draws go to the categories in fixed turns by weight, and within each category
                       they are consecutive pieces of fresh random orders of its items

So in the first n draws, the share of a category differs from that of its weight by less than one
draw, however many items it has. Within a category every item comes up equally often.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from ragen_apo.environments.base import HasTasks
from ragen_apo.errors import ConfigError
from ragen_apo.seeding import generator
from ragen_apo.shares import interleaved, turns_by_weight
from ragen_apo.types import Task


class DrawOrder:
    """An endless order of items that have these categories; `purpose` names its random draws.

    The draws of a category without items (see `missing_categories`) go to the others by weight.
    """

    def __init__(
        self, categories: Sequence[str], *, weights: Mapping[str, float], seed: int, purpose: str
    ) -> None:
        self._num_items, self._seed, self._purpose = len(categories), seed, purpose
        weights = {name: weight for name, weight in weights.items() if name in categories}
        self._turns = turns_by_weight(weights) if weights else None
        self._draws: list[tuple[str, int]] = []
        """Of each draw so far its category and how many draws of that category came before."""
        self._num_draws = dict.fromkeys(weights, 0)
        self._items = {
            name: [index for index, category in enumerate(categories) if category == name]
            for name in weights
        }

    def items(self, step: int, *, batch_size: int) -> list[int]:
        """The indices of the items of step `step`, counted from 0, in the order of their draws."""
        if self._turns is None:
            return epoch_slice(
                num_items=self._num_items,
                batch_size=batch_size,
                step=step,
                seed=self._seed,
                purpose=self._purpose,
            )
        start = step * batch_size
        while len(self._draws) < start + batch_size:
            category = next(self._turns)
            self._draws.append((category, self._num_draws[category]))
            self._num_draws[category] += 1
        return [self._item(*draw) for draw in self._draws[start : start + batch_size]]

    def _item(self, category: str, number: int) -> int:
        items = self._items[category]
        (index,) = epoch_slice(
            num_items=len(items),
            batch_size=1,
            step=number,
            seed=self._seed,
            purpose=f"{self._purpose}/{category}",
        )
        return items[index]


def missing_categories(tasks: Sequence[Task], weights: Mapping[str, float]) -> list[str]:
    """Categories that have a weight and no task."""
    return sorted(set(weights) - {task.category for task in tasks})


def seeded_part(
    tasks: Sequence[Task], *, size: int, weights: Mapping[str, float], seed: int
) -> list[Task]:
    """`size` tasks drawn from the seed, in their order; with weights, categories take turns."""
    order = generator(seed, "training-tasks").permutation(len(tasks)).tolist()
    if weights:
        by_category = {
            name: [index for index in order if tasks[index].category == name] for name in weights
        }
        order = interleaved(by_category, weights)
    return [tasks[index] for index in sorted(order[:size])]


def epoch_slice(
    *, num_items: int, batch_size: int, step: int, seed: int, purpose: str
) -> list[int]:
    """Which items step `step` uses: consecutive pieces of a fresh random order each epoch.

    A function of its arguments alone, so the step is all that a checkpoint has to remember.
    """
    indices: list[int] = []
    while len(indices) < batch_size:
        epoch, offset = divmod(step * batch_size + len(indices), num_items)
        order = generator(seed, purpose, epoch).permutation(num_items)
        indices += order[offset : offset + batch_size - len(indices)].tolist()
    return indices


def untrained_first(tasks: Iterable[Task], trained_on: Collection[str]) -> list[Task]:
    """The tasks in their order, but those with these ids last: what is left over of the split
    `train` by `training.max_tasks` can say how a policy does on new tasks.
    """
    return sorted(tasks, key=lambda task: task.task_id in trained_on)


def training_tasks(
    environment: HasTasks, *, name: str, max_tasks: int | None, seed: int
) -> list[Task]:
    """What Stage 1 and Stage 2 train on: the split `train`, or a seeded part of it.

    A task that the split lists twice is one: its episodes would count twice as well. `name` is what
    messages call the environment. Raises ConfigError if there is no task, or none of a category
    that has a weight.
    """
    tasks = list(environment.tasks("train"))
    if not tasks:
        raise ConfigError(
            f"the environment {name!r} has no task in the split 'train' with these options; "
            "change them (section environment) or its data"
        )
    tasks = _distinct(tasks, name)
    weights = environment.properties.category_weights
    if max_tasks is not None and max_tasks < len(tasks):
        tasks = seeded_part(tasks, size=max_tasks, weights=weights, seed=seed)
    if missing := missing_categories(tasks, weights):
        raise ConfigError(
            f"no training task is of {', '.join(missing)}, which should come up by its "
            f"weight; raise training.max_tasks (now {max_tasks}), give it tasks, or leave it out"
        )
    return tasks


def _distinct(tasks: Sequence[Task], name: str) -> list[Task]:
    """Each task once. Raises ConfigError for two of one id, which would get each other's V*."""
    by_id: dict[str, Task] = {}
    for task in tasks:
        if by_id.setdefault(task.task_id, task) != task:
            raise ConfigError(
                f"the environment {name!r} has different training tasks with "
                f"the id {task.task_id!r}; expected an id for each, as `make_task` computes it"
            )
    return list(by_id.values())
