"""The batch and the workers with which training comes forward fastest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, ClassVar, Literal

from unisono.adapt.batch_size_policies import Ramp
from unisono.adapt.layout_trials import Layout, LayoutTrials, layout_of
from unisono.adapt.step_time import Bounds, StepTime, fit, goodput
from unisono.adapt.view import Figure, Policy, View
from unisono.arguments import require_kinds
from unisono.errors import JobError
from unisono.received import value_of

RateRule = Literal["gain", "linear", "sqrt", "none"]

SAME = 0.05
"""Share by which a time may differ from the one that a fit knows, and the fit still holds."""


class GoodputPolicy(Policy):
    """Looks for the batch and the number of workers that maximise the goodput: throughput times statistical efficiency.

    Qiao et al. (Pollux), OSDI 2021: with B samples in a batch, B0 in the one that the job began with, W workers and the
    noise scale φ::

        goodput(W, B) = B / T(W, B) · (φ + B0) / (φ + B)

    T, the seconds of a step, is what was timed; where nothing was tried yet it is what a model says that is fitted to
    what was (:class:`~unisono.adapt.step_time.StepTime`). What cannot be known yet is taken to be favourable. The
    policy aims at the best of all batches and of up to double the workers that were seen, and goes there one step at a
    time: to the next number of workers or the next batch beyond those that were seen, never both at once.

    Batches grow by factors of √2 from the one that the job began with. The learning rate follows over a ramp: ``gain``
    by AdaScale's gain (Johnson et al., ICML 2020), for SGD; ``linear`` (Goyal et al., arXiv 1706.02677); ``sqrt`` for
    Adam and RMSProp (Malladi et al., arXiv 2205.10287).

    The main worker judges, and all do what it says: a fit may differ in its last bits between kinds of processors.

    Args:
        largest: the largest number of samples in a batch: what the workers' memory allows.
        fewest: the smallest number of workers.
        most: the largest number of workers; None for as many as there are shards.
        rule: the rule for the learning rate: ``gain``, ``linear`` or ``sqrt``.
        ramp: the number of steps over which the learning rate follows.
        patience: the number of steps that are timed before anything follows from them.
        margin: the least gain in goodput for which the layout is changed, as a share.
        again_s: the seconds of training, and at least 2000 steps, after which a timed or refused layout may be tried
            again.

    Raises:
        JobError: a number is out of range.
    """

    needs_monitor: ClassVar[bool] = True
    observe_every = 10

    def __init__(
        self,
        largest: int,
        fewest: int = 1,
        most: int | None = None,
        rule: RateRule = "gain",
        ramp: int = 20,
        patience: int = 20,
        margin: float = 0.03,
        again_s: float = 1800.0,
    ) -> None:
        require_kinds(GoodputPolicy.__init__, locals())
        given = f"GoodputPolicy(largest={largest}, fewest={fewest}, most={most}, ramp={ramp}, patience={patience})"
        if min(largest, fewest, ramp, patience) < 1 or (most is not None and most < fewest):
            raise JobError(f"{given}: all need to be above 0, and most no less than fewest")
        if not 0 <= margin < 1 or not again_s > 0:
            raise JobError(f"GoodputPolicy(margin={margin}, again_s={again_s}): 0 up to 1, and above 0")
        self._largest, self._fewest, self._most, self._rule = largest, fewest, most, rule
        self._steps, self._patience, self._margin, self._again_s = ramp, patience, margin, again_s
        self._trials, self._ramp, self._decided_at = LayoutTrials(), Ramp(), 0
        self._fitted: tuple[Mapping[Layout, float], StepTime | None] = {}, None

    def after_step(self, view: View) -> None:
        """Time it, go on with the ramp, and do what was found best."""
        if self._ramp.steps_left:
            factor, self._ramp = self._ramp.step()
            self.set_learning_rate(view.learning_rate * factor, steps_left=self._ramp.steps_left)
        self._trials = self._trials.after(view, self._patience, self._again_s)
        found = view.observed.get(self.name, {})
        if found and self._may_judge(view) and int(found["at_step"] or 0) > self._entered(view):
            self._go(int(found["next_workers"] or 0), int(found["next_batch_size"] or 0), found, view)

    def observe(self, view: View) -> Mapping[str, Figure]:
        """Judge: where to go next, and what speaks for it; nothing if there is nothing better."""
        noise = view.noise
        if not self._may_judge(view) or noise is None or not (noise.scale or 0.0) > 0:
            return {}
        now, model, seconds = layout_of(view), self._model(), self._trials.times.seconds
        most = min(self._most or now.job_shards, now.job_shards)
        bounds = Bounds(view.base_batch_size, self._largest, self._fewest, most)
        promise = {
            one: goodput(one, seconds.get(one) or model.seconds(one), noise, view.base_batch_size)
            for one in (now, *bounds.layouts(now, seconds))
            if one.workers == now.workers or self._trials.request.may_have(one.workers)
        }
        goal = max(promise, key=lambda one: (promise[one], -one.workers, -one.batch_size))
        if promise[goal] < (1 + self._margin) * promise[now]:
            return {}
        following = bounds.step_towards(goal, seconds)
        return {
            "at_step": view.step,
            "next_workers": following.workers,
            "next_batch_size": following.batch_size,
            "goal_workers": goal.workers,
            "goal_batch_size": goal.batch_size,
            "goal_goodput": promise[goal],
            "goodput": promise[now],
            "noise_scale": noise.scale,
            **asdict(model),
        }

    def state_dict(self) -> dict[str, Any]:
        """What was tried, and the ramp."""
        return {"trial": self._trials.state(), "ramp": asdict(self._ramp), "decided_at": self._decided_at}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
        found = value_of({"trial": Any, "ramp": Ramp, "decided_at": int}, state, "state")
        self._trials = LayoutTrials.of(found["trial"])
        self._ramp, self._decided_at = found["ramp"], found["decided_at"]

    def _entered(self, view: View) -> int:
        """The step since which nothing has changed, and nothing was decided."""
        return max(self._decided_at, view.step - view.steady)

    def _may_judge(self, view: View) -> bool:
        """Whether there are times of this layout since it was entered, and nothing is under way."""
        is_quiet = not self._ramp.steps_left and not self._trials.request.workers
        return is_quiet and self._trials.noted > self._entered(view)

    def _go(self, workers: int, samples: int, why: Mapping[str, Figure], view: View) -> None:
        if workers != view.world_size:
            self.resize(workers, before=view.world_size, **why)
            self._trials = self._trials.asking(workers, view)
        if samples != view.batch_size:
            self.set_batch_size(samples, None, before=view.batch_size, **why)
            factor = self._rate_factor(samples, view)
            self._ramp = Ramp(self._steps, factor) if factor != 1 else Ramp()
        if (workers, samples) != (view.world_size, view.batch_size):
            self._decided_at = view.step

    def _rate_factor(self, samples: int, view: View) -> float:
        if self._rule == "gain":
            assert view.noise is not None
            gain = view.noise.gain
            return gain(view.base_batch_size, samples) / gain(view.base_batch_size, view.batch_size)
        power = {"linear": 1.0, "sqrt": 0.5, "none": 0.0}[self._rule]
        return float((samples / view.batch_size) ** power)

    def _model(self) -> StepTime:
        """The fitted one, as long as the figures are nearly those that it was fitted to."""
        seconds = self._trials.times.seconds
        known, model = self._fitted
        if model is None or known.keys() != seconds.keys() or any(_differ(known[one], seconds[one]) for one in known):
            model = fit(seconds)
            self._fitted = seconds, model
        return model


def _differ(one: float, other: float) -> bool:
    return abs(one - other) > SAME * one
