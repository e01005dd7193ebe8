"""From each shard's gradients to the step's gradient, in place in ``parameter.grad``."""

from collections.abc import Mapping, Sequence

from torch import Tensor

from unisono.errors import ModelError
from unisono.plan.tree import SummationTree
from unisono.reduce.buckets import plan_buckets
from unisono.reduce.partial_sums import PartialSums, views_of
from unisono.reduce.reduction import Reduction
from unisono.reduce.transport import Transport


class Gradients:
    """The gradients of the parameters that one call of ``step.run`` updates.

    With a single shard the gradients stay where autograd put them: there is nothing to add.
    """

    def __init__(self, parameters: Mapping[str, Tensor], tree: SummationTree, bucket_bytes: int) -> None:
        self._names = tuple(parameters)
        self._parameters = tuple(parameters.values())
        self._single = tree.shards == 1
        self._buckets = () if self._single else plan_buckets(self._parameters, bucket_bytes)
        self._sums = PartialSums(self._buckets, tree)
        self._views: dict[tuple[int, ...], tuple[Tensor, ...]] = {}
        self._used = [False] * len(self._parameters)

    @property
    def names(self) -> tuple[str, ...]:
        """The parameters' names."""
        return self._names

    @property
    def used(self) -> Sequence[bool]:
        """For each parameter, whether any shard taken so far gave it a gradient."""
        return self._used

    def begin(self, shards: range) -> None:
        """Forget what was taken before; the shards of this worker follow."""
        self._used = [False] * len(self._parameters)
        if not self._single:
            self._sums.begin(shards)

    def clear(self) -> None:
        """Drop the parameters' gradients, so that the next shard starts without any."""
        for parameter in self._parameters:
            parameter.grad = None

    def take(self) -> None:
        """Add the gradients that a backward pass has left.

        Raises:
            ModelError: a gradient is sparse; names the parameter.
        """
        gradients = [parameter.grad for parameter in self._parameters]
        for number, gradient in enumerate(gradients):
            if gradient is None:
                continue
            self._used[number] = True
            if gradient.is_sparse:
                raise ModelError(
                    f"the gradient of {self._names[number]} is sparse, which has no exact sum here: use "
                    f"nn.Embedding(sparse=False)"
                )
        if not self._single:
            self._sums.add(gradients)

    def reduce(self, transport: Transport, reduction: Reduction) -> tuple[Tensor, ...]:
        """The sum over all shards of all workers, as flat buffers; none for a single shard."""
        return () if self._single else reduction(transport, self._sums.rows)

    def assign(self, totals: tuple[Tensor, ...], weight: float, used: Sequence[bool]) -> None:
        """Make the sum, divided by the total weight, the parameters' gradients; absent where no shard used one."""
        if self._single:
            return
        if weight != 1.0:
            for total in totals:
                total.div_(weight)
        key = tuple(map(id, totals))
        if key not in self._views:
            self._views[key] = views_of(self._buckets, totals)
        for parameter, view, is_used in zip(self._parameters, self._views[key], used, strict=True):
            parameter.grad = view if is_used else None
