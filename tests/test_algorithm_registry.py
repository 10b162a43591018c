"""The algorithms by name: what each row of the registry has to bring, and how options are read."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ragen_apo.config import load_config, parse_config, resolved_yaml
from ragen_apo.config.algorithms import ALGORITHMS, AlgorithmConfig, algorithm_class, read_algorithm
from ragen_apo.config.overrides import merge, nested
from ragen_apo.config.removed import REMOVED
from ragen_apo.config.yaml_text import dump_yaml, parse_yaml
from ragen_apo.errors import ConfigError

ROOT = Path(__file__).resolve().parents[1]
every_algorithm = pytest.mark.parametrize("name", ALGORITHMS)

WORDS_WITHOUT_TORCH = """
import json, sys
from ragen_apo.config import parse_config
from ragen_apo.report.algorithm import algorithm_of, rollouts_per_task, settings_of
from ragen_apo.report.load import RunData

said = {}
for name in json.loads(sys.argv[1]):
    config = parse_config(f"algorithm: {name}", source="x").model_dump(by_alias=True)
    run = RunData("run", config, record={}, results={})
    words = [algorithm_of(run).sentence, settings_of(run).formula(), str(rollouts_per_task(run))]
    said[name] = [*words, sorted({"torch", "transformers"} & sys.modules.keys())]
print(json.dumps(said))
"""


def options_of(name: str) -> set[str]:
    return set(algorithm_class(name).model_fields)


def changed(settings: AlgorithmConfig) -> dict[str, object]:
    """A value that is not the default for each option that is a plain number or a switch."""
    values: dict[str, object] = {}
    for option, value in settings:
        if isinstance(value, bool):
            values[option] = not value
        elif isinstance(value, int):
            values[option] = value + 1
        elif isinstance(value, float):
            values[option] = 0.5
    return values


@pytest.mark.slow
def test_configurations_and_the_words_of_reports_need_no_torch() -> None:
    finished = subprocess.run(
        [sys.executable, "-c", WORDS_WITHOUT_TORCH, json.dumps(list(ALGORITHMS))],
        capture_output=True,
        check=True,
        text=True,
    )
    said = json.loads(finished.stdout)
    assert said.keys() == ALGORITHMS.keys()
    for name, (*words, heavy) in said.items():
        assert all(words), name
        assert heavy == [], name


@every_algorithm
def test_its_words_are_complete_and_the_sentence_begins_with_the_label(name: str) -> None:
    settings = read_algorithm(name)
    traits = settings.traits
    assert settings.name == name
    assert traits.label and traits.advantage
    assert traits.sentence.startswith(f"{traits.label} ")
    assert not traits.sentence.endswith(".")  # the report puts it at the end of a line
    assert settings.formula().strip()
    assert (type(settings).__doc__ or "").strip()


def test_no_two_algorithms_have_one_label() -> None:
    labels = [algorithm_class(name).traits.label for name in ALGORITHMS]
    assert len(set(labels)) == len(labels)


@every_algorithm
def test_what_the_traits_say_is_what_the_settings_do(name: str) -> None:
    settings = read_algorithm(name)
    assert settings.traits.compares_groups == (settings.rollouts_per_task > 1)
    if settings.traits.has_values:  # V* takes the place of other rollouts
        assert settings.rollouts_per_task == settings.min_episodes_per_step == 1


@every_algorithm
def test_its_options_survive_the_resolved_configuration(name: str) -> None:
    config = parse_config(f"algorithm: {name}", source="x")
    options = changed(config.algorithm)
    assert options
    overrides = [f"--algorithm.{option}={value}".lower() for option, value in options.items()]
    config = parse_config(f"algorithm: {name}", source="x", overrides=overrides)
    assert {option: getattr(config.algorithm, option) for option in options} == options
    again = parse_config(resolved_yaml(config), source="again")
    assert again == config
    assert type(again.algorithm) is algorithm_class(name)


@every_algorithm
def test_an_option_of_other_algorithms_is_refused_with_their_names(name: str) -> None:
    every = set().union(*(options_of(each) for each in ALGORITHMS))
    for option in sorted(every - options_of(name)):
        owners = [each for each in ALGORITHMS if option in options_of(each)]
        with pytest.raises(ConfigError) as refused:
            parse_config(f"algorithm: {{name: {name}, {option}: 1}}", source="x")
        sentence = f"algorithm.{option}: unknown key; it is an option of {', '.join(owners)}"
        assert sentence in str(refused.value)


@every_algorithm
def test_the_page_of_the_configuration_lists_it_with_each_of_its_options_once(name: str) -> None:
    page = (ROOT / "docs" / "configuration.md").read_text("utf-8")
    traits = algorithm_class(name).traits
    row = f"| `{name}` | {traits.sentence} | {traits.advantage} |"
    assert row in page.replace("\\*", "*")
    tables = re.findall(r"^### algorithm: (.+?)\n(.*?)(?=^##)", page, re.M | re.S)
    shown = [
        option
        for names, table in tables
        if name in names.split(", ")
        for option in re.findall(r"^\| `([\w.]+)` \|", table, re.M)
    ]
    assert {option.partition(".")[0] for option in shown} == options_of(name) - {"name"}
    assert len(shown) == len(set(shown)), "an option has one default"


def test_the_page_on_comparisons_lists_every_algorithm_with_the_paper_that_its_file_names() -> None:
    page = (ROOT / "docs" / "comparison.md").read_text("utf-8")
    section = page.split("\n## The algorithms\n")[1].split("\n## ")[0]
    _, *rows = re.findall(r"^\| `(\w+)` \| (.+) \|$", section, re.M)
    assert [name for name, _ in rows] == list(ALGORITHMS)
    for name, source in rows:
        words = sys.modules[algorithm_class(name).__module__].__doc__ or ""
        assert all(paper in words for paper in re.findall(r"arXiv \d+\.\d+", source)), name


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("apo: {beta2: 0.1}", "apo.beta2: it is algorithm.beta2 now"),
        ("apo: {num_value_samples: 8}", "apo.num_value_samples: it is values.num_samples now"),
        ("turn_level: {trace: 0.5}", "turn_level.trace: it is algorithm.trace now"),
        ("policy_gradient: {clip_low: 0.1}", "policy_gradient.clip_low: it is algorithm.clip_low"),
        ("ppo: {gae_lambda: 0.9}", "ppo.gae_lambda: it is algorithm.gae_lambda now"),
        ("run: {num_threads: 1}", "run.num_threads: it is machine.num_threads now"),
        (
            "reward_normalization: {method: mean}",
            "reward_normalization.method: it is algorithm.reward_normalization.method now",
        ),
        ("apo: {replay: {capacity: 8}}", "apo.replay.capacity: it has been removed"),
    ],
)
def test_a_key_of_0_1_is_an_error_that_names_the_new_one(old: str, new: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(new)):
        parse_config(old, source="x")


@pytest.mark.parametrize("key", [key for key, gone in REMOVED.items() if gone.same])
def test_a_run_may_still_have_a_key_that_is_gone_at_a_value_that_changes_nothing(key: str) -> None:
    """Every run has all keys of its version in its file."""
    gone, grpo = REMOVED[key], {"algorithm": {"name": "grpo"}}
    for value in gone.same:
        written = resolved_yaml(parse_config("algorithm: grpo", source="x"))
        assert parse_config(
            dump_yaml(merge(parse_yaml(written)[0], nested(key, value))), source="x"
        ) == parse_config(written, source="x")
    words = re.escape(f"{key}: unknown key; it has been removed ({gone.why}); leave it out")
    with pytest.raises(ConfigError, match=words):
        parse_config(dump_yaml(merge(grpo, nested(key, "another"))), source="x")
    with pytest.raises(ConfigError, match=f"--{words}"):
        parse_config("algorithm: grpo", source="x", overrides=[f"--{key}={gone.same[0]}"])


def test_the_sources_style_is_read() -> None:
    config = load_config(ROOT / "configs" / "source_style.yaml")
    assert (config.algorithm.name, config.algorithm.model_dump()["beta2"]) == ("apo", 0.5)
    assert (config.values.beta1, config.values.num_samples, config.values.adaptive) == (
        0.5,
        8,
        True,
    )
    assert config.optimizer.learning_rate == 1e-4


def test_a_key_in_both_styles_is_refused() -> None:
    with pytest.raises(ConfigError, match="another name of values.beta1 and algorithm.beta2"):
        parse_config("apo: {beta: 0.5}\nvalues: {beta1: 0.2}", source="x")


def test_another_algorithm_on_the_command_line_keeps_the_options_that_both_have() -> None:
    written = "algorithm: {name: apo, beta2: 0.1, center_residuals: true, kl_coefficient: 0.02}"
    expected = {"name": "grpo", "kl_coefficient": 0.02}
    for override in ("--algorithm=grpo", "--algorithm.name=grpo"):
        config = parse_config(written, source="x", overrides=[override])
        assert config.algorithm == read_algorithm(expected)
    # The other way, and with an option of the new algorithm beside its name.
    back = parse_config(
        "algorithm: {name: grpo, group_size: 4, kl_coefficient: 0.02}",
        source="x",
        overrides=["--algorithm=apo", "--algorithm.beta2=0.3"],
    )
    assert back.algorithm == read_algorithm({"name": "apo", "beta2": 0.3, "kl_coefficient": 0.02})


def test_a_misspelt_option_is_not_dropped_with_those_of_the_other_algorithm() -> None:
    with pytest.raises(ConfigError, match="beta3"):
        parse_config("algorithm: {beta3: 0.1}", source="x", overrides=["--algorithm=grpo"])


@pytest.mark.parametrize("written", ["star_search", "{name: star_search}", "{name: [apo]}"])
def test_a_name_that_no_algorithm_has_is_refused_with_all_names(written: str) -> None:
    with pytest.raises(ConfigError, match=f"expected {' or '.join(ALGORITHMS)}"):
        parse_config(f"algorithm: {written}", source="x")


@pytest.mark.parametrize("written", ["3", "[apo]", "true"])
def test_what_is_neither_name_nor_section_is_refused_with_both_forms(written: str) -> None:
    with pytest.raises(ConfigError, match="expected a name or a section such as {name: apo}"):
        parse_config(f"algorithm: {written}", source="x")


def test_what_does_not_go_with_another_section_is_refused_in_one_sentence() -> None:
    together = "algorithm: brpo\ntraining: {tasks_per_step: 1}"
    with pytest.raises(ConfigError, match="algorithm brpo compares .* must be at least 2, got 1"):
        parse_config(together, source="x")
