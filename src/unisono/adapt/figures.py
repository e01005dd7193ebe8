"""What steps took, by layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field
from reprlib import repr as short

from unisono.adapt.layout import Layout


@dataclass(frozen=True, slots=True)
class Figures:
    """The newest time of a step in each layout.

    Attributes:
        noted: seconds of a step, and the seconds of training at which that was noted.
    """

    noted: Mapping[Layout, tuple[float, float]] = field(default_factory=dict)

    def after(self, layout: Layout, step_s: float, at_s: float) -> Figures:
        """With one more, in place of the one before it."""
        return Figures({**self.noted, layout: (step_s, at_s)})

    def since(self, at_s: float) -> Figures:
        """Those that were noted then, or later."""
        return Figures({layout: figure for layout, figure in self.noted.items() if figure[1] >= at_s})

    @property
    def seconds(self) -> dict[Layout, float]:
        """Of a step, by layout."""
        return {layout: step_s for layout, (step_s, _) in self.noted.items()}

    def state(self) -> list[list[float]]:
        """As numbers: those of the layout, seconds, and when."""
        return [[*astuple(layout), *figure] for layout, figure in self.noted.items()]

    @classmethod
    def of(cls, state: Sequence[Sequence[float]]) -> Figures:
        """The inverse of :meth:`state`.

        Raises:
            ValueError: a layout has no workers, samples or shards, or took no time.
        """
        if any(not min(figure[:-1]) > 0 for figure in state):
            raise ValueError(f"figures need numbers above 0, not {short(state)}")
        return cls({Layout(*map(int, numbers)): (step_s, at_s) for *numbers, step_s, at_s in state})
