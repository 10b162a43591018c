"""`check` and `play` on environments of other people: in files, in modules, hostile and broken."""

import io
import json
import re
import shutil
import sys
from pathlib import Path

import pytest
import yaml

from ragen_apo.environments.base import make_environment
from ragen_apo.environments.contract import PROMISES
from ragen_apo.environments.gymnasium import GymnasiumTextEnv
from ragen_apo.environments.human.recordings import read_recordings
from ragen_apo.errors import ConfigError
from tests import factories
from tests.command_line import Command
from tests.sweeps import quick_first

DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "adding_an_environment.md"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory, with the environment of docs/adding_an_environment.md in a file."""
    text = re.search(r"^```python\n(.*?)^```", DOCUMENT.read_text("utf-8"), re.M | re.S)
    assert text
    (tmp_path / "guess.py").write_text(text[1], encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def type_lines(monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))


# By file and by module


@pytest.mark.parametrize("file", quick_first(["guess.py", "./guess.py", "{folder}/guess.py"]))
def test_an_environment_in_a_file_is_checked_without_being_a_package(
    file: str, command: Command, folder: Path
) -> None:
    name = f"{file.format(folder=folder)}:make_guess_number"
    status, out, err = command("check", name, "--max_turns", 4, "--num-tasks", 4)
    assert (status, err) == (0, "")
    assert out.count("ok  ") == len(PROMISES)
    assert "scripted policies on tasks from all over the split train" in out
    assert "oracle" in out
    assert "no scripted policy" not in out


def test_a_check_names_a_teacher_that_solves_nothing(command: Command, folder: Path) -> None:
    text = (
        "from ragen_apo.environments.questions.with_tools import questions_with_tools\n"
        "class Never:\n"
        "    def get_reward(self): return 0\n"
        "def make(**options): return questions_with_tools([Never], max_turns=1, **options)\n"
    )
    (folder / "never.py").write_text(text, encoding="utf-8")
    status, out, _ = command("check", "never.py:make", "--num_train_tasks", 5, "--num-tasks", 4)
    assert status == 0
    assert "`teacher` solved none of these tasks, so a warm start would imitate failures." in out
    assert "`oracle` solved none of these tasks." in out


def test_a_check_names_the_splits_where_none_is_called_test(command: Command, folder: Path) -> None:
    file = folder / "guess.py"
    file.write_text(file.read_text("utf-8").replace('"test"', '"unseen"'), encoding="utf-8")
    status, out, _ = command("check", "guess.py:make_guess_number", "--max_turns", 4)
    assert status == 0
    assert "No task is of a split `test`: set evaluation.split to unseen." in out


def test_an_environment_in_a_file_is_played_and_mixed_and_is_there_in_gymnasium(
    command: Command, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    type_lines(monkeypatch, "10", "quit")
    status, out, _ = command("play", "guess.py:make_guess_number", "--max_turns", 4)
    assert status == 0
    assert "[at most 3 turns left]" in out
    parts = {"mine": {"name": "./guess.py:make_guess_number", "weight": 2}, "bandit": {}}
    assert make_environment("mixture", {"parts": parts}).tasks("train")[0].category == "mine"
    adapter = GymnasiumTextEnv("guess.py:make_guess_number", max_turns=1)
    adapter.reset(seed=0)
    assert adapter.step("no number")[3] is True


def test_an_environment_in_a_module_is_found_by_its_name(
    command: Command, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = folder / "worlds_of_mine"
    package.mkdir()
    (package / "__init__.py").write_text("")
    shutil.copy("guess.py", package / "guess.py")
    monkeypatch.syspath_prepend(folder)
    status, out, err = command("check", "worlds_of_mine.guess:make_guess_number")
    assert status == 0, err + out


@pytest.mark.slow
def test_files_beside_the_environment_can_be_imported_by_it(command: Command, folder: Path) -> None:
    (folder / "numbers_to_guess.py").write_text("TOP = 20\n")
    text = (folder / "guess.py").read_text()
    (folder / "guess.py").write_text(f"from numbers_to_guess import TOP\n{text}")
    assert command("check", "guess.py:make_guess_number")[0] == 0


@pytest.mark.parametrize("use", ["from sched import TOP", "import sched; sched.TOP"])
@pytest.mark.parametrize("file", ["sched.py", "sched/__init__.py"])
def test_a_file_that_a_module_of_python_hides_is_named(
    file: str, use: str, command: Command, folder: Path
) -> None:
    (folder / file).parent.mkdir(exist_ok=True)
    (folder / file).write_text("TOP = 20\n")
    (folder / "hides.py").write_text(f"import ragen_apo\n{use}\ndef make(): ...\n")
    status, _, err = command("check", "hides.py:make")
    assert status == 2
    assert f"The file {folder / file} beside it is hidden by Python's own module sched" in err


@pytest.mark.slow
def test_a_file_that_happens_to_have_the_name_of_a_module_of_python_does_no_harm(
    command: Command, folder: Path
) -> None:
    (folder / "platform.py").write_text("")
    text = (folder / "guess.py").read_text()
    (folder / "guess.py").write_text(f"import platform\nplatform.system()\n{text}")
    assert command("check", "guess.py:make_guess_number")[0] == 0


def test_an_environment_does_not_get_the_file_that_lies_beside_another(folder: Path) -> None:
    text = (folder / "guess.py").read_text()
    for name, top in (("one", 10), ("two", 20)):
        (folder / name).mkdir()
        (folder / name / "tops_of_numbers.py").write_text(f"TOP = {top}\n")
        (folder / name / "world.py").write_text(f"from tops_of_numbers import TOP\n{text}")
    assert make_environment("one/world.py:make_guess_number", {}).tasks("train")
    with pytest.raises(ConfigError, match=r"'tops_of_numbers'.*another environment.*one"):
        make_environment("two/world.py:make_guess_number", {})


def test_the_file_of_a_run_that_plays_may_be_edited(folder: Path) -> None:
    """Each new environment read the source again: half an edit, or two threads, ended the run."""
    name = str(folder / "guess.py:make_guess_number")
    before = make_environment(name, {}).tasks("test")
    (folder / "guess.py").write_text("def make_guess_number(")
    assert make_environment(name, {}).tasks("test") == before


NOT_AN_ENVIRONMENT = {
    "no_file": ("nothing.py:make", "there is no file {folder}/nothing.py; a relative path starts"),
    "no_function": ("guess.py:make_gues_number", "did you mean 'make_guess_number'?"),
    "no_colon": ("guess.py", "class; add it behind a colon, such as guess.py:make_environment"),
    "nothing_behind_the_colon": ("guess.py:", "names no function"),
    "no_module": ("no_such_module.at_all:make", "there is no Python file of a module"),
    "not_callable": ("guess.py:NUMBERS", "defines no function or class 'NUMBERS'"),
    "assigned": (
        "guess.py:NUMBERS",
        "it assigns NUMBERS, and has to define it, so that its source can be read: def NUMBERS(**",
    ),
    "wrong_option": (
        "guess.py:make_guess_number",
        "did you mean environment.max_turns?",
    ),
    "standard_library": ("subprocess:Popen", "imports nothing from ragen_apo"),
    "long_name": (f"{'x' * 300}.py:make", "there is no file {folder}/xxx"),
    "built_in": ("sys:exit", "there is no Python file of a module 'sys'"),
    "ours": ("ragen_apo.files:write_text_atomically", "belongs to ragen-apo"),
}


@pytest.mark.parametrize("case", NOT_AN_ENVIRONMENT)
def test_a_name_that_leads_to_no_environment_is_refused_in_one_line(
    case: str, command: Command, folder: Path
) -> None:
    name, message = NOT_AN_ENVIRONMENT[case]
    status, _, err = command("check", name, "--max_turn", 4)
    assert status == 2
    assert err.startswith("error: ") and message.format(folder=folder) in err
    assert "Traceback" not in err


BROKEN = {
    "raises_at_import": (
        "1 / 0",
        "def make(**_):\n    pass",
        "importing it raised ZeroDivisionError",
    ),
    "exits_at_import": ("raise SystemExit(0)", "def make(**_):\n    pass", "raised SystemExit(0)"),
    "is_no_python": (
        "def (",
        "def make(**_):\n    pass",
        ", line 2)); its code has to be repaired",
    ),
    "raises_when_made": ("", "def make(**_):\n    {}['x']", "making it raised KeyError('x') in"),
    "exits_when_made": ("", "def make(**_):\n    raise SystemExit(0)", "raised SystemExit(0)"),
    "makes_nothing": ("", "def make(**_):\n    pass", "returned NoneType, which has no properties"),
    "resets_without_a_seed": (
        "from ragen_apo.environments.bandit import make_bandit",
        "class make:\n"
        "    def __init__(self, **_):\n"
        "        self.inner = make_bandit()\n"
        "    def __getattr__(self, name):\n"
        "        return getattr(self.__dict__['inner'], name)\n"
        "    def reset(self, task):\n"
        "        return self.inner.reset(task, seed=0)",
        "make.reset cannot be called as reset(task, seed=seed) (got an unexpected keyword",
    ),
    "has_a_method_of_that_name": (
        "import types\nfrom ragen_apo.environments.foreign import MEMBERS",
        "def make(**_):\n    return types.SimpleNamespace(**dict.fromkeys(MEMBERS, print))",
        "properties is <built-in function print>; expected an attribute",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_an_environment_that_cannot_be_made_is_a_finding_and_ends_training_in_one_line(
    case: str, command: Command, folder: Path
) -> None:
    opening, factory, message = BROKEN[case]
    (folder / "broken.py").write_text(f"import ragen_apo\n{opening}\n{factory}\n")
    status, out, err = command("check", "broken.py:make")
    assert (status, err) == (1, "")
    assert "NOT  the environment can be made" in out
    assert message in " ".join(out.split())
    (folder / "tiny.yaml").write_text(factories.TINY_CONFIG)
    status, _, err = command(
        *("train", "--config", "tiny.yaml", "--run-dir", "run"),
        *("--environment", "{name: 'broken.py:make'}"),
    )
    assert status == 2
    assert err.startswith("error: the environment ") and message in err
    assert not (folder / "run").exists()


def test_options_that_a_factory_does_not_take_are_refused(command: Command, folder: Path) -> None:
    (folder / "few.py").write_text("import ragen_apo\ndef make(size=3):\n    return None\n")
    status, _, err = command("check", "few.py:make", "--sise", 4)
    assert status == 2
    assert "does not take these options" in err and "(size=3)" in err


def test_an_import_that_fails_says_what_is_missing(command: Command, folder: Path) -> None:
    (folder / "needs.py").write_text("import ragen_apo, not_installed\ndef make(): ...\n")
    status, _, err = command("check", "needs.py:make")
    assert status == 2
    assert "No module named 'not_installed'" in err and "install what is missing" in err


@pytest.mark.parametrize("name", ["shop", "mixture", "webshop"])
def test_an_option_named_self_is_an_unknown_key(name: str, command: Command) -> None:
    status, _, err = command("check", name, "--self", 1)
    assert status == 2
    assert "environment.self: unknown key" in err


# Checks that find something


def world(folder: Path, **members: str) -> str:
    """The name of a file with the documented environment, members of its games replaced."""
    text = (folder / "guess.py").read_text()
    for name, body in members.items():
        pattern = rf"(    def {name}\(.*?\):\n)(?:        .*\n|\n(?=        ))+"
        text, count = re.subn(pattern, rf"\1        {body}\n", text, count=1)
        assert count == 1
    (folder / "changed.py").write_text(text)
    return "changed.py:make_guess_number"


@pytest.mark.slow
def test_a_check_of_an_environment_that_exits_with_0_in_a_step_does_not_pass(
    command: Command, folder: Path
) -> None:
    status, out, _ = command("check", world(folder, play="raise SystemExit(0)"))
    assert status == 1
    assert "NOT  any text is answered" in out
    assert "SystemExit(0)" in out


@pytest.mark.slow
def test_an_exit_that_only_the_table_of_scripted_policies_meets_does_not_pass(
    command: Command, folder: Path
) -> None:
    body = (
        "self.task, self.secret = task, int(task.payload['secret'])\n"
        "        if seed == 9: raise SystemExit(0)"
    )
    status, out, _ = command("check", world(folder, __init__=body))
    assert status == 1
    assert out.count("ok  ") == len(PROMISES)
    assert "NOT  scripted policies play the training tasks" in out


def test_the_table_of_scripted_policies_stands_beside_a_broken_promise(
    command: Command, folder: Path
) -> None:
    text = (folder / "guess.py").read_text().replace("(0.0, 1.0)", "(0.0, 0.5)")
    (folder / "guess.py").write_text(text)
    status, out, _ = command("check", "guess.py:make_guess_number", "--num-tasks", 4)
    assert status == 1
    assert "NOT  returns lie in the declared range" in out
    assert "scripted policies on tasks" in out
    assert re.search(r"oracle\W+100.0%", out)


def test_a_check_names_a_tool_that_refuses_every_call(command: Command, folder: Path) -> None:
    text = (
        "from ragen_apo.environments.questions.with_tools import questions_with_tools\n"
        "def works(text: str) -> str:\n"
        '    "Works."\n'
        "    return text\n"
        "def faulty(text: str) -> str:\n"
        '    "Looks it up."\n'
        "    return {}['price']\n"
        "def make(**options): return questions_with_tools([works, faulty], **options)\n"
    )
    (folder / "faulty.py").write_text(text, encoding="utf-8")
    status, out, _ = command("check", "faulty.py:make", "--num_train_tasks", 5, "--num-tasks", 4)
    assert status == 0
    said = " ".join(out.split())
    assert "The tool faulty refused all of 5 calls" in said
    assert "faulty refused its arguments: KeyError('price')" in said
    assert "The tool works" not in said


def test_a_check_says_that_a_success_was_forgotten(command: Command, folder: Path) -> None:
    text = (folder / "guess.py").read_text().replace(", success=True", "")
    (folder / "forgets.py").write_text(text)
    status, out, _ = command("check", "forgets.py:make_guess_number", "--num-tasks", 4)
    assert status == 0
    said = " ".join(out.split())
    assert "ended with the highest return of return_range, 1, and none was a success" in said
    assert "Answer(..., success=True)" in said
    assert "highest return" not in command("check", "guess.py:make_guess_number")[1]


def test_a_cause_that_breaks_several_promises_is_told_once(command: Command, folder: Path) -> None:
    text = re.sub(
        r"(    def act\(.*\n)",
        r"\1        raise OSError('gone')\n",
        (folder / "guess.py").read_text(),
    )
    (folder / "fails.py").write_text(text)
    status, out, _ = command("check", "fails.py:make_guess_number", "--num-tasks", 4)
    assert status == 1
    assert out.count("OSError (gone)") == 1
    assert out.count("NOT ") == out.count("as above") + 1 > 5


@pytest.mark.slow
def test_a_check_prints_no_escape_sequence_of_an_environment(
    command: Command, folder: Path
) -> None:
    body = r'raise ValueError("\\x1b[2J" + "x" * 100_000 + chr(0x202e))'
    status, out, _ = command("check", world(folder, play=body))
    assert status == 1
    assert "\x1b" not in out and "\u202e" not in out
    assert len(out) < 10_000


@pytest.mark.slow
def test_what_an_environment_says_cannot_pass_for_a_line_of_the_check(
    command: Command, folder: Path
) -> None:
    class_text = 'raise type("E", (Exception,), {"__repr__": lambda e: "\\\\nok   all"})()'
    _, out, _ = command("check", world(folder, play=class_text))
    assert "\n       ok   all" in out
    assert "\nok   all" not in out


# Recording


def test_a_recording_that_cannot_be_written_is_refused_before_the_first_turn(
    command: Command, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "file").write_text("")
    (folder / "folder.jsonl").mkdir()
    (folder / "dangling.jsonl").symlink_to("nowhere")
    for place in ("file/mine.jsonl", "folder.jsonl", f"{'x' * 300}.jsonl", "dangling.jsonl"):
        type_lines(monkeypatch, "10")
        status, out, err = command("play", "shop", "--record", place)
        assert status == 2, place
        assert err.startswith("error: --record")
        assert "TASK" not in out
    left = ["dangling.jsonl", "file", "folder.jsonl", "guess.py"]
    assert sorted(path.name for path in folder.iterdir()) == left


def test_a_recording_that_is_given_up_leaves_nothing_behind(
    command: Command, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    type_lines(monkeypatch, "quit")
    assert command("play", "shop", "--record", "new/deep/mine.jsonl")[0] == 0
    assert not list(folder.glob("new/deep/*"))


def test_an_episode_that_cannot_be_recorded_any_more_is_printed_and_not_lost(
    command: Command, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Keyboard(io.StringIO):
        """Takes the place of the file away while the person plays."""

        def readline(self, *_: object) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
            (folder / "mine.jsonl").mkdir()
            return "buy 1\n"

    monkeypatch.setattr(sys, "stdin", Keyboard())
    status, out, err = command("play", "shop", "--record", "mine.jsonl")
    assert status == 2
    assert "could not be recorded" in err and "The line above is all of it" in err
    (folder / "saved.jsonl").write_text(out.splitlines()[-1] + "\n")
    (recording,), unreadable = read_recordings(folder / "saved.jsonl")
    assert [turn.action for turn in recording.episode.turns] == ["buy 1"]
    assert unreadable == []


def test_play_takes_a_line_of_no_utf8_for_no_turn(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff\n"), encoding="utf-8"))
    status, out, _ = command("play", "shop")
    assert status == 0
    assert "That line is not UTF-8 text." in out
    assert "in 0 turns" in out


# Runs


@pytest.mark.parametrize(
    ("verb", "member"),
    [("train", "tasks"), ("train", "scripted_policies"), ("train", "act"), ("play", "tasks")],
)
def test_an_environment_that_exits_with_0_ends_no_command_with_status_0(
    member: str, verb: str, command: Command, folder: Path
) -> None:
    text = (folder / "guess.py").read_text()
    if member == "act":
        text, made = re.sub(r"(    def act\(.*\n)", r"\1        raise SystemExit(0)\n", text), ""
    else:
        made = (
            "\n\nclass Exits:\n"
            "    def __init__(self, **options):\n"
            "        self.inner = make_guess_number(**options)\n"
            "    def __getattr__(self, name):\n"
            "        return getattr(self.__dict__['inner'], name)\n"
            f"    def {member}(self, *_):\n"
            "        raise SystemExit(0)\n"
        )
    (folder / "guess.py").write_text(text + made)
    name = "./guess.py:Exits" if made else "./guess.py:make_guess_number"
    arguments = {
        "train": [*train_arguments(folder), "--environment.name", name],
        "play": ["play", name],
    }[verb]
    status, _, err = command(*arguments)
    assert status == 2
    assert "tried to end the process" in err or "SystemExit" in err
    assert not (folder / "run").exists()


def train_arguments(folder: Path) -> list[object]:
    world = {"name": "./guess.py:make_guess_number", "max_turns": 3}
    document = yaml.safe_load(factories.TINY_CONFIG) | {"environment": world}
    (folder / "mine.yaml").write_text(yaml.safe_dump(document))
    keys = ["--values.adaptive=false", "--warm_start.enabled=false", "--evaluation.num_episodes=2"]
    steps = ["--training.max_steps=1", "--training.tasks_per_step=2", "--training.max_tasks=2"]
    return ["train", "--config", "mine.yaml", "--run-dir", "run", *keys, *steps]


@pytest.mark.slow
def test_a_run_names_its_file_absolutely_and_is_evaluated_from_elsewhere(
    command: Command, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    status, _, err = command(*train_arguments(folder), "--no-evaluate")
    assert status == 0, err
    name = yaml.safe_load((folder / "run" / "config.yaml").read_text())["environment"]["name"]
    assert name == f"{folder}/guess.py:make_guess_number"
    (folder / "elsewhere").mkdir()
    monkeypatch.chdir(folder / "elsewhere")
    trust = "--trust-remote-code"
    resumed = command("train", "--run-dir", folder / "run", "--resume", trust, "--no-evaluate")
    assert resumed[0] == 0
    status, _, err = command("evaluate", folder / "run", trust)
    assert status == 0, err
    (folder / "guess.py").unlink()
    status, _, err = command("evaluate", folder / "run", trust)
    assert status == 2
    assert f"there is no file {folder}/guess.py" in err


@pytest.mark.parametrize("verb", quick_first(["evaluate", "estimate-values", "train"]))
@pytest.mark.parametrize(
    "environment",
    quick_first(
        [
            {"name": "{run}/evil.py:make"},
            {"name": "{run}/../run/evil.py:make"},
            {"name": "beside.py:make"},
            {"name": "/proc/self/cwd/beside.py:make"},
            {"name": "evil:make"},
            {"name": "mixture", "parts": {"a": {"name": "{run}/evil.py:make"}}},
            {"name": "mixture", "parts": {"{run}/evil.py:make": {"name": ""}}},
            {"name": "mixture", "parts": {"{run}/evil.py:make": {}}},
            {"name": "subprocess:Popen", "args": ["touch", "executed"]},
        ]
    ),
)
def test_a_run_of_somebody_else_cannot_have_code_executed(
    environment: dict,
    verb: str,
    command: Command,
    finished_run: Path,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = Path(shutil.copytree(finished_run, folder / "run"))
    (run / "evil.py").write_text(
        "import ragen_apo, pathlib\npathlib.Path('executed').touch()\ndef make(**_): ...\n"
    )
    shutil.copy(run / "evil.py", folder / "beside.py")
    monkeypatch.syspath_prepend(run)
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["environment"] = json.loads(json.dumps(environment).replace("{run}", str(run)))
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    where = ["--run-dir", run, "--resume"] if verb == "train" else [run]
    status, _, err = command(verb, *where)
    assert status == 2
    assert err.startswith("error: environment.name: ")
    assert not (folder / "executed").exists()
    assert "names Python code" in err and "--trust-remote-code" in err


def test_a_run_whose_environment_never_ends_an_episode_is_refused_and_does_not_hang(
    command: Command, folder: Path
) -> None:
    text = (folder / "guess.py").read_text()
    endless = text.replace("max_turns=checked.max_turns,", "max_turns=1_000_000_000,")
    endless = endless.replace('"Right.", reward=1.0, terminated=True, success=True', '"Again."')
    assert endless.count("1_000_000_000") == 1 and '"Again."' in endless
    endless += (
        "\n\nclass Undeclared:\n"
        "    def __init__(self, **options):\n"
        "        self.inner = make_guess_number()\n"
        "    def __getattr__(self, name):\n"
        "        return getattr(self.__dict__['inner'], name)\n"
        "    @property\n"
        "    def properties(self):\n"
        "        return replace(self.inner.properties, max_turns=None)\n"
    )
    (folder / "guess.py").write_text(f"from dataclasses import replace\n{endless}")
    arguments = train_arguments(folder)
    arguments.remove("--warm_start.enabled=false")
    status, _, err = command(
        *arguments, "--environment", "{name: 'guess.py:Undeclared', max_turns: null}"
    )
    assert status == 2, err
    assert "guess.py:Undeclared': an episode was not over after 1,000 turns" in err
