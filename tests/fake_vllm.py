"""A small server with the routes of vLLM that rollouts use, and every fault that a test asks for.

It samples from a model of its own that only its routes change, so that log-probabilities agree
where the right weights were published, and nowhere else.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from ragen_apo.config.policy import LoraConfig
from ragen_apo.policy.engine import Response
from ragen_apo.policy.generation import GenerationEngine
from ragen_apo.policy.language_model import LanguageModel, load_language_model
from ragen_apo.policy.lora import add_adapters
from ragen_apo.policy.scoring import score_tokens
from ragen_apo.seeding import derive_seed, generator

MAX_MODEL_LEN = 1024
SERVED_NAME = "the-model"


class FakeVllm:
    """The state of the server: a model, adapters, a label, and what was asked of it."""

    def __init__(self, folder: Path) -> None:
        self.first_folder, self.max_model_len = folder, MAX_MODEL_LEN
        self.spoil: Callable[[str, Any], Any] = lambda path, answer: answer
        """Gets every route and its answer before it is sent; may change it, or raise."""
        self.asked: list[tuple[str, Any]] = []
        self.device = "cuda"
        self.scale_logprobs = True
        """False is vLLM's default: log-probabilities before the temperature."""
        self.lock = threading.Lock()
        self.seeds = itertools.count()
        self.seed_of: Callable[[dict[str, Any]], int] = lambda _: next(self.seeds)
        """Of the draws for a completion; `content_seed` makes them a function of the request."""
        self.delay_seconds = 0.0
        """Before each completion, which others do not wait for."""
        self.has_ended = threading.Event()
        self.api_key: str | None = None
        """What requests to the routes under /v1 have to bring, as with vLLM's --api-key."""
        self.restart()

    def restart(self) -> None:
        """What a process that was started again knows."""
        self.model = _loaded(self.first_folder)
        self.adapters: dict[str, LanguageModel] = {}
        self.folder, self.label = self.first_folder, "default"

    def paths(self) -> list[str]:
        """The routes that were asked for, in their order."""
        return [path for path, _ in self.asked]

    def answer(self, path: str, body: dict[str, Any], authorization: str | None = None) -> Any:
        path = path.partition("?")[0]
        self.asked.append((path, body))
        is_open = self.api_key is None or not path.startswith("/v1")
        if not is_open and authorization != f"Bearer {self.api_key}":
            raise RefusalError(401, f"Unauthorized: {authorization}")
        if path == "/v1/completions":
            self.has_ended.wait(self.delay_seconds)
        with self.lock:
            return self.spoil(path, self._routes()[path](body))

    def _routes(self) -> dict[str, Callable[[dict[str, Any]], Any]]:
        return {
            "/version": lambda _: {"version": "0.32.0"},
            "/v1/models": lambda _: {"data": self._models()},
            "/server_info": lambda _: {"vllm_config": {"device_config": {"device": self.device}}},
            "/weight_info": lambda _: {"weight_version": self.label},
            "/update_weight_version": self._set_label,
            "/collective_rpc": self._reload,
            "/reset_prefix_cache": lambda _: {"success": True},
            "/v1/load_lora_adapter": self._load_adapter,
            "/v1/unload_lora_adapter": lambda body: str(self.adapters.pop(body["lora_name"])),
            "/v1/completions": self._complete,
        }

    def _models(self) -> list[dict[str, Any]]:
        base = {
            "id": SERVED_NAME,
            "root": str(self.first_folder),
            "max_model_len": self.max_model_len,
            "parent": None,
        }
        return [base, *({"id": name, "parent": SERVED_NAME} for name in self.adapters)]

    def _set_label(self, body: dict[str, Any]) -> Any:
        self.label = body["new_version"]
        return {"success": True}

    def _reload(self, body: dict[str, Any]) -> Any:
        assert body["method"] == "reload_weights"
        self.folder = Path(body["kwargs"]["weights_path"])
        self.model = _loaded(self.folder)
        return {"results": [None]}

    def _load_adapter(self, body: dict[str, Any]) -> str:
        name, folder = body["lora_name"], Path(body["lora_path"])
        if name in self.adapters:
            raise RefusalError(400, f"The lora adapter '{name}' has already been loaded.")
        settings = json.loads((folder / "adapter_config.json").read_text())
        names = settings["target_modules"]
        wanted = LoraConfig(rank=settings["r"], alpha=settings["lora_alpha"], target_modules=names)
        adapted = copy.deepcopy(self.model)
        add_adapters(adapted.model, wanted, seed=0)
        stored = load_file(folder / "adapter_model.safetensors")
        with torch.no_grad():
            for key, tensor in adapted.model.named_parameters():
                if ".lora_" in key:
                    shown = "base_model.model." + key.replace(".default", "")
                    tensor.copy_(stored.pop(shown))
        assert not stored
        self.adapters[name] = adapted
        return "Success"

    def _complete(self, body: dict[str, Any]) -> Any:
        name = body["model"]
        if name != SERVED_NAME and name not in self.adapters:
            raise RefusalError(404, f"The model `{name}` does not exist.")
        model = self.model if name == SERVED_NAME else self.adapters[name]
        prompt, draws = body["prompt"], generator(self.seed_of(body), "fake")
        if "stop" in body or body["stop_token_ids"]:
            response = _sampled(model, body, draws)
        else:  # nobody plays by a response that nothing ends: any tokens do
            token_ids = draws.integers(len(model.tokenizer), size=body["max_tokens"]).tolist()
            logprobs = _logprobs(model, prompt, token_ids, body["temperature"])
            response = Response(tuple(token_ids), tuple(logprobs), stopped=False)
        logprobs = list(response.logprobs)
        if not self.scale_logprobs:
            logprobs = _logprobs(model, prompt, response.token_ids, 1.0)
        choice = {
            "token_ids": list(response.token_ids),
            "prompt_token_ids": prompt,
            "logprobs": {"token_logprobs": logprobs},
            "finish_reason": "stop" if response.stopped else "length",
        }
        return {"choices": [choice]}


_LOADED: dict[tuple[str, ...], LanguageModel] = {}


def _loaded(folder: Path) -> LanguageModel:
    """The model in a folder. One of the same make is copied, a tenth of the time of loading it."""
    texts = (path for path in sorted(folder.iterdir()) if path.suffix in (".json", ".jinja"))
    make = tuple(text for path in texts for text in (path.name, path.read_text()))
    if make not in _LOADED:
        _LOADED[make] = load_language_model(folder, device=torch.device("cpu"))
    model = copy.deepcopy(_LOADED[make])
    keys = model.model.load_state_dict(load_file(folder / "model.safetensors"), strict=False)
    assert not keys.unexpected_keys and set(keys.missing_keys) <= {"lm_head.weight"}
    return model


def _sampled(model: LanguageModel, body: dict[str, Any], draws: np.random.Generator) -> Response:
    prompt, max_tokens = body["prompt"], body["max_tokens"]
    engine = GenerationEngine(model, num_rows=1, capacity=len(prompt) + max_tokens)
    engine.stop_rule.end_ids = set(body["stop_token_ids"])
    if "stop" not in body:
        engine.stop_rule.is_over = lambda ids: ids[-1] in body["stop_token_ids"]
    with engine.rollout():
        row = engine.open_row(draws)
        engine.submit(row, prompt, max_new_tokens=max_tokens)
        while True:
            for _, response in engine.step(temperature=body["temperature"]):
                return response


@torch.no_grad()
def _logprobs(
    model: LanguageModel, prompt: Sequence[int], response: Sequence[int], temperature: float
) -> list[float]:
    """Of a response after a prompt."""
    token_ids = torch.tensor([[*prompt, *response]])
    mask = torch.arange(token_ids.shape[1])[None] >= len(prompt)
    scores = score_tokens(model, token_ids, mask, temperature=temperature or 1.0)
    return scores.logprobs_BT[mask].tolist()


def content_seed(body: dict[str, Any]) -> int:
    """Equal for equal contexts, whenever and in whatever order they come."""
    return derive_seed(0, *body["prompt"])


class RefusalError(Exception):
    """An answer with another status than 200."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class HangupError(Exception):
    """The connection ends without an answer, as when the process dies."""


class StallError(Exception):
    """There is no answer for a while."""


class RawError(Exception):
    """Bytes that are no JSON."""


def handler(server: FakeVllm) -> type[BaseHTTPRequestHandler]:
    """Answers by the state of a server."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
            """Nothing: tests read what was asked from the server's list."""

        def do_GET(self) -> None:
            self._serve({})

        def do_POST(self) -> None:
            length = int(self.headers["Content-Length"])
            self._serve(json.loads(self.rfile.read(length)))

        def _serve(self, body: dict[str, Any]) -> None:
            try:
                answer = server.answer(self.path, body, self.headers["Authorization"])
                self._send(200, json.dumps(answer).encode())
            except RefusalError as refusal:
                content = {"error": {"message": str(refusal)}}
                self._send(refusal.status, json.dumps(content).encode())
            except HangupError:
                self.close_connection = True
            except StallError as stall:
                server.has_ended.wait(float(str(stall)))
            except RawError as raw:
                self._send(200, str(raw).encode())
            except BrokenPipeError:
                pass

        def _send(self, status: int, content: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

    return Handler


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[tuple[FakeVllm, str]]:
    """A server of the model in a folder, and its address; it ends with the block."""
    fake = FakeVllm(folder)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler(fake)) as http:
        http.daemon_threads = False
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield fake, f"http://127.0.0.1:{http.server_port}"
        finally:
            fake.has_ended.set()
            http.shutdown()
            thread.join()
