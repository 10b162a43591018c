"""Two hosts on one machine, in tests: two network namespaces with a cable between them."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

import pytest


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


def _why_not() -> str:
    if shutil.which("ip") is None:
        return "there is no `ip` (Debian: iproute2)"
    probe = ("unshare", "--net", "true")
    if os.geteuid() != 0 or subprocess.run(probe, capture_output=True, check=False).returncode:
        return "only root may make network namespaces"
    return ""


NEEDS_HOSTS = pytest.mark.skipif(bool(reason := _why_not()), reason=reason)


@dataclass(frozen=True)
class Host:
    """One of the two, by its number from 0."""

    number: int

    @property
    def name(self) -> str:
        """Of the namespace."""
        return f"ragen-{os.getpid()}-{self.number}"

    @property
    def interface(self) -> str:
        """Of its end of the cable, at most 15 characters."""
        return f"rg{os.getpid() % 10**8}n{self.number}"

    @property
    def address(self) -> str:
        """In the network of the two."""
        return f"10.77.0.{self.number + 1}"

    def command(self, *words: str) -> list[str]:
        """The command as it is run on this host."""
        return ["ip", "netns", "exec", self.name, *words]

    def cable(self, state: str) -> None:
        """Takes this end of the cable `up` or `down`."""
        _run("ip", "-n", self.name, "link", "set", self.interface, state)


@contextlib.contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Both, until the block ends."""
    hosts = (Host(0), Host(1))
    try:
        for host in hosts:
            _run("ip", "netns", "add", host.name)
        ends = [(host.interface, host.name) for host in hosts]
        _run(
            *("ip", "link", "add", ends[0][0], "netns", ends[0][1], "type", "veth"),
            *("peer", "name", ends[1][0], "netns", ends[1][1]),
        )
        for host in hosts:
            _run(
                *("ip", "-n", host.name, "addr", "add", f"{host.address}/24"),
                *("dev", host.interface),
            )
            _run("ip", "-n", host.name, "link", "set", "lo", "up")
            host.cable("up")
        yield hosts
    finally:
        for host in hosts:
            subprocess.run(("ip", "netns", "del", host.name), capture_output=True, check=False)
