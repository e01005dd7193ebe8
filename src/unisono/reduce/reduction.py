"""From every worker's partial sums to the sum that all of them hold."""

from collections.abc import Sequence
from functools import reduce as fold
from typing import Protocol

from torch import Tensor

from unisono.reduce.partial_sums import Row
from unisono.reduce.transport import Transport


class Reduction(Protocol):
    """How rows of partial sums become one flat total per bucket, the same on every worker."""

    def __call__(self, transport: Transport, rows: Sequence[Row]) -> tuple[Tensor, ...]:
        """The totals, one 1-D tensor per bucket, to be read. The rows may be overwritten."""
        ...


def exact(transport: Transport, rows: Sequence[Row]) -> tuple[Tensor, ...]:
    """Along the summation tree: the same bits on any number of workers."""
    buckets = range(len(rows[0].flats))
    return tuple(transport.reduce(bucket, [row.flats[bucket] for row in rows]) for bucket in buckets)


def native(transport: Transport, rows: Sequence[Row]) -> tuple[Tensor, ...]:
    """By the backend's own all-reduce: its own order of additions."""
    total = fold(_added, rows)
    return tuple(transport.reduce_native(flat) for flat in total.flats)


def _added(left: Row, right: Row) -> Row:
    left.add_row(right)
    return left


REDUCTIONS: dict[str, Reduction] = {"exact": exact, "native": native}
