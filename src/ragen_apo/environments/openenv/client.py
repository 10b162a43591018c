"""The typed client, for programs that hold no environment of their own.

with TextClient(base_url="http://127.0.0.1:8000").sync() as client:
    result = client.reset(split="test", index=0)
    while not result.done:
        result = client.step(TextAction(text=policy(result.observation.text)))
"""

from __future__ import annotations

from typing import Any

from openenv.core.client_types import StepResult  # pyright: ignore[reportMissingImports]
from openenv.core.env_client import EnvClient  # pyright: ignore[reportMissingImports]

from ragen_apo.environments.openenv.records import TextAction, TextObservation, TextState

__all__ = ["TextAction", "TextClient", "TextObservation", "TextState"]


class TextClient(EnvClient[TextAction, TextObservation, TextState]):
    """A session of its own on a server, for as long as the connection lasts.

    `reset` takes `seed` and either `task_id` or `split` and `index`. What the server refuses is
    raised as RuntimeError, and the session goes on.
    """

    def _step_payload(self, action: TextAction | str) -> dict[str, Any]:
        return {"text": action} if isinstance(action, str) else action.model_dump()

    def _parse_result(self, payload: dict[str, Any]) -> StepResult[TextObservation]:
        reward, done = payload.get("reward"), payload.get("done", False)
        observation = TextObservation(**payload["observation"], reward=reward, done=done)
        return StepResult(observation, reward, done, observation.metadata)

    def _parse_state(self, payload: dict[str, Any]) -> TextState:
        return TextState.model_validate(payload)
