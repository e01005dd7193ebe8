"""From every worker's partial sums of a bucket to the sum that all of them hold."""

from collections.abc import Hashable, Sequence
from typing import Protocol

from torch import Tensor

from unisono.reduce.tally import Tally
from unisono.reduce.transport import Transport


class Reduction(Protocol):
    """How partial sums become one flat total, the same on every worker."""

    def __call__(
        self,
        transport: Transport,
        bucket: Hashable,
        partials: Sequence[Tensor],
        divisor: float | None,
        tally: Tally | None = None,
    ) -> Tensor:
        """The total of a bucket, divided; the partial sums may be overwritten. See :meth:`Transport.reduce`."""
        ...


def exact(
    transport: Transport,
    bucket: Hashable,
    partials: Sequence[Tensor],
    divisor: float | None,
    tally: Tally | None = None,
) -> Tensor:
    """Along the summation tree: the same bits on any number of workers."""
    return transport.reduce(bucket, partials, divisor, tally)


def native(
    transport: Transport,
    bucket: Hashable,
    partials: Sequence[Tensor],
    divisor: float | None,
    tally: Tally | None = None,
) -> Tensor:
    """By the backend's own all-reduce: its own order of additions, and nobody knows what it reads."""
    total, *others = partials
    if not transport.computes:
        total.zero_()
    for other in others:
        total.add_(other)
    total = transport.reduce_native(total)
    return total if divisor is None else total.div_(divisor)


REDUCTIONS: dict[str, Reduction] = {"exact": exact, "native": native}
