"""Policies that choose the batch and the number of workers by speed or cost, also on hosts that may be taken away."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import Any, ClassVar, Literal

from unisono.adapt.batch_policies import Ramp
from unisono.adapt.layouts import Bounds, Layout, LayoutTrials, StepTime, fit, goodput, layout_of, useful_sizes
from unisono.adapt.view import Figure, Policy, View
from unisono.arguments import require_types
from unisono.errors import JobError
from unisono.received import value_of

RateRule = Literal["gain", "linear", "sqrt", "none"]

SAME = 0.05
"""The share by which a time may differ from the one to which a model was fitted, before the model is fitted anew."""


class GoodputPolicy(Policy):
    """Looks for the batch and the number of workers that maximise the goodput: throughput times statistical efficiency.

    Qiao et al. (Pollux), OSDI 2021: with B samples in a batch, B0 in the one that the job began with, W workers and the
    noise scale φ::

        goodput(W, B) = B / T(W, B) · (φ + B0) / (φ + B)

    T, the seconds of a step, was timed for layouts that were tried; for others it comes from a model that is fitted to
    these times (:class:`~unisono.adapt.layouts.StepTime`). Quantities that the times do not show yet are taken to be
    favourable. The policy aims at the best of all batches and of up to double the largest number of workers that was
    tried, and goes there one step at a time: to the next number of workers or the next batch beyond those that were
    tried, never both at once.

    Batches grow by factors of √2 from the one that the job began with. The learning rate follows over a ramp: ``gain``
    by AdaScale's gain (Johnson et al., ICML 2020), for SGD; ``linear`` (Goyal et al., arXiv 1706.02677); ``sqrt`` for
    Adam and RMSProp (Malladi et al., arXiv 2205.10287).

    The main worker decides for all workers, since a fit may differ in its last bits between kinds of processors.

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
        require_types(GoodputPolicy.__init__, locals())
        call = f"GoodputPolicy(largest={largest}, fewest={fewest}, most={most}, ramp={ramp}, patience={patience})"
        if min(largest, fewest, ramp, patience) < 1 or (most is not None and most < fewest):
            raise JobError(f"{call}: all need to be above 0, and most no less than fewest")
        if not 0 <= margin < 1 or not again_s > 0:
            raise JobError(f"GoodputPolicy(margin={margin}, again_s={again_s}): 0 up to 1, and above 0")
        self._largest, self._fewest, self._most, self._rule = largest, fewest, most, rule
        self._ramp_steps, self._patience, self._margin, self._again_s = ramp, patience, margin, again_s
        self._trials, self._ramp, self._decided_at = LayoutTrials(), Ramp(), 0
        self._fitted: tuple[Mapping[Layout, float], StepTime | None] = {}, None

    def after_step(self, view: View) -> None:
        """Note the step's time, go on with the ramp, and change the layout as the main worker has decided."""
        if self._ramp.steps_left:
            factor, self._ramp = self._ramp.step()
            self.set_learning_rate(view.learning_rate * factor, steps_left=self._ramp.steps_left)
        self._trials = self._trials.after(view, self._patience, self._again_s)
        best = view.observed.get(self.name, {})
        if best and self._may_decide(view) and int(best["at_step"] or 0) > self._entered(view):
            self._change(int(best["next_workers"] or 0), int(best["next_batch_size"] or 0), best, view)

    def observe(self, view: View) -> Mapping[str, Figure]:
        """Return the next layout with the figures behind it; nothing if there is no better one."""
        noise = view.noise
        if not self._may_decide(view) or noise is None or not (noise.scale or 0.0) > 0:
            return {}
        now, model, seconds = layout_of(view), self._model(), self._trials.seconds
        most = min(self._most or now.job_shards, now.job_shards)
        bounds = Bounds(view.base_batch_size, self._largest, self._fewest, most)
        expected = {
            layout: goodput(layout, seconds.get(layout) or model.seconds(layout), noise, view.base_batch_size)
            for layout in (now, *bounds.layouts(now, seconds))
            if layout.workers == now.workers or self._trials.may_have(layout.workers)
        }
        goal = max(expected, key=lambda layout: (expected[layout], -layout.workers, -layout.batch_size))
        if expected[goal] < (1 + self._margin) * expected[now]:
            return {}
        next_layout = bounds.step_towards(goal, seconds)
        return {
            "at_step": view.step,
            "next_workers": next_layout.workers,
            "next_batch_size": next_layout.batch_size,
            "goal_workers": goal.workers,
            "goal_batch_size": goal.batch_size,
            "goal_goodput": expected[goal],
            "goodput": expected[now],
            "noise_scale": noise.scale,
            **asdict(model),
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the tried layouts, and the ramp."""
        return {"trial": self._trials.state(), "ramp": asdict(self._ramp), "decided_at": self._decided_at}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the result of :meth:`state_dict`."""
        values = value_of({"trial": Any, "ramp": Ramp, "decided_at": int}, state, "state")
        self._trials = LayoutTrials.of(values["trial"])
        self._ramp, self._decided_at = values["ramp"], values["decided_at"]

    def _entered(self, view: View) -> int:
        """The step of the last change of the layout, or of the last decision, whichever is later."""
        return max(self._decided_at, view.step - view.steady)

    def _may_decide(self, view: View) -> bool:
        """Whether this layout was timed since it was entered, and neither a ramp nor a request is under way."""
        is_quiet = not self._ramp.steps_left and not self._trials.workers
        return is_quiet and self._trials.noted > self._entered(view)

    def _change(self, workers: int, samples: int, why: Mapping[str, Figure], view: View) -> None:
        if workers != view.world_size:
            self.resize(workers, before=view.world_size, **why)
            self._trials = self._trials.asking(workers, view)
        if samples != view.batch_size:
            self.set_batch_size(samples, None, before=view.batch_size, **why)
            factor = self._rate_factor(samples, view)
            self._ramp = Ramp(self._ramp_steps, factor) if factor != 1 else Ramp()
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
        """The model of the step time, fitted anew if the times have changed by more than ``SAME``."""
        seconds = self._trials.seconds
        fitted, model = self._fitted
        if (
            model is None
            or fitted.keys() != seconds.keys()
            or any(_differ(fitted[layout], seconds[layout]) for layout in fitted)
        ):
            model = fit(seconds)
            self._fitted = seconds, model
        return model


def _differ(first: float, second: float) -> bool:
    return abs(first - second) > SAME * first


class ScalingPolicy(Policy):
    """Adds workers while the speedup pays for them, and drops those that bring too little.

    An hour of the job costs 1 for the time that passes, and ``price`` for each worker. So a step costs::

        cost(W) = (1 + price · W) · T(W)

    with T seconds on W workers, and the policy looks for the number with the lowest cost: one more worker pays if it
    makes training faster by a larger factor than it makes an hour dearer. By Amdahl's law with a serial share s of the
    work that is W = √((1 - s) / (price · s)).

    The policy tries numbers of workers, times their steps, and leaves those that cost more. It tries only the next two
    larger and smaller numbers, and a larger one only if it would pay with perfect scaling.

    Args:
        price: the price of a worker's hour. 1 is as much as it is worth to end the job an hour earlier; 0 is for the
            fastest.
        fewest: the smallest number of workers.
        most: the largest number of workers; None for as many as there are shards.
        patience: the number of steps that are timed before the policy decides.
        margin: the least share of the cost that a change has to save.
        again_s: the seconds of training, and at least 2000 steps, after which a timed or refused number may be tried
            again.

    Raises:
        JobError: a number is out of range.
    """

    def __init__(
        self,
        price: float = 0.1,
        fewest: int = 1,
        most: int | None = None,
        patience: int = 20,
        margin: float = 0.05,
        again_s: float = 900.0,
    ) -> None:
        require_types(ScalingPolicy.__init__, locals())
        call = f"ScalingPolicy(price={price}, fewest={fewest}, most={most}, patience={patience}, margin={margin})"
        if not price >= 0 or not 0 <= margin < 1 or patience < 1 or not again_s > 0:
            raise JobError(f"{call}: price from 0, margin from 0 and below 1, patience from 1, again_s above 0")
        if fewest < 1 or (most is not None and most < fewest):
            raise JobError(f"{call}: fewest is at least 1, and most is no less")
        self._price, self._fewest, self._most = price, fewest, most
        self._patience, self._margin, self._again_s = patience, margin, again_s
        self._trials = LayoutTrials()

    def after_step(self, view: View) -> None:
        """Note the step's time; when a layout is timed, compare the numbers of workers."""
        self._trials = self._trials.after(view, self._patience, self._again_s)
        if self._trials.noted == view.step and not self._trials.workers:
            now = layout_of(view)
            timed = {layout.workers: step_s for layout, step_s in self._trials.seconds.items() if _is_like(layout, now)}
            if (workers := self._best(now, timed)) != now.workers:
                figures = {f"step_s_{number}": step_s for number, step_s in sorted(timed.items())}
                self.resize(workers, before=now.workers, price=self._price, **figures)
                self._trials = self._trials.asking(workers, view)

    def state_dict(self) -> dict[str, Any]:
        """Return the tried layouts."""
        return self._trials.state()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the result of :meth:`state_dict`."""
        self._trials = LayoutTrials.of(state)

    def _best(self, now: Layout, timed: Mapping[int, float]) -> int:
        """The best number of workers that was timed; if that is the present one, a neighbour that was not timed."""
        most = min(self._most or now.job_shards, now.job_shards)
        bounded = max(min(now.workers, most), min(self._fewest, most))
        costs = {workers: self._cost(workers, step_s) for workers, step_s in timed.items()}
        limit = (1 - self._margin) * costs[now.workers]
        better = [workers for workers, cost in costs.items() if cost < limit and self._fewest <= workers <= most]
        sizes = useful_sizes(now.job_shards, self._fewest, most)
        larger = [workers for workers in sizes if workers > now.workers and self._could_pay(workers, timed, now, limit)]
        smaller = [workers for workers in reversed(sizes) if workers < now.workers]
        new = [workers for workers in (*larger[:2], *smaller[:2]) if workers not in timed]
        in_order = [bounded] if bounded != now.workers else [*sorted(better, key=lambda workers: costs[workers]), *new]
        return next((workers for workers in in_order if self._trials.may_have(workers)), now.workers)

    def _could_pay(self, workers: int, timed: Mapping[int, float], now: Layout, limit: float) -> bool:
        """Whether more workers would cost less, with perfect scaling from each smaller number that was timed."""
        widest = replace(now, workers=workers).widest
        shares = [s / replace(now, workers=fewer).widest for fewer, s in timed.items() if fewer < workers]
        return self._cost(workers, widest * max(shares)) < limit

    def _cost(self, workers: int, step_s: float) -> float:
        return (1 + self._price * workers) * step_s


def _is_like(first: Layout, second: Layout) -> bool:
    """Whether two layouts differ at most in the number of workers."""
    return replace(first, workers=second.workers) == second


# How often to write a checkpoint.


def mean_time_between_failures(seconds: float, failures: int, prior_s: float) -> float:
    """The expected seconds between failures, after a number of failures in a time, given the seconds expected before.

    It follows from the mean of the failure rate under a Gamma prior with one failure in ``prior_s`` seconds. Without a
    failure the estimate is the prior plus the time so far; after many, the prior counts as one failure.
    """
    return (seconds + prior_s) / (failures + 1)


def daly_s(checkpoint_s: float, between_failures_s: float) -> float:
    """Seconds of work between two checkpoints that lose the least time to writing them and to work done twice.

    Young, "A first order approximation to the optimum checkpoint interval", CACM 17(9), 1974: the square root of 2 δ M,
    for a checkpoint of δ seconds and M seconds between failures. Daly, "A higher order estimate of the optimum
    checkpoint interval for restart dumps", FGCS 22(3), 2006, equation 37::

        √(2 δ M) · (1 + √(δ / 2M) / 3 + (δ / 2M) / 9) - δ        if δ < 2 M, and M otherwise

    Args:
        checkpoint_s: δ, the seconds that writing one takes; above 0.
        between_failures_s: M, the mean seconds between failures; above 0.
    """
    share = checkpoint_s / (2 * between_failures_s)
    if share >= 1:
        return between_failures_s
    young = math.sqrt(2 * checkpoint_s * between_failures_s)
    return young * (1 + math.sqrt(share) / 3 + share / 9) - checkpoint_s


Market = Callable[[], Mapping[str, float | int | None]]
"""Returns the ``price`` of one worker, and the number of workers with ``notices`` now; either may be absent."""


class SpotPolicy(Policy):
    """Buys as many workers as the budget pays for, answers notices at once, and writes checkpoints as often as pays.

    - **Size**: the largest useful number of workers with ``price · workers <= budget``. It shrinks at once when they
      get too dear, and grows only if the price could rise by ``margin`` meanwhile.
    - **Notices**: for each new notice a checkpoint is written after the same step. With a budget one more worker is
      requested, in place of the one that is about to go, until that has left. The request for all affordable workers
      stays: the coordinator starts them as soon as there is room.
    - **Checkpoints**: every τ + δ seconds, with Daly's τ for δ, the seconds of a checkpoint, and the mean time between
      failures that was observed (:mod:`unisono.adapt.layout_policies`). Each worker that is lost, or leaves on notice,
      counts as a failure: machines of one market tend to be taken together, and then only the checkpoint is left.

    Args:
        market: a function without arguments that the main worker calls every so many steps, and that returns a mapping
            such as ``{"price": 0.31, "notices": 0}``. It may take little time: all workers wait for it. If it raises an
            ``OSError`` (a service that is out of reach), nothing changes; any other error ends the job.
        budget: the budget for all workers together, in the unit of the price; None leaves their number to others.
        fewest: the smallest number of workers, however dear they are.
        most: the largest number of workers; None for as many as there are shards.
        every: the number of steps from one call of ``market`` to the next.
        margin: the share by which the price may rise before a number of workers that was just requested is too dear.
        prior_s: the expected seconds between failures before anything was observed.
        checkpoint_s: the expected seconds of a checkpoint before one was written.

    Raises:
        JobError: a number is out of range.

    Attributes:
        target: the number of workers that the price allows; 0 before the first price.
        asked_for: the number of workers requested last; 0 if none was.
        notices: the number of notices at the newest call of ``market``.
        departures: the number of departures of workers at that call.
        gone_by: the number of departures at which all workers with notices are gone; 0 while there are no notices.
        kept_s: the seconds of training at which the newest checkpoint was requested.
    """

    def __init__(
        self,
        market: Market,
        budget: float | None = None,
        fewest: int = 1,
        most: int | None = None,
        every: int = 5,
        margin: float = 0.1,
        prior_s: float = 6 * 3600.0,
        checkpoint_s: float = 1.0,
    ) -> None:
        require_types(SpotPolicy.__init__, locals())
        call = f"SpotPolicy(budget={budget}, fewest={fewest}, most={most}, every={every}, margin={margin})"
        if (budget is not None and not budget > 0) or every < 1 or not margin >= 0:
            raise JobError(f"{call}: budget above 0, every from 1, margin from 0")
        if fewest < 1 or (most is not None and most < fewest):
            raise JobError(f"{call}: fewest is at least 1, and most is no less")
        if not prior_s > 0 or not checkpoint_s > 0:
            raise JobError(f"SpotPolicy(prior_s={prior_s}, checkpoint_s={checkpoint_s}): both above 0")
        self.observe_every = every
        self._market, self._budget, self._fewest, self._most = market, budget, fewest, most
        self._margin, self._prior_s, self._checkpoint_s = margin, prior_s, checkpoint_s
        self.target = self.asked_for = self.notices = self.departures = self.gone_by = 0
        self.kept_s = 0.0

    def observe(self, view: View) -> Mapping[str, Figure]:
        """Return the price and the notices of the market."""
        try:
            market = dict(self._market())
        except OSError as error:
            return {"problem": f"{type(error).__name__}: {error}"}
        if not {"price", "notices"} >= market.keys() or not all(_is_amount(value) for value in market.values()):
            raise ValueError(f"market() gave {market}: it takes a 'price' and 'notices', numbers from 0 on")
        return {"price": market.get("price"), "notices": market.get("notices") or 0}

    def after_step(self, view: View) -> None:
        """React to the price and to notices, and write a checkpoint if one is due."""
        market = view.observed.get(self.name, {})
        has_new_notices = "notices" in market and self._take_notices(int(market["notices"] or 0), view)
        if market:
            self._resize(market.get("price"), view)
        self._write_checkpoint(view, at_once=has_new_notices)

    def state_dict(self) -> dict[str, Any]:
        """The attributes that change."""
        names = ("target", "asked_for", "notices", "departures", "gone_by", "kept_s")
        return {name: getattr(self, name) for name in names}

    def _take_notices(self, notices: int, view: View) -> bool:
        """Note the number of notices; return whether there are new ones."""
        new, self.notices = notices - self.notices, notices
        if new > 0:  # from the departures of the last call, since workers with new notices may have left since then
            self.gone_by = max(self.gone_by, self.departures) + new
        elif not notices:
            self.gone_by = 0
        self.departures = view.departures
        return new > 0

    def _resize(self, price: Figure, view: View) -> None:
        if self._budget is None:
            return
        self.target = self.target or view.world_size
        if isinstance(price, float | int):
            self.target = self._affordable(self._budget, price, view)
        about_to_go = min(self.notices, max(0, self.gone_by - view.departures))
        workers = max(self.target, min(self.target + about_to_go, self._most or view.base_shards, view.base_shards))
        before = self.asked_for or view.world_size
        if workers != before:
            self.resize(workers, before=before, price=price, budget=self._budget, notices=self.notices)
            self.asked_for = workers

    def _affordable(self, budget: float, price: float, view: View) -> int:
        sizes = useful_sizes(view.base_shards, self._fewest, self._most or view.base_shards)
        affordable = [workers for workers in sizes if workers * price <= budget] or sizes[:1]
        safe = [workers for workers in affordable if workers * price * (1 + self._margin) <= budget] or sizes[:1]
        return affordable[-1] if self.target > affordable[-1] else max(safe[-1], self.target)

    def _write_checkpoint(self, view: View, *, at_once: bool) -> None:
        checkpoint_s = max((worker.checkpoint_s for worker in view.workers), default=0.0) or self._checkpoint_s
        between_s = mean_time_between_failures(view.seconds, view.departures, self._prior_s)
        every_s = daly_s(checkpoint_s, between_s)
        if at_once or view.seconds - self.kept_s >= every_s + checkpoint_s:
            self.kept_s = view.seconds
            self.checkpoint(
                every_s=every_s, checkpoint_s=checkpoint_s, between_failures_s=between_s, notices=self.notices
            )


def _is_amount(value: Any) -> bool:
    return value is None or (isinstance(value, float | int) and math.isfinite(value) and value >= 0)
