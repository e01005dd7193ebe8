"""A batch that follows the gradients' noise."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, ClassVar, Literal

from unisono.adapt.policy import Policy
from unisono.adapt.ramp import Ramp
from unisono.adapt.shard_limit import ShardLimit
from unisono.adapt.view import View
from unisono.errors import JobError
from unisono.received import value_of

Rule = Literal["linear", "sqrt", "none"]


class NoiseScalePolicy(Policy):
    """Lets the batch follow the gradient noise scale, and the learning rate the batch.

    Below the noise scale a batch of twice the size is worth nearly twice the steps; above it samples are wasted
    (McCandlish et al., arXiv 1812.06162). The batch is doubled or halved, and is never smaller than the one that the
    job began with. The learning rate follows by the rule for the optimizer: ``linear`` for SGD (Goyal et al., arXiv
    1706.02677), ``sqrt`` for Adam and RMSProp (Malladi et al., arXiv 2205.10287), over a ramp of some steps (Lin et
    al., arXiv 1904.12043).

    Args:
        largest: samples in a batch at most: what the workers' memory allows, unless ``largest_shard`` says that.
        rule: for the learning rate.
        every: steps between two looks, and at least as many before the first one.
        ramp: steps over which the learning rate follows.
        share: of the noise scale that the batch is to have.
        largest_shard: samples in one shard at most: what a worker's memory allows. The number of shards grows and
            shrinks with the batch; by default it stays.

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
        if largest < 1 or every < 1 or ramp < 1 or not share > 0:
            given = f"largest={largest}, every={every}, ramp={ramp}, share={share}"
            raise JobError(f"NoiseScalePolicy({given}): all need to be above 0")
        if rule not in ("linear", "sqrt", "none"):
            raise JobError(f"NoiseScalePolicy(rule={rule!r}): use 'linear', 'sqrt' or 'none'")
        self._largest, self._rule, self._every, self._ramp, self._share = largest, rule, every, ramp, share
        self._limit = ShardLimit(largest_shard)
        self._follows = Ramp()

    def before_train(self, view: View) -> None:
        """The first batch may be too much at once for a worker."""
        if not self._limit.is_kept(view):
            shards = self._limit.shards(view.batch_size, view)
            self.set_batch_size(view.batch_size, shards, largest_shard=self._limit.samples)

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
