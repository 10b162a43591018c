"""The project's own files agree with each other."""

import ast
import os
import re
import sys
from dataclasses import fields
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml
from packaging.markers import default_environment
from packaging.requirements import Requirement

import ragen_apo
from ragen_apo.report.load import RunData
from ragen_apo.training.algorithms.base import Algorithm

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "ragen_apo"
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("benchmarks/results/*.md")]
PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")


def paths_in_readme() -> list[str]:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    block = re.search(r"^## The tree\n.*?^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert block, "README.md has no fenced block under the heading `## The tree`"
    lines = [re.fullmatch(r"( *)(\S+)(?:\s{2,}\S.*)?", line) for line in block[1].splitlines()]
    assert all(lines), "each line of the tree is an indented `path  text`"
    parents: list[str] = []
    paths = []
    for indent, name in ((len(line[1]) // 2, line[2]) for line in lines if line):
        parents[indent:] = [name]
        paths.append("".join(parents))
    return paths


def test_the_readme_lists_every_folder_and_every_package_once() -> None:
    listed = paths_in_readme()
    assert len(listed) == len(set(listed))
    assert [path for path in listed if not (ROOT / path).exists()] == []
    ignored = set((ROOT / ".gitignore").read_text(encoding="utf-8").splitlines())
    folders = {
        f"{path.name}/"
        for path in ROOT.iterdir()
        if path.is_dir() and path.name[0] != "." and f"/{path.name}/" not in ignored
    }
    packages = {f"{path.parent.relative_to(ROOT)}/" for path in PACKAGE.glob("*/__init__.py")}
    assert (folders - {"src/"}) | packages <= set(listed)


def requirements() -> list[Requirement]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    pinned = ("dev", "docs", "lora", "math", "datasets", "tensorboard", "trl", "wandb", "web")
    lines = [*project["dependencies"], *(line for extra in pinned for line in extras[extra])]
    return [Requirement(line) for line in lines]


def pins(python: str) -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = [Requirement(line) for line in lines if line and not line.startswith("#")]
    environment = {**default_environment(), "python_version": python}
    found = [pin for pin in pinned if pin.marker is None or pin.marker.evaluate(environment)]
    names = [pin.name.lower() for pin in found]
    assert len(names) == len(set(names)), "a package is pinned twice"
    return {pin.name.lower(): str(pin.specifier).removeprefix("==") for pin in found}


@pytest.mark.parametrize("python", PYTHONS)
def test_every_dependency_is_pinned_to_a_version_within_its_bounds(python: str) -> None:
    pinned = pins(python)
    for requirement in requirements():
        assert requirement.specifier.contains(pinned[requirement.name.lower()]), requirement


def test_the_version_is_the_newest_of_the_changelog() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    newest = re.search(r"^## (\S+)", changelog, re.MULTILINE)
    assert newest
    assert newest[1] == ragen_apo.__version__ == version("ragen-apo")


def test_the_package_says_that_it_is_typed() -> None:
    assert (PACKAGE / "py.typed").exists()


def anchors(page: Path) -> list[str]:
    """What GitHub makes of the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_to_a_file_and_a_heading_that_exist(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if link.startswith("https://"):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@pytest.mark.parametrize(
    "page",
    [ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("benchmarks/results/*.md")],
    ids=lambda page: page.name,
)
def test_no_star_of_a_page_begins_an_emphasis_by_mistake(page: Path) -> None:
    """Markdown sets what is between the stars of two A*-PO in italics, unless they are escaped."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    prose = "\n".join(line for line in text.split("\n") if not line.startswith(("    ", "![")))
    assert re.findall(r".*\b[AV]\*.*", re.sub(r"`[^`]*`", "", prose)) == []


def test_every_test_that_a_page_names_exists() -> None:
    named = {
        found
        for page in PAGES
        for found in re.findall(r"(tests/[\w/]+\.py)::(\w+)", page.read_text(encoding="utf-8"))
    }
    assert named, "docs/models.md names some"
    there = {
        (path, node.name)
        for path in {path for path, _ in named}
        for node in ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef)
    }
    assert named - there == set()


def test_the_contents_of_the_log_list_every_question_once_and_in_order() -> None:
    text = (ROOT / "docs" / "log.md").read_text(encoding="utf-8")
    contents, entries = text.split("\n## Contents\n")[1].split("\n## ", 1)
    listed = re.findall(r"^- \[(.+?)\]\(#", contents, re.MULTILINE)
    assert listed == re.findall(r"^### (.+\?)$", entries, re.MULTILINE)


def test_the_page_on_algorithms_names_all_that_the_trainer_asks_of_one() -> None:
    page = (ROOT / "docs" / "adding_an_algorithm.md").read_text(encoding="utf-8")
    asked = [name for name in vars(Algorithm) if not name.startswith("_")]
    assert [name for name in asked if not re.search(rf"`{name}\b", page)] == []


def test_the_page_on_figures_names_every_field_of_a_run() -> None:
    page = (ROOT / "docs" / "adding_a_figure.md").read_text(encoding="utf-8")
    names = {field.name for field in fields(RunData)} - {"name"}
    assert {name for name in names if f"| `{name}` |" not in page} == set()


def test_the_workflow_runs_what_ci_runs_on_the_oldest_and_the_newest_python() -> None:
    text = (ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8")
    job = yaml.safe_load(text)["jobs"]["check"]
    assert job["strategy"]["matrix"]["python"] == [PYTHONS[0], PYTHONS[-1]]
    assert job["steps"][-1] == {"run": ".ci/run"}
    assert os.access(ROOT / ".ci" / "run", os.X_OK)


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


def name_of(node: ast.AST) -> str:
    """A plain name; `ast.unparse` would take most of the time of these tests."""
    return node.id if isinstance(node, ast.Name) else ""


def called(node: ast.AST) -> str:
    """The name of a function or method."""
    return node.attr if isinstance(node, ast.Attribute) else name_of(node)


def private_names() -> set[str]:
    """Those that a module of the package, or an object of it, defines."""
    names: set[str] = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                names.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.id)
            elif isinstance(node, ast.Attribute) and name_of(node.value) == "self":
                names.add(node.attr)
    return set(filter(is_private, names))


def names_read(tree: ast.AST) -> set[str]:
    """Of others, by an attribute, an import, or as the text that `setattr` and the like get."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and name_of(node.value) not in ("self", "cls"):
            names.add(node.attr)
        elif isinstance(node, ast.ImportFrom):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Constant) and str(node.value).startswith("ragen_apo."):
            names |= set(re.split("[.:]", str(node.value)))
        elif isinstance(node, ast.Call) and called(node.func).endswith(("attr", "object")):
            names |= {arg.value for arg in node.args[1:] if isinstance(arg, ast.Constant)}
    return {name for name in names if isinstance(name, str)}


@pytest.mark.slow
def test_no_test_reads_a_private_name_of_the_package() -> None:
    private = private_names()
    assert "_sections_go_together" in private
    found = {
        str(path.relative_to(ROOT)): sorted(private & names_read(ast.parse(path.read_text())))
        for path in (ROOT / "tests").rglob("*.py")
    }
    assert {path: names for path, names in found.items() if names} == {}


@pytest.mark.parametrize(
    "code",
    [
        "store._read(1)",
        "from ragen_apo.values.store import _read",
        "monkeypatch.setattr(store, '_read', None)",
        "patch.object(store, '_read')",
        "TARGET = 'ragen_apo.values.store:_read'",
    ],
)
def test_a_private_name_is_found_however_it_is_read(code: str) -> None:
    assert "_read" in names_read(ast.parse(code))


def test_the_makefile_gives_no_program_an_escaped_tab() -> None:
    """The sed of macOS writes the letter t for it."""
    assert r"\t" not in (ROOT / "Makefile").read_text(encoding="utf-8")
