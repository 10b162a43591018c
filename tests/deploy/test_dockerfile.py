"""deploy/Dockerfile: built where there is a Docker daemon, otherwise what can be read in it."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "deploy" / "Dockerfile"


def copied() -> list[str]:
    """What it copies out of the repository."""
    lines = re.findall(r"^COPY (.+)$", FILE.read_text(), re.MULTILINE)
    return [source for line in lines for source in line.split()[:-1]]


def test_everything_that_it_copies_is_there_and_not_ignored() -> None:
    ignored = (ROOT / "deploy" / "Dockerfile.dockerignore").read_text().splitlines()
    kept = {line[1:] for line in ignored if line.startswith("!")}
    for source in copied():
        assert (ROOT / source).exists(), source
        assert source.split("/")[0] in kept, source
    assert {source.split("/")[0] for source in copied()} == kept


def test_it_installs_extras_that_exist() -> None:
    (extras,) = re.findall(r"^ARG EXTRAS=(.+)$", FILE.read_text(), re.MULTILINE)
    project = (ROOT / "pyproject.toml").read_text()
    for extra in extras.split(","):
        assert re.search(rf"^{extra} = \[", project, re.MULTILINE), extra


@pytest.mark.slow
def test_it_builds_for_cpus() -> None:
    if shutil.which("docker") is None:
        pytest.skip("docker is not installed")
    if subprocess.run(["docker", "info"], capture_output=True, check=False).returncode:
        pytest.skip("there is no Docker daemon")
    build = ["docker", "build", "-f", str(FILE), "--build-arg", "ACCELERATOR=cpu"]
    subprocess.run([*build, "-t", "ragen-apo-test:cpu", str(ROOT)], check=True)
    run = ["docker", "run", "--rm", "ragen-apo-test:cpu", "ragen-apo", "--version"]
    subprocess.run(run, check=True)
