"""The scripts of examples/ and the lines of the README run as they stand, on a tiny run."""

import json
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

import ragen_apo
from ragen_apo.config.overrides import merge
from ragen_apo.config.yaml_text import dump_yaml
from ragen_apo.environments.base import make_environment
from ragen_apo.environments.contract import check_environment
from ragen_apo.errors import ConfigError
from ragen_apo.files import read_json_lines
from tests.forks import Fork
from tests.test_api import TINY

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("undrawn")]

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples"
SIZES = {
    "agent": {"max_response_tokens": 6},
    "warm_start": {"demonstrations": {"num_episodes_per_task": 1}},
    "values": {"num_samples": 1},
    "training": {"tasks_per_step": 4, "max_tasks": 4},
    "evaluation": {"num_episodes": 2},
}
"""In place of those with which an example learns something."""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "configs" / "shop.yaml"
    path.parent.mkdir()
    path.write_text(dump_yaml(TINY))
    return path


@pytest.fixture
def in_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """`ragen_apo.train` with small sizes, also in forks."""
    train = ragen_apo.train

    def trained(
        config: dict[str, Any],
        run_dir: str,
        *,
        resume: bool,
        environment: Any,
        progress: bool = True,
        **sections: Any,
    ) -> ragen_apo.Run:
        short = merge(merge(config, sections), SIZES)
        return train(short, run_dir, resume=resume, environment=environment, progress=progress)

    monkeypatch.setattr(ragen_apo, "train", trained)


def play(monkeypatch: pytest.MonkeyPatch, name: str, *arguments: object) -> None:
    monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")


def test_every_example_is_tested_here() -> None:
    tested = set(re.findall(r'"(\w+\.(?:py|ipynb))"', Path(__file__).read_text(encoding="utf-8")))
    assert {path.name for path in EXAMPLES.glob("*.*")} == tested


def test_the_shop_is_trained_on_and_told_and_goes_on_when_it_is_there(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    play(monkeypatch, "shop.py", config, tmp_path / "run")
    told = capsys.readouterr().out
    assert "The best episode" in told
    assert "--- turn 1" in told
    assert (tmp_path / "run" / "report" / "report.html").is_file()
    play(monkeypatch, "shop.py", config, tmp_path / "run")
    assert "is trained already" in capsys.readouterr().out


def test_two_algorithms_start_from_one_reference(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    play(monkeypatch, "compare_algorithms.py", config, tmp_path / "out")
    told = capsys.readouterr().out
    references = [
        (tmp_path / "out" / name / "references" / "0" / "model.safetensors").read_bytes()
        for name in ("reference", "apo", "rloo")
    ]
    assert references[0] == references[1] == references[2]
    for name in ("apo", "rloo"):
        assert re.search(rf"^{name}: \d", told, re.MULTILINE)
        assert len(read_json_lines(tmp_path / "out" / name / "metrics.jsonl")) == 2
    assert not (tmp_path / "out" / "reference" / "policy").exists()


@pytest.mark.usefixtures("in_short")
def test_an_environment_of_ones_own_is_trained_on_and_found_again_by_another_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    script, run = EXAMPLES / "own_environment.py", tmp_path / "run"

    def play_it() -> None:
        sys.argv = [str(script), str(run), "4", "1"]
        runpy.run_path(str(script), run_name="__main__")

    for _ in range(2):  # the second time the run is there
        process = Fork(tmp_path / "output", play_it)
        said = process.ended()
        assert process.returncode == 0, said
    found = check_environment(lambda: make_environment(f"{script}:make_room", {}))
    assert set(found.values()) == {None}
    assert ragen_apo.episodes(run)[0].task.environment == "room"
    with pytest.raises(ConfigError, match=r"own_environment\.py:make_room.*trust_remote_code"):
        ragen_apo.evaluate(run)
    trusted = ragen_apo.open_run(run, trust_remote_code=True)
    assert ragen_apo.evaluate(trusted, episodes=1, progress=False)["episodes"] == 1
    given = runpy.run_path(str(script))["make_room"]
    assert ragen_apo.evaluate(run, environment=given, episodes=2, progress=False)["episodes"] == 2


def test_the_lines_of_the_readme_run(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    block = re.search(r"^### From Python\n.*?^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert block
    monkeypatch.chdir(tmp_path)
    exec(block[1], {})
    assert "--- turn 1" in capsys.readouterr().out
    assert (tmp_path / "runs" / "script" / "report" / "report.html").is_file()


def test_a_trained_model_answers_as_the_page_of_models_shows(
    finished_run: Path, capsys: pytest.CaptureFixture
) -> None:
    page = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    block = re.search(r"^## Using a trained model\n.*?^```python\n(.*?)^```", page, re.M | re.S)
    assert block
    exec(block[1].replace("runs/quickstart/policy", str(finished_run / "policy")), {})
    assert capsys.readouterr().out.strip()


def execute(name: str, parameters: dict[str, object], output: Path) -> str:
    """What a notebook prints with other values in the cell that is marked `parameters`.

    A fork executes its cells in IPython, as a kernel does whose imports take longer.
    """
    cells = json.loads((EXAMPLES / name).read_text(encoding="utf-8"))["cells"]
    codes = {
        "".join(cell["source"]): cell["metadata"].get("tags", [])
        for cell in cells
        if cell["cell_type"] == "code"
    }
    (given,) = [code for code, tags in codes.items() if "parameters" in tags]
    assert set(re.findall(r"^(\w+) =", given, re.MULTILINE)) == set(parameters)
    values = "\n".join(f"{key} = {value!r}" for key, value in parameters.items())

    def execute_cells() -> None:
        shell = InteractiveShell.instance(config=Config({"HistoryManager": {"enabled": False}}))
        for code in codes:
            shell.run_cell(values if code == given else code).raise_error()

    process = Fork(output, execute_cells)
    told = process.ended()
    assert process.returncode == 0, told
    return told


def test_the_notebook_of_the_quick_start_runs(config: Path, tmp_path: Path) -> None:
    run, output = tmp_path / "run", tmp_path / "output"
    told = execute("quick_start.ipynb", {"CONFIG": str(config), "RUN": str(run)}, output)
    assert re.search(r"^success \d+% \(\d+% to \d+%\), reference \d+%$", told, re.MULTILINE)
    assert "--- turn 1" in told
    assert (run / "report" / "report.html").is_file()


@pytest.mark.usefixtures("in_short")
def test_the_notebook_with_an_environment_of_ones_own_runs(tmp_path: Path) -> None:
    told = execute(
        "own_environment.ipynb",
        {"RUN": str(tmp_path / "run"), "NUM_DEMONSTRATION_STEPS": 4, "NUM_STEPS": 1},
        tmp_path / "output",
    )
    assert re.search(r"^success \d+%, before \d+%$", told, re.MULTILINE)
    assert "degrees" in told
