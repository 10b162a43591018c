"""What a configuration asks of machine, model and environment, checked before anything is written.

`check_run_inputs` consumes a configuration and its environment. It raises ConfigError with the key
that asks for something that is missing: training tasks, the split of evaluations, a teacher or
recordings. It also refuses a search that the environment does not allow, and weights that training
could not change. `caveats` says what is allowed but only partly right. `check_start` checks
everything else that can be known before a run directory is made.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ragen_apo.agent.assembly import build_environments, context_of_tokenizer, set_up_machine
from ragen_apo.agent.environment_manager import tools_to_call
from ragen_apo.config import RunConfig
from ragen_apo.config.named_code import in_one_sentence
from ragen_apo.config.rollouts import RolloutsConfig
from ragen_apo.distributed.sharding import require_fully_shard
from ragen_apo.distributed.torchrun import this_worker
from ragen_apo.environments.answers import problem_with_tasks
from ragen_apo.environments.base import HasTasks, opened_environment, policies_of, tasks_of
from ragen_apo.environments.human.recordings import select_recordings
from ragen_apo.errors import ConfigError, EnvironmentFaultError
from ragen_apo.plural import counted
from ragen_apo.policy.inference_server.configured import read_facts, servers_of
from ragen_apo.policy.language_model import check_model, load_tokenizer
from ragen_apo.policy.lora import require_peft
from ragen_apo.printable import shortened
from ragen_apo.stages.search import require_searchable
from ragen_apo.task_order import missing_categories, training_tasks, untrained_first
from ragen_apo.tracking.run_tracking import require_trackers
from ragen_apo.types import Task
from ragen_apo.values.regression import NUM_FOLDS
from ragen_apo.values.store import ValueStore

MENTIONED_SHARE = 0.1
"""Of a split's tasks: if categories that no evaluation plays have more, a run says so."""


def check_start(config: RunConfig) -> None:
    """Refuses what can be refused in a moment, before there is a run directory.

    Raises ConfigError, ModelError, ServerError, ValueStoreError or EnvironmentDataError.
    """
    set_up_machine(config.machine)
    with opened_environment(config.environment.name, config.environment.options) as environment:
        check_run_inputs(config, environment)
    if config.values.store is not None and this_worker().rank == 0:  # on its host alone, perhaps
        ValueStore(config.values.store, create=False).close()
    if config.policy.path is not None:
        check_model(
            config.policy.path,
            max_context_tokens=config.agent.max_context_tokens,
            trust_remote_code=config.policy.trust_remote_code,
            revision=config.policy.revision,
        )
        _check_template(config.policy.path, config)
    if config.rollouts.engine == "vllm":
        servers_of(config.rollouts)  # which need a key, perhaps
        if config.policy.path is not None:  # one of a small model is started after it was made
            describe_servers(config.rollouts, num_tokens=config.agent.max_context_tokens)
    if config.policy.lora is not None:
        require_peft()


def _check_template(path: str, config: RunConfig) -> None:
    """Raises ModelError for a chat template that tools cannot be called with, or that does not read
    what it should be told.
    """
    agent = config.agent
    if agent.calls_tools or agent.template_options:
        tokenizer = load_tokenizer(
            path,
            trust_remote_code=config.policy.trust_remote_code,
            revision=config.policy.revision,
            template_options=agent.template_options,
        )
        context_of_tokenizer(agent, tokenizer, build_environments(config.environment, agent))


def describe_servers(settings: RolloutsConfig, *, num_tokens: int) -> list[str]:
    """What the servers that are to play say of themselves, a sentence each; none for `local`.

    Those that cannot play contexts of `num_tokens` are left out. Raises ServerError if none can.
    """
    if settings.engine != "vllm":
        return []
    return [
        f"rollouts by vLLM {facts.version} at {url}: {facts.model}, contexts of "
        f"{facts.max_context_tokens} tokens"
        for url, facts in read_facts(settings, num_tokens=num_tokens).items()
    ]


def check_run_inputs(
    config: RunConfig, environment: HasTasks, *, recordings_are_kept: bool = False
) -> None:
    """Raises ConfigError where the environment lacks something that the run will need, and for
    weights in a number format that training cannot change.

    `recordings_are_kept`: the run has a copy of its recordings, so the configured ones may be gone.
    """
    name, training, search = config.environment.name, config.training, config.evaluation.search
    _check_number_format(config)
    require_trackers(config.tracking)
    _check_ranks(config)
    _check_tasks(config, environment)
    tasks = training_tasks(environment, name=name, max_tasks=training.max_tasks, seed=config.seed)
    _check_choice_of_best(config, environment, tasks)
    _check_teacher(config, environment)
    _check_chance(config, environment)
    require_searchable(search, environment, num_rows=training.num_rows)
    by_regression = search is not None and search.rank_by == "regression"
    if by_regression and not config.has_stage_one:
        raise ConfigError(
            "evaluation.search.rank_by regression is fitted to episodes of Stage 1, which "
            f"algorithm {config.algorithm.short_name} without distillation does not sample; set "
            "rank_by to likelihood, and search by regression after `ragen-apo estimate-values`"
        )
    if by_regression and len(tasks) < NUM_FOLDS:
        raise ConfigError(
            f"evaluation.search.rank_by regression needs episodes of at least {NUM_FOLDS} training "
            f"tasks, and there are {len(tasks)} (training.max_tasks); set rank_by to likelihood"
        )
    check_tools(config, environment)
    path = config.warm_start.demonstrations.recordings
    if config.warm_start.enabled and path is not None and not recordings_are_kept:
        _check_recordings(Path(path), environment)


def check_tools(config: RunConfig, environment: HasTasks) -> None:
    """Raises ConfigError where tools should be called, and there are none or none can be."""
    if not config.agent.calls_tools:
        return
    tools_to_call(environment.properties)
    if config.policy.path is None:
        raise ConfigError(
            "agent.response_format is tool_call, and the small model's chat template knows no "
            "tools; set policy.path to a model that was trained to call them, such as "
            "Qwen/Qwen3-0.6B, or agent.response_format to think_answer"
        )


def _check_number_format(config: RunConfig) -> None:
    """Adapters are float32 whatever the weights below them are, which then never change."""
    if config.machine.dtype == "bfloat16" and config.policy.lora is None:
        raise ConfigError(
            "machine.dtype is bfloat16 and all weights are trained: an update is "
            "smaller than the distance between two such numbers and would mostly be lost. Set "
            "machine.dtype to float32 and machine.mixed_precision to bfloat16, which computes in "
            "bfloat16 and keeps the weights in float32; or train adapters (policy.lora)"
        )


def _check_ranks(config: RunConfig) -> None:
    """Raises ConfigError for what several ranks cannot do."""
    size = this_worker().size
    if size == 1:
        return
    if config.machine.sharding == "full":
        require_fully_shard()
    rollouts = config.rollouts
    if config.algorithm.keeps_a_copy and rollouts.engine == "vllm" and rollouts.ahead:
        raise ConfigError(
            f"rollouts.ahead is true with an algorithm.lag, and torchrun has started {size} "
            "processes: servers play ahead for one process only, as ranks meet in training and in "
            "rollouts, and cannot do both at a time. Set rollouts.ahead to false; the episodes are "
            "the same"
        )


def _check_tasks(config: RunConfig, environment: HasTasks) -> None:
    """Raises ConfigError where a split of evaluations has no tasks.

    And EnvironmentFaultError for tasks, also of training, that would break hours later, when they
    are stored.
    """
    name = config.environment.name
    named = {"evaluation.split": config.evaluation.split}
    if config.training.eval_split is not None:
        named["training.eval_split"] = config.training.eval_split
    with in_one_sentence(name, "tasks"):
        by_split = {"train": environment.tasks("train")}
        for key, split in named.items():
            try:
                by_split[split] = tasks_of(environment, split)
            except ConfigError as error:
                raise ConfigError(f"{key}: {error}") from error
    for each, tasks in by_split.items():
        if problem := problem_with_tasks(tasks, environment.properties.name):
            raise EnvironmentFaultError(f"the environment {name!r}: tasks({each!r}): {problem}")


def evaluated_while_training(
    config: RunConfig, environment: HasTasks, trained: Sequence[Task]
) -> list[Task]:
    """What evaluations during training play; `trained` are the tasks that are trained on."""
    tasks = tasks_of(environment, config.split_while_training)
    if config.training.eval_split is not None:
        tasks = untrained_first(tasks, {task.task_id for task in trained})
    return list(tasks[: config.training.eval_episodes])


def _check_choice_of_best(
    config: RunConfig, environment: HasTasks, trained: Sequence[Task]
) -> None:
    """Weights must not be chosen by the tasks that the final evaluation plays."""
    training, evaluation = config.training, config.evaluation
    if not training.keep_best:
        return
    split = config.split_while_training
    chosen_by = {task.task_id for task in evaluated_while_training(config, environment, trained)}
    played = tasks_of(environment, evaluation.split)[: evaluation.num_episodes]
    used = {split, evaluation.split, "all"}
    others = " or ".join(each for each in environment.properties.splits if each not in used)
    if shared := sum(task.task_id in chosen_by for task in played):
        raise ConfigError(
            f"training.keep_best chooses weights by {counted(len(chosen_by), 'task')} of the split "
            f"{split!r} (training.eval_split), and {shared} of them are played in the evaluation "
            f"after training (evaluation.split {evaluation.split!r}), whose success would be too "
            f"high; set training.eval_split to a split without them: {others}"
        )


def _check_teacher(config: RunConfig, environment: HasTasks) -> None:
    """Demonstrations need the teacher; the words of a tokenizer can come from `random`."""
    demonstrations = config.warm_start.demonstrations
    demonstrates = config.warm_start.enabled and demonstrations.recordings is None
    if not demonstrates and config.policy.path is not None:
        return
    policies = policies_of(environment)
    if demonstrations.teacher in policies or (not demonstrates and "random" in policies):
        return
    there = ", ".join(sorted(policies)) or "none at all"
    if not demonstrates:
        raise ConfigError(
            f"the environment {config.environment.name!r} has no scripted policy `random` or "
            f"{demonstrations.teacher!r}; it has {there}. A small model's tokenizer is made of the "
            "words of such episodes: give the environment one of them, or name a pretrained model "
            "as policy.path"
        )
    raise ConfigError(
        f"warm_start.demonstrations.teacher: the environment {config.environment.name!r} has no "
        f"scripted policy {demonstrations.teacher!r}; it has {there}"
    )


def _check_chance(config: RunConfig, environment: HasTasks) -> None:
    try:
        config.algorithm.check_environment(deterministic=environment.properties.deterministic)
    except ValueError as error:
        raise ConfigError(f"the environment {config.environment.name!r}: {error}") from error


def caveats(config: RunConfig, environment: HasTasks) -> list[str]:
    """What the run may do, and what its result is then not, a sentence each."""
    trained: list[Task] = []
    if config.training.eval_split is not None:
        trained = training_tasks(
            environment,
            name=config.environment.name,
            max_tasks=config.training.max_tasks,
            seed=config.seed,
        )
    found = _unplayed_categories(config, environment, trained) + _untold_form(config)
    if config.training.keep_best:
        ids = {task.task_id for task in trained}
        chosen_by = evaluated_while_training(config, environment, trained)
        if known := sum(task.task_id in ids for task in chosen_by):
            found.append(
                f"training.keep_best chooses by {counted(len(chosen_by), 'task')}, of which "
                f"{known} are trained on: it prefers what knows them by heart. A smaller "
                "training.max_tasks leaves more of the split out of training"
            )
    if config.distillation.enabled and not environment.properties.deterministic:
        found.append(
            f"distillation: the environment {config.environment.name!r} is stochastic, and an "
            "episode that was lucky is imitated as if it were good, so that risks weigh too much; "
            "less so with a larger distillation.beta (docs/algorithm.md)"
        )
    return found


def _untold_form(config: RunConfig) -> list[str]:
    """Without demonstrations a model that is told another form makes format errors only."""
    agent = config.agent
    if config.warm_start.enabled:
        return []
    is_own = agent.system_prompt not in ("none", "rules", "rules_and_format")
    if not is_own or agent.calls_tools or "<answer>" in agent.system_prompt:
        return []
    return [
        "agent.system_prompt does not say how to answer: an action is read from "
        "<think>...</think><answer>...</answer> and from no other form"
    ]


def _unplayed_categories(
    config: RunConfig, environment: HasTasks, trained: Sequence[Task]
) -> list[str]:
    """Evaluations play the first tasks of a split, and these may all be of one kind.

    Rare categories, which a mixed order may leave out by chance, are not mentioned.
    """
    training, evaluation = config.training, config.evaluation
    first = tasks_of(environment, evaluation.split)[: evaluation.num_episodes]
    plays = {"evaluation.num_episodes": (evaluation.split, evaluation.num_episodes, first)}
    if training.eval_every is not None:
        first = evaluated_while_training(config, environment, trained)
        split = config.split_while_training
        plays["training.eval_episodes"] = (split, training.eval_episodes, first)
    found = []
    for key, (split, size, first) in plays.items():
        tasks = tasks_of(environment, split)
        played = {task.category for task in first}
        unplayed = [task.category for task in tasks if task.category not in played]
        if len(unplayed) > MENTIONED_SHARE * len(tasks):
            names = shortened(", ".join(sorted(set(unplayed))), 100)
            found.append(
                f"{key}: the first {size} of the {len(tasks)} tasks of the split {split!r} have "
                f"none of the category {names}, so no result counts these. Raise it to "
                f"{len(tasks)}, or let the environment list its tasks in a mixed order"
            )
    return found


def _check_recordings(path: Path, environment: HasTasks) -> None:
    chosen = select_recordings(path, environment)
    tasks = [recording.episode.task for recording in chosen.recordings]
    if missing := missing_categories(tasks, environment.properties.category_weights):
        raise ConfigError(
            f"warm_start.demonstrations.recordings: {path} has no episode of "
            f"{', '.join(missing)}, which should come up by its weight; record one, or leave it out"
        )
