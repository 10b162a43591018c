"""A whole run, from an untrained model to a trained policy, resumable at every point.

    initial model -> copy curriculum -> demonstrations -> reference
        -> Stage 1 (value store) -> distillation -> Stage 2 (trainer) -> policy

Stage 1 is there for A*-PO and for distillation, which any algorithm can have.

Each phase finds out from the run directory what is already done, and continues from there. What it
writes depends only on the configuration. So a killed run ends with the same files as a run without
a kill (except for `seconds` and `attempts`).

Several ranks go through the phases together. The first rank writes, and tells the others what is
there. The others read a file only after the first rank has said that it is written.
"""

from __future__ import annotations

import contextlib
import functools
import math
import platform
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ragen_apo.agent.assembly import build_context
from ragen_apo.agent.proxy import EpisodeRequest, begin_episodes
from ragen_apo.choices import RunEnd
from ragen_apo.config import RunConfig
from ragen_apo.environments.base import tasks_of
from ragen_apo.errors import RanksError
from ragen_apo.files import (
    broken_line,
    read_json_lines,
    remove,
    write_json_lines_atomically,
    write_text_atomically,
)
from ragen_apo.plural import counted
from ragen_apo.policy.language_model import LanguageModel, build_small_model
from ragen_apo.policy.tokenizer import train_tokenizer
from ragen_apo.progress import Progress
from ragen_apo.run_directory import RunDirectory
from ragen_apo.seeding import derive_seed
from ragen_apo.session import Session, open_session, require_shared
from ragen_apo.stages.cores import say_if_cores_are_crowded
from ragen_apo.stages.disk import free_disk, plan_disk
from ragen_apo.stages.distillation import distil
from ragen_apo.stages.inputs import (
    caveats,
    check_run_inputs,
    describe_servers,
    evaluated_while_training,
)
from ragen_apo.stages.memory import free_memory, plan_memory, saved_sizes
from ragen_apo.stages.more_steps import (
    changed_rates,
    has_steps_left,
    note_planned_steps,
    require_possible_steps,
    set_results_aside,
)
from ragen_apo.stages.origin import (
    count_attempt,
    note_origin,
    note_reference,
    require_checkpoints,
    require_notes,
    require_references,
    require_same_initial_model,
    require_same_origin,
    require_same_tasks,
)
from ragen_apo.stages.stored_values import note_samples
from ragen_apo.stages.training import reference_model, run_stage_two
from ragen_apo.stages.values import estimate_values, note_stage_one_tokens, note_values
from ragen_apo.training.checkpoint import (
    DISTILLATION,
    PHASES,
    STAGE_TWO,
    WARM_START,
    Position,
    list_checkpoints,
    load_latest_checkpoint,
    newest_position,
)
from ragen_apo.types import Task
from ragen_apo.warm_start.batches import play_for_tokenizer, texts_of
from ragen_apo.warm_start.phases import copy_phase, demonstrations_phase
from ragen_apo.warm_start.recorded_episodes import keep_recordings
from ragen_apo.warm_start.supervised import run_supervised_phase


def train(
    config: RunConfig,
    run: RunDirectory,
    *,
    progress: Progress,
    until: RunEnd = "policy",
    config_yaml: str | None = None,
) -> None:
    """Brings the run to its end: `run.policy` holds the trained model afterwards.

    Or it stops at the reference, the end of the warm start: `references/0`, from which another call
    continues. A run that already has what is asked for is left unchanged, but for its
    configuration: `config_yaml` is what that is to be from now on, if it changes. Raises
    ConfigError before anything is computed if the environment refuses its options or lacks
    something that the run needs. Raises RunDirectoryError if the run cannot be continued.
    """
    require_notes(run)
    session = open_session(config, run, progress)
    require_same_origin(session)
    require_same_tasks(session)
    require_possible_steps(session)
    check_run_inputs(config, session.environments, recordings_are_kept=run.recordings.exists())
    with session.locked():
        is_trained = session.has(run.policy) and (until == "reference" or not _goes_on(session))
        if is_trained or (until == "reference" and session.has(run.reference(0))):
            is_what = "is trained" if is_trained else "has its reference"
            stopped = run.read_status().get("early_stop") if is_trained else None
            why = (
                f"; it stopped after step {stopped['step']}: {stopped['reason']}" if stopped else ""
            )
            progress.say(f"{run.path} {is_what} already{why}")
            _write_configuration(session, config_yaml)
            if not is_trained:
                _note_first_reference(session)
        else:
            with session.clock.timed("loading", since=session.opened):
                _play_phases(session, only_reference=until == "reference", config_yaml=config_yaml)


def _write_configuration(session: Session, config_yaml: str | None) -> None:
    if config_yaml is not None and session.ranks.is_first:
        write_text_atomically(session.run.config, config_yaml)


def _goes_on(session: Session) -> bool:
    """Whether a trained run is to make more steps now."""
    max_steps = session.config.training.max_steps
    is_left = functools.partial(has_steps_left, session.run, max_steps=max_steps)
    return session.ranks.from_first(is_left, "steps that are left")


def _play_phases(session: Session, *, only_reference: bool, config_yaml: str | None) -> None:
    """From wherever the run stands to its reference or its trained policy.

    No caller has a policy, so what this function lets go of is gone.
    """
    run = session.run
    _begin(session)
    tasks = session.training_tasks()
    policy, position = _loaded_policy(session, only_reference=only_reference)
    if session.ranks.is_first and (sentence := changed_rates(session)):
        session.progress.say(sentence)
    _write_configuration(session, config_yaml)
    with session.tracking.running() if session.ranks.is_first else contextlib.nullcontext():
        _warm_start(session, policy, position)
        if only_reference:
            if session.ranks.is_first:
                _note_peak_memory(run, session.device)
                count_attempt(run, by=-1)  # it ended as asked: going on is no resumption
            return
        num_tokens = session.config.agent.max_context_tokens
        for sentence in describe_servers(session.config.rollouts, num_tokens=num_tokens):
            session.progress.say(sentence)
        if session.ranks.is_first and run.policy.exists():
            made, earlier = set_results_aside(run)
            note_planned_steps(session)
            max_steps = session.config.training.max_steps
            session.progress.say(
                f"{made} of {max_steps} steps are made; their policy, evaluation and "
                f"report are in {earlier} from now on"
            )
        if position.phase in WARM_START:
            del policy  # reference 0 has its weights; another one starts from there
            _stage_one(session, tasks)
            policy = session.shard(session.load_policy(run.reference(0)))
            position = Position(DISTILLATION, 0)
        else:
            _stage_one(session, tasks, beside=policy)
        if position.phase == DISTILLATION:
            if session.config.distillation.enabled:
                _distillation(session, policy, tasks, position)
            position = Position(STAGE_TWO, 0)
        with session.clock.timed("stage 2"):
            run_stage_two(session, policy, tasks, position=position)
        _save_policy(session, policy)


def _begin(session: Session) -> None:
    """Says what is played, and removes what a killed attempt left half written."""
    run, data = session.run, session.environments.properties.data
    if data:
        session.progress.say(f"{session.environments.properties.name}: {data}")
    for sentence in caveats(session.config, session.environments):
        session.progress.say(sentence)
    if session.ranks.is_first:
        if not run.has_begun:
            note_origin(session)
        recordings = session.config.warm_start.demonstrations.recordings
        if session.config.warm_start.enabled and recordings and not run.reference(0).exists():
            keep_recordings(session, Path(recordings))
        run.remove_leftovers()


def _save_policy(session: Session, policy: LanguageModel) -> None:
    run = session.run
    if session.ranks.is_first:
        _note_peak_memory(run, session.device)
        if run.values.exists():
            note_stage_one_tokens(run)
    if session.config.policy.lora is not None:
        session.save_adapters(policy)
    session.save_model(policy, run.policy)


def _loaded_policy(session: Session, *, only_reference: bool) -> tuple[LanguageModel, Position]:
    """The policy where training stands, of a run that nothing refuses from here on."""
    run = session.run
    # From the first reference on, its weights are those that adapters are added to.
    policy = session.load_policy(
        run.reference(0) if session.has(run.reference(0)) else _initial_model(session)
    )
    if session.config.machine.mixed_precision == "auto":
        session.progress.say(f"machine.mixed_precision auto: {session.precision}")
    say_if_cores_are_crowded(session)
    _plan_memory(session, policy)
    _plan_disk(session, policy, only_reference=only_reference)
    if not session.has(run.reference(0)):
        _require_room_for_prompts(session, policy)
    has_adapters = session.config.policy.lora is not None
    if session.ranks.is_first and has_adapters and not run.reference(0).exists():
        require_same_initial_model(session, policy)
    position = _resume(session, policy)
    session.shard(policy)
    if session.ranks.is_first:
        note_origin(session)  # after all that may refuse the run
        note_planned_steps(session)
        count_attempt(run)
    return policy, position


def _require_room_for_prompts(session: Session, policy: LanguageModel) -> None:
    """Raises ContextError where a task does not fit into the context: now, and not in the step that
    plays it. Tried is the longest instruction, of the training tasks and of those of evaluations.
    """
    config, environments = session.config, session.environments
    training, evaluation, trained = config.training, config.evaluation, session.training_tasks()
    evaluated = tasks_of(environments, evaluation.split)[: evaluation.num_episodes]
    if training.eval_every is not None:
        evaluated = [*evaluated, *evaluated_while_training(config, environments, trained)]
    context = build_context(config.agent, policy, environments)
    for tasks in (trained, evaluated):
        longest = max(tasks, key=lambda task: len(task.instruction))
        request = EpisodeRequest(longest, derive_seed(config.seed, "longest-instruction"))
        for episode in begin_episodes([(0, request)], environments, context):
            environments.release(episode.environment)


def _plan_memory(session: Session, policy: LanguageModel) -> None:
    """Says what the run may need; raises ConfigError where it cannot have it."""
    max_turns = session.environments.properties.max_turns
    num_ranks = session.ranks.size
    plan = plan_memory(session.config, policy, max_turns=max_turns, num_ranks=num_ranks)
    available = free_memory(session.device) + plan.loaded
    if session.device.type == "cpu":  # the processes of this host share its memory
        available //= session.ranks.worker.local_size
    plan.require(available)
    session.progress.say(plan.sentence(available))


def _plan_disk(session: Session, policy: LanguageModel, *, only_reference: bool) -> None:
    """Says what the run writes; raises ConfigError where there is no room for it."""
    config, folder = session.config, session.run.path
    sizes = saved_sizes(config.policy, policy.model)
    plan = plan_disk(config, sizes, folder, only_reference=only_reference)
    free = free_disk(folder)
    plan.require(free, folder)
    if plan.missing >= 2**30:
        session.progress.say(plan.sentence(free))


def _initial_model(session: Session) -> Path | str:
    """Where the model is that training starts from: configured, or built here on the spot."""
    config, folder = session.config, session.run.initial
    if config.policy.path is not None:
        return config.policy.path
    if session.has(folder):
        return folder
    small, demonstrations = config.policy.small, config.warm_start.demonstrations
    are_imitated = (
        config.warm_start.enabled
        and demonstrations.num_steps > 0
        and demonstrations.recordings is None
    )
    phase = session.clock.timed(WARM_START[1]) if are_imitated else contextlib.nullcontext()
    with phase:  # within "loading"
        played = play_for_tokenizer(
            demonstrations, session.environments, seed=config.seed, progress=session.progress
        )
    if are_imitated:
        session.played.extend(played)
    tokenizer = train_tokenizer(texts_of(played), vocab_size=small.vocab_size)
    model = build_small_model(tokenizer, small, seed=config.seed)
    session.save_model(model, folder)
    return folder


def _resume(session: Session, policy: LanguageModel) -> Position:
    """Where training stands: the newest checkpoint's weights are in `policy` afterwards.

    Curves are cut back to that point, because what came after it will be computed again. Raises
    RanksError if a rank does not see the checkpoint of the first one: an older one would be mixed
    into it, and with weights in shares nothing else would notice.
    """
    run = session.run

    def newest() -> str | None:
        found = newest_position(run.checkpoints)
        return found and found.name

    name = session.ranks.from_first(newest, "the newest checkpoint")
    if name is not None:
        require_shared(run.checkpoints / name, session.ranks)
    loaded = load_latest_checkpoint(run.checkpoints, model=policy.model)
    found = loaded and loaded.name
    if found != name:
        raise RanksError(
            f"{session.ranks.worker.name} finds {found or 'none'} as the newest checkpoint in "
            f"{run.checkpoints.absolute()}, and rank 0 finds {name or 'none'}. Expected all hosts "
            "to see the same folder; see to it and continue with --resume"
        )
    position = loaded or Position(PHASES[0], 0)
    if session.ranks.is_first:
        require_references(run, position)
        require_checkpoints(run, position)
        for old in list_checkpoints(run.checkpoints)[: -session.config.training.keep_checkpoints]:
            remove(old)  # a kill came before, or within, their removal
        _cut_back_curves(run, position, session.progress)
    if loaded:
        session.progress.say(f"continuing after {position.phase}, step {position.step}")
    return position


def _cut_back_curves(run: RunDirectory, position: Position, progress: Progress) -> None:
    if not run.reference(0).exists():
        reached = (PHASES.index(position.phase), position.step)
        _keep_rows(run.warm_start, lambda row: (PHASES.index(row["phase"]), row["step"]) <= reached)
    version = position.reference_version
    last = {DISTILLATION: position.step, STAGE_TWO: math.inf}.get(position.phase, 0)
    _keep_rows(
        run.distillation, lambda row: row["reference_version"] <= version and row["step"] <= last
    )
    steps = position.step if position.phase == STAGE_TWO else 0
    num_rows = _keep_rows(run.metrics, lambda row: row["step"] <= steps)
    _keep_rows(run.rollouts, lambda row: row["step"] <= steps)
    if num_rows < steps:
        progress.say(
            f"{run.metrics} has rows of {num_rows} of the {counted(steps, 'step')} so far: what "
            "is missing is lost, and curves will lack it"
        )


def _keep_rows(path: Path, keep: Callable[[dict[str, Any]], bool]) -> int:
    """How many it has kept."""
    kept: list[dict[str, Any]] = []
    for number, row in enumerate(read_json_lines(path), 1):
        try:
            kept += [row] if keep(row) else []
        except (KeyError, TypeError, ValueError) as error:
            raise broken_line(path, number, f"does not say which step it is ({error!r})") from error
    if path.exists():
        write_json_lines_atomically(path, kept)
    return len(kept)


def _warm_start(session: Session, policy: LanguageModel, position: Position) -> None:
    """Runs what is left of the supervised phases; `references/0` exists afterwards."""
    has_reference = session.has(session.run.reference(0))
    if session.config.warm_start.enabled and not has_reference:
        if session.config.policy.freeze_embeddings and session.config.policy.path is not None:
            policy.freeze_embeddings()  # those of a model built here still have to be learned
        reached = PHASES.index(position.phase)
        config = session.config.warm_start
        phases = (
            (config.copy_curriculum.max_steps, copy_phase),
            (config.demonstrations.num_steps, demonstrations_phase),
        )
        for index, (num_steps, make_phase) in enumerate(phases):
            is_over = index < reached or (index == reached and position.finished)
            if is_over or num_steps == 0:
                continue
            start = position.step if index == reached else 0
            with session.clock.timed(WARM_START[index]):
                run_supervised_phase(session, policy, make_phase(session, policy), start=start)
    if not has_reference:
        session.save_model(policy, session.run.reference(0))
    _note_first_reference(session)


def _note_first_reference(session: Session) -> None:
    """Also that of an earlier attempt: a kill may have come between its weights and the note."""
    if session.ranks.is_first and "0" not in session.run.read_status().get("references", {}):
        note_reference(session.run, 0)


def _stage_one(session: Session, tasks: list[Task], *, beside: LanguageModel | None = None) -> None:
    """Samples the first reference, unless no values are needed or a store has them already.

    `beside` is the policy that goes on afterwards; its adapters may have the reference below them.
    """
    if session.config.values.store is not None or not session.config.has_stage_one:
        return
    if beside is not None and session.config.policy.lora is not None:
        reference = beside.without_adapters()
    else:
        reference = session.load_model(session.run.reference(0))
    with session.clock.timed("stage 1"):
        report = estimate_values(session, reference, tasks)
    note_values(session, report, version=0)


def _distillation(
    session: Session, policy: LanguageModel, tasks: list[Task], position: Position
) -> None:
    """Runs what is left of the distillation; `distilled` holds the policy afterwards."""
    run = session.run
    if not position.finished:
        with session.clock.timed(DISTILLATION):
            reference = reference_model(session, policy, version=0)
            note_samples(session, reference, tasks, version=0)
            distil(session, policy, reference, tasks, start=position.step)
    if not session.has(run.distilled):
        session.save_model(policy, run.distilled)


def _note_peak_memory(run: RunDirectory, device: torch.device) -> None:
    """The largest need of this or an interrupted attempt: of the GPU, or of the whole process."""
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
    else:
        unit = 1 if platform.system() == "Darwin" else 1024
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    run.note(peak_memory_bytes=max(peak, run.read_status().get("peak_memory_bytes", 0)))
