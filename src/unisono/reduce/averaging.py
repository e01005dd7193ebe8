"""Means of tensors over workers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from unisono.plan.split import Split
from unisono.reduce.buckets import plan_buckets
from unisono.reduce.partial_sums import views_of
from unisono.reduce.transport import Transport

BUCKET_BYTES = 16 * 2**20


class Averaging:
    """Adds up tensors of all workers, in one order on every way, and divides.

    It uses the transport's fastest way for sums. From here on the workers' shards are one for each of them.

    Args:
        transport: the transport between the workers.

    Raises:
        WorkerLost: from every method, when another worker is gone.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        transport.resplit(Split.even(transport.world_size, transport.world_size))
        self._plans: dict[tuple[object, ...], _Plan] = {}

    @torch.no_grad()
    def mean(self, tensors: Sequence[Tensor], divisor: float | None = None) -> list[Tensor]:
        """The means over all workers. Collective.

        Args:
            tensors: floating-point, of the same shapes and dtypes on every worker.
            divisor: the divisor of the sums; by default the number of workers.

        Returns:
            tensors of the same shapes and dtypes, the same on every worker; to be read, and valid until the next call.
        """
        if not tensors:
            return []
        layout = tuple((tensor.shape, tensor.dtype, tensor.stride(), tensor.device) for tensor in tensors)
        if layout not in self._plans:
            self._plans[layout] = _Plan(self._transport, tensors, len(self._plans))
        return self._plans[layout].mean(tensors, self._transport.world_size if divisor is None else divisor)


class _Plan:
    """The buckets for tensors of one layout."""

    def __init__(self, transport: Transport, tensors: Sequence[Tensor], number: int) -> None:
        self._transport, self._number = transport, number
        self._buckets = plan_buckets(tensors, BUCKET_BYTES)
        (self._row,) = transport.allocate(self._buckets, 1)
        self._views = views_of(self._buckets, self._row)

    def mean(self, tensors: Sequence[Tensor], divisor: float) -> list[Tensor]:
        for view, tensor in zip(self._views, tensors, strict=True):
            view.copy_(tensor)
        totals = [
            self._transport.reduce(("mean", self._number, number), [flat], divisor)
            for number, flat in enumerate(self._row)
        ]
        self._transport.settle()
        return list(views_of(self._buckets, totals))
