"""How often to write a checkpoint."""

from __future__ import annotations

import math


def mean_time_between_failures(seconds: float, failures: int, prior_s: float) -> float:
    """What is expected after so many failures in so many seconds, if one in ``prior_s`` was expected before.

    The mean of the rate under a Gamma prior with one failure in ``prior_s`` seconds: before anything has failed the
    estimate is the prior, or what was survived and the prior together; after many failures the prior counts for one.
    """
    return (seconds + prior_s) / (failures + 1)


def daly_s(checkpoint_s: float, between_failures_s: float) -> float:
    """Seconds of work between two checkpoints that lose the least time to writing them and to work done twice.

    Young, "A first order approximation to the optimum checkpoint interval", CACM 17(9), 1974: the square root of 2 δ M,
    for a checkpoint of δ seconds and M seconds between failures. Daly, "A higher order estimate of the optimum
    checkpoint interval for restart dumps", FGCS 22(3), 2006, equation 37::

        √(2 δ M) · (1 + √(δ / 2M) / 3 + (δ / 2M) / 9) - δ        if δ < 2 M, and M otherwise

    Args:
        checkpoint_s: δ, that writing one takes; above 0.
        between_failures_s: M, on average; above 0.
    """
    share = checkpoint_s / (2 * between_failures_s)
    if share >= 1:
        return between_failures_s
    young = math.sqrt(2 * checkpoint_s * between_failures_s)
    return young * (1 + math.sqrt(share) / 3 + share / 9) - checkpoint_s
