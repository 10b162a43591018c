"""docs/adding_an_algorithm.md: its algorithm, installed from the page as a user would, trains."""

import os
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from ragen_apo.config import algorithms as registry
from ragen_apo.config import load_config, parse_config
from ragen_apo.errors import ConfigError
from ragen_apo.files import read_json_lines
from ragen_apo.report.tables import compact_mean
from ragen_apo.run_directory import RunDirectory
from tests.command_line import Command, assert_refused
from tests.forks import forked_command

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGE = DOCS / "adding_an_algorithm.md"


def block(language: str, page: Path = PAGE) -> str:
    found = re.search(rf"^```{language}\n(.*?)^```", page.read_text("utf-8"), re.M | re.S)
    assert found, f"{page} has no block in {language}"
    return found[1]


def install(folder: Path, *, name: str, entry_points: dict[str, str]) -> Path:
    """What `pip install` leaves in site-packages of a package with such entry points."""
    information = folder / f"{name}-0.1.dist-info"
    information.mkdir(parents=True)
    text = f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1\n"
    (information / "METADATA").write_text(text, encoding="utf-8")
    rows = [f"{point} = {value}\n" for point, value in entry_points.items()]
    (information / "entry_points.txt").write_text(
        f"[{registry.ENTRY_POINT_GROUP}]\n{''.join(rows)}", encoding="utf-8"
    )
    return folder


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder with the page's package; nothing has put it on a path yet."""
    project = tomllib.loads(block("toml"))
    points = project["project"]["entry-points"][registry.ENTRY_POINT_GROUP]
    site = install(tmp_path / "site", name="step_rloo", entry_points=points)
    (module,) = project["tool"]["setuptools"]["py-modules"]
    (site / f"{module}.py").write_text(block("python"), encoding="utf-8")
    return site


@pytest.fixture
def installed(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package in this process."""
    monkeypatch.syspath_prepend(site)
    monkeypatch.delitem(sys.modules, "step_rloo", raising=False)


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
def test_the_installed_package_trains_through_the_command_line(site: Path, tmp_path: Path) -> None:
    world = DOCS / "adding_an_environment.md"
    (tmp_path / "guess_number.py").write_text(block("python", world), encoding="utf-8")
    (tmp_path / "guess_number.yaml").write_text(block("yaml", world), encoding="utf-8")
    (line,) = re.findall(r"^ragen-apo (train .*--algorithm step_rloo.*)$", PAGE.read_text(), re.M)
    short = [
        "--warm_start.demonstrations.num_steps=2",
        "--warm_start.demonstrations.num_episodes_per_task=2",
        "--training.max_steps=2",
        "--training.tasks_per_step=4",
        "--evaluation.num_episodes=2",
        "--machine.num_threads=1",
        "--agent.max_response_tokens=6",
        "--algorithm.baseline_weight=0.5",
    ]

    def with_the_package() -> None:
        sys.path.insert(0, str(site))
        os.chdir(tmp_path)

    process = forked_command(tmp_path / "output", *line.split(), *short, before=with_the_package)
    said = process.ended()
    assert process.returncode == 0, said
    run = tmp_path / "runs" / "step_rloo"
    rows = list(read_json_lines(run / "metrics.jsonl"))
    assert [row["num_episodes"] for row in rows] == [4, 4]
    assert "Step RLOO (trained)" in said
    page = (run / "report" / "report.html").read_text("utf-8")
    assert "Step RLOO compares each episode with the others of its step" in page
    for curve in ("Spread of advantages", "Spread of returns"):
        assert f"{curve}, over the steps" in page
    shown = [compact_mean(row["return_std"]) for row in rows]
    cells = "".join(f'<td class="n">{number}</td>' for number in shown)
    assert f"<td>return, standard deviation</td>{cells}" in page
    assert not RunDirectory(run).values.exists()
    saved = (run / "config.yaml").read_text("utf-8")
    assert "baseline_weight: 0.5" in saved and "center_residuals" not in saved


@pytest.mark.usefixtures("installed")
def test_its_section_is_read_with_its_own_option_and_without_those_of_others() -> None:
    written = block("yaml")
    settings = parse_config(written, source="page").algorithm
    assert settings.model_dump()["baseline_weight"] == 0.9
    assert settings.traits.label == "Step RLOO"
    with pytest.raises(ConfigError, match=r"baseline_weight: got 2, expected .* at most 1"):
        parse_config(written, source="page", overrides=["--algorithm.baseline_weight=2"])
    with pytest.raises(ConfigError, match="baseline_weight: unknown key; .* option of step_rloo"):
        parse_config("algorithm: {name: rloo, baseline_weight: 0.9}", source="page")
    with pytest.raises(ConfigError, match="tasks_per_step must be at least 2, got 1"):
        parse_config(written, source="page", overrides=["--training.tasks_per_step=1"])


def test_a_row_of_the_registry_does_the_same(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (name, place), *others = re.findall(
        r'^ +"(\w+)": "ragen_apo\.training\.algorithms\.([\w.:]+)",$', PAGE.read_text("utf-8"), re.M
    )
    assert not others
    module = "ragen_apo.training.algorithms.step_rloo"
    monkeypatch.setitem(sys.modules, module, imported(block("python"), module))
    monkeypatch.setitem(registry.ALGORITHMS, name, f"ragen_apo.training.algorithms.{place}")
    assert name in registry.algorithm_names()
    assert parse_config(f"algorithm: {name}", source="page").algorithm.traits.label == "Step RLOO"


def imported(code: str, name: str) -> ModuleType:
    """A module of this code; pydantic looks for it by its name."""
    module = ModuleType(name)
    exec(compile(code, name, "exec"), module.__dict__)
    return module


@pytest.mark.usefixtures("installed")
def test_the_test_on_the_page_passes_and_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    test = imported(block("python test"), "page_test")
    test.test_the_expected_gradient_is_that_of_the_expected_return()

    def against_the_mean_of_all(self, rollouts):
        return rollouts.spread(rollouts.returns_B - rollouts.returns_B.mean())

    monkeypatch.setattr(test.StepRloo, "advantages", against_the_mean_of_all)
    with pytest.raises(AssertionError, match="not close"):
        test.test_the_expected_gradient_is_that_of_the_expected_return()


@pytest.mark.usefixtures("installed")
def test_hand_computed_advantages() -> None:
    test = imported(block("python test"), "page_test")
    returns_B = torch.tensor([1.0, 0.0, 0.5])
    # The others' means are 0.25, 0.75 and 0.5.
    actual_BT = test.StepRloo().advantages(test.TwoEpisodes(returns_B))
    assert actual_BT[:, 0].tolist() == [0.75, -0.75, 0.0]
    halved_BT = test.StepRloo(baseline_weight=0.5).advantages(test.TwoEpisodes(returns_B))
    assert halved_BT[:, 0].tolist() == [0.875, -0.375, 0.25]


def test_a_package_that_is_broken_is_an_error_only_where_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    points = {"gone": "there_is_no_such_module:Gone", "dumps": "json:dumps"}
    monkeypatch.syspath_prepend(install(tmp_path / "site", name="broken", entry_points=points))
    config = tmp_path / "run.yaml"
    config.write_text("algorithm: rloo\n", encoding="utf-8")
    assert load_config(config, ["--algorithm.group_size=4"]).algorithm.rollouts_per_task == 4
    train = ["train", "--config", config, "--run-dir", tmp_path / "run", "--algorithm"]
    assert_refused(command(*train, "gone"), "'gone'", "cannot be used", "ModuleNotFoundError")
    assert_refused(command(*train, "dumps"), "'dumps' (json:dumps)", "expected a subclass of")
    assert not (tmp_path / "run").exists()
