"""The value store as one process sees it: what is kept, what is missing, what is refused."""

import dataclasses
import json
import math
import os
import sqlite3
import subprocess
import sys
import zlib

import pytest

from ragen_apo.errors import MissingValueError, ValueStoreError
from ragen_apo.values.conditions import SamplingConditions
from ragen_apo.values.estimator import soft_value
from ragen_apo.values.store import ValueStore
from tests import factories

CHANGED = {
    "reference_fingerprint": "def",
    "environment": "webshop",
    "environment_version": "2",
    "environment_options": '{"page_size": 5}',
    "reward_version": "2",
    "context_mode": "window",
    "chat_template_hash": "77aa",
    "system_prompt": "You are a careful shopper.",
    "parser_version": "2",
    "max_response_tokens": 65,
    "max_context_tokens": 2049,
    "temperature": 0.9,
    "format_penalty": 0.0,
    "invalid_action_penalty": 0.0,
}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "values.sqlite"


@pytest.fixture
def connections(monkeypatch):
    """The connections that stores open."""
    opened, connect = [], sqlite3.connect

    def connected(*args, **options):
        opened.append(connect(*args, **options))
        return opened[-1]

    monkeypatch.setattr(sqlite3, "connect", connected)
    return opened


@pytest.fixture
def store(path):
    with ValueStore(path) as store:
        yield store


@pytest.mark.parametrize("umask", [0o002, 0o077])
def test_the_umask_says_who_may_write_to_a_new_store(path, umask):
    before = os.umask(umask)
    try:
        ValueStore(path).close()
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o666 & ~umask


def test_a_stored_trajectory_comes_back_equal_after_reopening(path, conditions):
    played = factories.played("a mug", rewards=(-0.1, 0.7))
    with ValueStore(path) as store:
        assert store.add_many(conditions, [(0, played)])
    with ValueStore(path, create=False) as store:
        assert store.trajectories(conditions, played.task.task_id) == [played]
        assert store.returns_by_task(conditions)[played.task.task_id] == [played.episode_return]
        assert store.returns_by_task(conditions) == {played.task.task_id: [-0.1 + 0.7]}
        assert store.successes_by_task(conditions) == {played.task.task_id: [True]}


def test_returns_come_in_the_order_of_their_index_whatever_the_order_of_writing(store, conditions):
    for index in (2, 0, 5):
        store.add_many(conditions, [(index, factories.played("a mug", rewards=(float(index),)))])
    task_id = factories.task("a mug").task_id
    assert store.returns_by_task(conditions)[task_id] == [0.0, 2.0, 5.0]
    assert store.sample_indices(conditions, task_id) == [0, 2, 5]
    assert [t.episode_return for t in store.trajectories(conditions, task_id)] == [0.0, 2.0, 5.0]


def test_tokens_are_counted_for_each_reference_in_the_order_of_its_samples(store, conditions):
    another = dataclasses.replace(conditions, reference_fingerprint="0 sorts before abc")
    unused = dataclasses.replace(conditions, reference_fingerprint="only other splits")
    mug = factories.played("a mug", rewards=(0.0, 1.0))  # two turns of two tokens
    hat = factories.played("a hat", task=factories.task("a hat", split="test"))
    store.add_many(conditions, [(0, mug), (1, mug), (0, hat)])
    store.add_many(another, [(0, mug)])
    store.add_many(unused, [(0, hat)])
    store.add_many(conditions, [(2, hat)])  # what is added later changes no order
    assert store.num_response_tokens(split="train") == [8, 4, 0]
    assert store.num_response_tokens(split="test") == [4, 0, 2]


def test_the_first_sample_under_a_key_stays(store, conditions):
    first, second = (
        factories.played("a mug", rewards=(1.0,)),
        factories.played("a mug", rewards=(0.0,)),
    )
    assert store.add_many(conditions, [(0, first)]) == 1
    assert store.add_many(conditions, [(0, second)]) == 0
    assert store.add_many(conditions, [(0, second), (1, second)]) == 1
    assert store.trajectories(conditions, first.task.task_id) == [first, second]
    assert store.add_many(conditions, [(2, first), (3, first), (1, first)]) == 2


def test_values_are_the_soft_values_of_the_stored_returns_at_any_beta(store, conditions):
    task_id = factories.task("a mug").task_id
    returns = [0.0, 1.0, 0.25, 0.0]
    for index, reward in enumerate(returns):
        store.add_many(conditions, [(index, factories.played("a mug", rewards=(reward,)))])
    for beta in (0.0, 0.1, 0.5, math.inf):
        values = store.values(conditions, [task_id], beta=beta)
        assert values == {task_id: soft_value(returns, beta=beta)}


def test_this_list_of_changes_names_every_key_field():
    assert set(CHANGED) == {field.name for field in dataclasses.fields(SamplingConditions)}


@pytest.mark.parametrize("field", CHANGED)
def test_a_change_of_any_key_field_misses_and_the_error_names_the_field(store, conditions, field):
    task_id = factories.task("a mug").task_id
    store.add_many(conditions, [(0, factories.played("a mug"))])
    asked = dataclasses.replace(conditions, **{field: CHANGED[field]})
    assert store.returns_by_task(asked) == {}
    assert store.returns_by_task(asked) == {}
    with pytest.raises(MissingValueError) as raised:
        store.values(asked, [task_id], beta=0.5)
    lines = str(raised.value).splitlines()
    assert f"  {field}: store has {getattr(conditions, field)!r}, asked for {CHANGED[field]!r}" in (
        lines
    )
    assert sum("store has" in line for line in lines) == 1


def test_the_error_for_missing_values_says_how_many_which_why_and_what_to_do(store, conditions):
    store.add_many(conditions, [(0, factories.played("a mug"))])
    store.add_many(conditions, [(0, factories.played("a hat"))])
    mug, hat, new = (factories.task(name).task_id for name in ("a mug", "a hat", "a book"))
    asked = dataclasses.replace(conditions, reference_fingerprint="def", temperature=0.5)
    with pytest.raises(MissingValueError) as raised:
        store.values(asked, [mug, hat, new], beta=0.5)
    message = str(raised.value)
    assert "3 of 3 tasks" in message
    assert mug in message
    assert "2 of them were sampled under conditions that differ in" in message
    assert "reference_fingerprint: store has 'abc', asked for 'def'" in message
    assert "temperature: store has 1.0, asked for 0.5" in message
    assert "ragen-apo estimate-values" in message


def test_what_differs_least_stands_first_in_the_error(store, conditions):
    store.add_many(conditions, [(0, factories.played("a mug"))])
    far = dataclasses.replace(conditions, **CHANGED | {"environment": "shop"})
    near = dataclasses.replace(conditions, temperature=0.25)
    for other in (far, near):
        store.add_many(other, [(0, factories.played("a mug"))])
    asked = dataclasses.replace(conditions, temperature=0.5, context_mode="window")
    with pytest.raises(MissingValueError) as raised:
        store.values(asked, [factories.task("a mug").task_id], beta=0.5)
    differences = [line for line in str(raised.value).splitlines() if "store has" in line]
    assert [line.split(":")[0].strip() for line in differences[:4]] == [
        *("context_mode", "temperature"),
        *("context_mode", "temperature"),
    ]
    assert len(differences) == 4 + len(CHANGED) - 2


@pytest.mark.parametrize(("num_tasks", "ending"), [(3, "c."), (4, "c, ...."), (9, "c, ....")])
def test_three_missing_tasks_are_named(store, conditions, num_tasks, ending):
    names = [f"task {letter}" for letter in "abcdefghi"[:num_tasks]]
    with pytest.raises(MissingValueError) as raised:
        store.values(conditions, names, beta=0.5)
    (line,) = (each for each in str(raised.value).splitlines() if "Tasks: " in each)
    assert line.endswith("Tasks: task a, task b, task " + ending)


def test_a_task_that_was_never_sampled_is_an_error_and_not_zero(store, conditions):
    store.add_many(conditions, [(0, factories.played("a mug"))])
    mug, new = factories.task("a mug").task_id, factories.task("a book").task_id
    with pytest.raises(MissingValueError, match="no return of these tasks under other conditions"):
        store.values(conditions, [mug, new], beta=0.5)


def test_long_texts_that_differ_look_different_in_the_error(store, conditions):
    long = dataclasses.replace(conditions, system_prompt="Be careful. " * 50 + "A")
    store.add_many(long, [(0, factories.played("a mug"))])
    asked = dataclasses.replace(conditions, system_prompt="Be careful. " * 50 + "B")
    with pytest.raises(MissingValueError) as raised:
        store.values(asked, [factories.task("a mug").task_id], beta=0.5)
    (line,) = [line for line in str(raised.value).splitlines() if "system_prompt" in line]
    stored, wanted = line.split(", asked for ")
    assert stored.removeprefix("  system_prompt: store has ") != wanted
    assert len(line) < 200


def test_conditions_survive_json_and_write_equal_numbers_equally(conditions):
    text = json.dumps(conditions.to_json())
    assert SamplingConditions(**json.loads(text)) == conditions
    same = dataclasses.replace(conditions, temperature=1, format_penalty=0.1)
    assert same.digest == conditions.digest
    zero = dataclasses.replace(conditions, format_penalty=0.0)
    assert dataclasses.replace(conditions, format_penalty=-0.0).digest == zero.digest


def test_the_digest_is_the_same_in_another_process(conditions):
    program = (
        "import json, sys; from ragen_apo.values.conditions import SamplingConditions; "
        "print(SamplingConditions(**json.loads(sys.argv[1])).digest)"
    )
    for hash_seed in ("1", "2"):
        printed = subprocess.run(
            [sys.executable, "-c", program, json.dumps(conditions.to_json())],
            env={"PYTHONPATH": ":".join(sys.path), "PYTHONHASHSEED": hash_seed},
            check=True,
            capture_output=True,
            text=True,
        )
        assert printed.stdout.strip() == conditions.digest


def test_conditions_with_a_number_that_is_not_finite_are_refused(conditions):
    with pytest.raises(ValueStoreError, match="temperature must be finite, got nan"):
        dataclasses.replace(conditions, temperature=math.nan)


@pytest.mark.parametrize("reward", [math.nan, math.inf])
def test_a_return_that_is_not_finite_is_refused_and_nothing_of_the_batch_is_stored(
    store, conditions, reward
):
    good, bad = factories.played("a mug"), factories.played("a hat", rewards=(reward,))
    with pytest.raises(ValueStoreError, match=f"sample 1 .* has the return {reward}"):
        store.add_many(conditions, [(0, good), (1, bad)])
    assert store.returns_by_task(conditions) == {}


def test_a_trajectory_of_another_environment_is_refused(store, conditions):
    other = dataclasses.replace(conditions, environment="sokoban")
    with pytest.raises(ValueStoreError, match="environment 'shop', expected 'sokoban'"):
        store.add_many(other, [(0, factories.played("a mug"))])


def test_a_negative_index_is_refused(store, conditions):
    with pytest.raises(ValueStoreError, match="counts from 0"):
        store.add_many(conditions, [(-1, factories.played("a mug"))])


def test_a_file_that_is_no_database_is_refused_and_left_alone(path):
    path.write_text("a shopping list, longer than the hundred bytes of a header " * 4)
    before = path.read_bytes()
    with pytest.raises(ValueStoreError, match=r"file is not a database\. Give the path"):
        ValueStore(path)
    assert path.read_bytes() == before


def test_a_database_of_another_program_is_refused_and_left_alone(path):
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE recipes (name TEXT)")
    connection.close()
    before = path.read_bytes()
    with pytest.raises(ValueStoreError, match="another program"):
        ValueStore(path)
    assert path.read_bytes() == before


def test_another_schema_version_is_refused_with_both_versions(path):
    ValueStore(path).close()
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("PRAGMA user_version=99")
    connection.close()
    with pytest.raises(
        ValueStoreError, match="schema 99, this version of ragen-apo reads schema 1"
    ):
        ValueStore(path)


def test_an_absent_store_is_an_error_where_it_must_exist(path):
    with pytest.raises(ValueStoreError, match="no value store at .*estimate-values"):
        ValueStore(path, create=False)
    assert not path.exists()


def test_a_path_that_cannot_be_opened_is_an_error_of_the_store(tmp_path):
    with pytest.raises(ValueStoreError, match="cannot open the value store"):
        ValueStore(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(ValueStoreError, match="cannot open the value store"):
        ValueStore(tmp_path / "file" / "values.sqlite")


def test_an_empty_file_becomes_a_store(path, conditions):
    path.touch()
    with ValueStore(path) as store:
        assert store.returns_by_task(conditions) == {}


@pytest.mark.slow
def test_a_full_disk_loses_nothing_and_writing_goes_on_when_there_is_space(
    connections, store, conditions
):
    store.add_many(conditions, [(0, factories.played("a mug"))])
    (connection,) = connections
    num_pages = connection.execute("PRAGMA page_count").fetchone()[0]
    connection.execute(f"PRAGMA max_page_count={num_pages}")
    long = [(index, factories.played("a hat", rewards=(0.1,) * 99)) for index in range(200)]
    with pytest.raises(ValueStoreError, match="full.*What was stored before is safe"):
        store.add_many(conditions, long)
    mug, hat = factories.task("a mug").task_id, factories.task("a hat").task_id
    assert store.returns_by_task(conditions) == {mug: [1.0]}
    connection.execute("PRAGMA max_page_count=1000000")
    assert store.add_many(conditions, long) == 200
    assert len(store.returns_by_task(conditions)[hat]) == 200


def test_a_damaged_file_is_an_error_of_the_store(path, conditions):
    with ValueStore(path) as store:
        store.add_many(conditions, [(i, factories.played("a mug")) for i in range(100)])
    content = bytearray(path.read_bytes())
    content[4096:] = b"\xff" * (len(content) - 4096)
    path.write_bytes(content)
    with ValueStore(path) as store, pytest.raises(ValueStoreError) as raised:
        store.returns_by_task(conditions)
    assert "cannot read" in str(raised.value) and "malformed" in str(raised.value)
    assert "The file is damaged. Restore a copy" in str(raised.value)


def change(path, statement, *values):
    connection = sqlite3.connect(path, isolation_level=None)
    assert connection.execute(statement, values).rowcount == 1
    connection.close()


def test_a_flipped_byte_in_a_stored_trajectory_is_one_line_that_names_it(path, conditions):
    played = factories.played("a mug")
    with ValueStore(path) as store:
        store.add_many(conditions, [(0, played), (1, factories.played("a mug"))])
    packed = bytearray(zlib.compress(json.dumps(played.to_json()).encode()))
    packed[len(packed) // 2] ^= 4
    change(path, "UPDATE trajectories SET zlib_json = ? WHERE sample_index = 1", bytes(packed))
    task_id = played.task.task_id
    with ValueStore(path) as store:
        for read in (
            lambda: store.trajectories(conditions, task_id),
            lambda: store.num_response_tokens(split="train"),
        ):
            with pytest.raises(ValueStoreError) as raised:
                read()
            message = str(raised.value)
            assert f"{path} is damaged: sample 1 of task {task_id}: " in message
            assert "Restore a copy, or move it away and sample again" in message
            assert "\n" not in message


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[" * 5000 + "]" * 5000, "nested deeper than 100 levels"),
        ('{"task": 3}', "task: Input should be a dictionary, got 3"),
        ("not JSON", "Expecting value"),
    ],
)
def test_a_trajectory_that_was_made_by_hand_is_one_line_too(path, conditions, text, problem):
    with ValueStore(path) as store:
        store.add_many(conditions, [(0, factories.played("a mug"))])
    change(path, "UPDATE trajectories SET zlib_json = ?", zlib.compress(text.encode()))
    with ValueStore(path) as store, pytest.raises(ValueStoreError) as raised:
        store.num_response_tokens(split="train")
    assert problem in str(raised.value)


@pytest.mark.parametrize("value", ["much", b"\x00", math.inf])
def test_a_return_that_is_no_number_is_named_and_not_computed_with(path, conditions, value):
    with ValueStore(path) as store:
        store.add_many(conditions, [(0, factories.played("a mug"))])
    change(path, "UPDATE samples SET episode_return = ?", value)
    task_id = factories.task("a mug").task_id
    with ValueStore(path) as store, pytest.raises(ValueStoreError) as raised:
        store.values(conditions, [task_id], beta=0.5)
    assert f"episode_return of task {task_id}: {value!r}, expected a number" in str(raised.value)


def test_conditions_with_a_flipped_byte_are_named(path, conditions):
    with ValueStore(path) as store:
        store.add_many(conditions, [(0, factories.played("a mug"))])
    task_id = factories.task("a mug").task_id
    asked = dataclasses.replace(conditions, temperature=0.5)
    other = json.dumps({**conditions.to_json(), "temperature": 9})
    for text, problem in (
        ('{"temp', "Unterminated string"),
        (other, "their digest is another one"),
    ):
        change(path, "UPDATE conditions SET json = ?", text)
        with ValueStore(path) as store, pytest.raises(ValueStoreError) as raised:
            store.values(asked, [task_id], beta=0.5)
        assert f"is damaged: conditions {conditions.digest}: {problem}" in str(raised.value)


@pytest.mark.slow
def test_pages_of_the_file_with_other_bytes_are_an_error_of_the_store_or_are_not_met(
    path, conditions
):
    with ValueStore(path) as store:
        store.add_many(conditions, [(i, factories.played("a mug")) for i in range(60)])
    whole, task_id, num_refused = path.read_bytes(), factories.task("a mug").task_id, 0
    for start in range(0, len(whole), 509):
        content = bytearray(whole)
        content[start : start + 40] = b"\xa5" * 40
        path.write_bytes(content)
        try:
            with ValueStore(path, create=False) as store:
                store.values(conditions, [task_id], beta=0.5)
                store.num_response_tokens(split="train")
        except ValueStoreError:
            num_refused += 1
    assert num_refused > 10
