"""How long steps take while nothing changes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from unisono.adapt.layout import Layout
from unisono.adapt.view import View

SETTLED = 3
"""Steps after a change from which on their times are taken: memory is made anew in the first ones."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """The newest steps in a row that were computed in one layout.

    Attributes:
        steps: seconds of each on the slowest worker, oldest first.
    """

    steps: Sequence[float] = ()

    def after(self, view: View, longest: int) -> Stretch:
        """With one more step, and without the oldest ones beyond ``longest``; empty while things change."""
        if view.steady < SETTLED or not view.step_s > 0:
            return Stretch()
        return Stretch((*self.steps, view.step_s)[-longest:])

    @property
    def step_s(self) -> float:
        """The median of the seconds: an evaluation in between does not count."""
        return median(self.steps)


def layout_of(view: View) -> Layout:
    """The one that training is in."""
    return Layout(view.world_size, view.batch_size, view.shards, view.shards // view.base_shards)
