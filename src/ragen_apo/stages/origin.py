"""What a run is made with and from, noted when it starts and the same in every later attempt.

`run.json` records versions, the configuration and the versions of the environment. Between two
attempts, files can be edited and data replaced. A run that mixes both would be neither of them.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

import ragen_apo
from ragen_apo.config import RunConfig
from ragen_apo.config.load import config_of
from ragen_apo.config.overrides import MAX_CHANGES, changes_in_words, differences
from ragen_apo.config.references import code_named_by, file_of
from ragen_apo.errors import ConfigError, RanksError, RunDirectoryError
from ragen_apo.files import CHECKSUMS, read_json_lines
from ragen_apo.policy.language_model import LanguageModel
from ragen_apo.run_directory import RunDirectory
from ragen_apo.session import Session
from ragen_apo.training.checkpoint import STAGE_TWO, WARM_START, Position

_OF_ENVIRONMENT, _OF_ALGORITHM = "environment_files", "algorithm_files"
_EDITED = {
    _OF_ENVIRONMENT: "its environment declares the versions of before, so what was sampled and "
    "valued with the old file is used. If its tasks, texts or rewards have changed, change "
    "properties.version and",
    _OF_ALGORITHM: "the steps so far were made with the old file. If its mathematics has changed,",
}
"""What an edited file means for the run that goes on."""
MAY_CHANGE = (
    "machine.num_threads",
    "machine.device",
    "machine.rank_timeout_seconds",
    "machine.tf32",
    "machine.deterministic",
    "machine.gradient_checkpointing",
    "machine.sharding",
    "policy.trust_remote_code",
    "rollouts",
    "training.max_steps",
    "training.micro_batch_size",
    "training.num_rows",
    "training.checkpoint_every",
    "training.keep_checkpoints",
    "training.keep_episodes",
    "evaluation.num_episodes",
    "evaluation.pass_k",
    "evaluation.search",
    "tracking",
)
"""Keys that say how a run uses the machine, how long it goes on, what it keeps for people, or how
much is measured after it. A change alters the steps so far by rounding at most, and that of
training.max_steps not at all (`stages.more_steps`)."""


OF_EACH_RANK = (
    "machine.num_threads",
    "machine.device",
    "machine.rank_timeout_seconds",
    "rollouts.num_environment_workers",
    "tracking",
)
"""Keys that may differ between the ranks of a run, as their hosts may."""


def may_change(key: str) -> bool:
    """Whether a run goes on with another value of this key, written with dots."""
    return _is_among(key, MAY_CHANGE)


def _is_among(key: str, names: Sequence[str]) -> bool:
    """Whether one of these keys and sections is the key or holds it."""
    return any(f"{key}.".startswith(f"{name}.") for name in names)


def note_origin(session: Session) -> None:
    """Writes down what the run is made with and from. What an earlier attempt noted stays.

    `versions` are those of the first attempt; others that went on with it follow in
    `later_versions`.
    """
    run, properties = session.run, session.environments.properties
    versions = {
        "ragen_apo": ragen_apo.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
    }
    noted: dict[str, Any] = {
        "versions": versions,
        "configuration": _configuration(session.config),
        "environment": _environment_versions(session),
        "training_tasks": _tasks_digest(session),
        **_named_files(session.config),
        "mixed_precision": session.precision,
    }
    if properties.data:
        noted["data"] = properties.data
    noted |= run.read_status()
    later = noted.get("later_versions", [])
    if versions not in [noted["versions"], *later]:
        noted["later_versions"] = [*later, versions]
    run.note(**noted)


def count_attempt(run: RunDirectory, *, by: int = 1) -> None:
    """Notes that one more process, or `by` of them, goes on with training."""
    run.note(attempts=run.read_status().get("attempts", 0) + by)


def require_same_origin(session: Session, *, but_for: Sequence[str] = ()) -> None:
    """Raises RunDirectoryError if an earlier attempt had another configuration or environment.

    Keys and sections in `but_for` do not matter, besides those of `MAY_CHANGE`. Nothing is written.
    Runs of earlier versions of this package have not noted all of it: a key that is younger than
    the notes had its default. An environment's file may have been mended: that is said, and no
    more, where the versions that it declares are the same. Raises RanksError if ranks differ.
    """
    _require_equal_ranks(session)
    run, status = session.run, session.run.read_status()
    now = _configuration(session.config)
    changes = [
        each
        for each in differences(_noted_configuration(status, now), now)
        if not _is_among(each.key, (*MAY_CHANGE, *but_for))
    ]
    if changes:
        raise RunDirectoryError(
            f"{run.config} was edited since this run started: {changes_in_words(changes)}. Its "
            "earlier steps were made with the values before, so put those back, or start another "
            f"run in another --run-dir. What may change is {', '.join(MAY_CHANGE)}."
        )
    _require_same_environment(session, status)
    for sentence in edited_files(session.config, status):
        session.progress.say(sentence)


def edited_files(config: RunConfig, status: Mapping[str, Any]) -> Iterator[str]:
    """A sentence for each file that the configuration names and that was another one when the run
    with this status was started.
    """
    for key, files in _named_files(config).items():
        before = status.get(key, {})
        for file, digest in files.items():
            if before.get(file, digest) != digest:
                yield (
                    f"{file} was edited since this run started, and {_EDITED[key]} start again in "
                    "another folder"
                )


def _require_equal_ranks(session: Session) -> None:
    """Raises RanksError if a rank has another configuration, environment or code than the first.

    Each host has copies of these. Nothing else would notice other ones: losses and gradients are
    sums of what each rank makes of its share.
    """
    ranks = session.ranks
    if ranks.size == 1:
        return
    packages = {"torch": torch.__version__, "transformers": transformers.__version__}
    mine = _configuration(session.config) | {
        "packages": packages | {"ragen_apo": _digest_of_code()},
        "environment_versions": _environment_versions(session),
        **_named_files(session.config),
        "training_tasks": _tasks_digest(session),
    }
    parts = ranks.gather(json.dumps([ranks.worker.name, mine]).encode(), "comparing configurations")
    (_, first), *others = map(json.loads, parts)
    for name, theirs in others:
        changes = [
            f"{each.key} is {json.dumps(each.after)}, and {json.dumps(each.before)} on rank 0"
            for each in differences(first, theirs)
            if not _is_among(each.key, OF_EACH_RANK)
        ]
        if changes:
            raise RanksError(
                f"{name} would run something else than rank 0: "
                f"{'; '.join(changes[:MAX_CHANGES])}. Give all hosts the same command, "
                "configuration, data, environment and packages. What may differ is "
                f"{', '.join(OF_EACH_RANK)}"
            )


def _digest_of_code() -> str:
    """What tells two states of this package apart, also of one version."""
    files = sorted(Path(ragen_apo.__file__).parent.rglob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]


def has_same_tasks(session: Session) -> bool:
    """Whether the training tasks are those that earlier attempts noted, if any did."""
    now = _tasks_digest(session)
    return session.run.read_status().get("training_tasks", now) == now


def require_same_tasks(session: Session) -> None:
    """Raises RunDirectoryError if an earlier attempt noted other training tasks."""
    if not has_same_tasks(session):
        raise RunDirectoryError(
            f"the training tasks of {session.run.path} are not those that it was begun with: a "
            "file or a data set of its environment was changed. Put that back, or start another "
            "run in another --run-dir."
        )


def require_notes(run: RunDirectory) -> None:
    """Raises RunDirectoryError if a run is half done and what it was started with is gone."""
    if run.has_begun and not run.policy.exists() and not run.status.exists():
        raise RunDirectoryError(
            f"{run.status} is missing. It says what this run was started with, and without it "
            "nobody knows whether config.yaml is still that. Put it back, or start another run in "
            "another --run-dir."
        )


def require_checkpoints(run: RunDirectory, position: Position) -> None:
    """Raises RunDirectoryError if Stage 2 has saved checkpoints and none of them is left.

    It would begin again, and its metrics would be emptied first.
    """
    noted = run.read_status().get("phases", {}).get("stage 2", {})
    if position.phase != STAGE_TWO and "checkpoint_seconds" in noted and run.metrics.exists():
        raise RunDirectoryError(
            f"{run.metrics} has steps of Stage 2, and {run.checkpoints} has no checkpoint of it. "
            "Put the checkpoints back. To begin Stage 2 again from its reference instead, move "
            "metrics.jsonl out of the run"
        )


def _require_same_environment(session: Session, status: Mapping[str, Any]) -> None:
    """The options are the same: `data: auto`, say, on a machine that has other data now."""
    now = _environment_versions(session)
    before = now | status.get("environment", {})  # which had no name once
    data = session.environments.properties.data
    # Before version 0.1 had notes of the environment it noted the words on its data.
    if before == now and ("environment" in status or status.get("data", data) == data):
        return

    def in_words(versions: dict[str, str], data: str) -> str:
        name = data or versions["name"]
        return f"{name} (version {versions['version']}, rewards {versions['reward_version']})"

    was = in_words(before, status.get("data", ""))
    is_now = in_words(now, data)
    raise RunDirectoryError(
        f"{session.run.path} was begun with {was}, and its environment has {is_now} now; to go on "
        "would mix the two. Put back the data, the environment's file or the version of ragen-apo "
        "that it was begun with, or start a new run with another --run-dir."
    )


def require_references(run: RunDirectory, position: Position) -> None:
    """Raises RunDirectoryError if a reference is gone after which the policy was trained on.

    The weights of a checkpoint cannot stand in: the log ratio to them would start at 0 again.
    """
    if position.phase in WARM_START and not read_json_lines(run.metrics):
        return
    for version in sorted({0, position.reference_version}):
        if not run.reference(version).is_dir():
            raise RunDirectoryError(
                f"{run.reference(version)} is missing, and the policy of this run is trained "
                "against it. Put the folder back where it was, or start another run in another "
                "--run-dir; weights, checkpoints and metrics are as they were."
            )
        noted = run.read_status().get("references", {}).get(str(version))
        if noted is not None and noted != _digest(run.reference(version)):
            raise RunDirectoryError(
                f"{run.reference(version)} is another model than this run has made and trained "
                "against. Put the original folder back, or start another run in another --run-dir."
            )


def note_reference(run: RunDirectory, version: int) -> None:
    """Writes down which model a reference is, so that no other takes its place."""
    noted = run.read_status().get("references", {})
    run.note(references=noted | {str(version): _digest(run.reference(version))})


def require_same_initial_model(session: Session, policy: LanguageModel) -> None:
    """Raises RunDirectoryError if a warm start of adapters goes on from another model's weights.

    The checkpoints of a warm start hold the adapters alone; the weights are those of `policy.path`.
    """
    run, found = session.run, policy.without_adapters().fingerprint()
    if run.read_status().get("initial_fingerprint", found) != found:
        raise RunDirectoryError(
            f"{session.config.policy.path} is another model than this run was started with. Put "
            "the model back, or start another run in another --run-dir."
        )
    run.note(initial_fingerprint=found)


def _digest(folder: Path) -> str | None:
    """What tells saved models apart; None for one that an earlier version saved."""
    sums = folder / CHECKSUMS
    return hashlib.sha256(sums.read_bytes()).hexdigest() if sums.exists() else None


def _noted_configuration(status: Mapping[str, Any], now: dict[str, Any]) -> Mapping[str, Any]:
    """The configuration of the first attempt, with the defaults of keys that it does not have."""
    noted = status.get("configuration", now)
    try:
        return _configuration(config_of([noted], source="run.json"))
    except ConfigError:  # it has keys that are gone since: the differences name them
        return noted


def _configuration(config: RunConfig) -> dict[str, Any]:
    """Every key, as JSON reads it back."""
    return config.model_dump(mode="json", by_alias=True)


def _named_files(config: RunConfig) -> dict[str, dict[str, str]]:
    """A hash of each file that the environment and the algorithm are named by, without those that
    it imports.
    """
    world = config.environment
    names = {
        _OF_ENVIRONMENT: code_named_by(world.name, world.options),
        _OF_ALGORITHM: [config.algorithm.name],
    }
    return {key: _hashes(filter(None, map(file_of, each))) for key, each in names.items()}


def _hashes(files: Iterable[Path]) -> dict[str, str]:
    found = [file for file in files if file.is_file()]
    return {str(file): hashlib.sha256(file.read_bytes()).hexdigest() for file in found}


def _tasks_digest(session: Session) -> str:
    """What tells the training tasks and their order apart: each id is a hash of its task."""
    ids = "\n".join(task.task_id for task in session.environments.tasks("train"))
    return hashlib.sha256(ids.encode()).hexdigest()


def _environment_versions(session: Session) -> dict[str, str]:
    """What changes with the tasks, their text or their rewards."""
    properties = session.environments.properties
    names = ("name", "version", "reward_version")
    return {name: getattr(properties, name) for name in names}
