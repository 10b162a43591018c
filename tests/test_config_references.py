"""Environments that a configuration names by the place of their code."""

from pathlib import Path

import pytest

from ragen_apo.config.environment import EnvironmentConfig
from ragen_apo.config.references import file_of, is_reference, names_of


def test_the_file_of_an_environment_is_kept_as_an_absolute_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    section = {
        "name": "mixture",
        "parts": {"a": {"name": "./mine.py:make"}, "b": {"name": "worlds.mine:make"}, "shop": {}},
    }
    mixture = EnvironmentConfig.model_validate(section)
    names = [part.get("name") for part in mixture.options["parts"].values()]
    assert names == [f"{tmp_path}/mine.py:make", "worlds.mine:make", None]
    single = EnvironmentConfig.model_validate({"name": "worlds/mine.py:make"})
    assert single.name == f"{tmp_path}/worlds/mine.py:make"


@pytest.mark.parametrize("name", ["shop", "mixture", "guess_number"])
def test_a_plain_name_is_no_reference_and_stays_as_it_is(name: str) -> None:
    assert not is_reference(name)
    assert file_of(name) is None
    assert EnvironmentConfig.model_validate({"name": name}).name == name


def test_the_home_directory_and_colons_in_a_path_are_understood(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert file_of("~/worlds/mine.py:make") == Path("/home/me/worlds/mine.py")
    assert file_of("/a:b/mine.py:make") == Path("/a:b/mine.py")


def test_all_names_of_a_mixture_are_found_whatever_its_parts_look_like() -> None:
    parts = {"a": {"name": "x.py:make"}, "y.py:make": {"weight": 2}, "shop": None}
    assert list(names_of("mixture", {"parts": parts})) == [
        *("mixture", "x.py:make", "y.py:make", "shop")
    ]
    assert list(names_of("shop", {"parts": 3})) == ["shop"]


def test_an_option_may_have_any_key() -> None:
    assert EnvironmentConfig.model_validate({"self": 1}).options == {"self": 1}
