"""What the transports have in common whose partial sums lie in the memory that a host's workers share."""

from abc import ABC
from collections.abc import Sequence

from torch import Tensor

from unisono.plan.split import Split
from unisono.reduce.buckets import Bucket
from unisono.reduce.host_memory import HostMemory
from unisono.reduce.peers import Peers
from unisono.reduce.transport import Transport


class HostTransport(Transport, ABC):
    """A transport over the memory of a host.

    Args:
        peers: the workers of this host, as many as on every other.
        rank: of this worker among all.
        split: which shards each worker computes.
    """

    def __init__(self, peers: Peers, rank: int, split: Split) -> None:
        super().__init__(rank, split)
        self._peers = peers
        self._memory = self._host_memory()

    @property
    def waits(self) -> bool:
        """For another worker of this host."""
        return self._peers.waits

    def resplit(self, split: Split) -> None:
        """With new memory. What is shared once per host stays."""
        super().resplit(split)
        self._memory.forget()
        self._memory = self._host_memory()

    def allocate(self, buckets: Sequence[Bucket], rows: int) -> list[tuple[Tensor, ...]]:
        """Rows in this host's shared memory."""
        return self._memory.allocate(buckets, rows)

    def share(self, buckets: Sequence[Bucket]) -> tuple[Tensor, ...]:
        """Once per host."""
        return self._memory.share(buckets)

    def part(self, numel: int) -> range:
        """An equal part for each worker of this host."""
        return self._memory.part(numel)

    def summed(self, numel: int) -> range:
        """Which elements of a bucket this worker adds, for its host.

        Args:
            numel: of the bucket.
        """
        return self.part(numel)

    def private(self, total: Tensor) -> Tensor:
        """A copy that costs nothing until it is written to."""
        return self._memory.private(total)

    def _count_reduction(self, total: Tensor, partials: int) -> None:
        """Others of this host read their parts of this worker's partial sums, and its part of the total."""
        others, mine = len(self._peers.ranks), len(self.summed(total.numel()))
        self.traffic.count((partials * (total.numel() - mine) + others * mine) * total.itemsize, 2 * others)

    def _count_copies(self, tensor: Tensor) -> None:
        others = len(self._peers.ranks)
        self.traffic.count(others * tensor.nbytes, others)

    def reduce_native(self, total: Tensor) -> Tensor:
        """Not this transport's: a native reduction is a backend's own."""
        raise NotImplementedError("a native reduction goes over the process group")

    def abort(self) -> None:
        """Hang up on this host."""
        self._peers.hang_up()

    def close(self) -> None:
        """Hang up on this host, and let go of the memory."""
        self._peers.close()
        self._memory.forget()

    def _host_memory(self) -> HostMemory:
        first = self.rank - self._peers.rank
        here = range(first, first + len(self._peers.ranks) + 1)
        return HostMemory(self._peers, self.tree, [self.split.of(rank) for rank in here])
