"""What was tried, and how long steps took."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from unisono.adapt.figures import Figures
from unisono.adapt.stretch import Stretch, layout_of
from unisono.adapt.view import View
from unisono.adapt.wish import Wish
from unisono.received import value_of

AGAIN_STEPS = 2000
"""For as long as so many of the present steps take, what was timed is believed at least: trying costs steps, too."""


@dataclass(frozen=True, slots=True)
class Trial:
    """Tries layouts one after the other, and remembers.

    Attributes:
        wish: for another number of workers.
        stretch: the steps that are being timed.
        figures: of the layouts that were timed.
        noted: the step after which the newest figure was noted.
    """

    wish: Wish = field(default_factory=Wish)
    stretch: Stretch = field(default_factory=Stretch)
    figures: Figures = field(default_factory=Figures)
    noted: int = -1

    def after(self, view: View, patience: int, again_s: float) -> Trial:
        """With one more step.

        Args:
            view: after it.
            patience: steps that make a figure.
            again_s: seconds of training for which a figure, or a refusal, is believed.
        """
        trial = replace(self, wish=self.wish.after(view), stretch=self.stretch.after(view, patience))
        if len(trial.stretch.steps) < patience:
            return trial
        step_s = trial.stretch.step_s
        oldest = view.seconds - max(again_s, AGAIN_STEPS * step_s)
        figures = self.figures.since(oldest).after(layout_of(view), step_s, view.seconds)
        return Trial(trial.wish.since(oldest), Stretch(), figures, view.step)

    def asking(self, workers: int, view: View) -> Trial:
        """Another number of workers is asked for."""
        return replace(self, wish=self.wish.asking(workers, view))

    def state(self) -> dict[str, Any]:
        """As numbers, by name."""
        steps, figures = list(self.stretch.steps), self.figures.state()
        return {"wish": asdict(self.wish), "steps": steps, "figures": figures, "noted": self.noted}

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> Trial:
        """The inverse of :meth:`state`."""
        forms = {"wish": Wish, "steps": tuple[float, ...], "figures": list[tuple[float, ...]], "noted": int}
        found = value_of(forms, state, "trial")
        return cls(found["wish"], Stretch(found["steps"]), Figures.of(found["figures"]), found["noted"])
