"""The measurements in a run's steps, over all of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, get_type_hints

from unisono.adapt.norms import GradientNorms, NoiseAverage, loss_variance
from unisono.adapt.view import Setting, Timings
from unisono.plan.links import Links
from unisono.received import value_of

NAMES = ("gradient_norm", "gradient_variance", "gradient_signal", "noise_scale", "ada_scale_gain", "loss_variance")
"""In ``metrics.jsonl``, in steps that are watched."""


@dataclass(eq=False)
class Monitors:
    """The measurements of the steps so far. All but times are the same on every worker, for every number of workers.

    Attributes:
        noise: the noise of the gradients, averaged.
        newest: the norms of the gradients of the newest step that was watched.
        step: the number of that step.
        setting: the conditions under which the newest step was computed.
        steady: the number of steps in a row under these conditions.
        timings: the times of the newest step, by rank.
        seconds: the seconds of training so far: the slowest worker's step times, added up.
        links: the newest measurement of the connections between the workers; None before the first.
        critical_step: the newest one that was measured, from which the next measurement starts; 1 before the first.
    """

    noise: NoiseAverage = field(default_factory=NoiseAverage)
    newest: GradientNorms | None = None
    step: int = -1
    setting: Setting = field(default_factory=Setting)
    steady: int = 0
    timings: tuple[Timings, ...] = ()
    seconds: float = 0.0
    links: Links | None = None
    critical_step: float = 1.0

    def time(self, setting: Setting, timings: Sequence[Timings]) -> None:
        """A step was committed.

        Args:
            setting: the conditions under which the step was computed.
            timings: the times that each worker measured, by rank.
        """
        self.steady = self.steady + 1 if setting == self.setting else 1
        self.setting, self.timings = setting, tuple(timings)
        self.seconds += max(each.step_s for each in timings)

    @property
    def times(self) -> dict[str, Any]:
        """What there is to say of the newest step's times, and of how it was computed."""
        setting = {**asdict(self.setting), "steady": self.steady, "seconds": self.seconds}
        return {"workers": [asdict(each) for each in self.timings], "setting": setting}

    def see(self, step: int, norms: GradientNorms, losses: Sequence[float]) -> dict[str, float]:
        """A step was committed.

        Args:
            step: the number of the step.
            norms: the norms of its gradients.
            losses: the loss of each shard that has samples.

        Returns:
            figures by name, without those that are not known yet.
        """
        self.noise = self.noise.after(norms)
        self.newest, self.step = norms, step
        samples, known = sum(norms.sizes), dict[str, float | None]()
        if (noise := self.noise.noise) is not None:
            known = {"gradient_variance": noise.variance, "gradient_signal": noise.signal, "noise_scale": noise.scale}
            known["ada_scale_gain"] = noise.gain(samples / len(norms.sizes), samples)
        spread = loss_variance(losses, norms.sizes)
        found = {"gradient_norm": math.sqrt(norms.mean), **known, "loss_variance": spread}
        return {name: value for name, value in found.items() if value is not None}

    def norms_of(self, step: int) -> GradientNorms | None:
        """Of the gradients of a step, if it is the newest one that was watched."""
        return self.newest if step == self.step else None

    def state_dict(self) -> dict[str, Any]:
        """All of it, as numbers by name."""
        links = None if self.links is None else self.links.figures()
        return {**asdict(self), "timings": [asdict(each) for each in self.timings], "links": links}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state_dict`.

        Raises:
            Unreadable: it is nothing of the kind. Then nothing has changed.
        """
        vars(self).update(value_of(FORMS, state, "state"))


FORMS = get_type_hints(Monitors)
"""Of the parts of their state."""
