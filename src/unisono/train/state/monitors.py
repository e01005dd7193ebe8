"""The measurements in a run's steps, over all of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from unisono.adapt.norms import GradientNorms, NoiseAverage, loss_variance
from unisono.adapt.view import Setting, Timings
from unisono.plan.links import Links
from unisono.received import value_of

NAMES = ("gradient_norm", "gradient_variance", "gradient_signal", "noise_scale", "ada_scale_gain", "loss_variance")
"""In ``metrics.jsonl``, in steps that are watched."""

FORMS = {
    "noise": NoiseAverage,
    "newest": GradientNorms | None,
    "step": int,
    "setting": Setting,
    "steady": int,
    "timings": tuple[Timings, ...],
    "seconds": float,
    "links": Links | None,
    "critical_step": float,
}
"""Of the parts of their state."""


class Monitors:
    """The measurements of the steps so far. All but times are the same on every worker, for every number of workers.

    Attributes:
        noise: the noise of the gradients, averaged.
        setting: the conditions under which the newest step was computed.
        steady: the number of steps in a row under these conditions.
        timings: the times of the newest step, by rank.
        seconds: the seconds of training so far: the slowest worker's step times, added up.
        links: the newest measurement of the connections between the workers; None before the first.
        critical_step: the newest one that was measured, from which the next measurement starts; 1 before the first.
    """

    def __init__(self) -> None:
        self.noise = NoiseAverage()
        self.setting = Setting()
        self.steady = 0
        self.timings: tuple[Timings, ...] = ()
        self.seconds = 0.0
        self.links: Links | None = None
        self.critical_step = 1.0
        self._newest: GradientNorms | None = None
        self._step = -1

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
        self._newest, self._step = norms, step
        noise = self.noise.noise
        found = {
            "gradient_norm": math.sqrt(norms.mean),
            "gradient_variance": None if noise is None else noise.variance,
            "gradient_signal": None if noise is None else noise.signal,
            "noise_scale": None if noise is None else noise.scale,
            "ada_scale_gain": None
            if noise is None
            else noise.gain(sum(norms.sizes) / len(norms.sizes), sum(norms.sizes)),
            "loss_variance": loss_variance(losses, norms.sizes),
        }
        return {name: value for name, value in found.items() if value is not None}

    def norms_of(self, step: int) -> GradientNorms | None:
        """Of the gradients of a step, if it is the newest one that was watched."""
        return self._newest if step == self._step else None

    def state_dict(self) -> dict[str, Any]:
        """All of it, as numbers by name."""
        newest = None if self._newest is None else asdict(self._newest)
        return {
            "noise": asdict(self.noise),
            "newest": newest,
            "step": self._step,
            "setting": asdict(self.setting),
            "steady": self.steady,
            "timings": [asdict(each) for each in self.timings],
            "seconds": self.seconds,
            "links": None if self.links is None else self.links.figures(),
            "critical_step": self.critical_step,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state_dict`.

        Raises:
            Unreadable: it is nothing of the kind. Then nothing has changed.
        """
        found = value_of(FORMS, state, "state")
        self.noise, self.timings, self.links = found["noise"], found["timings"], found["links"]
        self._newest, self._step = found["newest"], found["step"]
        self.setting, self.steady, self.seconds = found["setting"], found["steady"], found["seconds"]
        self.critical_step = found["critical_step"]
