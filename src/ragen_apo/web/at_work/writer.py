"""Writes the responses of one model, token by token, as it does in rollouts and evaluations.

Consumes the tokens of a context and the episode's random numbers; produces the response. It is the
engine of the rollouts with a single row, which keeps in its cache what two prompts have in common.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from ragen_apo.config.agent import AgentConfig
from ragen_apo.policy.engine import Response
from ragen_apo.policy.generation import GenerationEngine
from ragen_apo.policy.language_model import LanguageModel
from ragen_apo.policy.rows import Row
from ragen_apo.policy.scoring import token_logprobs
from ragen_apo.seeding import generator

Wrote = Callable[[int, float], bool]
"""Receives each token with its log-probability; answers whether to go on."""


def draws_of_turn(seed: int, number: int, *, max_response_tokens: int) -> np.random.Generator:
    """The random numbers of turn `number`, from 1, of an episode with this seed.

    Those of a rollout: one block for each turn before, whoever has written it.
    """
    draws = generator(seed, "sampling")
    draws.random((number - 1) * max_response_tokens)
    return draws


class Writer:
    """One model and its engine. For one thread at a time."""

    def __init__(self, model: LanguageModel, agent: AgentConfig) -> None:
        model.model.eval()
        self.model = model
        self._max_new_tokens = agent.max_response_tokens
        self._engine = GenerationEngine(
            model,
            num_rows=1,
            capacity=agent.max_context_tokens,
            stops_at_answer=not agent.calls_tools,
        )
        self._row: Row | None = None

    def write(
        self, prompt: Sequence[int], draws: np.random.Generator, *, temperature: float, wrote: Wrote
    ) -> Response | None:
        """The response to a whole context; None if `wrote` did not want more.

        Raises ContextError for a context that is too long, ModelError where `step` does.
        """
        engine = self._engine
        row = self._row or engine.open_row(draws)
        row.draws, self._row = draws, row
        is_over = False
        try:
            with engine.constant_weights():
                engine.submit(row, prompt, max_new_tokens=self._max_new_tokens, restarts=True)
                while True:
                    for _, response in engine.step(temperature=temperature):
                        is_over = True
                        wrote(response.token_ids[-1], response.logprobs[-1])
                        return response
                    assert row.sampling is not None
                    if not wrote(row.sampling.token_ids[-1], row.sampling.logprobs[-1]):
                        return None
        finally:
            if not is_over:
                engine.close_row(row)
                self._row = None

    @torch.no_grad()
    def score(
        self, prompt: Sequence[int], response: Sequence[int], *, temperature: float
    ) -> tuple[float, ...]:
        """The log-probability of each token of a response; at temperature 1 for greedy play."""
        token_ids_1T = torch.tensor([[*prompt, *response]], device=self.model.device)
        loss_mask_1T = torch.zeros_like(token_ids_1T, dtype=torch.bool)
        loss_mask_1T[:, len(prompt) :] = True
        logprobs_1T = token_logprobs(
            self.model, token_ids_1T, loss_mask_1T, temperature=temperature or 1.0
        )
        return tuple(logprobs_1T[0, len(prompt) :].tolist())
