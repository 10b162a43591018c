"""Models of the Hugging Face hub, read from its cache: which commit is loaded."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ragen_apo.config import load_config
from ragen_apo.config.shipped import shipped_configurations
from ragen_apo.errors import ModelError
from ragen_apo.policy.hub import hub_commit
from ragen_apo.policy.language_model import check_model, load_language_model, load_tokenizer
from tests.hub_cache import COMMITS, HubCache

NAME = "me/tiny"
OLD, NEW = COMMITS
CPU = torch.device("cpu")
CODE = """
from transformers import Qwen2Config, Qwen2ForCausalLM

class OwnConfig(Qwen2Config):
    model_type = "own"

class OwnModel(Qwen2ForCausalLM):
    config_class = OwnConfig
    mark = "{mark}"
"""


@pytest.fixture
def two_commits(hub_cache: HubCache, qwen_folder: Path) -> dict[str, Path]:
    """A model with two commits, whose weights and templates differ; `main` is the old one."""
    folders = {
        OLD: hub_cache.add(NAME, qwen_folder, commit=OLD),
        NEW: hub_cache.add(NAME, qwen_folder, commit=NEW, refs=("v2",)),
    }
    weights = load_file(folders[NEW] / "model.safetensors")
    weights["model.norm.weight"] += 0.5
    save_file(weights, folders[NEW] / "model.safetensors", metadata={"format": "pt"})
    template = folders[NEW] / "chat_template.jinja"
    template.write_text(template.read_text().replace("You are a helpful", "You are another"))
    return folders


@pytest.mark.parametrize(
    ("revision", "commit"), [(None, OLD), ("main", OLD), ("v2", NEW), (NEW, NEW)]
)
def test_weights_and_tokenizer_are_those_of_the_revision(
    revision: str | None, commit: str, two_commits: dict[str, Path]
) -> None:
    model = load_language_model(NAME, device=CPU, revision=revision)
    assert model.commit == commit == hub_commit(NAME, revision=revision)
    assert model.fingerprint() == load_language_model(two_commits[commit], device=CPU).fingerprint()
    tokenizer = load_tokenizer(NAME, trust_remote_code=False, revision=revision)
    assert ("another" in str(tokenizer.chat_template)) == (commit == NEW)


def test_the_configuration_that_is_checked_is_that_of_the_revision(
    two_commits: dict[str, Path],
) -> None:
    config = two_commits[NEW] / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"max_position_embeddings": 64}))
    check_model(NAME, max_context_tokens=128, trust_remote_code=False)
    with pytest.raises(Exception, match="at most 64 tokens"):
        check_model(NAME, max_context_tokens=128, trust_remote_code=False, revision="v2")


def test_the_code_of_a_model_is_that_of_the_revision(two_commits: dict[str, Path]) -> None:
    for commit, folder in two_commits.items():
        config = json.loads((folder / "config.json").read_text()) | {"model_type": "own"}
        names = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
        (folder / "config.json").write_text(json.dumps(config | {"auto_map": names}))
        (folder / "own.py").write_text(CODE.format(mark=commit))
    for revision, commit in (("v2", NEW), (None, OLD)):
        model = load_language_model(NAME, device=CPU, revision=revision, trust_remote_code=True)
        assert getattr(model.model, "mark", None) == commit


@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json"])
def test_code_of_another_repository_which_no_revision_fixes_is_refused_with_one(
    two_commits: dict[str, Path], file: str
) -> None:
    path = two_commits[NEW] / file
    names = {"AutoTokenizer": [None, "some/base-code--own.OwnTokenizer"]}
    if file == "config.json":
        names = {"AutoConfig": "some/base-code--own.OwnConfig"}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"auto_map": names}))

    def check(*, trust: bool) -> None:
        check_model(NAME, max_context_tokens=8, trust_remote_code=trust, revision="v2")

    with pytest.raises(ModelError, match=f"some/base-code .auto_map in {file}.*remove 'some/base"):
        check(trust=True)
    check(trust=False)  # its own code is not run


def loaders(path: str | Path, revision: str) -> list[Callable[[], object]]:
    return [
        lambda: load_language_model(path, device=CPU, revision=revision),
        lambda: check_model(path, max_context_tokens=8, trust_remote_code=False, revision=revision),
        lambda: load_tokenizer(path, trust_remote_code=False, revision=revision),
    ]


def test_a_revision_that_is_not_there_is_named(two_commits: dict[str, Path]) -> None:
    for load in loaders(NAME, "v9"):
        with pytest.raises(ModelError, match=re.escape(f"from '{NAME}' at revision 'v9'")) as error:
            load()
        assert f"hf download {NAME} --revision v9 --local-dir FOLDER" in str(error.value)


def test_a_folder_has_no_revisions(qwen_folder: Path) -> None:
    for load in loaders(qwen_folder, "main"):
        with pytest.raises(ModelError, match="policy.revision.*on this machine.*'main'.*to null"):
            load()
    assert load_language_model(qwen_folder, device=CPU).commit is None


def test_the_folder_of_the_model_that_comes_by_pip_is_made_and_not_looked_for_at_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hub was asked five times, and the message had no word of how to make the folder."""
    monkeypatch.chdir(tmp_path)
    named = {
        load_config(path).policy.path
        for name, path in shipped_configurations().items()
        if name.endswith("_smollm2") and not name.startswith("compare_")
    }
    (folder,) = named
    with pytest.raises(ModelError, match=rf"`make {folder}`.* `ragen-apo model smollm2 --out"):
        hub_commit(folder, revision=None)
    (tmp_path / folder).mkdir(parents=True)
    assert hub_commit(folder, revision=None) is None
