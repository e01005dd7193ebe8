"""A learning rate that is as large as the gradients' noise allows."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import Any, ClassVar, Literal

from unisono.adapt.norms import GradientNorms, NoiseAverage
from unisono.adapt.view import Policy, View
from unisono.arguments import require_kinds
from unisono.errors import JobError, Unreadable
from unisono.received import short, value_of

# A learning rate that grows to what a large batch allows.


class LinearScaling(Policy):
    """Brings the learning rate from the script's to ``factor`` times that, evenly over the first epochs.

    For a batch that is ``factor`` times the one for which the rate was made: Goyal et al., arXiv 1706.02677.

    Args:
        factor: the batch size divided by that of the start.
        samples: the number of samples over which the rate grows, such as those of 5 epochs.

    Raises:
        JobError: a number is not above 0.
    """

    def __init__(self, factor: float, samples: int) -> None:
        require_kinds(LinearScaling.__init__, locals())
        if not factor > 0 or samples < 1:
            raise JobError(f"LinearScaling(factor={factor}, samples={samples}): both need to be above 0")
        self._factor, self._samples = factor, samples
        self.reached = 1.0

    def after_step(self, view: View) -> None:
        """A little more."""
        wanted = 1 + (self._factor - 1) * min(1.0, view.samples / self._samples)
        if wanted != self.reached and view.learning_rate != 0:  # of 0, as at a schedule's end, there are no multiples
            self.set_learning_rate(view.learning_rate * wanted / self.reached, samples=view.samples)
            self.reached = wanted


FORGETS_ALL = 1000
"""How many times as large as the base a batch is whose noise needs no average any more."""


class AdaScale(Policy):
    """Multiplies the learning rate by what a step is worth, and counts steps by that.

    A large batch does not make steps better in proportion to its size, but by its gain r, which is 1 without noise and
    S = batch / base where there is nothing else. So the rate that was made for the base batch is multiplied by r, and
    a step counts as r steps with the base batch, "scale-invariant iterations" (Johnson et al., AdaScale SGD, ICML
    2020). With σ² the variance of a base batch's gradient and μ² the squared norm of the true one::

        r = (σ² + μ²) / (σ²/S + μ²)        rate = r · lr(⌊τ⌋)        τ ← τ + r

    σ² and μ² are averaged over the steps with max(1 - S/1000, 0) of the past. The gain is that of the steps before: a
    step's own gradients are known too late for its rate. The first step has r = 1.

    For Adam there is ``sqrt``: the rate is multiplied by √r, and τ still grows by r. The paper has nothing for Adam;
    AdaptDL does the same with norms of what Adam makes of a gradient. Here they are those of the gradient itself.

    Args:
        base: samples of the batch for which the learning rate was made; by default those of one shard of the batch
            that the job began with.
        rule: the rule for the learning rate: ``linear`` for SGD, ``sqrt`` for Adam.
        schedule: the factor on the script's learning rate after so many scale-invariant iterations, above 0.
        until: the scale-invariant iterations after which the loop ends.

    Attributes:
        tau: scale-invariant iterations so far.
        gain: the gain of the next step.
        factor: the factor on the script's learning rate.

    Raises:
        JobError: a number is not above 0, or there is no such rule.
    """

    needs_monitor: ClassVar[bool] = True

    def __init__(
        self,
        base: int | None = None,
        rule: Literal["linear", "sqrt"] = "linear",
        schedule: Callable[[int], float] = lambda tau: 1.0,
        until: float | None = None,
    ) -> None:
        require_kinds(AdaScale.__init__, locals())
        if (base is not None and base < 1) or (until is not None and not until > 0):
            raise JobError(f"AdaScale(base={base}, until={until}): both need to be above 0")
        self._base, self._power, self._schedule, self._until = base, 0.5 if rule == "sqrt" else 1.0, schedule, until
        self._seen = NoiseAverage.of(0.0)
        self.tau, self.gain, self.factor = 0.0, 1.0, 1.0

    def before_train(self, view: View) -> None:
        """The first step's rate."""
        self._set_rate(view)

    def after_step(self, view: View) -> None:
        """Count the step for what it was worth, and see what the next one is."""
        self.tau += self.gain
        if self._until is not None and self.tau >= self._until:
            self.stop(tau=self.tau)
            return
        base = self._base or view.base_batch_size / view.base_shards
        if view.norms is not None:
            self._see(view.norms, decay=max(1 - view.batch_size / base / FORGETS_ALL, 0.0))
        if self._seen.noise is not None:
            self.gain = self._seen.noise.gain(base, view.batch_size)
        self._set_rate(view)

    def state_dict(self) -> dict[str, Any]:
        """The public attributes, and the averages."""
        return {**super().state_dict(), "seen": asdict(self._seen)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
        others = dict(state)
        seen = value_of(NoiseAverage, others.pop("seen", None), "seen")
        if not 0 <= state["tau"] < math.inf or not state["gain"] > 0 or not state["factor"] > 0:
            raise Unreadable(f"tau is from 0 on, gain and factor are above 0, unlike {short(others)}")
        super().load_state_dict(others)
        self._seen = seen

    def _see(self, norms: GradientNorms, decay: float) -> None:
        variance, signal = (replace(one, decay=decay) for one in (self._seen.variance, self._seen.signal))
        self._seen = NoiseAverage(variance, signal).after(norms)

    def _set_rate(self, view: View) -> None:
        factor = self.gain**self._power * self._schedule(math.floor(self.tau))
        if factor != self.factor and view.learning_rate:
            rate = view.learning_rate * factor / self.factor
            self.set_learning_rate(rate, gain=self.gain, tau=self.tau)
            self.factor = factor


class EdgeOfStability(Policy):
    """Keeps the learning rate at a share of what the critical sharpness allows. Experimental.

    It is measured before the update of every so many steps. A script may measure it instead, with
    ``run.curvature(loss_fn)`` before ``step.run``.

    With the sharpness λ the loss would rise from a learning rate of 2/λ on, so the next one is share · 2/λ. It falls
    at once, and rises by a factor of ``growth`` per measurement at most, which is its warm-up.

    Args:
        share: the share of the critical learning rate, above 0.
        growth: the largest factor by which it rises at a time, above 1.
        every: steps from one measurement to the next, unless ``Monitoring(curvature_every=…)`` says otherwise; 0 leaves
            them to the script.

    Raises:
        JobError: a setting is of another type, or out of range.
    """

    def __init__(self, share: float = 0.5, growth: float = 2.0, every: int = 10) -> None:
        require_kinds(EdgeOfStability.__init__, locals())
        if not 0 < share < math.inf or not 1 < growth < math.inf or every < 0:
            raise JobError(
                f"EdgeOfStability(share={share}, growth={growth}, every={every}): share above 0, growth above 1, every "
                f"from 0 on"
            )
        self._share, self._growth, self._every = share, growth, every

    @property
    def curvature_every(self) -> int:  # type: ignore[override]
        """Steps from one measurement to the next."""
        return self._every

    def after_step(self, view: View) -> None:
        """Follow a new measurement, if the step's line has one."""
        sharpness = view.metrics.get("critical_sharpness")
        if not isinstance(sharpness, int | float) or not math.isfinite(sharpness) or sharpness <= 0:
            return
        wanted = min(self._share * 2 / sharpness, self._growth * view.learning_rate)
        if wanted != view.learning_rate:
            self.set_learning_rate(wanted, critical_sharpness=sharpness, before=view.learning_rate)
