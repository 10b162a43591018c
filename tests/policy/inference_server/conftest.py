"""A tiny model, a fake server that was started with it, and an engine that asks the server."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedTokenizerBase

from ragen_apo.config.policy import SmallModelConfig
from ragen_apo.config.rollouts import RolloutsConfig
from ragen_apo.policy.inference_server import rotation
from ragen_apo.policy.inference_server.engine import ServerEngine
from ragen_apo.policy.language_model import LanguageModel, build_small_model
from ragen_apo.progress import Progress
from tests.fake_vllm import FakeVllm, serving

NUM_ROWS = 3
CAPACITY = 120
TOO_LONG = 1e30
"""Seconds. To wait for so long is an OverflowError."""


@pytest.fixture(scope="session")
def tiny_model(shop_tokenizer: PreTrainedTokenizerBase) -> LanguageModel:
    """With one layer, as the fake server samples some hundred tokens in each test."""
    sizes = SmallModelConfig(
        hidden_size=32, num_layers=1, num_heads=4, intermediate_size=64, max_position=1024
    )
    return build_small_model(shop_tokenizer, sizes, seed=0)


@pytest.fixture
def model(tiny_model: LanguageModel) -> LanguageModel:
    """A model whose weights a test may change; its head has opinions, so that gaps are large."""
    changed = copy.deepcopy(tiny_model)
    with torch.no_grad():
        for weight in changed.model.parameters():
            weight.mul_(3)
    return changed


@pytest.fixture
def folder(model: LanguageModel, tmp_path: Path) -> Path:
    """What the server is started with."""
    path = tmp_path / "model"
    model.save(path)
    return path


@pytest.fixture
def server(folder: Path) -> Iterator[tuple[FakeVllm, str]]:
    with serving(folder) as found:
        yield found


@pytest.fixture
def fake(server: tuple[FakeVllm, str]) -> FakeVllm:
    return server[0]


@pytest.fixture
def url(server: tuple[FakeVllm, str]) -> str:
    return server[1]


MakeEngine = Callable[..., ServerEngine]


@pytest.fixture
def make_engine(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MakeEngine:
    """An engine of a model that asks the server, or others; one may fail where it would pause."""

    def make(
        model: LanguageModel,
        *,
        progress: Progress | None = None,
        pauses: bool = True,
        temperature: float = 1.0,
        **options: object,
    ) -> ServerEngine:
        keys = {"base_url": [url], "retries": 2, "timeout_seconds": 20.0}
        settings = RolloutsConfig.model_validate(
            {"engine": "vllm", "model_folder": str(tmp_path / "served"), **keys, **options}
        )
        monkeypatch.setattr(rotation, "RETRY_SECONDS", 0.01 if pauses else TOO_LONG)
        return ServerEngine(
            model,
            settings,
            num_rows=NUM_ROWS,
            capacity=CAPACITY,
            temperature=temperature,
            progress=progress,
        )

    return make


@pytest.fixture
def engine(make_engine: MakeEngine, model: LanguageModel) -> ServerEngine:
    return make_engine(model)
