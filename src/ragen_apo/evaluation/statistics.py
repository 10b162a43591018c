"""Confidence interval of a success rate.

pass@k is in `ragen_apo.values.coverage`, where Stage 1 needs it as well.
"""

from __future__ import annotations

import math
from statistics import NormalDist


def wilson_interval(successes: int, episodes: int) -> tuple[float, float]:
    """The 95% Wilson score interval of a success rate; it stays inside [0, 1] at 0% and 100% too.

    With p = successes / n and z the two-sided normal quantile, the bounds are
    (p + z²/2n ± z √(p(1-p)/n + z²/4n²)) / (1 + z²/n)   (Wilson, 1927).
    Assumes independent episodes. No episodes say nothing: (0, 1).
    Raises ValueError for impossible counts.
    """
    if not 0 <= successes <= episodes:
        raise ValueError(f"successes must lie in 0..{episodes} (the episodes), got {successes}")
    if episodes == 0:
        return 0.0, 1.0
    z = NormalDist().inv_cdf(0.5 + 0.95 / 2)
    rate = successes / episodes
    shrinkage = 1 + z * z / episodes
    centre = (rate + z * z / (2 * episodes)) / shrinkage
    spread = math.sqrt(rate * (1 - rate) / episodes + (z / (2 * episodes)) ** 2)
    half_width = z * spread / shrinkage
    low = 0.0 if successes == 0 else max(0.0, centre - half_width)
    high = 1.0 if successes == episodes else min(1.0, centre + half_width)
    return low, high
