"""docs/adding_an_algorithm.md: its algorithm trains, named by its file and installed."""

import importlib
import os
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

import ragen_apo
from ragen_apo.api import read_config
from ragen_apo.config import algorithms as registry
from ragen_apo.config import load_config, load_run_config, parse_config, resolved_yaml
from ragen_apo.config.load import read_values
from ragen_apo.errors import ConfigError, TrainingError
from ragen_apo.files import read_json_lines
from ragen_apo.report.algorithm import algorithm_of
from ragen_apo.report.load import RunData
from ragen_apo.report.tables import compact_mean
from ragen_apo.run_directory import RunDirectory
from ragen_apo.training.algorithms.clipped_ratio import ClippedRatio
from tests import factories
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


@pytest.fixture
def beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with the page's file and nothing installed."""
    (tmp_path / "step_rloo.py").write_text(block("python"), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn", "beside")
def test_the_file_on_the_page_trains_through_the_command_line(tmp_path: Path) -> None:
    world = DOCS / "adding_an_environment.md"
    (tmp_path / "guess_number.py").write_text(block("python", world), encoding="utf-8")
    (tmp_path / "guess_number.yaml").write_text(block("yaml", world), encoding="utf-8")
    (line,) = re.findall(r"^ragen-apo (train .*--algorithm \./.*)$", PAGE.read_text(), re.M)
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

    process = forked_command(tmp_path / "output", *line.split(), *short)
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
    assert f"name: {tmp_path}/step_rloo.py:StepRloo" in saved
    code = (tmp_path / "step_rloo.py").read_text("utf-8")
    (tmp_path / "step_rloo.py").write_text(f"{code}\n# edited\n", encoding="utf-8")
    goes_on = ["train", "--run-dir", str(run), "--resume", "--training.max_steps=3"]
    goes_on.append("--algorithm.baseline_weight=0.5")  # as the scripts of a cloud give it again
    (tmp_path / "elsewhere").mkdir()
    for trust, status in ([], 2), (["--trust-remote-code"], 0):
        process = forked_command(
            tmp_path / "again",
            *goes_on,
            *trust,
            "--no-evaluate",
            before=lambda: os.chdir(tmp_path / "elsewhere"),
        )
        said = process.ended()
        assert process.returncode == status, said
        expected = "was edited since this run started" if trust else "names Python code"
        assert expected in " ".join(said.split())
    assert len(list(read_json_lines(run / "metrics.jsonl"))) == 3


@pytest.mark.usefixtures("beside")
def test_the_section_on_the_page_names_the_file(command: Command) -> None:
    written = block("yaml")
    settings = parse_config(written, source="page").algorithm
    assert (settings.traits.label, settings.short_name) == ("Step RLOO", "step_rloo")
    assert settings.name == f"{Path.cwd()}/step_rloo.py:StepRloo"
    again = parse_config(f"algorithm: {settings.name}", source="page").algorithm
    assert type(again) is type(settings) and again.model_dump()["baseline_weight"] == 1.0
    changed = ["--algorithm.baseline_weight=0.25"]
    config = Path("rloo.yaml")
    config.write_text("algorithm: {name: rloo, kl_coefficient: 0.5}\n", encoding="utf-8")
    named = load_config(config, ["--algorithm", "step_rloo.py:StepRloo", *changed]).algorithm
    assert named.model_dump()["baseline_weight"] == 0.25
    assert named.model_dump()["kl_coefficient"] == 0.5
    with pytest.raises(ConfigError, match=r"baseline_weight: got 2, expected .* at most 1"):
        parse_config(written, source="page", overrides=["--algorithm.baseline_weight=2"])
    train = ["train", "--config", config, "--run-dir", "run", "--algorithm"]
    assert_refused(command(*train, "step_rlo.py:StepRloo"), "there is no file")
    assert_refused(command(*train, "step_rloo.py:StepRlo"), "did you mean 'StepRloo'?")
    assert_refused(command(*train, "step_rloo.py"), "names no class; add it behind a colon")
    Path("other.py").write_text("import ragen_apo\nclass Other: ...\n", encoding="utf-8")
    assert_refused(command(*train, "other.py:Other"), "is no subclass of AlgorithmConfig")
    own = "from ragen_apo.training.algorithms.policy_gradient import PolicyGradientConfig as Base\n"
    nameless = f"{own}class Own(Base):\n    traits = Base\n    name: str\n"
    for code in (f"{own}class Own(Base):\n    name: str = 'own'\n", nameless):
        Path("bare.py").write_text(code, encoding="utf-8")
        assert_refused(command(*train, "bare.py:Own"), "with traits and a default of its name")
        Path("bare.py").unlink()
        sys.modules.pop(next(name for name in sys.modules if name.startswith("bare_")))
    Path("raises.py").write_text("import ragen_apo\n1 / 0\nclass Own: ...\n", encoding="utf-8")
    assert_refused(command(*train, "raises.py:Own"), "importing it raised ZeroDivisionError")
    assert not Path("run").exists()


@pytest.mark.usefixtures("beside")
def test_the_code_that_a_run_names_is_imported_only_on_trust() -> None:
    """A run may come from somebody else: neither its configuration nor its report runs the file."""
    Path("own.py").write_text(f"{block('python')}\nopen('ran', 'w').close()\n", encoding="utf-8")
    config = parse_config("algorithm: rloo", source="test")
    text = resolved_yaml(config).replace("name: rloo", f"name: {Path.cwd()}/own.py:StepRloo")
    Path("config.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"own\.py:StepRloo' names Python code.*--trust-remote"):
        load_run_config(Path("config.yaml"))
    run = RunData(name="run", config=read_values("config.yaml")[0], record={}, results={})
    assert algorithm_of(run).label == "StepRloo"
    assert not Path("ran").exists()
    trusted = load_run_config(Path("config.yaml"), may_import=True)
    assert trusted.algorithm.traits.label == "Step RLOO" and Path("ran").exists()


@pytest.mark.usefixtures("beside")
def test_two_paths_to_a_file_are_one_algorithm() -> None:
    Path("below").mkdir()
    os.chdir("below")
    settings = parse_config("algorithm: ../step_rloo.py:StepRloo", source="test").algorithm
    os.chdir("..")
    again = parse_config("algorithm: ./step_rloo.py:StepRloo", source="test").algorithm
    assert again == settings and ".." not in settings.name


@pytest.mark.slow
@pytest.mark.usefixtures("beside")
def test_a_run_goes_on_with_a_file_or_a_class_that_the_caller_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Their own file was refused, as if somebody else had named it; so was a class that moved."""
    stopped = "--training.max_steps=1"
    config = factories.config(
        "--algorithm=step_rloo.py:StepRloo", *factories.HARDLY_TRAINED, stopped
    )
    run = factories.run(config, Path("run"))
    kept = read_values(run.config)[0]
    monkeypatch.setattr(registry, "OWN", {})
    more = {"training": {"max_steps": 2}}
    with pytest.raises(ConfigError, match="names Python code"):
        ragen_apo.train(None, "run", resume=True, progress=False, **more)
    ragen_apo.train(kept, "run", resume=True, progress=False, **more)
    monkeypatch.setattr(registry, "OWN", {})
    Path("moved.py").write_text(block("python"), encoding="utf-8")
    own = registry.algorithm_class(
        parse_config("algorithm: moved.py:StepRloo", source="test").algorithm.name
    )
    with pytest.raises(ConfigError, match="names Python code"):
        ragen_apo.open_run("run")
    assert isinstance(ragen_apo.open_run("run", algorithm=own).config.algorithm, own)
    more = {"training": {"max_steps": 3}}
    ragen_apo.train(None, "run", resume=True, progress=False, algorithm=own, **more)
    assert len(list(read_json_lines(run.metrics))) == 3


WRONG_ADVANTAGES = {
    "returns_B": "a tensor of the shape (2,)",
    "returns_B[:, None]": "a tensor of the shape (2, 1)",
    "spread_BT * float('inf')": "numbers that are not finite",
    "spread_BT.requires_grad_()": "a tensor with a gradient",
    "spread_BT.numpy()": "an object of the type ndarray",
    "None": "an object of the type NoneType",
}


@pytest.mark.usefixtures("beside")
@pytest.mark.parametrize(("wrong", "problem"), WRONG_ADVANTAGES.items())
def test_advantages_that_cannot_be_used_are_named(
    wrong: str, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One number for each episode was an IndexError after the update."""
    settings = parse_config("algorithm: step_rloo.py:StepRloo", source="test").algorithm
    episodes = [factories.episode(factories.turn(reward=reward)) for reward in (0.0, 1.0)]
    played = factories.rollouts(episodes)
    trains = ClippedRatio(settings, max_tokens=8)
    assert trains.prepare(played).shape == played.mask_BT.shape

    def advantages(self, rollouts):
        spread_BT = rollouts.spread(rollouts.returns_B)
        return eval(wrong, {"returns_B": rollouts.returns_B, "spread_BT": spread_BT})

    monkeypatch.setattr(type(settings), "advantages", advantages)
    with pytest.raises(TrainingError, match=rf"Step RLOO: .* returned {re.escape(problem)}; expec"):
        trains.prepare(played)


@pytest.mark.slow
@pytest.mark.usefixtures("beside")
def test_what_a_users_algorithm_raises_is_one_sentence_and_names_the_line() -> None:
    code = block("python").replace("others_B = (", "others_B = 1 / 0 + (")
    Path("raises.py").write_text(code, encoding="utf-8")
    number = next(i for i, line in enumerate(code.split("\n"), 1) if "1 / 0" in line)
    config = factories.config("--algorithm=raises.py:StepRloo", *factories.HARDLY_TRAINED)
    place = rf"raises\.py:StepRloo' raised ZeroDivisionError.* in .*raises\.py, line {number};"
    with pytest.raises(ConfigError, match=place):
        factories.run(config, Path("run"))


def test_a_fault_of_a_built_in_algorithm_keeps_its_traceback() -> None:
    settings = parse_config("algorithm: rloo", source="test").algorithm
    with pytest.raises(ZeroDivisionError), registry.algorithm_errors(settings):
        _ = 1 / 0


@pytest.mark.usefixtures("beside")
def test_a_script_hands_its_class_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path.cwd())
    monkeypatch.delitem(sys.modules, "step_rloo", raising=False)
    own = importlib.import_module("step_rloo").StepRloo
    for given, weight in (
        (own, 1.0),
        (own(baseline_weight=0.5), 0.5),
        ({"name": own, "baseline_weight": 0.25}, 0.25),
    ):
        read = read_config({}, algorithm=given).algorithm
        assert isinstance(read, own) and read.model_dump()["baseline_weight"] == weight
        assert read.name == f"{Path.cwd()}/step_rloo.py:StepRloo"
    assert read_config({}, algorithm=registry.algorithm_class("grpo")).algorithm.name == "grpo"
    for wrong in (print, 5, dict):
        with pytest.raises(ConfigError, match="algorithm: got .*expected a name or a subclass"):
            read_config({}, algorithm=wrong)


@pytest.mark.usefixtures("installed")
def test_its_section_is_read_with_its_own_option_and_without_those_of_others() -> None:
    written = "algorithm: {name: step_rloo, baseline_weight: 0.9}"
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
