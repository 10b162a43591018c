"""Two hosts on one machine, in tests: two network namespaces with a cable between them."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

NAMESPACES = Path("/run/netns")
PID = os.getpid()
"""Of who made the hosts, also in its forks."""


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
        return f"ragen-{PID}-{self.number}"

    @property
    def interface(self) -> str:
        """Of its end of the cable, at most 15 characters."""
        return f"rg{PID % 10**8}n{self.number}"

    @property
    def address(self) -> str:
        """In the network of the two."""
        return f"10.77.0.{self.number + 1}"

    def command(self, *words: str) -> list[str]:
        """The command as it is run on this host."""
        return ["ip", "netns", "exec", self.name, *words]

    def enter(self) -> None:
        """Moves this process to the host."""
        libc = ctypes.CDLL(None, use_errno=True)
        with (NAMESPACES / self.name).open() as namespace:
            if libc.setns(namespace.fileno(), 0):
                raise OSError(ctypes.get_errno(), "setns")
        os.environ["GLOO_SOCKET_IFNAME"] = self.interface

    def cable(self, state: str) -> None:
        """Takes this end of the cable `up` or `down`."""
        _run("ip", "-n", self.name, "link", "set", self.interface, state)


@contextlib.contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Both, until the block ends."""
    _remove_left_over()
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
            _remove(host.name)


def _remove(name: str) -> None:
    subprocess.run(("ip", "netns", "del", name), capture_output=True, check=False)


def _remove_left_over() -> None:
    """Those of processes that were killed before they could do it."""
    for path in NAMESPACES.glob("ragen-*-*"):
        if not psutil.pid_exists(int(path.name.split("-")[1])):
            _remove(path.name)
