"""Evaluates a model behind an API; its folder is read by the report as that of a run.

evaluation.yaml    what the numbers depend on       answers.jsonl    every answer of the model
evaluation/        results.json, episodes.jsonl     run.json         versions, seconds

The same call goes on where an interrupted one stopped, and with more episodes than before. Another
setting needs another folder.
"""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ragen_apo
from ragen_apo.agent.assembly import build_environments, context_window
from ragen_apo.agent.chat import ChatEpisode, Question, play_chat_episodes
from ragen_apo.agent.context import system_prompt
from ragen_apo.agent.environment_manager import EnvironmentManager
from ragen_apo.config.api_model import ApiModelConfig
from ragen_apo.config.overrides import changes_in_words, differences, merge
from ragen_apo.config.rollouts import RolloutsConfig
from ragen_apo.config.yaml_text import dump_yaml, parse_yaml, read_yaml
from ragen_apo.distributed.ranks import Ranks
from ragen_apo.environments.base import tasks_of
from ragen_apo.environments.tools import schemas_of
from ragen_apo.errors import ApiError, RunDirectoryError
from ragen_apo.evaluation.evaluate import EvaluationPlan, play_baselines
from ragen_apo.evaluation.summary import episode_rows, results_document
from ragen_apo.files import check_writable, partial_files, write_text_atomically
from ragen_apo.phase_clock import SECONDS_NOTED_EVERY, PhaseClock
from ragen_apo.plural import counted
from ragen_apo.policy.chat_api.address import Address
from ragen_apo.policy.chat_api.answer import Answer
from ragen_apo.policy.chat_api.client import ChatClient, Tools
from ragen_apo.policy.chat_api.ledger import AnswerLedger, answer_key
from ragen_apo.progress import Progress
from ragen_apo.run_directory import RunDirectory
from ragen_apo.seeding import generator
from ragen_apo.types import TurnFlag


@dataclass(frozen=True)
class KeptAnswers:
    """A model whose answers are asked for once and then kept."""

    client: ChatClient
    ledger: AnswerLedger
    config: ApiModelConfig
    tools: Tools = ()
    """Schemas of the functions that it may call."""

    def answer(self, question: Question) -> Answer:
        """The kept answer, or the server's; see `ChatModel`."""
        key = answer_key(
            {
                # No empty extra_body: it is younger than answers that are kept.
                **self.config.api.model_dump(exclude_defaults=True),
                "temperature": self.config.evaluation.temperature,
                "episode": question.episode,
                "seed": question.seed,
                "turn": question.turn,
                "messages": [dict(message) for message in question.messages],
                **({"tools": list(self.tools)} if self.tools else {}),
            }
        )
        known = self.ledger.get(key)
        if known is not None:
            return known
        draws = generator(question.seed, "pauses", question.turn)
        answer = self.client.answer(question.messages, draws=draws, tools=self.tools)
        self.ledger.add(key, answer, episode=question.episode, turn=question.turn)
        return answer

    def stop(self) -> None:
        self.client.stop()


def evaluate_api_model(
    config: ApiModelConfig,
    folder: Path,
    client: ChatClient,
    *,
    concurrency: int,
    rollouts: RolloutsConfig,
    progress: Progress,
) -> dict[str, Any]:
    """Plays the episodes and writes results.json and episodes.jsonl; returns the results.

    Of `rollouts` what is said of environments is used. Raises RunDirectoryError for a folder that
    holds something else, ApiError if the server cannot be reached or refuses, OSError, before
    anything is asked, if nothing could be written.
    """
    run = RunDirectory(folder)
    _require_free(run)
    environments = build_environments(config.environment, config.agent, rollouts, say=progress.warn)
    plan = _plan(config)
    tasks_of(environments, plan.split)
    environments.scripted_policies()  # their outcome comes last
    requests = plan.requests(environments)
    if not run.api_config.exists():
        write_text_atomically(run.api_config, dump_yaml(config.written()))
    for file in (run.results, run.episodes):
        check_writable(file)
    with run.locked(), AnswerLedger(run.answers) as ledger:
        run.remove_leftovers()
        if len(ledger) or run.results.exists():
            _require_same_evaluation(run, config)
        else:
            write_text_atomically(run.api_config, dump_yaml(config.written()))
        server = Address(config.api.base_url).server
        kept = f"; kept already: {counted(len(ledger), 'answer')}" if len(ledger) else ""
        progress.say(
            f"{config.api.model} at {server} plays {counted(len(requests), 'episode')}{kept}."
        )
        progress.start("evaluation", len(requests))
        finished: list[ChatEpisode] = []
        clock = PhaseClock(run, Ranks())

        def note(episode: ChatEpisode) -> None:
            finished.append(episode)
            solved = sum(each.trajectory.success for each in finished)
            progress.update(len(finished), f"{solved} solved")
            clock.note(every=SECONDS_NOTED_EVERY)

        with clock.timed("evaluation"):
            episodes = play_chat_episodes(
                KeptAnswers(client, ledger, config, schemas_of(environments.tools)),
                environments,
                requests,
                system_prompt=system_prompt(
                    config.agent.system_prompt,
                    rules=environments.properties.rules,
                    tools=environments.tools,
                ),
                window=context_window(config.agent.context),
                concurrency=concurrency,
                policy_version=config.api.model,
                on_finished=note,
            )
        _require_a_turn(episodes, config)
        results = _results(config, episodes, environments)
        _write(run, config, episodes, results, data=environments.properties.data)
    return results


def _plan(config: ApiModelConfig) -> EvaluationPlan:
    section = config.evaluation
    return EvaluationPlan(section.split, section.num_episodes, section.temperature, config.seed)


def _require_free(run: RunDirectory) -> None:
    """Raises RunDirectoryError for a folder that is in use for something else."""
    if run.config.exists():
        raise RunDirectoryError(
            f"{run.path} is a run; the evaluation of a model behind an API needs a folder of its "
            "own: give another --out"
        )
    half = set(partial_files(run.path))  # a start that was killed
    is_free = not run.path.exists() or (run.path.is_dir() and not {*run.path.iterdir()} - half)
    if not (is_free or run.is_of_api):
        raise RunDirectoryError(
            f"{run.path} exists already and is no evaluation of a model behind an API; give "
            "another --out"
        )


_BEFORE_THERE_WERE_KEYS = {
    "agent": {"response_format": "think_answer"},
    "api": {"extra_body": {}},
}
"""What evaluations did that do not have these keys."""


def _require_same_evaluation(run: RunDirectory, config: ApiModelConfig) -> None:
    """Raises RunDirectoryError if the folder's answers are those of another evaluation.

    The number of episodes may change: what they have in common is the same.
    """
    try:
        before, _ = parse_yaml(read_yaml(run.api_config))
    except ValueError as error:
        raise RunDirectoryError(f"{run.api_config} {error}; give another --out") from error
    before = merge(_BEFORE_THERE_WERE_KEYS, before if isinstance(before, dict) else {})
    found = differences(before, config.written())
    changes = [each for each in found if each.key != "evaluation.num_episodes"]
    if changes:
        raise RunDirectoryError(
            f"{run.path} holds another evaluation: {changes_in_words(changes)}. Its episodes and "
            "these would not be one evaluation; give another --out"
        )


def _require_a_turn(episodes: Sequence[ChatEpisode], config: ApiModelConfig) -> None:
    """An evaluation in which nothing was ever answered says nothing about the model."""
    if not any(episode.answers for episode in episodes):
        raise ApiError(
            f"no task fits into the context of {config.api.model} together with an answer of "
            f"{config.api.max_tokens} tokens; lower --max-tokens, or serve the model with a longer "
            "context"
        )


def _results(
    config: ApiModelConfig, episodes: Sequence[ChatEpisode], environments: EnvironmentManager
) -> dict[str, Any]:
    plan = _plan(config)
    results = results_document(
        [episode.trajectory for episode in episodes],
        policy=config.api.model,
        split=plan.split,
        baselines=play_baselines(environments, plan),
        failure_words=environments.properties.failure_words,
    )
    return {
        **results,
        "evaluation": config.written()["evaluation"],
        "api": usage_summary(config, episodes),
    }


def usage_summary(config: ApiModelConfig, episodes: Sequence[ChatEpisode]) -> dict[str, Any]:
    """What the episodes have cost, and how many answers were none."""
    answers = [answer for episode in episodes for answer in episode.answers]
    turns = [turn for episode in episodes for turn in episode.trajectory.turns]
    return {
        "model": config.api.model,
        "server": Address(config.api.base_url).server,
        "answers": len(answers),
        "prompt_tokens": sum(answer.prompt_tokens or 0 for answer in answers),
        "completion_tokens": sum(answer.completion_tokens or 0 for answer in answers),
        "answers_without_usage": sum(answer.completion_tokens is None for answer in answers),
        "empty_answers": sum(
            not (answer.content.strip() or answer.tool_calls) for answer in answers
        ),
        "refused_answers": sum(answer.refused for answer in answers),
        "cut_off_answers": sum(TurnFlag.RESPONSE_TRUNCATED.value in turn.flags for turn in turns),
        "format_errors": sum(TurnFlag.FORMAT_ERROR.value in turn.flags for turn in turns),
        "impossible_actions": sum(TurnFlag.INVALID_ACTION.value in turn.flags for turn in turns),
        "episodes_out_of_context": sum(episode.context_full for episode in episodes),
    }


def _write(
    run: RunDirectory,
    config: ApiModelConfig,
    episodes: Sequence[ChatEpisode],
    results: dict[str, Any],
    *,
    data: str,
) -> None:
    rows = episode_rows([each.trajectory for each in episodes], policy=config.api.model)
    for row, episode in zip(rows, episodes, strict=True):
        for turn, answer in zip(row["turns"], episode.answers, strict=True):
            turn["num_prompt_tokens"] = answer.prompt_tokens
            turn["num_response_tokens"] = answer.completion_tokens
    run.write_evaluation(results, rows)
    write_text_atomically(run.api_config, dump_yaml(config.written()))
    versions = {
        "ragen_apo": ragen_apo.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
    }
    run.note(versions=versions, **({"data": data} if data else {}))
