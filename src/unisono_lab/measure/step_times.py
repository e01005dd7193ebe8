"""The parts of a step's time, over all of its workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from statistics import fmean, median
from typing import Any

from unisono.plan.split import Split


@dataclass(frozen=True, slots=True)
class StepBreakdown:
    """The parts of a step, in seconds; the mean over its workers.

    Attributes:
        step_s: the whole step, on the main worker's clock.
        data_s: the wait for samples.
        compute_s: the forward and the backward pass.
        wait_s: the wait, from when a worker had computed its shards until the slowest one had.
        exposed_s: the rest of the wait for the reduction, after everything was computed.
        update_s: the optimizer's update.
    """

    step_s: float
    data_s: float
    compute_s: float
    wait_s: float
    exposed_s: float
    update_s: float

    @classmethod
    def medians(cls, steps: Sequence[StepBreakdown]) -> StepBreakdown:
        """The median of each part; they add up to about a whole."""
        rows = [asdict(step) for step in steps]
        return cls(**{name: median(row[name] for row in rows) for name in rows[0]})


def step_times(lines: Sequence[Mapping[str, Any]]) -> list[StepBreakdown]:
    """The times of steps.

    Args:
        lines: the lines of ``metrics.jsonl`` for consecutive steps. What workers say of a step's end stands in the next
            step's line, so nothing is told of the last step. Where they say nothing, the main worker's own times are
            taken.
    """
    found = [_of_workers(line, after) or _of_main(line) for line, after in pairwise(lines)]
    return found or [_of_main(line) for line in lines]


def _of_main(line: Mapping[str, Any]) -> StepBreakdown:
    seconds = line["seconds"]
    parts = (seconds.get(name, 0.0) for name in ("data", "compute", "exposed_communication", "update"))
    data, compute, exposed, update = parts
    return StepBreakdown(seconds["total"], data, compute, 0.0, exposed, update)


def _of_workers(line: Mapping[str, Any], after: Mapping[str, Any]) -> StepBreakdown | None:
    now, then = line.get("workers") or (), after.get("workers") or ()
    if not now or len(now) != len(then) or after["step"] != line["step"] + 1:
        return None
    data = [one["data_s"] for one in then]
    compute = _computed(line, [one["shard_s"] for one in now])
    arrived = [waited + took for waited, took in zip(data, compute, strict=True)]
    exposed = [one["exposed_s"] for one in then]
    waits = [min(max(arrived) - each, most) for each, most in zip(arrived, exposed, strict=True)]
    return StepBreakdown(
        step_s=line["seconds"]["total"],
        data_s=fmean(data),
        compute_s=fmean(compute),
        wait_s=fmean(waits),
        exposed_s=fmean(exposed) - fmean(waits),
        update_s=fmean(one["update_s"] for one in then),
    )


def _computed(line: Mapping[str, Any], shard_s: Sequence[float]) -> list[float]:
    """Seconds that each worker computed, by rank."""
    shards = line.get("shards") or line["setting"]["shards"]
    serving = sum(not each for each in shard_s)  # who serves computes nothing, and tells no time for it
    split = Split.even(shards, len(shard_s)).with_servers(serving)
    spent = [len(split.of(rank)) * each for rank, each in enumerate(shard_s)]
    # A shard's time is of the first call of step.run; the main worker's whole time tells what all calls came to.
    calls = line["seconds"]["compute"] / spent[0] if line.get("losses") and spent[0] > 0 else 1.0
    return [each * calls for each in spent]
