import io

import pytest
from rich.console import Console

from ragen_apo import console as console_module
from ragen_apo.console import ConsoleProgress, PrintableConsole


def console(*, terminal: bool, width: int = 100) -> Console:
    return Console(file=io.StringIO(), force_terminal=terminal, width=width, color_system=None)


def text_of(target: Console) -> str:
    assert isinstance(target.file, io.StringIO)
    return target.file.getvalue()


def test_without_a_terminal_each_phase_ends_in_one_plain_line() -> None:
    target = console(terminal=False)
    with ConsoleProgress(target) as progress:
        progress.start("copy", 10)
        progress.update(4, "loss 1.0")
        progress.update(10, "loss 0.5")
        progress.start("stage 2", 3)
        progress.update(3)
    lines = text_of(target).splitlines()
    assert lines == [
        "warm start: copying: 10/10  loss 0.5  in 0 s",
        "stage 2: training: 3/3    in 0 s",
    ]


def test_a_long_phase_shows_that_it_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    target = console(terminal=False)
    monkeypatch.setattr(console_module, "PLAIN_LINE_EVERY_SECONDS", -1.0)
    with ConsoleProgress(target) as progress:
        progress.start("evaluation", 2)
        progress.update(1, "policy")
    assert "evaluation: 1/2  policy" in text_of(target)


def test_long_sentences_are_not_broken_by_us() -> None:
    target = console(terminal=False)
    sentence = "word " * 60 + "/a/path/that-people-copy"
    with ConsoleProgress(target) as progress:
        progress.say(sentence)
    assert text_of(target) == f"{sentence}\n"


def test_brackets_in_a_sentence_are_text_and_not_markup() -> None:
    target = console(terminal=False)
    ConsoleProgress(target).say("search[shoe] [red]")
    assert text_of(target) == "search[shoe] [red]\n"


@pytest.mark.parametrize("terminal", [False, True])
def test_no_escape_sequence_of_foreign_text_reaches_the_terminal(*, terminal: bool) -> None:
    target = console(terminal=terminal)
    with ConsoleProgress(target) as progress:
        progress.start("evaluation", 1)
        progress.say("data \x1b]0;owned\x07")
        progress.update(1, "note \x9b2J [/dim]")
    assert "\x1b]0" not in text_of(target) and "\x9b" not in text_of(target)
    assert "data \\x1b]0;owned\\x07" in text_of(target)
    assert "note \\x9b2J [/dim]" in text_of(target)


def test_a_printable_console_escapes_what_it_is_given() -> None:
    target = PrintableConsole(file=io.StringIO(), width=100)
    target.print("title \x1b[31m \ud800")
    assert text_of(target) == "title \\x1b[31m \\ud800\n"


def test_a_terminal_gets_bars_and_an_early_end_counts_as_complete() -> None:
    target = console(terminal=True)
    with ConsoleProgress(target) as progress:
        progress.start("copy", 1500)
        progress.update(300, "accuracy 97%")
        progress.say("done early")
    shown = text_of(target)
    assert "300/300" in shown
    assert "done early" in shown


@pytest.mark.parametrize("width", [80, 120])
def test_a_terminal_of_eighty_characters_shows_every_number(width: int) -> None:
    target = console(terminal=True, width=width)
    note = "success 97%  return 0.85  eval 100%"
    with ConsoleProgress(target) as progress:
        progress.start("demonstrations", 1500)
        progress.update(1234, note)
    shown = text_of(target)
    assert "1234/1234" in shown
    assert note in shown
    assert "…" not in shown
