"""Responses of servers: their tokens, the weights they were sampled with, and every failure."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ragen_apo.config.policy import LoraConfig
from ragen_apo.errors import ConfigError, ContextError, ServerError
from ragen_apo.policy.inference_server.engine import ServerEngine
from ragen_apo.policy.language_model import LanguageModel
from ragen_apo.policy.lora import add_adapters
from ragen_apo.seeding import generator
from tests.fake_vllm import FakeVllm, HangupError, RawError, RefusalError, StallError, serving
from tests.served_responses import (
    COMPLETIONS,
    MAX_NEW_TOKENS,
    PROMPTS,
    ROUNDING,
    always,
    change,
    keep_weights,
    largest_gap,
    once,
    respond,
    restart_once,
)
from tests.sweeps import quick_first

KEY = "sk-very-secret-0123456789"


def test_tokens_come_with_the_log_probabilities_that_the_policy_gives_them(
    engine: ServerEngine, model: LanguageModel
) -> None:
    responses = respond(engine)
    assert all(1 <= len(response.token_ids) <= MAX_NEW_TOKENS for response in responses)
    assert largest_gap(model, responses) < ROUNDING


@pytest.mark.slow
def test_another_temperature_is_sampled_and_reported(
    engine: ServerEngine, model: LanguageModel
) -> None:
    assert largest_gap(model, respond(engine, temperature=0.7), temperature=0.7) < ROUNDING


def test_every_sampling_parameter_is_sent_and_no_seed(engine: ServerEngine, fake: FakeVllm) -> None:
    respond(engine)
    sent = [body for path, body in fake.asked if path == COMPLETIONS]
    assert all(body["top_p"] == 1 and body["top_k"] == 0 for body in sent)
    assert all(body["repetition_penalty"] == 1 and body["min_p"] == 0 for body in sent)
    assert not any("seed" in body for body in sent)


def test_a_row_goes_on_from_what_was_sampled_token_by_token(
    engine: ServerEngine, fake: FakeVllm
) -> None:
    with engine.rollout():
        row = engine.open_row(generator(0))
        engine.submit(row, [5, 6], max_new_tokens=4)
        ((_, first),) = engine.step(temperature=1.0)
        engine.submit(row, [7], max_new_tokens=4)
        engine.step(temperature=1.0)
        engine.submit(row, [8, 9], max_new_tokens=4, restarts=True)
        engine.step(temperature=1.0)
    prompts = [body["prompt"] for path, body in fake.asked if path == COMPLETIONS][-3:]
    assert prompts == [[5, 6], [5, 6, *first.token_ids, 7], [8, 9]]


def test_a_copied_row_asks_with_the_same_context(engine: ServerEngine, fake: FakeVllm) -> None:
    with engine.rollout():
        row = engine.open_row(generator(0))
        engine.submit(row, [5, 6], max_new_tokens=4)
        ((_, first),) = engine.step(temperature=1.0)
        copied = engine.copy_row(row, generator(1))
        engine.submit(copied, [7], max_new_tokens=4)
        engine.step(temperature=1.0)
        engine.submit(row, [8], max_new_tokens=4)
        engine.step(temperature=1.0)
    prompts = [body["prompt"] for path, body in fake.asked if path == COMPLETIONS][-2:]
    assert prompts == [[5, 6, *first.token_ids, 7], [5, 6, *first.token_ids, 8]]


def test_a_context_that_does_not_fit_is_refused_and_changes_nothing(engine: ServerEngine) -> None:
    with engine.rollout():
        row = engine.open_row(generator(0))
        with pytest.raises(ContextError, match=r"131 tokens does not fit the cache of 120"):
            engine.submit(row, [5] * 31, max_new_tokens=100)
        assert row.context == []


@pytest.mark.slow
def test_rows_are_shared_among_servers(
    make_engine: Callable[..., ServerEngine], model: LanguageModel, fake: FakeVllm, url: str
) -> None:
    with serving(fake.first_folder) as (other, other_url):
        responses = respond(make_engine(model, base_url=[url, other_url]))
        shares = [
            sum(
                path == COMPLETIONS and body["max_tokens"] == MAX_NEW_TOKENS
                for path, body in each.asked
            )
            for each in (fake, other)
        ]
    assert sorted(shares) == [1, 2]
    assert largest_gap(model, responses) < ROUNDING


# Weights


def test_a_rollout_samples_from_the_weights_that_the_policy_has_when_it_begins(
    engine: ServerEngine, model: LanguageModel
) -> None:
    before = respond(engine)
    change(model)
    assert largest_gap(model, before) > 0.1
    assert largest_gap(model, respond(engine)) < ROUNDING


def test_weights_that_have_not_changed_are_not_sent_again(
    engine: ServerEngine, fake: FakeVllm
) -> None:
    respond(engine)
    respond(engine)
    assert fake.paths().count("/collective_rpc") == 1


@pytest.mark.slow
def test_two_policies_take_turns_on_a_server(
    make_engine: Callable[..., ServerEngine], model: LanguageModel, tiny_model: LanguageModel
) -> None:
    one, two = make_engine(model), make_engine(tiny_model)
    for _ in range(2):
        assert largest_gap(model, respond(one)) < ROUNDING
        assert largest_gap(tiny_model, respond(two)) < ROUNDING


@pytest.mark.slow
def test_adapters_are_loaded_under_a_new_name_and_old_ones_go(
    make_engine: Callable[..., ServerEngine], model: LanguageModel, fake: FakeVllm
) -> None:
    add_adapters(model.model, LoraConfig(rank=2, alpha=4), seed=0)
    engine = make_engine(model)
    names = set()
    for _ in range(3):
        change(model, mark=".lora_")
        assert largest_gap(model, respond(engine)) < ROUNDING
        assert len(fake.adapters) == 1
        names |= set(fake.adapters)
    assert len(names) == 3
    assert fake.paths().count("/collective_rpc") == 1


@pytest.mark.slow
def test_what_lies_beside_the_weights_of_servers_is_left_alone(
    make_engine: Callable[..., ServerEngine], model: LanguageModel, tmp_path: Path
) -> None:
    own = tmp_path / "served" / "ragen-apo-runs" / "policy.safetensors"
    own.parent.mkdir(parents=True)
    own.write_text("somebody's")
    engine = make_engine(model)
    for _ in range(2):
        change(model)
        respond(engine)
    assert [path.name for path in own.parent.parent.iterdir()] == ["ragen-apo-runs"]
    assert own.read_text() == "somebody's"


@pytest.mark.slow
def test_the_policy_without_its_adapters_is_another_one(
    make_engine: Callable[..., ServerEngine], model: LanguageModel
) -> None:
    add_adapters(model.model, LoraConfig(rank=2, alpha=4), seed=0)
    change(model, mark=".lora_")
    reference = model.without_adapters()
    for policy in (model, reference, model):
        assert largest_gap(policy, respond(make_engine(policy))) < ROUNDING


@pytest.mark.slow
def test_files_of_weights_do_not_stay(
    make_engine: Callable[..., ServerEngine], model: LanguageModel, tmp_path: Any
) -> None:
    add_adapters(model.model, LoraConfig(rank=2, alpha=4), seed=0)
    engine = make_engine(model)
    for _ in range(3):
        change(model, mark=".lora_")
        respond(engine)
    left = [path.name for path in (tmp_path / "served").iterdir()]
    assert len(left) == 1, "the adapter in use: vLLM may read it again"


@pytest.mark.slow
def test_a_tied_projection_on_a_cpu_is_refused_once_it_has_changed(
    engine: ServerEngine, model: LanguageModel, fake: FakeVllm
) -> None:
    fake.device = "cpu"
    respond(engine)
    change(model, mark="layers")
    respond(engine)
    change(model, mark="embed")
    with pytest.raises(ServerError, match=r"inference_server\.untied .* --model COPY"):
        respond(engine)


@pytest.mark.slow
def test_a_tied_projection_whose_folder_is_not_here_is_not_said_to_differ(
    engine: ServerEngine, fake: FakeVllm
) -> None:
    """Where the server was started with a relative path, in another directory."""
    fake.device = "cpu"

    def elsewhere(path: str, answer: Any) -> Any:
        if path == "/v1/models":
            answer["data"][0]["root"] = "models/elsewhere"
        return answer

    fake.spoil = elsewhere
    with pytest.raises(ServerError, match=r"models/elsewhere, which .* cannot be read from /.*abs"):
        respond(engine)


@pytest.mark.slow
def test_a_server_that_works_for_another_run_too_is_said_to(
    engine: ServerEngine, model: LanguageModel, fake: FakeVllm
) -> None:
    respond(engine)
    change(model)
    busy = {"success": False}
    fake.spoil = lambda path, answer: busy if path == "/reset_prefix_cache" else answer
    with pytest.raises(ServerError, match=r"kept its cache.* give each run servers of its own"):
        respond(engine)


@pytest.mark.slow
def test_weights_that_a_server_cannot_load_are_said_to_have_other_shapes(
    engine: ServerEngine, fake: FakeVllm
) -> None:
    fake.spoil = always("/collective_rpc", RefusalError(500, "Worker failed with error ''"))
    advice = (
        r"Worker failed .*may have other shapes than the policy.* Start the server again in any"
    )
    with pytest.raises(ServerError, match=advice):
        respond(engine)


# Failures


@pytest.mark.parametrize(
    ("error", "sentence"),
    quick_first(
        [
            (HangupError(), "the connection failed"),
            (RawError("<html>busy</html>"), "the answer is not JSON"),
            (RawError('{"choices": []}'), "answered 0 choices, expected 1"),
            (RawError('{"object": "error"}'), "choices: Field required"),
            (RefusalError(500, "EngineDeadError"), "status 500: EngineDeadError"),
        ]
    ),
    ids=["hangs up", "no JSON", "no choice", "another record", "dead engine"],
)
def test_a_failure_that_goes_on_ends_with_address_cause_and_advice(
    engine: ServerEngine, fake: FakeVllm, url: str, error: Exception, sentence: str
) -> None:
    respond(engine)
    fake.spoil = always(COMPLETIONS, error)
    with pytest.raises(ServerError) as caught:
        respond(engine)
    message = str(caught.value)
    assert message.startswith(f"{url}: /v1/completions")
    assert sentence in message
    assert "(3 times in a row)" in message
    assert "go on with --resume" in message


@pytest.mark.parametrize(
    "error",
    quick_first(
        [
            HangupError(),
            RawError("{}"),
            RefusalError(503, "busy"),
            RefusalError(404, "no such model"),
        ]
    ),
)
def test_a_failure_that_passes_is_not_noticed(
    engine: ServerEngine, model: LanguageModel, fake: FakeVllm, error: Exception
) -> None:
    respond(engine)
    fake.spoil = once(COMPLETIONS, error)
    assert largest_gap(model, respond(engine)) < ROUNDING


Choice = dict[str, Any]


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    quick_first(
        [
            (lambda c: c.pop("token_ids"), "choices.0.token_ids: Field required"),
            (lambda c: c.pop("logprobs"), "choices.0.logprobs.token_logprobs: Field required"),
            (lambda c: c["logprobs"]["token_logprobs"].pop(), "token_logprobs"),
            (lambda c: c["logprobs"]["token_logprobs"].__setitem__(0, None), "valid number"),
            (lambda c: c["logprobs"]["token_logprobs"].__setitem__(0, float("nan")), "not finite"),
            (lambda c: c["token_ids"].__setitem__(0, 10**6), "token 1000000, and the policy has"),
            (lambda c: c["prompt_token_ids"].pop(), "to another context than it was sent"),
            (lambda c: c["token_ids"].extend([5] * 50), "token_ids and"),
        ]
    ),
    ids=["no ids", "no logprobs", "one less", "null", "nan", "unknown token", "prompt", "too long"],
)
def test_numbers_that_cannot_be_right_are_not_believed(
    make_engine: Callable[..., ServerEngine],
    model: LanguageModel,
    fake: FakeVllm,
    spoil: Callable[[Choice], object],
    sentence: str,
) -> None:
    engine = make_engine(model, retries=0)
    respond(engine)

    def spoiled(path: str, answer: Any) -> Any:
        if path == COMPLETIONS:
            spoil(answer["choices"][0])
        return answer

    fake.spoil = spoiled
    with pytest.raises(ServerError) as caught:
        respond(engine)
    assert sentence in str(caught.value)


@pytest.mark.slow
def test_a_response_that_ends_for_a_reason_of_the_server_is_not_believed(
    make_engine: Callable[..., ServerEngine], model: LanguageModel, fake: FakeVllm
) -> None:
    engine = make_engine(model, retries=0)
    respond(engine)

    def cut(path: str, answer: Any) -> Any:
        if path == COMPLETIONS:
            choice = answer["choices"][0]
            choice |= {"token_ids": [5], "finish_reason": "stop"}
            choice["logprobs"] = {"token_logprobs": [-1.0]}
        return answer

    fake.spoil = cut
    with pytest.raises(ServerError, match=r"after 1 of 7 tokens for a reason of its own \(stop\)"):
        respond(engine)


@pytest.mark.slow
def test_what_was_sampled_past_the_end_of_a_response_is_cut_off(
    engine: ServerEngine, model: LanguageModel, fake: FakeVllm
) -> None:
    respond(engine)
    end = min(engine.stop_rule.end_ids)

    def run_on(path: str, answer: Any) -> Any:
        if path == COMPLETIONS:
            choice = answer["choices"][0]
            choice |= {"token_ids": [5, end, 6, 7], "logprobs": {"token_logprobs": [-1.0] * 4}}
        return answer

    fake.spoil = run_on
    assert {response.token_ids for response in respond(engine)} == {(5, end)}
    assert all(response.stopped for response in respond(engine))


@pytest.mark.slow
def test_a_server_that_was_started_again_gets_its_weights_again(
    engine: ServerEngine, model: LanguageModel, fake: FakeVllm
) -> None:
    change(model)
    respond(engine)
    restart_once(fake, hangs_up=True)
    assert largest_gap(model, respond(engine)) < ROUNDING


@pytest.mark.slow
def test_a_response_of_other_weights_is_not_taken(
    engine: ServerEngine, model: LanguageModel, fake: FakeVllm
) -> None:
    """The server is started again between two requests, so that no connection ever fails."""
    change(model)
    respond(engine)
    restart_once(fake)
    assert largest_gap(model, respond(engine)) < ROUNDING


@pytest.mark.slow
def test_an_adapter_that_a_restart_has_lost_is_loaded_again(
    make_engine: Callable[..., ServerEngine], model: LanguageModel, fake: FakeVllm
) -> None:
    add_adapters(model.model, LoraConfig(rank=2, alpha=4), seed=0)
    change(model, mark=".lora_")
    engine = make_engine(model)
    respond(engine)
    restart_once(fake, hangs_up=True)
    assert largest_gap(model, respond(engine)) < ROUNDING


@pytest.mark.slow
def test_weights_that_the_server_does_not_take_over_are_noticed_before_an_episode_is_played(
    make_engine: Callable[..., ServerEngine], model: LanguageModel, fake: FakeVllm
) -> None:
    engine = make_engine(model, retries=0)
    respond(engine)
    keep_weights(fake)
    change(model)
    with pytest.raises(ServerError, match="it computes another model"):
        respond(engine)


@pytest.mark.parametrize("temperature", [0.5, 0.98])
def test_log_probabilities_before_the_temperature_are_recognised(
    temperature: float,
    make_engine: Callable[..., ServerEngine],
    model: LanguageModel,
    fake: FakeVllm,
) -> None:
    """At once: another attempt would compute the same. Also where they differ by little."""
    fake.scale_logprobs = False
    engine = make_engine(model, retries=3, temperature=temperature)
    advice = "differ from the policy's by .* start it with --logprobs-mode processed_logprobs"
    with pytest.raises(ServerError, match=advice):
        respond(engine, temperature=temperature)
    assert len([path for path, _ in fake.asked if path == COMPLETIONS]) == 2


@pytest.mark.slow
def test_servers_are_compared_at_the_temperature_of_training_before_an_episode_is_played(
    make_engine: Callable[..., ServerEngine], model: LanguageModel, fake: FakeVllm
) -> None:
    """In an evaluation as well."""
    respond(make_engine(model, temperature=0.5), temperature=0.0)
    sent = [body["temperature"] for path, body in fake.asked if path == COMPLETIONS]
    assert sent == [0.5, 0.5, *[0.0] * len(PROMPTS)]


def test_a_server_that_holds_shorter_contexts_is_refused(
    engine: ServerEngine, fake: FakeVllm
) -> None:
    fake.max_model_len = CAPACITY_OF_SERVER = 100
    with pytest.raises(ServerError, match=f"takes contexts of {CAPACITY_OF_SERVER} tokens"):
        respond(engine)


def test_an_address_without_a_server_says_so(
    make_engine: Callable[..., ServerEngine], model: LanguageModel
) -> None:
    with pytest.raises(ServerError, match=r"Start the server .* or correct rollouts\.base_url"):
        respond(make_engine(model, base_url=["http://127.0.0.1:9"]))


def test_a_server_without_the_routes_for_weights_says_which_options_it_lacks(
    engine: ServerEngine, fake: FakeVllm
) -> None:
    fake.spoil = always("/weight_info", RefusalError(404, "Not Found"))
    with pytest.raises(ServerError, match="VLLM_SERVER_DEV_MODE=1"):
        respond(engine)
    assert fake.paths().count("/weight_info") == 1, "asking again would be no use"


@pytest.mark.slow
def test_a_response_that_does_not_come_in_time_is_asked_for_again(
    make_engine: Callable[..., ServerEngine], model: LanguageModel, fake: FakeVllm
) -> None:
    engine = make_engine(model, timeout_seconds=2.0)
    respond(engine)
    fake.asked.clear()
    fake.spoil = once(COMPLETIONS, StallError("60"))
    assert largest_gap(model, respond(engine)) < ROUNDING
    assert fake.paths().count(COMPLETIONS) > len(PROMPTS)


@pytest.mark.slow
def test_a_server_that_stalls_again_and_again_ends_in_one_error(
    make_engine: Callable[..., ServerEngine], model: LanguageModel, fake: FakeVllm, url: str
) -> None:
    engine = make_engine(model, timeout_seconds=2.0, retries=1)
    respond(engine)
    fake.spoil = always(COMPLETIONS, StallError("60"))
    with pytest.raises(ServerError) as caught:
        respond(engine)
    message = str(caught.value)
    assert message.startswith(f"{url}: /v1/completions had no whole answer within 2 seconds (2 ")
    assert "raise rollouts.timeout_seconds" in message
    assert "go on with --resume" in message


# Keys


@pytest.mark.slow
def test_a_server_that_wants_a_key_gets_the_one_in_the_variable(
    make_engine: Callable[..., ServerEngine],
    model: LanguageModel,
    fake: FakeVllm,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake.api_key = KEY
    monkeypatch.setenv("SERVER_KEY", KEY)
    engine = make_engine(model, api_key_env="SERVER_KEY")
    assert largest_gap(model, respond(engine)) < ROUNDING


@pytest.mark.parametrize(
    ("sent", "advice"),
    [
        (None, r"name the environment variable that holds it in rollouts\.api_key_env"),
        ("other-secret-key", r"does not accept the key in the environment variable that rollouts"),
    ],
)
def test_a_key_that_is_lacking_or_wrong_is_said_at_once_and_never_shown(
    make_engine: Callable[..., ServerEngine],
    model: LanguageModel,
    fake: FakeVllm,
    monkeypatch: pytest.MonkeyPatch,
    sent: str | None,
    advice: str,
) -> None:
    """The fake's answer repeats what it was sent."""
    fake.api_key = KEY
    monkeypatch.setenv("SERVER_KEY", sent or "")
    engine = make_engine(model, api_key_env="SERVER_KEY" if sent else None)
    with pytest.raises(ServerError, match=f"status 401: Unauthorized.* {advice}") as caught:
        respond(engine)
    assert fake.paths().count("/v1/models") == 1, "asking again would be no use"
    error: BaseException | None = caught.value
    while error is not None:
        assert "other-secret-key" not in f"{error} {error!r} {vars(error)}"
        error = error.__cause__ or error.__context__


def test_a_key_that_is_not_there_is_missed_before_anything_is_asked(
    make_engine: Callable[..., ServerEngine],
    model: LanguageModel,
    fake: FakeVllm,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("SERVER_KEY", raising=False)
    with pytest.raises(ConfigError, match=r"rollouts\.api_key_env names is not set"):
        make_engine(model, api_key_env="SERVER_KEY")
    assert not fake.asked


# Interruptions


def test_an_interrupted_rollout_leaves_no_request_behind(
    engine: ServerEngine, fake: FakeVllm, monkeypatch: pytest.MonkeyPatch
) -> None:
    respond(engine)
    fake.spoil = always(COMPLETIONS, StallError("5"))
    monkeypatch.setattr("ragen_apo.policy.inference_server.engine.wait", _interrupt)
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        respond(engine)
    assert time.monotonic() - started < 4
    assert engine.num_free_rows == engine.num_rows


def _interrupt(*_: object, **__: object) -> None:
    time.sleep(0.2)
    raise KeyboardInterrupt
