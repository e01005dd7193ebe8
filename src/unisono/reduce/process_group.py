"""The transport over a group of workers that send to each other: sockets of our own, Gloo, or NCCL on GPUs."""

import platform
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import timedelta
from functools import partial
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from unisono.device import current_stream, is_accelerator, page_locked, sent_to
from unisono.errors import NoProgress, WorkerLost
from unisono.plan.split import Split
from unisono.plan.topology import Links, distinct
from unisono.reduce.buckets import Bucket
from unisono.reduce.exchange import Choice, Collectives, Exchange, Messages, Timing
from unisono.reduce.partial_sums import UNTALLIED, Tally
from unisono.reduce.transport import Transport
from unisono.reduce.wire import SocketGroup

NEVER_SENT = 2**31 - 1
"""A tag that no message has."""

LARGEST = 2**40
"""Bytes that no bucket has."""

LINKS = 2**31 - 2
"""The tag of messages that measure a connection."""

PROBE = 2**20
"""Bytes that are sent to measure a bandwidth."""

ROUNDS = 3
"""Round trips of a measurement, of which the shortest counts."""


OF_OWN_DEVICE = (torch.AcceleratorError, torch.OutOfMemoryError)
"""Errors that are this worker's own, though it was waiting for others."""


class ProcessGroupTransport(Transport):
    """Partial sums travel between workers, and the worker that holds two siblings adds them.

    Args:
        group: a ``SocketGroup``, ``ProcessGroupGloo`` or ``ProcessGroupNCCL``; used by one thread, closed by
            :meth:`close`.
        device: the device of the backend's tensors; tensors on other devices are copied there and back.
        topology: the way of the partial sums, or ``auto``: the fastest one, as measured when buckets are allocated;
            None for backends that are only asked for standard collectives.
        clock: in seconds, by which they are measured.
    """

    def __init__(
        self,
        group: Any,
        rank: int,
        split: Split,
        device: torch.device,
        topology: str | None = "direct",
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        super().__init__(rank, split)
        self._group, self._clock = group, clock
        self.device = device
        self._by_collectives = topology is None
        self.tallies = device.type == "cpu"
        self._choice = _choice(topology, split.workers)
        self._buckets: list[Bucket] = []
        self._exchanges: dict[tuple[Hashable, int, torch.dtype], Exchange] = {}
        self._copies: dict[tuple[Hashable, int, torch.dtype], HostCopies] = {}
        self._waits = self._always_direct = False
        self._is_aborted = self._is_pending = False

    @property
    def topology(self) -> str:
        """The topology of the largest buckets; to servers it is always direct."""
        return "direct" if self._by_collectives or self._must_be_direct else self._choice.topology(LARGEST)

    @property
    def waits(self) -> bool:
        """In the group."""
        return self._waits

    def resplit(self, split: Split) -> None:
        """Split the shards anew, with new exchanges, by the measured topologies."""
        super().resplit(split)
        self._exchanges.clear()
        self._copies.clear()
        self._buckets.clear()

    def allocate(self, buckets: Sequence[Bucket], rows: int) -> list[tuple[Tensor, ...]]:
        """Allocate rows anywhere in memory. With ``auto``, topologies are compared on buckets of these sizes."""
        self._buckets += buckets
        self._compare(buckets)
        return super().allocate(buckets, rows)

    def use_topology(self, name: str) -> None:
        """Use another topology; with ``auto``, the fastest on buckets of the present sizes, measured first."""
        if self._by_collectives:
            return
        self._choice = _choice(name, self.world_size)
        self._exchanges.clear()

    def go_direct(self, *, always: bool) -> None:
        """Always use the direct topology, or no longer; the chosen topology and the measurements stay."""
        if always != self._always_direct:
            self._always_direct = always
            self._exchanges.clear()

    def measure_links(self) -> Links:
        """Measure one pair after the other, while all others wait: the shortest of some round trips."""
        seconds = {
            (a, b): self._round_trips(a, b) for a in range(self.world_size) for b in range(a + 1, self.world_size)
        }
        mine = torch.tensor([seconds[pair] for pair in seconds], dtype=torch.float64).flatten()
        rows = self.all_gather(mine).view(self.world_size, len(seconds), 2).tolist()
        measured = {pair: rows[pair[0]][number] for number, pair in enumerate(seconds)}
        pairs = {
            pair: (small / 2, PROBE / max(large / 2 - small / 2, 1e-9)) for pair, (small, large) in measured.items()
        }
        return Links.of(pairs, self.world_size)

    @property
    def _must_be_direct(self) -> bool:
        return self._always_direct or bool(self.split.servers)

    def _round_trips(self, a: int, b: int) -> tuple[float, float]:
        """Seconds of a small one and of a large one between two workers; 0 on the others. Collective."""
        self.all_gather(torch.zeros(1, dtype=torch.uint8))  # all are here
        if self.rank not in (a, b):
            return 0.0, 0.0
        probes = [torch.zeros(size, dtype=torch.uint8, device=self.device) for size in (8, PROBE)]
        small, large = (min(self._round_trip(a, b, probe) for _ in range(ROUNDS)) for probe in probes)
        return small, large

    def _round_trip(self, a: int, b: int, data: Tensor) -> float:
        begun = self._clock()
        with self._named_errors():
            for sender, receiver in ((a, b), (b, a)):
                if self.rank == sender:
                    self._group.send([data], receiver, LINKS).wait()
                else:
                    self._group.recv([data], sender, LINKS).wait()
            if is_accelerator(self.device):
                current_stream(self.device).synchronize()
                self._require_whole()
        return self._clock() - begun

    def _compare(self, buckets: Sequence[Bucket]) -> None:
        if self._must_be_direct:
            return
        for bucket in self._choice.open(buckets):
            seconds = self._choice.measure(bucket, partial(self._trial, bucket))
            size = bucket.numel * bucket.dtype.itemsize
            self.measured.append({"bytes": size, "fastest": self._choice.topology(size), "seconds": seconds})

    def reduce(
        self, bucket: Hashable, partials: Sequence[Tensor], divisor: float | None = None, tally: Tally = UNTALLIED
    ) -> Tensor:
        """Reduce by messages, or by collectives."""
        first = partials[0]
        key = (bucket, first.numel(), first.dtype)
        if first.device != self.device:
            assert tally.is_empty, "memory of other devices is not tallied"
            if key not in self._copies:
                self._copies[key] = HostCopies(partials)
            copies = self._copies[key]
            return copies.put_back(self.reduce(bucket, copies.take(partials), divisor, tally))
        if key not in self._exchanges:
            self._compare(self._buckets)
            way = "direct" if self._must_be_direct else self._choice.topology(first.nbytes)
            self._exchanges[key] = self._exchange(first, way)
        exchange = self._exchanges[key]
        self.traffic.count(exchange.sent_bytes, exchange.sent_messages)
        with self._collective():
            return exchange.reduce(partials, divisor, tally)

    def settle(self) -> None:
        """Wait until the device has what was asked of the others, and know that it is theirs.

        NCCL's calls return at once, and so do they when they are aborted: then what lies there is nobody's result.
        """
        if self._is_pending:
            with self._named_errors():
                current_stream(self.device).synchronize()
                self._require_whole()

    def reduce_native(self, total: Tensor) -> Tensor:
        """The backend's all-reduce, counted as what a ring sends."""
        staged = total.to(self.device)
        others = self.world_size - 1
        self.traffic.count(2 * others * staged.nbytes // self.world_size, 2 * others)
        with self._collective():
            self._group.allreduce([staged]).wait()
        return total if staged is total else total.copy_(staged)

    def all_gather(self, row: Tensor) -> Tensor:
        """Gather rows of equal length from all workers."""
        staged = self._on_own_device(row)
        rows = torch.empty((self.world_size, row.numel()), dtype=row.dtype, device=self.device)
        self._count_copies(row)
        with self._collective():
            self._group._allgather_base(rows.view(-1), staged).wait()
        gathered = sent_to(row.device, rows)
        self.settle()
        return gathered

    def gather_into(self, rows: Tensor, row: Tensor) -> None:
        """Gather every worker's 1-D ``row`` into existing memory; ``row`` may be a part of ``rows``.

        ``rows`` is 1-D, has so many rows as there are workers, and lies on the backend's device.
        """
        with self._collective():
            self._group._allgather_base(rows, row).wait()

    def swap(self, received: Tensor, sent: Tensor) -> None:
        """Swap rows with all workers: row j of ``sent`` is for worker j, and row j of ``received`` is from there."""
        with self._collective():
            self._group.alltoall_base(received, sent, [], []).wait()

    def send(self, tensor: Tensor, target: int, tag: int) -> "TensorUnderWay":
        """Begin to send a contiguous tensor of the backend's device, which stays as it is until that is done."""
        with self._named_errors():
            return TensorUnderWay(self._group.send([tensor], target, tag), self._named_errors)

    def receive(self, tensor: Tensor, source: int, tag: int) -> "TensorUnderWay":
        """Begin to receive what another worker sends under a tag, into a contiguous tensor of the backend's device."""
        with self._named_errors():
            return TensorUnderWay(self._group.recv([tensor], source, tag), self._named_errors, self._settle_received)

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Broadcast a tensor from a worker to all."""
        staged = self._on_own_device(tensor.detach())
        if self.rank == source:
            self._count_copies(tensor)
        with self._collective():
            self._group.broadcast(staged, source).wait()
        self.settle()
        with torch.no_grad():
            tensor.copy_(staged, non_blocking=is_accelerator(tensor.device))

    def abort(self) -> None:
        """Hang up."""
        self._is_aborted = True  # before anything that is under way ends by it
        if (group := self._group) is not None:
            self._hang_up(group)

    def close(self) -> None:
        """Shut the group's connections down without waiting for the others."""
        self._is_aborted = True
        self._exchanges.clear()
        self._copies.clear()
        if self._group is not None:
            self._hang_up(self._group)
        if isinstance(self._group, SocketGroup):
            self._group.close()
        self._group = None

    def _on_own_device(self, tensor: Tensor) -> Tensor:
        """Return the tensor on the device that the backend needs."""
        staged = sent_to(self.device, tensor.contiguous())
        if is_accelerator(tensor.device) and not is_accelerator(self.device):
            current_stream(tensor.device).synchronize()
        return staged

    def _count_copies(self, tensor: Tensor) -> None:
        self.traffic.count((self.world_size - 1) * tensor.nbytes, self.world_size - 1)

    def _exchange(self, like: Tensor, topology: str) -> Exchange:
        if self._by_collectives:
            return Collectives(self._group, like, self.rank, self.split)
        return Messages(self._group, like, self.rank, self.split, topology)

    def _trial(self, bucket: Bucket, topology: str) -> Timing:
        mine = self.split.of(self.rank)
        count = len(self.tree.cover(mine.start, mine.stop))
        partials = [torch.zeros(bucket.numel, dtype=bucket.dtype, device=self.device) for _ in range(count)]
        exchange = self._exchange(partials[0], topology)

        def once() -> float:
            self.all_gather(torch.zeros(1))  # all start together
            begun = self._clock()
            with self._collective():
                exchange.reduce(partials, None)
            self.settle()
            return self.all_gather(torch.tensor([self._clock() - begun], dtype=torch.float64)).max().item()

        return once

    @contextmanager
    def _collective(self) -> Iterator[None]:
        """Within the context, a collective call may return while the device still works on it; see :meth:`settle`."""
        with self._named_errors():
            self._is_pending = is_accelerator(self.device)
            yield

    def _settle_received(self) -> None:
        # NCCL says that a message is here as soon as it is asked for, and also when it was aborted.
        self._is_pending = is_accelerator(self.device)
        self.settle()
        self._require_whole()

    def _require_whole(self) -> None:
        if self._is_aborted:
            raise WorkerLost(f"rank {self.rank} was cut off from the other workers in the middle of a collective call")
        self._is_pending = False

    @contextmanager
    def _named_errors(self) -> Iterator[None]:
        group, self._waits = self._group, True
        try:
            yield
        except RuntimeError as error:
            self._hang_up(group)  # workers that wait for this worker wake up, and hang up in turn
            if isinstance(error, OF_OWN_DEVICE):
                raise
            raise self._named(error) from error
        finally:
            self._waits = False

    def _hang_up(self, group: Any) -> None:
        group.abort()
        if not isinstance(group, dist.ProcessGroupGloo):
            return
        # Gloo's abort leaves the connections open, and so does letting go of a group that another thread waits in. A
        # receive that times out closes them all.
        for peer in range(self.world_size):
            if peer != self.rank:
                with suppress(RuntimeError):
                    group.recv([torch.zeros(1)], peer, NEVER_SENT).wait(timedelta(milliseconds=1))  # type: ignore[attr-defined]

    def _named(self, error: RuntimeError) -> NoProgress | WorkerLost:
        first_line = next(iter(str(error).strip().splitlines()), type(error).__name__)
        if "timed out" in first_line.lower():
            return NoProgress(
                f"rank {self.rank} on host {platform.node()} waited for another worker in vain: {first_line}. It "
                f"hangs, or takes longer for something than the others: see its log, or allow more with "
                f"unisono.init(faults={{'timeout_s': …}})"
            )
        return WorkerLost(
            f"rank {self.rank} lost its connection to another worker: {first_line}. Look for the first error of the "
            f"others"
        )


class HostCopies:
    """The copies in the host's memory of a bucket that lies on a device: page-locked, allocated once."""

    def __init__(self, partials: Sequence[Tensor]) -> None:
        self._partials = [page_locked(torch.empty_like(partial, device="cpu")) for partial in partials]
        self._total = page_locked(torch.empty_like(partials[0], device="cpu"))
        self._result = torch.empty_like(partials[0])

    def take(self, partials: Sequence[Tensor]) -> Sequence[Tensor]:
        """Copy tensors of the device; waits for what this stream has under way, once."""
        for held, value in zip(self._partials, partials, strict=True):
            held.copy_(value, non_blocking=True)
        current_stream(self._result.device).synchronize()
        return self._partials

    def put_back(self, total: Tensor) -> Tensor:
        """A tensor on the device that gets the total's values, the same one each time; nobody waits."""
        self._total.copy_(total)
        return self._result.copy_(self._total, non_blocking=True)


class TensorUnderWay:
    """A tensor that is under way from one worker to another.

    Args:
        named: a context in which the errors of a group get their names.
        settle: a function that is called once it has left or come, before anybody reads it.
    """

    def __init__(
        self, work: Any, named: Callable[[], AbstractContextManager[None]], settle: Callable[[], None] = lambda: None
    ) -> None:
        self._work, self._named, self._settle = work, named, settle

    def wait(self) -> None:
        """Wait until the message has left, or has come.

        Raises:
            WorkerLost: the other worker is gone.
        """
        with self._named():
            self._work.wait()
        self._settle()


def _choice(topology: str | None, workers: int) -> Choice:
    return Choice(distinct(workers) if topology == "auto" else [topology or "direct"])
