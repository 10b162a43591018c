"""A policy at work plays what rollouts and evaluations play; a person changes only his turns."""

import contextlib
import gc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ragen_apo.agent.assembly import build_proxy
from ragen_apo.environments.shop import ShopEnvironment
from ragen_apo.errors import RunDirectoryError
from ragen_apo.evaluation.evaluate import EvaluationPlan
from ragen_apo.policy.recorded_passes import RecordedPasses
from ragen_apo.policy.scoring import score_tokens
from ragen_apo.run_directory import RunDirectory
from ragen_apo.session import Session
from ragen_apo.stages.stored_values import reference_values
from ragen_apo.types import Turn
from ragen_apo.web.at_work.policies import policies_of
from ragen_apo.web.at_work.worker import Workplace
from ragen_apo.web.at_work.writer import Writer, draws_of_turn
from tests import factories
from tests.web.watching import Watcher, workplace_of, workplace_with


@pytest.fixture
def workplace(finished_run: Path) -> Iterator[Workplace]:
    with workplace_of(finished_run) as workplace:
        yield workplace


@pytest.fixture
def watcher(workplace: Workplace) -> Watcher:
    return Watcher(workplace)


def shown(turn: Turn) -> dict[str, Any]:
    """What an evaluation's file tells of a turn."""
    names = ("observation", "response", "thought", "action", "reward")
    return {
        **{name: getattr(turn, name) for name in names},
        "flags": list(turn.flags),
        "num_prompt_tokens": len(turn.prompt_token_ids),
        "num_response_tokens": len(turn.response_token_ids),
    }


@pytest.mark.slow
def test_a_greedy_episode_is_the_evaluated_episode_of_the_task(
    watcher: Watcher, finished_run: Path
) -> None:
    rows = factories.rows(RunDirectory(finished_run).episodes)
    assert len(rows) == 3  # the tasks of the split
    for task, row in enumerate(rows):
        watcher.begin(task=task)
        watcher.send("/work/run")
        played = watcher.visit.played
        assert [shown(turn) for turn in played.turns] == row["turns"]
        assert played.outcome is not None
        assert played.outcome.success == row["success"]
        assert played.stop_reason is not None
        assert played.stop_reason.value == row["stop_reason"]
        assert played.episode.observation == row["final_observation"]


@pytest.mark.slow
def test_an_environment_is_closed_once_its_episode_is_left(
    watcher: Watcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    gc.collect()  # what other tests have left
    closed: list[int] = []
    monkeypatch.setattr(
        ShopEnvironment, "close", lambda self: closed.append(id(self)), raising=False
    )
    watcher.begin(task=1)
    watcher.send("/work/run")
    used = [id(watcher.visit.played.episode.environment)]
    watcher.send("/work/back", turn=2)
    gc.collect()  # what a template was given refers to itself
    assert closed == used
    watcher.send("/work/run")
    used.append(id(watcher.visit.played.episode.environment))
    watcher.workplace.visits.close(watcher.visit.id)
    gc.collect()
    assert closed == used


@pytest.mark.slow
@pytest.mark.parametrize("draw", [0, 2])
def test_a_sampled_episode_has_the_tokens_of_the_rollout_with_its_seed(
    draw: int, watcher: Watcher, session: Session
) -> None:
    proxy = build_proxy(
        session.config, session.load_model(session.run.policy), session.environments
    )
    plan = EvaluationPlan("train", 3, temperature=1.0, seed=session.config.seed)
    requests = plan.requests(proxy.environments, repeat=draw)
    rollout = proxy.rollout(requests, temperature=1.0, policy_version="trained")[2]
    watcher.begin(split="train", task=2, temperature=1.0, draw=draw)
    watcher.send("/work/run")
    played = watcher.visit.played
    assert [turn.response_token_ids for turn in played.turns] == [
        turn.response_token_ids for turn in rollout.turns
    ]
    for mine, theirs in zip(played.turns, rollout.turns, strict=True):
        assert mine.logprobs == pytest.approx(theirs.logprobs, abs=1e-4)
        same = {"logprobs": ()}
        assert replace(mine, **same) == replace(theirs, **same)


@pytest.mark.slow
def test_after_the_way_back_the_policy_writes_the_same_again(watcher: Watcher) -> None:
    watcher.begin(temperature=1.0)
    watcher.send("/work/run")
    before = list(watcher.visit.played.turns)
    assert len(before) == 3
    watcher.send("/work/back", turn=2)
    assert watcher.visit.played.turns == before[:1]
    watcher.send("/work/run")
    assert [turn.response_token_ids for turn in watcher.visit.played.turns] == [
        turn.response_token_ids for turn in before
    ]


@pytest.mark.slow
def test_a_turn_by_hand_is_executed_and_the_policy_goes_on_with_the_numbers_of_its_turn(
    watcher: Watcher, session: Session
) -> None:
    watcher.begin(temperature=1.0)
    watcher.send("/work/take", thought="look", action="search story")
    watcher.send("/work/act")
    played = watcher.visit.played
    first, second = played.turns
    assert (first.thought, first.action, first.response) == (
        "look",
        "search story",
        "<think>look</think><answer>search story</answer>",
    )
    assert first.logprobs == (0.0,) * len(first.response_token_ids)
    assert second.observation.startswith("Found 1 result.")
    assert played.by_hand == (True, False)
    writer = Writer(session.load_model(session.run.policy), session.config.agent)
    most = session.config.agent.max_response_tokens
    draws = draws_of_turn(played.episode.request.seed, 2, max_response_tokens=most)
    context = first.prompt_token_ids + first.response_token_ids + second.prompt_token_ids
    response = writer.write(context, draws, temperature=1.0, wrote=lambda *_: True)
    assert response is not None
    assert response.token_ids == second.response_token_ids


def test_a_whole_response_is_read_as_the_policys(watcher: Watcher) -> None:
    watcher.begin()
    watcher.send("/work/take", response="no form at all")
    (turn,) = watcher.visit.played.turns
    assert (turn.response, turn.action, turn.flags) == ("no form at all", "", ("format_error",))
    assert turn.reward < 0


@pytest.mark.slow
def test_a_response_that_is_broken_off_leaves_the_writer_as_it_was(session: Session) -> None:
    model = session.load_model(session.run.policy)
    prompt = tuple(range(5, 45))

    def written(writer: Writer, *, most: int = 100) -> tuple[object, list[int]]:
        tokens: list[int] = []

        def wrote(token: int, _: float) -> bool:
            tokens.append(token)
            return len(tokens) < most

        draws = draws_of_turn(7, 1, max_response_tokens=20)
        return writer.write(prompt, draws, temperature=1.0, wrote=wrote), tokens

    fresh, tokens = written(Writer(model, session.config.agent))
    writer = Writer(model, session.config.agent)
    assert written(writer, most=3) == (None, tokens[:3])
    assert written(writer) == (fresh, tokens)
    assert written(writer)[1] == tokens  # with the prompt in the cache


@pytest.mark.slow
def test_no_recorded_pass_is_left_after_a_turn(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its row stays open, and the converted weights that the pass has read are freed."""
    model = session.load_model(session.run.policy)
    writer = Writer(model, session.config.agent)
    events: list[str] = []
    forget, constant_weights = RecordedPasses.forget, model.constant_weights

    def noted(passes: RecordedPasses) -> None:
        events.append("forgotten")
        forget(passes)

    @contextlib.contextmanager
    def constant() -> Iterator[None]:
        with constant_weights():
            yield
        events.append("freed")

    monkeypatch.setattr(RecordedPasses, "forget", noted)
    monkeypatch.setattr(model, "constant_weights", constant)
    for number in (1, 2):
        draws = draws_of_turn(7, number, max_response_tokens=20)
        assert writer.write(tuple(range(5, 45)), draws, temperature=1.0, wrote=lambda *_: True)
        assert "freed" in events
        assert events[-1] == "forgotten"
        events.clear()


@pytest.mark.slow
def test_another_policy_answers_the_same_prompt_and_scores_the_turn(
    watcher: Watcher, session: Session
) -> None:
    watcher.begin(split="train", task=2, temperature=1.0)
    watcher.send("/work/run")
    watcher.send("/work/compare", turn=2, policy="reference")
    played = watcher.visit.played
    said = played.comparisons[2]
    reference = session.load_model(session.run.reference(0))
    first, second = played.turns[:2]
    context = first.prompt_token_ids + first.response_token_ids + second.prompt_token_ids
    tokens = torch.tensor([context + second.response_token_ids])
    is_sampled = torch.arange(tokens.shape[1])[None] >= len(context)
    with torch.no_grad():
        scores = score_tokens(reference, tokens, is_sampled)
    assert said.logprobs == pytest.approx(scores.logprobs_BT[is_sampled].tolist(), abs=1e-4)
    most = session.config.agent.max_response_tokens
    draws = draws_of_turn(played.episode.request.seed, 2, max_response_tokens=most)
    own = Writer(reference, session.config.agent).write(
        context, draws, temperature=1.0, wrote=lambda *_: True
    )
    assert own is not None
    assert said.response.token_ids == own.token_ids
    log_ratio = sum(second.logprobs) - sum(said.logprobs)
    assert f"of the turn: {log_ratio:+.2f}" in watcher.text


@pytest.mark.slow
def test_the_state_of_a_training_task_has_v_star_and_that_of_another_task_has_none(
    watcher: Watcher, session: Session
) -> None:
    task = session.environments.tasks("train")[0]
    reference = session.load_model(session.run.reference(0))
    v_star = reference_values(session, reference, [task]).tasks[task.task_id]
    watcher.begin(split="train", task=0)
    watcher.send("/work/act")
    watcher.send("/work/compare", turn=1, policy="reference")
    assert watcher.visit.played.comparisons[1].v_star == pytest.approx(v_star)
    assert f"V* {v_star:.3f}" in watcher.text
    watcher.begin(split="test")
    watcher.send("/work/act")
    watcher.send("/work/compare", turn=1, policy="reference")
    assert watcher.visit.played.comparisons[1].v_star is None
    assert "The value store has no V* of this state under reference" in watcher.text


@pytest.mark.slow
def test_a_turn_by_hand_can_be_asked_about_too(watcher: Watcher) -> None:
    watcher.begin()
    watcher.send("/work/take", action="search story")
    watcher.send("/work/compare", turn=1, policy="trained")
    said = watcher.visit.played.comparisons[1]
    assert all(logprob < 0 for logprob in said.logprobs)
    assert "Your response, as trained sees it" in watcher.text


class Forgetful(ShopEnvironment):
    """Says each time how many episodes it has begun, which no replay repeats."""

    num_begun = 0

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        Forgetful.num_begun += 1
        observation, *rest = super().step(action)
        return f"{observation} ({Forgetful.num_begun} so far)", *rest


def test_the_way_back_is_refused_where_the_environment_does_not_repeat_itself(
    session: Session,
) -> None:
    with workplace_with(lambda: Forgetful(num_products=24, max_turns=3), session) as workplace:
        watcher = Watcher(workplace)
        watcher.begin()
        watcher.send("/work/take", action="search story")
        watcher.send("/work/take", action="search tea")
        before = list(watcher.visit.played.turns)
        watcher.send("/work/back", turn=2)
        assert "the way back to turn 2 is not open" in watcher.text
        assert "did something else in turn 1" in watcher.text
        assert watcher.visit.played.turns == before
        watcher.send("/work/back", turn=1)  # nothing was answered before it
        assert watcher.visit.played.turns == []


def test_a_run_offers_the_policies_that_it_has_by_now(finished_run: Path, tmp_path: Path) -> None:
    names = list(policies_of(RunDirectory(finished_run)))
    assert names == ["trained", "reference", "reference 1", "initial"]
    run = RunDirectory(tmp_path)
    run.reference(0).mkdir(parents=True)
    run.reference(10).mkdir()
    run.reference(2).mkdir()
    (run.reference(0).parent / "half.partial").mkdir()
    run.distilled.mkdir()
    assert list(policies_of(run)) == ["distilled", "reference", "reference 2", "reference 10"]


def test_a_run_without_a_model_says_how_to_go_on(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match="no model yet; go on with `ragen-apo train"):
        policies_of(RunDirectory(tmp_path))
