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
    def allocate(cls, buckets: Sequence[Bucket]) -> "Row":
        """A row of new buffers."""
        flats = tuple(bucket.allocate() for bucket in buckets)
        return cls(flats, views_of(buckets, flats))

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
    siblings they become one. For a power of two of shards at most log2(shards)+1 rows exist at a time.
    Rows are allocated once and used again in every step.
    """

    def __init__(self, buckets: Sequence[Bucket], tree: SummationTree) -> None:
        self.buckets = tuple(buckets)
        self._tree = tree
        self._free: list[Row] = []
        self._stack: list[Row] = []
        self._merges: list[int] = []

    def begin(self, shards: range) -> None:
        """Start over, for the shards of this worker, which :meth:`add` then takes from first to last."""
        self._free.extend(self._stack)
        self._stack = []
        self._merges = list(reversed(self._tree.merges(shards.start, shards.stop)))

    def add(self, tensors: Sequence[Tensor | None]) -> None:
        """Take the next shard's tensors; an absent one adds nothing."""
        merges = self._merges.pop()
        if merges == 0:
            row = self._free.pop() if self._free else Row.allocate(self.buckets)
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

    @property
    def allocated(self) -> int:
        """How many rows, each as large as all gradients together, exist now."""
        return len(self._free) + len(self._stack)
