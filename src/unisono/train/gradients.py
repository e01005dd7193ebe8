"""From each shard's gradients to the step's gradient, in place in ``parameter.grad``."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from unisono.errors import ModelError
from unisono.reduce.buckets import plan_buckets
from unisono.reduce.partial_sums import PartialSums, Row
from unisono.reduce.reduction import Reduction
from unisono.reduce.transport import Transport


class Gradients:
    """The gradients of the parameters that one call of ``step.run`` updates.

    With a single shard the gradients stay where autograd put them: there is nothing to add.

    Args:
        parameters: by name.
        transport: to the other workers; making gradients is collective.
        bucket_bytes: the size of a bucket.
    """

    def __init__(self, parameters: Mapping[str, Tensor], transport: Transport, bucket_bytes: int) -> None:
        self._names = tuple(parameters)
        self._parameters = tuple(parameters.values())
        self._transport = transport
        self._single = transport.tree.shards == 1
        self._buckets = () if self._single else plan_buckets(self._parameters, bucket_bytes)
        self._sums = self._allocated_sums()
        self._used = [False] * len(self._parameters)

    @property
    def names(self) -> tuple[str, ...]:
        """The parameters' names."""
        return self._names

    @property
    def parameters(self) -> Sequence[Tensor]:
        """The parameters."""
        return self._parameters

    @property
    def used(self) -> Sequence[bool]:
        """For each parameter, whether any shard taken so far gave it a gradient."""
        return self._used

    def begin(self) -> None:
        """Forget what was taken before; the shards of this worker follow."""
        self._used = [False] * len(self._parameters)
        self._sums.begin()

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

    def reduce(self, reduction: Reduction) -> tuple[Tensor, ...]:
        """The sum over all shards of all workers, as flat buffers; none for a single shard."""
        return () if self._single else reduction(self._transport, self._sums.rows)

    def assign(self, totals: tuple[Tensor, ...], weight: float, used: Sequence[bool]) -> None:
        """Make the sum, divided by the total weight, the parameters' gradients; absent where no shard used one."""
        if self._single:
            return
        # The totals may lie in memory that other workers read; this worker's partial sums are its own again.
        row = self._sums.rows[0]
        for flat, total in zip(row.flats, totals, strict=True):
            torch.div(total, weight, out=flat)
        for parameter, view, is_used in zip(self._parameters, row.views, used, strict=True):
            parameter.grad = view if is_used else None

    def _allocated_sums(self) -> PartialSums:
        transport, mine = self._transport, self._transport.split.of(self._transport.rank)
        count = 0 if self._single else transport.tree.most_kept(mine.start, mine.stop)
        flats = transport.allocate(self._buckets, count) if count else []
        return PartialSums(transport.tree, mine, [Row.of(self._buckets, row) for row in flats])
