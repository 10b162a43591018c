"""`.ci/run` with a stand-in for make: what it makes, and what becomes of a vLLM that fails."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from pathlib import Path

import psutil
import pytest

# Without it nothing is installed, and the last test would wait for that for ever.
pytestmark = pytest.mark.skipif(shutil.which("timeout") is None, reason="there is no `timeout`")
SCRIPT = Path(__file__).resolve().parents[1] / ".ci" / "run"
MAKE = """#!/usr/bin/env bash
echo "$1" >> made
if [[ $1 = "$HANGS" ]]; then
  echo $$ > hanging
  exec sleep 600
fi
if [[ $1 = "$FAILS" ]]; then
  echo "a reason"
  exit 3
fi
"""
IN_TURN = ["lint", "types", "docs", "models/smollm2-135m", "test"]


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A folder with the script, and with the programs that it finds."""
    programs = tmp_path / "programs"
    programs.mkdir()
    for name, text in {"make": MAKE, "chromium": "#!/usr/bin/env bash\n"}.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    (tmp_path / ".ci").mkdir()
    shutil.copy(SCRIPT, tmp_path / ".ci" / "run")
    return tmp_path


def ci(clone: Path, *, fails: str = "", hangs: str = "") -> subprocess.CompletedProcess[str]:
    """Runs the script, where making one target fails and another never ends."""
    path = f"{clone / 'programs'}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "FAILS": fails, "HANGS": hangs}
    command = ["bash", str(clone / ".ci" / "run")]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def made(clone: Path) -> list[str]:
    """In order, without the installation of vLLM, which goes on beside the others."""
    return [name for name in (clone / "made").read_text().split() if name != "vllm"]


def test_everything_is_made_and_the_tests_with_a_real_vllm_at_last(clone: Path) -> None:
    result = ci(clone)
    assert (result.returncode, result.stderr) == (0, "")
    assert made(clone) == [*IN_TURN, "test-vllm"]
    assert "vllm" in (clone / "made").read_text().split()
    assert re.fullmatch(r"=== all passed in \d+ s", result.stdout.splitlines()[-1])


def test_a_vllm_that_cannot_be_installed_is_said_at_the_end_and_is_no_failure(clone: Path) -> None:
    result = ci(clone, fails="vllm")
    assert result.returncode == 0
    assert made(clone) == IN_TURN
    *_, status, reason, last = result.stdout.splitlines()
    assert "exit status 3" in status
    assert reason == "a reason"
    assert "THE TESTS WITH A REAL vLLM DID NOT RUN" in last


@pytest.mark.parametrize("target", [*IN_TURN, "test-vllm"])
def test_whatever_else_fails_is_a_failure(clone: Path, target: str) -> None:
    result = ci(clone, fails=target)
    assert result.returncode != 0
    assert made(clone)[-1] == target
    assert "passed" not in result.stdout


def test_the_installation_ends_with_the_script(clone: Path) -> None:
    """`lint` waits for it to have begun, and fails."""
    make = clone / "programs" / "make"
    waits = 'if [[ $1 = "$FAILS" ]]; then\n  until [[ -s hanging ]]; do sleep 0.1; done'
    make.write_text(MAKE.replace('if [[ $1 = "$FAILS" ]]; then', waits))
    assert ci(clone, fails="lint", hangs="vllm").returncode != 0
    process = int((clone / "hanging").read_text())
    until = time.monotonic() + 60
    while psutil.pid_exists(process) and time.monotonic() < until:
        time.sleep(0.05)
    assert not psutil.pid_exists(process)
