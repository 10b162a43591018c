"""What a number of episodes says about a policy: intervals, and means over seeds.

Consumes counts and plain numbers, produces plain numbers; nothing here knows what an episode is.
pass@k is in `ragen_apo.values.coverage`, where Stage 1 needs it as well.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist, fmean, stdev


def wilson_interval(successes: int, episodes: int, confidence: float = 0.95) -> tuple[float, float]:
    """The Wilson score interval of a success rate, which stays inside [0, 1] at 0% and 100% too.

    With p = successes / n and z the two-sided normal quantile, the bounds are
    (p + z²/2n ± z √(p(1-p)/n + z²/4n²)) / (1 + z²/n)   (Wilson, 1927).
    Assumes independent episodes. No episodes say nothing: (0, 1).
    Raises ValueError for counts or a confidence that cannot be.
    """
    if not 0 <= successes <= episodes:
        raise ValueError(f"successes must lie in 0..{episodes} (the episodes), got {successes}")
    if not 0.0 < confidence < 1.0:
        raise ValueError(f"confidence must lie between 0 and 1, got {confidence}")
    if episodes == 0:
        return 0.0, 1.0
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    rate = successes / episodes
    shrinkage = 1 + z * z / episodes
    centre = (rate + z * z / (2 * episodes)) / shrinkage
    spread = math.sqrt(rate * (1 - rate) / episodes + (z / (2 * episodes)) ** 2)
    half_width = z * spread / shrinkage
    low = 0.0 if successes == 0 else max(0.0, centre - half_width)
    high = 1.0 if successes == episodes else min(1.0, centre + half_width)
    return low, high


def mean_and_spread(values: Sequence[float]) -> tuple[float, float]:
    """The mean and the sample standard deviation (n - 1), as a table over seeds reports them.

    One value has no spread: NaN. Raises ValueError without any value.
    """
    if not values:
        raise ValueError("the mean of no values does not exist")
    return fmean(values), stdev(values) if len(values) > 1 else math.nan
