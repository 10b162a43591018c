"""How fast `ragen-apo view` opens large folders, and its memory over many pages.

    python -m benchmarks.view_scale FOLDER [--views 10000] [--repeats 5]

Makes FOLDER/many with 200 runs of 1,000 steps and FOLDER/large with one run of 100,000 episodes
(once: a folder that is there is used), and asks the application for pages, in this process. "First"
is the first answer of an application that knows nothing of the folder yet, in seconds on the wall
and of the processor (which is what counts on a busy machine), the fastest and the median of some
applications; "again" is the processor time of five more answers of the last, the median.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

import psutil
from benchmarks.tables import write_page
from starlette.testclient import TestClient

from ragen_apo.config import RunConfig, parse_config, resolved_yaml
from ragen_apo.evaluation.summary import episode_rows, results_document
from ragen_apo.files import write_json_atomically
from ragen_apo.types import StopReason, Trajectory, Turn, make_task
from ragen_apo.web.serving import make_app
from ragen_apo.web.view.folder import open_folder
from ragen_apo.web.view.routes import view_routes

NUM_RUNS, NUM_STEPS, NUM_EPISODES = 200, 1000, 100_000
MANY = ("/", "/?page=4", "/run?run=run-000", "/run?run=run-150")
LARGE = (
    "/",
    "/run?run=run",
    "/episodes?run=run",
    "/episodes?run=run&page=1000",
    "/episodes?run=run&order=worst",
    "/episodes?run=run&failure=timeout",
    "/episodes?run=run&find=number+99999",
    "/episode?run=run&number=99999",
    "/failures?run=run",
    "/compare?a=run&b=run",
)


def metrics(num_steps: int, seed: int) -> str:
    """Rows as a run writes them: forty numbers each."""
    rng = random.Random(seed)
    names = [f"metric_{number}" for number in range(32)]
    rows = []
    for step in range(1, num_steps + 1):
        row = {name: rng.random() for name in names}
        row |= {"success_rate": rng.random(), "return_mean": rng.random(), "loss": rng.random()}
        row |= {"num_generated_tokens": 5000, "rollout_seconds": 2.0, "training_seconds": 3.0}
        rows.append(json.dumps(row | {"step": step}, sort_keys=True) + "\n")
    return "".join(rows)


def trajectory(number: int) -> Trajectory:
    """An episode of three turns, each with an observation of 900 characters."""
    turn = Turn(
        observation=f"a page of results, number {number}: " + 45 * "something to buy, ",
        prompt_token_ids=(1,) * 300,
        response_token_ids=(2,) * 30,
        logprobs=(-0.5,) * 30,
        response="<think>which one</think><answer>click[something]</answer>",
        thought="which one",
        action=f"click[something {number}]",
        reward=0.1,
    )
    task = make_task(
        environment="webshop",
        instruction=f"find something, number {number}, for less than 40 dollars",
        split="test",
        category="beauty",
        payload={"goal": number},
    )
    success = number % 3 == 0
    return Trajectory(
        task=task,
        turns=(turn, turn, replace(turn, reward=1.0 if success else -number / NUM_EPISODES)),
        terminated=success,
        truncated=not success,
        stop_reason=StopReason.TERMINATED if success else StopReason.TURN_LIMIT,
        success=success,
        final_observation="thank you",
        policy_version="policy",
        seed=number,
    )


def make_folders(folder: Path) -> None:
    """The two folders, if they are not there."""
    config = parse_config("environment: {name: shop}", source="benchmark")
    for number in range(NUM_RUNS):
        run = folder / "many" / f"run-{number:03d}"
        if not (run / "config.yaml").exists():
            run.mkdir(parents=True, exist_ok=True)
            (run / "metrics.jsonl").write_text(metrics(NUM_STEPS, number))
            write_configuration(run, config)
    run = folder / "large" / "run"
    if not (run / "config.yaml").exists():
        (run / "evaluation").mkdir(parents=True, exist_ok=True)
        (run / "metrics.jsonl").write_text(metrics(10 * NUM_STEPS, 0))
        # Rows of a thousand at a time: all trajectories at once would take gigabytes.
        with (run / "evaluation" / "episodes.jsonl").open("w") as stream:
            for start in range(0, NUM_EPISODES, 1000):
                played = [trajectory(start + number) for number in range(1000)]
                for row in episode_rows(played, policy="policy"):
                    row["episode"] += start
                    stream.write(json.dumps(row, sort_keys=True) + "\n")
        document = results_document(
            [trajectory(number) for number in range(3000)],
            policy="policy",
            split="test",
            baselines={},
        )
        write_json_atomically(
            run / "evaluation" / "results.json", document | {"episodes": NUM_EPISODES}
        )
        write_configuration(run, config)


def write_configuration(run: Path, config: RunConfig) -> None:
    """As a run writes it: for resuming, and among the notes of its start."""
    write_json_atomically(run / "run.json", {"configuration": config.model_dump(mode="json")})
    (run / "config.yaml").write_text(resolved_yaml(config))


def pages_of(folder: Path) -> TestClient:
    """The pages of a folder of which nothing is known yet."""
    app = make_app(view_routes(open_folder(folder)))
    return TestClient(app, base_url="http://127.0.0.1")


def seconds(client: TestClient, address: str) -> tuple[float, float, int]:
    """How long a page takes, on the wall and of the processor, and its bytes."""
    started, used = time.perf_counter(), time.process_time()
    answer = client.get(address)
    answer.raise_for_status()
    return time.perf_counter() - started, time.process_time() - used, len(answer.content)


def timed(folder: Path, addresses: Sequence[str], *, repeats: int) -> list[list[str]]:
    """A row for each address: first, its processor time, again, size."""
    rows = []
    for address in addresses:
        clients = [pages_of(folder) for _ in range(repeats)]
        walls, processors, sizes = zip(*(seconds(each, address) for each in clients), strict=True)
        again = median(seconds(clients[-1], address)[1] for _ in range(5))
        firsts = [f"{pick(times):.2f}" for times in (walls, processors) for pick in (min, median)]
        shown = [*firsts, f"{again:.3f}", f"{sizes[0] / 1000:.0f}"]
        rows.append([folder.name, f"`{address}`", *shown])
        print(*rows[-1], flush=True)
    return rows


def memory(folder: Path, addresses: Sequence[str], num_views: int) -> list[list[str]]:
    """The memory of this process after so many pages, ten times on the way."""
    rows, client = [], pages_of(folder)
    for view in range(num_views + 1):
        if view % max(1, num_views // 10) == 0:
            used = psutil.Process().memory_info().rss / 2**20
            rows.append([f"{view:,}", f"{used:.0f}"])
            print(*rows[-1], flush=True)
        seconds(client, addresses[view % len(addresses)])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--views", type=int, default=10_000)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    make_folders(arguments.folder)
    size = (arguments.folder / "large" / "run" / "evaluation" / "episodes.jsonl").stat().st_size
    rows = [
        *timed(arguments.folder / "many", MANY, repeats=arguments.repeats),
        *timed(arguments.folder / "large", LARGE, repeats=arguments.repeats),
    ]
    pages = [
        *LARGE[:4],
        *(f"/episode?run=run&number={number}" for number in range(0, NUM_EPISODES, 997)),
        *(f"/episodes?run=run&page={number}" for number in range(1, 2000, 41)),
    ]
    kept = memory(arguments.folder / "large", pages, arguments.views)
    listed = ", ".join(f"{views}: {used}" for views, used in kept)
    write_page(
        "view_scale",
        title="The viewer on large folders",
        notes="The folder `many` has 200 runs of 1,000 steps. The folder `large` has one run of "
        f"100,000 episodes ({size / 2**20:.0f} MiB). `again` is the median of later answers of the "
        "same application.\n\nMemory of the process in MiB after so many pages of the large run: "
        f"{listed}.",
        header=(
            *("folder", "page", "first, s: fastest", "median"),
            *("of the processor: fastest", "median", "again, of the processor", "kB"),
        ),
        rows=rows,
    )


if __name__ == "__main__":
    main()
