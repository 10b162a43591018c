"""Configurations: what is accepted, what is refused, and with which words."""

import contextlib
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragen_apo.config import RunConfig, load_config, parse_config, resolved_yaml
from ragen_apo.config.__main__ import configuration_page
from ragen_apo.config.environment import EnvironmentConfig
from ragen_apo.config.load import override_keys
from ragen_apo.config.policy import LoraConfig
from ragen_apo.errors import ConfigError
from ragen_apo.training.algorithms.apo import ValueConfig
from tests import factories

ROOT = Path(__file__).resolve().parent.parent
SHIPPED = sorted(
    path
    for path in (ROOT / "configs").glob("*.yaml")
    if not path.name.startswith(("compare_", "pretrained"))  # tests/comparison, of --pretrained
)


def parse(text: str, *overrides: str) -> RunConfig:
    return parse_config(text, source="run.yaml", overrides=overrides)


def refusal(text: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parse(text, *overrides)
    return str(caught.value)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_every_shipped_configuration_loads_and_survives_being_resolved(path: Path) -> None:
    config = load_config(path)
    assert parse(resolved_yaml(config)) == config


def test_at_least_the_three_configurations_of_the_readme_are_shipped() -> None:
    assert {"shop.yaml", "smoke.yaml", "source_style.yaml"} <= {path.name for path in SHIPPED}


def beta2_of(config: RunConfig) -> float:
    assert isinstance(config.algorithm, ValueConfig)
    return config.algorithm.beta2


def test_the_keys_of_the_earlier_project_are_valid() -> None:
    config = parse(
        "apo: {beta: 0.5, v_star_samples: 8, adaptive_vstar: true, learning_rate: 1e-4}\n"
        "environment: {max_turns: 8, num_products: 497}\n"
        "training: {max_steps: 100, eval_every: 10}\n"
    )
    assert (config.values.beta1, beta2_of(config)) == (0.5, 0.5)
    assert config.values.num_samples == 8
    assert config.values.adaptive
    assert config.optimizer.learning_rate == 0.0001
    assert config.environment.options == {"max_turns": 8, "num_products": 497}
    assert (config.training.max_steps, config.training.eval_every) == (100, 10)


def test_another_algorithm_takes_over_what_was_set_and_not_the_defaults_of_the_one_before() -> None:
    ppo = resolved_yaml(parse("algorithm: {name: ppo, clip_high: 0.28, gamma: 0.9}"))
    grpo = parse(ppo, "--algorithm", "grpo").algorithm
    assert grpo == parse("algorithm: {name: grpo, clip_high: 0.28}").algorithm


@pytest.mark.parametrize("overrides", [(), ("--environment", "sokoban")])
def test_an_environment_may_be_a_name_alone_and_options_may_follow(
    overrides: tuple[str, ...],
) -> None:
    config = parse("environment: sokoban", *overrides, "--environment.max_turns", "3")
    assert config == parse("environment: {name: sokoban, max_turns: 3}")
    assert RunConfig.model_validate({"environment": "sokoban"}).environment.name == "sokoban"


def test_a_name_alone_on_the_command_line_keeps_the_options_of_the_file() -> None:
    config = parse("environment: {max_turns: 3}", "--environment", "sokoban")
    assert config.environment == EnvironmentConfig.model_validate(
        {"name": "sokoban", "max_turns": 3}
    )


def test_an_empty_file_and_empty_sections_mean_the_defaults() -> None:
    assert parse("") == parse("apo:\nvalues:\nalgorithm:\nwarm_start:\n  copy:\n") == RunConfig()


@pytest.mark.parametrize("number", ["1e-4", "1E-4", "1.e-4", "1.0e-4", "0.0001", "+1e-04"])
def test_a_number_may_be_written_in_any_usual_way(number: str) -> None:
    assert parse(f"optimizer: {{learning_rate: {number}}}").optimizer.learning_rate == 0.0001


@pytest.mark.parametrize("temperature", ["1e-4", "1e-40"])
@pytest.mark.parametrize("section", ["sampling", "evaluation"])
def test_a_temperature_that_nothing_can_be_divided_by_is_refused(
    section: str, temperature: str
) -> None:
    with pytest.raises(ConfigError, match=rf"{section}\.temperature: .*at least 0\.001"):
        parse("", f"--{section}.temperature", temperature)
    assert parse("", f"--{section}.temperature", "1e-3")


def test_a_whole_number_may_be_written_with_an_exponent() -> None:
    assert parse("training: {max_steps: 1e3}").training.max_steps == 1000


def test_options_of_the_environment_are_numbers_in_the_same_notation() -> None:
    assert parse("environment: {step_penalty: -1e-2}").environment.options == {
        "step_penalty": -0.01
    }


def test_lists_and_mappings_are_written_on_the_command_line_as_in_a_file() -> None:
    text = "warm_start: {enabled: false}\npolicy: {path: m, lora: {}}"
    lora = parse(text, "--policy.lora.target_modules", "[q_proj, v_proj]").policy.lora
    assert lora == LoraConfig(target_modules=["q_proj", "v_proj"])
    lora = parse(text, "--policy.lora.target_modules", "q_proj").policy.lora
    assert lora == LoraConfig(target_modules=["q_proj"])
    told = parse(text, "--agent.template_options", "{a: 1}", "--agent.template_options.b", "[x]")
    assert told.agent.template_options == {"a": 1, "b": ["x"]}
    text += "\nagent: {template_options: {a: 1}}"
    options = "--agent.template_options"
    assert parse(text, options, "{}").agent.template_options == {}
    assert parse(text, f"{options}.b", "3").agent.template_options == {"a": 1, "b": 3}


def test_adapters_are_off_by_default_and_an_empty_section_means_their_defaults() -> None:
    pretrained = "warm_start: {enabled: false}\npolicy: {path: m"
    assert parse(f"{pretrained}}}").policy.lora is None
    for text in ("{}", "{target_modules: all-linear}", "{target_modules: [all-linear]}"):
        config = parse(f"{pretrained}, lora: {text}}}")
        assert config.policy.lora == LoraConfig()
        assert parse(resolved_yaml(config)) == config
    switched_on = parse(f"{pretrained}}}", "--policy.lora.rank", "8").policy.lora
    assert switched_on == LoraConfig(rank=8)
    switched_off = parse(f"{pretrained}, lora: {{rank: 8}}}}", "--policy.lora", "null")
    assert switched_off.policy.lora is None


def test_the_configuration_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="frozen"):
        RunConfig().values.beta1 = 1.0  # pyright: ignore[reportAttributeAccessIssue]


class TestOverrides:
    def test_they_are_written_with_a_space_or_an_equals_sign(self) -> None:
        config = parse(
            "algorithm: {beta2: 1}", "--algorithm.beta2", "0.05", "--training.max_steps=3"
        )
        assert (beta2_of(config), config.training.max_steps) == (0.05, 3)

    def test_negative_numbers_null_and_lists_are_values(self) -> None:
        config = parse(
            "",
            "--agent.format_penalty",
            "-0.1",
            "--machine.num_threads=null",
            "--environment.a.b",
            "[1]",
        )
        assert config.agent.format_penalty == -0.1
        assert config.machine.num_threads is None
        assert config.environment.options == {"a": {"b": [1]}}

    def test_the_last_of_two_counts(self) -> None:
        assert parse("", "--seed", "1", "--seed", "2").seed == 2

    def test_dashes_stand_for_underscores(self) -> None:
        assert parse("", "--values.num-samples", "3").values.num_samples == 3

    def test_the_label_of_a_part_stays_as_it_is_written(self) -> None:
        text = "environment: {name: mixture, parts: {frozen-lake: {name: frozen_lake}, b_c: {}}}"
        changes = ("--environment.parts.frozen-lake.max-turns", "3")
        options = parse(text, *changes, "--environment.some-option", "1").environment.options
        parts = {"frozen-lake": {"name": "frozen_lake", "max_turns": 3}, "b_c": {}}
        assert options == {"parts": parts, "some_option": 1}

    def test_beta_on_the_command_line_replaces_both_betas_of_the_file(self) -> None:
        config = parse("values: {beta1: 0.1}\nalgorithm: {beta2: 0.2}", "--apo.beta", "0.3")
        assert (config.values.beta1, beta2_of(config)) == (0.3, 0.3)

    def test_beta2_on_the_command_line_changes_beta_of_the_file_in_stage_two_only(self) -> None:
        config = parse("apo: {beta: 0.5}", "--algorithm.beta2", "0.05")
        assert (config.values.beta1, beta2_of(config)) == (0.5, 0.05)

    def test_a_key_that_holds_text_takes_any_text(self) -> None:
        path = ["--policy.path", "123", "--warm_start.enabled", "false"]
        config = parse("", "--agent.system_prompt", "Buy: [now", *path)
        assert (config.agent.system_prompt, config.policy.path) == ("Buy: [now", "123")

    def test_a_folder_is_the_same_one_from_any_directory(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "models" / "mine").mkdir(parents=True)
        monkeypatch.chdir(tmp_path)
        start = "--policy.path", "models/mine"
        warm = "--warm_start.enabled", "false"
        assert parse("", *start, *warm).policy.path == str(tmp_path / "models" / "mine")
        assert parse("", "--policy.path", "models/other", *warm).policy.path == "models/other"

    def test_a_section_may_be_overridden_as_a_whole_and_keeps_its_other_keys(self) -> None:
        config = parse("policy: {small: {num_layers: 2}}", "--policy.small", "{num_heads: 2}")
        assert (config.policy.small.num_layers, config.policy.small.num_heads) == (2, 2)

    @pytest.mark.parametrize(
        ("overrides", "words"),
        [
            (("--apo.bta", "1"), "--apo.bta: unknown key; did you mean apo.beta?"),
            (("--apo.beta2", "1"), "--apo.beta2: unknown key; it is algorithm.beta2 now"),
            (("--max_steps=1",), "did you mean warm_start.copy.max_steps or training.max_steps?"),
            (("--seed",), "--seed: no value; write --seed VALUE"),
            (("--seed", "--algorithm.beta2", "1"), "--seed: no value; write --seed VALUE"),
            (("--resum",), "--resum: no value; write --resum VALUE (or did you mean --resume?)"),
            (("false",), "VALUE. Flags take no value: --no-evaluate"),
            (("seed", "1"), "seed: unexpected; an override is written --section.key VALUE"),
            (("--seed.x", "1"), "--seed.x: unknown key"),
            (("--sampling.warmth", "1"), "--sampling.warmth: unknown key; known in sampling: temp"),
            (("--seed", "[1"), "--seed: '[1' is not YAML"),
            (("--values", "3"), "values: got 3, expected a section of keys"),
            (("--environment", "3"), "environment: got 3, expected a name or a section of keys"),
            (("--environment", "{a: 1, a: 2}"), "--environment: line 1: the key a is already set"),
            (("--", "1"), "--: unexpected"),
        ],
    )
    def test_each_mistake_has_its_sentence(self, overrides: tuple[str, ...], words: str) -> None:
        assert words in refusal("", *overrides)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "optimizer: {learning_rate: -1e-4}",
            "optimizer.learning_rate: got -0.0001, expected a number greater",
        ),
        ("algorithm: {beta2: 0}", "algorithm.beta2: got 0, expected a number greater than 0"),
        ("apo: {beta: 0}", "algorithm.beta2: got 0, expected a number greater than 0"),
        ("algorithm: {beta2: .nan}", "beta2: got nan, expected a finite number greater than 0"),
        ("values: {beta1: .inf}", "values.beta1: got inf, expected a finite number at least 0"),
        ("algorithm: {beta2: abc}", "algorithm.beta2: got 'abc', expected a number greater than 0"),
        ("algorithm: {beta2: true}", "algorithm.beta2: got true, expected a number greater than 0"),
        ("algorithm: {beta2: null}", "beta2: got null, expected a number greater than 0"),
        (
            "training.max_steps: 1",
            "training.max_steps: unknown key; sections are nested: training: {max_steps: ...}, or "
            'training={"max_steps": ...} in Python',
        ),
        (
            "policy: {small.num_layers: 1}",
            "sections are nested: policy: {small: {num_layers: ...}}",
        ),
        ("algorithm: {loss: huber}", "loss: got 'huber', expected regression or weighted"),
        ("apo: [1]", "apo: got [1], expected a section with beta, v_star_samples"),
        ("apo: {lss: 1}", "apo.lss: unknown key; the section apo may hold beta, v_star_samples"),
        ("apo: {replay: {capacity: 9}}", "apo.replay.capacity: it has been removed"),
        (
            "algorithm: {name: grpo, kl_estimator: k3}",
            "algorithm.kl_estimator: unknown key; it has been removed (kl_in decides it",
        ),
        ("policy_gradient: {kl_estimator: k1}", "kl_estimator: it has been removed (kl_in"),
        ("run: {num_threads: 1}", "run.num_threads: it is machine.num_threads now"),
        ("ppo: {gamma: 1}", "ppo.gamma: it is algorithm.gamma now"),
        ("algorithm: no", "algorithm: got False, expected a name or a section"),
        ("algorithm: {name: foo}", "algorithm: got 'foo', expected apo or apo_turn or oapl"),
        ("algorithm: {name: gripo}", "algorithm: got 'gripo' (did you mean grpo?), expected"),
        ("algorithm: {name: ppo, trace: 1}", "trace: unknown key; it is an option of apo_turn"),
        ("algorithm: {name: grpo, group_size: 1}", "got 1, expected a whole number at least 2"),
        (
            "algorithm: {center_residuals: true}\ntraining: {tasks_per_step: 1}",
            "must be at least 2, got 1",
        ),
        (
            "algorithm: brpo\ntraining: {tasks_per_step: 1}",
            "compares the episodes of a step with each",
        ),
        (
            "monitors: {gradient_buckets: true}",
            "gradient_buckets: unknown key; it has been removed",
        ),
        (
            "apo: {beta: 1}\nalgorithm: {beta2: 1}",
            "apo.beta: is another name of values.beta1 and algorithm.beta2; remove it or",
        ),
        (
            "apo: {v_star_samples: 1}\nvalues: {num_samples: 1}",
            "v_star_samples: is another name of values.num_samples; remove it or",
        ),
        (
            "algorithm: grpo\nvalues: {baseline: zero}",
            "values.baseline is zero, and algorithm grpo subtracts no V*",
        ),
        (
            "algorithm: grpo\nvalues: {estimator: regression}",
            "values.estimator is regression, and algorithm grpo subtracts no V*",
        ),
        (
            "values: {estimator: regression, baseline: zero}",
            "values: estimator is regression, and baseline zero subtracts nothing",
        ),
        (
            "values: {estimator: regression, beta1: 0}",
            "values: estimator regression predicts exp(R / beta1), and beta1 is 0; "
            "set it above 0, or",
        ),
        ("values: {store: v.sqlite}\nreference: {refresh_every_steps: 5}", "remove one of the two"),
        ("values: {adaptive: true, num_samples: 32}", "max_samples (16) must be at"),
        (
            "reference: {num_samples: 2}",
            "num_samples (2) is for new references, and none are made; set refresh_every_steps",
        ),
        (
            "algorithm: grpo\nreference: {num_samples: 2, refresh_every_steps: 5}",
            "reference.num_samples is 2, and neither algorithm grpo nor distillation samples",
        ),
        (
            "values: {adaptive: true}\nreference: {num_samples: 32, refresh_max_kl: 1}",
            "values.max_samples (16) must be at least reference.num_samples (32)",
        ),
        (
            "rollout_filter: {strategy: top_p}\nreference: {num_samples: 1, refresh_max_kl: 1}",
            "Stage 1 may take only one; raise reference.num_samples, which is 1",
        ),
        ("training: {tasks_per_step: 0}", "got 0, expected a whole number at least 1"),
        ("training: {max_steps: 1.5}", "got 1.5, expected a whole number at least 0"),
        ("training: {max_steps: yes}", "got true, expected a whole number at least 0"),
        ("training: {eval_every: 0}", "whole number at least 1 and at most 1,000,000,000 or null"),
        ("warm_start: {copy: {target_accuracy: 2}}", "a number greater than 0 and at most 1"),
        ("warm_start: {enabled: 1}", "warm_start.enabled: got 1, expected true or false"),
        (
            "agent: {format_penalty: 1}",
            "agent.format_penalty: got 1, expected a number at least -1",
        ),
        ("agent: {max_response_tokens: 1024}", "must be less than max_context_tokens (1024)"),
        ("agent: {context: {mode: last_turns}}", "mode last_turns needs num_turns"),
        ("agent: {context: {mode: single_turn, num_turns: 0}}", "agent.context.num_turns: got 0"),
        ("agent: {context: {num_turns: 2}}", "mode full holds every turn, got num_turns = 2"),
        ("agent: {max_context_tokens: 4096}", "must be at most policy.small.max_position (2048)"),
        ("policy: {path: m}", "policy.path is 'm'; name the model by --pretrained, which also"),
        ("policy: {lora: {}}", "policy.lora adapts a pretrained model and policy.path names none"),
        ("policy: {path: m, lora: {rank: 0}}", "lora.rank: got 0, expected a whole number at"),
        ("policy: {path: m, lora: 3}", "policy.lora: got 3, expected a section of keys or null"),
        (
            "policy: {path: m, lora: {target_modules: [1]}}",
            "target_modules.0: got 1, expected text",
        ),
        ("policy: {small: {num_heads: 3}}", "must be a multiple of 2 * num_heads (6)"),
        ("seed: -1", "seed: got -1, expected a whole number at least 0"),
        ("training: {learning_rate: 1}", "did you mean"),
        ("training: {learning_rate: 1}", "optimizer.learning_rate"),
        ("traning: {}", "traning: unknown key; did you mean training?"),
        ("zzz: 1", "zzz: unknown key; known here: seed, machine, environment"),
        ("1: 2", "1: unknown key"),
        ("environment: {name: 3}", "environment.name: got 3, expected text"),
        ("environment: {a: .inf}", "environment: options must be made of text, finite numbers"),
        ("environment: &a {b: *a}", "run.yaml cannot be used: line 1, column 21: the alias *a"),
        ("seed: 1\nseed: 2", "line 2: the key seed is already set in line 1; remove one"),
        ("values:\n  beta1: 1\n  beta1: 1", "line 3: the key beta1 is already set in line 2"),
        ("- seed", "run.yaml holds ['seed'], expected a mapping of sections"),
        ("just text", "run.yaml holds 'just text', expected a mapping of sections"),
        ("apo: [1,", "run.yaml is not YAML: line 1, column 9"),
        ("a: b: c", "run.yaml is not YAML: line 1, column 5: mapping values are not allowed"),
        ("? [1]\n: 2", "run.yaml is not YAML"),
        ("d: 2020-99-99", "run.yaml is not YAML"),
        ("x: !!python/object:os.system y", "run.yaml is not YAML"),
        ("{" * 5000, "run.yaml cannot be used: line 1, column 51: nested more than 50 deep"),
        ("a\x00: 1", "run.yaml is not YAML"),
    ],
)
def test_each_mistake_in_a_file_has_its_sentence(text: str, words: str) -> None:
    assert words in refusal(text)


BEYOND_USE = {
    "policy: {small: {vocab_size: 1e12}}": "got 1000000000000.0, expected a whole number at least "
    "300 and at most 1,000,000",
    "training: {num_rows: 1e12}": "expected a whole number at least 1 and at most 10,000",
    "training: {max_steps: 1e22}": "expected a whole number at least 0 and at most 1,000,000,000",
    "training: {max_steps: 2.7}": "got 2.7, expected a whole number",
    "training: {tasks_per_step: 1e12}": "at least 1 and at most 1,000,000",
    "optimizer: {learning_rate: 1e300}": "expected a number greater than 0 and at most 10",
    "algorithm: {beta2: 1e300}": "expected a number greater than 0 and at most 1,000,000,000",
    "agent: {format_penalty: -1e300}": "expected a number at least -1,000,000,000 and at most 0",
    "warm_start: {demonstrations: {learning_rate: 1e300}}": "greater than 0 and at most 10",
    "evaluation: {num_episodes: 1e22}": "at least 1 and at most 1,000,000",
    "machine: {num_threads: 1e6}": "at least 1 and at most 4,096",
    "seed: 1e30": "a whole number at least 0 and less than 9,223,372,036,854,775,808",
    "policy: {small: {hidden_size: 8192, num_layers: 100}}": "weights, expected "
    "at most 1,000,000,000",
}


@pytest.mark.parametrize("text", BEYOND_USE)
def test_a_number_beyond_all_use_is_refused_with_what_is_allowed(text: str) -> None:
    assert BEYOND_USE[text] in refusal(text)


def test_every_number_of_the_configuration_has_bounds_on_both_sides() -> None:
    numbers = [
        key for key in override_keys().values() if re.match("a (whole )?number", key.allowed)
    ]
    assert len(numbers) > 80
    for key in numbers:
        assert re.search("at least|greater than", key.allowed), key.path
        assert re.search("at most|less than", key.allowed), key.path


ALIAS_BOMB = "a0: &a0 [x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 9)
)
MERGE_BOMB = "a0: &a0 {x: 1}\n" + "".join(
    f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 10)}]}}\n" for n in range(1, 9)
)


@pytest.mark.parametrize("bomb", [ALIAS_BOMB, MERGE_BOMB])
def test_an_alias_bomb_is_refused_at_its_first_alias(bomb: str) -> None:
    assert "line 2, column" in refusal(bomb)
    assert "the alias *a0 repeats another place, which is not supported; write out" in refusal(bomb)


def test_an_alias_bomb_in_an_override_is_refused() -> None:
    message = refusal("", "--environment.x", "[&a [1, 2], *a]")
    assert "--environment.x: '[&a [1, 2], *a]' cannot be used: line 1, column 13" in message


def test_a_merge_key_is_refused() -> None:
    assert "line 2, column 3: the merge key << is not supported" in refusal(
        "apo:\n  <<: {beta2: 1}"
    )


def test_what_stands_in_two_places_is_written_out_and_loads_back() -> None:
    shared = [1, 2]
    config = RunConfig.model_validate({"environment": {"a": shared, "b": shared}})
    assert "*" not in resolved_yaml(config)
    assert parse(resolved_yaml(config)) == config


def test_a_file_that_is_too_long_is_refused_and_not_read_to_its_end(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("# " + "x" * 300_000)
    for path in (tmp_path / "run.yaml", Path("/dev/zero")):
        with pytest.raises(ConfigError, match="is too long, expected 262,144 bytes at most"):
            load_config(path)
    assert "too long" in refusal("", "--environment.x", "[" + "1," * 200_000 + "]")


def test_keys_nested_too_deep_on_the_command_line_are_refused() -> None:
    assert "more than 50 names in one key" in refusal("", "--environment" + ".a" * 5000, "1")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("seed: !!bool foo", "line 1, column 7: 'foo' cannot be read as !!bool"),
        ("seed: !!timestamp foo", "line 1, column 7: 'foo' cannot be read as !!timestamp"),
        ("seed: !!int foo", "'foo' cannot be read as !!int (invalid literal"),
        ("seed: !!float ''", "'' cannot be read as !!float"),
        ("apo: !!int {=: x}", "line 1, column 6: a collection cannot be read as !!int"),
        ("apo: !!map foo", "line 1, column 6: expected a mapping node, but found scalar"),
        ("apo: !!set foo", "line 1, column 6: expected a mapping node, but found scalar"),
        ("seed: 2020-99-99", "'2020-99-99' cannot be read as !!timestamp (month must be"),
        ('apo: "\\UFFFFFFFF"', "run.yaml is not YAML: "),
        ('policy: {path: "\\ud800"}', "line 1, column 16: '\\ud800' cannot be read as !!str"),
        ("seed: " + "9" * 5000, "line 1, column 7: a number of more than 100 characters"),
        ("seed: 1" + ":0" * 100_000, "line 1, column 7: a number of more than 100 characters"),
    ],
)
def test_a_value_that_is_not_what_its_tag_says_is_one_line(text: str, words: str) -> None:
    message = refusal(text)
    assert words in message
    assert "\n" not in message


def test_text_on_the_command_line_that_is_not_utf_8_is_refused() -> None:
    message = refusal("", "--policy.path", b"model-\xff".decode("utf-8", "surrogateescape"))
    assert "--policy.path: 'model-\\udcff' is not YAML" in message


def test_of_very_many_mistakes_the_first_are_described_and_the_others_counted() -> None:
    message = refusal("\n".join(f"nothing{number}: 1" for number in range(1_000)))
    assert message.count("unknown key") == 40
    assert "  - and 960 more\n" in message


def test_all_mistakes_are_named_at_once() -> None:
    message = refusal("sed: 1\nalgorithm: {beta2: -1, lss: 2}\nseed: 1\nseed: 1", "--apo.bta1", "3")
    found = re.findall(r"^  - (?:line \d+: the key )?(\S+?):? ", message, re.MULTILINE)
    assert set(found) == {"sed", "algorithm.beta2", "algorithm.lss", "seed", "--apo.bta1"}
    assert message.startswith("run.yaml cannot be used:\n")
    assert message.endswith("docs/configuration.md.")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no configuration .*nothing\.yaml"):
        load_config(tmp_path / "nothing.yaml")


def test_a_folder_or_a_binary_file_in_its_place_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.yaml").write_bytes(b"\xff\xfe\x00\x01")
    for path in (tmp_path, tmp_path / "model.yaml"):
        with pytest.raises(ConfigError, match="cannot be read as text"):
            load_config(path)


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@pytest.mark.slow
@settings(max_examples=50)
@given(
    system_prompt=st.text()
    | st.sampled_from(["1e-4", "yes", "null", "~", "1:30", "<<", "2020-01-01"]),
    beta2=st.floats(min_value=1e-300, max_value=1e9),
    options=st.dictionaries(st.text().filter(lambda key: key != "name"), json_values, max_size=4),
)
def test_any_configuration_survives_being_resolved(
    system_prompt: str, beta2: float, options: dict[str, object]
) -> None:
    config = RunConfig.model_validate(
        {
            "agent": {"system_prompt": system_prompt},
            "algorithm": {"beta2": beta2},
            "environment": options,
        }
    )
    assert parse(resolved_yaml(config)) == config


@pytest.mark.slow
@given(text=st.text())
def test_any_text_is_a_configuration_or_a_configuration_error(text: str) -> None:
    with contextlib.suppress(ConfigError):
        parse(text)


@pytest.mark.slow
@given(tokens=st.lists(st.text() | st.sampled_from(["--seed", "--apo", "--environment.x"])))
def test_any_overrides_give_a_configuration_or_a_configuration_error(tokens: list[str]) -> None:
    with contextlib.suppress(ConfigError):
        parse("", *tokens)


def test_the_page_of_all_keys_is_up_to_date() -> None:
    page = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert page == configuration_page(), "run: python -m ragen_apo.config > docs/configuration.md"


def test_every_key_has_a_description() -> None:
    undescribed = [
        key.path for key in override_keys().values() if not (key.section or key.field.description)
    ]
    assert undescribed == []


def test_every_key_is_read_somewhere() -> None:
    sources = [
        path.read_text(encoding="utf-8")
        for path in (ROOT / "src" / "ragen_apo").rglob("*.py")
        if path.parent.name != "config"
    ]
    unread = [
        key.path
        for key in override_keys().values()
        if not key.section
        and not key.path.startswith("apo.")
        and not any(
            re.search(rf"[.\"]{key.path.rpartition('.')[2]}\b", source) for source in sources
        )
    ]
    assert unread == []


@pytest.mark.parametrize("precision", ["bfloat16", "auto"])
def test_float64_is_not_mixed(precision: str) -> None:
    keys = ["--machine.dtype=float64", f"--machine.mixed_precision={precision}"]
    with pytest.raises(ConfigError, match=f"dtype is float64 and mixed_precision {precision}"):
        factories.config(*keys, text="")


def test_adapters_need_a_layer() -> None:
    with pytest.raises(ConfigError, match=r"target_modules: got \[\], expected"):
        factories.config("--policy.lora.target_modules=[]", text="")


def test_a_batch_of_one_episode_cannot_be_normalised() -> None:
    normalized = "{name: ppo, reward_normalization: {method: mean, grouping: batch}}"
    with pytest.raises(ConfigError, match="there is one; raise training.tasks_per_step"):
        factories.config(f"--algorithm={normalized}", "--training.tasks_per_step=1", text="")
