"""Guesses of what comes next: what followed the last two tokens before.

Agents repeat themselves: a search repeats the task, a click what the page says, a thought what was
thought in the last episode. A guess that is checked in the same forward pass as the token before it
costs little, and each that is right saves a pass (prompt lookup: Saxena 2023; checked like the
drafts of Leviathan et al. 2023, arXiv:2211.17192). Guesses change which tokens share a pass, never
what is sampled.
"""

from __future__ import annotations

from collections.abc import Iterable


class Recurrence:
    """A list of tokens that knows where each pair of neighbours was last followed by a third."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self._after: dict[tuple[int, int], int] = {}

    def extend(self, token_ids: Iterable[int]) -> None:
        """Adds tokens at the end."""
        tokens = self.tokens
        for token in token_ids:
            if len(tokens) > 1:
                self._after[tokens[-2], tokens[-1]] = len(tokens)
            tokens.append(token)

    def following(self, pair: tuple[int, int], *, length: int) -> list[int]:
        """Up to `length` tokens that followed the pair the last time; none where nothing did."""
        place = self._after.get(pair)
        return [] if place is None else self.tokens[place : place + length]
