"""As many workers as pay for themselves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from unisono.adapt.layout_trials import Layout, LayoutTrials, layout_of, useful_sizes
from unisono.adapt.view import Policy, View
from unisono.arguments import require_kinds
from unisono.errors import JobError


class ScalingPolicy(Policy):
    """Adds workers while the speedup pays for them, and drops those that bring too little.

    An hour of the job costs 1 for the time that passes, and ``price`` for each worker. So a step costs::

        cost(W) = (1 + price · W) · T(W)

    with T seconds on W workers, and the number with the lowest cost is wanted: one more worker pays if it makes
    training faster by a larger factor than it makes an hour dearer. By Amdahl's law with a serial share s of the work
    that is W = √((1 - s) / (price · s)).

    Nothing is guessed: a number of workers is tried, its steps are timed, and it is left again if it costs more. Only
    the next two larger and smaller ones are tried, larger ones if they would pay, did they scale perfectly.

    Args:
        price: the price of a worker's hour. 1 is as much as it is worth to end the job an hour earlier; 0 is for the
            fastest.
        fewest: workers.
        most: workers; None for as many as there are shards.
        patience: steps that are timed before anything follows from them.
        margin: share of the cost that a change has to save.
        again_s: seconds of training, and at least 2000 steps, after which what was timed, or could not be had, may be
            tried again.

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
        require_kinds(ScalingPolicy.__init__, locals())
        given = f"ScalingPolicy(price={price}, fewest={fewest}, most={most}, patience={patience}, margin={margin})"
        if not price >= 0 or not 0 <= margin < 1 or patience < 1 or not again_s > 0:
            raise JobError(f"{given}: price from 0, margin from 0 and below 1, patience from 1, again_s above 0")
        if fewest < 1 or (most is not None and most < fewest):
            raise JobError(f"{given}: fewest is at least 1, and most is no less")
        self._price, self._fewest, self._most = price, fewest, most
        self._patience, self._margin, self._again_s = patience, margin, again_s
        self._trials = LayoutTrials()

    def after_step(self, view: View) -> None:
        """Time it; after some steps, compare."""
        self._trials = self._trials.after(view, self._patience, self._again_s)
        if self._trials.noted == view.step and not self._trials.request.workers:
            now = layout_of(view)
            seen = {one.workers: step_s for one, step_s in self._trials.times.seconds.items() if _is_like(one, now)}
            if (wanted := self._wanted(now, seen)) != now.workers:
                figures = {f"step_s_{workers}": step_s for workers, step_s in sorted(seen.items())}
                self.resize(wanted, before=now.workers, price=self._price, **figures)
                self._trials = self._trials.asking(wanted, view)

    def state_dict(self) -> dict[str, Any]:
        """What was tried."""
        return self._trials.state()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
        self._trials = LayoutTrials.of(state)

    def _wanted(self, now: Layout, seen: Mapping[int, float]) -> int:
        """The best of those that were tried; if that is what there is, a neighbour that was not."""
        most = min(self._most or now.job_shards, now.job_shards)
        bounded = max(min(now.workers, most), min(self._fewest, most))
        costs = {workers: self._cost(workers, step_s) for workers, step_s in seen.items()}
        limit = (1 - self._margin) * costs[now.workers]
        better = [workers for workers, cost in costs.items() if cost < limit and self._fewest <= workers <= most]
        sizes = useful_sizes(now.job_shards, self._fewest, most)
        larger = [workers for workers in sizes if workers > now.workers and self._could_pay(workers, seen, now, limit)]
        smaller = [workers for workers in reversed(sizes) if workers < now.workers]
        new = [workers for workers in (*larger[:2], *smaller[:2]) if workers not in seen]
        in_turn = [bounded] if bounded != now.workers else [*sorted(better, key=lambda one: costs[one]), *new]
        return next((workers for workers in in_turn if self._trials.request.may_have(workers)), now.workers)

    def _could_pay(self, workers: int, seen: Mapping[int, float], now: Layout, limit: float) -> bool:
        """Whether more workers would, if they scaled perfectly from each smaller number that was timed."""
        widest = replace(now, workers=workers).widest
        shares = [s / replace(now, workers=fewer).widest for fewer, s in seen.items() if fewer < workers]
        return self._cost(workers, widest * max(shares)) < limit

    def _cost(self, workers: int, step_s: float) -> float:
        return (1 + self._price * workers) * step_s


def _is_like(one: Layout, other: Layout) -> bool:
    """But for the workers."""
    return replace(one, workers=other.workers) == other
