"""The configurations that come with the package are found by their names, without a clone."""

import sys
from pathlib import Path

import pytest

import ragen_apo
from ragen_apo.api import read_config
from ragen_apo.comparison.plan import load_comparison
from ragen_apo.config import load_config
from ragen_apo.config.shipped import FOLDERS, purpose_of, shipped_configurations
from ragen_apo.errors import ConfigError
from tests.command_line import Command, assert_refused

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current folder without configs/, as that of someone who installed a wheel."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_they_are_those_of_the_folder() -> None:
    assert list(shipped_configurations().values()) == sorted((ROOT / "configs").glob("*.yaml"))


def test_a_wheel_has_them_where_an_installed_package_looks() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    wheel = settings["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert "configs" in wheel["only-include"]
    package = Path(ragen_apo.__file__).resolve().parent
    assert package.parent / wheel["sources"]["configs"] == FOLDERS[0]


@pytest.mark.usefixtures("elsewhere")
def test_a_name_is_as_good_as_a_path() -> None:
    by_path = load_config(ROOT / "configs" / "smoke.yaml", ["--seed=3"])
    assert load_config("smoke", ["--seed=3"]) == by_path
    assert read_config("smoke", seed=3) == by_path
    assert load_comparison(Path("compare_shop")) == load_comparison(
        ROOT / "configs" / "compare_shop.yaml"
    )


def test_a_file_of_that_name_comes_first(elsewhere: Path) -> None:
    (elsewhere / "smoke").write_text("seed: 9\n", encoding="utf-8")
    assert load_config("smoke").seed == 9


@pytest.mark.usefixtures("elsewhere")
def test_a_folder_of_that_name_may_be_its_run() -> None:
    Path("smoke").mkdir()
    assert load_config("smoke").environment.name == "shop"
    Path("mine.yaml").write_text("base: smoke\nseeds: [0]\nruns: {A*-PO: {}}\n", encoding="utf-8")
    assert load_comparison(Path("mine.yaml")).base["environment"]["num_products"] == 60


def test_a_comparison_of_ones_own_names_its_base(elsewhere: Path) -> None:
    mine = elsewhere / "mine.yaml"
    mine.write_text("base: smoke\nseeds: [0]\nruns: {A*-PO: {}}\n", encoding="utf-8")
    assert load_comparison(mine).base["environment"]["num_products"] == 60
    mine.write_text("base: smoke.yaml\nseeds: [0]\nruns: {A*-PO: {}}\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"there is no base .*smoke\.yaml; .* such as smoke "):
        load_comparison(mine)


@pytest.mark.usefixtures("elsewhere")
def test_a_path_of_a_clone_is_answered_with_the_name(command: Command) -> None:
    result = command("train", "--config", "configs/shop.yaml", "--run-dir", "run")
    assert_refused(result, "there is no configuration configs/shop.yaml", "such as shop ")
    result = command("compare", "--config", "configs/compare_sokoban.yaml")
    missing = "there is no comparison configs/compare_sokoban.yaml"
    assert_refused(result, missing, "such as compare_sokoban ")
    result = command("compare", "--config", "configs/shop.yaml")
    assert_refused(result, "there is no comparison configs/shop.yaml", "such as compare_shop ")


@pytest.mark.usefixtures("elsewhere")
def test_the_command_lists_and_prints_them(command: Command) -> None:
    listed = command("configs").out
    for name in shipped_configurations():
        assert f"{name}\n" in listed
    assert command("configs", "shop").out == (ROOT / "configs" / "shop.yaml").read_text("utf-8")
    assert_refused(command("configs", "shopp"), "there is no configuration shopp")


@pytest.mark.parametrize("name", shipped_configurations())
def test_each_says_in_a_sentence_what_it_is_for(name: str) -> None:
    purpose = purpose_of(shipped_configurations()[name])
    assert 20 < len(purpose) < 230 and "ragen-apo compare" not in purpose, purpose
