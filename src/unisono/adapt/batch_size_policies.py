"""Policies that change the size of the global batch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Literal

from unisono.adapt.view import Policy, View, shards_for
from unisono.arguments import require_kinds
from unisono.errors import JobError
from unisono.received import value_of

# What a worker's memory allows.


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
        """Into how many shards a batch is to be cut; None if it does not matter."""
        return None if self.samples is None else shards_for(batch_size, view.base_shards, self.samples)

    def keep(self, policy: Policy, view: View) -> None:
        """Have a policy cut the batch as it should be."""
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
        """The next step's factor, and what is left after it."""
        each: float = self.factor_left ** (1 / self.steps_left)
        return each, Ramp(self.steps_left - 1, self.factor_left / each)


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
        require_kinds(BatchSizeSchedule.__init__, locals())
        if any(epoch < 1 or not factor > 0 for epoch, factor in factors.items()):
            raise JobError(f"BatchSizeSchedule({dict(factors)}): epochs from 1 on, and factors above 0")
        self._factors, self._limit = dict(factors), ShardLimit(largest_shard)

    def before_train(self, view: View) -> None:
        """The first batch may be too much at once for a worker."""
        self._limit.keep(self, view)

    def after_epoch(self, view: View) -> None:
        """The next one may be one of those."""
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
        require_kinds(NoiseScalePolicy.__init__, locals())
        if largest < 1 or every < 1 or ramp < 1 or not share > 0:
            given = f"largest={largest}, every={every}, ramp={ramp}, share={share}"
            raise JobError(f"NoiseScalePolicy({given}): all need to be above 0")
        self._largest, self._rule, self._every, self._ramp, self._share = largest, rule, every, ramp, share
        self._limit = ShardLimit(largest_shard)
        self._follows = Ramp()

    def before_train(self, view: View) -> None:
        """The first batch may be too much at once for a worker."""
        self._limit.keep(self, view)

    def after_step(self, view: View) -> None:
        """Go on with the ramp, or look."""
        if self._follows.steps_left:
            factor, self._follows = self._follows.step()
            self.set_learning_rate(view.learning_rate * factor, steps_left=self._follows.steps_left)
        elif view.step % self._every == 0 and view.noise is not None and view.noise.scale is not None:
            self._follow(view, view.noise.scale)

    def state_dict(self) -> dict[str, Any]:
        """The ramp."""
        return asdict(self._follows)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
        self._follows = value_of(Ramp, state, "ramp")

    def _follow(self, view: View, scale: float) -> None:
        wanted = self._share * scale
        if wanted >= 2 * view.batch_size and 2 * view.batch_size <= self._largest:
            batch = 2 * view.batch_size
        elif wanted < view.batch_size / 2 and view.batch_size > view.base_batch_size:
            batch = view.batch_size // 2
        else:
            return
        self.set_batch_size(batch, self._limit.shards(batch, view), noise_scale=scale, before=view.batch_size)
        power = {"linear": 1.0, "sqrt": 0.5, "none": 0.0}[self._rule]
        if power:
            self._follows = Ramp(self._ramp, (batch / view.batch_size) ** power)
