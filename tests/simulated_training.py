"""Training without training: views as a run would give them, with step times from a formula."""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from unisono.adapt.layouts import Layout
from unisono.adapt.norms import Noise
from unisono.adapt.view import Decision, Policy, Timings, View

LATE = 7
"""Steps until workers that were asked for are there."""


@dataclass
class SimulatedTraining:
    """One policy at work, as on every worker of a job.

    Attributes:
        policy: that decides.
        step_s: the true seconds of a step.
        layout: that training is in.
        noise_scale: the true one.
        jitter: standard deviation of a step's time, as a share.
        room: workers that can be had at most.
    """

    policy: Policy
    step_s: Callable[[Layout], float]
    layout: Layout
    noise_scale: float = 1000.0
    jitter: float = 0.0
    seed: int = 0
    room: int = 1000
    rate: float = 0.1
    step: int = 0
    steady: int = 0
    seconds: float = 0.0
    departures: int = 0
    checkpoint_s: float = 0.0
    decided: list[tuple[int, Decision]] = field(default_factory=list)
    observed: dict[str, Mapping[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.chance = random.Random(self.seed)
        self.base = self.layout
        self.before_s = 0.0
        self.coming: tuple[int, int] | None = None

    def run(self, steps: int) -> "SimulatedTraining":
        for _ in range(steps):
            self.one_step()
        return self

    def one_step(self) -> list[Decision]:
        """Returns what was decided after it."""
        if self.coming and self.step >= self.coming[0]:
            self.change(workers=self.coming[1])
            self.coming = None
        took_s = self.step_s(self.layout) * max(0.5, self.chance.gauss(1, self.jitter))
        if self.steady < 2:
            took_s *= 3  # memory is made anew
        self.step, self.steady, self.seconds = self.step + 1, self.steady + 1, self.seconds + took_s
        every = self.policy.observe_every
        if every and self.step % every == 0:
            self.observed[self.policy.name] = self.policy.observe(self.view())
        self.policy.after_step(self.view())
        self.before_s = took_s
        found = self.policy.decided()
        for one in found:
            self.take(one)
        return found

    def view(self) -> View:
        return View(
            step=self.step,
            epoch=0,
            samples=0,
            batch_size=self.layout.batch_size,
            base_batch_size=self.base.batch_size,
            shards=self.layout.shards,
            base_shards=self.layout.job_shards,
            world_size=self.layout.workers,
            learning_rate=self.rate,
            noise=Noise(self.noise_scale, 1.0),
            workers=(Timings(step_s=self.before_s, checkpoint_s=self.checkpoint_s),) * self.layout.workers,
            steady=self.steady,
            seconds=self.seconds,
            departures=self.departures,
            observed=dict(self.observed),
        )

    def take(self, decision: Decision) -> None:
        self.decided.append((self.step, decision))
        if decision.verb == "resize":
            self.coming = (self.step + LATE, min(int(decision.value or 1), self.room, self.layout.shards))
        elif decision.verb == "set_batch_size":
            self.change(batch_size=int(decision.value or 1))
        elif decision.verb == "set_learning_rate":
            self.rate = float(decision.value or 0)

    def change(self, **what: int) -> None:
        """Another layout."""
        before = self.layout
        self.layout = Layout(**{name: what.get(name, getattr(before, name)) for name in Layout.__slots__})
        if self.layout != before:
            self.steady = 0

    def said(self, verb: str) -> list[Any]:
        """The values of all decisions with that verb."""
        return [one.value for _, one in self.decided if one.verb == verb]
