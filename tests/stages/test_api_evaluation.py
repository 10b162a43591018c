"""Evaluations of a model behind a real local server: results, resuming, refusals, files."""

from __future__ import annotations

import itertools
import json
import re
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

import ragen_apo
from ragen_apo.agent.chat import Question
from ragen_apo.config.api_model import api_model_config
from ragen_apo.environments.base import make_environment
from ragen_apo.environments.shop import ShopEnvironment
from ragen_apo.errors import ApiError, ConfigError, EnvironmentFaultError, RunDirectoryError
from ragen_apo.policy.chat_api.address import Address
from ragen_apo.policy.chat_api.answer import Answer
from ragen_apo.policy.chat_api.client import ChatClient, Sampling
from ragen_apo.policy.chat_api.ledger import AnswerLedger, answer_key
from ragen_apo.stages.api_evaluation import KeptAnswers
from ragen_apo.types import Task
from tests import factories
from tests.chat_server import (
    SHOP,
    ChatServer,
    calling_shopper,
    completion,
    cuts,
    perfect_shopper,
    refuses,
    says,
    sends,
    serving,
    stalls,
)
from tests.command_line import snapshot
from tests.forks import Fork
from tests.sweeps import quick_first

KEY = "sk-very-secret-0123456789"
LOST = "<think>?</think><answer>search zzz</answer>"


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "evaluation"


@pytest.fixture(autouse=True)
def no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


def evaluate(server: ChatServer | str, out: Path, **changes: Any) -> dict[str, Any]:
    url = server if isinstance(server, str) else server.url
    evaluation = {"split": "all", "num_episodes": 6, **changes.pop("evaluation", {})}
    options = {"environment": SHOP, "concurrency": 3, "progress": False, **changes}
    return ragen_apo.evaluate_api("tiny", out, base_url=url, evaluation=evaluation, **options)


# Results


def test_a_perfect_shopper_solves_every_task(out: Path) -> None:
    with serving(perfect_shopper) as server:
        results = evaluate(server, out)
    assert (results["success_rate"], results["episodes"], results["avg_steps"]) == (1.0, 6, 2.0)
    assert len(server.requests) == 12
    assert {"heuristic", "random"} <= results["baselines"].keys()


def test_results_say_what_was_asked_of_whom_and_what_it_cost(out: Path) -> None:
    with serving(perfect_shopper) as server:
        results = evaluate(server, out)
    assert results["policy"] == "tiny"
    assert results["api"] == {
        "model": "tiny",
        "server": server.url.split("/")[2],
        "answers": 12,
        "prompt_tokens": 12 * 7,
        "completion_tokens": 12 * 3,
        "answers_without_usage": 0,
        "empty_answers": 0,
        "refused_answers": 0,
        "cut_off_answers": 0,
        "format_errors": 0,
        "impossible_actions": 0,
        "episodes_out_of_context": 0,
    }
    assert results["evaluation"] == {"split": "all", "num_episodes": 6, "temperature": 0.0}
    assert json.loads((out / "evaluation" / "results.json").read_text()) == results


class FlakyShop(ShopEnvironment):
    """Fails in some calls of all that there are of `reset` and `step`."""

    calls = itertools.count()
    failing = (1, 4, 9, 15)

    def reset(self, task: Task, *, seed: int) -> tuple[str, dict[str, Any]]:
        self._fail()
        return super().reset(task, seed=seed)

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self._fail()
        return super().step(action)

    def _fail(self) -> None:
        if next(self.calls) in self.failing:
            raise TimeoutError("the sandbox did not answer")


def test_an_episode_whose_environment_raised_begins_again_and_asks_nothing_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"concurrency": 2, "environment": {**SHOP, "name": FlakyShop}}
    played = []
    for folder, failing in (("calm", ()), ("rough", FlakyShop.failing)):
        monkeypatch.setattr(FlakyShop, "failing", failing)
        monkeypatch.setattr(FlakyShop, "calls", itertools.count())
        with serving(perfect_shopper) as server:
            results = evaluate(
                server, tmp_path / folder, rollouts={"environment_retries": 2}, **options
            )
        asked = sorted(json.dumps(request["messages"]) for request in server.requests)
        results["api"].pop("server")
        played.append((results, asked, ragen_apo.episodes(tmp_path / folder)))
    assert played[0] == played[1]
    monkeypatch.setattr(FlakyShop, "calls", itertools.count())
    with (
        serving(perfect_shopper) as server,
        pytest.raises(EnvironmentFaultError, match="sandbox did not answer"),
    ):
        evaluate(server, tmp_path / "none", **options)


class MeetingShop(ShopEnvironment):
    """Begins when two others begin, too."""

    everybody = threading.Barrier(3, timeout=60)

    def reset(self, task: Task, *, seed: int) -> tuple[str, dict[str, Any]]:
        self.everybody.wait()
        return super().reset(task, seed=seed)


@pytest.mark.slow
def test_environments_act_at_the_same_time_where_the_configuration_says_so(out: Path) -> None:
    """Those of the baselines as well; and it is no part of what is evaluated."""
    meeting = {**SHOP, "name": MeetingShop}
    three = {"environment": meeting, "evaluation": {"num_episodes": 3}}
    with serving(perfect_shopper) as server:
        evaluate(server, out, rollouts={"num_environment_workers": 3}, **three)
        num_asked = len(server.requests)
        evaluate(server, out, rollouts={"num_environment_workers": 5}, **three)
    assert len(server.requests) == num_asked, "the answers of the first one are used again"


CALLS = {"agent": {"response_format": "tool_call"}}


def test_a_shopper_that_calls_tools_solves_every_task(out: Path) -> None:
    with serving(calling_shopper) as server:
        results = evaluate(server, out, **CALLS)
    assert (results["success_rate"], results["avg_steps"]) == (1.0, 2.0)
    assert (results["api"]["format_errors"], results["api"]["empty_answers"]) == (0, 0)
    turns = [turn for episode in ragen_apo.episodes(out) for turn in episode.turns]
    assert all(turn.action.startswith(("search ", "buy ")) and turn.thought for turn in turns)
    later = [request["messages"] for request in server.requests if len(request["messages"]) > 2]
    assert len(later) == 6
    for system, user, said, result in later:
        assert (system["role"], user["role"]) == ("system", "user")
        assert "<answer>" not in system["content"]
        assert said["tool_calls"][0]["function"]["name"] == "search"
        assert (result["role"], result["tool_call_id"]) == ("tool", said["tool_calls"][0]["id"])


@pytest.mark.slow
def test_kept_calls_are_not_asked_for_again(out: Path) -> None:
    with serving(calling_shopper) as server:
        before = evaluate(server, out, **CALLS)
        asked = len(server.requests)
        assert evaluate(server, out, **CALLS) == before
        assert len(server.requests) == asked
        with pytest.raises(RunDirectoryError, match='response_format was "tool_call"'):
            evaluate(server, out)


EXTRA = {"chat_template_kwargs": {"enable_thinking": False}, "reasoning_effort": "low"}


@pytest.mark.slow
def test_further_keys_are_in_every_request_and_part_of_the_evaluation(out: Path) -> None:
    with serving(perfect_shopper) as server:
        before = evaluate(server, out, extra_body=EXTRA)
        assert all(EXTRA.items() <= request.items() for request in server.requests)
        asked = len(server.requests)
        assert evaluate(server, out, extra_body=EXTRA) == before
        assert len(server.requests) == asked
        with pytest.raises(RunDirectoryError, match=r"extra_body.reasoning_effort was \"low\""):
            evaluate(server, out, extra_body={**EXTRA, "reasoning_effort": "high"})
        with pytest.raises(RunDirectoryError, match="extra_body"):
            evaluate(server, out)


@pytest.mark.slow
def test_answers_are_kept_by_the_further_keys_as_well(out: Path, tmp_path: Path) -> None:
    with serving(perfect_shopper) as server:
        evaluate(server, out)
        evaluate(server, tmp_path / "other", extra_body=EXTRA)
    kept = [
        {json.loads(line)["key"] for line in (folder / "answers.jsonl").read_text().splitlines()}
        for folder in (out, tmp_path / "other")
    ]
    assert len(kept[0]) == len(kept[1]) == 12
    assert kept[0].isdisjoint(kept[1])


def test_an_evaluation_from_before_there_were_further_keys_goes_on(out: Path) -> None:
    with serving(perfect_shopper) as server:
        before = evaluate(server, out)
        asked = len(server.requests)
        text = (out / "evaluation.yaml").read_text()
        assert "  extra_body: {}\n" in text
        (out / "evaluation.yaml").write_text(text.replace("  extra_body: {}\n", ""))
        assert evaluate(server, out) == before
        assert len(server.requests) == asked


def test_an_answer_that_was_kept_before_there_were_further_keys_is_found(tmp_path: Path) -> None:
    server = {"model": "tiny", "base_url": "http://127.0.0.1:9/v1", "max_tokens": 64}
    config = api_model_config(factories.config(), **server, extra_body={})
    question = Question(episode=3, turn=1, seed=7, messages=({"role": "user", "content": "?"},))
    place = {"episode": 3, "turn": 1, "seed": 7, "messages": list(question.messages)}
    key = answer_key({**server, "temperature": config.evaluation.temperature, **place})
    client = ChatClient(Address(server["base_url"]), Sampling("tiny", 0.0, 64))
    with client, AnswerLedger(tmp_path / "answers.jsonl") as ledger:
        ledger.add(key, Answer("kept"), episode=3, turn=1)
        assert KeptAnswers(client, ledger, config).answer(question) == Answer("kept")


@pytest.mark.parametrize(
    "name", ["model", "messages", "temperature", "max_tokens", "max_completion_tokens", "tools"]
)
def test_keys_that_are_set_here_are_no_further_keys(name: str, out: Path) -> None:
    with pytest.raises(ConfigError, match=f"extra_body: '{name}' is set by "):
        evaluate("http://127.0.0.1:9/v1", out, extra_body={name: 1})
    assert not out.exists()


def test_further_keys_are_text(out: Path) -> None:
    with pytest.raises(ConfigError, match="extra_body: got the key 1, expected keys that are text"):
        evaluate("http://127.0.0.1:9/v1", out, extra_body={1: 2})


def test_further_keys_are_json(out: Path) -> None:
    with pytest.raises(ConfigError, match="extra_body: .*finite numbers"):
        evaluate("http://127.0.0.1:9/v1", out, extra_body={"top_p": float("nan")})


@pytest.mark.slow
def test_options_of_a_template_are_not_sent_unasked_and_that_is_said(
    out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {
        "policy": {"path": "a/b"},
        "warm_start": {"enabled": False},
        "agent": {"template_options": {"enable_thinking": False}},
    }
    with serving(perfect_shopper) as server:
        evaluate(server, out, config=config, progress=True)
        assert not any("chat_template_kwargs" in request for request in server.requests)
        said = "".join(capsys.readouterr()).replace("\n", " ")
        options = json.dumps({"chat_template_kwargs": config["agent"]["template_options"]})
        assert f"give --extra-body '{options}'" in said
        evaluate(server, out.with_name("told"), config=config, progress=True, extra_body=EXTRA)
        assert "not sent" not in "".join(capsys.readouterr())


BUY = {"type": "function", "function": {"name": "buy", "arguments": '{"id": 1}'}}
BROKEN = {"id": "c", "type": "function", "function": {"name": "buy", "arguments": '{"id": '}}
UNKNOWN = {"id": "c", "type": "function", "function": {"name": "sell", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("message", "flag", "result_role"),
    [
        ({"content": "I would buy it."}, "format_error", "user"),
        ({"content": None, "tool_calls": [BUY, BUY]}, "format_error", "user"),
        ({"content": None, "tool_calls": [BROKEN]}, "format_error", "user"),
        ({"content": None, "tool_calls": [UNKNOWN]}, "invalid_action", "tool"),
    ],
    ids=["words", "two calls", "arguments that are no JSON", "an unknown tool"],
)
def test_a_call_that_cannot_be_executed_is_answered_with_the_tools(
    message: dict[str, Any], flag: str, result_role: str, out: Path
) -> None:
    with serving(says({"role": "assistant", **message})) as server:
        evaluate(server, out, evaluation={"num_episodes": 1}, **CALLS)
    (episode,) = ragen_apo.episodes(out)
    assert [turn.flags for turn in episode.turns] == [(flag,)] * 3
    said, result = server.requests[1]["messages"][-2:]
    assert (said["role"], result["role"]) == ("assistant", result_role)
    assert said["content"] or said["tool_calls"]
    assert result["content"].startswith("Answer with one call of search(keywords: string)")


def test_a_call_that_the_server_has_left_in_the_text_is_read(out: Path) -> None:
    text = '<think>a</think>\n<tool_call>\n{"name": "buy", "arguments": {"id": 1}}\n</tool_call>'
    with serving(says(text)) as server:
        evaluate(server, out, evaluation={"num_episodes": 1}, **CALLS)
    (episode,) = ragen_apo.episodes(out)
    assert [(turn.thought, turn.action) for turn in episode.turns] == [("a", "buy 1")]


@pytest.mark.slow
def test_an_evaluation_from_before_there_were_tools_goes_on(out: Path) -> None:
    with serving(perfect_shopper) as server:
        before = evaluate(server, out)
        file = out / "evaluation.yaml"
        file.write_text(re.sub("  response_format: .*\n", "", file.read_text()))
        assert evaluate(server, out) == before
        assert len(server.requests) == 12


def test_the_page_has_every_number_of_the_cost_and_every_file(out: Path) -> None:
    with serving(perfect_shopper) as server:
        results = evaluate(server, out)
    page = (Path(__file__).parents[2] / "docs" / "evaluating_models.md").read_text()
    cost = page.split("| field of `api` | meaning |")[1].split("\n\n")[0]
    named = [
        name for line in cost.splitlines() for name in re.findall(r"`(\w+)`", line.split(" | ")[0])
    ]
    assert sorted(named) == sorted(results["api"])
    files = page.split("| file | content |")[1]
    assert [name for name in snapshot(out) if name != ".lock" and f"`{name}`" not in files] == []


def test_the_episodes_are_those_of_the_evaluation_of_a_run(out: Path) -> None:
    with serving(perfect_shopper) as server:
        evaluate(server, out)
    tasks = make_environment("shop", {"num_products": 24, "max_turns": 3}).tasks("all")[:6]
    assert [each.task.task_id for each in ragen_apo.episodes(out)] == [t.task_id for t in tasks]


def test_a_model_is_told_the_rules_and_the_form(out: Path) -> None:
    with serving(perfect_shopper) as server:
        evaluate(server, out)
    system, user = server.requests[0]["messages"]
    assert system["role"] == "system"
    rules = make_environment("shop", {}).properties.rules
    assert system["content"].startswith(rules)
    assert "<think>what you think</think><answer>one action</answer>" in system["content"]
    assert user["content"].startswith("TASK: ")


def test_a_system_prompt_of_ones_own_is_taken_as_it_is(out: Path) -> None:
    with serving(perfect_shopper) as server:
        evaluate(server, out, agent={"system_prompt": "Buy well."})
    assert server.requests[0]["messages"][0]["content"] == "Buy well."


def test_empty_answers_and_refusals_are_format_errors_that_are_counted(out: Path) -> None:
    refusal = {"role": "assistant", "content": None, "refusal": "I do not shop"}
    with serving(says(None), sends(completion(refusal))) as server:
        results = evaluate(server, out, evaluation={"num_episodes": 2})
    # two episodes of three turns
    assert results["api"]["format_errors"] == results["api"]["empty_answers"] == 6
    assert results["api"]["refused_answers"] == 1
    assert results["failures"]["unreadable"]["count"] == 2


def test_a_conversation_that_becomes_too_long_is_a_truncated_episode(out: Path) -> None:
    full = refuses(400, "maximum context length is 64 tokens", code="context_length_exceeded")
    with serving(perfect_shopper, full) as server:
        results = evaluate(server, out)
    assert results["api"]["episodes_out_of_context"] == 1
    assert (results["successes"], results["episodes"]) == (5, 6)


def test_a_context_in_which_no_task_fits_is_an_error(out: Path) -> None:
    full = refuses(400, "maximum context length is 64 tokens")
    with serving(perfect_shopper, *[full] * 6) as server, pytest.raises(ApiError) as caught:
        evaluate(server, out)
    assert "no task fits into the context of tiny" in str(caught.value)


# One at a time or many, with faults or without


@pytest.mark.slow
def test_questions_side_by_side_change_no_result(tmp_path: Path) -> None:
    folders = [tmp_path / "one", tmp_path / "many"]
    with serving(perfect_shopper) as server:
        results = [
            evaluate(server, folder, concurrency=number)
            for folder, number in zip(folders, [1, 6], strict=True)
        ]
    assert results[0] == results[1]
    one, many = (folder / "evaluation" / "episodes.jsonl" for folder in folders)
    assert one.read_bytes() == many.read_bytes()


@pytest.mark.slow
def test_faults_that_pass_change_no_result(tmp_path: Path) -> None:
    faults = [refuses(429, Retry_After="1"), refuses(500), cuts, stalls(1.0), sends("nonsense {")]
    with serving(perfect_shopper) as server:
        expected = evaluate(server, tmp_path / "calm")
    with serving(perfect_shopper, *faults) as server:
        results = evaluate(server, tmp_path / "rough", timeout_seconds=0.5)
    assert len(server.requests) == 12 + len(faults)
    ports = results.pop("api"), expected.pop("api")
    assert results == expected
    assert ports[0]["prompt_tokens"] == ports[1]["prompt_tokens"]


# Going on


def test_an_evaluation_goes_on_without_a_question_that_was_answered(out: Path) -> None:
    with serving(perfect_shopper, *[None] * 5, refuses(404, "gone")) as server:
        with pytest.raises(ApiError, match="gone"):
            evaluate(server, out, concurrency=1)
        assert len(server.requests) == 6  # five answers and the refusal
        results = evaluate(server, out)
    assert results["success_rate"] == 1.0
    assert results["api"]["answers"] == 12
    assert len(server.requests) - 6 == 12 - 5


def test_the_seconds_of_an_attempt_that_failed_count(out: Path) -> None:
    with serving(perfect_shopper, None, stalls(0.3), refuses(404, "gone")) as server:
        with pytest.raises(ApiError, match="gone"):
            evaluate(server, out, concurrency=1)
        phase = json.loads((out / "run.json").read_text())["phases"]["evaluation"]
        assert (first := phase["seconds"]) >= 0.3
        evaluate(server, out)
    phase = json.loads((out / "run.json").read_text())["phases"]["evaluation"]
    assert phase["seconds"] > first


def test_answers_under_way_are_kept_when_another_one_fails(out: Path) -> None:
    """The second question fails at once; the first and third are answered and paid for later."""
    entered, release = threading.Semaphore(0), threading.Event()

    def slowly(body: Any) -> str:
        entered.release()
        assert release.wait(10)
        return perfect_shopper(body)

    def fails_when_others_wait(handler: Any) -> None:
        for _ in range(2):
            assert entered.acquire(timeout=10)
        refuses(404, "gone")(handler)
        release.set()

    with serving(slowly, None, fails_when_others_wait) as server:
        with pytest.raises(ApiError, match="gone"):
            evaluate(server, out, concurrency=3)
        # An episode may ask once more before the refusal has been read.
        assert len((out / "answers.jsonl").read_text().splitlines()) >= 2
        evaluate(server, out)
    assert len(server.requests) == 12 + 1


def test_an_evaluation_that_was_killed_goes_on(out: Path) -> None:
    """With SIGKILL, while the sixth question waits for its answer."""
    waiting, release = threading.Event(), threading.Event()

    def hangs(handler: Any) -> None:
        waiting.set()
        release.wait(30)
        cuts(handler)

    with serving(perfect_shopper, *[None] * 5, hangs) as server:
        killed = Fork(out.with_suffix(".txt"), lambda: evaluate(server, out, concurrency=1))
        try:
            assert waiting.wait(120)
        finally:
            killed.send(signal.SIGKILL)
            killed.ended()
            release.set()
        assert not (out / "evaluation" / "results.json").exists()
        results = evaluate(server, out)
    assert results["success_rate"] == 1.0
    assert len(server.requests) == 12 + 1


def test_a_finished_evaluation_asks_nothing_again(out: Path) -> None:
    with serving(perfect_shopper) as server:
        results = evaluate(server, out)
        before = len(server.requests)
        assert evaluate(server, out) == results
    assert len(server.requests) == before


def test_more_episodes_ask_only_what_is_new(out: Path) -> None:
    with serving(perfect_shopper) as server:
        evaluate(server, out, evaluation={"num_episodes": 2})
        results = evaluate(server, out)
    assert results["episodes"] == 6
    assert len(server.requests) == 12
    assert "num_episodes: 6" in (out / "evaluation.yaml").read_text()


def test_at_a_temperature_an_episode_that_begins_again_is_asked_again(out: Path) -> None:
    """The split has 3 tasks, which are played twice: each answer is a draw of its own."""
    with serving(perfect_shopper) as server:
        evaluate(server, out, evaluation={"split": "test", "temperature": 0.5})
    assert len(server.requests) == 12


@pytest.mark.slow
def test_an_answer_depends_on_the_messages(out: Path) -> None:
    """Also where evaluation.yaml was edited."""
    with serving(perfect_shopper) as server:
        evaluate(server, out)
        answers = out / "answers.jsonl"
        file = out / "evaluation.yaml"
        file.write_text(file.read_text().replace("rules_and_format", "Buy well."))
        before = answers.read_text()
        evaluate(server, out, agent={"system_prompt": "Buy well."})
    assert answers.read_text().startswith(before)
    assert len(server.requests) == 24


@pytest.mark.parametrize(
    ("changes", "told"),
    quick_first(
        [
            ({"max_tokens": 5}, "api.max_tokens was 512 and is 5"),
            ({"evaluation": {"temperature": 0.5}}, "evaluation.temperature was 0.0 and is 0.5"),
            ({"evaluation": {"split": "test"}}, 'evaluation.split was "all" and is "test"'),
            ({"environment": {**SHOP, "max_turns": 2}}, "environment.max_turns was 3 and is 2"),
            ({"seed": 3}, "seed was 0 and is 3"),
            ({"agent": {"system_prompt": "Buy."}}, 'is "Buy."'),
        ]
    ),
)
def test_other_settings_need_another_folder(changes: dict[str, Any], told: str, out: Path) -> None:
    with serving(perfect_shopper) as server:
        evaluate(server, out)
        before = snapshot(out)
        with pytest.raises(RunDirectoryError, match="give another --out") as caught:
            evaluate(server, out, **changes)
    assert told in str(caught.value)
    assert snapshot(out) == before


def test_a_first_attempt_without_an_answer_does_not_fix_the_settings(out: Path) -> None:
    with serving(perfect_shopper, refuses(404, "no such model")) as server:
        with pytest.raises(ApiError):
            evaluate(server, out, concurrency=1, max_tokens=5)
        assert evaluate(server, out)["success_rate"] == 1.0


# Refusals


def test_a_folder_with_something_else_is_refused(out: Path) -> None:
    out.mkdir()
    (out / "thesis.txt").write_text("mine")
    with serving(perfect_shopper) as server, pytest.raises(RunDirectoryError, match="--out"):
        evaluate(server, out)
    assert list(snapshot(out)) == ["thesis.txt"]


def test_what_a_killed_start_has_left_is_no_hindrance(out: Path) -> None:
    out.mkdir()
    (out / "evaluation.yaml.partial-0123abcd").write_text("seed")
    with serving(perfect_shopper) as server:
        assert evaluate(server, out)["success_rate"] == 1.0


def test_a_model_without_a_name_is_refused(out: Path) -> None:
    with pytest.raises(ConfigError, match="model is empty"):
        ragen_apo.evaluate_api(" ", out, base_url="http://127.0.0.1:9/v1", progress=False)


def test_the_folder_of_a_run_is_refused(out: Path) -> None:
    out.mkdir()
    (out / "config.yaml").write_text("seed: 0")
    with serving(perfect_shopper) as server, pytest.raises(RunDirectoryError, match="is a run"):
        evaluate(server, out)


def test_such_a_folder_is_no_run(out: Path) -> None:
    with serving(perfect_shopper) as server:
        evaluate(server, out)
    with pytest.raises(RunDirectoryError, match="the evaluation of a model behind an API"):
        ragen_apo.evaluate(out, progress=False)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"max_tokens": 0}, "max_tokens must be a .*number of at least 1"),
        ({"concurrency": 0}, "concurrency must be a .*number of at least 1"),
        ({"timeout_seconds": float("nan")}, "timeout_seconds must be a .*number of at least"),
        ({"evaluation": {"split": "tset"}}, "tset"),
        ({"environment": "shopp"}, "shopp"),
    ],
)
def test_settings_that_cannot_be_used_are_refused_before_anything_is_written(
    changes: dict[str, Any], problem: str, out: Path
) -> None:
    with pytest.raises(ConfigError, match=problem):
        evaluate("http://127.0.0.1:9/v1", out, **changes)
    assert not out.exists()


def test_an_address_with_a_password_is_refused_without_being_repeated(out: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        evaluate("https://me:hunter2@host/v1", out)
    assert "hunter2" not in str(caught.value)


# The key


@pytest.mark.slow
def test_the_key_is_sent_and_stands_in_no_file(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", KEY)

    def blabs(body: Any) -> str:
        return f"{perfect_shopper(body)} {KEY}"

    with serving(blabs) as server:
        evaluate(server, out, api_key_env="MY_KEY")
    ragen_apo.write_report(out)
    assert {headers["Authorization"] for headers in server.headers} == {f"Bearer {KEY}"}
    assert [name for name, content in snapshot(out).items() if KEY.encode() in content] == []


def test_without_a_key_none_is_sent(out: Path) -> None:
    with serving(perfect_shopper) as server:
        evaluate(server, out)
    assert not any("Authorization" in headers for headers in server.headers)


def test_a_server_that_wants_a_key_is_told_to_get_one(out: Path) -> None:
    wanted = "wants a key .*Export OPENAI_API_KEY"
    with (
        serving(perfect_shopper, refuses(401, "no key")) as server,
        pytest.raises(ApiError, match=wanted),
    ):
        evaluate(server, out, concurrency=1)
