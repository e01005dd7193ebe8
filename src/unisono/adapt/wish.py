"""A number of workers that was asked for."""

from __future__ import annotations

from dataclasses import dataclass, replace

from unisono.adapt.view import View

WAIT_S, WAIT_STEPS = 120.0, 20
"""Of training, both, until a number of workers that did not come is taken for one that cannot be had."""


@dataclass(frozen=True, slots=True)
class Wish:
    """What was asked for, and what could not be had.

    Attributes:
        workers: that were asked for, and are not there yet; 0 for none.
        since_s: seconds of training at which that was.
        since_step: the step after which that was.
        refused: numbers that did not come, how many workers there were instead, and the seconds of training then.
    """

    workers: int = 0
    since_s: float = 0.0
    since_step: int = 0
    refused: tuple[tuple[int, int, float], ...] = ()

    def asking(self, workers: int, view: View) -> Wish:
        """From now on so many are asked for."""
        return replace(self, workers=workers, since_s=view.seconds, since_step=view.step)

    def after(self, view: View) -> Wish:
        """One more step: they may have come, or it may have taken too long."""
        if not self.workers or self.workers == view.world_size:
            return replace(self, workers=0)
        if view.seconds > self.since_s + WAIT_S and view.step > self.since_step + WAIT_STEPS:
            others = tuple(one for one in self.refused if one[0] != self.workers)
            return replace(self, workers=0, refused=(*others, (self.workers, view.world_size, view.seconds)))
        return self

    def since(self, at_s: float) -> Wish:
        """Only what was refused then, or later."""
        return replace(self, refused=tuple(one for one in self.refused if one[2] >= at_s))

    def may_have(self, workers: int) -> bool:
        """Whether neither so many were refused, nor others on the way there."""
        return all(workers < number if number > had else workers > number for number, had, _ in self.refused)
