import sys
from collections.abc import Sequence
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import BaseModel, ConfigDict

from ragen_apo.environments import base
from ragen_apo.environments.base import (
    TaskFinder,
    environment_names,
    make_environment,
    validate_options,
)
from ragen_apo.environments.shop import ShopEnvironment
from ragen_apo.errors import ConfigError, EnvironmentFaultError
from ragen_apo.types import Task


class Inner(BaseModel):
    model_config = ConfigDict(extra="forbid")
    width: int = 1


class Outer(BaseModel):
    model_config = ConfigDict(extra="forbid")
    inner: Inner = Inner()
    rows: list[Inner] = []
    height: int


def install_plugin(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    plugin = EntryPoint(name=name, value=value, group=base.ENTRY_POINT_GROUP)

    def only_this(*, group: str, name: str | None = None) -> list[EntryPoint]:
        assert group == "ragen_apo.environments"
        return [plugin] if name in (None, plugin.name) else []

    monkeypatch.setattr(base, "entry_points", only_this)


def message(options: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        validate_options(Outer, options, where="here")
    return str(caught.value)


def test_an_unknown_name_is_an_error_with_the_closest_known_one() -> None:
    with pytest.raises(ConfigError, match=r"got 'shpo'.*did you mean 'shop'"):
        make_environment("shpo", {})


def test_an_installed_plugin_is_found_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    install_plugin(monkeypatch, "market", "ragen_apo.environments.shop:ShopEnvironment")
    assert "market" in environment_names()
    assert isinstance(make_environment("market", {"max_turns": 3}), ShopEnvironment)


def test_a_plugin_cannot_take_over_a_built_in_name(monkeypatch: pytest.MonkeyPatch) -> None:
    install_plugin(monkeypatch, "shop", "builtins:dict")
    assert isinstance(make_environment("shop", {}), ShopEnvironment)


@pytest.mark.parametrize("value", ["no_such_module:Thing", "ragen_apo.no_such_module:Thing"])
def test_a_plugin_that_cannot_be_loaded_is_an_error(
    monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    install_plugin(monkeypatch, "market", value)
    with pytest.raises(ConfigError, match="'market' cannot be loaded"):
        make_environment("market", {})


def broken_factory(**options: Any) -> object:
    raise KeyError(options.get("why"))


def exiting_factory() -> object:
    sys.exit(0)


NO_FACTORY = 7


@pytest.mark.parametrize(
    ("value", "error", "words"),
    [
        (
            "broken_factory",
            EnvironmentFaultError,
            r"raised KeyError\('because'\) in .*py",
        ),
        ("exiting_factory", ConfigError, "does not take these options"),
        ("NO_FACTORY", ConfigError, "is of the type int, which cannot be called"),
        ("Inner.nothing", EnvironmentFaultError, "importing it raised AttributeError"),
    ],
)
def test_a_plugin_that_raises_or_cannot_be_called_is_told_in_one_line(
    monkeypatch: pytest.MonkeyPatch, value: str, error: type[Exception], words: str
) -> None:
    monkeypatch.setitem(sys.modules, "plugin_of_a_test", sys.modules[__name__])
    install_plugin(monkeypatch, "market", f"plugin_of_a_test:{value}")
    with pytest.raises(error, match=words) as caught:
        make_environment("market", {"why": "because"})
    assert "\n" not in str(caught.value)


def test_a_plugin_that_raises_or_exits_when_it_is_imported_is_told_in_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    for name, body in (("raising_plugin", "1 / 0"), ("exiting_plugin", "exit(0)")):
        (tmp_path / f"{name}.py").write_text(body)
        install_plugin(monkeypatch, "market", f"{name}:make")
        with pytest.raises(EnvironmentFaultError, match="'market': importing it raised"):
            make_environment("market", {})


def test_an_option_whose_key_is_no_text_is_an_unknown_key() -> None:
    with pytest.raises(ConfigError, match="environment.5: unknown key"):
        make_environment("shop", {5: 1})  # pyright: ignore[reportArgumentType]


def test_good_options_become_a_record() -> None:
    assert validate_options(Outer, {"height": 2}) == Outer(height=2)


def test_a_missing_key_is_named() -> None:
    assert message({}) == "here.height: missing; add this key"


def test_an_unknown_nested_key_is_compared_with_the_keys_of_its_own_section() -> None:
    assert message({"height": 1, "inner": {"widht": 3}}) == (
        "here.inner.widht: unknown key; did you mean here.inner.width?"
    )
    assert "here.rows.0.w: unknown key" in message({"height": 1, "rows": [{"w": 3}]})


def test_every_problem_has_its_own_line_and_long_values_are_shortened() -> None:
    lines = message({"height": "x" * 500, "depth": 1}).splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("here.height: got 'xxx")
    assert "..., expected a whole number" in lines[0]
    assert len(lines[0]) < 200
    assert lines[1].startswith("here.depth: unknown key")


class Counted:
    """Tasks that count how often they are read."""

    def __init__(self, tasks: Sequence[Task]) -> None:
        self.tasks, self.num_read = tasks, 0

    def __len__(self) -> int:
        return len(self.tasks)

    def __getitem__(self, index: int) -> Task:
        self.num_read += 1
        return self.tasks[index]


def test_tasks_are_read_once_however_often_they_are_looked_up_by_id() -> None:
    environment = make_environment("bandit", {})
    split = Counted(environment.tasks("train"))
    held = SimpleNamespace(properties=environment.properties, tasks=lambda _: split)
    finder = TaskFinder(held)
    for _ in range(3):
        for task in split.tasks:
            assert finder.find(task.task_id, ["train"]) == task
    assert split.num_read <= 4 * len(split) + 1
    with pytest.raises(ConfigError, match=r"no task has the id 'x'; .* split train of this"):
        finder.find("x", ["train"])
