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
        local = len(peers.ranks) + 1
        first = rank - peers.rank
        self._memory = HostMemory(peers, self.tree, [split.of(first + each) for each in range(local)])

    @property
    def waits(self) -> bool:
        """For another worker of this host."""
        return self._peers.waits

    def allocate(self, buckets: Sequence[Bucket], rows: int) -> list[tuple[Tensor, ...]]:
        """Rows in this host's shared memory."""
        return self._memory.allocate(buckets, rows)

    def share(self, buckets: Sequence[Bucket]) -> tuple[Tensor, ...]:
        """Once per host."""
        return self._memory.share(buckets)

    def part(self, numel: int) -> range:
        """The part that this worker adds, for its host."""
        return self._memory.part(numel)

    def private(self, total: Tensor) -> Tensor:
        """A copy that costs nothing until it is written to."""
        return self._memory.private(total)

    def _count_reduction(self, total: Tensor, partials: int) -> None:
        """Others of this host read their parts of this worker's partial sums, and its part of the total."""
        others, mine = len(self._peers.ranks), len(self.part(total.numel()))
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
