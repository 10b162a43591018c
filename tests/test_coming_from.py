"""docs/coming_from.md names settings that exist."""

import re
from dataclasses import fields
from pathlib import Path

import pytest

from ragen_apo.config.load import override_keys

PAGE = Path(__file__).resolve().parents[1] / "docs" / "coming_from.md"


def names_in_column(number: int) -> list[str]:
    """What stands in backticks in a column of the page's table."""
    lines = PAGE.read_text("utf-8").splitlines()
    rows = [line.strip("|").split("|") for line in lines if line.startswith("| ")]
    assert len(rows) > 25
    return [name for row in rows[1:] for name in re.findall("`([^`]+)`", row[number])]


def test_our_settings_are_keys_of_the_configuration() -> None:
    keys = override_keys()
    sections = {key.rpartition(".")[0] for key in keys}
    of_environments = {"environment.max_turns", "get_reward"}
    ours = names_in_column(-1)
    assert len(ours) > 35
    assert [each for each in ours if each not in {*keys, *sections, *of_environments}] == []


def test_the_settings_of_trl_are_those_of_its_configuration() -> None:
    config = pytest.importorskip("trl").GRPOConfig
    of_trainer = {"model", "peft_config", "environment_factory", "reward_funcs"}
    known = {field.name for field in fields(config)} | of_trainer
    theirs = names_in_column(3)
    assert len(theirs) > 20
    assert [each for each in theirs if each not in known] == []
