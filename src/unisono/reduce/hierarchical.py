"""The transport between several hosts with several workers each: shared memory inside, a process group between."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from unisono.plan.split import Split
from unisono.reduce.buckets import Bucket
from unisono.reduce.host_memory import HostMemory
from unisono.reduce.peers import Peers
from unisono.reduce.transport import Transport


@dataclass(frozen=True, slots=True)
class Host:
    """Where this worker lives.

    Attributes:
        number: of the host.
        peers: this host's workers; every host has as many.
    """

    number: int
    peers: Peers


class HierarchicalTransport(Transport):
    """Every worker adds its part of a bucket over its host, and finishes it with the workers of equal local rank.

    A host's partial sums are whole subtrees, since its workers have neighbouring shards, so the order of additions is
    the tree's. Between hosts, every element travels once per host and not once per worker.

    Args:
        host: where this worker lives.
        rank: of this worker among all.
        split: which shards each worker computes.
        across: to the workers of equal local rank, one per host.
        everyone: to all workers, for what is small.
    """

    def __init__(self, host: Host, rank: int, split: Split, across: Transport, everyone: Transport) -> None:
        super().__init__(rank, split)
        self._host, self._across, self._everyone = host, across, everyone
        self.measured = across.measured
        self._cover = self.tree.cover(across.split.of(host.number).start, across.split.of(host.number).stop)
        local = len(host.peers.ranks) + 1
        first = host.number * local
        self._memory = HostMemory(host.peers, self.tree, [split.of(first + each) for each in range(local)])

    def allocate(self, buckets: Sequence[Bucket], rows: int) -> list[tuple[Tensor, ...]]:
        """Rows in this host's shared memory."""
        parts = [replace(bucket, slots=(), numel=len(self.part(bucket.numel))) for bucket in buckets]
        self._across.allocate([part for part in parts if part.numel], 0)  # measured there on what will travel
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

    def reduce(self, bucket: Hashable, partials: Sequence[Tensor], divisor: float | None = None) -> Tensor:
        """Meet on this host, add its part, reduce that part between hosts, meet on this host."""
        gathered = self._memory.gather(bucket, partials)
        result = gathered.result
        mine = self.part(result.numel())
        if mine:
            part = slice(mine.start, mine.stop)
            own = {node: value[part] for node, value in gathered.partials.items()}
            sums = [self.tree.finish(own, lambda left, right: left.add_(right), node) for node in self._cover]
            result[part].copy_(self._across.reduce(bucket, sums, divisor))
        self._memory.meet()
        return result

    def reduce_native(self, total: Tensor) -> Tensor:
        """Not this transport's: a native reduction is a backend's own."""
        raise NotImplementedError("a native reduction goes over the process group")

    def all_gather(self, row: Tensor) -> Tensor:
        """Between all workers."""
        return self._everyone.all_gather(row)

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Between all workers."""
        self._everyone.broadcast(tensor, source)

    def close(self) -> None:
        """Hang up on all sides."""
        self._host.peers.close()
        self._across.close()
        self._everyone.close()
        self._memory.forget()


def host_split(split: Split, workers: int) -> Split:
    """The shards of each host, if every host has so many workers.

    Raises:
        ValueError: that many do not divide the workers.
    """
    if split.workers % workers:
        raise ValueError(f"{split.workers} workers cannot be {workers} on every host")
    return Split(split.bounds[::workers])
