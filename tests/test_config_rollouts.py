"""The section `rollouts`: who samples, and at which addresses."""

import pytest

from ragen_apo.config.rollouts import RolloutsConfig
from ragen_apo.errors import ConfigError
from tests.factories import TINY_CONFIG, config

URL = "http://127.0.0.1:8000"


def test_the_process_itself_samples_unless_told_otherwise() -> None:
    assert RolloutsConfig().engine == "local"
    assert config().rollouts == RolloutsConfig()


def test_one_address_is_a_list_of_one() -> None:
    read = config("--rollouts.engine=vllm", f"--rollouts.base_url={URL}")
    assert read.rollouts.base_url == [URL]


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        (["engine=vllm"], "engine vllm needs base_url"),
        (["engine=vllm", "base_url=127.0.0.1:8000"], "expected it like http://127.0.0.1:8000"),
        (["engine=vllm", "base_url=http://127.0.0.1:99999"], "is no URL"),
        (["engine=vllm", "base_url=http://me:secret@host"], "a password"),
        (["engine=vllm", "base_url=http://me:secret@host:99999"], "a password"),
        (["engine=vllm", "base_url=me:secret@host"], "a password"),
        (["engine=vllm", "base_url=http://host/v1?key=secret"], "where keys are written at times"),
        (["engine=vllm", f"base_url={URL}", "api_key_env=sk-secret"], "name of an environment"),
    ],
)
def test_addresses_that_cannot_be_used_are_refused(keys: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config(*[f"--rollouts.{key}" for key in keys])
    assert sentence in str(caught.value)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("number", ["0", "1001", "1.5", "null", "true"])
def test_a_number_of_workers_that_makes_no_sense_is_refused(number: str) -> None:
    with pytest.raises(ConfigError, match=r"num_environment_workers.*at least 1 and at most 1,000"):
        config(f"--rollouts.num_environment_workers={number}")


def test_only_environments_in_processes_have_a_time_limit() -> None:
    limit = "--rollouts.environment_timeout_seconds=60"
    with pytest.raises(ConfigError, match="needs environment_processes: true"):
        config(limit)
    found = config(limit, "--rollouts.environment_processes=true").rollouts
    assert found.environment_timeout_seconds == 60


@pytest.mark.parametrize("written", [f"{URL}/", f"{URL}/v1", f"{URL}/v1/"])
def test_an_address_may_be_that_of_clients_of_openai(written: str) -> None:
    read = config("--rollouts.engine=vllm", f"--rollouts.base_url={written}")
    assert read.rollouts.base_url == [URL]


@pytest.mark.parametrize("again", [URL, f"{URL}/", f"{URL}/v1"])
def test_a_server_is_named_once(again: str) -> None:
    section = f"rollouts: {{engine: vllm, base_url: ['{URL}', '{again}']}}"
    with pytest.raises(ConfigError, match="names a server twice"):
        config(text=f"{TINY_CONFIG}\n{section}\n")
