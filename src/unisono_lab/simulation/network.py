"""A network that a scenario names: what a reduction takes on it, by the forecast of topologies."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import numpy as np

from unisono.plan.forecast import forecast
from unisono.plan.split import Split
from unisono.plan.topology import plan

BEYOND = (4, 8, 16)
"""Numbers of workers of which messages are looked at one by one; larger numbers go on as these do."""

PIECES = 4
"""Pieces of a bucket, where one comes back while the next is on its way there."""


@dataclass(frozen=True, slots=True)
class NamedNetwork:
    """A network between workers.

    Attributes:
        latency_s: seconds of a message without contents.
        bytes_per_s: what a worker sends and receives in a second while a reduction is under way.
        gradient_bytes: bytes that are reduced in a step.
        topology: the way of partial sums, a name in ``TOPOLOGIES``.
    """

    latency_s: float
    bytes_per_s: float
    gradient_bytes: float
    topology: str

    def reduction_s(self, workers: int) -> float:
        """Seconds of a reduction, as if all gradients were one bucket; 0 for one worker."""
        if workers <= BEYOND[-1]:
            return _reduction_s(self, workers)
        rows = [_terms(self.topology, known) for known in BEYOND]
        parts = np.linalg.solve(np.array(rows), np.array([_reduction_s(self, known) for known in BEYOND]))
        return max(float(np.dot(_terms(self.topology, workers), parts)), _reduction_s(self, BEYOND[-1]))


def _terms(topology: str, workers: int) -> tuple[float, float, float]:
    """What a reduction is made of: a part for all, one for each round, and the share that a worker need not send."""
    return 1.0, math.log2(workers) if topology == "tree" else float(workers), 1 / workers


@cache
def _reduction_s(network: NamedNetwork, workers: int) -> float:
    if workers < 2:
        return 0.0
    pieces = workers if network.topology in ("direct", "ring") else PIECES
    graph = plan(Split.even(workers, workers), network.topology, pieces)
    return forecast(graph, network.gradient_bytes, network.latency_s, network.bytes_per_s).seconds
