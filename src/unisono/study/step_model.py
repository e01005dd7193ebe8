"""How long a step takes, from what its parts were measured to take."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from unisono.adapt.layout import Layout
from unisono.adapt.step_time import StepTime, fit
from unisono.study.results import Mode, Results
from unisono.study.summary import Row


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
        None if one of them is not known. The setting may be a number, or one for each label; the environment's
        ``latency_s`` counts as 0 if it is not there.
    """
    alone = next((row for row in curve if row.workers == 1), None)
    parts = alone.parts if alone else None
    size = _of_label(results.settings, "gradient_bytes", curve[0].label)
    latency, bandwidth = (results.environment.get(name) for name in ("latency_s", "bandwidth_bytes_per_s"))
    if not parts or "compute_s" not in parts or not (_above_0(size) and _above_0(bandwidth)):
        return None
    rest = parts.get("update_s", 0.0) + parts.get("data_s", 0.0)
    return StepModel(parts["compute_s"], rest, float(size), float(latency or 0), float(bandwidth or 0))


def fitted_step_time(results: Results, curve: Sequence[Row]) -> StepTime | None:
    """The step time of Pollux, as policies use it; None unless steps, batches and the setting ``shards`` are known."""
    shards = results.settings.get("shards")
    if not isinstance(shards, int):
        return None
    seen = {
        Layout(row.workers, row.batch_size, shards): row.step_s
        for row in curve
        if not row.oversubscribed and row.batch_size and row.step_s and row.workers <= shards
    }
    return fit(seen) if len(seen) > 1 else None


def _of_label(settings: Mapping[str, Any], name: str, label: str) -> Any:
    """A setting that may be different for each label."""
    found = settings.get(name)
    return found.get(label) if isinstance(found, Mapping) else found


def _above_0(value: Any) -> bool:
    return isinstance(value, int | float) and value > 0
