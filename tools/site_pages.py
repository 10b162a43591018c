"""Hooks of MkDocs (mkdocs.yml): the pages of the site that do not lie in docs/.

README.md becomes the front page. The measured tables, CONTRIBUTING.md, CHANGELOG.md and what pages
link to (examples, configurations) keep their paths, and links to them are rewritten. The references
of commands and of the Python interface are made from the code.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import File, Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
FRONT_PAGE = "index.md"
OUTSIDE = (
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "benchmarks/results/*",
    "configs/*.yaml",
    "deploy/*",
    "examples/*.py",
    "examples/*.ipynb",
)
_LINK = re.compile(r"(\]\()([^)\s#]+)((?:#[^)\s]*)?\))")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages that do not lie in docs/."""
    from mkdocs.structure.files import File

    def add(path: str, text: str | bytes) -> File:
        files.append(File.generated(config, path, content=text))
        return files.src_uris[path]

    add(FRONT_PAGE, (ROOT / "README.md").read_text(encoding="utf-8"))
    add("commands.md", _commands())
    add("python.md", _python_interface())
    for pattern in OUTSIDE:
        for path in sorted(ROOT.glob(pattern)):
            add(path.relative_to(ROOT).as_posix(), path.read_bytes())
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Makes links of the repository links of the site."""
    place = "README.md" if page.file.src_uri == FRONT_PAGE else _in_repository(page.file.src_uri)
    here = posixpath.dirname(page.file.src_uri)

    def rewritten(link: re.Match[str]) -> str:
        before, target, after = link.groups()
        if "://" in target:
            return link[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(place), target))
        return f"{before}{posixpath.relpath(_on_site(path), here or '.')}{after}"

    return _LINK.sub(rewritten, markdown)


def _in_repository(page: str) -> str:
    """The path of a page's source; generated pages count as pages of docs/."""
    return page if (ROOT / page).exists() else f"docs/{page}"


def _on_site(path: str) -> str:
    """Where a file of the repository lies on the site."""
    if path == "README.md":
        return FRONT_PAGE
    return path.removeprefix("docs/")


def _commands() -> str:
    """The page of the command line, from the commands themselves."""
    from ragen_apo.cli import app

    text = app.generate_docs(output_format="markdown")
    return text.replace("# ragen-apo\n", "# Commands\n", 1)


def _python_interface() -> str:
    """The page that mkdocstrings fills from the docstrings of ragen_apo.api."""
    import ragen_apo

    interface = [
        name
        for name in dir(ragen_apo)
        if getattr(getattr(ragen_apo, name), "__module__", "") == "ragen_apo.api"
    ]
    entries = "\n".join(f"::: ragen_apo.api.{name}\n" for name in interface)
    return f"# Python interface\n\nThese names are there after `import ragen_apo`.\n\n{entries}"
