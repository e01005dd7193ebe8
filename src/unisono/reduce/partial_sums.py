"""The partial sums that one worker keeps while it computes its shards."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from unisono.plan.tree import SummationTree
from unisono.reduce.buckets import Bucket


@dataclass(frozen=True, slots=True)
class Row:
    """One partial sum of all tensors: a flat buffer per bucket, and each tensor's view of it."""

    flats: tuple[Tensor, ...]
    views: tuple[Tensor, ...]  # in the order of the tensors' list

    @classmethod
    def of(cls, buckets: Sequence[Bucket], flats: Sequence[Tensor]) -> "Row":
        """A row in these buffers, one per bucket."""
        return cls(tuple(flats), views_of(buckets, flats))

    def write(self, tensors: Sequence[Tensor | None]) -> None:
        """Set this row to ``tensors``. An absent one counts as -0.0, the identity of float addition."""
        present = [(view, tensor) for view, tensor in zip(self.views, tensors, strict=True) if tensor is not None]
        if present:
            torch._foreach_copy_([view for view, _ in present], [tensor for _, tensor in present])
        for view, tensor in zip(self.views, tensors, strict=True):
            if tensor is None:
                view.fill_(-0.0 if view.is_floating_point() else 0)

    def add(self, tensors: Sequence[Tensor | None]) -> None:
        """Add ``tensors`` onto this row."""
        present = [(view, tensor) for view, tensor in zip(self.views, tensors, strict=True) if tensor is not None]
        if present:
            torch._foreach_add_([view for view, _ in present], [tensor for _, tensor in present])

    def add_row(self, other: "Row") -> None:
        """Add another row onto this one."""
        torch._foreach_add_(list(self.flats), list(other.flats))


def views_of(buckets: Sequence[Bucket], flats: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Every tensor's view of the buckets' buffers, in the order of the tensors' list."""
    placed = {slot.index: slot.view(flat) for bucket, flat in zip(buckets, flats, strict=True) for slot in bucket.slots}
    return tuple(placed[index] for index in range(len(placed)))


class PartialSums:
    """Adds up shards as they arrive, along the summation tree.

    A left leaf is copied into a row, its sibling is added onto it, and whenever the two topmost rows are
    siblings they become one. Rows are allocated once and used again in every step: for a power of two of shards
    (up to 512) at most log2(shards)+1 of them.

    Args:
        tree: the summation tree.
        shards: of this worker.
        rows: as many as ``tree.most_kept`` of these shards.
    """

    def __init__(self, tree: SummationTree, shards: range, rows: Sequence[Row]) -> None:
        self._merge_counts = tree.merges(shards.start, shards.stop)
        self._free = list(rows)
        self._stack: list[Row] = []
        self._merges: list[int] = []

    def begin(self) -> None:
        """Start over; :meth:`add` then takes this worker's shards from first to last."""
        self._free.extend(self._stack)
        self._stack = []
        self._merges = list(reversed(self._merge_counts))

    def add(self, tensors: Sequence[Tensor | None]) -> None:
        """Take the next shard's tensors; an absent one adds nothing."""
        merges = self._merges.pop()
        if merges == 0:
            row = self._free.pop()
            row.write(tensors)
            self._stack.append(row)
            return
        self._stack[-1].add(tensors)
        for _ in range(merges - 1):
            right = self._stack.pop()
            self._stack[-1].add_row(right)
            self._free.append(right)

    @property
    def rows(self) -> tuple[Row, ...]:
        """The sums of the whole subtrees in this worker's range, from left to right."""
        assert not self._merges, f"{len(self._merges)} shards are still to come"
        return tuple(self._stack)
