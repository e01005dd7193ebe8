"""Workers on machines that are cheap, and may be taken away."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from unisono.adapt.layout_trials import useful_sizes
from unisono.adapt.view import Figure, Policy, View
from unisono.arguments import require_kinds
from unisono.errors import JobError

# How often to write a checkpoint.


def mean_time_between_failures(seconds: float, failures: int, prior_s: float) -> float:
    """What is expected after so many failures in so many seconds, if one in ``prior_s`` was expected before.

    The mean of the rate under a Gamma prior with one failure in ``prior_s`` seconds: before anything has failed the
    estimate is the prior, or what was survived and the prior together; after many failures the prior counts for one.
    """
    return (seconds + prior_s) / (failures + 1)


def daly_s(checkpoint_s: float, between_failures_s: float) -> float:
    """Seconds of work between two checkpoints that lose the least time to writing them and to work done twice.

    Young, "A first order approximation to the optimum checkpoint interval", CACM 17(9), 1974: the square root of 2 δ M,
    for a checkpoint of δ seconds and M seconds between failures. Daly, "A higher order estimate of the optimum
    checkpoint interval for restart dumps", FGCS 22(3), 2006, equation 37::

        √(2 δ M) · (1 + √(δ / 2M) / 3 + (δ / 2M) / 9) - δ        if δ < 2 M, and M otherwise

    Args:
        checkpoint_s: δ, that writing one takes; above 0.
        between_failures_s: M, on average; above 0.
    """
    share = checkpoint_s / (2 * between_failures_s)
    if share >= 1:
        return between_failures_s
    young = math.sqrt(2 * checkpoint_s * between_failures_s)
    return young * (1 + math.sqrt(share) / 3 + share / 9) - checkpoint_s


Market = Callable[[], Mapping[str, float | int | None]]
"""Says the ``price`` of one worker, and for how many of them there are ``notices`` now; either may be absent."""


class SpotPolicy(Policy):
    """Buys as many workers as the budget pays for, answers notices at once, and writes checkpoints as often as pays.

    - **Size**: the largest useful number of workers with ``price · workers <= budget``. It shrinks at once when they
      get too dear, and grows only if the price could rise by ``margin`` meanwhile.
    - **Notices**: for each new one a checkpoint is written after the same step, and with a budget one worker more is
      asked for, in place of the one that is about to go, until that has left. All that is affordable stays asked for:
      the coordinator gives it as soon as there is room.
    - **Checkpoints**: every τ + δ seconds, with Daly's τ for δ, the seconds that a checkpoint takes, and the mean time
      between failures that was observed (:mod:`unisono.adapt.spot_policy`). Each worker that is lost, or leaves on
      notice, counts as a failure: machines of one market tend to be taken together, and then there is only the
      checkpoint.

    Args:
        market: a function without arguments that the main worker calls every so many steps, and that returns a mapping
            such as ``{"price": 0.31, "notices": 0}``. It may take little time: all workers wait for it. If it raises an
            ``OSError`` (a service that is out of reach), nothing changes; any other error ends the job.
        budget: the budget for all workers together, in the unit of the price; None leaves their number to others.
        fewest: the smallest number of workers, however dear they are.
        most: the largest number of workers; None for as many as there are shards.
        every: the number of steps from one look at the market to the next.
        margin: the share by which the price may rise before a number of workers that was just asked for is too dear.
        prior_s: the expected seconds between failures before anything was observed.
        checkpoint_s: the expected seconds of a checkpoint before one was written.

    Raises:
        JobError: a number is out of range.

    Attributes:
        target: the number of workers that the price allows; 0 before the first look.
        asked_for: the number of workers asked for last; 0 if that was never necessary.
        notices: the notices at the newest look.
        departures: the departures of workers at the newest look.
        gone_by: the number of departures with which all are gone that notices are about; 0 while there are none.
        kept_s: the seconds of training at which the newest checkpoint was asked for.
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
        require_kinds(SpotPolicy.__init__, locals())
        given = f"SpotPolicy(budget={budget}, fewest={fewest}, most={most}, every={every}, margin={margin})"
        if (budget is not None and not budget > 0) or every < 1 or not margin >= 0:
            raise JobError(f"{given}: budget above 0, every from 1, margin from 0")
        if fewest < 1 or (most is not None and most < fewest):
            raise JobError(f"{given}: fewest is at least 1, and most is no less")
        if not prior_s > 0 or not checkpoint_s > 0:
            raise JobError(f"SpotPolicy(prior_s={prior_s}, checkpoint_s={checkpoint_s}): both above 0")
        self.observe_every = every
        self._market, self._budget, self._fewest, self._most = market, budget, fewest, most
        self._margin, self._prior_s, self._checkpoint_s = margin, prior_s, checkpoint_s
        self.target = self.asked_for = self.notices = self.departures = self.gone_by = 0
        self.kept_s = 0.0

    def observe(self, view: View) -> Mapping[str, Figure]:
        """Look at the market."""
        try:
            found = dict(self._market())
        except OSError as error:
            return {"problem": f"{type(error).__name__}: {error}"}
        if not {"price", "notices"} >= found.keys() or not all(_is_amount(value) for value in found.values()):
            raise ValueError(f"market() gave {found}: it takes a 'price' and 'notices', numbers from 0 on")
        return {"price": found.get("price"), "notices": found.get("notices") or 0}

    def after_step(self, view: View) -> None:
        """Answer what the market says, and write a checkpoint if one is due."""
        seen = view.observed.get(self.name, {})
        is_warned = "notices" in seen and self._heed(int(seen["notices"] or 0), view)
        if seen:
            self._resize(seen.get("price"), view)
        self._keep(view, at_once=is_warned)

    def state_dict(self) -> dict[str, Any]:
        """The attributes that change."""
        names = ("target", "asked_for", "notices", "departures", "gone_by", "kept_s")
        return {name: getattr(self, name) for name in names}

    def _heed(self, notices: int, view: View) -> bool:
        """Whether there are new ones."""
        new, self.notices = notices - self.notices, notices
        if new > 0:  # some may have left already, as soon as their hosts were warned
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
        wanted = max(self.target, min(self.target + about_to_go, self._most or view.base_shards, view.base_shards))
        before = self.asked_for or view.world_size
        if wanted != before:
            self.resize(wanted, before=before, price=price, budget=self._budget, notices=self.notices)
            self.asked_for = wanted

    def _affordable(self, budget: float, price: float, view: View) -> int:
        sizes = useful_sizes(view.base_shards, self._fewest, self._most or view.base_shards)
        paid = [workers for workers in sizes if workers * price <= budget] or sizes[:1]
        safe = [workers for workers in paid if workers * price * (1 + self._margin) <= budget] or sizes[:1]
        return paid[-1] if self.target > paid[-1] else max(safe[-1], self.target)

    def _keep(self, view: View, *, at_once: bool) -> None:
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
