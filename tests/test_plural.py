"""`1 task` and `2 tasks`, in all that a run says and writes for people."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ragen_apo import api
from ragen_apo.cli.evaluation import print_evaluation
from ragen_apo.plural import counted
from tests import factories

ONE_OF_SEVERAL = re.compile(r"(?<![\w.,@:/+-])1 (?:[a-z-]+ ){0,2}?[a-z]{2,}[a-rt-z]s\b")
"""`1 turns`, `1 held-out tasks`; not `1 success`."""


@pytest.mark.parametrize(
    ("number", "noun", "plural", "said"),
    [
        (0, "task", "", "0 tasks"),
        (1, "task", "", "1 task"),
        (2_000, "held-out task", "", "2,000 held-out tasks"),
        (1, "box", "boxes", "1 box"),
        (2, "box", "boxes", "2 boxes"),
    ],
)
def test_a_noun_has_the_form_of_its_number(number: int, noun: str, plural: str, said: str) -> None:
    assert counted(number, noun, plural) == said


@pytest.mark.slow
def test_a_run_of_one_task_one_turn_and_one_step_speaks_of_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = factories.Sayings()
    config = factories.config(
        "--environment.max_turns=1",
        "--agent.max_response_tokens=3",
        "--warm_start.demonstrations.num_steps=1",
        "--values.adaptive=false",
        "--distillation.enabled=true",
        "--distillation.num_epochs=1",
        "--reference.refresh_every_steps=null",
        "--training.max_tasks=1",
        "--training.max_steps=1",
        "--training.tasks_per_step=1",
        "--training.eval_every=1",
        "--training.eval_episodes=1",
        "--evaluation.num_episodes=1",
    )
    run = factories.run(config, tmp_path / "run", progress=said)
    results = api.evaluate(run.path, progress=False)
    print_evaluation(results, policy="apo", whose="policy")
    texts = ["\n".join(said.lines), capsys.readouterr().out]
    paths = api.write_report(run.path)
    texts += [p.read_text() for p in paths if p.suffix in (".md", ".html", ".tex")]
    assert {match[0] for text in texts for match in ONE_OF_SEVERAL.finditer(text)} == set()
