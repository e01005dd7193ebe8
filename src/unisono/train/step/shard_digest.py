"""Digests of the results of a shard, by which workers compare them bit for bit."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from torch import Tensor

from unisono.train.step.word import ShardReport
from unisono.words import MODULUS, is_dense, sum_of_words

_FACTOR = 0x9E3779B97F4A7C15  # odd, so that multiplying by it modulo 2**64 loses no bit


class ShardDigest:
    """A digest of all results of a shard: its gradient, its loss and metrics, and its buffers."""

    def __init__(self) -> None:
        self._sum = 0

    def take(self, number: int, gradient: Tensor | None) -> None:
        """Add a parameter's gradient. The order of calls does not matter."""
        words = 0 if gradient is None else 1 + sum_of_words(in_memory_order(gradient))
        self._sum = (self._sum + _FACTOR * (2 * number + 1) * words) % MODULUS

    def finish(self, report: ShardReport, buffers: Sequence[Tensor | None]) -> str:
        """The digest, in hex, once all gradients are added."""
        buffer_sums = [None if buffer is None else sum_of_words(in_memory_order(buffer)) for buffer in buffers]
        numbers = [report.loss, report.weight, *(report.metrics[name] for name in sorted(report.metrics))]
        results = [self._sum, buffer_sums, [float(number).hex() for number in numbers]]
        return hashlib.blake2b(repr(results).encode(), digest_size=8).hexdigest()


def in_memory_order(tensor: Tensor) -> Tensor:
    """A tensor's elements in the order in which they lie in memory, if there are no gaps; else in their own order."""
    if is_dense(tensor):
        return tensor.detach().as_strided((tensor.numel(),), (1,))
    return tensor.detach().reshape(-1)
