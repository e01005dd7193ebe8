"""The interface between reductions and the ways on which they travel, and the traffic on them."""

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from unisono.plan.split import Split
from unisono.plan.topology import Links
from unisono.plan.tree import SummationTree
from unisono.reduce.buckets import Bucket
from unisono.reduce.partial_sums import UNTALLIED, Tally


class Traffic:
    """Counts what others get from this worker: over a connection, or by reading its part of shared memory.

    Several threads may count.

    Attributes:
        sent_bytes: so far.
        sent_messages: so far; a part of memory that others are told of is one for each of them.
    """

    def __init__(self) -> None:
        self.sent_bytes = self.sent_messages = 0
        self._taken = 0, 0
        self._lock = threading.Lock()

    def count(self, sent_bytes: int, sent_messages: int) -> None:
        """Add to the bytes and messages sent."""
        with self._lock:
            self.sent_bytes += sent_bytes
            self.sent_messages += sent_messages

    def take(self) -> tuple[int, int]:
        """Bytes and messages since this was asked for last."""
        with self._lock:
            taken, self._taken = self._taken, (self.sent_bytes, self.sent_messages)
            return self.sent_bytes - taken[0], self.sent_messages - taken[1]


Reduction = Callable[[Hashable, Sequence[Tensor], float | None, Tally], Tensor]
"""Makes one flat total of all partial sums of a bucket, which may be overwritten. See :meth:`Transport.reduce`."""

PIECE = 256 * 1024
"""Elements that are added at a time, so that what is done with them next still finds them in the cache."""


class Transport(ABC):
    """The exchange of tensors between the workers of one generation.

    Every verb is collective: all workers call the same verbs in the same order, with tensors of the same
    dtype and, where not said otherwise, the same shape.

    Attributes:
        measured: what was measured to choose a way for the sums, until somebody writes it down: for each size of
            buckets its ``bytes``, the ``seconds`` of every topology, and the ``fastest`` one.
        needs_core: whether reducing keeps a core busy. Else it is mostly waiting.
        tallies: whether reducing tells what was read of partial sums that are tallied.

    Raises:
        WorkerLost: from every verb, when another worker is gone.
    """

    needs_core = False
    tallies = True
    device = torch.device("cpu")

    def __init__(self, rank: int, split: Split) -> None:
        self.rank = rank
        self.split = split
        self.tree = SummationTree(split.shards)
        self.measured: list[dict[str, Any]] = []
        self.traffic = Traffic()

    @cached_property
    def world_size(self) -> int:
        """The number of workers."""
        return self.split.workers

    @property
    def topology(self) -> str:
        """The way of the partial sums over a process group; empty where there is none."""
        return ""

    def use_topology(self, name: str) -> None:  # noqa: B027 (most have but one way)
        """Take another way for the partial sums from now on, where there are several. All workers do.

        Args:
            name: one of :data:`unisono.plan.topology.TOPOLOGIES`, or ``auto``, which measures them anew.
        """

    def go_direct(self, *, always: bool) -> None:  # noqa: B027 (likewise)
        """Have every worker finish a share of the sums, whatever way they would take; or let them take it again.

        With ``always`` it stays so from now on. All workers say the same.
        """

    def measure_links(self) -> Links | None:
        """Measure latency and bandwidth between each two workers; None where nothing lies between them. Collective."""
        return None

    @property
    def waits(self) -> bool:
        """Whether a thread of this worker waits for another worker in a verb."""
        return False

    @property
    def computes(self) -> bool:
        """Whether this worker has shards. Else it serves: it finishes sums, and adds nothing of its own to them."""
        return self.rank not in self.split.servers

    def resplit(self, split: Split) -> None:
        """Give the workers other shards from now on, or let some of them serve. Collective.

        Connections stay. What was planned for the shards before is let go of: buffers that were allocated, and totals.

        Raises:
            ValueError: a split for another number of workers.
        """
        if split.workers != self.world_size:
            raise ValueError(f"a split among {split.workers} workers, and there are {self.world_size}")
        self.split = split
        self.tree = SummationTree(split.shards)

    def allocate(self, buckets: Sequence[Bucket], rows: int) -> list[tuple[Tensor, ...]]:
        """Flat buffers for so many rows of partial sums, where this transport need not copy them. Collective.

        ``buckets`` are the layout of a row, the same on every worker; others may need another number of rows.
        """
        return [tuple(bucket.allocate() for bucket in buckets) for _ in range(rows)]

    @abstractmethod
    def reduce(
        self, bucket: Hashable, partials: Sequence[Tensor], divisor: float | None = None, tally: Tally = UNTALLIED
    ) -> Tensor:
        """Finish the summation tree of one bucket.

        Args:
            bucket: the name of the bucket; its buffers are allocated once.
            partials: this worker's partial sums, the cover of its shards from left to right: 1-D tensors of
                one length, a multiple of 64 elements. They may be overwritten. A worker that serves gives one tensor
                that is like them; its values are not read.
            divisor: the divisor of the root's value, the same on every worker; None not to divide. The division happens
                once, where the sum is finished.
            tally: the tally in which the partial sums were written. They are read from it, and the total is kept there:
                by every worker, what nobody else keeps of the memory that it reads. It looks at what this worker has
                finished, too. All workers give one, or none does.

        Returns:
            the root's value, divided: 1-D of the same length, to be read and not written, since other workers may read
            the same memory. Valid until the bucket is reduced again.
        """

    def private(self, total: Tensor) -> Tensor:
        """A total that this worker may change: the same values, in memory that no other worker reads."""
        return total

    def settle(self) -> None:  # noqa: B027 (most have waited already)
        """Wait until what was asked of the other workers is really here.

        Nothing of it counts before. Only a step's sums need not be waited for: its control word comes behind them.
        """

    def reduce_anyhow(
        self, bucket: Hashable, partials: Sequence[Tensor], divisor: float | None = None, tally: Tally = UNTALLIED
    ) -> Tensor:
        """As :meth:`reduce`, by the backend's all-reduce: in its order of additions; nobody knows what it reads."""
        total, *others = partials
        if not self.computes:
            total.zero_()
        for other in others:
            total.add_(other)
        total = self.reduce_native(total)
        total = total if divisor is None else total.div_(divisor)
        tally.finished.look(total)
        return total

    def reduction(self, name: str) -> Reduction:
        """Return the function that makes totals of partial sums, for the reduction ``exact`` or ``native``."""
        return self.reduce if name == "exact" else self.reduce_anyhow

    @abstractmethod
    def reduce_native(self, total: Tensor) -> Tensor:
        """The backend's own all-reduce (sum) of one 1-D tensor, in any order of additions, in place."""

    @abstractmethod
    def all_gather(self, row: Tensor) -> Tensor:
        """Every worker's 1-D ``row``, as a tensor of shape (world size, row's length)."""

    @abstractmethod
    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Overwrite ``tensor`` with the one of the worker ``source``."""

    @abstractmethod
    def abort(self) -> None:
        """Wake all that wait in a verb, here and on other workers: they raise ``WorkerLost``. Any thread may call it.

        Afterwards there is nothing left to do but to close it.
        """

    @abstractmethod
    def close(self) -> None:
        """Let go of connections and memory. Not collective."""


class Solo(Transport):
    """The transport of a single worker: nothing is sent."""

    def __init__(self, shards: int) -> None:
        super().__init__(0, Split.even(shards, 1))

    def reduce(
        self, bucket: Hashable, partials: Sequence[Tensor], divisor: float | None = None, tally: Tally = UNTALLIED
    ) -> Tensor:
        """The only partial sum is the root."""
        (total,) = partials
        if tally is UNTALLIED:  # torch divides all of it faster than piece by piece
            return total if divisor is None else total.div_(divisor)
        for start in range(0, total.numel(), PIECE):
            piece = total[start : start + PIECE]
            tally.read(piece, start)
            if divisor is not None:
                piece.div_(divisor)
            tally.finished.look(piece)
            tally.keep(piece, start)
        return total

    def reduce_native(self, total: Tensor) -> Tensor:
        """The tensor itself."""
        return total

    def all_gather(self, row: Tensor) -> Tensor:
        """The row itself, of shape (1, length)."""
        return row.unsqueeze(0)

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Do nothing: there is no other worker."""

    def abort(self) -> None:
        """Do nothing: nobody waits."""

    def close(self) -> None:
        """Do nothing: there is no other worker."""
