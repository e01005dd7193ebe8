"""A row of items that grows for ever and never takes much room."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")

MOST = 1024
"""Groups that are kept; a plot has about as many pixels."""


@dataclass(frozen=True, slots=True)
class Mark:
    """How much of a row somebody has seen.

    Attributes:
        shape: the shape that the row had then.
        count: the number of items of a row then, or of entries of a table.
    """

    shape: int = -1
    count: int = 0


class Thinned(Generic[T]):
    """Groups of neighbouring items, all of one size but the newest. When there are too many, each two become one.

    Args:
        merge: a function that makes one item of two neighbours, the earlier one first.
        most: the number of groups that are kept; even.

    Attributes:
        groups: the groups, in their order.
        stride: the number of items in each.
        shape: a number that changes with every group at once.
        count: the number of items.
    """

    def __init__(self, merge: Callable[[T, T], T], most: int = MOST) -> None:
        self.groups: list[T] = []
        self.stride, self.shape, self.count = 1, 0, 0
        self._merge, self._most = merge, most

    def add(self, item: T) -> None:
        """One more item, the newest."""
        if self.count == self._most * self.stride:
            self._halve()
        if self.count % self.stride:
            self.groups[-1] = self._merge(self.groups[-1], item)
        else:
            self.groups.append(item)
        self.count += 1

    @property
    def mark(self) -> Mark:
        """Of who has seen all that there is."""
        return Mark(self.shape, self.count)

    def since(self, seen: Mark) -> int:
        """The number of the first group that is new, or may have changed, for somebody."""
        return seen.count // self.stride if seen.shape == self.shape else 0

    def _halve(self) -> None:
        pairs = zip(self.groups[::2], self.groups[1::2], strict=True)
        self.groups = [self._merge(earlier, later) for earlier, later in pairs]
        self.stride, self.shape = 2 * self.stride, self.shape + 1
