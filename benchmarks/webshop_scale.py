"""WebShop as it grows: preparing, starting, memory and search for generated catalogues.

    python -m benchmarks.webshop_scale [--sizes 1000 10000 100000 1180000] [--folder FOLDER]

For each size, in processes of their own: one prepares the catalogue (writes the generated files,
reads them, builds the index), one starts on it and searches, and a further one does the same while
the first still lives. `start` is the time from nothing but imported modules to the first results
page. Resident memory is the whole process, mapped files included, which all processes share:
private memory is what a further process adds, proportional memory counts a shared page in equal
parts for all who map it. Searches are what scripted policies search (parts of instructions,
titles), not cached; of each the first time counts, beside its CPU time and the best of three times,
because the machine may be shared.

The data lies in a temporary folder, 3.5 GB for the largest size, and is removed after each size.
Writes results/webshop_scale.md after each size.
"""

import argparse
import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console

SIZES = (1_000, 10_000, 100_000, 1_180_000)
NUM_QUERIES = 400
MIB = 1 << 20
GOALS = """Aims for 1.18 million products:

- at most 4,096 MiB to prepare,
- a start under 10 s,
- 2,048 MiB resident for one process, and 300 MiB more for each further one (its private memory:
  what it maps is there already),
- 95% of searches within 30 ms.

What was run:"""
HEADER = (
    "products",
    "generate s",
    "prepare s",
    "prepare CPU s",
    "prepare peak MiB",
    "prepared MiB",
    "start s",
    "resident MiB",
    "further process: resident MiB",
    "proportional MiB",
    "private MiB",
    "search p50 ms",
    "p95 ms",
    "p95 CPU ms",
    "p95 of best of 3 ms",
)


def peak_memory() -> float:
    """The largest resident MiB of this process so far."""
    text = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(text.split("VmHWM:")[1].split()[0]) / 1024


def memory() -> dict[str, float]:
    """Resident, proportional and private MiB of this process."""
    lines = Path("/proc/self/smaps_rollup").read_text(encoding="utf-8").splitlines()[1:]
    kib = {line.split(":")[0]: int(line.split()[1]) for line in lines}
    private = kib["Private_Clean"] + kib["Private_Dirty"]
    return {
        "resident": kib["Rss"] / 1024,
        "proportional": kib["Pss"] / 1024,
        "private": private / 1024,
    }


def prepare(size: int, folder: Path) -> dict[str, Any]:
    """Prepares a catalogue with a progress bar; what it took."""
    from ragen_apo.console import ConsoleProgress
    from ragen_apo.environments.webshop.checked_folders import provide_folder
    from ragen_apo.environments.webshop.generated import generated_name, write_generated_files
    from ragen_apo.environments.webshop.store import open_catalog

    with ConsoleProgress(Console(stderr=True)) as progress:
        started = time.perf_counter()
        files = folder / generated_name(size)
        provide_folder(
            files, lambda path: write_generated_files(path, size, progress), progress=progress
        )
        generated = time.perf_counter() - started
        cpu = time.process_time()
        started = time.perf_counter()
        catalog = open_catalog(f"generated:{size}", store=folder, progress=progress)
    return {
        "generate": generated,
        "prepare": time.perf_counter() - started,
        "prepare_cpu": time.process_time() - cpu,
        "peak": peak_memory(),
        "prepared": sum(p.stat().st_size for p in catalog.folder.iterdir()) / MIB,
    }


def use(size: int, folder: Path) -> dict[str, Any]:
    """Starts on a prepared catalogue and searches; what it took."""
    from ragen_apo.environments.webshop import WebShopEnvironment

    started = time.perf_counter()
    environment = WebShopEnvironment(data=f"generated:{size}", store=folder)
    task = environment.tasks("test")[0]
    environment.reset(task, seed=0)
    environment.step(f"search[{task.instruction}]")
    start = time.perf_counter() - started
    first, cpu, best = [], [], []
    for query in queries(environment):
        walls: list[float] = []
        for _ in range(3):
            before, cpu_before = time.perf_counter(), time.thread_time()
            environment.catalog.index.search(query)
            if not walls:
                cpu.append(1000 * (time.thread_time() - cpu_before))
            walls.append(1000 * (time.perf_counter() - before))
        first.append(walls[0])
        best.append(min(walls))
    return {
        "start": start,
        "p50": percentile(first, 0.5),
        "p95": percentile(first, 0.95),
        "p95_cpu": percentile(cpu, 0.95),
        "p95_best": percentile(best, 0.95),
        **memory(),
    }


def queries(environment: Any) -> list[str]:
    """What scripted policies search, and titles; all different."""
    from ragen_apo.environments.webshop.goals import goal_of_task
    from ragen_apo.environments.webshop.scripted import instruction_queries

    catalog = environment.catalog
    found: dict[str, None] = {}
    for index in range(min(environment.num_goals, NUM_QUERIES)):
        task = environment.goal_task(index)
        goal = goal_of_task(task, catalog)
        texts = [
            *instruction_queries(task.instruction, goal.options),
            catalog.product(goal.product).title,
        ]
        found |= dict.fromkeys(text.lower() for text in texts)
    return random.Random(0).sample(list(found), min(NUM_QUERIES, len(found)))


def percentile(values: list[float], share: float) -> float:
    """The value that this share of the values does not exceed."""
    return sorted(values)[min(int(share * len(values)), len(values) - 1)]


def child(role: str, size: int, folder: Path, *, keep_alive: bool = False) -> subprocess.Popen[str]:
    """This program in a process of its own; its result is its first line of output."""
    command = [sys.executable, "-m", "benchmarks.webshop_scale", "--role", role]
    command += ["--sizes", str(size), "--folder", str(folder)]
    command += ["--keep-alive"] if keep_alive else []
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def result_of(process: subprocess.Popen[str]) -> dict[str, Any]:
    """Waits for the result of a child."""
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise SystemExit(f"a child process failed with status {process.wait()}")
    return json.loads(line)


def measure(size: int, folder: Path) -> tuple[str, ...]:
    """One row of the table."""
    with child("prepare", size, folder) as preparing:
        built = result_of(preparing)
    with child("use", size, folder, keep_alive=True) as first:
        one = result_of(first)
        with child("use", size, folder) as second:
            further = result_of(second)
        first.communicate("\n")
    cells = [built["generate"], built["prepare"], built["prepare_cpu"]]
    row = [f"{size:,}", *(f"{value:.0f}" for value in cells)]
    row += [f"{built['peak']:.0f}", f"{built['prepared']:.0f}", f"{one['start']:.2f}"]
    row += [f"{one['resident']:.0f}"]
    row += [f"{further[kind]:.0f}" for kind in ("resident", "proportional", "private")]
    row += [
        f"{one['p50']:.1f}",
        f"{one['p95']:.1f}",
        f"{one['p95_cpu']:.1f}",
        f"{one['p95_best']:.1f}",
    ]
    return tuple(row)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES))
    parser.add_argument("--folder", type=Path, help="where the data lies meanwhile (temporary)")
    parser.add_argument("--role", choices=("prepare", "use"), help=argparse.SUPPRESS)
    parser.add_argument("--keep-alive", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.role:
        run = prepare if arguments.role == "prepare" else use
        print(json.dumps(run(arguments.sizes[0], arguments.folder)), flush=True)
        if arguments.keep_alive:
            sys.stdin.readline()
        return

    from benchmarks.tables import write_page

    rows: list[tuple[str, ...]] = []
    for size in arguments.sizes:
        folder = Path(tempfile.mkdtemp(prefix="webshop-scale-", dir=arguments.folder))
        try:
            rows.append(measure(size, folder))
        finally:
            shutil.rmtree(folder)
        write_page(
            "webshop_scale",
            title="WebShop from 1,000 to 1.18 million products",
            notes="Catalogues are generated. What is measured stands in "
            f"`benchmarks/webshop_scale.py`. {GOALS}",
            header=HEADER,
            rows=rows,
        )


if __name__ == "__main__":
    main()
