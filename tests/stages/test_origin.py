"""What a run is made from: noted by its first attempt, and the same in every later one."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch

from ragen_apo.config import resolved_yaml
from ragen_apo.environments.webshop.generated import write_generated_files
from ragen_apo.errors import RunDirectoryError
from ragen_apo.files import write_json_atomically
from ragen_apo.progress import SilentProgress
from ragen_apo.run_directory import RunDirectory, create_run
from ragen_apo.session import Session, open_session
from ragen_apo.stages import origin, pipeline
from ragen_apo.stages.values import estimate_run_values
from tests import factories


def place_data(folder: Path, *, num_products: int) -> None:
    """Files with the names of the downloaded ones, in place of what is there."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    write_generated_files(folder, num_products)
    for name in ("items_shuffle", "items_ins_v2"):
        (folder / f"{name}.json").rename(folder / f"{name}_1000.json")


def files_of(run: RunDirectory) -> dict[Path, bytes]:
    found = (path for path in run.path.rglob("*") if path.is_file() and path != run.lock)
    return {path: path.read_bytes() for path in found}


def test_a_resumed_run_whose_data_auto_found_other_data_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAGEN_APO_DATA", str(tmp_path / "data"))
    threads = f"machine: {{num_threads: {torch.get_num_threads()}}}"
    text = f"environment: {{name: webshop, data: auto}}\n{threads}\n"
    config = factories.config(text=text)
    run = create_run(tmp_path / "run", config_yaml=resolved_yaml(config))
    small = tmp_path / "data" / "webshop" / "small"
    place_data(small, num_products=30)
    origin.note_origin(open_session(config, run, SilentProgress()))
    before = files_of(run)
    place_data(small, num_products=40)
    with pytest.raises(RunDirectoryError) as error:
        pipeline.train(config, run, progress=SilentProgress())
    message = str(error.value)
    assert f"was begun with 30 products of {small}" in message
    assert f"has 40 products of {small}" in message
    assert "--run-dir" in message and message.isprintable()
    assert files_of(run) == before, "nothing was changed"
    place_data(small, num_products=30)
    origin.require_same_origin(open_session(config, run, SilentProgress()))


def test_a_run_whose_file_of_questions_was_edited_does_not_go_on_training(tmp_path: Path) -> None:
    file = tmp_path / "questions.jsonl"
    rows = [{"question": f"What is {n} + {n}?", "answer": str(2 * n)} for n in range(1, 9)]

    def write(rows: list[dict[str, str]]) -> None:
        file.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")

    threads = f"machine: {{num_threads: {torch.get_num_threads()}}}"
    world = f"environment: {{name: questions, data: '{file}'}}"
    config = factories.config(text=f"{world}\n{threads}\n")
    run = create_run(tmp_path / "run", config_yaml=resolved_yaml(config))
    write(rows)
    origin.note_origin(open_session(config, run, SilentProgress()))
    more = {"question": "What is 9 + 10?", "answer": "19"}
    other_answer = {**rows[0], "answer": "3"}
    edits = ([*rows, more], [other_answer, *rows[1:]], rows[::-1])
    for edited in edits:
        write(edited)
        with pytest.raises(RunDirectoryError, match="training tasks .* are not those that it was"):
            pipeline.train(config, run, progress=SilentProgress())
        with pytest.raises(RunDirectoryError, match="training tasks .* are not those that it was"):
            estimate_run_values(config, run, version=0, split="train", progress=SilentProgress())
        # What was trained can still be evaluated.
        origin.require_same_origin(open_session(config, run, SilentProgress()))
    write(rows)
    origin.require_same_tasks(open_session(config, run, SilentProgress()))


def test_an_edited_file_of_an_environment_is_said_where_its_versions_are_those_of_before(
    tmp_path: Path,
) -> None:
    page = Path(__file__).resolve().parents[2] / "docs" / "adding_an_environment.md"
    _, text, _ = re.split(r"^```(?:python)?\n", page.read_text("utf-8"), maxsplit=2, flags=re.M)
    file = tmp_path / "guess.py"
    file.write_text(text, encoding="utf-8")
    parts = f"{{mine: {{name: '{file}:make_guess_number'}}, shop: {{}}}}"
    for number, world in enumerate(
        (f"{{name: '{file}:make_guess_number'}}", f"{{name: mixture, parts: {parts}}}")
    ):
        threads = f"machine: {{num_threads: {torch.get_num_threads()}}}"
        config = factories.config(text=f"environment: {world}\n{threads}\n")
        run = create_run(tmp_path / str(number), config_yaml=resolved_yaml(config))
        origin.note_origin(open_session(config, run, SilentProgress()))
        for edit in ("", "# mended\n", ""):
            file.write_text(f"{text}{edit}", encoding="utf-8")
            progress = factories.Sayings()
            origin.require_same_origin(open_session(config, run, progress))
            assert len(progress.lines) == bool(edit)
            assert not edit or f"{file} was edited since this run started" in progress.lines[0]


@pytest.mark.slow
def test_a_run_from_before_versions_of_the_environment_were_noted_goes_on(session: Session) -> None:
    shutil.rmtree(session.run.policy)  # a finished run is left as it is
    status = session.run.read_status()
    assert set(status["environment"]) == {"name", "version", "reward_version"}
    older = {key: status[key] for key in status if key != "environment"}
    write_json_atomically(session.run.status, older)
    pipeline.train(session.config, session.run, progress=SilentProgress())
    assert session.run.read_status()["environment"] == status["environment"]


def test_another_environment_of_the_same_version_is_refused(session: Session) -> None:
    status = session.run.read_status()
    noted = status["environment"]
    unnamed = {key: noted[key] for key in noted if key != "name"}  # as older versions noted it
    write_json_atomically(session.run.status, status | {"environment": unnamed})
    origin.require_same_origin(session)
    write_json_atomically(session.run.status, status | {"environment": noted | {"name": "lake"}})
    with pytest.raises(RunDirectoryError, match=r"was begun with lake \(version .* has .* now"):
        origin.require_same_origin(session)


def test_a_run_that_began_in_bfloat16_goes_on_in_it_on_another_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = f"{{num_threads: {torch.get_num_threads()}, mixed_precision: auto, device: cpu}}"
    config = factories.config(text=f"machine: {machine}\nenvironment: {{name: shop}}\n")
    run = create_run(tmp_path / "run", config_yaml=resolved_yaml(config))
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": True}, raising=False)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: True)
    origin.note_origin(open_session(config, run, SilentProgress()))
    monkeypatch.setattr(torch.cpu, "get_capabilities", dict, raising=False)
    session = open_session(config, run, SilentProgress())
    assert session.precision == "bfloat16"
    origin.require_same_origin(session)
    fresh = RunDirectory(tmp_path / "fresh")
    assert open_session(config, fresh, SilentProgress()).precision == "none"


def test_what_may_be_edited_before_a_run_goes_on_is_documented() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "troubleshooting.md").read_text()
    assert [key for key in origin.MAY_CHANGE if f"`{key}`" not in page] == []
