"""Reduces buckets in the background, while the backward pass that fills the next ones is under way; and means."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from time import perf_counter

import torch
from torch import Tensor

from unisono.device import Handover, beside, current_stream, is_accelerator
from unisono.plan.split import Split
from unisono.reduce.buckets import plan_buckets
from unisono.reduce.partial_sums import UNTALLIED, Tally, views_of
from unisono.reduce.transport import Reduction, Transport
from unisono.spans import Spans

Weigh = Callable[[], float | None]
"""Asks all workers for the weights of their shards: returns what sums are divided by, or nothing. Collective."""


class Reducer:
    """Reduces the buckets of one attempt after another, on a thread of its own.

    Buckets are reduced in the order of their plan, whatever order they become ready in, so that all workers agree.
    While an attempt is under way the transport belongs to that thread.

    Args:
        reduction: the job's reduction: ``exact`` or ``native``.
        overlap: whether to reduce a bucket as soon as it is ready; else :meth:`totals` reduces all of them.

    Attributes:
        tallies: whether what is read of partial sums is told.
    """

    def __init__(self, transport: Transport, reduction: str, *, overlap: bool, spans: Spans | None = None) -> None:
        self.transport = transport
        self.tallies = transport.tallies and reduction == "exact"
        self._reduce, self._spans = transport.reduction(reduction), spans
        self._in_background = overlap and transport.world_size > 1
        self._pending_steps: queue.SimpleQueue[_PendingBuckets | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._pending: _PendingBuckets | None = None

    def begin(self, buckets: Sequence[Hashable], weigh: Weigh) -> None:
        """Begin an attempt, in which these buckets will become ready."""
        self._pending = _PendingBuckets(buckets, weigh, self._spans)
        if self._in_background:
            self._start()
            self._pending_steps.put(self._pending)

    def ready(self, bucket: int, partials: Sequence[Tensor], tally: Tally = UNTALLIED) -> None:
        """Take this worker's final partial sums of a bucket. The tally is the reducer's until there are totals."""
        assert self._pending is not None
        ready_at = 0.0 if self._spans is None else perf_counter()
        self._pending.ready.put(_Ready(bucket, partials, tally, Handover(partials[0].device), ready_at))

    def totals(self) -> tuple[tuple[Tensor, ...], float]:
        """Wait until all buckets are reduced.

        Returns:
            the total of every bucket, divided (see :meth:`Transport.reduce`), and the seconds that reducing took,
            which may have passed while this worker computed.

        Raises:
            WorkerLost: another worker is gone.
        """
        pending, self._pending = self._pending, None
        assert pending is not None
        if not self._in_background:
            pending.work(self.transport.device, self._reduce)
        pending.done.wait()
        if pending.error is not None:
            raise pending.error
        # What this worker has yet to compute is no waiting for others, and an error of its device is its own.
        if is_accelerator(self.transport.device):
            current_stream(self.transport.device).synchronize()
        for handover, total in zip(pending.handovers, pending.totals, strict=True):
            handover.accept(total)
        return tuple(pending.totals), pending.seconds

    def abandon(self) -> None:
        """Give up a failed attempt. The others wait for buckets that will not come: hang up on them."""
        pending, self._pending = self._pending, None
        if pending is not None and self._in_background:
            pending.ready.put(None)
            self.transport.close()
            pending.done.wait()

    def close(self) -> None:
        """End the thread; an attempt that is under way is abandoned."""
        self.abandon()
        if self._thread is not None:
            self._pending_steps.put(None)
            self._thread.join()
            self._thread = None

    def _start(self) -> None:
        if self._thread is None:
            # A daemon, so that a script which ends in the middle of a step is not kept by it.
            self._thread = threading.Thread(target=self._work, name="unisono-reducer", daemon=True)
            self._thread.start()

    def _work(self) -> None:
        while (pending := self._pending_steps.get()) is not None:
            pending.work(self.transport.device, self._reduce)


@dataclass(frozen=True, slots=True)
class _Ready:
    """A bucket whose partial sums are final."""

    bucket: int
    partials: Sequence[Tensor]
    tally: Tally
    handover: Handover
    ready_at: float


@dataclass(slots=True)
class _PendingBuckets:
    """The buckets of one attempt, on their way to their totals."""

    buckets: Sequence[Hashable]
    weigh: Weigh
    spans: Spans | None
    ready: queue.SimpleQueue[_Ready | None] = field(default_factory=queue.SimpleQueue)
    totals: list[Tensor] = field(default_factory=list)
    handovers: list[Handover] = field(default_factory=list)
    seconds: float = 0.0
    error: BaseException | None = None
    done: threading.Event = field(default_factory=threading.Event)

    def work(self, device: torch.device, reduce: Reduction) -> None:
        """Reduce all buckets as they come; an error is raised where their results are awaited."""
        try:
            begun = perf_counter()
            with beside(device):  # or it would come behind all that this worker has yet to compute
                divisor = self.weigh()
            self.seconds += (ended := perf_counter()) - begun
            if self.spans is not None:
                self.spans.add("weigh", begun, ended)
            early: dict[int, _Ready] = {}
            for number, name in enumerate(self.buckets):
                while number not in early:
                    if (ready := self.ready.get()) is None:
                        return
                    early[ready.bucket] = ready
                bucket = early.pop(number)
                begun = perf_counter()
                with beside(bucket.handover.device):
                    bucket.handover.accept()
                    self.totals.append(reduce(name, bucket.partials, divisor, bucket.tally))
                    self.handovers.append(Handover(bucket.handover.device))
                self.seconds += (ended := perf_counter()) - begun
                if self.spans is not None:
                    self.spans.add("reduce", begun, ended, number, bucket.ready_at)
        except BaseException as error:  # noqa: BLE001 (raised again by the thread that waits)
            self.error = error
        finally:
            self.done.set()


# Means of tensors over workers.

BUCKET_BYTES = 16 * 2**20


class Averaging:
    """Adds up tensors of all workers, in one order on every way, and divides.

    It uses the transport's fastest way for sums. From here on the workers' shards are one for each of them.

    Raises:
        WorkerLost: from every method, when another worker is gone.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        transport.resplit(Split.even(transport.world_size, transport.world_size))
        self._plans: dict[tuple[object, ...], _Plan] = {}

    @torch.no_grad()
    def mean(self, tensors: Sequence[Tensor], divisor: float | None = None) -> list[Tensor]:
        """The means over all workers. Collective.

        Args:
            tensors: floating-point, of the same shapes and dtypes on every worker.
            divisor: the divisor of the sums; by default the number of workers.

        Returns:
            tensors of the same shapes and dtypes, the same on every worker; to be read, and valid until the next call.
        """
        if not tensors:
            return []
        layout = tuple((tensor.shape, tensor.dtype, tensor.stride(), tensor.device) for tensor in tensors)
        if layout not in self._plans:
            self._plans[layout] = _Plan(self._transport, tensors, len(self._plans))
        return self._plans[layout].mean(tensors, self._transport.world_size if divisor is None else divisor)


class _Plan:
    """The buckets for tensors of one layout."""

    def __init__(self, transport: Transport, tensors: Sequence[Tensor], number: int) -> None:
        self._transport, self._number = transport, number
        self._buckets = plan_buckets(tensors, BUCKET_BYTES)
        (self._row,) = transport.allocate(self._buckets, 1)
        self._views = views_of(self._buckets, self._row)

    def mean(self, tensors: Sequence[Tensor], divisor: float) -> list[Tensor]:
        for view, tensor in zip(self._views, tensors, strict=True):
            view.copy_(tensor)
        totals = [
            self._transport.reduce(("mean", self._number, number), [flat], divisor)
            for number, flat in enumerate(self._row)
        ]
        self._transport.settle()
        return list(views_of(self._buckets, totals))
