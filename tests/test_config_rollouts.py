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
        (["engine=vllm", "base_url=127.0.0.1:8000"], "must be like http://127.0.0.1:8000"),
        (["engine=vllm", "base_url=http://127.0.0.1:99999"], "is no address"),
        (["engine=vllm", "base_url=http://me:secret@host"], "without user, password"),
    ],
)
def test_addresses_that_cannot_be_used_are_refused(keys: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config(*[f"--rollouts.{key}" for key in keys])
    assert sentence in str(caught.value)
    if "secret" in keys[-1]:
        assert "me:secret" not in str(caught.value)


def test_a_server_is_named_once() -> None:
    section = f"rollouts: {{engine: vllm, base_url: ['{URL}', '{URL}']}}"
    with pytest.raises(ConfigError, match="names a server twice"):
        config(text=f"{TINY_CONFIG}\n{section}\n")
