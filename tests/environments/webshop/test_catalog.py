import itertools
import json
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ragen_apo.environments.webshop import WebShopEnvironment, json_streams
from ragen_apo.environments.webshop.catalog import (
    find_data_files,
    parse_options,
    parse_prices,
    read_products,
)
from ragen_apo.environments.webshop.json_streams import stream_json_array, stream_json_object
from ragen_apo.environments.webshop.records import OptionValue
from ragen_apo.environments.webshop.store import open_catalog, resolve_data
from ragen_apo.errors import EnvironmentDataError
from ragen_apo.progress import SilentProgress


def record(asin: str, **changes: Any) -> dict[str, Any]:
    fields = {
        "asin": asin, "name": f"Product {asin}", "full_description": "About it",
        "small_description": ["First point", "Second point"], "pricing": "$5.0",
        "customization_options": {"Color": [{"value": " Red/Blue "}], "Size": None},
        "category": "fashion", "query": " Shoes ", "product_category": "A › B",
    }  # fmt: skip
    return fields | changes


def write(folder: Path, items: list[dict[str, Any]], labels: dict[str, Any] | None = None) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "items_shuffle_9.json").write_text(json.dumps(items))
    (folder / "items_ins_v2_9.json").write_text(json.dumps(labels or {}))
    return folder


def test_unnamed_overlong_and_repeated_products_are_left_out(tmp_path: Path) -> None:
    items = [record(asin) for asin in ("B1", "nan", "B1", "B0123456789", "B2")]
    products = read_products(find_data_files(write(tmp_path / "data", items)))
    assert [product.asin for product in products] == ["B1", "B2"]


def test_a_product_is_read_by_upstreams_rules(tmp_path: Path) -> None:
    labels = {
        "B1": {"attributes": ["soft"], "instruction": "Find", "instruction_attributes": ["a"]}
    }
    items = [record("B1"), record("B2", small_description="Only point", full_description=None)]
    files = find_data_files(write(tmp_path / "data", items, labels))
    first, second = read_products(files)
    assert first.options == {"color": ("red | blue",)}
    assert first.query == "shoes"
    assert first.document == "product b1 about it first point color: red | blue"
    assert (first.attributes, first.instruction) == (("soft",), "Find")
    assert (second.attributes, second.instruction) == (("DUMMY_ATTR",), None)
    assert second.bullet_points == ("Only point",)


@pytest.mark.parametrize(
    ("given", "bullets"), [([], ()), (None, ("",)), ("", ("",)), (["a", None], ("a", ""))]
)
def test_a_product_without_features_has_none_or_an_empty_one(
    tmp_path: Path, given: object, bullets: tuple[str, ...]
) -> None:
    files = find_data_files(write(tmp_path / "data", [record("B1", small_description=given)]))
    (product,) = read_products(files)
    assert product.bullet_points == bullets
    assert product.document.startswith("product b1 about it ")


@pytest.mark.parametrize(
    ("pricing", "prices", "tag"),
    [
        ("$15.9", (15.9,), "$15.9"),
        ("$1,299.00 - $1,499.50", (1299.0, 1499.5), "$1299.0 to $1499.5"),
        ("$1 $2 $3", (1.0, 2.0), "$1.0 to $2.0"),
        ("$5.99 - 7.99 a pair", (5.99,), "$5.99"),
        ("from $1.99.", (1.99,), "$1.99"),
        ("$.99", (0.99,), "$0.99"),
        ("", (100.0,), "$100.0"),
        (None, (100.0,), "$100.0"),
        ("free", (100.0,), "$100.0"),
        ("$", (100.0,), "$100.0"),
    ],
)
def test_prices_are_the_first_two_numbers_after_a_dollar_sign(
    pricing: str | None, prices: tuple[float, ...], tag: str
) -> None:
    assert parse_prices(pricing) == (prices, tag)


def test_options_keep_the_files_order() -> None:
    large, small, red = (OptionValue(value=value) for value in ("L", "S", "Red"))
    contents = {"Size": [large, small], "Color": [red]}
    assert list(parse_options(contents).items()) == [("size", ("l", "s")), ("color", ("red",))]


def test_an_array_longer_than_a_read_is_streamed_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_streams, "READ_CHARACTERS", 7)
    values = [{"a": "x" * 20, "b": [1, 2.5, None]}, 17, "é [,] ☆", [], {}]
    for indent in (None, 1):
        (tmp_path / "a.json").write_text(json.dumps(values, indent=indent, ensure_ascii=False))
        assert [value for value, _ in stream_json_array(tmp_path / "a.json")] == values


def test_an_object_longer_than_a_read_is_streamed_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries = {"a": "x" * 20, "é [,] ☆": {"b": [1, None]}, "": 17, "c": [], "d": {}}
    for characters in (1, 2, 7, 1000):
        monkeypatch.setattr(json_streams, "READ_CHARACTERS", characters)
        for indent in (None, 1):
            (tmp_path / "a.json").write_text(json.dumps(entries, indent=indent))
            assert dict(entry for entry, _ in stream_json_object(tmp_path / "a.json")) == entries


def test_a_byte_order_mark_is_read_over_and_blanks_may_be_anywhere(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("\ufeff [ 1 ,\n2\t, 3 ] \n", encoding="utf-8")
    assert [value for value, _ in stream_json_array(tmp_path / "a.json")] == [1, 2, 3]
    (tmp_path / "a.json").write_text(" [ ] ")
    assert list(stream_json_array(tmp_path / "a.json")) == []


@pytest.mark.parametrize(
    "text", ["", "[]", '{"a": 1', '{"a" 1}', '{"a": x}', '{"a"', "7", '{"a":1 "b":2}', '{"a":1,}']
)
def test_what_is_no_json_object_is_a_value_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(ValueError, match="."):
        list(stream_json_object(tmp_path / "a.json"))


@pytest.mark.parametrize(
    "text", ["", "{}", "[1, 2", "[1, x]", '["a', "7", "[,1]", "[1,]", "[1 2]", "[1,,2]"]
)
def test_what_is_no_json_array_is_a_value_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(ValueError, match="."):
        list(stream_json_array(tmp_path / "a.json"))


@pytest.mark.parametrize("broken", ["", "{}", "[]", "[{}]", "[", '[{"asin": "B1", "name": "x"}]'])
def test_a_malformed_file_is_named_in_the_error(tmp_path: Path, broken: str) -> None:
    folder = write(tmp_path / "data", [])
    (folder / "items_shuffle_9.json").write_text(broken)
    with pytest.raises(EnvironmentDataError, match="items_shuffle_9"):
        open_catalog(str(folder), store=tmp_path / "store")
    assert not list((tmp_path / "store").glob("*catalog*"))


@pytest.mark.parametrize(
    "broken", ["", "[]", "{", '{"B1": 1', '{"B1": {}', '{"B1": 1}', '{"B1": null}', '{"B1": {}} {']
)
def test_a_malformed_attributes_file_is_named_in_the_error(tmp_path: Path, broken: str) -> None:
    folder = write(tmp_path / "data", [record("B1")])
    (folder / "items_ins_v2_9.json").write_text(broken)
    with pytest.raises(EnvironmentDataError, match="items_ins_v2_9"):
        open_catalog(str(folder), store=tmp_path / "store")


@pytest.mark.parametrize(
    ("broken", "place"), [("[]", ""), ("{", ""), ('{"B1": null}', "B1"), ('{"B1": [{}]}', "B1")]
)
def test_a_malformed_file_of_human_instructions_is_named_in_the_error(
    tmp_path: Path, broken: str, place: str
) -> None:
    folder = write(tmp_path / "data", [record("B1")])
    (folder / "items_human_ins.json").write_text(broken)
    with pytest.raises(EnvironmentDataError, match=f"items_human_ins.*{place}"):
        open_catalog(str(folder), store=tmp_path / "store")


LONE = "half \ud83d"
DEEP: Any = "deep"
for _ in range(300):
    DEEP = [DEEP]
DAMAGED_ITEMS = {
    "a lone surrogate in the name": (
        {"name": LONE},
        r"'name': got 'half \\ud83d'. .* unable to parse raw data as a unicode string",
    ),
    "a lone surrogate in the id": ({"asin": "B\ud83d"}, "field 'asin': .*expected printable text"),
    "an id with a line break": ({"asin": "B\n2"}, "field 'asin': .*expected printable text"),
    "an id that is a number": (
        {"asin": 17},
        r"field 'asin': got 17\. Input should be a valid string",
    ),
    "an empty id": ({"asin": ""}, r"field 'asin': got ''\. .*expected printable text"),
    "a name that is a number": ({"name": 3}, r"\('B2'\), field 'name': got 3\. Input should"),
    "a name that is a list": ({"name": ["x"]}, r"field 'name': got \['x'\]\. Input should"),
    "a deep name": ({"name": DEEP}, r"field 'name': got \[\[\[.*\. Input should"),
    "a description that is an object": ({"full_description": {"a": 1}}, "field 'full_description"),
    "a feature that is a number": (
        {"small_description": ["a", 2]},
        r"field 'small_description.1': got 2\. Input should be a valid string",
    ),
    "categories as a list": ({"category": ["a"]}, r"field 'category': got \['a'\]\. Input"),
    "a query that is null": (
        {"query": None},
        r"field 'query': got None\. Input should be a valid string;",
    ),
    "a price that is a number": ({"pricing": 5.0}, r"field 'pricing': got 5.0\. Input should"),
    "a price beyond numbers": ({"pricing": "$" + "9" * 400}, "field 'pricing': got .*a price"),
    "options as a list": ({"customization_options": [1]}, "field 'customization_options': got"),
    "an option's value as a number": (
        {"customization_options": {"size": [{"value": 4}]}},
        r"field 'customization_options.size.0.value': got 4\. Input should be a valid string",
    ),
    "a lone surrogate in an option's name": (
        {"customization_options": {LONE: []}},
        "field 'customization_options.*unable to parse raw data as a unicode string",
    ),
}


@pytest.mark.parametrize("name", DAMAGED_ITEMS)
def test_a_damaged_product_is_refused_with_its_number_and_field(name: str, tmp_path: Path) -> None:
    changes, words = DAMAGED_ITEMS[name]
    folder = write(tmp_path / "data", [record("B1"), record("B2") | changes])
    with pytest.raises(EnvironmentDataError, match=f"items_shuffle_9.*record 2.*{words}") as caught:
        open_catalog(str(folder), store=tmp_path / "store")
    assert "\n" not in str(caught.value)


def test_a_product_without_a_field_is_refused_with_its_number(tmp_path: Path) -> None:
    damaged = record("B2")
    del damaged["query"]
    folder = write(tmp_path / "data", [record("B1"), damaged])
    with pytest.raises(EnvironmentDataError, match=r"record 2 \('B2'\), field 'query': .*required"):
        open_catalog(str(folder), store=tmp_path / "store")


def test_products_that_are_left_out_and_fields_that_are_not_read_may_be_anything(
    tmp_path: Path,
) -> None:
    items = [{"asin": "nan"}, record("B1", images=DEEP, page=LONE), {"asin": "B1", "name": 3}]
    folder = write(tmp_path / "data", items, {"B1": {"extra": DEEP}})
    assert open_catalog(str(folder), store=tmp_path / "store").num_products == 1


@pytest.mark.parametrize(
    ("labels", "words"),
    [
        ({"attributes": [1]}, r"field 'attributes.0': got 1\. Input should be a valid string"),
        ({"attributes": "soft"}, r"field 'attributes': got 'soft'\. Input should be a valid list"),
        ({"attributes": None}, r"field 'attributes': got None\. Input should be a valid list"),
        ({"instruction": 3}, r"field 'instruction': got 3\. Input should be a valid string"),
        (
            {"instruction_attributes": [LONE]},
            r"field 'instruction_attributes.0': .*as a unicode string",
        ),
    ],
)
def test_damaged_attributes_are_refused_with_their_number_and_field(
    labels: dict[str, Any], words: str, tmp_path: Path
) -> None:
    folder = write(tmp_path / "data", [record("B1")], {"B0": {}, "B1": labels})
    with pytest.raises(EnvironmentDataError, match=rf"items_ins_v2_9.*record 2 \('B1'\), {words}"):
        open_catalog(str(folder), store=tmp_path / "store")


@pytest.mark.parametrize("field", ["instruction", "instruction_attributes", "instruction_options"])
def test_damaged_human_instructions_are_refused_with_their_number_and_field(
    field: str, tmp_path: Path
) -> None:
    folder = write(tmp_path / "data", [record("B1")])
    good = {"instruction": "Find", "instruction_attributes": [], "instruction_options": []}
    (folder / "items_human_ins.json").write_text(json.dumps({"B1": [good, {**good, field: 1}]}))
    with pytest.raises(EnvironmentDataError, match=f"field 'B1.1.{field}': got 1"):
        open_catalog(str(folder), store=tmp_path / "store")


@pytest.mark.parametrize(
    ("name", "depth"),
    list(itertools.product(("shuffle_9", "ins_v2_9", "human_ins"), (5_000, 100_000))),
)
def test_json_nested_very_deep_is_one_message(name: str, depth: int, tmp_path: Path) -> None:
    folder = write(tmp_path / "data", [record("B1")])
    deep = "[" * depth + "]" * depth
    text = f"[{deep}]" if name == "shuffle_9" else f'{{"B1": {deep}}}'
    (folder / f"items_{name}.json").write_text(text)
    with pytest.raises(EnvironmentDataError, match=f"items_{name}.json is malformed"):
        open_catalog(str(folder), store=tmp_path / "store")


@pytest.mark.parametrize("name", ["shuffle_9", "ins_v2_9", "human_ins"])
def test_text_behind_the_closing_bracket_is_refused(name: str, tmp_path: Path) -> None:
    folder = write(tmp_path / "data", [record("B1")])
    (folder / "items_human_ins.json").write_text("{}")
    with (folder / f"items_{name}.json").open("a") as stream:
        stream.write(" \n")
    assert open_catalog(str(folder), store=tmp_path / "store").num_products == 1
    with (folder / f"items_{name}.json").open("a") as stream:
        stream.write('["more"]')
    with pytest.raises(EnvironmentDataError, match=f"items_{name}"):
        open_catalog(str(folder), store=tmp_path / "store")


def test_a_long_record_is_not_begun_anew_with_every_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_streams, "READ_CHARACTERS", 10)
    beginnings: list[int] = []

    class Counting(json.JSONDecoder):
        def raw_decode(self, s: str, idx: int = 0) -> tuple[Any, int]:
            beginnings.append(idx)
            return super().raw_decode(s, idx)

    monkeypatch.setattr(json, "JSONDecoder", Counting)
    (tmp_path / "a.json").write_text(json.dumps([["x" * 10] * 1000]))
    assert len(list(stream_json_array(tmp_path / "a.json"))) == 1
    assert 2 <= len(beginnings) <= 13  # 14,000 characters: 10 doubled eleven times, and the ends


def test_attributes_may_come_in_another_order_and_the_last_of_two_counts(tmp_path: Path) -> None:
    folder = write(tmp_path / "data", [record(asin) for asin in ("B1", "B2", "B3")])
    entries = ['"B3": {"attributes": ["c"]}', '"B1": {"attributes": ["a"]}']
    entries += ['"B12345678901": {}', '"B3": {"attributes": ["é\\n"]}']
    (folder / "items_ins_v2_9.json").write_text(f"{{{', '.join(entries)}}}")
    products = read_products(find_data_files(folder), scratch=tmp_path)
    assert [p.attributes for p in products] == [("a",), ("DUMMY_ATTR",), ("é\n",)]
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


def test_a_folder_without_data_says_what_is_expected(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentDataError, match="items_shuffle"):
        open_catalog(str(tmp_path / "nowhere"), store=tmp_path)


@pytest.mark.parametrize("data", ["generated:0", "generated:x", "generated:-1", "generated:²"])
def test_a_generated_size_must_be_a_positive_number(tmp_path: Path, data: str) -> None:
    with pytest.raises(EnvironmentDataError, match="number of products"):
        open_catalog(data, store=tmp_path)


def test_a_store_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(EnvironmentDataError, match="RAGEN_APO_DATA"):
        open_catalog("generated:5", store=tmp_path / "file" / "store")


def test_a_tilde_is_the_users_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "home").mkdir()
    write(tmp_path / "home" / "data", [record("B1")])
    for data in ("~/data", Path("~/data")):
        shop = WebShopEnvironment(data=data, store="~/store", nouns="words")
        assert shop.catalog.num_products == 1
    assert [path.name for path in tmp_path.iterdir()] == ["home"]
    assert (tmp_path / "home" / "store").is_dir()


@pytest.mark.usefixtures("homeless")
def test_a_user_without_a_home_directory_is_told_to_name_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAGEN_APO_DATA", raising=False)
    monkeypatch.delenv("XDG_DATA_HOME", raising=False)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(EnvironmentDataError, match=r"no home directory .* Set RAGEN_APO_DATA"):
        open_catalog("generated:5")
    assert open_catalog("generated:5", store=tmp_path / "store").num_products == 5
    assert [path.name for path in tmp_path.iterdir()] == ["store"]


def test_auto_takes_downloaded_data_and_else_the_generated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAGEN_APO_DATA", str(tmp_path))
    assert resolve_data("auto") == "generated"
    (tmp_path / "webshop" / "full").mkdir(parents=True)
    assert resolve_data("auto") == str(tmp_path / "webshop" / "full")
    (tmp_path / "webshop" / "small").mkdir()
    assert resolve_data("auto") == str(tmp_path / "webshop" / "small")


def test_other_data_is_prepared_anew_and_equal_data_is_not(tmp_path: Path) -> None:
    store = tmp_path / "store"
    first = open_catalog(str(write(tmp_path / "a", [record("B1")])), store=store)
    again = open_catalog(str(write(tmp_path / "b", [record("B1")])), store=store)
    other = open_catalog(str(write(tmp_path / "c", [record("B2")])), store=store)
    assert first is again
    assert other.folder != first.folder
    with pytest.raises(EnvironmentDataError, match="no product 'B2'"):
        first.number_of("B2")


class ToldProgress(SilentProgress):
    def __init__(self) -> None:
        self.phases: list[str] = []
        self.notes: list[str] = []

    def start(self, phase: str, total: int) -> None:
        self.phases.append(f"{phase}: {total}")

    def update(self, done: int, note: str = "") -> None:
        self.notes.append(f"{done} {note}")


def test_progress_is_told_phase_by_phase(tmp_path: Path) -> None:
    progress = ToldProgress()
    open_catalog("generated:3", store=tmp_path, progress=progress)
    assert "read products (%): 100" in progress.phases
    assert "100 3 products" in progress.notes  # the file is read at once


def test_builders_at_the_same_time_leave_one_whole_catalogue(tmp_path: Path) -> None:
    folders: list[Path] = []

    def build() -> None:
        folders.append(open_catalog("generated:20", store=tmp_path).folder)

    threads = [threading.Thread(target=build) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(folders) == 4
    assert len(set(folders)) == 1
    assert not list(tmp_path.glob("*.partial-*"))


def test_what_a_killed_builder_left_is_ignored(tmp_path: Path) -> None:
    catalog = open_catalog("generated:5", store=tmp_path)
    name = catalog.folder.name
    del catalog
    (tmp_path / f"{name}.partial-dead").mkdir()
    assert open_catalog("generated:5", store=tmp_path).num_products == 5


def test_a_product_with_more_goals_than_memory_holds_is_refused(tmp_path: Path) -> None:
    options = {f"option {n}": [{"value": str(v)} for v in range(10)] for n in range(30)}
    folder = write(
        tmp_path / "data",
        [record("B1"), record("B2", customization_options=options)],
        {"B2": {"instruction": "Find"}},
    )
    with pytest.raises(
        EnvironmentDataError, match="with product B2 there are more than 100,000,000"
    ):
        open_catalog(str(folder), store=tmp_path / "store")


@pytest.mark.slow
def test_a_pickled_environment_goes_on_in_a_worker_process_that_maps_the_same_folder(
    make: Callable[..., WebShopEnvironment],
) -> None:
    environment = make()
    environment.reset(environment.goal_task(0), seed=0)
    environment.step("search[soft cotton shirt]")
    program = (
        "import json, pickle, sys; from pathlib import Path\n"
        "e = pickle.loads(sys.stdin.buffer.read())\n"
        "step, maps = e.step('click[next >]'), Path('/proc/self/maps').read_text()\n"
        "mapped = 'scores.npy' in maps and 'records.bin' in maps\n"
        "print(json.dumps([str(e.catalog.folder), mapped, step, e.state_key()]))\n"
    )
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    finished = subprocess.run(
        [sys.executable, "-c", program],
        env=variables, input=pickle.dumps(environment), capture_output=True, check=True,
    )  # fmt: skip
    folder, mapped, step, key = json.loads(finished.stdout)
    assert (folder, mapped) == (str(environment.catalog.folder), True)
    assert step == json.loads(json.dumps(environment.step("click[next >]")))
    assert key == environment.state_key()
