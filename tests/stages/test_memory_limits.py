"""Limits of containers and schedulers, on trees of control groups as Linux shows them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ragen_apo.stages import memory
from ragen_apo.stages.memory_limits import memory_left

NONE_IN_V1 = "9223372036854771712"


def group(folder: Path, version: int, limit: str, used: int, files: tuple[int, int]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    names = ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes",)
    names = (*names, "memory.usage_in_bytes")[:2]
    prefix = "" if version == 2 else "total_"
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(
        f"anon 1\n{prefix}inactive_file {files[0]}\n{prefix}active_file {files[1]}\n"
    )


@pytest.mark.parametrize("version", [1, 2])
def test_the_nearest_limit_counts_and_files_count_as_free(version: int, tmp_path: Path) -> None:
    own, no_limit = tmp_path / "own", "max" if version == 2 else NONE_IN_V1
    line = "0::/job/step" if version == 2 else "4:hugetlb,memory:/job/step"
    own.write_bytes(b"9:cpu,cpuacct:/\xff\n" + line.encode() + b"\n")
    groups = tmp_path / "groups"
    top = groups if version == 2 else groups / "hugetlb,memory"
    group(top / "job" / "step", version, no_limit, 300, (0, 0))
    group(top / "job", version, "1000", 700, (100, 50))
    if version == 1:
        group(top, version, no_limit, 5000, (0, 0))
    assert memory_left(groups, own) == 1000 - 700 + 150
    group(top / "job" / "step", version, "500", 300, (20, 0))
    assert memory_left(groups, own) == 500 - 300 + 20
    group(top / "job" / "step", version, "500", 600, (20, 0))
    assert memory_left(groups, own) == 0, "more is used than allowed, as after a lower limit"


@pytest.mark.parametrize("shown", ["nothing", "no limit", "a container's own group"])
def test_what_is_not_visible_limits_nothing(shown: str, tmp_path: Path) -> None:
    own = tmp_path / "own"
    if shown == "nothing":
        assert memory_left(tmp_path / "groups", own) is None
        return
    own.write_text("0::/docker/0123\n")  # of the host; the container sees its group as the top
    limit = "max" if shown == "no limit" else "1000"
    group(tmp_path / "groups", 2, limit, 400, (0, 0))
    assert memory_left(tmp_path / "groups", own) == (None if shown == "no limit" else 600)


def test_the_plan_of_a_run_has_no_more_than_the_limit_leaves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memory, "memory_left", lambda: 12345)
    assert memory.free_memory(torch.device("cpu")) == 12345
