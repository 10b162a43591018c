"""`ragen-apo evaluate --search`: what is played, what is written, what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ragen_apo.cli.evaluation import print_evaluation
from ragen_apo.environments.shop import ShopEnvironment
from ragen_apo.files import read_json_lines
from tests.command_line import Command, assert_refused

BEAM = ("--search", "beam", "--width", "2")
BEST = ("--search", "best-of-n", "--width", "3")


def results(run: Path) -> dict[str, Any]:
    return json.loads((run / "evaluation" / "results.json").read_text())


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
def test_a_search_is_evaluated_and_reported_beside_play_without_it_and_the_next_is_without(
    command: Command, run: Path
) -> None:
    plain = results(run)
    result = command("evaluate", run, *BEAM)
    assert result.status == 0, result.err
    assert "beam of 2" in result.out
    assert "tokens sampled for an episode" in result.out
    found = results(run)
    search = found["search"]
    assert (search["method"], search["width"], search["candidates"]) == ("beam", 2, 2)
    assert (search["rank_by"], search["uses_reward"]) == ("values", False)
    episodes = read_json_lines(run / "evaluation" / "episodes.jsonl")
    played = sum(turn["num_response_tokens"] for each in episodes for turn in each["turns"])
    assert search["sampled_tokens"] > played
    assert search["avg_tokens"] == pytest.approx(search["sampled_tokens"] / found["episodes"])
    without = found["baselines"]["without search"]
    assert {key: without[key] for key in ("success_rate", "avg_reward", "avg_steps")} == {
        key: plain[key] for key in ("success_rate", "avg_reward", "avg_steps")
    }
    assert command("report", run).status == 0
    header, policy, other, *rest = (run / "report" / "summary.csv").read_text().splitlines()
    columns = "method,success_rate,avg_reward,avg_steps,avg_tokens"
    assert header == f"{columns},episodes,success_ci95_low,success_ci95_high"
    assert ", beam of 2," in policy.replace('"', "")
    assert policy.split(",")[-4] == f"{search['avg_tokens']:.4f}"
    assert other.startswith("without search,")
    assert other.split(",")[-4] == f"{without['avg_tokens']:.4f}"
    assert not any(row.split(",")[-4] for row in rest)
    assert command("evaluate", run).status == 0
    assert results(run) == plain | {"policy": str(run / "policy")}


@pytest.mark.slow
def test_the_same_search_finds_the_same_episodes(command: Command, run: Path) -> None:
    written = []
    for _ in range(2):
        assert command("evaluate", run, *BEST, "--episodes", "2").status == 0
        written.append(
            [(run / "evaluation" / name).read_text() for name in ("results.json", "episodes.jsonl")]
        )
    assert written[0] == written[1]


@pytest.mark.slow
def test_the_store_knows_moves_of_training_tasks_and_not_of_others(
    command: Command, run: Path
) -> None:
    shares = {}
    for split in ("train", "test"):
        assert command("evaluate", run, *BEAM, "--episodes", "3", "--split", split).status == 0
        shares[split] = results(run)["search"]["known_move_share"]
    assert shares["test"] == 0.0 < shares["train"]
    by_likelihood = ("--episodes", "3", "--split", "train", "--rank-by", "likelihood")
    assert command("evaluate", run, *BEAM, *by_likelihood).status == 0
    assert results(run)["search"]["known_move_share"] is None


@pytest.mark.slow
@pytest.mark.usefixtures("few_random_features")
def test_a_search_by_regression_says_what_it_was_fitted_to(command: Command, run: Path) -> None:
    result = command("evaluate", run, *BEST, "--rank-by", "regression", "--episodes", "2")
    assert result.status == 0, result.err
    assert "search: Q* by regression on" in result.out + result.err
    search = results(run)["search"]
    assert search["label"] == "best of 3 episodes by regression"
    assert search["uses_reward"] is False
    assert search["known_move_share"] is None
    left = (
        f"it leaves {search['unexplained']:.0%} of the variance of what is earned in held-out tasks"
    )
    assert left in result.out + result.err
    assert "value store knew" not in result.out


@pytest.mark.slow
def test_a_search_by_regression_without_episodes_of_stage_one_is_refused_before_play(
    command: Command, run: Path
) -> None:
    (run / "values.sqlite").unlink()
    before = results(run)
    result = command("evaluate", run, *BEAM, "--rank-by", "regression")
    assert_refused(result, "values.sqlite has fewer", "sample some with `ragen-apo estimate-values")
    assert results(run) == before


@pytest.mark.slow
def test_the_limit_of_tokens_is_kept_and_said(command: Command, run: Path) -> None:
    result = command("evaluate", run, *BEAM, "--candidates", "3", "--search-tokens", "1")
    assert result.status == 0, result.err
    assert "episodes that had sampled 1 token and went on greedily" in result.out
    search = results(run)["search"]
    assert (search["max_tokens"], search["candidates"]) == (1, 3)
    assert search["cut_share"] > 0


@pytest.mark.slow
def test_a_choice_by_reward_says_that_it_is_an_upper_bound(command: Command, run: Path) -> None:
    result = command("evaluate", run, *BEST, "--rank-by", "reward")
    assert "an upper bound, which no deployed agent can reach" in result.out
    assert results(run)["search"]["uses_reward"] is True


@pytest.mark.slow
def test_a_run_that_is_older_than_searches_can_be_searched(command: Command, run: Path) -> None:
    config = run / "config.yaml"
    kept = config.read_text()
    assert "  search: null\n" in kept
    config.write_text(kept.replace("  search: null\n", ""))
    assert command("evaluate", run, *BEAM, "--episodes", "1").status == 0


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (("--width", "4"), ("--width", "add --search beam or --search best-of-n")),
        (
            ("--search", "beam", "--rank-by", "reward"),
            ("evaluation.search", "set method to best_of_n"),
        ),
        (("--search", "beam", "--width", "1"), ("evaluation.search", "nothing to choose from")),
        (
            ("--search", "best-of-n", "--candidates", "2"),
            ("evaluation.search", "best_of_n samples one response"),
        ),
        (
            ("--search", "best-of-n", "--rank-by", "votes"),
            ("evaluation.search", "set method to beam"),
        ),
        (("--search", "beam", "--width", "9"), ("samples 81 responses", "training.num_rows is 24")),
    ],
)
def test_what_cannot_be_searched_is_refused(
    command: Command, run: Path, arguments: tuple[str, ...], parts: tuple[str, ...]
) -> None:
    assert_refused(command("evaluate", run, *arguments), *parts)


def test_a_run_whose_evaluation_could_not_search_is_not_started(
    command: Command, config: Path, tmp_path: Path
) -> None:
    start = ("train", "--config", config, "--run-dir", tmp_path / "new")
    result = command(*start, "--evaluation.search.width", "9")
    assert_refused(result, "samples 81 responses", "training.num_rows is 24")
    assert not (tmp_path / "new").exists()


def test_a_run_without_stage_one_cannot_end_with_a_search_by_regression(
    command: Command, config: Path, tmp_path: Path
) -> None:
    start = ("train", "--config", config, "--run-dir", tmp_path / "new", "--algorithm", "grpo")
    result = command(*start, "--evaluation.search.rank_by", "regression")
    assert_refused(result, "algorithm grpo without distillation does not sample")
    assert not (tmp_path / "new").exists()


def test_a_model_behind_an_api_is_not_searched(command: Command) -> None:
    result = command("evaluate", *BEAM, "--api-model", "m", "--base-url", "http://127.0.0.1:1")
    assert_refused(result, "--search and its options go with a run")


@pytest.mark.slow
def test_an_environment_with_chance_is_refused_before_anything_is_played(
    command: Command, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = ShopEnvironment.__init__

    def make_with_chance(self: ShopEnvironment, **options: Any) -> None:
        make(self, **options)
        self.properties = replace(self.properties, deterministic=False)

    monkeypatch.setattr(ShopEnvironment, "__init__", make_with_chance)
    assert_refused(command("evaluate", run, *BEAM), "'shop' is not deterministic")
    one = ("--search", "beam", "--width", "1", "--candidates", "2")
    assert command("evaluate", run, *one).status == 0


def test_the_table_says_whose_episodes_a_full_context_has_cut_off(
    capsys: pytest.CaptureFixture[str],
) -> None:
    row = {"success_rate": 0.0, "avg_reward": 0.0, "avg_steps": 31.0, "episodes": 12}
    baselines = {"random": {**row, "episodes_out_of_context": 0}}
    results = {**row, "split": "test", "success_ci95": [0.0, 0.2], "baselines": baselines}
    results |= {"episodes_out_of_context": 9, "pass_at_k": {"1": 0.25, "2": 0.5, "10": 0.75}}
    print_evaluation(results, policy="mine", whose="policy")
    printed = capsys.readouterr().out
    assert "sampled, mine: pass@1 25.0%, pass@2 50.0%, pass@10 75.0%" in printed
    assert "cut off because the context was full, mine: 9 of 12" in printed
    assert "full, random" not in printed


def test_samples_are_not_said_to_be_of_the_search(capsys: pytest.CaptureFixture[str]) -> None:
    row = {"success_rate": 0.5, "avg_reward": 0.0, "avg_steps": 3.0, "episodes": 12}
    results = {**row, "split": "test", "success_ci95": [0.0, 0.2], "baselines": {}}
    results |= {"pass_at_k": {"1": 0.25}, "search": {"label": "beam of 2"}}
    print_evaluation(results, policy="mine", whose="policy")
    printed = capsys.readouterr().out
    assert "mine, beam of 2" in printed, "the row of the table"
    assert "sampled, mine without search: pass@1 25.0%" in printed
