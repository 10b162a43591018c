"""Trains with rollouts from a real vLLM that is killed at chosen moments, until the run is done.

    python -m benchmarks.server_kills --python .vllm/bin/python --model FOLDER --out OUT \
        --moments stage-one,rollouts@2,weights@4 -- --config CONFIG [KEYS]

FOLDER is what the server is started with (docs/server.md); the keys after `--` are those of
`ragen-apo train`, and `rollouts` is added to them. At each moment server and workers get SIGKILL,
once. The server is started again at once, as a supervisor would; a run that has ended with an error
goes on with `--resume` when the server answers again. OUT has the run, what happened when
(events.jsonl) and the logs of both sides. An OUT that was interrupted goes on.

    stage-one   while episodes of Stage 1 are under way, some of them stored
    rollouts@N  while step N of Stage 2 samples
    weights@N   while the server is given the weights, or the adapter, of step N
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ragen_apo.files import append_json_line, read_json_lines
from ragen_apo.run_directory import RunDirectory

POLL_SECONDS, CLOSE_POLL_SECONDS = 0.5, 0.02
MAX_START_SECONDS = 900
MAX_STARTS_OF_THE_RUN = 20
NUM_STORED = 20
"""Episodes of Stage 1 that are on disk when the server dies."""
FLAGS = "--max-model-len 2048 --max-num-batched-tokens 512 --enforce-eager"
LORA_FLAGS = "--enable-lora --max-lora-rank 16"
SURROUNDINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": "3000",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
    "VLLM_SERVER_DEV_MODE": "1",
}


@dataclass
class Server:
    """vLLM in a process group of its own, started as often as needed."""

    command: list[str]
    port: int
    log: Path
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        surroundings = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            **SURROUNDINGS,
        }
        with self.log.open("ab") as stream:
            self.process = subprocess.Popen(
                self.command,
                cwd=self.log.parent,
                env=surroundings,
                stdout=stream,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def kill(self) -> None:
        """SIGKILL to the server and its workers."""
        assert self.process
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def get(self, path: str) -> str | None:
        """The body of an answer; None where there is none."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.read().decode() if answer.status == http.client.OK else None
        except (OSError, http.client.HTTPException):
            return None
        finally:
            connection.close()

    def wait(self) -> None:
        """Until it answers."""
        assert self.process
        until = time.monotonic() + MAX_START_SECONDS
        while self.get("/health") is None:
            if self.process.poll() is not None or time.monotonic() > until:
                raise SystemExit(f"vLLM did not start; see {self.log}")
            time.sleep(1)

    def num_requests(self) -> int:
        """How many it works on."""
        found = re.search(r"^vllm:num_requests_running\S* (\S+)$", self.get("/metrics") or "", re.M)
        return int(float(found.group(1))) if found else 0


@dataclass
class Supervisor:
    """A server, a run, and when to kill the former."""

    server: Server
    run: RunDirectory
    folder: Path
    arguments: list[str]
    """Of `ragen-apo train`, for the first start."""
    moments: list[str]
    began: float = field(default_factory=time.monotonic)
    trainer: subprocess.Popen[bytes] | None = None
    seen: set[str] = field(default_factory=set)
    """Folders of weights before those of the step that is waited for."""
    is_close: bool = False
    """Whether the moment is one of milliseconds and may come now."""

    def note(self, event: str, **more: Any) -> None:
        row = {"seconds": round(time.monotonic() - self.began, 1), "event": event, **more}
        append_json_line(self.folder / "events.jsonl", row)
        print(json.dumps(row), flush=True)

    def until_done(self) -> None:
        self.server.start()
        try:
            for _ in range(MAX_STARTS_OF_THE_RUN):
                self.server.wait()
                self.note("the server answers")
                if self._train() == 0:
                    self.note("the run is done")
                    return
            raise SystemExit(f"the run was started {MAX_STARTS_OF_THE_RUN} times without an end")
        finally:
            if self.trainer and self.trainer.poll() is None:
                self.trainer.terminate()
                self.trainer.wait()
            self.server.kill()

    def _train(self) -> int:
        """One start of the run, with kills as their moments come; its exit status."""
        run_dir = ["--run-dir", str(self.run.path)]
        arguments = ["--resume"] if self.run.config.exists() else self.arguments
        command = [sys.executable, "-m", "ragen_apo", "train", *run_dir, *arguments]
        errors = self.folder / "errors.txt"
        with (self.folder / "train.txt").open("ab") as out, errors.open("wb") as err:
            self.trainer = subprocess.Popen(
                command, stdout=out, stderr=err, env=os.environ | {"TMPDIR": str(self._temporary())}
            )
        self.note("the run starts", arguments=arguments[0])
        while self.trainer.poll() is None:
            if self.moments and (what := self._what_is_under_way(self.moments[0])):
                self.server.kill()
                self.note("SIGKILL", moment=self.moments.pop(0), **what)
                self.is_close = False
                self.server.start()
            time.sleep(CLOSE_POLL_SECONDS if self.is_close else POLL_SECONDS)
        said = errors.read_text(errors="replace").strip()
        self.note("the run ended", status=self.trainer.returncode, said=said[-1000:])
        return self.trainer.returncode

    def _temporary(self) -> Path:
        """Where the run writes weights for the server."""
        folder = self.folder / "temporary"
        folder.mkdir(exist_ok=True)
        return folder

    def _what_is_under_way(self, moment: str) -> dict[str, Any] | None:
        """What the moment's kill interrupts; None if it has not come."""
        name, _, step = moment.partition("@")
        if name == "stage-one":
            return self._stage_one()
        return self._step(int(step)) if name == "rollouts" else self._weights(int(step))

    def _stage_one(self) -> dict[str, Any] | None:
        if not self.run.values.exists():
            return None
        address = f"file:{self.run.values}?mode=ro"
        try:
            with contextlib.closing(sqlite3.connect(address, uri=True)) as connection:
                (stored,) = connection.execute("SELECT count(*) FROM samples").fetchone()
        except sqlite3.Error:
            return None  # being made, or locked for a moment
        if stored < NUM_STORED or (requests := self.server.num_requests()) == 0:
            return None
        return {"stored_episodes": stored, "requests": requests}

    def _step(self, step: int) -> dict[str, Any] | None:
        if len(read_json_lines(self.run.metrics)) != step - 1:
            return None
        requests = self.server.num_requests()
        return {"step": step, "requests": requests} if requests > 1 else None

    def _weights(self, step: int) -> dict[str, Any] | None:
        """A folder lies there, under a name of its own, while the server is told to read it."""
        folders = {each.name for each in self._temporary().glob("ragen-apo-*/*ragen-apo-*")}
        if len(read_json_lines(self.run.metrics)) != step - 1:
            self.seen = folders
            return None
        self.is_close = True
        new = sorted(folders - self.seen)
        return {"step": step, "folder": new[0]} if new else None


def train(options: argparse.Namespace) -> None:
    """The server, the run, the kills."""
    options.out.mkdir(parents=True, exist_ok=True)
    out = options.out.absolute()
    command = [options.python, "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(options.model.absolute()), "--host", "127.0.0.1"]
    command += ["--port", str(options.port), "--dtype", options.dtype, *FLAGS.split()]
    command += LORA_FLAGS.split() if options.lora else []
    arguments = [each for each in options.keys if each != "--"]
    arguments += [
        "--rollouts.engine",
        "vllm",
        "--rollouts.base_url",
        f"http://127.0.0.1:{options.port}",
    ]
    arguments += ["--rollouts.retries", str(options.retries)]
    Supervisor(
        server=Server(command, options.port, out / "vllm.txt"),
        run=RunDirectory(out / "run"),
        folder=out,
        arguments=arguments,
        moments=[each for each in options.moments.split(",") if each],
    ).until_done()


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", required=True, help="of an environment with vLLM")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True, help="a folder; goes on there")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--moments", default="stage-one,rollouts@2,weights@4")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--lora", action="store_true", help="start the server for adapters")
    parser.add_argument("--retries", type=int, default=3, help="rollouts.retries")
    parser.add_argument("keys", nargs=argparse.REMAINDER, help="-- and keys of ragen-apo train")
    train(parser.parse_args())


if __name__ == "__main__":
    main()
