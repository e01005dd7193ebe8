"""Which worker computes which shards."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Split:
    """Contiguous ranges of shards, one per worker, in the order of ranks.

    ``bounds`` has one entry more than there are workers: worker r owns ``bounds[r] … bounds[r+1]-1``.
    """

    bounds: tuple[int, ...]

    def __post_init__(self) -> None:
        ascending = all(a < b for a, b in zip(self.bounds, self.bounds[1:], strict=False))
        if len(self.bounds) < 2 or self.bounds[0] != 0 or not ascending:
            raise ValueError(f"a split needs ascending bounds from 0, got {self.bounds}")

    @classmethod
    def even(cls, shards: int, workers: int) -> "Split":
        """Ranges that differ by one shard at most; the first workers have the larger ones.

        Raises:
            ValueError: fewer than one worker, or more workers than shards.
        """
        if not 1 <= workers <= shards:
            raise ValueError(f"{shards} shards cannot be split among {workers} workers")
        return cls(tuple(even_bounds(shards, workers)))

    @property
    def workers(self) -> int:
        """The number of workers."""
        return len(self.bounds) - 1

    @property
    def shards(self) -> int:
        """The number of shards."""
        return self.bounds[-1]

    @property
    def widest(self) -> int:
        """The most shards that any worker has."""
        return max(len(self.of(rank)) for rank in range(self.workers))

    def of(self, rank: int) -> range:
        """The shards of the worker ``rank``."""
        return range(self.bounds[rank], self.bounds[rank + 1])

    def owner(self, shard: int) -> int:
        """The rank of the worker that computes ``shard``."""
        return next(rank for rank in range(self.workers) if shard in self.of(rank))


def even_bounds(count: int, parts: int) -> list[int]:
    """Where to cut ``count`` things into ``parts`` runs that differ by one at most, larger ones first."""
    size, extra = divmod(count, parts)
    return [part * size + min(part, extra) for part in range(parts + 1)]
