"""Responses of a generation engine in a test."""

from collections.abc import Sequence

from ragen_apo.policy.engine import Response
from ragen_apo.policy.generation import GenerationEngine
from ragen_apo.policy.rows import Row


def respond(
    engine: GenerationEngine,
    rows: Sequence[Row],
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    temperature: float,
) -> list[Response]:
    """One response a row, in their order; no other row may be writing."""
    for row, prompt in zip(rows, prompts, strict=True):
        engine.submit(row, prompt, max_new_tokens=max_new_tokens)
    responses: dict[Row, Response] = {}
    while len(responses) < len(rows):
        responses.update(engine.step(temperature=temperature))
    return [responses[row] for row in rows]
