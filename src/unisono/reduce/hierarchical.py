"""The transport between several hosts with several workers each: shared memory inside, a process group between."""

from collections.abc import Hashable, Sequence
from dataclasses import replace

from torch import Tensor

from unisono.plan.links import Links
from unisono.plan.split import Split
from unisono.plan.tree import Node
from unisono.reduce.buckets import Bucket
from unisono.reduce.host_transport import HostTransport
from unisono.reduce.peers import Peers
from unisono.reduce.tally import Tally
from unisono.reduce.transport import Transport


class HierarchicalTransport(HostTransport):
    """Every worker adds its part of a bucket over its host, and finishes it with the workers of equal local rank.

    A host's partial sums are whole subtrees, since its workers have neighbouring shards, so the order of additions is
    the tree's. Between hosts, every element travels once per host and not once per worker. Workers that serve compute
    nothing, and add like all others of their host; a host of servers finishes the sums of the other hosts.

    Args:
        peers: the workers of this host; every host has as many.
        rank: of this worker among all.
        split: which shards each worker computes.
        across: to the workers of equal local rank, one per host.
        everyone: to all workers, for what is small.
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
        parts = [replace(bucket, slots=(), numel=len(self.part(bucket.numel))) for bucket in buckets]
        self._across.allocate([part for part in parts if part.numel], 0)  # measured there on what will travel
        return super().allocate(buckets, rows)

    def reduce(
        self,
        bucket: Hashable,
        partials: Sequence[Tensor],
        divisor: float | None = None,
        tally: Tally | None = None,
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
        ValueError: that many do not divide the workers.
    """
    if split.workers % workers:
        raise ValueError(f"{split.workers} workers cannot be {workers} on every host")
    return Split(split.bounds[::workers])
