"""Publishing a policy, at a small hub on this machine that answers as the real one does."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
from huggingface_hub import ModelCard, constants

from ragen_apo.errors import HubError, RunDirectoryError
from ragen_apo.files import write_checksums
from ragen_apo.report.publish import push_to_hub
from ragen_apo.run_directory import RunDirectory
from tests.command_line import Command

TOKEN = "hf_secret"


class Hub(ThreadingHTTPServer):
    """Keeps what is committed to it; takes one token only."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.address = f"http://127.0.0.1:{self.server_port}"
        self.created: dict[str, object] = {}
        self.files: dict[str, bytes] = {}


class Answer(BaseHTTPRequestHandler):
    server: Hub

    def do_POST(self) -> None:
        body = self._body()
        if self.headers["Authorization"] != f"Bearer {TOKEN}":
            return self._answer(401, {"error": "Invalid username or password."})
        if self.path == "/api/repos/create":
            self.server.created = json.loads(body)
            return self._answer(200, {"url": f"{self.server.address}/me/shopper"})
        if self.path.endswith("/preupload/main"):
            names = [each["path"] for each in json.loads(body)["files"]]
            modes = [{"path": n, "uploadMode": "regular", "shouldIgnore": False} for n in names]
            return self._answer(200, {"files": modes})
        if self.path == "/api/validate-yaml":
            return self._answer(200, {"warnings": [], "errors": []})
        for line in body.splitlines():
            entry = json.loads(line)
            if entry["key"] == "file":
                content = base64.b64decode(entry["value"]["content"])
                self.server.files[entry["value"]["path"]] = content
        address = f"{self.server.address}/me/shopper/commit/1"
        return self._answer(200, {"commitUrl": address, "commitOid": "1", "success": True})

    def _body(self) -> bytes:
        if self.headers["Transfer-Encoding"] != "chunked":
            return self.rfile.read(int(self.headers["Content-Length"]))
        parts = []
        while length := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(length))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def _answer(self, status: int, content: object) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Tests are quiet."""


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)  # this one is on the machine itself
    with Hub() as server:
        Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture
def published_run(build_run: Callable[..., Path]) -> Path:
    directory = build_run()
    (directory / "policy").mkdir()
    (directory / "policy" / "model.safetensors").write_bytes(b"weights")
    write_checksums(directory / "policy")
    return directory


def test_model_and_card_are_published_in_a_private_repository(
    published_run: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    address = push_to_hub(published_run, "me/shopper", endpoint=hub.address)
    assert address == f"{hub.address}/me/shopper/commit/1"
    assert hub.created["visibility"] == "private"
    assert set(hub.files) == {"model.safetensors", "README.md"}
    assert hub.files["model.safetensors"] == b"weights"
    assert b"model-index" in hub.files["README.md"]


BASES = {
    "Qwen/Qwen3-0.6B": "Qwen/Qwen3-0.6B",
    "models/mine": None,
    "/home/ann/runs/mine/references/0": None,
}


@pytest.mark.parametrize("base", BASES)
def test_adapters_go_along_and_name_no_folder_of_this_machine(
    base: str, published_run: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = published_run / "adapter"
    adapter.mkdir()
    (adapter / "adapter_model.safetensors").write_bytes(b"low rank")
    commit = BASES[base] and "0123abc"
    settings = {"r": 4, "base_model_name_or_path": base, "revision": commit}
    (adapter / "adapter_config.json").write_text(json.dumps(settings))
    write_checksums(adapter)
    config = published_run / "config.yaml"
    is_of_hub = BASES[base] is not None
    text = config.read_text().replace("lora: null", f"lora: {{rank: 4}}\n  path: {base}")
    config.write_text(text.replace("enabled: true", f"enabled: {str(not is_of_hub).lower()}"))
    if commit:
        RunDirectory(published_run).note(model_commit=commit)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    push_to_hub(published_run, "me/shopper", license_id="apache-2.0", endpoint=hub.address)
    names = {"adapter/adapter_model.safetensors", "adapter/adapter_config.json"}
    assert set(hub.files) == {"model.safetensors", "README.md", *names}
    assert hub.files["adapter/adapter_model.safetensors"] == b"low rank"
    published = json.loads(hub.files["adapter/adapter_config.json"])
    assert published == settings | {"base_model_name_or_path": BASES[base]}
    card = ModelCard(hub.files["README.md"].decode())
    assert (card.data.license, card.data.base_model) == ("apache-2.0", BASES[base])
    belong = f"`{base}`" if is_of_hub else "the run's own reference, which is not here"
    assert f"folder `adapter`. They belong to {belong}." in card.text


@pytest.mark.slow
def test_the_command_names_the_license(
    published_run: Path, hub: Hub, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr(constants, "ENDPOINT", hub.address)
    result = command("push", published_run, "--repo", "me/shopper", "--license", "apache-2.0")
    assert result.status == 0, result.err
    assert ModelCard(hub.files["README.md"].decode()).data.license == "apache-2.0"


def test_damaged_adapters_are_not_published(published_run: Path) -> None:
    adapter = published_run / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text("{}")
    write_checksums(adapter)
    (adapter / "adapter_config.json").write_text("{]")
    with pytest.raises(RunDirectoryError, match="adapter is damaged"):
        push_to_hub(published_run, "me/shopper")


@pytest.mark.parametrize("token", ["hf_of_somebody_else", ""])
def test_a_refusal_is_one_sentence_without_the_token(
    token: str, published_run: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(HubError, match="me/shopper: the policy was not published") as caught:
        push_to_hub(published_run, "me/shopper", endpoint=hub.address)
    assert "hf_of" not in str(caught.value)


def test_a_hub_that_is_not_reached_is_no_fault_of_name_and_token(
    published_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with pytest.raises(HubError, match=r"The hub was not reached: look at the network") as caught:
        push_to_hub(published_run, "me/shopper", endpoint="http://127.0.0.1:9")
    assert "Expected a name" not in str(caught.value)


def test_a_damaged_policy_is_not_published(published_run: Path) -> None:
    (published_run / "policy" / "model.safetensors").write_bytes(b"others")
    with pytest.raises(RunDirectoryError, match="damaged"):
        push_to_hub(published_run, "me/shopper")


def test_what_distillation_alone_has_made_is_published(
    published_run: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    (published_run / "metrics.jsonl").unlink()
    status = json.loads((published_run / "run.json").read_text())
    del status["phases"]["stage 2"]
    (published_run / "run.json").write_text(json.dumps(status))
    (published_run / "distillation.jsonl").write_text('{"step": 1, "loss": 1.0}\n')
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    push_to_hub(published_run, "me/shopper", endpoint=hub.address)
    assert "The distilled policy solves" in hub.files["README.md"].decode()


def test_a_run_that_was_not_trained_has_nothing_to_publish(build_run: Callable[..., Path]) -> None:
    run = build_run(trained=False)
    with pytest.raises(RunDirectoryError, match="no trained policy .* --resume`"):
        push_to_hub(run, "me/shopper")
    (run / "policy").mkdir()  # of no steps: such a run has ended
    with pytest.raises(RunDirectoryError, match="no trained policy .* --training.max_steps 30`"):
        push_to_hub(run, "me/shopper")
