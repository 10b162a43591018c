"""The benchmarks still fit the interfaces that they measure."""

import argparse
import functools
import importlib
import itertools
import json
import math
import shutil
import subprocess
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from benchmarks import runs, stopping_rule
from transformers import AutoModelForCausalLM

from ragen_apo.agent.assembly import build_environments, build_proxy
from ragen_apo.agent.environment_manager import EnvironmentManager
from ragen_apo.agent.proxy import EpisodeRequest
from ragen_apo.agent.scripted import play_scripted_episodes
from ragen_apo.cli import app
from ragen_apo.config import RunConfig, resolved_yaml
from ragen_apo.config.algorithms import ALGORITHMS
from ragen_apo.environments.base import Reply
from ragen_apo.environments.webshop import WebShopEnvironment
from ragen_apo.environments.webshop.goals import goal_of_task
from ragen_apo.policy.tokenizer import train_tokenizer
from ragen_apo.run_directory import create_run, open_run
from ragen_apo.types import Task, TrainingSample, Trajectory
from ragen_apo.values.estimator import SampleSchedule
from tests import factories

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize("name", sorted(path.stem for path in ROOT.glob("benchmarks/*.py")))
def test_all_that_a_benchmark_takes_from_the_package_is_there(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    importlib.import_module(f"benchmarks.{name}")


def test_word_problems_are_different_and_their_derivations_right(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    from benchmarks.word_problems import NUMBER, problems

    rows = list(problems())
    assert len({row["question"] for row in rows}) == NUMBER
    for row in rows:
        *steps, marked = row["answer"].split("\n")
        for step in steps:
            one, sign, other, _, result = step.split()
            sums = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__, "/": int.__floordiv__}
            assert sums[sign](int(one), int(other)) == int(result), row
        assert marked == f"#### {result}", row


def test_waits_that_come_one_after_another_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    from benchmarks import environment_workers

    def waits(*, num_workers: int) -> tuple[int, int]:
        pool = environment_workers.pool(factories.config(), num_workers=num_workers)
        played = environment_workers.of_the_teacher(pool, number=4)()
        return pool.num_waits, max(len(each.turns) for each in played)

    # Four resets and all turns one by one; one wait for the resets, and one for each of the turns.
    alone, longest = waits(num_workers=1)
    assert waits(num_workers=4) == (1 + longest, longest)
    assert 4 + longest < alone <= 4 * (1 + longest)


@pytest.mark.slow
def test_both_sides_of_the_generation_benchmark_play_the_same_episodes(
    tiny_model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    from benchmarks import generation

    sizes = {"episodes": 5, "rows": 4, "turns": 2, "tokens": 3, "capacity": 256}
    workload = generation.forced(argparse.Namespace(**sizes))
    played: list[list[Trajectory]] = []

    def play(*arguments):
        trajectories, seconds = original(*arguments)
        played.append(trajectories)
        return trajectories, seconds

    original = generation.play
    monkeypatch.setattr(generation, "play", play)
    # Each side is warmed up in one second, then `generate` takes six and our engine two.
    times = itertools.accumulate([0, 1, 0, 1, 0, 6, 0, 2])
    rows = generation.compare(tiny_model, workload, repeats=1, clock=functools.partial(next, times))
    assert [len(episodes) for episodes in played] == [1, 1, 5, 5]
    theirs, ours = played[2:]
    assert [episode.task for episode in theirs] == [episode.task for episode in ours]
    for episode in (*theirs, *ours):
        assert [len(turn.response_token_ids) for turn in episode.turns] == [3, 3]
    read = [[turn.observation for turn in episode.turns] for episode in ours]
    assert read == [[turn.observation for turn in episode.turns] for episode in theirs]
    table = {str(row[0]): row[1:] for row in rows}
    assert list(table) == [
        "forced: `generate`, whole transcript every turn",
        "forced: engine of this project",
    ]
    # Five episodes of two turns and three tokens each: 5 / 6 episodes/s and 5 against 2.5 and 15.
    assert [row[:2] + row[3:] for row in table.values()] == [
        ["2.00", "3.0", "0.83", "5", "1.0"],
        ["2.00", "3.0", "2.50", "15", "3.0"],
    ]
    through = [int(str(row[2])) for row in table.values()]
    assert through[0] > through[1], "the other side reads every turn anew"


def test_episode_rates_are_medians_over_the_steps_of_a_run(
    finished_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    from benchmarks import episode_rates

    shutil.copytree(finished_run, tmp_path / "run")
    run = open_run(tmp_path / "run")
    steps = [
        {"rollout_seconds": seconds, "training_seconds": 2 * seconds}
        | {"num_episodes": 8, "num_generated_tokens": 80, "num_context_tokens": 8800}
        | {"num_turns_mean": 2.5}
        for seconds in (1.0, 4.0, 100.0)
    ]
    run.metrics.write_text("".join(f"{json.dumps(step)}\n" for step in steps), encoding="utf-8")
    model = AutoModelForCausalLM.from_pretrained(run.reference(0))
    size = f"{model.num_parameters() / 1e6:.2f} M"
    tokens = ["1,100", "10"]
    rates = ["2.0", "2,200", "1.0", "1,100"]
    assert episode_rates.row(run) == ["shop, apo", size, 3, "2.5", *tokens, *rates]


@pytest.mark.slow
def test_a_model_folder_plays_each_task_as_often_as_asked(finished_run: Path) -> None:
    run = open_run(finished_run)
    folder = run.reference(0)
    with factories.threads_restored():
        greedy = runs.greedy_episodes(run, folder, split="test", num_episodes=2)
        sampled = runs.sampled_episodes(run, folder, split="test", num_episodes=2, num_samples=3)
    assert len({each.task.task_id for each in greedy}) == len(greedy) == 2
    assert [each.task for each in sampled] == 3 * [each.task for each in greedy]
    assert len({each.seed for each in sampled}) == 6


@pytest.mark.slow
def test_the_scale_of_webshop_is_measured_with_different_queries_that_find_something(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    from benchmarks import webshop_scale

    environment = WebShopEnvironment(data="generated:200", store=tmp_path)
    queries = webshop_scale.queries(environment)
    assert len(set(queries)) == webshop_scale.NUM_QUERIES
    found = [len(environment.catalog.index.search(query)) for query in queries]
    assert sum(number > 0 for number in found) > 0.9 * len(queries)
    used = webshop_scale.use(200, tmp_path)
    assert 0 < used["p50"] <= used["p95"]
    assert 0 < used["private"] <= used["proportional"] <= used["resident"]


class Says:
    """A scripted policy that gives the same actions whatever it reads, the last one again."""

    def __init__(self, actions: list[str]) -> None:
        self.actions = actions

    def begin(self, task: Task, *, seed: int) -> None:
        self.left = list(self.actions)

    def act(self, observation: str) -> Reply:
        return Reply("", self.left.pop(0) if len(self.left) > 1 else self.left[0])


def test_failures_in_webshop_are_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    from benchmarks.webshop_learning import failure

    def make() -> WebShopEnvironment:
        return WebShopEnvironment(data="generated:200", store=tmp_path, max_turns=6)

    environment = make()
    manager = EnvironmentManager(make, format_penalty=0.0, invalid_action_penalty=0.0)
    number = next(
        number
        for number in range(environment.num_goals)
        if len(environment.goal_task(number).payload["options"]) == 1
    )
    task = environment.goal_task(number)
    goal = goal_of_task(task, environment.catalog)
    wanted = environment.catalog.product(goal.product)
    other = next(
        product
        for product in map(environment.catalog.product, range(200))
        if goal.product not in environment.catalog.search(product.title.lower())[:10]
    )
    find = [f"search {wanted.title}", f"click {wanted.asin}"]
    ((_, value),) = goal.options
    plans = {
        None: [*find, f"click {value}", "click buy now"],
        "right product, wrong or missing option": [*find, "click buy now"],
        "another product, the right one was shown": [
            *find,
            f"search {other.title}",
            f"click {other.asin}",
            "click buy now",
        ],
        "never saw the product": [
            f"search {other.title}",
            f"click {other.asin}",
            "click buy now",
        ],
        "no purchase": ["click buy now"],
    }
    for expected, actions in plans.items():
        (episode,) = play_scripted_episodes(
            lambda actions=actions: Says(actions),
            manager,
            [EpisodeRequest(task, 0)],
            policy_version="fixed",
        )
        assert failure(episode, environment) == expected


def test_the_page_on_webshop_has_means_over_the_seeds_that_are_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    from benchmarks.webshop_learning import REFERENCE, table, trained

    def result(success: float) -> dict[str, object]:
        scores = {"success": success, "score": success + 10}
        failures = {"no purchase": 3}
        figures = {"turns": 5.0, "failures": failures, "machine": "a laptop"}
        return {"upstream": scores, "corrected": scores, **figures}

    seeds = {
        str(seed): {
            REFERENCE: result(70.0 + seed) | {"minutes": 30.0},
            trained("corrected"): result(80.0) | {"minutes": 60.0},
        }
        for seed in (0, 2)
    }
    kept = {"baselines": {"random": result(1.0)}, "seeds": seeds}
    lines = table("standard", "careful", kept)
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line[:1] == "|"]
    assert len({len(row) for row in rows}) == 1, "all rows have the same columns"
    by_name = {(row[0], row[1]): row[2:] for row in rows}
    assert by_name[REFERENCE, "2"][:2] == ["71.0 ± 1.4", "81.0 ± 1.4"]
    assert by_name[REFERENCE, "seed 2"][:2] == ["72.0", "82.0"]
    assert by_name[trained("corrected"), "seed 0"][-1] == "60"
    assert not any(name == trained("upstream") for name, _ in by_name)
    assert any("6 of 1000 episodes: no purchase 6" in line for line in lines)
    assert "Machine of seed 0, 2: a laptop" in lines


def test_every_algorithm_has_a_configuration_that_two_checkouts_are_compared_by(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    from benchmarks import same_results

    names = same_results.names_in(same_results.CONFIGS)
    assert set(names) == set(ALGORITHMS)
    for name in names:
        text = json.dumps(same_results.configuration(same_results.CONFIGS, name))
        assert factories.config(text=text).algorithm.name == name


@pytest.mark.slow
def test_a_checkout_has_the_same_results_as_itself_and_others_with_another_seed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    from benchmarks import same_results

    def configs(seed: int) -> Path:
        folder = tmp_path / f"configs-{seed}"
        folder.mkdir(exist_ok=True)
        config = same_results.configuration(same_results.CONFIGS, "rloo") | {"seed": seed}
        short = {
            "copy": {"max_steps": 1, "sequence_length": 16},
            "demonstrations": {"num_steps": 1},
        }
        config |= {"warm_start": short, "agent": config["agent"] | {"max_response_tokens": 4}}
        config |= {"training": config["training"] | {"max_steps": 1, "eval_every": None}}
        (folder / "base.yaml").write_text(json.dumps(config))
        (folder / "short.yaml").write_text("algorithm: rloo")
        return folder

    def train_here(words: list[str], **options: Any) -> subprocess.Popen[bytes]:
        """The process that trains takes seconds to import: it only finds the checkout's package."""
        python, *module, verb = words[:4]
        assert module == ["-m", "ragen_apo.cli"]
        with factories.threads_restored():
            app([verb, *words[4:]], result_action="return_value")
        package = str(ROOT / "src" / "ragen_apo" / "__init__.py")
        code = f"import ragen_apo, sys; sys.exit(ragen_apo.__file__ != {package!r})"
        return subprocess.Popen([python, "-c", code], **options)

    def compare(other_seed: int) -> int:
        where = ["--configs", str(configs(0)), "--other-configs", str(configs(other_seed))]
        return same_results.main([str(ROOT), *where, "--out", str(tmp_path)])

    processes = SimpleNamespace(Popen=train_here, STDOUT=subprocess.STDOUT)
    monkeypatch.setattr(same_results, "subprocess", processes)
    assert compare(0) == 0
    assert "| short | 3 | none | equal |" in capsys.readouterr().out
    assert compare(1) == 1
    assert "| short | 3 | warm_start.jsonl, row 1: `" in capsys.readouterr().out
    assert "references/0: " in (tmp_path / "same_results.md").read_text()


def test_two_checkouts_are_told_apart_by_a_row_a_name_or_a_bit(
    finished_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    from benchmarks.same_results import compared

    other = tmp_path / "there"
    shutil.copytree(finished_run, other)
    curve = (finished_run / "metrics.jsonl").read_text()
    rows = [json.loads(line) for line in curve.splitlines()]

    def difference(rows: list[dict[str, Any]], **renamed: str) -> str | None:
        lines = "".join(f"{json.dumps(row)}\n" for row in rows)
        (other / "metrics.jsonl").write_text(lines)
        return compared(finished_run, other, renamed=renamed).difference

    num_rows = compared(finished_run, other, renamed={}).num_rows
    assert num_rows > len(rows) == 6
    assert difference([row | {"rollout_seconds": 1e6} for row in rows]) is None
    moved = [*rows[:2], rows[2] | {"loss": rows[2]["loss"] + 1e-12}, *rows[3:]]
    assert "metrics.jsonl, row 3: `loss`" in str(difference(moved))
    assert difference(rows[:-1]) == "metrics.jsonl: 6 rows here, 5 there"
    called = [{"old" if key == "loss" else key: row[key] for key in row} for row in rows]
    assert difference(called) == "metrics.jsonl, row 1: `loss` only here"
    assert difference(called, old="loss") is None

    weights = other / "policy" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    outcome = compared(finished_run, other, renamed={"old": "loss"})
    assert outcome.difference is None and not outcome.is_same
    assert str(outcome.weights).startswith("policy: ")


@pytest.mark.slow
def test_rounding_between_sampling_and_scoring_is_small_and_larger_in_bfloat16(
    tiny_model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    from benchmarks import logprob_gap

    tiny_model.save(tmp_path)
    text = "{environment: {name: shop, max_turns: 1}, agent: {max_response_tokens: 8}}"
    config = factories.config(text=text)
    largest = {}
    for precision in ("float32", "bfloat16 autocast"):
        name, *_, last = logprob_gap.row("tiny", tmp_path, precision, config, num_episodes=2)
        assert name == "tiny"
        largest[precision] = float(str(last))
    assert largest["float32"] < 1e-5
    assert 1e-4 < largest["bfloat16 autocast"] < 0.1


@pytest.mark.slow
def test_a_table_of_environments_has_a_row_a_policy_and_plays_no_row_twice(
    tiny_model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    from benchmarks import other_environments

    pages: list[Any] = []
    monkeypatch.setattr(other_environments, "MAX_CONTEXT_TOKENS", 1024)
    monkeypatch.setattr(other_environments, "MAX_RESPONSE_TOKENS", 8)
    monkeypatch.setattr(other_environments, "write_page", lambda *_, **page: pages.append(page))
    tiny_model.save(tmp_path / "tiny")
    out, model = str(tmp_path / "out"), str(tmp_path / "tiny")
    sizes = ["--environments", "shop", "--episodes", "3", "--threads", "1"]
    given = ["--trained", f"tiny={model}", "--told", f"tiny, told={model}", "--page"]
    monkeypatch.setattr("sys.argv", ["other_environments", out, *given, *sizes])
    other_environments.main()
    monkeypatch.setattr(other_environments, "play_here", lambda *_: pytest.fail("played again"))
    other_environments.main()
    assert pages[0] == pages[1]
    found = {label: rest for environment, label, *rest in pages[0]["rows"]}
    assert set(found) == {"tiny", "tiny, told", "heuristic (scripted)", "random (scripted)"}
    assert found["tiny"][0] == "0% (0.0% to 56.1%)"
    assert found["tiny"][3:] == ["100%", "0%"], "an untrained model writes no action"


@pytest.mark.slow
def test_the_page_on_models_has_every_architecture_and_what_is_measured_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    from benchmarks import architectures

    page = architectures.PAGE.read_text(encoding="utf-8")
    _, tables = page.split(architectures.BEGIN)
    cells = {line.split(" | ")[0].removeprefix("| "): line for line in tables.splitlines()}
    assert set(architectures.CASES) <= set(cells), "run: python -m benchmarks.architectures"
    tokenizer = train_tokenizer(architectures.TEXTS, vocab_size=400)
    measured = {
        name: architectures.outcome(name, architectures.CASES[name], tokenizer)
        for name in ("Qwen3", "Mistral, windows shorter than the context", "Falcon")
    }
    assert max(float(difference) for difference in measured["Qwen3"]) < 1e-5
    for name, found in measured.items():
        assert len(cells[name].split(" | ")) == len(found) + 1
    assert measured["Falcon"][0] in cells["Falcon"]
    again = architectures.with_tables(page, architectures.tables(measured))
    assert again.partition(architectures.BEGIN)[0] == page.partition(architectures.BEGIN)[0]
    assert again.count(architectures.END) == 1
    assert "| Qwen3 |" in again and "| Mixtral |" not in again


@pytest.mark.parametrize("delayed", [False, True])
def test_the_walk_of_the_stopping_rule_equals_playing_every_sequence_of_results(
    delayed: bool,
) -> None:
    schedule, p = SampleSchedule(first=2, cap=8), 0.3
    expected: dict[tuple[int, int], float] = defaultdict(float)
    for results in itertools.product((0, 1), repeat=8):
        chance = math.prod(p if result else 1 - p for result in results)
        seen = 0
        for total in schedule.rounds():
            counted = sum(results[: seen if delayed else total])
            looked = seen if delayed else total
            more = looked == 0 or schedule.goes_on(num_successes=counted, num_samples=looked)
            if not more or total == 8:
                expected[sum(results[:total]), total] += chance
                break
            seen = total
    assert stopping_rule.stops(schedule, p=p, delayed=delayed) == pytest.approx(expected)


@pytest.mark.slow
def test_the_tables_of_the_page_on_the_algorithm_are_the_exact_ones() -> None:
    page = (ROOT / "docs" / "algorithm.md").read_text(encoding="utf-8").splitlines()
    assert {*stopping_rule.bias_table(), *stopping_rule.budget_table()} <= set(page)


def test_the_rates_of_an_engine_count_sampled_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    from benchmarks.rollout_engines import rates, row

    played = [factories.episode(factories.turn(1.0, response_token_ids=range(10)))] * 4
    found = rates(played, seconds=2.0)
    assert (found.episodes_per_second, found.tokens_per_second) == (2.0, 20.0)
    assert row("local", [found, found, found])[:3] == ["local", "2.00", "20"]


@pytest.mark.slow
def test_the_work_of_a_rollout_is_what_the_model_reads_and_samples(
    tiny_model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    from benchmarks import generation, throughput

    config = factories.config()
    environments = build_environments(config.environment, config.agent)
    proxy = build_proxy(config, tiny_model, environments)
    requests = [EpisodeRequest(task, 7) for task in environments.tasks("train")[:1]]
    (played,) = proxy.rollout(requests, temperature=1.0, policy_version="benchmark")
    work = throughput.rollout_work(proxy, tiny_model, requests)
    assert work.num_tokens == generation.num_tokens_through_model("ours", played)
    assert work.num_sampled == played.num_response_tokens
    weights = sum(each.numel() for each in tiny_model.model.parameters() if each.ndim == 2)
    assert 2 * work.num_sampled * weights < work.operations < 3 * work.num_tokens * weights
    several = throughput.rollout_work(proxy, tiny_model, requests * 20)
    assert several.num_tokens < 20 * work.num_tokens, "they copy what the first has read"


def test_an_update_is_four_forward_passes_and_fewer_products_with_a_frozen_vocabulary(
    tiny_model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    from benchmarks.step_time import Network
    from benchmarks.throughput import training_work

    samples = [TrainingSample((5, 6, 7), (False, True, True), (0.0,) * 3)]
    network = Network.of(tiny_model.config)
    # Tokens look at 1, 2 and 3 tokens, the mean is 2; two of them get logits.
    forward = network.operations(3, context=2, with_head=2)
    for frozen, has_reference, passes in ((False, True, 4), (False, False, 3), (True, True, 4)):
        config = factories.config(f"--policy.freeze_embeddings={str(frozen).lower()}")
        work = training_work(config, tiny_model, samples, has_reference=has_reference)
        assert (work.num_tokens, work.num_sampled) == (3, 2)
        spared = 2 * 2 * network.head_weights if frozen else 0
        assert work.operations == passes * forward - spared


@pytest.mark.slow
def test_the_curve_of_webshop_counts_the_episodes_before_each_policy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two references with four samples each, and a step of three episodes below either."""
    monkeypatch.syspath_prepend(str(ROOT))
    from benchmarks.webshop_curve import lines_of, picture

    run = create_run(tmp_path / "run", config_yaml=resolved_yaml(RunConfig()))
    for version in (0, 1):
        run.value_report_of(version).write_text('{"num_samples": 4}', encoding="utf-8")
    steps = [{"num_episodes": 3, "reference_version": version} for version in (0, 1)]
    run.metrics.write_text("".join(json.dumps(step) + "\n" for step in steps), encoding="utf-8")
    folders = [run.policy, run.reference(0), run.reference(1), run.distilled]
    rows = [
        {"policy": str(folder), "upstream": {"success": success}}
        for folder, success in zip(folders, [70.0, 40.0, 65.0, 60.0], strict=True)
    ]
    file = tmp_path / "rows.json"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    lines = lines_of([file])
    assert lines == {"A*-PO": [[(0, 40.0), (4, 60.0), (7, 65.0), (14, 70.0)]]}
    assert picture(lines, rule=80.2).startswith(b"\x89PNG")


def test_a_part_of_a_mixture_is_played_as_its_own_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    from benchmarks.webshop_policies import configuration

    parts = {"small": {"name": "shop", "num_products": 24, "weight": 2}, "frozen_lake": {"size": 4}}
    made = factories.config(environment={"name": "mixture", "parts": parts})
    run = create_run(tmp_path / "run", config_yaml=resolved_yaml(made))
    assert configuration(run, None) == made
    small, lake = (configuration(run, label).environment for label in parts)
    assert (small.name, small.options) == ("shop", {"num_products": 24})
    assert (lake.name, lake.options) == ("frozen_lake", {"size": 4})
    with pytest.raises(SystemExit, match="--part large: .* its parts: frozen_lake, small"):
        configuration(run, "large")
