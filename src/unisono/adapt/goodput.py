"""How fast training comes forward in a layout, and the way to a better one."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from unisono.adapt.layout import Layout, useful_sizes
from unisono.adapt.norms import Noise

STEP = 2**0.5
"""From one batch that may be tried to the next."""


def goodput(layout: Layout, step_s: float, noise: Noise, base: int) -> float:
    """Samples per second, each counted by what it brings beside one of the batch that the job began with.

    Qiao et al. (Pollux), OSDI 2021: B / T · (φ + B0) / (φ + B).

    Args:
        layout: with the batch B.
        step_s: T, seconds of a step.
        noise: of the gradients, with the noise scale φ.
        base: B0, samples in the batch that the job began with.
    """
    return layout.batch_size / step_s * noise.efficiency(base, layout.batch_size)


@dataclass(frozen=True, slots=True)
class Bounds:
    """What layouts have to keep to.

    Attributes:
        base: samples in the smallest batch.
        largest: samples in the largest one.
        fewest: workers.
        most: workers.
    """

    base: int
    largest: int
    fewest: int
    most: int

    def layouts(self, now: Layout, seen: Collection[Layout]) -> list[Layout]:
        """All that may be aimed at: any batch, and up to double the workers that were seen, or the fewest.

        Args:
            now: the layout that training is in.
            seen: those that were timed; at least one.
        """
        batches = _batches(self.base, self.largest, now.shards)
        sizes = useful_sizes(now.job_shards, self.fewest, self.most)
        most = max(2 * max(one.workers for one in seen), sizes[0])
        wanted = [workers for workers in sizes if workers <= most]
        return [replace(now, workers=workers, batch_size=samples) for workers in wanted for samples in batches]

    def step_towards(self, goal: Layout, seen: Collection[Layout]) -> Layout:
        """The goal, or what is on the way to it and next to what was seen.

        Beyond what was seen it goes by one step, first to the next number of workers, then to the next batch.

        Args:
            goal: one of :meth:`layouts`.
            seen: those that were timed; at least one.
        """
        sizes = useful_sizes(goal.job_shards, self.fewest, self.most)
        workers = _next(goal.workers, sizes, {one.workers for one in seen})
        batches = _batches(self.base, self.largest, goal.shards)
        known = {round(one.shard_size * goal.shards) for one in seen}
        samples = _next(goal.batch_size, batches, known)
        if not min(one.workers for one in seen) <= workers <= max(one.workers for one in seen):
            samples = max(min(goal.batch_size, max(known)), min(known))
        return replace(goal, workers=workers, batch_size=samples)


def _batches(base: int, largest: int, shards: int) -> list[int]:
    """From the smallest on, such that all shards are equally large."""
    found, samples = [base], float(base)
    while (samples := samples * STEP) < largest + shards:
        rounded = round(samples / shards) * shards
        if found[-1] < rounded <= largest:
            found.append(rounded)
    return found


def _next(goal: int, values: Sequence[int], known: Collection[int]) -> int:
    """The one of the values that is nearest to the goal, and at most one beyond what is known."""
    lowest = max((value for value in values if value < min(known)), default=values[0])
    highest = min((value for value in values if value > max(known)), default=values[-1])
    return max(min(goal, highest), lowest)
