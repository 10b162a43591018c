"""The memory that control groups leave a process: limits of containers and of schedulers (Linux).

psutil knows the memory of the host only. Both versions of control groups have a tree of folders, in
which each group obeys the limits of those above it:
https://docs.kernel.org/admin-guide/cgroup-v2.html#memory
https://docs.kernel.org/admin-guide/cgroup-v1/memory.html
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

GROUPS = Path("/sys/fs/cgroup")
OWN_GROUPS = Path("/proc/self/cgroup")
UNLIMITED = 2**60
"""Version 1 writes a number above it where there is no limit."""


def memory_left(groups: Path = GROUPS, own_groups: Path = OWN_GROUPS) -> int | None:
    """Bytes up to the nearest limit; None where there is none.

    What the groups hold of files counts as free: the kernel gives it back first.
    """
    limits = _limits(groups, own_groups)
    left = [limit - used + files for limit, used, files in limits if limit < UNLIMITED]
    return max(0, min(left)) if left else None


def _limits(groups: Path, own_groups: Path) -> Iterator[tuple[int, int, int]]:
    """Limit, use, and use by files of the own groups and of those above them.

    A group that is not visible, as that of a container's host, is left out.
    """
    with contextlib.suppress(OSError):
        for line in own_groups.read_text(encoding="utf-8", errors="surrogateescape").splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers == "":
                top, prefix = groups, ""
                limit, usage = "memory.max", "memory.current"
            elif "memory" in controllers.split(","):
                top, prefix = groups / controllers, "total_"
                limit, usage = "memory.limit_in_bytes", "memory.usage_in_bytes"
            else:
                continue
            own = top / path.lstrip("/")
            for group in (own, *own.parents):
                # "max" is no number and means no limit; a group may end meanwhile.
                with contextlib.suppress(OSError, ValueError, KeyError):
                    numbers = [int((group / name).read_text()) for name in (limit, usage)]
                    statistics = (group / "memory.stat").read_text().split()
                    uses = dict(zip(statistics[::2], map(int, statistics[1::2]), strict=True))
                    files = sum(uses[f"{prefix}{kind}_file"] for kind in ("active", "inactive"))
                    yield numbers[0], numbers[1], files
                if group == top:
                    break
