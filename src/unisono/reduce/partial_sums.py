"""The partial sums that one worker keeps while it computes its shards."""

from collections.abc import Sequence
from dataclasses import dataclass

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


def views_of(buckets: Sequence[Bucket], flats: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Every tensor's view of the buckets' buffers, in the order of the tensors' list."""
    placed = {slot.index: slot.view(flat) for bucket, flat in zip(buckets, flats, strict=True) for slot in bucket.slots}
    return tuple(placed[index] for index in range(len(placed)))


class PartialSums:
    """Adds up shards along the summation tree, tensor by tensor as they arrive.

    A left leaf is written into a row, its sibling is added onto it, and siblings among the rows become one, all while
    the tensor is still in the cache. Rows are allocated once and used again in every step: for a power of two of shards
    (up to 512) at most log2(shards)+1 of them.

    Args:
        tree: the summation tree.
        shards: of this worker.
        rows: as many as ``tree.most_kept`` of these shards; one without shards, which tells what the buckets are like.
    """

    def __init__(self, tree: SummationTree, shards: range, rows: Sequence[Row]) -> None:
        self._merge_counts = tree.merges(shards.start, shards.stop)
        self._free = list(rows)
        self._stack: list[Row] = []
        self._merges: list[int] = []
        self._adds = False

    def begin(self) -> None:
        """Start over; this worker's shards follow from first to last."""
        self._free.extend(self._stack)
        self._stack = []
        self._merges = list(reversed(self._merge_counts))

    def open(self) -> None:
        """The next shard begins: every one of its tensors is put once, in any order."""
        self._adds = self._merges[-1] > 0
        if not self._adds:
            self._stack.append(self._free.pop())

    def put(self, number: int, tensor: Tensor | None) -> None:
        """Take one tensor of the shard, and add the siblings that this makes whole.

        An absent one counts as -0.0, the identity of float addition.
        """
        view = self._stack[-1].views[number]
        if tensor is None:
            if not self._adds:
                view.fill_(-0.0 if view.is_floating_point() else 0)
        elif self._adds:
            view.add_(tensor.to(view.dtype))  # a leaf is rounded as if it had been written
        else:
            view.copy_(tensor)
        for depth in range(1, self._merges[-1]):
            self._stack[-depth - 1].views[number].add_(self._stack[-depth].views[number])

    def close(self) -> None:
        """The shard is done: all its tensors were put."""
        for _ in range(1, self._merges.pop()):
            self._free.append(self._stack.pop())

    def partials(self, bucket: int) -> list[Tensor]:
        """What the last shard leaves of a bucket: the sums of the whole subtrees in this worker's range.

        All of its tensors were put.

        Returns:
            flat buffers, from left to right; one that holds nothing where there are no shards.
        """
        return [row.flats[bucket] for row in self._left()]

    @property
    def rows(self) -> tuple[Row, ...]:
        """The rows that :meth:`partials` are part of."""
        return tuple(self._left())

    def _left(self) -> list[Row]:
        if not self._merge_counts:
            return self._free
        # Asked while the last shard is open, the rows that it makes whole still lie on the stack.
        merged = max(0, self._merges[-1] - 1) if self._merges else 0
        assert len(self._merges) <= 1, f"{len(self._merges) - 1} more shards are to come"
        return self._stack[: len(self._stack) - merged]
