"""Stage 1, Stage 2 and a scripted episode score one golden trajectory identically."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest

from ragen_apo.agent.assembly import build_environments, build_proxy, sampling_conditions
from ragen_apo.agent.proxy import EpisodeRequest
from ragen_apo.policy.language_model import LanguageModel
from ragen_apo.stages.collect_values import collect_values
from ragen_apo.types import Trajectory, TurnFlag
from ragen_apo.values.estimator import SampleSchedule
from ragen_apo.values.store import ValueStore
from tests import factories

CONFIG = factories.config(
    "--environment.reward=slides",
    "--agent.format_penalty=-0.2",
    "--agent.invalid_action_penalty=-0.3",
    "--training.num_rows=2",
    text="environment: {name: shop}",
)
FORMAT_ERROR, INVALID = TurnFlag.FORMAT_ERROR.value, TurnFlag.INVALID_ACTION.value
SHOWN = TurnFlag.TARGET_SHOWN.value


def golden(model: LanguageModel) -> tuple[list[tuple[str, float, tuple[str, ...]]], EpisodeRequest]:
    """(response, reward, flags) of each turn, and the request."""
    task = build_environments(CONFIG.environment, CONFIG.agent).tasks("train")[0]
    goal = task.payload["product_id"]
    words = task.instruction.removesuffix(".").split(" buy ")[-1]
    turns = [
        ("no tags at all</answer>", -0.2, (FORMAT_ERROR,)),
        ("<think>t</think><answer>fly to 9</answer>", -0.3, (INVALID,)),
        (f"<think>t</think><answer>search {words}</answer>", 0.1, (SHOWN,)),
        (f"<think>t</think><answer>click {goal % 497 + 1}</answer>", -0.05, ()),
        (f"<think>t</think><answer>buy {goal}</answer>", 1.0, ()),
    ]
    return turns, EpisodeRequest(task, seed=5)


RETURN = -0.2 - 0.3 + 0.1 - 0.05 + 1.0


def assert_golden(trajectory: Trajectory, model: LanguageModel) -> None:
    turns, _ = golden(model)
    assert [(t.response, t.reward, t.flags) for t in trajectory.turns] == [
        (response, pytest.approx(reward), flags) for response, reward, flags in turns
    ]
    assert trajectory.success
    assert trajectory.episode_return == pytest.approx(RETURN)


def response_tokens(model: LanguageModel) -> list[int]:
    turns, _ = golden(model)
    return [token for response, _, _ in turns for token in model.tokenizer.encode(response)]


def test_stage_one_and_stage_two_score_it_identically(
    tiny_model: LanguageModel, say: Callable[..., None], tmp_path: Path
) -> None:
    _, request = golden(tiny_model)
    environments = build_environments(CONFIG.environment, CONFIG.agent)
    conditions = sampling_conditions(CONFIG, tiny_model, environments)
    say(tiny_model, response_tokens(tiny_model))
    with ValueStore(tmp_path / "values.sqlite") as store:
        collect_values(
            build_proxy(CONFIG, tiny_model, environments),
            store,
            [request.task],
            conditions=conditions,
            schedule=SampleSchedule(first=1, cap=1),
            seed=0,
        )
        (stage_one,) = store.trajectories(conditions, request.task.task_id)
        assert store.returns_by_task(conditions)[request.task.task_id] == [pytest.approx(RETURN)]
    say(tiny_model, response_tokens(tiny_model))
    agent = build_proxy(CONFIG, tiny_model, build_environments(CONFIG.environment, CONFIG.agent))
    (stage_two,) = agent.rollout(
        [request], temperature=CONFIG.sampling.temperature, policy_version="p"
    )
    assert_golden(stage_one, tiny_model)
    assert_golden(stage_two, tiny_model)
    same = {"policy_version": "", "seed": 0}
    assert dataclasses.replace(stage_one, **same) == dataclasses.replace(stage_two, **same)
    assert stage_one.episode_return == stage_two.episode_return


def test_every_setting_that_changes_a_return_changes_the_key(tiny_model: LanguageModel) -> None:
    def digest(*keys: str) -> str:
        config = factories.changed(CONFIG, *keys)
        return sampling_conditions(
            config, tiny_model, build_environments(config.environment, config.agent)
        ).digest

    changed = [
        digest("--environment.reward=fixed"),
        digest("--environment.max_turns=4"),
        digest("--agent.max_response_tokens=39"),
        digest("--agent.max_context_tokens=1000"),
        digest("--agent.format_penalty=-0.1"),
        digest("--agent.invalid_action_penalty=-0.1"),
        digest("--agent.system_prompt=rules"),
        digest("--agent.context={mode: last_turns, num_turns: 2}"),
        digest("--agent.context={mode: last_turns, num_turns: 3}"),
        digest("--agent.context={mode: single_turn, num_turns: 2}"),
        digest("--sampling.temperature=0.9"),
    ]
    assert len({digest(), *changed}) == len(changed) + 1
    assert digest("--training.num_rows=7") == digest()
