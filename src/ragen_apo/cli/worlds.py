"""The commands for environments: `play`, `check`, `data`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import App, Parameter

from ragen_apo.cli.common import (
    Number,
    NumberOrZero,
    Overrides,
    app,
    console,
    examples,
    print_policies,
    say,
    whole_number,
)
from ragen_apo.errors import ConfigError
from ragen_apo.plural import counted

if TYPE_CHECKING:
    from ragen_apo.environments.contract import PolicyResult
    from ragen_apo.environments.human.recordings import Recording

PLAY_SEED = 0
"""Seeds the environment's draws in an episode that a person plays."""


@app.command(
    help_epilogue=examples(
        "play shop --max_turns 6 --task 7",
        "play frozen_lake --record mine.jsonl",
    )
)
def play(
    environment: str = "shop",
    *options: Overrides,
    split: str = "train",
    task: NumberOrZero = 0,
    record: Path | None = None,
) -> None:
    """Play an environment yourself in the terminal.

    Args:
        environment: Name of an environment, path.py:function or module:function.
        options: Options of the environment, after its name, such as `--max_turns 5`;
            docs/environments.md has all of them.
        split: The split of the task.
        task: Which task of the split, counted from 0.
        record: A .jsonl file to which the episode is added when it ends. With
            warm_start.demonstrations.recordings a run uses it as a demonstration.
    """
    from ragen_apo.config.overrides import parse_options
    from ragen_apo.environments.base import opened_environment, task_at
    from ragen_apo.environments.human.play import play as play_episode
    from ragen_apo.environments.human.recordings import SUFFIX, Recording, require_recordable

    with opened_environment(environment, parse_options(options)) as world:
        chosen = task_at(world, split, task)
        if record is not None and record.suffix != SUFFIX:
            raise ConfigError(f"--record takes a file whose name ends in {SUFFIX}, got {record}")
        if record is not None:
            require_recordable(record)
        episode = play_episode(world, chosen, seed=PLAY_SEED)
        if record is not None:
            if episode.terminated or episode.truncated:
                _record(record, Recording(world.properties.version, PLAY_SEED, episode))
            else:
                say("not recorded: the episode did not come to its end")


def _record(path: Path, recording: Recording) -> None:
    """Adds a played episode to a file, or shows it where the file cannot be written any more."""
    from ragen_apo.environments.human.recordings import append_recording

    try:
        append_recording(path, recording)
    except OSError as error:
        print(recording.to_line())
        raise ConfigError(
            f"--record {path}: the episode could not be recorded ({error.strerror or error}). The "
            "line above is all of it: save it as a line of a .jsonl file"
        ) from error
    say(f"recorded in {path}; a run whose environment has the same options can learn from it")


@app.command(help_epilogue=examples("check frozen_lake --size 8"))
def check(environment: str, *options: Overrides, num_tasks: Number = 50) -> int:
    """Check whether an environment fulfils the promises of every environment.

    Also plays its scripted policies on training tasks. Exit status 1 if a promise is broken.

    Args:
        environment: Name of an environment, built-in or from an installed package; path.py:function
            or module:function for one of your own.
        options: Options of the environment, after its name, such as `--max_turns 5`.
        num_tasks: Training tasks, from all over the split, that each scripted policy plays for the
            table.
    """
    from functools import partial

    from ragen_apo.config.named_code import FOREIGN_FAILURES
    from ragen_apo.config.overrides import parse_options
    from ragen_apo.environments.base import make_environment, opened_environment
    from ragen_apo.environments.contract import (
        EPISODES_END,
        ContractError,
        check_environment,
        first_split,
        held_out_splits,
        notes_on,
        policy_table,
    )

    keys = parse_options(options)
    make = partial(make_environment, environment, keys)
    found = check_environment(make)
    table, split, held_out, notes = {}, "train", ["test"], []
    is_broken = any(found.values())
    # One that cannot be made is not made again, and endless episodes would take hours.
    if EPISODES_END in found and found[EPISODES_END] is None:
        try:
            with opened_environment(environment, keys) as played:
                split, held_out = first_split(played), held_out_splits(played)
                table = policy_table(played, num_tasks=num_tasks)
        except ContractError as error:
            if not is_broken:
                found["scripted policies play the training tasks"] = str(error)
        except FOREIGN_FAILURES:
            if not is_broken:  # else it was told what is wrong
                raise
        try:
            notes = notes_on(make)
        except FOREIGN_FAILURES:
            if not any(found.values()):
                raise
    _say_what_was_found(found)
    if table or not any(found.values()):
        print_policies(f"scripted policies on tasks from all over the split {split}", table)
    for note in notes:
        say(f"{note}.")
    if any(found.values()):
        return 1
    _say_what_training_lacks(table, split=split, held_out=held_out)
    return 0


def _say_what_was_found(found: Mapping[str, str | None]) -> None:
    """A line for each promise; a cause that breaks several is told once."""
    told: set[str] = set()
    for promise, problem in found.items():
        say(f"{'ok  ' if problem is None else 'NOT '} {promise}")
        if problem is None:
            continue
        raised = re.search(r"raised? (.+ in .+, line \d+)", problem)
        cause = raised[1] if raised else problem
        indented = problem.replace("\n", "\n       ")
        say(f"       {'as above' if cause in told else indented}")
        told.add(cause)


def _say_what_training_lacks(
    table: Mapping[str, PolicyResult], *, split: str, held_out: Sequence[str]
) -> None:
    """What breaks no promise, and has to be known before a run."""
    if split != "train":
        say("The split train has no task, so nothing can be trained here.")
    elif "teacher" not in table:
        say(
            "There is no scripted policy `teacher`: to train a small model, name another as "
            "warm_start.demonstrations.teacher."
        )
    for name in ("teacher", "oracle"):
        result = table.get(name)
        if result and result.success_rate == 0 and result.episode_return <= 0:
            say(
                f"The scripted policy `{name}` solved none of these tasks"
                + (", so a warm start would imitate failures." if name == "teacher" else ".")
            )
    if held_out and "test" not in held_out:
        say(f"No task is of a split `test`: set evaluation.split to {' or '.join(held_out)}.")


data = App(
    name="data",
    help="Get the data that an environment needs.",
    help_epilogue=examples("data webshop"),
)
app.command(data)


@data.command(
    name="webshop", help_epilogue=examples("data webshop", "data webshop --from downloads/webshop")
)
def data_webshop(
    *,
    size: Literal["small", "full"] = "small",
    source: Annotated[Path | None, Parameter(name="--from")] = None,
    force: bool = False,
    generated: Annotated[int, whole_number(1, 10_000_000)] | None = None,
) -> None:
    """Download WebShop's data and prepare it, so that `webshop` starts quickly.

    The files go to $RAGEN_APO_DATA/webshop (~/.local/share/ragen-apo/webshop). An interrupted
    download continues when the command is given again.

    Args:
        size: The 1,000 products that most people use, or all 1.18 million (several GB).
        source: A folder that already has the files; nothing is downloaded.
        force: Replace existing data.
        generated: Prepare a generated catalogue of this many products; nothing is downloaded.
    """
    from ragen_apo.console import ConsoleProgress
    from ragen_apo.environments.webshop.download import download_data
    from ragen_apo.environments.webshop.store import open_catalog

    beside = source is not None or force or size != "small"
    if generated is not None and beside:
        raise ConfigError("--generated goes with none of --size, --from and --force")
    with ConsoleProgress(console) as progress:
        chosen = f"generated:{generated}"
        if generated is None:
            chosen = str(download_data(size, source=source, force=force, progress=progress))
        catalog = open_catalog(chosen, progress=progress)
    products = counted(catalog.num_products, "product")
    say(f"webshop: {products} of {chosen}, prepared in {catalog.folder}")
