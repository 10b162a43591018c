"""docs/algorithm.md speaks of functions and tests that exist."""

import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "algorithm.md").read_text(encoding="utf-8")
NAMES = sorted(set(re.findall(r"\b((?:values|objectives)\.\w+)\.(\w+)", PAGE)))
TESTS = sorted(set(re.findall(r"\btest_\w+\b(?!\.py)", PAGE)))


@pytest.mark.parametrize(("module", "name"), NAMES)
def test_a_function_of_the_page_exists(module, name):
    assert hasattr(importlib.import_module(f"ragen_apo.{module}"), name)


@pytest.mark.parametrize("name", TESTS)
def test_a_test_of_the_page_exists(name):
    sources = [
        p
        for room in ("policy", "values", "objectives", "stages", "training")
        for p in ROOT.glob(f"tests/{room}/**/test_*.py")
    ]
    assert any(f"def {name}(" in path.read_text(encoding="utf-8") for path in sources)


def test_the_page_names_functions_and_tests():
    assert len(NAMES) > 10
    assert len(TESTS) > 30
