"""Models as the cache of the Hugging Face hub keeps them, which is read without a network."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from huggingface_hub import constants
from transformers import dynamic_module_utils

COMMITS = ("a1" * 20, "b2" * 20)
"""As git names them."""


class HubCache:
    """The models of a hub that have been downloaded; made by the fixture `hub_cache`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def add(
        self, name: str, model: Path, *, commit: str, refs: tuple[str, ...] = ("main",)
    ) -> Path:
        """A copy of a model's folder as one commit, to which these branches and tags lead."""
        repository = self.folder / f"models--{name.replace('/', '--')}"
        for ref in refs:
            (repository / "refs").mkdir(parents=True, exist_ok=True)
            (repository / "refs" / ref).write_text(commit)
        return Path(shutil.copytree(model, repository / "snapshots" / commit))


def use_cache(folder: Path, monkeypatch: pytest.MonkeyPatch) -> HubCache:
    """Makes the folder the cache, as HF_HOME does before the hub's client is imported."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder / "hub"))
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(folder / "modules"))
    return HubCache(folder / "hub")
