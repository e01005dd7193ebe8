"""The split of work among workers: of shards, and of what one works out for all."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heapify, heapreplace
from itertools import accumulate, pairwise
from operator import lt


@dataclass(frozen=True)
class Split:
    """Contiguous ranges of shards, one per worker, in the order of ranks.

    ``bounds`` has one entry more than there are workers: worker r owns ``bounds[r] … bounds[r+1]-1``. Workers whose
    range is empty are the last ones, and serve: they finish the sums of the others.
    """

    bounds: tuple[int, ...]

    def __post_init__(self) -> None:
        computing = self.bounds.index(self.bounds[-1]) if self.bounds else 0
        ascending = all(map(lt, self.bounds[:computing], self.bounds[1:]))
        ends = self.bounds[computing:]
        if computing < 1 or self.bounds[0] != 0 or not ascending or ends.count(ends[0]) < len(ends):
            raise ValueError(
                f"a split needs ascending bounds from 0, and may end in workers without shards; got {self.bounds}"
            )

    @classmethod
    def even(cls, shards: int, workers: int) -> "Split":
        """Ranges that differ by one shard at most; the first workers have the larger ones.

        Raises:
            ValueError: fewer than one worker, or more workers than shards.
        """
        if not 1 <= workers <= shards:
            raise ValueError(f"{shards} shards cannot be split among {workers} workers")
        return cls(tuple(even_bounds(shards, workers)))

    @classmethod
    def by_speed(cls, shards: int, seconds: Sequence[float]) -> "Split":
        """Ranges that are all computed at about the same time: the slowest worker's time is as short as it can be.

        Args:
            shards: the job's number of shards.
            seconds: the time of one shard on each worker, by rank. Each worker gets at least one shard.

        Raises:
            ValueError: more workers than shards.
        """
        if not 1 <= len(seconds) <= shards:
            raise ValueError(f"{shards} shards cannot be split among {len(seconds)} workers")
        # Shard after shard goes to whoever is done with it first. All but the last few of each are known beforehand.
        spare = shards - len(seconds)
        until = spare / sum(1 / shard_s for shard_s in seconds)
        counts = [max(1, int(until / shard_s) - 1) for shard_s in seconds]
        heap = [((counts[rank] + 1) * shard_s, rank) for rank, shard_s in enumerate(seconds)]
        heapify(heap)
        for _ in range(shards - sum(counts)):
            _, rank = heap[0]
            counts[rank] += 1
            heapreplace(heap, ((counts[rank] + 1) * seconds[rank], rank))
        return cls((0, *accumulate(counts)))

    def with_servers(self, servers: int) -> "Split":
        """The same workers, of which those of the highest ranks serve and compute nothing.

        The others distribute the shards evenly; where they do not now, by the speeds that this split speaks of.

        Args:
            servers: the number of servers; 0 if nobody would be left to compute.
        """
        computing = self.workers - servers
        if servers == 0 or computing < 1:
            return self
        if self == Split.even(self.shards, self.workers):
            among = Split.even(self.shards, computing)
        else:
            among = Split.by_speed(self.shards, [1 / len(self.of(rank)) for rank in range(computing)])
        return Split((*among.bounds, *(self.shards for _ in range(servers))))

    def refined(self, shards: int) -> "Split":
        """The same parts of a batch that is cut finer: each shard into equally many, which are neighbours.

        Raises:
            ValueError: no multiple of those that there are.
        """
        pieces, rest = divmod(shards, self.shards)
        if rest or pieces < 1:
            raise ValueError(f"{shards} shards are no multiple of {self.shards}")
        return self if pieces == 1 else Split(tuple(bound * pieces for bound in self.bounds))

    def seconds(self, seconds: Sequence[float]) -> float:
        """The seconds that the slowest worker takes for its shards."""
        return max(count * shard_s for count, shard_s in zip(self.counts, seconds, strict=True))

    @cached_property
    def workers(self) -> int:
        """The number of workers."""
        return len(self.bounds) - 1

    @cached_property
    def servers(self) -> range:
        """The ranks of the workers that compute nothing; there may be none."""
        return range(sum(bound < self.shards for bound in self.bounds), self.workers)

    @cached_property
    def shards(self) -> int:
        """The number of shards."""
        return self.bounds[-1]

    @cached_property
    def widest(self) -> int:
        """The most shards that any worker has."""
        return max(self.counts)

    @cached_property
    def counts(self) -> list[int]:
        """The number of shards of each worker, by rank."""
        return [stop - start for start, stop in pairwise(self.bounds)]

    @cached_property
    def of(self) -> Callable[[int], range]:
        """A function that returns the shards of the worker of a rank."""
        return tuple(range(start, stop) for start, stop in pairwise(self.bounds)).__getitem__

    def owner(self, shard: int) -> int:
        """The rank of the worker that computes ``shard``."""
        return next(rank for rank in range(self.workers) if shard in self.of(rank))


def even_bounds(count: int, parts: int) -> list[int]:
    """Where to cut ``count`` things into ``parts`` runs that differ by one at most, larger ones first."""
    size, extra = divmod(count, parts)
    return [part * size + min(part, extra) for part in range(parts + 1)]


# Who works out what is worked out once, for all.


def owners_of(costs: Sequence[float], members: int) -> list[int]:
    """Who works out what, so that all are done at about the same time. The dearest first, each to whoever has least.

    At most 4/3 of the least possible time (R. L. Graham, Bounds on multiprocessing timing anomalies, 1969).

    Returns:
        the member that owns each piece, from 0. Equal costs go by the order of the pieces, and of the members.
    """
    loads, owners = [0.0] * members, [0] * len(costs)
    for number in sorted(range(len(costs)), key=lambda other: (-costs[other], other)):
        owner = min(range(members), key=lambda other: (loads[other], other))
        owners[number] = owner
        loads[owner] += costs[number]
    return owners
