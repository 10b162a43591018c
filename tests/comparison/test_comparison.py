"""A comparison: its plan, what a finished run is measured by, and the files for people."""

import csv
import io
import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from pptx import Presentation
from pptx.enum.shapes import MSO_SHAPE_TYPE
from pptx.util import Inches

from ragen_apo import api
from ragen_apo.comparison import write
from ragen_apo.comparison.explain import explanation
from ragen_apo.comparison.measure import (
    DISTILLED,
    REFERENCE,
    Measurement,
    Point,
    measure,
    stage_one_tokens,
)
from ragen_apo.comparison.plan import (
    BudgetConfig,
    Comparison,
    ComparisonConfig,
    load_comparison,
)
from ragen_apo.comparison.table import rows_of_algorithms, table
from ragen_apo.comparison.write import curves, write_comparison
from ragen_apo.config import RunConfig
from ragen_apo.config.yaml_text import dump_yaml, parse_yaml
from ragen_apo.errors import ConfigError, RunDirectoryError
from ragen_apo.files import read_json_lines, write_json_lines_atomically
from ragen_apo.plural import counted
from ragen_apo.report.drawing import png_bytes
from ragen_apo.report.shapes import WIDTH
from ragen_apo.run_directory import RunDirectory
from ragen_apo.session import Session
from ragen_apo.values.store import ValueStore
from tests.report.printing import NEEDS_PDF

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
SHIPPED = CONFIGS / "compare_shop.yaml"
SHOP = load_comparison(SHIPPED)
RIVALS = ["apo", "apo_turn", "ppo", "grpo", "rloo", "gigpo"]
MEASUREMENT = Measurement(
    name="A*-PO",
    seed=0,
    points=[Point(0.0, 0, 0.4, REFERENCE), Point(60.0, 1000, 0.95, 1)],
    seconds=120.0,
    tokens=2000,
    updates=65,
    success=0.97,
    success_low=0.9,
    success_high=0.99,
    kl_per_sequence=1.5,
    entropy=0.25,
    pass_at_most=None,
    pass_k=None,
    peak_memory_bytes=2**29,
)


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        (
            "compare_shop",
            [
                *["apo", *RIVALS[2:], "oapl", "grpo", *["reinforce_plus_plus"] * 2],
                *["apo", *RIVALS[3:], "ppo", "oapl", "grpo", "ppo"],
            ],
        ),
        ("compare_frozen_lake", ["apo", *["apo_turn"] * 3, *RIVALS[2:], "rloo"]),
        ("compare_frozen_lake_tuning", [*RIVALS * 2, *RIVALS[:2] * 2]),
        ("compare_sokoban", ["apo_turn", "rloo", "grpo", "gigpo", "ppo", "rloo"]),
        ("compare_sokoban_tuning", RIVALS * 3),
        ("compare_shop_ablations", ["apo_turn"] * 12 + ["apo"] * 3),
    ],
)
def test_every_run_of_a_shipped_comparison_is_a_valid_configuration(
    file: str, expected: list[str]
) -> None:
    comparison = load_comparison(CONFIGS / f"{file}.yaml")
    algorithms, budgets = [], set()
    for name in comparison.settings.runs:
        config = comparison.run(name, 2, reference=Path("/somewhere"))
        assert (config.seed, config.policy.path, config.warm_start.enabled) == (
            2,
            "/somewhere",
            False,
        )
        episodes = config.training.tasks_per_step * config.algorithm.rollouts_per_task
        budgets.add(episodes * config.training.max_steps)
        algorithms.append(config.algorithm.name)
    assert algorithms == expected
    assert len(budgets) == 1, "all play as many episodes"
    reference = comparison.reference(2)
    assert reference.seed == 2
    assert reference.warm_start.enabled


@pytest.mark.parametrize(
    ("names", "problem"),
    [
        (["reference"], "the folder 'reference' holds the warm start"),
        (["Reference!"], "the folder 'reference' holds the warm start"),
        (["GRPO", "grpo"], "its folder 'grpo' is that of run 'GRPO' already"),
        (["a b", "a-b"], "its folder 'a-b' is that of run 'a b' already"),
        (["up/../../down"], "no slashes and no control characters"),
        (["up\\down"], "no slashes and no control characters"),
        (["clear\x1b[2Jscreen"], "no slashes and no control characters"),
        (["two\nlines"], "no slashes and no control characters"),
        (["."], "needs a letter from a to z or a digit"),
        ([".."], "needs a letter from a to z or a digit"),
        ([""], "needs a letter from a to z or a digit"),
        (["x" * 101], "at most 100 characters, this one 101"),
    ],
)
def test_a_run_whose_name_has_no_folder_of_its_own_is_refused(
    tmp_path: Path, names: list[str], problem: str
) -> None:
    (tmp_path / "base.yaml").write_text("seed: 0\n")
    runs = {name: {} for name in names}
    path = tmp_path / "compare.yaml"
    path.write_text(json.dumps({"base": "base.yaml", "seeds": [0], "runs": runs}))
    with pytest.raises(ConfigError, match=problem) as error:
        load_comparison(path)
    assert str(error.value).isprintable(), "one line, and nothing that acts on a terminal"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("base: base.yaml\nseeds: [0]\nruns: {a: {algorithm: x}}", "run 'a' cannot be used"),
        ("base: base.yaml\nseeds: []\nruns: {a: {}}", "seeds"),
        ("base: base.yaml\nseeds: 3\nruns: {a: {}}", "got 3, expected a list of whole numbers at"),
        ("base: base.yaml\nseeds: [x]\nruns: {a: {}}", "seeds.0: got 'x', expected a whole number"),
        ("base: base.yaml\nseeds: [0, 1, 0]\nruns: {a: {}}", "seeds: a seed is there twice"),
        (
            "base: base.yaml\nseeds: [0]\nruns: {a: {}, b: {evaluation: {split: train}}}",
            "run 'b': evaluation.split is not that of run 'a'",
        ),
        (
            "base: base.yaml\nseeds: [0]\nruns: {a: {}, b: {training: {eval_episodes: 5}}}",
            r"run 'b': training\.eval_episodes is not that of run 'a'",
        ),
        (
            "base: base.yaml\nseeds: [0]\nruns: {a: {}, b: {environment: {max_turns: 3}}}",
            "run 'b': environment is not that of run 'a'",
        ),
        (
            "base: base.yaml\nseeds: [0]\nruns: {a: {evaluation: {pass_k: 2}}, b: {}, "
            "c: {evaluation: {pass_k: 8}}}",
            r"evaluation\.pass_k is 2 or 8",
        ),
        (
            "base: base.yaml\nseeds: [0]\nruns: {a: {evaluation: {search: {}}}, b: {}}",
            "run 'b': evaluation.search is not that of run 'a'",
        ),
        (
            "base: base.yaml\nseeds: [0]\nruns: {a: {}}\n"
            "shared: {evaluation: {search: {method: best_of_n, rank_by: reward}}}",
            "run 'a': evaluation.search ranks by reward, an upper bound",
        ),
        (
            "base: base.yaml\nseeds: [0]\nruns: {a: {training: {eval_split: train}}}",
            "run 'a': training.eval_split is 'train', and curves begin with the reference's",
        ),
        ("base: base.yaml\nseeds: [0]\nruns: {a: {}, A: {}}", "folder 'a' is that of run 'a'"),
        (
            "base: other.yaml\nseeds: [0]\nruns: {a: {}}",
            "other.yaml; give the path of a YAML file",
        ),
        ("base: compare.yaml\nseeds: [0]\nruns: {a: {}}", "base compare.yaml is a comparison"),
        ("base: base.yaml\nseeds: [0]\nruns: {a: {}}\nbudgets: {}", "budgets"),
        (
            "base: base.yaml\nseeds: [0]\nruns: {a: {}}\nshared: {seed: 9}",
            r"shared\.seed would be ignored; set it in seeds$",
        ),
        ("base: base.yaml\nseeds: [0]\nruns: {a: {seed: 9}}", "a seed; set seed in seeds$"),
        ("base: base.yaml\nseeds: [0]\nruns: {a: &a {}, b: *a}", "line 3, column 21: the alias"),
        ("base: base.yaml\nseeds: [!!bool 0]\nruns: {a: {}}", "'0' cannot be read as !!bool"),
        ("base: base.yaml\nseeds: [0]\nruns: {a: {values: 2020-01-01}}", "run 'a' cannot be used"),
    ],
)
def test_a_comparison_that_cannot_work_is_refused(text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text("seed: 0\n")
    (tmp_path / "compare.yaml").write_text(text)
    with pytest.raises(ConfigError, match=words):
        load_comparison(tmp_path / "compare.yaml")


def test_targets_are_ascending_and_none_has_two_columns(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text("seed: 0\ntraining: {eval_every: 1}\n")
    text = "base: base.yaml\nseeds: [0]\nruns: {a: {}}\ntarget: [0.98, 0.9, 0.90000001, 0.9]"
    (tmp_path / "compare.yaml").write_text(text)
    assert load_comparison(tmp_path / "compare.yaml").settings.target == [0.9, 0.98]


def test_the_configuration_of_a_run_is_refused_in_one_line_that_shows_a_comparison() -> None:
    with pytest.raises(ConfigError) as error:
        load_comparison(CONFIGS / "shop.yaml")
    first, shown = str(error.value).split("such as ")
    assert "\n" not in str(error.value)
    assert (
        f"is the configuration of a run: ragen-apo train --config {CONFIGS / 'shop.yaml'}" in first
    )
    keys = parse_yaml(shown.removesuffix(" (docs/comparison.md)"))[0]
    assert keys["base"] == "shop.yaml"
    assert ComparisonConfig.model_validate(keys).runs.keys() == {"A*-PO", "GRPO"}


SWEPT = """
base: base.yaml
seeds: [0]
runs:
  A*-PO: {algorithm: apo, optimizer: {warmup_steps: 1}}
  GRPO: {algorithm: grpo}
sweep: {optimizer.learning_rate: [5.0e-4, 1.0e-3], training.max_steps: [3]}
"""


def test_a_sweep_makes_every_run_with_every_combination(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text("seed: 0\ntraining: {eval_every: 1}\n")
    (tmp_path / "compare.yaml").write_text(SWEPT)
    comparison = load_comparison(tmp_path / "compare.yaml")
    made = {}
    for name in comparison.settings.runs:
        config = comparison.run(name, 0, reference=Path("reference"))
        optimizer, steps = config.optimizer, config.training.max_steps
        made[name] = (config.algorithm.name, optimizer.learning_rate, optimizer.warmup_steps, steps)
    usual = RunConfig().optimizer.warmup_steps
    assert made == {
        "A*-PO, learning_rate 0.0005, max_steps 3": ("apo", 5e-4, 1, 3),
        "A*-PO, learning_rate 0.001, max_steps 3": ("apo", 1e-3, 1, 3),
        "GRPO, learning_rate 0.0005, max_steps 3": ("grpo", 5e-4, usual, 3),
        "GRPO, learning_rate 0.001, max_steps 3": ("grpo", 1e-3, usual, 3),
    }


@pytest.mark.parametrize(
    ("sweep", "words"),
    [
        ("{seed: [1, 2]}", "seed cannot differ between runs"),
        ("{optimizer.rate: [1.0]}", "run 'a, rate 1.0' cannot be used"),
        ("{optimizer.learning_rate: []}", "sweep"),
        ("{optimizer.learning_rate: 0.001}", "got 0.001, expected a list of values"),
        ("{optimizer.lr: [0.001]}", r"did you mean optimizer\.learning_rate\?"),
        ("{values.store: [old/values.json]}", "write the runs of the sweep out under `runs`"),
    ],
)
def test_a_sweep_that_cannot_work_is_refused(sweep: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text("training: {eval_every: 1}\n")
    text = f"base: base.yaml\nseeds: [0]\nruns: {{a: {{}}}}\nsweep: {sweep}"
    (tmp_path / "compare.yaml").write_text(text)
    with pytest.raises(ConfigError, match=words):
        load_comparison(tmp_path / "compare.yaml")


def test_text_beyond_ascii_reaches_the_runs_of_a_comparison_unchanged(tmp_path: Path) -> None:
    prompt = "\u2028 ☆ \U0001f600"
    (tmp_path / "base.yaml").write_text(dump_yaml({"agent": {"system_prompt": prompt}}))
    (tmp_path / "compare.yaml").write_text("base: base.yaml\nseeds: [0]\nruns: {a: {}}")
    comparison = load_comparison(tmp_path / "compare.yaml")
    run = comparison.run("a", 0, reference=Path("reference"))
    assert run.agent.system_prompt == prompt


def of_shop(settings: ComparisonConfig) -> Comparison:
    """The shipped comparison with these settings."""
    return replace(SHOP, settings=settings)


def measured(run: RunDirectory, budget: BudgetConfig | None = None) -> Measurement:
    return measure(run, name="A*-PO", seed=0, budget=budget or BudgetConfig())


def test_a_run_is_measured_with_stage_one_and_cut_at_the_budget(finished_run: Path) -> None:
    run = RunDirectory(finished_run)
    rows = read_json_lines(run.metrics)
    whole = measured(run)
    first_stage, refresh = stage_one_tokens(run)  # a new reference after three steps
    totals = [row["num_generated_tokens_total"] for row in rows]
    assert first_stage > 0 and refresh > 0
    assert [point.tokens for point in whole.points] == [
        0,
        first_stage,
        first_stage + totals[2],
        first_stage + totals[2] + refresh + totals[5] - totals[2],
    ]
    assert whole.tokens == whole.points[-1].tokens
    before, after = whole.points[:2]
    assert before.success == after.success and before.seconds == 0.0 < after.seconds
    assert whole.seconds > sum(row["rollout_seconds"] for row in rows)
    assert whole.entropy == rows[-1]["entropy"]
    assert whole.updates == rows[-1]["num_updates_total"]
    assert whole.peak_memory_bytes is not None and whole.peak_memory_bytes > 2**24
    for num_points in (1, 2, 3):
        cut = BudgetConfig(tokens=max(whole.points[num_points - 1].tokens, 1))
        assert len(measured(run, cut).points) == num_points
        seconds = max(whole.points[num_points - 1].seconds, 1e-9)
        assert len(measured(run, BudgetConfig(seconds=seconds)).points) == num_points
        less = BudgetConfig(seconds=seconds * 0.999)
        assert len(measured(run, less).points) == max(1, num_points - 1)
    kls = [row["kl_per_sequence"] for row in rows]
    assert whole.kl_per_sequence == kls[-1] != kls[0]


def test_references_that_no_step_used_are_paid_for_where_they_were_made(session: Session) -> None:
    """By their tokens: the second and third before the third step, the fourth at the end."""
    run = session.run
    rows = read_json_lines(run.metrics)
    for row, version in zip(rows, (0, 0, 2, 2, 2, 2), strict=True):
        row |= {"reference_version": version, "eval_success_rate": 0.5}
    write_json_lines_atomically(run.metrics, rows)
    phases = {"stage 1": {"seconds": 5.0}, "reference refresh": {"seconds": 60.0}}
    run.note(stage_one_tokens=[100, 10, 20, 30], phases=phases)
    tokens = [row["num_generated_tokens"] for row in rows]
    seconds = [row["rollout_seconds"] + row["training_seconds"] for row in rows]
    found = measured(run)
    before = [100, 100, 130, 130, 130, 130]
    steps = found.points[2:]
    assert [each.tokens for each in steps] == [
        paid + sum(tokens[: number + 1]) for number, paid in enumerate(before)
    ]
    assert found.tokens == 160 + sum(tokens)
    assert [each.seconds for each in steps] == pytest.approx(
        [
            5.0 + (30.0 if number > 1 else 0.0) + sum(seconds[: number + 1])
            for number in range(len(rows))
        ]
    )
    assert found.seconds == pytest.approx(65.0 + sum(seconds))


def test_pass_at_k_is_that_of_the_largest_k(session: Session) -> None:
    results = json.loads(session.run.results.read_text())
    rates = {"1": 0.25, "8": 0.9}
    session.run.results.write_text(json.dumps(results | {"pass_at_k": rates}))
    found = measured(session.run)
    assert (found.pass_k, found.pass_at_most) == (8, 0.9)


@pytest.mark.parametrize("kept", [slice(0, 0), slice(0, -1), slice(1, None)])
def test_a_run_that_lacks_rows_of_its_steps_is_not_taken_for_a_cheap_one(
    session: Session, kept: slice
) -> None:
    rows = read_json_lines(session.run.metrics)
    write_json_lines_atomically(session.run.metrics, rows[kept])
    words = f"has {len(rows[kept])} rows? and the run made {len(rows)} steps: .* or remove"
    with pytest.raises(RunDirectoryError, match=words):
        measured(session.run)
    write_json_lines_atomically(session.run.metrics, rows[:-1])
    session.run.note(early_stop={"step": len(rows) - 1})
    assert measured(session.run).points


@pytest.mark.slow
def test_only_samples_of_training_tasks_are_counted(session: Session) -> None:
    before = stage_one_tokens(session.run)
    api.estimate_values(session.run.path, samples=1, split="test", progress=False)
    assert stage_one_tokens(session.run) == before
    api.estimate_values(session.run.path, samples=3, progress=False)
    assert stage_one_tokens(session.run) == before, "no training has used what came later"
    with ValueStore(session.run.values) as store:
        assert sum(store.num_response_tokens(split="test")) > 0


@pytest.mark.slow
def test_results_say_what_was_evaluated(session: Session) -> None:
    api.evaluate(session.run.path, split="train", episodes=3, progress=False)
    played = json.loads(session.run.results.read_text())["evaluation"]
    asked = {"split": "train", "num_episodes": 3}
    assert played == session.config.evaluation.model_dump(mode="json") | asked


def test_distillation_costs_seconds_and_has_a_point_of_its_own(session: Session) -> None:
    run = session.run
    plain = measured(run)
    run.add_seconds("distillation", 7.5)
    update = {"reference_version": 0, "step": 1, "loss": 0.5, "seconds": 7.4}
    evaluated = {"reference_version": 0, "step": 1, "eval_success_rate": 0.75}
    # Versions before 0.2 could evaluate a later reference's, when they were resumed.
    later = {"reference_version": 1, "step": 1, "eval_success_rate": 0.99}
    write_json_lines_atomically(run.distillation, [update, evaluated, later])
    distilled = measured(run)
    assert distilled.seconds == pytest.approx(plain.seconds + 7.5)
    assert distilled.tokens == plain.tokens
    assert plain.updates is not None and distilled.updates == plain.updates + 1
    first, sampled, point, *rest = distilled.points
    assert (first, sampled) == tuple(plain.points[:2])
    assert point == Point(pytest.approx(sampled.seconds + 7.5), sampled.tokens, 0.75, DISTILLED)
    assert [each.tokens for each in rest] == [each.tokens for each in plain.points[2:]]


def test_the_seconds_of_a_new_reference_are_counted_before_its_first_step(session: Session) -> None:
    run = session.run
    plain = measured(run)
    updates = [{"reference_version": version, "step": 1, "seconds": 1.0} for version in (0, 1, 1)]
    write_json_lines_atomically(run.distillation, updates)
    run.add_seconds("distillation", 6.0)
    run.add_seconds("reference refresh", 5.0)
    dearer = measured(run)
    assert [point.seconds for point in dearer.points] == pytest.approx(
        [point.seconds + more for point, more in zip(plain.points, (0, 0, 2, 11), strict=True)]
    )
    assert dearer.seconds == pytest.approx(plain.seconds + 11)


def test_nothing_is_said_to_be_reached_where_a_run_had_no_success() -> None:
    settings = load_comparison(SHIPPED).settings
    settings = settings.model_copy(update={"runs": {"A*-PO": None}, "seeds": [0], "target": [0.9]})
    failed = replace(MEASUREMENT, points=[Point(0.0, 0, 0.0, REFERENCE), Point(60.0, 10, 0.0, 1)])
    header, row = rows_of_algorithms([failed], settings=settings)
    assert header[:4] == ["run", "time to 90%", "tokens to 90%", "mean success"]
    assert len(row) == len(header)
    assert "No run had any success." in explanation([failed], comparison=of_shop(settings))
    said = explanation([failed, MEASUREMENT], comparison=of_shop(settings))
    assert "No success at all: A*-PO (seed 0)." in said
    low = [0.4, 0.3, 0.35]
    moments = [REFERENCE, 1, 2]
    stuck = replace(MEASUREMENT, points=[Point(n, n, low[n], moments[n]) for n in range(3)])
    header, _ = rows_of_algorithms([stuck, MEASUREMENT], settings=settings)
    assert header[1] == "time to 90%", "40% is what both had before their first step"
    said = " ".join(explanation([stuck, MEASUREMENT], comparison=of_shop(settings)))
    assert "Every run reached 40.0%. All had that before they were trained" in said
    limited = settings.model_copy(update={"budget": BudgetConfig(seconds=10)})
    said = explanation([failed], comparison=of_shop(limited))
    assert "No run had any success within the budget." in said, "it may have had some later"
    assert "where the curve of the shortest run ends." in " ".join(said)


def test_runs_whose_intervals_overlap_are_not_told_apart() -> None:
    settings = load_comparison(SHIPPED).settings
    settings = settings.model_copy(update={"runs": {"A*-PO": None, "GRPO": None}, "seeds": [0]})
    better = replace(MEASUREMENT, name="A*-PO", success_low=0.4, success_high=0.8)
    for low, is_undecided in ((0.2, True), (0.85, False)):
        other = replace(MEASUREMENT, name="GRPO", success_low=low, success_high=low + 0.3)
        said = " ".join(explanation([better, other], comparison=of_shop(settings)))
        assert ("does not tell these runs apart" in said) == is_undecided


def test_a_run_that_only_sampled_up_to_the_end_of_the_shortest_curve_is_named() -> None:
    """A student read 20% for all algorithms: for A*-PO it was the reference, in its Stage 1."""
    settings = load_comparison(SHIPPED).settings
    settings = settings.model_copy(update={"runs": {"A*-PO": None, "GRPO": None}, "seeds": [0]})
    late = [Point(0.0, 0, 0.2, REFERENCE), Point(9.0, 3000, 0.3, 1)]
    early = [Point(0.0, 0, 0.2, REFERENCE), Point(9.0, 1000, 0.3, 1)]
    runs = [replace(MEASUREMENT, name=n, points=p) for n, p in (("A*-PO", late), ("GRPO", early))]
    said = " ".join(explanation(runs, comparison=of_shop(settings)))
    assert "Up to the end of the mean success A*-PO had no evaluation after the first" in said
    assert "its mean success says little" in said
    assert "had no evaluation" not in " ".join(explanation(runs[1:], comparison=of_shop(settings)))


def test_a_run_without_an_evaluation_in_the_budget_is_not_the_shortest_of_the_curves() -> None:
    settings = load_comparison(SHIPPED).settings
    limited = settings.model_copy(update={"budget": BudgetConfig(tokens=50)})
    late = replace(MEASUREMENT, points=[Point(0.0, 0, 0.3, REFERENCE)])
    said = " ".join(explanation([late, MEASUREMENT], comparison=of_shop(limited)))
    ended = counted(MEASUREMENT.points[-1].tokens, "token")
    words = "of the shortest run with an evaluation within the budget ends."
    assert f"up to {ended}, where the curve {words}" in said


@pytest.mark.slow
def test_the_files_of_a_comparison(tmp_path: Path) -> None:
    slower = replace(
        MEASUREMENT,
        seed=1,
        success=0.5,
        success_low=0.4,
        success_high=0.7,
        points=[Point(0.0, 0, 0.4, REFERENCE), Point(30.0, 500, 0.5, 1), Point(90.0, 1500, 0.6, 2)],
    )
    settings = load_comparison(SHIPPED).settings
    settings = settings.model_copy(
        update={"runs": {"A*-PO": None}, "seeds": [0, 1], "target": [0.9]}
    )
    paths = write_comparison([MEASUREMENT, slower], tmp_path, comparison=of_shop(settings))
    assert [path.name for path in paths] == [
        "comparison.md",
        "comparison.csv",
        "comparison.tex",
        "success_by_seconds.png",
        "success_by_tokens.png",
        "comparison.pptx",
        "comparison.yaml",
        "comparison_base.yaml",
        "comparison.html",
    ]
    page = paths[0].read_text()
    assert "Every run reached 60.0%." in page
    assert "the KL to the newest reference of the run" in page
    assert "Budget" not in page
    row = next(line for line in page.splitlines() if line.startswith("| A*-PO"))
    # 60%: 60 and 90 seconds, 1,000 and 1,500 tokens. 90%: one of the two.
    # Bounds: 90% and 40%, 99% and 70%.
    # Areas up to 1,000 tokens: (0.4 + 0.95) / 2, and (0.45 * 500 + 0.525 * 500) / 1,000.
    assert row == (
        "| A*-PO | 1 min 15 s (1 min 00 s to 1 min 30 s) | 1,250 (1,000 to 1,500) "
        "| 1 of 2 (1 min 00 s) | 1 of 2 (1,000) | 58.1% (48.8% to 67.5%) "
        "| 73.5% (50.0% to 97.0%) | 65.0–84.5% | 65 (65 to 65) | 1.5 (1.5 to 1.5) "
        "| 0.250 (0.250 to 0.250) | 512 MiB |"
    )
    rows = list(csv.DictReader(io.StringIO(paths[1].read_text())))
    assert [each["seconds_to_90%"] for each in rows] == ["60.0", ""]
    assert [each["tokens_to_common"] for each in rows] == ["1000", "1500"]
    assert [float(each["mean_success"]) for each in rows] == pytest.approx([0.675, 0.4875])
    assert r"& 1,250 (1,000 to 1,500) & 1 of 2 (1 min 00 s)" in paths[2].read_text()
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths[3:5])


def reaching(seconds: float | None, *, seed: int) -> Measurement:
    """A run that is at 90% after so many seconds, or never; after 0 it is before training."""
    start = 0.9 if seconds == 0 else 0.2
    points = [Point(0.0, 0, start, REFERENCE), Point(1.0, 10, 0.3, 1)]
    if seconds:
        points.append(Point(seconds, 100 * int(seconds), 0.9, 2))
    return replace(MEASUREMENT, seed=seed, points=points)


@pytest.mark.parametrize(
    ("seconds", "time", "tokens"),
    [
        ([8, 21, 31], "20 s (8.0 to 31 s)", "2,000 (800 to 3,100)"),
        ([50, 70], "1 min 00 s (50 s to 1 min 10 s)", "6,000 (5,000 to 7,000)"),
        ([20], "20 s", "2,000"),
        ([19, None, 16], "2 of 3 (16 to 19 s)", "2 of 3 (1,600 to 1,900)"),
        ([35, None, None], "1 of 3 (35 s)", "1 of 3 (3,500)"),
        ([None, None], "–", "–"),
        ([4, 0], "1 of 2 (4.0 s), 1 at the start", "1 of 2 (400), 1 at the start"),
        ([0, None, 0], "2 of 3 at the start", "2 of 3 at the start"),
        ([0, 0], "at the start", "at the start"),
    ],
)
def test_a_seed_that_fails_or_has_nothing_to_do_makes_no_mean_smaller(
    seconds: list[float | None], time: str, tokens: str
) -> None:
    settings = SHOP.settings.model_copy(
        update={"runs": {"A*-PO": None}, "seeds": [*range(len(seconds))], "target": [0.9]}
    )
    runs = [reaching(after, seed=seed) for seed, after in enumerate(seconds)]
    header, row = rows_of_algorithms(runs, settings=settings)
    cells = dict(zip(header, row, strict=True))
    assert (cells["time to 90%"], cells["tokens to 90%"]) == (time, tokens)
    rows = list(csv.DictReader(table(runs, settings=settings).splitlines()))
    costs = [float(each["seconds_to_90%"] or "nan") for each in rows]
    assert costs == pytest.approx([after or math.nan for after in seconds], nan_ok=True)
    at_start = [float(each["success_at_start"]) >= 0.9 for each in rows]
    assert at_start == [after == 0 for after in seconds]
    said = " ".join(explanation(runs, comparison=of_shop(settings)))
    assert '"At the start": the reference reached it before any training.' in said


def test_every_mean_has_its_range_over_the_seeds() -> None:
    settings = SHOP.settings.model_copy(update={"runs": {"A*-PO": None}, "seeds": [0, 1]})
    other = replace(MEASUREMENT, seed=1, kl_per_sequence=0.5, pass_at_most=0.5, updates=35)
    header, row = rows_of_algorithms(
        [replace(MEASUREMENT, pass_at_most=0.75, pass_k=8), other], settings=settings
    )
    cells = dict(zip(header, row, strict=True))
    assert cells["mean success"] == "67.5% (67.5% to 67.5%)"
    assert cells["KL"] == "1 (0.5 to 1.5)"
    assert cells["pass@8"] == "62.5% (50.0% to 75.0%)"
    assert cells["updates"] == "50 (35 to 65)"


@pytest.mark.slow
@NEEDS_PDF
@pytest.mark.usefixtures("undrawn")
def test_the_page_of_a_comparison_has_each_run_and_is_printed_as_it_is(tmp_path: Path) -> None:
    settings = load_comparison(SHIPPED).settings
    settings = settings.model_copy(update={"runs": {"A*-PO": {}}, "target": [0.9]})
    named = replace(MEASUREMENT, name="A*-PO")
    *_, page, pdf = write_comparison([named], tmp_path, comparison=of_shop(settings), with_pdf=True)
    assert pdf.read_bytes().startswith(b"%PDF-")
    html = page.read_text()
    assert html.count('src="data:image/png') == 2
    row = "<td>A*-PO</td>" + "".join(
        f'<td class="n">{cell}</td>' for cell in ("0", "1 min 00 s", "97.0%")
    )
    assert row in html


@pytest.mark.usefixtures("undrawn")
def test_the_slides_of_a_comparison_have_the_curves_and_the_table(tmp_path: Path) -> None:
    settings = load_comparison(SHIPPED).settings
    settings = settings.model_copy(update={"runs": {"A*-PO": {}}, "target": [0.5, 0.9]})
    write_comparison([MEASUREMENT], tmp_path, comparison=of_shop(settings))
    path = tmp_path / "comparison.pptx"
    curves, results = Presentation(str(path)).slides
    assert sum(shape.shape_type == MSO_SHAPE_TYPE.PICTURE for shape in curves.shapes) == 2
    (table,) = [shape.table for shape in results.shapes if shape.has_table]
    cells = [[cell.text for cell in row.cells] for row in table.rows]
    assert cells[0][:2] == ["run", "time to 95.0%"]
    assert cells[1][0] == "A*-PO"
    assert cells[1][-1] == "97.0%"
    right = max(shape.left + shape.width for slide in (curves, results) for shape in slide.shapes)
    assert right <= Inches(WIDTH)


@pytest.mark.usefixtures("undrawn")
def test_a_page_has_the_columns_of_several_targets_and_of_pass_at_k(tmp_path: Path) -> None:
    settings = load_comparison(SHIPPED).settings
    settings = settings.model_copy(update={"runs": {"A*-PO": {}}, "target": [0.5, 0.9]})
    write_comparison(
        [replace(MEASUREMENT, pass_at_most=0.99, pass_k=8)], tmp_path, comparison=of_shop(settings)
    )
    lines = (tmp_path / "comparison.md").read_text().splitlines()
    header, row = (
        next(line.split(" | ") for line in lines if line.startswith(start))
        for start in ("| run", "| A*-PO")
    )
    cells = dict(zip(header, row, strict=True))
    assert cells["time to 50%"] == cells["time to 90%"] == "1 min 00 s"
    assert (cells["pass@8"], cells["entropy"]) == ("99.0%", "0.250")


@pytest.mark.usefixtures("undrawn")
def test_targets_that_differ_by_half_a_point_have_columns_of_their_own(tmp_path: Path) -> None:
    settings = load_comparison(SHIPPED).settings
    settings = settings.model_copy(update={"runs": {"A*-PO": {}}, "target": [0.975, 0.98]})
    write_comparison([MEASUREMENT], tmp_path, comparison=of_shop(settings))
    header = (tmp_path / "comparison.csv").read_text().splitlines()[0].split(",")
    assert {"seconds_to_97.5%", "seconds_to_98%"} <= set(header)


@pytest.mark.usefixtures("undrawn")
def test_a_run_without_an_evaluation_within_the_budget_takes_no_mean_from_others(
    tmp_path: Path,
) -> None:
    settings = load_comparison(SHIPPED).settings.model_copy(update={"runs": {"A*-PO": {}}})
    early = replace(MEASUREMENT, seed=9, points=MEASUREMENT.points[:1])
    write_comparison([MEASUREMENT, early], tmp_path, comparison=of_shop(settings))
    rows = list(csv.DictReader((tmp_path / "comparison.csv").read_text().splitlines()))
    assert [float(row["mean_success"]) for row in rows] == pytest.approx([0.675, 0.4])


@pytest.mark.usefixtures("undrawn")
def test_a_page_names_the_limits_that_there_are(tmp_path: Path) -> None:
    settings = load_comparison(SHIPPED).settings
    budget = BudgetConfig(tokens=2000)
    update = {"budget": budget, "runs": {"A*-PO": {}}, "seeds": [7]}
    write_comparison(
        [MEASUREMENT], tmp_path, comparison=of_shop(settings.model_copy(update=update))
    )
    page = (tmp_path / "comparison.md").read_text()
    assert "Budget of a run: 2,000 tokens." in page
    assert "One seed, 7.\n- One seed cannot tell algorithms apart" in page
    assert "means over the seeds" not in page


@pytest.mark.parametrize("share_values", [False, True])
@pytest.mark.usefixtures("undrawn")
def test_a_page_says_whose_costs_lack_samples(share_values: bool, tmp_path: Path) -> None:
    settings = load_comparison(SHIPPED).settings
    sharing = settings.model_copy(update={"share_values": share_values, "runs": {"A*-PO": {}}})
    write_comparison([MEASUREMENT], tmp_path, comparison=of_shop(sharing))
    said = "the costs of the others lack its samples" in (tmp_path / "comparison.md").read_text()
    assert said is share_values
    (row,) = table_of(tmp_path / "comparison.md")
    (run,) = csv.DictReader((tmp_path / "comparison.csv").read_text().splitlines())
    assert ("mean success" in row, "mean_success" in run) == (not share_values, not share_values)


def test_an_explanation_begins_with_what_was_measured_and_how_the_runs_differ(
    tmp_path: Path,
) -> None:
    (tmp_path / "base.yaml").write_text(
        "environment: shop\ntraining: {eval_every: 2, eval_episodes: 16, tasks_per_step: 32}\n"
        "evaluation: {num_episodes: 50}\n"
    )
    (tmp_path / "compare.yaml").write_text(
        "base: base.yaml\nseeds: [3, 4]\nruns:\n  A*-PO: {}\n  GRPO: {agent: {max_response_tokens:"
        " 9}, training: {max_tasks: 7, eval_every: 4}}\n"
    )
    comparison = load_comparison(tmp_path / "compare.yaml")
    runs = [replace(MEASUREMENT, name=name, seed=s) for name in ("A*-PO", "GRPO") for s in (3, 4)]
    runs[0] = replace(runs[0], crowded_cores=True)
    first, *said = explanation(runs, comparison=comparison)
    assert first.startswith(
        "Measured: success in 16 episodes (50 after training) of split test of the environment "
        "shop, greedy, every 2 to 4 steps and after training. Model: small, 3 layers of "
    )
    assert first.endswith("Means over seeds 3, 4.")
    differing = "The runs differ in agent.max_response_tokens and training.max_tasks, too"
    rarely = "The runs are evaluated after 64 to 128 episodes of training"
    crowded = "In 1 of 4 runs other processes used the cores at the start"
    for words in (differing, rarely, crowded):
        assert [line for line in said[:5] if line.startswith(words)], said


def test_a_comparison_can_be_repeated_from_its_folder(tmp_path: Path, undrawn: None) -> None:
    given = tmp_path / "given"
    given.mkdir()
    (given / "base.yaml").write_text("seed: 0\ntraining: {eval_every: 1}\n")
    (given / "compare.yaml").write_text(SWEPT + "target: 0.5\n")
    before = load_comparison(given / "compare.yaml")
    runs = [replace(MEASUREMENT, name=name) for name in before.settings.runs]
    write_comparison(runs, tmp_path / "out", comparison=before)
    again = load_comparison(tmp_path / "out" / "comparison.yaml")
    assert again.configs() == before.configs()
    assert again.settings.target == [0.5]
    text = (tmp_path / "out" / "comparison.yaml").read_text() + "# mine"
    (tmp_path / "out" / "comparison.yaml").write_text(text)
    write_comparison(runs, tmp_path / "out", comparison=again)
    assert (tmp_path / "out" / "comparison.yaml").read_text() == text, "what was read stays"


def table_of(page: Path) -> list[dict[str, str]]:
    """The rows of the table in comparison.md, by column."""
    lines = [line for line in page.read_text().splitlines() if line.startswith("| ")]
    header, *rows = (re.split(r" (?<!\\)\| ", line.strip("| ")) for line in lines)
    return [dict(zip(header, row, strict=True)) for row in rows]


@pytest.mark.usefixtures("undrawn")
def test_with_a_budget_the_success_within_it_has_a_column_of_its_own(tmp_path: Path) -> None:
    settings = load_comparison(SHIPPED).settings
    limited = settings.model_copy(
        update={"budget": BudgetConfig(seconds=90.0), "runs": {"A*-PO": {}}}
    )
    write_comparison(
        [MEASUREMENT, replace(MEASUREMENT, seed=1)], tmp_path, comparison=of_shop(limited)
    )
    (row,) = table_of(tmp_path / "comparison.md")
    assert row["success within the budget"] == "95.0% (95.0% to 95.0%)"
    assert row["success after training"] == "97.0% (97.0% to 97.0%)"
    assert "memory are of the whole run" in (tmp_path / "comparison.md").read_text()
    assert '<td class="n">95.0%</td>' in (tmp_path / "comparison.html").read_text()
    _, results = Presentation(str(tmp_path / "comparison.pptx")).slides
    (table,) = [shape for shape in results.shapes if shape.has_table]
    width = sum(column.width for column in table.table.columns)
    assert width == pytest.approx(table.width, abs=Inches(0.01))


@pytest.mark.parametrize("name", ["A $x_$ B", "cost $5 and $10", "_GRPO", "_child0"])
def test_every_name_is_plain_text_in_the_legend(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    legends: list[list[tuple[str, bool]]] = []

    def read(figure: Figure) -> bytes:
        (legend,) = figure.legends
        legends.append([(text.get_text(), text.get_parse_math()) for text in legend.get_texts()])
        return png_bytes(figure)

    monkeypatch.setattr("ragen_apo.comparison.write.png_bytes", read)
    assert curves([MEASUREMENT, replace(MEASUREMENT, name=name)], axis="tokens")
    assert legends == [[(MEASUREMENT.name, False), (name, False)]]


def test_the_axes_and_the_page_say_what_is_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named: list[tuple[str, str]] = []

    def read(figure: Figure) -> bytes:
        (axes,) = figure.axes
        named.append((axes.get_ylabel(), axes.get_xlabel()))
        return b""

    monkeypatch.setattr("ragen_apo.comparison.write.png_bytes", read)
    monkeypatch.setattr("ragen_apo.comparison.write.comparison_slides", lambda *_, **__: b"")
    settings = SHOP.settings.model_copy(update={"runs": {"A*-PO": {}}, "seeds": [0, 1]})
    runs = [MEASUREMENT, replace(MEASUREMENT, seed=1)]
    write_comparison(runs, tmp_path, comparison=of_shop(settings))
    success = "success (greedy, 100 episodes)"
    assert named == [
        (success, "seconds, with Stage 1 and distillation, without evaluations"),
        (success, "generated tokens, with Stage 1, without evaluations"),
    ]
    html = (tmp_path / "comparison.html").read_text()
    assert html.count("<figcaption>Thick lines: means over the seeds") == 2
    assert "Thick lines: means over the seeds" in (tmp_path / "comparison.md").read_text()


@pytest.mark.usefixtures("undrawn")
def test_a_name_with_a_bar_stays_in_its_cell(tmp_path: Path) -> None:
    settings = load_comparison(SHIPPED).settings.model_copy(update={"runs": {"a|b": {}}})
    write_comparison([replace(MEASUREMENT, name="a|b")], tmp_path, comparison=of_shop(settings))
    (row,) = table_of(tmp_path / "comparison.md")
    assert row["run"] == r"a\|b"


def test_distillation_which_costs_no_tokens_does_not_lift_what_came_before_it() -> None:
    """Half of the tokens at the reference's success, the other half at that of the distilled."""
    heights = [(0, 0.5), (1000, 0.5), (1000, 0.9), (2000, 0.9)]
    points = [Point(0.0, tokens, success, step) for step, (tokens, success) in enumerate(heights)]
    run = replace(MEASUREMENT, points=points)
    assert run.mean_success(2000) == pytest.approx(0.7)
    assert run.mean_success(1000) == pytest.approx(0.5)


def test_what_a_run_reached_last_holds_until_the_end() -> None:
    assert MEASUREMENT.mean_success(2000) == pytest.approx((0.675 * 1000 + 0.95 * 1000) / 2000)
    assert MEASUREMENT.mean_success(500) == pytest.approx((0.4 + 0.675) / 2)
    assert (MEASUREMENT.best, MEASUREMENT.first_at(0.96)) == (0.95, None)


@pytest.mark.parametrize(
    ("own", "key"),
    [
        ("{seed: 3}", "seed"),
        ("{policy: {path: m}}", "policy.path"),
        ("{policy: {revision: v2}}", "policy.revision"),
        ("{warm_start: {}}", "warm_start"),
    ],
)
def test_what_makes_the_shared_reference_cannot_differ_between_runs(
    own: str, key: str, tmp_path: Path
) -> None:
    (tmp_path / "base.yaml").write_text("seed: 0")
    (tmp_path / "compare.yaml").write_text(f"base: base.yaml\nseeds: [0]\nruns: {{a: {own}}}")
    with pytest.raises(ConfigError, match=f"run 'a': {key} cannot differ between runs"):
        load_comparison(tmp_path / "compare.yaml")


def test_the_revision_of_a_model_is_that_of_the_reference_and_the_runs_have_a_folder(
    tmp_path: Path,
) -> None:
    base = "policy: {path: a/b, revision: v2}\nwarm_start: {copy: {max_steps: 0}}"
    (tmp_path / "base.yaml").write_text(base)
    (tmp_path / "compare.yaml").write_text("base: base.yaml\nseeds: [0]\nruns: {a: {}}")
    comparison = load_comparison(tmp_path / "compare.yaml")
    assert comparison.reference(0).policy.revision == "v2"
    policy = comparison.run("a", 0, reference=tmp_path).policy
    assert (policy.path, policy.revision) == (str(tmp_path), None)


def test_the_mean_over_seeds_is_of_the_same_evaluations() -> None:
    """Although one seed has none of what was distilled, and another stopped early."""
    whole = {REFERENCE: (0.0, 0.1), DISTILLED: (5.0, 0.5), 1: (9.0, 0.6), 2: (11.0, 0.8)}
    others = {REFERENCE: (0.0, 0.3), 1: (7.0, 0.2), 3: (20.0, 0.4)}
    assert write.mean_line([whole, others]) == [
        (0.0, pytest.approx(0.2)),
        (8.0, pytest.approx(0.4)),
    ]
