"""The common part of transports whose partial sums lie in memory that a host's workers share."""

from abc import ABC
from collections.abc import Hashable, Sequence
from dataclasses import replace

from torch import Tensor

from unisono.plan.links import Links
from unisono.plan.split import Split
from unisono.plan.tree import Node
from unisono.reduce.buckets import Bucket
from unisono.reduce.host_memory import HostMemory
from unisono.reduce.peers import Peers
from unisono.reduce.tally import Tally
from unisono.reduce.transport import Transport


class HostTransport(Transport, ABC):
    """A transport over the memory of a host.

    Args:
        peers: the workers of this host, as many as on every other.
        rank: this worker's rank among all workers.
        split: the shards of each worker.
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
        """With new memory."""
        super().resplit(split)
        self._memory.forget()
        self._memory = self._host_memory()

    def allocate(self, buckets: Sequence[Bucket], rows: int) -> list[tuple[Tensor, ...]]:
        """Rows in this host's shared memory."""
        return self._memory.allocate(buckets, rows)

    def part(self, numel: int) -> range:
        """This worker's elements of a flat buffer that all of its host see: an equal part for each."""
        return self._memory.part(numel)

    def summed(self, numel: int) -> range:
        """Which elements of a bucket this worker adds, for its host.

        Args:
            numel: the bucket's number of elements.
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


# The transport between several hosts with several workers each: shared memory inside, a process group between.


class HierarchicalTransport(HostTransport):
    """Every worker adds its part of a bucket over its host, and finishes it with the workers of equal local rank.

    A host's partial sums are whole subtrees, since its workers have neighbouring shards, so the order of additions is
    the tree's. Between hosts, every element travels once per host and not once per worker. Workers that serve compute
    nothing, and add like all others of their host; a host of servers finishes the sums of the other hosts.

    Args:
        peers: the workers of this host; every host has as many.
        rank: this worker's rank among all workers.
        split: the shards of each worker.
        across: the transport to the workers of equal local rank, one per host.
        everyone: the transport to all workers, for small tensors.
    """

    def __init__(self, peers: Peers, rank: int, split: Split, across: Transport, everyone: Transport) -> None:
        super().__init__(peers, rank, split)
        self._across, self._everyone = across, everyone
        self.tallies = across.tallies
        self.measured, self.traffic = across.measured, across.traffic
        everyone.traffic = across.traffic
        self._cover = self._host_cover()

    @property
    def topology(self) -> str:
        """Between hosts."""
        return self._across.topology

    def use_topology(self, name: str) -> None:
        """Between hosts."""
        self._across.use_topology(name)

    def go_direct(self, *, always: bool) -> None:
        """Between hosts."""
        self._across.go_direct(always=always)

    def measure_links(self) -> Links | None:
        """Between all workers, also those of one host."""
        return self._everyone.measure_links()

    @property
    def waits(self) -> bool:
        """For another worker, wherever it is."""
        return super().waits or self._across.waits or self._everyone.waits

    def resplit(self, split: Split) -> None:
        """On this host, and between hosts."""
        super().resplit(split)
        self._across.resplit(host_split(split, len(self._peers.ranks) + 1))
        self._everyone.resplit(split)
        self._cover = self._host_cover()

    def allocate(self, buckets: Sequence[Bucket], rows: int) -> list[tuple[Tensor, ...]]:
        """Rows in this host's shared memory."""
        parts = [replace(bucket, entries=(), numel=len(self.part(bucket.numel))) for bucket in buckets]
        self._across.allocate([part for part in parts if part.numel], 0)  # measured there on what will travel
        return super().allocate(buckets, rows)

    def reduce(
        self, bucket: Hashable, partials: Sequence[Tensor], divisor: float | None = None, tally: Tally | None = None
    ) -> Tensor:
        """Meet on this host, add its part, reduce that part between hosts, meet on this host."""
        gathered = self._memory.gather(bucket, partials)
        result = gathered.result
        mine = self.part(result.numel())
        if mine:
            part = slice(mine.start, mine.stop)
            own = {node: value[part] for node, value in gathered.partials.items()}
            if tally is None:
                self._finish(bucket, own, result[part], divisor, None)
            else:
                self._finish_tallied(bucket, own, result[part], divisor, tally, mine.start)
        self._memory.meet()
        self._count_reduction(result, len(partials) if self.computes else 0)
        return result

    def _finish(
        self, bucket: Hashable, own: dict[Node, Tensor], result: Tensor, divisor: float | None, tally: Tally | None
    ) -> None:
        """Add this worker's part over its host, and reduce it between hosts."""
        sums = [self.tree.finish(own, lambda left, right: left.add_(right), node) for node in self._cover]
        for each in sums if tally is not None else ():
            assert tally is not None
            tally.wrote(each, 0)
        result.copy_(self._across.reduce(bucket, sums or [result], divisor, tally))

    def _finish_tallied(
        self, bucket: Hashable, own: dict[Node, Tensor], result: Tensor, divisor: float | None, tally: Tally, start: int
    ) -> None:
        for value in own.values():
            tally.read(value, start)
        across = tally.part(start)
        self._finish(bucket, own, result, divisor, across)
        tally.close(across)
        tally.keep(result, start)

    def all_gather(self, row: Tensor) -> Tensor:
        """Between all workers."""
        return self._everyone.all_gather(row)

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Between all workers."""
        self._everyone.broadcast(tensor, source)

    def abort(self) -> None:
        """Hang up on all sides."""
        super().abort()
        self._across.abort()
        self._everyone.abort()

    def close(self) -> None:
        """Hang up on all sides."""
        super().close()
        self._across.close()
        self._everyone.close()

    def _host_cover(self) -> tuple[Node, ...]:
        here = self._across.split.of(self._across.rank)
        return self.tree.cover(here.start, here.stop)


def host_split(split: Split, workers: int) -> Split:
    """The shards of each host, if every host has so many workers.

    Raises:
        ValueError: the number does not divide the number of workers.
    """
    if split.workers % workers:
        raise ValueError(f"{split.workers} workers cannot be {workers} on every host")
    return Split(split.bounds[::workers])
