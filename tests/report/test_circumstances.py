"""What is special about how a run was made is said in the page, the slides and the analysis."""

import dataclasses
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard
from pptx import Presentation

from ragen_apo.report.failure_analysis import failure_analysis
from ragen_apo.report.findings import headline, key_sentences
from ragen_apo.report.load import RunData, load_run
from ragen_apo.report.model_card import model_card
from ragen_apo.report.page import page
from ragen_apo.report.panels import DISTILLATION_PANEL
from ragen_apo.report.plots import panels
from ragen_apo.report.slides import slides

pytestmark = pytest.mark.usefixtures("undrawn")


def text_of_slides(run: RunData) -> str:
    presentation: Any = Presentation(io.BytesIO(slides(run)))
    shapes = [shape for slide in presentation.slides for shape in slide.shapes]
    return "\n".join(shape.text_frame.text for shape in shapes if shape.has_text_frame)


@pytest.mark.parametrize(
    ("record", "sentence"),
    [
        ({"attempts": 2}, "The run was resumed once."),
        ({"attempts": 4}, "The run was resumed 3 times."),
        (
            {"early_stop": {"step": 12, "reason": "kl_per_sequence was above 3"}},
            "Training stopped early, after step 12 of 60: kl_per_sequence was above 3.",
        ),
        (
            {"best": {"step": 5, "success_rate": 0.7, "split": "train"}},
            "The policy has the weights after step 5, those of the best evaluation during "
            "training, on the split ‘train’ (70.0%).",
        ),
    ],
)
def test_the_whole_report_says_it(
    record: dict[str, Any], sentence: str, build_run: Callable[..., Path]
) -> None:
    run = dataclasses.replace(load_run(build_run()), record=record)
    assert sentence in key_sentences(run)
    for text in (page(run, curves=[]), text_of_slides(run), failure_analysis(run)):
        assert sentence in text


def test_a_distillation_is_said_and_drawn(build_run: Callable[..., Path]) -> None:
    rows = [
        {"reference_version": version, "step": step, "loss": 0.3}
        for version in (0, 1)
        for step in (1, 2, 3)
    ]
    plain = load_run(build_run())
    config = {**plain.config, "distillation": {"enabled": True, "beta": 0.2}}
    run = dataclasses.replace(plain, config=config, distillation=[*rows, {"eval_success_rate": 1}])
    sentence = (
        "Before its first step the policy imitated the reference’s own good episodes "
        "(distillation at beta 0.2, 3 updates)."
    )
    for text in (page(run, curves=[]), text_of_slides(run), failure_analysis(run)):
        assert sentence in text
    assert not any("imitated the reference" in each for each in key_sentences(plain))
    assert not any("With that alone" in each for each in key_sentences(run))
    baselines = {**plain.results["baselines"], "distilled": {"success_rate": 0.625}}
    played = dataclasses.replace(run, results={**plain.results, "baselines": baselines})
    sentence += " With that alone it solves 62.5%."
    for text in (page(played, curves=[]), text_of_slides(played), failure_analysis(played)):
        assert sentence in text
    (drawn,) = [rows for panel, rows in panels(run) if panel is DISTILLATION_PANEL]
    assert [row["step"] for row in drawn] == [1, 2, 3], "of the first reference alone"
    assert DISTILLATION_PANEL not in [panel for panel, _ in panels(plain)]


def test_new_references_are_said_as_the_kl_is_to_the_newest_one(
    build_run: Callable[..., Path],
) -> None:
    plain = load_run(build_run())
    versions = (0, 0, 1, 1, 1, 2)
    many = [{"step": step, "reference_version": step - 1} for step in range(1, 12)]
    rows = [
        {"step": step, "reference_version": version} for step, version in enumerate(versions, 1)
    ]
    run = dataclasses.replace(plain, metrics=rows)
    sentence = "The policy became the new reference 2 times (step 2, 5); from there on the KL"
    for text in (page(run, curves=[]), text_of_slides(run), failure_analysis(run)):
        assert sentence in text
    assert not any("new reference" in each for each in key_sentences(plain))
    often = key_sentences(dataclasses.replace(plain, metrics=many))
    assert any("new reference 10 times (step 1, 2, 3, …, 10); from" in each for each in often)


@pytest.mark.parametrize("attempts", [None, 1, "2", float("nan")])
def test_a_run_of_one_process_says_nothing(attempts: Any, build_run: Callable[..., Path]) -> None:
    run = dataclasses.replace(load_run(build_run()), record={"attempts": attempts})
    assert not any("resumed" in each for each in key_sentences(run))


def test_words_of_the_environment_cannot_begin_a_section_of_the_analysis(
    build_run: Callable[..., Path],
) -> None:
    record = {"data": "a catalogue\n\n# Nothing failed"}
    run = dataclasses.replace(load_run(build_run()), record=record)
    assert "\n# Nothing failed" not in failure_analysis(run)
    assert "a catalogue  # Nothing failed" in failure_analysis(run)


def test_full_contexts_are_said_because_baselines_have_none(build_run: Callable[..., Path]) -> None:
    run = load_run(build_run())
    assert not any("context was full" in sentence for sentence in key_sentences(run))
    cut = dataclasses.replace(run, results={**run.results, "episodes_out_of_context": 2})
    (sentence,) = [each for each in key_sentences(cut) if "context was full" in each]
    assert sentence.startswith(f"2 of {run.num_episodes} episodes ended")


def test_failures_say_how_many_of_them_a_full_context_ended(
    build_run: Callable[..., Path],
) -> None:
    run = load_run(build_run())
    assert "because the context was full" not in failure_analysis(run)
    pattern = next(row["failure"] for row in run.episodes if row["failure"])
    failed = [row for row in run.episodes if row["failure"] == pattern]
    full = {**failed[0], "stop_reason": "the context was full"}
    rows = [full if row is failed[0] else row for row in run.episodes]
    cut = dataclasses.replace(run, episodes=rows)
    for text in (page(cut, curves=[]), failure_analysis(cut)):
        assert f"Of {len(failed)} episodes, 1 ended because the context was full." in text


def test_a_search_is_not_taken_for_the_policy(build_run: Callable[..., Path]) -> None:
    run = load_run(build_run())
    alone = {"success_rate": 0.5, "avg_reward": 0.4, "avg_steps": 5.0, "avg_tokens": 90.0}
    search = {"label": "best of 4, by the reward", "uses_reward": True, "avg_tokens": 400.0}
    baselines = {"without search": alone, **run.results["baselines"]}
    results = {**run.results, "search": search, "baselines": baselines}
    run = dataclasses.replace(run, results=results)
    assert "with best of 4, by the reward solves" in headline(run)
    bound = "in which the reward chose: an upper bound, which no deployed agent reaches."
    assert any(bound in sentence for sentence in key_sentences(run))
    assert bound in failure_analysis(run)
    assert "points against the reference" in key_sentences(run)[0]
    (result,) = ModelCard(model_card(run)).data.eval_results or []
    assert result.metric_value == 0.5, "what the published model does by itself"


@pytest.mark.parametrize("known", [0.0, None, 0.25])
def test_tasks_whose_rewards_a_search_knew_are_not_called_held_out(
    known: float | None, build_run: Callable[..., Path]
) -> None:
    run = load_run(build_run())
    search = {"label": "beam of 2", "uses_reward": False, "known_move_share": known}
    run = dataclasses.replace(run, results={**run.results, "search": search})
    bound = "which knew rewards of these very tasks: it says nothing about new tasks."
    assert ("held-out tasks" in headline(run)) == (not known)
    assert any(bound in sentence for sentence in key_sentences(run)) == bool(known)
    assert (bound in model_card(run)) == bool(known)


def test_rollouts_far_below_greedy_play_are_said(build_run: Callable[..., Path]) -> None:
    """A policy with 92% had been trained on rollouts of which 20% succeeded, and got worse."""
    run = load_run(build_run())

    def said(*, sampled: float, temperature: float = 0.0, **results: Any) -> list[str]:
        rows = [{**row, "success_rate": sampled} for row in run.metrics[-5:]]
        played = {"evaluation": {"split": "test", "temperature": temperature}}
        now = {**run.results, "success_rate": 0.9, **played, **results}
        changed = dataclasses.replace(run, metrics=rows, results=now)
        return [each for each in key_sentences(changed) if "sampling.temperature" in each]

    assert said(sampled=0.8) == []
    (sentence,) = said(sampled=0.2)
    assert sentence.startswith("Sampled rollouts solved 20.0% of training tasks in the last steps")
    assert said(sampled=0.2, temperature=1.0) == []
    assert said(sampled=0.2, search={"label": "the best of 8"}) == []


def test_greedy_play_far_below_the_rollouts_is_said(build_run: Callable[..., Path]) -> None:
    run = load_run(build_run())
    rows = [{**row, "success_rate": 0.6} for row in run.metrics[-5:]]
    played = {"evaluation": {"split": "test", "temperature": 0.0}, "success_rate": 0.1}
    changed = dataclasses.replace(run, metrics=rows, results={**run.results, **played})
    (sentence,) = (each for each in key_sentences(changed) if "--temperature 1" in each)
    assert "Sampled rollouts solved 60.0%" in sentence and "other tasks are harder" in sentence


def test_a_policy_below_its_reference_is_told_where_to_read(build_run: Callable[..., Path]) -> None:
    run = load_run(build_run())
    worse = dataclasses.replace(run, results={**run.results, "success_rate": 0.1})
    assert key_sentences(worse)[0].startswith("-28.8 points against the reference (warm start)")
    assert "“Nothing is learned” in docs/troubleshooting.md" in key_sentences(worse)[0]
    assert "troubleshooting" not in " ".join(key_sentences(run))
