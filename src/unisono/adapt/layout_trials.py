"""The layouts that a policy has tried, with their step times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field, replace
from functools import lru_cache
from statistics import median
from typing import Any

from unisono.adapt.view import View
from unisono.received import short, value_of

# A number of workers that was asked for.

WAIT_S, WAIT_STEPS = 120.0, 20
"""Of training, both, until a number of workers that did not come is taken for one that cannot be had."""


@dataclass(frozen=True, slots=True)
class ScaleRequest:
    """A request for another number of workers, and the numbers that could not be had.

    Attributes:
        workers: the number of workers that was asked for and has not come yet; 0 for none.
        since_s: seconds of training at which that was.
        since_step: the step after which that was.
        refused: numbers that did not come, how many workers there were instead, and the seconds of training then.
    """

    workers: int = 0
    since_s: float = 0.0
    since_step: int = 0
    refused: tuple[tuple[int, int, float], ...] = ()

    def asking(self, workers: int, view: View) -> ScaleRequest:
        """From now on so many are asked for."""
        return replace(self, workers=workers, since_s=view.seconds, since_step=view.step)

    def after(self, view: View) -> ScaleRequest:
        """One more step: they may have come, or it may have taken too long."""
        if not self.workers or self.workers == view.world_size:
            return replace(self, workers=0)
        if view.seconds > self.since_s + WAIT_S and view.step > self.since_step + WAIT_STEPS:
            others = tuple(one for one in self.refused if one[0] != self.workers)
            return replace(self, workers=0, refused=(*others, (self.workers, view.world_size, view.seconds)))
        return self

    def since(self, at_s: float) -> ScaleRequest:
        """Only what was refused then, or later."""
        return replace(self, refused=tuple(one for one in self.refused if one[2] >= at_s))

    def may_have(self, workers: int) -> bool:
        """Whether neither so many were refused, nor others on the way there."""
        return all(workers < number if number > had else workers > number for number, had, _ in self.refused)


# What the time of a step depends on, as far as a policy changes it.


@dataclass(frozen=True, slots=True, order=True)
class Layout:
    """The number of workers and the batch with which a step is computed.

    Attributes:
        workers: the number of workers.
        batch_size: samples in the global batch.
        shards: the number of shards of the batch.
        cut: the number of shards that each of the job's shards was cut into. One worker computes all of them.
    """

    workers: int
    batch_size: int
    shards: int
    cut: int = 1

    @property
    def job_shards(self) -> int:
        """The job's number of shards: the most workers that there can be."""
        return self.shards // self.cut

    @property
    def widest(self) -> int:
        """The most shards that a worker computes, one after the other."""
        return -(-self.job_shards // self.workers) * self.cut

    @property
    def shard_size(self) -> float:
        """Samples in a shard."""
        return self.batch_size / self.shards


@lru_cache(1024)
def useful_sizes(shards: int, fewest: int, most: int) -> tuple[int, ...]:
    """Numbers of workers that are worth something: with one worker less the slowest one would have more shards.

    With 8 shards those are 1, 2, 3, 4 and 8: 5, 6 and 7 workers wait for the one with two shards, as 4 do.

    Args:
        shards: the job's number of shards.
        fewest: workers; is among them in any case, if there are as many shards.
        most: workers.

    Returns:
        them, smallest first.
    """
    first = min(max(1, fewest), shards)
    return tuple(
        workers
        for workers in range(first, min(most, shards) + 1)
        if workers == first or -(-shards // workers) < -(-shards // (workers - 1))
    )


# What steps took, by layout.


@dataclass(frozen=True, slots=True)
class StepTimes:
    """The newest time of a step in each layout.

    Attributes:
        noted: seconds of a step, and the seconds of training at which that was noted.
    """

    noted: Mapping[Layout, tuple[float, float]] = field(default_factory=dict)

    def after(self, layout: Layout, step_s: float, at_s: float) -> StepTimes:
        """With one more, in place of the one before it."""
        return StepTimes({**self.noted, layout: (step_s, at_s)})

    def since(self, at_s: float) -> StepTimes:
        """Those that were noted then, or later."""
        return StepTimes({layout: figure for layout, figure in self.noted.items() if figure[1] >= at_s})

    @property
    def seconds(self) -> dict[Layout, float]:
        """Of a step, by layout."""
        return {layout: step_s for layout, (step_s, _) in self.noted.items()}

    def state(self) -> list[list[float]]:
        """As numbers: those of the layout, seconds, and when."""
        return [[*astuple(layout), *figure] for layout, figure in self.noted.items()]

    @classmethod
    def of(cls, state: Sequence[Sequence[float]]) -> StepTimes:
        """The inverse of :meth:`state`.

        Raises:
            ValueError: a layout has no workers, samples or shards, or took no time.
        """
        if any(not min(figure[:-1]) > 0 for figure in state):
            raise ValueError(f"figures need numbers above 0, not {short(state)}")
        return cls({Layout(*map(int, numbers)): (step_s, at_s) for *numbers, step_s, at_s in state})


# How long steps take while nothing changes.

SETTLED = 3
"""Steps after a change from which on their times are taken: memory is made anew in the first ones."""


@dataclass(frozen=True, slots=True)
class TimingWindow:
    """The newest steps in a row that were computed in one layout.

    Attributes:
        steps: seconds of each on the slowest worker, oldest first.
    """

    steps: Sequence[float] = ()

    def after(self, view: View, longest: int) -> TimingWindow:
        """With one more step, and without the oldest ones beyond ``longest``; empty while things change."""
        if view.steady < SETTLED or not view.step_s > 0:
            return TimingWindow()
        return TimingWindow((*self.steps, view.step_s)[-longest:])

    @property
    def step_s(self) -> float:
        """The median of the seconds: an evaluation in between does not count."""
        return median(self.steps)


def layout_of(view: View) -> Layout:
    """The one that training is in."""
    return Layout(view.world_size, view.batch_size, view.shards, view.shards // view.base_shards)


# What was tried, and how long steps took.

AGAIN_STEPS = 2000
"""For as long as so many of the present steps take, what was timed is believed at least: trying costs steps, too."""


@dataclass(frozen=True, slots=True)
class LayoutTrials:
    """Tries layouts one after the other, and remembers.

    Attributes:
        request: the request for another number of workers.
        window: the steps that are being timed.
        times: the step time of each layout that was timed.
        noted: the step after which the newest time was noted.
    """

    request: ScaleRequest = field(default_factory=ScaleRequest)
    window: TimingWindow = field(default_factory=TimingWindow)
    times: StepTimes = field(default_factory=StepTimes)
    noted: int = -1

    def after(self, view: View, patience: int, again_s: float) -> LayoutTrials:
        """With one more step.

        Args:
            view: the view after that step.
            patience: the number of steps whose median is a time.
            again_s: the seconds of training for which a time, or a refusal, is believed.
        """
        trials = replace(self, request=self.request.after(view), window=self.window.after(view, patience))
        if len(trials.window.steps) < patience:
            return trials
        step_s = trials.window.step_s
        oldest = view.seconds - max(again_s, AGAIN_STEPS * step_s)
        times = self.times.since(oldest).after(layout_of(view), step_s, view.seconds)
        return LayoutTrials(trials.request.since(oldest), TimingWindow(), times, view.step)

    def asking(self, workers: int, view: View) -> LayoutTrials:
        """Another number of workers is asked for."""
        return replace(self, request=self.request.asking(workers, view))

    def state(self) -> dict[str, Any]:
        """As numbers, by name."""
        steps, times = list(self.window.steps), self.times.state()
        return {"wish": asdict(self.request), "steps": steps, "figures": times, "noted": self.noted}

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> LayoutTrials:
        """The inverse of :meth:`state`."""
        forms = {"wish": ScaleRequest, "steps": tuple[float, ...], "figures": list[tuple[float, ...]], "noted": int}
        found = value_of(forms, state, "trial")
        return cls(found["wish"], TimingWindow(found["steps"]), StepTimes.of(found["figures"]), found["noted"])
