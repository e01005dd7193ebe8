"""How long a step takes, from what its parts were measured to take."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from unisono.adapt.layout import Layout
from unisono.adapt.step_time import StepTime, fit
from unisono.study.analysis.results import Mode, Results
from unisono.study.analysis.summary import Row


@dataclass(frozen=True, slots=True)
class StepModel:
    """A step of W workers, from one worker's step and from the network.

    ::

        compute(W)       = compute / W            in strong scaling; compute in weak scaling
        communication(W) = 2 ⌈log2 W⌉ latency + 2 (W - 1)/W · bytes / bandwidth
        step(W)          = rest + compute(W) + communication(W)         if nothing overlaps
        step(W)          = rest + max(compute(W), communication(W))     if all does

    The communication is that of an all-reduce by halves (Rabenseifner; Thakur, Rabenseifner and Gropp, IJHPCA 2005).
    Nothing in it is fitted.

    Attributes:
        compute_s: seconds of forward and backward on one worker.
        rest_s: seconds of what each worker does for itself: the update, and waiting for data.
        gradient_bytes: that are reduced in a step.
        latency_s: seconds of a message between two workers.
        bandwidth: bytes per second between two workers.
    """

    compute_s: float
    rest_s: float
    gradient_bytes: float
    latency_s: float
    bandwidth: float

    def communication_s(self, workers: int) -> float:
        """Seconds of an all-reduce."""
        if workers == 1:
            return 0.0
        turns = 2 * math.ceil(math.log2(workers))
        return turns * self.latency_s + 2 * (workers - 1) / workers * self.gradient_bytes / self.bandwidth

    def step_s(self, workers: int, mode: Mode, *, overlapped: bool) -> float:
        """Seconds of a step, if all of the shorter of computing and communicating is hidden, or none."""
        compute = self.compute_s if mode == "weak" else self.compute_s / workers
        communication = self.communication_s(workers)
        return self.rest_s + (max(compute, communication) if overlapped else compute + communication)

    def speedup(self, workers: int, mode: Mode, *, overlapped: bool) -> float:
        """Against one worker."""
        times = workers if mode == "weak" else 1
        return times * (self.compute_s + self.rest_s) / self.step_s(workers, mode, overlapped=overlapped)


def step_model(results: Results, curve: Sequence[Row]) -> StepModel | None:
    """From one worker's row, the setting ``gradient_bytes``, and the environment's ``bandwidth_bytes_per_s``.

    Returns:
        None if one of them is not known. The environment's ``latency_s`` counts as 0 if it is not there.
    """
    label = curve[0].label
    alone = next((row for row in curve if row.workers == 1), None)
    parts = alone.parts if alone else None
    size, bandwidth = results.figure("gradient_bytes", label), results.figure("bandwidth_bytes_per_s", label)
    if not parts or "compute_s" not in parts or not size or not bandwidth or min(size, bandwidth) < 0:
        return None
    rest = parts.get("update_s", 0.0) + parts.get("data_s", 0.0)
    return StepModel(parts["compute_s"], rest, size, results.figure("latency_s", label) or 0.0, bandwidth)


def fitted_step_time(results: Results, curve: Sequence[Row]) -> StepTime | None:
    """The step time of Pollux, as policies use it; None unless steps, batches and the setting ``shards`` are known."""
    shards = int(results.figure("shards", curve[0].label) or 0) if curve else 0
    seen = {
        Layout(row.workers, row.batch_size, shards): row.step_s
        for row in curve
        if not row.oversubscribed and row.batch_size and row.step_s and row.workers <= shards
    }
    return fit(seen) if len(seen) > 1 else None
