"""Where a server is and which key it gets; neither addresses nor keys are repeated in messages."""

from __future__ import annotations

import pytest

from ragen_apo.errors import ConfigError
from ragen_apo.policy.chat_api.address import Address, key_for, read_address

REMOTE = Address("https://api.example.com/v1")
KEY = "sk-very-secret-0123456789"


@pytest.mark.parametrize(
    "given",
    [
        "http://127.0.0.1:8000/v1",
        "http://127.0.0.1:8000/v1/",
        " http://127.0.0.1:8000/v1/chat/completions ",
    ],
)
def test_an_address_is_read_with_and_without_its_end(given: str) -> None:
    address = read_address(given)
    assert address.chat_url == "http://127.0.0.1:8000/v1/chat/completions"
    assert address.server == "127.0.0.1:8000"


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ("https://user:hunter2@host/v1", "a user name or a password"),
        ("https://hunter2@host/v1", "a user name or a password"),
        ("https://user:hunter2@host:port/v1", "a user name or a password"),
        ("https://host/v1?key=hunter2", "a part after"),
        ("https://host/v1#hunter2", "a part after"),
        ("host/hunter2", "no http:// or https://"),
        ("ftp://host/hunter2", "no http:// or https://"),
        ("https://host:hunter2/v1", "is no URL"),
        ("https://[hunter2/v1", "is no URL"),
        ("https://host/hun ter2", "spaces"),
        ("", "no http:// or https://"),
    ],
)
def test_what_is_no_address_is_refused_without_being_repeated(given: str, problem: str) -> None:
    with pytest.raises(ConfigError, match="base_url") as caught:
        read_address(given)
    assert problem in str(caught.value)
    assert "hunter2" not in repr(caught.value)
    assert caught.value.__cause__ is None


@pytest.mark.parametrize(
    ("url", "is_private"),
    [
        ("https://api.example.com/v1", True),
        ("http://localhost:8000/v1", True),
        ("http://127.0.0.9:8000/v1", True),
        ("http://[::1]:8000/v1", True),
        ("http://10.0.0.4:8000/v1", False),
        ("http://gpu-node:8000/v1", False),
    ],
)
def test_an_unencrypted_address_of_another_machine_is_not_private(
    url: str, is_private: bool
) -> None:
    assert read_address(url).is_private is is_private


def test_the_usual_variable_holds_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", f" {KEY}\n")
    assert key_for(REMOTE, variable=None) == KEY


def test_without_the_usual_variable_there_is_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    assert key_for(REMOTE, variable=None) is None


def test_the_usual_key_is_not_sent_unencrypted_to_another_machine_and_a_named_one_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    plain = Address("http://gpu-node:8000/v1")
    assert key_for(plain, variable=None) is None
    assert key_for(plain, variable="OPENAI_API_KEY") == KEY


def test_a_named_variable_that_is_not_set_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MY_KEY", raising=False)
    with pytest.raises(ConfigError, match="is not set"):
        key_for(REMOTE, variable="MY_KEY")


@pytest.mark.parametrize("pasted", [KEY, "sk_very_secret_0123456789"])
def test_a_key_in_place_of_a_variable_is_not_repeated(pasted: str) -> None:
    with pytest.raises(ConfigError, match="environment variable") as caught:
        key_for(REMOTE, variable=pasted)
    assert pasted not in str(caught.value)


@pytest.mark.parametrize("value", ["sk-two words", "sk-é", "sk-a\nb"])
def test_a_value_that_is_no_key_is_not_repeated(
    value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", value)
    with pytest.raises(ConfigError, match="set it to the key alone") as caught:
        key_for(REMOTE, variable=None)
    assert "sk-" not in str(caught.value)
