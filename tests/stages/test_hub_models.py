"""Runs of models of the Hugging Face hub keep to the commit that they were started with."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from ragen_apo.config import RunConfig, resolved_yaml
from ragen_apo.errors import ConfigError, ModelError, RunDirectoryError
from ragen_apo.progress import SilentProgress
from ragen_apo.run_directory import RunDirectory, create_run
from ragen_apo.session import Session, open_session
from ragen_apo.stages import pipeline
from ragen_apo.stages.inputs import check_start
from ragen_apo.stages.shown_prompt import show_prompt
from tests import factories
from tests.hub_cache import COMMITS, HubCache

NAME = "me/tiny"
OLD, NEW = COMMITS

hub_config = functools.partial(
    factories.config,
    f"--policy.path={NAME}",
    "--agent.max_context_tokens=1024",
    "--warm_start.enabled=false",
    "--values.baseline=zero",
    "--reference.refresh_every_steps=null",
    "--training.max_steps=1",
    "--training.tasks_per_step=2",
    "--training.eval_every=null",
)


@pytest.fixture(autouse=True)
def published(hub_cache: HubCache, qwen_folder: Path) -> None:
    """A model of two commits, with another default system prompt each; `main` is the old one."""
    hub_cache.add(NAME, qwen_folder, commit=OLD)
    template = hub_cache.add(NAME, qwen_folder, commit=NEW, refs=("v2",)) / "chat_template.jinja"
    template.write_text(template.read_text().replace("You are a helpful", "You are another"))


def session_of(config: RunConfig, path: Path, **options: object) -> Session:
    files = RunDirectory(path) if path.exists() else create_run(path, config_yaml="")
    with factories.threads_restored():
        return open_session(config, files, SilentProgress(), **options)


def template_of(session: Session) -> str:
    return str(session.load_model(NAME).tokenizer.chat_template)


def test_a_run_notes_its_commit_and_keeps_to_it(hub_cache: HubCache, tmp_path: Path) -> None:
    first = session_of(hub_config(), tmp_path / "run")
    assert "helpful" in template_of(first)
    assert first.run.read_status()["model_commit"] == OLD
    (hub_cache.folder / "models--me--tiny" / "refs" / "main").write_text(NEW)
    assert "helpful" in template_of(session_of(hub_config(), tmp_path / "run"))
    assert "another" in template_of(session_of(hub_config(), tmp_path / "new"))


def test_a_run_that_cannot_have_its_commit_any_more_is_refused(
    tmp_path: Path, qwen_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = session_of(hub_config("--policy.revision=v2"), tmp_path / "run")
    session.run.note(model_commit="c3" * 20)
    with pytest.raises(ModelError, match=f"'{NAME}' at revision '{'c3' * 20}'"):
        session.load_model(NAME)
    monkeypatch.chdir(tmp_path)
    Path("me").mkdir()
    Path(NAME).symlink_to(qwen_folder)
    with pytest.raises(ModelError, match="is on this machine, and 'c3c3"):
        session.load_model(NAME)


def test_the_start_checks_the_revision_and_the_prompt_shows_it() -> None:
    check_start(hub_config("--policy.revision=v2"))
    with pytest.raises(ModelError, match="at revision 'v9'"):
        check_start(hub_config("--policy.revision=v9"))
    shown = show_prompt(hub_config("--policy.revision=v2"))
    text = "".join(token.text for token in shown.contexts[0])
    assert "You are another" in text


def test_a_revision_needs_a_model_of_the_hub() -> None:
    with pytest.raises(ConfigError, match="policy: revision is 'v2' and path is null"):
        factories.config("--policy.revision=v2")
    digits = hub_config("--policy.revision=12345678").policy.revision
    assert digits == "12345678", "a short commit of digits alone is text all the same"


@pytest.mark.slow
def test_trusting_code_that_may_change_is_said_with_what_rules_it_out(tmp_path: Path) -> None:
    def said(name: str, *keys: str) -> str:
        session = session_of(hub_config(*keys), tmp_path / name)
        sayings = factories.Sayings()
        factories.with_progress(session, sayings).load_model(NAME)
        return " ".join(sayings.lines)

    trusting = "--policy.trust_remote_code=true"
    assert f"write policy.revision: {OLD}" in said("trusting", trusting)
    assert said("pinned", trusting, "--policy.revision=v2") == ""
    assert said("plain") == ""


@pytest.mark.slow
def test_adapters_of_a_run_name_the_commit_and_another_revision_is_another_run(
    tmp_path: Path,
) -> None:
    keys = ("--policy.revision=v2", "--policy.lora={rank: 2}")
    run = factories.run(hub_config(*keys), tmp_path / "run")
    assert run.read_status()["model_commit"] == NEW
    settings = json.loads((run.adapter / "adapter_config.json").read_text())
    assert (settings["base_model_name_or_path"], settings["revision"]) == (NAME, NEW)
    assert load_file(run.policy / "model.safetensors")
    other = hub_config("--policy.revision=main", keys[1])
    run.config.write_text(resolved_yaml(other))
    with pytest.raises(RunDirectoryError, match='policy.revision was "v2" and is "main"'):
        pipeline.train(
            hub_config("--policy.revision=main", keys[1]), run, progress=SilentProgress()
        )
