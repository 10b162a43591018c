"""What Stage 1 says of the reference."""

from __future__ import annotations

import dataclasses

from ragen_apo.session import Session
from ragen_apo.stages.values import estimate_values


class Listener:
    """Keeps what was said."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def start(self, phase: str, total: int) -> None: ...

    def update(self, done: int, note: str = "") -> None: ...

    def say(self, message: str) -> None:
        self.said.append(message)


def test_an_untrained_reference_is_told_that_the_prompt_must_state_the_form(
    session: Session,
) -> None:
    listener = Listener()
    untrained = dataclasses.replace(session, progress=listener)
    reference = untrained.load_model(untrained.run.initial)
    report = estimate_values(untrained, reference, untrained.training_tasks()[:4])
    assert report["share_unreadable"] > 0.9
    (advice,) = [text for text in listener.said if text == report["advice"]]
    assert advice.startswith("No task was solved")
    assert "agent.system_prompt: rules_and_format does" in advice
