"""Policies that change the size of the global batch, and the learning rate with the gradients' noise."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar, Literal

from unisono.adapt.norms import GradientNorms, NoiseAverage
from unisono.adapt.view import Policy, View, shards_for
from unisono.arguments import require_types
from unisono.errors import JobError, Unreadable
from unisono.received import short, value_of

# The limits of a worker's memory.


@dataclass(frozen=True, slots=True)
class ShardLimit:
    """The largest size of a shard. A worker computes its shards one after the other, so this bounds its activations.

    Attributes:
        samples: the largest number of samples in a shard; None for no limit.

    Raises:
        JobError: the limit is below 1.
    """

    samples: int | None = None

    def __post_init__(self) -> None:
        if self.samples is not None and self.samples < 1:
            raise JobError(f"largest_shard={self.samples}: a shard needs room for 1 sample at least")

    def shards(self, batch_size: int, view: View) -> int | None:
        """The number of shards into which to split a batch; None to keep the present number."""
        return None if self.samples is None else shards_for(batch_size, view.base_shards, self.samples)

    def keep(self, policy: Policy, view: View) -> None:
        """Have a policy split the batch by this limit."""
        if (shards := self.shards(view.batch_size, view)) not in (None, view.shards):
            policy.set_batch_size(view.batch_size, shards, largest_shard=self.samples)


# A learning rate that changes smoothly.


@dataclass(frozen=True, slots=True)
class Ramp:
    """A factor, spread evenly over steps: an immediate jump hurts (Lin et al., arXiv 1904.12043).

    Attributes:
        steps_left: the number of steps that are left.
        factor_left: the factor by which the rate is still to be multiplied, over all of them.
    """

    steps_left: int = 0
    factor_left: float = 1.0

    def __post_init__(self) -> None:
        if self.steps_left < 0 or not 0 < self.factor_left < math.inf:
            raise ValueError(f"{self.factor_left!r} over {self.steps_left!r} steps: a factor above 0 over 0 or more")

    def step(self) -> tuple[float, Ramp]:
        """Return the next step's factor, and the rest after it."""
        factor: float = self.factor_left ** (1 / self.steps_left)
        return factor, Ramp(self.steps_left - 1, self.factor_left / factor)


# A batch that grows at epochs that are known beforehand.


class BatchSizeSchedule(Policy):
    """Multiplies the batch at the beginning of some epochs, and leaves the learning rate alone.

    In place of a decay of the learning rate: Smith et al., "Don't decay the learning rate, increase the batch size",
    arXiv 1711.00489.

    Args:
        factors: the factor on the batch size, by the epoch at whose beginning it applies; relative to the batch before.
        largest_shard: the largest number of samples in a shard: what a worker's memory allows. The number of shards
            grows and shrinks with the batch; by default it stays.

    Raises:
        JobError: an epoch or a size below 1, or a factor that is not above 0.
    """

    def __init__(self, factors: Mapping[int, float] = {30: 5, 60: 5, 90: 5}, largest_shard: int | None = None) -> None:
        require_types(BatchSizeSchedule.__init__, locals())
        if any(epoch < 1 or not factor > 0 for epoch, factor in factors.items()):
            raise JobError(f"BatchSizeSchedule({dict(factors)}): epochs from 1 on, and factors above 0")
        self._factors, self._limit = dict(factors), ShardLimit(largest_shard)

    def before_train(self, view: View) -> None:
        """Split the first batch if it may be too large for a worker."""
        self._limit.keep(self, view)

    def after_epoch(self, view: View) -> None:
        """Change the batch size if the schedule has a factor for the next epoch."""
        if (factor := self._factors.get(view.epoch + 1)) is not None:
            batch = round(view.batch_size * factor)
            self.set_batch_size(batch, self._limit.shards(batch, view), epoch=view.epoch + 1, factor=factor)


# A batch that follows the gradients' noise.

Rule = Literal["linear", "sqrt", "none"]


class NoiseScalePolicy(Policy):
    """Lets the batch follow the gradient noise scale, and the learning rate the batch.

    Below the noise scale a batch of twice the size is worth nearly twice the steps; above it samples are wasted
    (McCandlish et al., arXiv 1812.06162). The batch is doubled or halved, and is never smaller than the one that the
    job began with. The learning rate follows by the rule for the optimizer: ``linear`` for SGD (Goyal et al., arXiv
    1706.02677), ``sqrt`` for Adam and RMSProp (Malladi et al., arXiv 2205.10287), over a ramp of some steps (Lin et
    al., arXiv 1904.12043).

    Args:
        largest: the largest number of samples in a batch: what the workers' memory allows, unless ``largest_shard``
            says that.
        rule: the rule for the learning rate: ``linear``, ``sqrt`` or ``none``.
        every: the number of steps between two decisions, and the least number before the first one.
        ramp: the number of steps over which the learning rate follows.
        share: the batch size to aim at, as a share of the noise scale.
        largest_shard: the largest number of samples in a shard: what a worker's memory allows. The number of shards
            grows and shrinks with the batch; by default it stays.

    Raises:
        JobError: a number is out of range.
    """

    needs_monitor: ClassVar[bool] = True

    def __init__(
        self,
        largest: int,
        rule: Rule = "linear",
        every: int = 50,
        ramp: int = 20,
        share: float = 1.0,
        largest_shard: int | None = None,
    ) -> None:
        require_types(NoiseScalePolicy.__init__, locals())
        if largest < 1 or every < 1 or ramp < 1 or not share > 0:
            arguments = f"largest={largest}, every={every}, ramp={ramp}, share={share}"
            raise JobError(f"NoiseScalePolicy({arguments}): all need to be above 0")
        self._largest, self._rule, self._every, self._ramp_steps, self._share = largest, rule, every, ramp, share
        self._limit = ShardLimit(largest_shard)
        self._ramp = Ramp()

    def before_train(self, view: View) -> None:
        """Split the first batch if it may be too large for a worker."""
        self._limit.keep(self, view)

    def after_step(self, view: View) -> None:
        """Go on with the ramp, or compare the batch with the noise scale."""
        if self._ramp.steps_left:
            factor, self._ramp = self._ramp.step()
            self.set_learning_rate(view.learning_rate * factor, steps_left=self._ramp.steps_left)
        elif view.step % self._every == 0 and view.noise is not None and view.noise.scale is not None:
            self._follow_noise(view, view.noise.scale)

    def state_dict(self) -> dict[str, Any]:
        """The ramp."""
        return asdict(self._ramp)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the result of :meth:`state_dict`."""
        self._ramp = value_of(Ramp, state, "ramp")

    def _follow_noise(self, view: View, scale: float) -> None:
        target = self._share * scale
        if target >= 2 * view.batch_size and 2 * view.batch_size <= self._largest:
            batch = 2 * view.batch_size
        elif target < view.batch_size / 2 and view.batch_size > view.base_batch_size:
            batch = view.batch_size // 2
        else:
            return
        self.set_batch_size(batch, self._limit.shards(batch, view), noise_scale=scale, before=view.batch_size)
        power = {"linear": 1.0, "sqrt": 0.5, "none": 0.0}[self._rule]
        if power:
            self._ramp = Ramp(self._ramp_steps, (batch / view.batch_size) ** power)


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
        require_types(LinearScaling.__init__, locals())
        if not factor > 0 or samples < 1:
            raise JobError(f"LinearScaling(factor={factor}, samples={samples}): both need to be above 0")
        self._factor, self._samples = factor, samples
        self.reached = 1.0

    def after_step(self, view: View) -> None:
        """Raise the learning rate by its share for the samples so far."""
        factor = 1 + (self._factor - 1) * min(1.0, view.samples / self._samples)
        if factor != self.reached and view.learning_rate != 0:  # a rate of 0, as at a schedule's end, stays 0
            self.set_learning_rate(view.learning_rate * factor / self.reached, samples=view.samples)
            self.reached = factor


FORGETS_ALL = 1000
"""The ratio of a batch to the base from which on its noise needs no average."""


class AdaScale(Policy):
    """Multiplies the learning rate by the gain of a step, and counts steps by their gain.

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
        require_types(AdaScale.__init__, locals())
        if (base is not None and base < 1) or (until is not None and not until > 0):
            raise JobError(f"AdaScale(base={base}, until={until}): both need to be above 0")
        self._base, self._power, self._schedule, self._until = base, 0.5 if rule == "sqrt" else 1.0, schedule, until
        self._average = NoiseAverage.of(0.0)
        self.tau, self.gain, self.factor = 0.0, 1.0, 1.0

    def before_train(self, view: View) -> None:
        """Set the first step's rate."""
        self._set_rate(view)

    def after_step(self, view: View) -> None:
        """Count the step by its gain, and set the gain and the rate of the next one."""
        self.tau += self.gain
        if self._until is not None and self.tau >= self._until:
            self.stop(tau=self.tau)
            return
        base = self._base or view.base_batch_size / view.base_shards
        if view.norms is not None:
            self._add(view.norms, decay=max(1 - view.batch_size / base / FORGETS_ALL, 0.0))
        if self._average.noise is not None:
            self.gain = self._average.noise.gain(base, view.batch_size)
        self._set_rate(view)

    def state_dict(self) -> dict[str, Any]:
        """The public attributes, and the averages."""
        return {**super().state_dict(), "seen": asdict(self._average)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the result of :meth:`state_dict`."""
        attributes = dict(state)
        average = value_of(NoiseAverage, attributes.pop("seen", None), "seen")
        if not 0 <= state["tau"] < math.inf or not state["gain"] > 0 or not state["factor"] > 0:
            raise Unreadable(f"tau is from 0 on, gain and factor are above 0, unlike {short(attributes)}")
        super().load_state_dict(attributes)
        self._average = average

    def _add(self, norms: GradientNorms, decay: float) -> None:
        variance, signal = (replace(average, decay=decay) for average in (self._average.variance, self._average.signal))
        self._average = NoiseAverage(variance, signal).after(norms)

    def _set_rate(self, view: View) -> None:
        factor = self.gain**self._power * self._schedule(math.floor(self.tau))
        if factor != self.factor and view.learning_rate:
            rate = view.learning_rate * factor / self.factor
            self.set_learning_rate(rate, gain=self.gain, tau=self.tau)
            self.factor = factor


class EdgeOfStability(Policy):
    """Keeps the learning rate at a share of the one that the critical sharpness allows. Experimental.

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
        require_types(EdgeOfStability.__init__, locals())
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
        rate = min(self._share * 2 / sharpness, self._growth * view.learning_rate)
        if rate != view.learning_rate:
            self.set_learning_rate(rate, critical_sharpness=sharpness, before=view.learning_rate)
