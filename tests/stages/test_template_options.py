"""What a chat template is told: in prompts, in stored values, in the models that a run writes."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from ragen_apo.config import RunConfig, load_run_config, resolved_yaml
from ragen_apo.errors import ConfigError, ModelError
from ragen_apo.progress import SilentProgress
from ragen_apo.run_directory import create_run
from ragen_apo.session import Session, open_session
from ragen_apo.stages.inputs import check_start
from ragen_apo.stages.shown_prompt import show_prompt
from ragen_apo.values.conditions import describe_differences
from tests import factories
from tests.chat_templates import with_template
from tests.command_line import Command

UNTHINKING = "--agent.template_options.enable_thinking=false"
EMPTY_THOUGHT = "<|im_start|>assistant\n<think>\n\n</think>\n\n"

Config = Callable[..., RunConfig]


@pytest.fixture
def qwen3(
    qwen_folder: Path,
    chatml_tokenizer: PreTrainedTokenizerBase,
    real_template: Callable[[str], PreTrainedTokenizerBase],
    tmp_path: Path,
) -> Path:
    """A tiny untrained model with the chat template of Qwen3."""
    folder = Path(shutil.copytree(qwen_folder, tmp_path / "qwen3"))
    template = str(real_template("qwen3").chat_template)
    with_template(chatml_tokenizer, template).save_pretrained(folder)
    return folder


@pytest.fixture
def qwen3_config(qwen3: Path) -> Config:
    return functools.partial(
        factories.config,
        f"--policy.path={qwen3}",
        "--warm_start.copy.max_steps=0",
        "--agent.max_context_tokens=1024",
    )


def session_of(config: RunConfig, path: Path) -> Session:
    with factories.threads_restored():
        files = create_run(path, config_yaml=resolved_yaml(config))
        return open_session(config, files, SilentProgress())


def test_prompts_and_saved_models_are_told(
    qwen3_config: Config, qwen3: Path, tmp_path: Path
) -> None:
    session = session_of(qwen3_config(UNTHINKING), tmp_path / "run")
    model = session.load_model(qwen3)
    assert model.template.opening == "<think>\n\n</think>\n\n"
    session.save_model(model, session.run.reference(0))
    again = session.load_model(session.run.reference(0))
    assert again.fingerprint() == model.fingerprint(), "as a run that is resumed has it"
    saved = AutoTokenizer.from_pretrained(session.run.reference(0))
    asked = [{"role": "user", "content": "?"}]
    text = saved.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
    assert str(text).endswith(EMPTY_THOUGHT)


@pytest.mark.slow
def test_values_of_other_options_are_other_values(
    qwen3_config: Config, qwen3: Path, tmp_path: Path
) -> None:
    conditions = []
    for name, keys in (("told", [UNTHINKING]), ("plain", []), ("same", [])):
        session = session_of(qwen3_config(*keys), tmp_path / name)
        conditions.append(session.conditions(session.load_model(qwen3)))
    told, plain, same = conditions
    assert same == plain
    differing = " ".join(describe_differences(told, plain))
    assert "chat_template_hash: " in differing
    assert "reference_fingerprint: " in differing


def test_show_prompt_shows_what_they_do(qwen3_config: Config) -> None:
    texts = []
    for keys in ([UNTHINKING], []):
        shown = show_prompt(qwen3_config(*keys))
        texts.append("".join(token.text for token in shown.contexts[0]))
    assert EMPTY_THOUGHT in texts[0]
    assert EMPTY_THOUGHT not in texts[1]


def test_the_command_names_them(qwen3_config: Config, command: Command, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(resolved_yaml(qwen3_config()))
    result = command("show-prompt", tmp_path / "config.yaml", *UNTHINKING.split("="))
    assert result.status == 0, result.err
    assert 'agent.template_options: {"enable_thinking": false}' in result.out
    assert "template_options" not in command("show-prompt", tmp_path / "config.yaml").out


def test_a_name_that_the_template_does_not_read_is_refused_before_the_run(
    qwen3_config: Config,
) -> None:
    check_start(qwen3_config(UNTHINKING))
    with pytest.raises(ModelError, match="does not read thinking.*enable_thinking"):
        check_start(qwen3_config("--agent.template_options={thinking: false}"))


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt", "bos_token"])
def test_what_every_template_is_given_is_no_option(name: str, qwen3_config: Config) -> None:
    with pytest.raises(ConfigError, match=f"template_options names '{name}', which every template"):
        qwen3_config(f"--agent.template_options.{name}=1")


def test_the_small_model_and_values_that_no_file_keeps_are_refused(qwen3_config: Config) -> None:
    with pytest.raises(ConfigError, match="template_options are for .* policy.path names none"):
        factories.config(UNTHINKING)
    with pytest.raises(ConfigError, match="finite numbers"):
        qwen3_config("--agent.template_options.enable_thinking=.nan")


def test_a_run_from_before_there_were_options_has_none(
    qwen3_config: Config, tmp_path: Path
) -> None:
    text = resolved_yaml(qwen3_config())
    for line in ("  template_options: {}\n", "  revision: null\n"):
        assert line in text
        text = text.replace(line, "")
    (tmp_path / "config.yaml").write_text(text)
    assert load_run_config(tmp_path / "config.yaml") == qwen3_config()
