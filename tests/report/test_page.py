"""The page: self-contained, complete, and deaf to what a model writes into it."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from ragen_apo.report.episodes import readable_episode
from ragen_apo.report.html import code_marked
from ragen_apo.report.load import RunData, load_run
from ragen_apo.report.page import json_for_script, page

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"


class Reader(HTMLParser):
    """Collects the tags with their attributes and the text inside each script."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1][0] == "script" and self.cdata_elem == "script":
            self.scripts[-1] += data
        else:
            self.text += data


def read(html: str) -> Reader:
    reader = Reader()
    reader.feed(html)
    return reader


def episodes_in(reader: Reader) -> list[dict[str, Any]]:
    return json.loads(reader.scripts[0])


def hostile_run(run: RunData) -> RunData:
    """The run with hostile text wherever text from outside can stand."""
    turn = {"observation": HOSTILE, "response": HOSTILE, "thought": HOSTILE, "action": HOSTILE,
            "reward": math.nan, "flags": [HOSTILE]}  # fmt: skip
    episode = {
        "episode": 0, "success": False, "failure": HOSTILE, "final_observation": HOSTILE,
        "metrics": {HOSTILE: HOSTILE},
        "task": {"instruction": HOSTILE, "category": HOSTILE, "payload": {HOSTILE: HOSTILE}},
        "turns": [turn],
    }  # fmt: skip
    summary = {
        "episodes": 1,
        "success_rate": 0.0,
        "success_ci95": [0.0, 0.8],
        "metrics": {HOSTILE: 2},
    }
    results = {
        **run.results,
        "policy": HOSTILE,
        "split": HOSTILE,
        "by_category": {HOSTILE: summary},
        "baselines": {HOSTILE: summary},
        "failures": {HOSTILE: {"count": 1, "share": 1.0, "examples": [0]}},
    }
    return dataclasses.replace(
        run, name=HOSTILE, results=results, episodes=[episode], config_text=HOSTILE,
        value_report={HOSTILE: HOSTILE, "advice": HOSTILE},
        record={"versions": {HOSTILE: HOSTILE}, "phases": {HOSTILE: {"seconds": 1}}},
    )  # fmt: skip


def test_the_page_loads_nothing_from_anywhere(build_run: Callable[..., Path]) -> None:
    html = page(load_run(build_run()), curves=[("Success", b"png")])
    reader = read(html)
    for _, attributes in reader.tags:
        for name in ("src", "href", "srcset", "action", "data", "poster"):
            value = attributes.get(name) or ""
            assert re.match(r"(#|data:image/png;base64,|$)", value), (name, value)
    assert "http://" not in html
    assert "https://" not in html
    assert "@import" not in html
    assert "url(" not in html
    assert not [tag for tag, _ in reader.tags if tag in ("link", "iframe", "object", "embed")]


def test_a_policy_forbids_what_the_page_does_not_need(build_run: Callable[..., Path]) -> None:
    reader = read(page(load_run(build_run()), curves=[]))
    policies = [a["content"] for t, a in reader.tags if t == "meta" and "http-equiv" in a]
    assert policies == [
        "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
    ]


def test_hostile_text_stays_text(build_run: Callable[..., Path]) -> None:
    run = load_run(build_run())
    harmless = [tag for tag, _ in read(page(run, curves=[("Success", b"png")])).tags]
    html = page(hostile_run(run), curves=[("Success", b"png")])
    reader = read(html)
    tags = [tag for tag, _ in reader.tags]
    assert "<script>alert" not in html
    assert "<img src=x" not in html
    assert tags.count("script") == harmless.count("script") == 2
    assert tags.count("img") == harmless.count("img") == 1
    assert not [a for _, a in reader.tags if any(name.startswith("on") for name in a)]
    assert HOSTILE in reader.text
    episode = episodes_in(reader)[0]
    assert episode["turns"][0]["response"] == episode["instruction"] == HOSTILE
    assert episode["turns"][0]["reward"] is None


def test_characters_that_steer_or_hide_are_escaped(build_run: Callable[..., Path]) -> None:
    run = load_run(build_run())
    text = "a\x1b[2J\u202eb\n"
    (row, *others), category = run.episodes, run.results["by_category"]["home"]
    row = {**row, "task": {"instruction": text}, "turns": [{"observation": text, "response": text}]}
    results = {**run.results, "by_category": {text: category, "b": category}}
    run = dataclasses.replace(run, results=results, episodes=[row, *others])
    html = page(run, curves=[])
    episode = episodes_in(read(html))[0]
    shown = "a\\x1b[2J\\u202eb\n"
    assert episode["instruction"] == episode["turns"][0]["observation"] == shown
    assert shown in html
    assert not {"\x1b", "\u202e"} & set(html)


def test_tokens_that_a_policy_reads_are_the_new_ones_of_a_turn(
    build_run: Callable[..., Path],
) -> None:
    assert 'data-read="new tokens"' in page(load_run(build_run()), curves=[])


def test_every_evaluated_episode_is_in_the_page_turn_by_turn(
    build_run: Callable[..., Path],
) -> None:
    run = load_run(build_run())
    episodes = episodes_in(read(page(run, curves=[])))
    assert len(episodes) == 100
    for episode, row in zip(episodes, run.episodes, strict=True):
        assert episode["episode"] == row["episode"]
        assert episode["instruction"] == row["task"]["instruction"]
        assert [turn["action"] for turn in episode["turns"]] == [
            turn["action"] for turn in row["turns"]
        ]


def test_the_page_shows_the_numbers_and_the_configuration(build_run: Callable[..., Path]) -> None:
    text = read(page(load_run(build_run()), curves=[("Success", b"png")])).text
    for expected in (
        "91.0% of 100 held-out tasks solved", "83.8–95.2%", "reference (warm start)", "pass@16",
        "44.7% of the tasks have no success yet", "KL to the reference, per episode",
        '"beta2": 0.05', "wrong purchase", "2.13.0+cpu", "4 min 23 s",
    ):  # fmt: skip
        assert expected in text, expected


def test_the_page_shows_what_the_environment_measures(build_run: Callable[..., Path]) -> None:
    run = load_run(build_run())
    assert "Measured by the environment" not in read(page(run, curves=[])).text
    first = {**run.episodes[0], "metrics": {"tests_passed": 3, "coverage": 0.756}}
    results = {**run.results, "metrics": {"tests_passed": 2.5}}
    run = dataclasses.replace(run, results=results, episodes=[first, *run.episodes[1:]])
    reader = read(page(run, curves=[]))
    assert re.search(
        r"Measured by the environment, mean\s*Tests passed\s*A\*-PO.*2\.5", reader.text
    )
    assert episodes_in(reader)[0]["measured"] == "tests passed 3, coverage 0.756"
    assert "measured: tests passed 3, coverage 0.756" in readable_episode(first)


def test_pass_at_k_is_in_the_order_of_k() -> None:
    """In the file, which sorts texts, 16 stands before 2."""
    results = {"pass_at_k": {"1": 0.1, "16": 0.5, "2": 0.2, "8": 0.4}}
    text = read(page(RunData(name="r", config={}, record={}, results=results), curves=[])).text
    assert re.findall(r"pass@(\d+), sampled", text) == ["1", "2", "8", "16"]
    assert "without search" not in text


def test_pass_at_k_is_not_said_to_be_of_a_search() -> None:
    search = {"label": "beam of 2"}
    results = {"pass_at_k": {"1": 0.1}, "search": search, "baselines": {}}
    text = read(page(RunData(name="r", config={}, record={}, results=results), curves=[])).text
    assert "pass@1, sampled without search" in text


def test_an_untrained_run_has_no_picture_and_says_so(build_run: Callable[..., Path]) -> None:
    reader = read(page(load_run(build_run(trained=False)), curves=[]))
    assert "This run was not trained" in reader.text
    assert "img" not in [tag for tag, _ in reader.tags]


def test_a_run_with_nothing_but_an_empty_evaluation_has_a_page() -> None:
    run = RunData(name="r", config={}, record={}, results={})
    assert "No categories were evaluated." in read(page(run, curves=[])).text


@pytest.mark.parametrize("value", ["<", "</script>", "<!--", "&amp;", "\u2028", "\ud800", "é😀"])
def test_json_in_a_script_is_harmless_and_comes_back(value: str) -> None:
    text = str(json_for_script([value]))
    assert not set(text) & set("<>&")
    assert text.isascii()
    assert json.loads(text) == [value]


def test_json_in_a_script_has_no_numbers_that_javascript_cannot_read() -> None:
    assert str(json_for_script({"a": [math.nan, math.inf, 1.5]})) == '{"a":[null,null,1.5]}'


def test_only_text_between_backticks_becomes_code() -> None:
    assert code_marked("a <b> `c<d` e") == "a &lt;b&gt; <code>c&lt;d</code> e"
