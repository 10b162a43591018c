"""The report of a model behind an API: it says who played, and nothing of training."""

from __future__ import annotations

import dataclasses
import io
import re
from pathlib import Path

import pytest
from pptx import Presentation

import ragen_apo
from ragen_apo.errors import RunDirectoryError
from ragen_apo.report.api_model import ADVICE, api_model, cost_in_words
from ragen_apo.report.failure_analysis import failure_analysis
from ragen_apo.report.findings import headline, key_sentences
from ragen_apo.report.load import RunData, load_run
from ragen_apo.report.page import page
from ragen_apo.report.publish import push_to_hub
from ragen_apo.report.slides import slides
from ragen_apo.report.tables import failure_words, method_rows, summary_csv
from ragen_apo.web.shop.goals import agent_episodes
from tests.chat_server import SHOP, perfect_shopper, says, serving

HOSTILE = "<img src=x>/tiny"

pytestmark = pytest.mark.usefixtures("undrawn")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """24 episodes, some of them answered by something that is no action."""
    out = tmp_path_factory.mktemp("asked") / "evaluation"

    def sometimes(body: dict) -> str:
        lost = "brown" in body["messages"][1]["content"]
        return "I would buy it." if lost else perfect_shopper(body)

    with serving(sometimes) as server:
        ragen_apo.evaluate_api(
            HOSTILE,
            out,
            base_url=server.url,
            environment=SHOP,
            progress=False,
            evaluation={"split": "all", "num_episodes": 24},
        )
    return out


@pytest.fixture
def run(folder: Path) -> RunData:
    return load_run(folder)


def test_the_model_and_its_server_are_named(run: RunData) -> None:
    asked = api_model(run)
    assert asked is not None
    assert asked.name == HOSTILE
    assert asked.server.startswith("127.0.0.1:")
    assert method_rows(run)[0].label == f"{HOSTILE} (API)"
    assert summary_csv(run).splitlines()[1].startswith(f"{HOSTILE} (API),")
    assert headline(run).startswith(f"{HOSTILE} solves ")


def test_the_findings_say_who_played_and_what_it_cost(run: RunData) -> None:
    told = " ".join(key_sentences(run))
    usage = run.results["api"]
    assert f"episodes are those of {HOSTILE} behind the API of 127.0.0.1:" in told
    assert f"{usage['answers']} answers cost {7 * usage['answers']:,} prompt tokens" in told
    assert f"Of its answers {usage['format_errors']} had no readable action." in told


@pytest.mark.parametrize(
    ("untold", "words"),
    [
        (0, "9 answers cost 63 prompt tokens and 9 completion tokens"),
        (4, "9 answers cost at least 63 prompt tokens and 9 completion tokens"),
        (9, "9 answers, of which the server did not say what they cost"),
    ],
)
def test_a_cost_that_the_server_did_not_say_is_not_called_nothing(untold: int, words: str) -> None:
    usage = {"answers": 9, "prompt_tokens": 63, "completion_tokens": 9}
    assert cost_in_words({**usage, "answers_without_usage": untold}) == words


def test_nobody_is_told_to_train_a_model_behind_an_api(run: RunData) -> None:
    """The words of the shop are for agents that are trained."""
    declared = run.results["failures"]["wrong_final_action"]["words"]
    assert "train longer" in declared["advice"]
    found = failure_words(run, "wrong_final_action")
    assert (found.name, found.advice) == (declared["name"], ADVICE["wrong_final_action"])


def test_nothing_is_said_of_training(run: RunData) -> None:
    html = page(run, curves=[])
    presentation = Presentation(io.BytesIO(slides(run)))
    shown = [
        s.text_frame.text for slide in presentation.slides for s in slide.shapes if s.has_text_frame
    ]
    for text in (html, failure_analysis(run), *shown):
        for word in ("not trained", "was trained", "A*-PO", "A\u2217-PO", "Stage 2", "warm-start"):
            assert word not in text
    assert len(presentation.slides) == 1


def test_the_page_shows_names_as_text_and_has_the_settings(run: RunData) -> None:
    html = page(run, curves=[])
    assert "<img src=x>" not in html
    assert "&lt;img src=x&gt;/tiny" in html
    assert "evaluation.yaml, fully resolved" in html
    assert 'href="#training"' not in html


def test_its_name_is_text_in_the_failure_analysis(run: RunData) -> None:
    first = failure_analysis(run).splitlines()[2]
    assert first.startswith(r"The episodes are those of \<img src=x\>/tiny behind the API of")


def test_there_is_nothing_to_publish(folder: Path) -> None:
    with pytest.raises(
        RunDirectoryError, match="model behind an API, which has nothing to publish"
    ):
        push_to_hub(folder, "me/tiny")


def test_advice_is_what_can_be_done_without_training(run: RunData) -> None:
    assert run.results["failures"]["unreadable"]["count"] > 0
    neutral = dataclasses.replace(run, results={**run.results, "failures": {}})
    assert "`--max-turns`" in failure_words(neutral, "timeout").advice
    assert "`--max-tokens`" in failure_words(neutral, "unreadable").advice


def test_the_episodes_have_the_tokens_that_were_paid_for(run: RunData) -> None:
    turn = run.episodes[0]["turns"][0]
    assert (turn["num_prompt_tokens"], turn["num_response_tokens"]) == (7, 3)
    assert 'data-read="tokens of the whole conversation"' in page(run, curves=[])


@pytest.mark.slow
def test_all_files_of_a_report_are_written(folder: Path) -> None:
    paths = ragen_apo.write_report(folder)
    names = {path.name for path in paths}
    assert names == {
        "summary.csv",
        "summary.tex",
        "by_category.png",
        "failures.png",
        "failure_analysis.md",
        "slides.pptx",
        "report.html",
    }


def test_credentials_that_somebody_wrote_into_the_settings_are_not_shown_as_the_server(
    tmp_path: Path, folder: Path
) -> None:
    (tmp_path / "evaluation.yaml").write_text("api: {model: m, base_url: 'http://a:b@host/v1'}")
    (tmp_path / "evaluation").symlink_to(folder / "evaluation")
    asked = api_model(load_run(tmp_path))
    assert asked is not None
    assert asked.server == "host"


def test_an_evaluation_that_was_interrupted_says_how_it_goes_on(tmp_path: Path) -> None:
    (tmp_path / "evaluation.yaml").write_text("api: {model: m, base_url: 'http://host/v1'}")
    command = (
        "ragen-apo evaluate --api-model m --base-url http://host/v1 --max-tokens ... "
        f"--config {tmp_path}/evaluation.yaml --out {tmp_path}"
    )
    for read in (ragen_apo.write_report, ragen_apo.episodes, agent_episodes):
        with pytest.raises(RunDirectoryError, match=re.escape(f"`{command}`")):
            read(tmp_path)


@pytest.mark.parametrize("text", ["api: {base_url: 'http://me:secret@host/v1'}", "api: 3", "[", ""])
def test_settings_that_were_edited_give_a_hint_without_what_is_secret(
    text: str, tmp_path: Path
) -> None:
    (tmp_path / "evaluation.yaml").write_text(text)
    with pytest.raises(RunDirectoryError) as caught:
        ragen_apo.episodes(tmp_path)
    assert "--api-model ... --base-url ..." in str(caught.value)
    assert "secret" not in str(caught.value)


def test_a_model_without_any_answer_in_the_form_has_a_report(tmp_path: Path) -> None:
    with serving(says(None)) as server:
        ragen_apo.evaluate_api(
            "mute",
            tmp_path / "out",
            base_url=server.url,
            environment=SHOP,
            progress=False,
            evaluation={"num_episodes": 2},
        )
    told = " ".join(key_sentences(load_run(tmp_path / "out")))
    assert "6 were empty" in told
