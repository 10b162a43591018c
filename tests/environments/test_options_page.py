"""The page of all options of the built-in environments."""

from pathlib import Path

import pytest

from ragen_apo.config.messages import keys_of
from ragen_apo.environments.__main__ import OPTIONS, options_page
from ragen_apo.environments.base import environment_names

PAGE = Path(__file__).resolve().parents[2] / "docs" / "environments.md"


def test_the_page_is_up_to_date_and_has_every_environment() -> None:
    command = "python -m ragen_apo.environments > docs/environments.md"
    assert PAGE.read_text(encoding="utf-8") == options_page(), f"run: {command}"
    assert set(OPTIONS) >= set(environment_names())


@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_has_a_description(name: str) -> None:
    undescribed = [
        key.path
        for model in OPTIONS[name]
        for key in keys_of(model)
        if not (key.section or key.field.description)
    ]
    assert undescribed == []
