"""The pages of `ragen-apo view`, as a browser without JavaScript gets them."""

import html
import json
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from ragen_apo.config import resolved_yaml
from ragen_apo.config.api_model import api_model_config
from ragen_apo.config.yaml_text import dump_yaml
from ragen_apo.files import append_json_line, read_json_lines
from ragen_apo.report.load import load_run
from ragen_apo.report.plots import panels
from ragen_apo.run_directory import RunDirectory
from tests import factories
from tests.command_line import snapshot
from tests.factories import episode, played, task, turn
from tests.sweeps import quick_first
from tests.web.view_runs import HOSTILE, client, get, some_episodes, write_run

TITLE = re.compile(r"<figcaption><b>(.*?)</b>")
LINK = re.compile(r'href="(/[^"]*)"')
MOST_OF_A_KIND = 15


@pytest.mark.slow
def test_every_link_of_every_kind_of_page_leads_somewhere_and_nothing_is_written(
    trained_runs: Path,
) -> None:
    """Of each kind the first pages are read: those of two runs, with every filter and order."""
    kinds, found = Counter[str](), ["/", "/compare?a=first&b=group%2Fsecond"]
    before = snapshot(trained_runs)
    with client(trained_runs) as pages:
        for path in found:  # which grows
            kind = path.split("?")[0]
            if kinds[kind] == MOST_OF_A_KIND:
                continue
            kinds[kind] += 1
            answer = pages.get(path)
            assert answer.status_code == 200, f"{path}: {answer.text[-300:]}"
            links = {html.unescape(link) for link in LINK.findall(answer.text)}
            found += sorted(links - set(found))
    assert kinds.keys() >= {"/run", "/episodes", "/episode", "/failures", "/values", "/samples"}
    assert kinds.keys() >= {"/compare", "/side"}
    assert snapshot(trained_runs) == before


def test_the_list_says_state_algorithm_and_results(trained_runs: Path) -> None:
    page = get(client(trained_runs), "/")
    for text in ("first", "group/second", "finished", "A*-PO", "shop", "step 6 of 6"):
        assert text in page
    found = get(client(trained_runs), "/", find="group")
    assert "group/second" in found
    assert 'run=first"' not in found


def test_only_what_trains_is_waited_for(tmp_path: Path) -> None:
    waiting = "No curve yet"
    run = write_run(tmp_path / "one", some_episodes(2))
    assert waiting in get(client(tmp_path), "/run", run="one")
    (run / "config.yaml").unlink()
    RunDirectory(run).api_config.write_text("api: {model: m, base_url: 'http://host/v1'}\n")
    assert waiting not in get(client(tmp_path), "/run", run="one")


def test_a_run_shows_curves_episodes_and_where_the_time_went(trained_runs: Path) -> None:
    page = get(client(trained_runs), "/run", run="group/second")
    for text in ("Success rate", "Residual variance", "Newest episodes", "Best episodes"):
        assert text in page
    for text in ("stage 2", "tokens per second", "6 of 6"):
        assert text in page
    assert "data-live" not in page


@pytest.mark.parametrize("algorithm", ["apo", "ppo"])
def test_curves_have_the_titles_that_they_have_in_the_report(
    algorithm: str, tmp_path: Path
) -> None:
    names = ("kl_per_sequence", "residual_variance", "explained_variance", "known_turn_share")
    config = f"algorithm: {algorithm}\n"
    rows = [dict.fromkeys(names, 0.5)]
    run = write_run(tmp_path / "mine", some_episodes(2), metrics=rows, config=config)
    shown = TITLE.findall(get(client(tmp_path), "/run", run="mine"))
    declared = {panel.key: panel.title for panel, _ in panels(load_run(run))}
    assert [html.unescape(title) for title in shown] == [
        declared[name] for name in names if name in declared
    ]
    assert len(shown) == 2


def test_tasks_of_training_are_not_called_held_out(tmp_path: Path) -> None:
    run = write_run(tmp_path / "runs" / "mine", some_episodes(3))
    file = run / "evaluation" / "results.json"
    for split, words in (("test", "held-out tasks"), ("train", "tasks of split “train”")):
        file.write_text(json.dumps(json.loads(file.read_text()) | {"split": split}))
        page = get(client(tmp_path / "runs"), "/run", run="mine")
        assert f"success on {words}" in page
    assert "held" not in page.lower()


def test_a_run_says_what_its_curves_belong_to(tmp_path: Path) -> None:
    rows = [{"step": step, "reference_version": version} for step, version in ((1, 0), (2, 1))]
    run = write_run(tmp_path / "runs" / "mine", metrics=rows)
    (run / "distillation.jsonl").write_text('{"reference_version": 0, "step": 1, "loss": 0.5}\n')
    page = get(client(tmp_path / "runs"), "/run", run="mine")
    assert "the policy imitated the reference’s own good episodes" in page
    assert "The policy became the new reference 1 time (step 1);" in page


def test_a_run_that_trains_is_asked_again(tmp_path: Path) -> None:
    row = {"step": 3, "rollout_seconds": 4.0, "training_seconds": 6.0, "success_rate": 0.5}
    run = write_run(tmp_path / "one", metrics=[row | {"num_generated_tokens": 200}])
    pages = client(tmp_path)
    page = get(pages, "/run", run="one")
    assert 'data-live="/run/live?run=one"' in page
    assert "about 30 s" in page  # 3 of 6 steps, 10 s each
    assert "<b>50</b>" in page
    append_json_line(run / "metrics.jsonl", row | {"step": 4, "num_generated_tokens": 400})
    part = get(pages, "/run/live", run="one")
    assert "<html" not in part
    assert "4 of 6" in part
    assert "<b>100</b>" in part


def test_a_run_that_stopped_early_has_nothing_left(tmp_path: Path) -> None:
    row = {"step": 3, "rollout_seconds": 4.0, "training_seconds": 6.0, "success_rate": 0.5}
    run = write_run(tmp_path / "one", metrics=[row])
    (run / "run.json").write_text(json.dumps({"early_stop": {"step": 3}}))
    assert "left of Stage 2" not in get(client(tmp_path), "/run", run="one")


def test_a_resumed_run_shows_the_number_of_steps_that_it_has_now(tmp_path: Path) -> None:
    row = {"step": 7, "rollout_seconds": 4.0, "training_seconds": 6.0, "success_rate": 0.5}
    run = write_run(tmp_path / "one", metrics=[row])
    record = {"configuration": {"training": {"max_steps": 6}}}
    (run / "config.yaml").write_text("training: {max_steps: 9}\n")
    for attempts, shown in ((1, "7 of 6"), (2, "7 of 9")):
        (run / "run.json").write_text(json.dumps(record | {"attempts": attempts}))
        assert shown in get(client(tmp_path), "/run", run="one")


def test_a_page_beyond_the_last_is_the_last(trained_runs: Path) -> None:
    pages = client(trained_runs)
    assert "no run in this folder" not in get(pages, "/", page="9")
    assert "No task of this kind" not in get(pages, "/compare", a="first", b="first", page="9")
    assert "no samples yet" not in get(pages, "/values", run="first", page="9")
    assert get(pages, "/values", run="first", page="9") == get(pages, "/values", run="first")


def test_a_training_episode_has_tokens_values_and_residuals(trained_runs: Path) -> None:
    row = read_json_lines(trained_runs / "first" / "rollouts.jsonl")[2]
    page = get(client(trained_runs), "/episode", run="first", source="training", number=2)
    assert "V* " in page
    assert "residual" in page
    assert page.count('class="tok ') >= sum(len(turn["token_ids"]) for turn in row["turns"])
    assert "Not stored" not in page
    assert f"log π {row['turns'][0]['logprobs'][0]:.3f}" in page


def test_a_long_episode_is_paged_above_and_below_and_ends_on_its_last_page(tmp_path: Path) -> None:
    turns = [turn(observation="x" * 4000) for _ in range(60)]
    end = "the very end" + 4000 * "."
    write_run(tmp_path / "one", [episode(*turns, final_observation=end)])
    pages = client(tmp_path)
    first = get(pages, "/episode", run="one")
    assert first.count('aria-label="Pages"') == 2
    assert first.index('aria-label="Pages"') < first.index('id="turn-1"')
    assert "Turns 1 to 25 of 60" in first
    assert "the very end" not in first
    assert "the very end" in get(pages, "/episode", run="one", page=3)
    text = get(pages, "/text", run="one", field="observation", turn=30)
    (back,) = re.findall(r'href="([^"]*)">back to the episode', text)
    assert back.endswith("page=2#turn-30")
    assert 'id="turn-30"' in get(pages, html.unescape(back).split("#")[0])
    text = get(pages, "/text", run="one", field="final_observation")
    (back,) = re.findall(r'href="([^"]*)">back to the episode', text)
    assert back.endswith("page=3#turn-60")
    assert get(pages, "/episode", run="one", page=9), "a page without turns"


def test_a_held_out_episode_says_what_is_not_stored(trained_runs: Path) -> None:
    page = get(client(trained_runs), "/episode", run="first", number=1)
    assert "Not stored" in page
    assert "an evaluation keeps their number only" in page


def test_an_episode_says_what_the_environment_measured(tmp_path: Path) -> None:
    write_run(tmp_path / "one", [replace(some_episodes(1)[0], metrics={"tests_passed": 3})])
    assert "tests passed 3<" in get(client(tmp_path), "/episode", run="one", number=0)


def test_a_run_without_kept_episodes_says_so(tmp_path: Path) -> None:
    write_run(tmp_path / "one", some_episodes(3), metrics=[{"step": 1, "success_rate": 0.5}])
    assert "keeps no episodes of training" in get(client(tmp_path), "/run", run="one")
    answer = client(tmp_path).get("/episodes", params={"run": "one", "source": "training"})
    assert (answer.status_code, "training.keep_episodes" in answer.text) == (404, True)


def test_a_rate_of_tokens_that_no_number_holds_is_left_out(tmp_path: Path) -> None:
    row = {"step": 1, "num_generated_tokens": 1e300, "rollout_seconds": 1e-300}
    write_run(tmp_path / "one", some_episodes(1), metrics=[row])
    assert "tokens per second, last step" in get(client(tmp_path), "/run", run="one")


@pytest.mark.parametrize(
    ("baseline", "name"),
    [("v_star", "V*"), ("mean", "mean of the reference"), ("zero", "baseline")],
)
def test_what_an_ablation_subtracts_is_not_called_v_star(
    baseline: str, name: str, tmp_path: Path
) -> None:
    config = factories.config(f"--values.baseline={baseline}")
    run = write_run(tmp_path / "one", some_episodes(1), config=resolved_yaml(config))
    (row,) = read_json_lines(run / "evaluation" / "episodes.jsonl")
    row["turns"][0]["v_star"] = 0.25
    append_json_line(run / "rollouts.jsonl", {**row, "step": 1})
    page = get(client(tmp_path), "/episode", run="one", source="training", number=0)
    assert f"{name} 0.250<" in page


def test_episodes_are_filtered_ordered_and_paged_by_the_address(tmp_path: Path) -> None:
    write_run(tmp_path / "one", some_episodes(120, every=3))
    pages = client(tmp_path)
    first = get(pages, "/episodes", run="one")
    assert "task number 49<" in first
    assert "task number 50<" not in first
    last = get(pages, "/episodes", run="one", page=3)
    assert "task number 119<" in last
    failed = get(pages, "/episodes", run="one", outcome="failed")
    assert "40 episodes" in failed
    assert "task number 1<" not in failed
    pattern = get(pages, "/episodes", run="one", failure="unreadable", order="newest")
    assert pattern.index("task number 117<") < pattern.index("task number 114<")
    found = get(pages, "/episodes", run="one", find="NUMBER 77")
    assert "1 episode." in found
    assert "task number 77<" in found
    worst = get(pages, "/episodes", run="one", order="worst")
    assert worst.index("task number 117<") < worst.index("task number 1<")


def test_failures_come_by_pattern_with_advice(tmp_path: Path) -> None:
    write_run(tmp_path / "one", some_episodes(9, every=3))
    page = get(client(tmp_path), "/failures", run="one")
    assert "Unreadable" in page
    assert "3 of 9, 33.3%" in page
    assert "<code>agent.max_response_tokens</code>" in page
    assert "failure=unreadable" in page


def test_a_comparison_names_failures_in_the_words_of_each_environment(tmp_path: Path) -> None:
    for name, words in (("a", "mumbled"), ("b", "stammered")):
        run = write_run(tmp_path / name, some_episodes(2, every=3))
        file = run / "evaluation" / "results.json"
        results = json.loads(file.read_text())
        results["failures"]["unreadable"]["words"] = {"name": words}
        file.write_text(json.dumps(results))
    page = get(client(tmp_path), "/compare", a="a", b="b")
    assert ("mumbled" in page, "stammered" in page, "unreadable" in page) == (True, True, False)


def test_a_finished_run_whose_curve_has_lost_its_end_says_so_and_shows_the_rest(
    tmp_path: Path,
) -> None:
    rows = [{"step": step, "loss": 1.0 / step} for step in (1, 2, 3)]
    run = RunDirectory(write_run(tmp_path / "one", some_episodes(2), metrics=rows))
    pages = client(tmp_path)
    assert "cut off" not in get(pages, "/run", run="one")
    run.metrics.write_text(run.metrics.read_text()[:-5])
    page = get(pages, "/run", run="one")
    assert "metrics.jsonl, line 3 is cut off" in page
    assert "steps 1 to 2" in page
    run.results.unlink()
    assert "cut off" not in get(pages, "/run", run="one"), "it is being written"


@pytest.mark.parametrize(("kept", "found"), [(4, "4 episodes"), (0, "0 episodes")])
def test_an_evaluation_that_has_lost_episodes_says_so(
    kept: int, found: str, tmp_path: Path
) -> None:
    for name in ("one", "whole"):
        run = RunDirectory(write_run(tmp_path / name, some_episodes(6, every=1)))
    file = RunDirectory(tmp_path / "one").episodes
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(lines[:kept]) + lines[kept][: 20 * kept])
    pages = client(tmp_path)
    for path in ("/run", "/episodes", "/failures", "/compare"):
        page = get(pages, path, run="one", a="whole", b="one")
        assert f"episodes.jsonl has {found}, and {run.results.parents[2]}" in page
        assert "counts 6" in page
        assert "episodes.jsonl has" not in get(pages, path, run="whole", a="whole", b="whole")
    assert "6 of 6, 100.0%" in get(pages, "/failures", run="one")
    file.write_text("".join(lines[:3]))
    assert "episodes.jsonl has 3 episodes" in get(pages, "/failures", run="one")


def test_an_evaluation_of_a_model_behind_an_api_says_how_far_it_is(tmp_path: Path) -> None:
    run = RunDirectory(write_run(tmp_path / "asked"))
    run.config.unlink()
    api = "api: {model: m, base_url: 'http://host/v1'}"
    run.api_config.write_text(f"{api}\nevaluation: {{num_episodes: 20}}\n")
    pages = client(tmp_path)
    assert "0 answers so far, in 0 of up to 20 episodes" in get(pages, "/")
    for number in (0, 0, 3):
        append_json_line(run.answers, {"episode": number, "turn": 0, "answer": {}})
    with run.answers.open("a") as stream:
        stream.write('{"episode": 4')  # is being written
    for path in ("/", "/run"):
        assert "3 answers so far, in 2 of up to 20 episodes" in get(pages, path, run="asked")


def test_the_order_of_a_list_has_names_that_make_sense(tmp_path: Path) -> None:
    write_run(tmp_path / "one", some_episodes(2))
    page = get(client(tmp_path), "/episodes", run="one")
    assert re.findall("<option[^>]*>([a-z ]+(?:order|first))<", page) == [
        *("file order", "newest first", "best first", "worst first", "longest first")
    ]


def test_a_page_says_which_tokens_were_read(tmp_path: Path) -> None:
    """A policy's are the new ones of the turn; servers count the whole conversation."""
    for name in ("run", "asked"):
        run = RunDirectory(write_run(tmp_path / name, some_episodes(2)))
    run.config.rename(run.api_config)
    run.api_config.write_text("api: {model: m, base_url: 'http://host/v1'}\n")
    pages = client(tmp_path)
    assert re.search(r"\d tokens written after \d new ones read", get(pages, "/episode", run="run"))
    page = get(pages, "/episode", run="asked")
    assert re.search(r"\d tokens written after \d of the whole conversation read", page)


def test_two_runs_are_compared_on_their_common_tasks(tmp_path: Path) -> None:
    write_run(tmp_path / "a", some_episodes(6, every=2))
    write_run(tmp_path / "b", [*some_episodes(4, every=3), played("another")])
    pages = client(tmp_path)
    page = get(pages, "/compare", a="a", b="b")
    # a fails 0 and 2, b fails 0 and 3; 4 and 5 are not in b.
    for text in ("All 4", "Only A solved 1", "Only B solved 1", "Both 1", "Neither 1"):
        assert text in page
    # (2 - 2) / 6 in the middle; 1.96 sqrt((4/6 - 0) / 6) = 0.653
    assert "<b>+0.0 points, 95% interval −65.3 to +65.3</b>" in page
    only = get(pages, "/compare", a="a", b="b", outcome="first")
    assert "task number 3" in only
    assert "task number 1" not in only
    side = get(pages, "/side", a="a", b="b", first=3, second=3)
    assert side.count("task number 3") == 1
    assert side.count("page 0") == 2
    answer = pages.get("/side", params={"a": "a", "b": "b", "first": 3, "second": 1})
    assert answer.status_code == 400


def test_episodes_of_one_task_are_no_pairs_with_an_interval(tmp_path: Path) -> None:
    """Of the two common tasks one is played twice: 2 of 3 against 0 of 3."""
    once, lost = played("again"), played("again", rewards=[-0.5])
    write_run(tmp_path / "a", [once, once, played("b", rewards=[-0.5])])
    write_run(tmp_path / "b", [lost, lost, played("b", rewards=[-0.5])])
    page = get(client(tmp_path), "/compare", a="b", b="a")
    assert "Success of A minus that of B on these tasks: <b>−66.7 points</b>." in page


def test_two_runs_that_did_not_play_the_same_say_so(tmp_path: Path) -> None:
    """The ids of tasks may be the same in a larger catalogue or with more turns."""
    for name, size in {"a": 12, "b": 12, "c": 50}.items():
        config = f"environment: {{name: shop, num_products: {size}}}"
        run = write_run(tmp_path / name, some_episodes(2), config=config)
    file = run / "evaluation" / "results.json"
    searched = json.loads(file.read_text()) | {"evaluation": {"search": {"width": 2}}}
    file.write_text(json.dumps(searched))
    pages = client(tmp_path)
    assert "configurations differ" not in get(pages, "/compare", a="a", b="b")
    page = get(pages, "/compare", a="a", b="c")
    assert (
        "Their configurations differ in what was played: environment.num_products: A 12, B 50;"
        in page
    )
    assert "evaluation.search: A null, B {" in page


def test_a_run_and_a_model_behind_an_api_that_was_given_its_configuration_played_the_same(
    tmp_path: Path,
) -> None:
    """Its results may be older than their field `evaluation`, and it is told the form."""
    write_run(tmp_path / "run", some_episodes(2), config=resolved_yaml(factories.config()))
    for name, changes in {"cold": (), "warm": ("--evaluation.temperature=1",)}.items():
        config = api_model_config(
            factories.config(*changes),
            model="m",
            base_url="http://x/v1",
            max_tokens=9,
            extra_body={},
        )
        folder = RunDirectory(write_run(tmp_path / name, some_episodes(2)))
        folder.config.unlink()
        folder.api_config.write_text(dump_yaml(config.written()))
    pages = client(tmp_path)
    assert "configurations" not in get(pages, "/compare", a="run", b="cold")
    for a in ("run", "cold"):
        page = get(pages, "/compare", a=a, b="warm")
        assert "differ in what was played: evaluation.temperature: A 0.0, B 1.0." in page


def test_runs_whose_agents_were_told_or_paid_otherwise_say_so(tmp_path: Path) -> None:
    for name, agent in {
        "a": "{}",
        "b": "{format_penalty: -0.5}",
        "c": "{system_prompt: hi}",
    }.items():
        write_run(tmp_path / name, some_episodes(2), config=f"agent: {agent}")
    pages = client(tmp_path)
    page = get(pages, "/compare", a="a", b="b")
    assert "differ in what was played: agent.format_penalty: A -0.05, B -0.5." in page
    assert "agent.system_prompt: A &#34;none&#34;, B &#34;hi&#34;." in get(
        pages, "/compare", a="a", b="c"
    )


def test_an_option_that_one_run_writes_out_may_be_the_default_of_the_other(tmp_path: Path) -> None:
    for name, option in {"a": "", "b": ", max_turns: 10", "c": ", num_products: 9"}.items():
        config = f"environment: {{name: shop{option}}}"
        write_run(tmp_path / name, some_episodes(2), config=config)
    page = get(client(tmp_path), "/compare", a="a", b="b")
    assert (
        "Their configurations may differ in what was played: "
        "environment.max_turns: A left at its default, B 10."
    ) in page


def test_the_values_of_a_task_lead_to_its_samples(trained_runs: Path) -> None:
    pages = client(trained_runs)
    page = get(pages, "/values", run="first")
    assert "warm_start.demonstrations" not in page, "Stage 1 counts faults and may advise otherwise"
    link = next(html.unescape(each) for each in LINK.findall(page) if "/samples" in each)
    samples = get(pages, link)
    sample = next(html.unescape(each) for each in LINK.findall(samples) if "/episode" in each)
    shown = get(pages, sample)
    assert "The reference in Stage 1" in shown
    assert 'class="tok ' in shown
    assert "these tokens are the reference’s own" in shown


@pytest.mark.parametrize("name", quick_first(["text", "huge", "many"]))
def test_hostile_text_stays_text_and_pages_stay_small(name: str, tmp_path: Path) -> None:
    text = {"text": HOSTILE, "huge": HOSTILE * 8000, "many": HOSTILE}[name]
    assert name != "huge" or len(text) > 500_000
    exchange = turn(
        observation=text, response=text, thought=text, action=text, flags=(text, "\udc80")
    )
    fields = {"instruction": text, "category": text, "payload": {text: text}}
    hostile = episode(
        *[exchange] * (500 if name == "many" else 1), task=task(**fields), final_observation=text
    )
    write_run(tmp_path / "one", [hostile], metrics=[{"step": 1, text: 3, "loss": text}])
    write_run(tmp_path / "two", [hostile])
    pages = client(tmp_path)
    place = {"run": "one", "number": "0"}
    for page in (
        get(pages, "/"),
        get(pages, "/run", run="one"),
        get(pages, "/episodes", run="one", find="<script>"),
        get(pages, "/episode", **place),
        get(pages, "/text", field="observation", turn=1, **place),
        get(pages, "/text", field="final_observation", **place),
        get(pages, "/failures", run="one"),
        get(pages, "/compare", a="one", b="two"),
        get(pages, "/side", a="one", b="two", first=0, second=0),
    ):
        assert "<script>alert" not in page
        assert "<img" not in page
        assert "{{" not in page or "{{ 7 * 7 }}" in page
        assert not {"\x1b", "\u202e", "\udc80"} & set(page)
        assert len(page) < 1_000_000


def test_a_long_text_is_read_in_parts(tmp_path: Path) -> None:
    text = "".join(f"{number:06d} " for number in range(30_000))
    write_run(tmp_path / "one", [episode(turn(observation=text))])
    pages = client(tmp_path)
    shown = get(pages, "/episode", run="one")
    assert "all 210,000 characters" in shown
    link = next(html.unescape(each) for each in LINK.findall(shown) if "/text" in each)
    assert "000000 " in get(pages, link)
    assert "029999 " in get(pages, link + "&page=6")


def test_names_of_runs_and_addresses_are_text_too(tmp_path: Path) -> None:
    name = "<img src=x>&run='\""
    write_run(tmp_path / name, some_episodes(2))
    page = get(client(tmp_path), "/")
    assert "<img" not in page
    link = next(html.unescape(each) for each in LINK.findall(page) if "/run?" in each)
    assert "<img" not in get(client(tmp_path), link)


@pytest.mark.parametrize(
    "address",
    [
        "/episodes?run=one&page=x",
        "/episodes?run=one&page=-1",
        "/episodes?run=one&order=sideways",
        "/episode?run=one&source=elsewhere",
        "/episodes?run=one&page=" + "9" * 5000,
        "/episodes?run=one&page=" + "0" * 20 + "9" * 900,
        "/compare?a=one&b=one&outcome=maybe",
    ],
)
def test_an_address_that_makes_no_sense_is_answered_as_such(address: str, tmp_path: Path) -> None:
    write_run(tmp_path / "one", some_episodes(2))
    assert client(tmp_path).get(address).status_code == 400


@pytest.mark.parametrize(
    "address",
    [
        "/episode?run=one&number=2",
        "/episode?run=one&source=reference&task=x&conditions=y",
        "/values?run=one",
        "/samples?run=one&task=x",
        "/text?run=one&field=payload",
    ],
)
def test_what_is_not_there_is_not_found(address: str, tmp_path: Path) -> None:
    write_run(tmp_path / "one", some_episodes(2))
    assert client(tmp_path).get(address).status_code == 404


@pytest.mark.parametrize(
    "file", ["run.json", "evaluation/results.json", "metrics.jsonl", "warm_start.jsonl"]
)
def test_a_damaged_run_is_in_the_list_with_its_reason(file: str, tmp_path: Path) -> None:
    write_run(tmp_path / "good", some_episodes(2))
    damaged = write_run(tmp_path / "damaged", some_episodes(2))
    (damaged / file).write_text("nonsense\nnonsense\n")
    page = get(client(tmp_path), "/")
    assert "good" in page
    assert "damaged" in page
    assert Path(file).name in page


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH"])
def test_nothing_can_be_changed(method: str, tmp_path: Path) -> None:
    write_run(tmp_path / "one", some_episodes(1))
    headers = {"Origin": "http://127.0.0.1"}
    assert client(tmp_path).request(method, "/run?run=one", headers=headers).status_code == 405


def test_an_empty_folder_says_how_to_fill_it(tmp_path: Path) -> None:
    assert "ragen-apo train" in get(client(tmp_path), "/")
