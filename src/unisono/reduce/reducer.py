"""Reduces buckets in the background, while the backward pass that fills the next ones is still under way."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from time import perf_counter

from torch import Tensor

from unisono.device import Handover, beside, current_stream, is_accelerator
from unisono.reduce.tally import Tally
from unisono.reduce.transport import Transport
from unisono.spans import Spans

# From every worker's partial sums of a bucket to the sum that all of them hold.


Reduction = Callable[[Transport, Hashable, Sequence[Tensor], float | None, Tally | None], Tensor]
"""Makes one flat total of all partial sums of a bucket, which may be overwritten. See :meth:`Transport.reduce`."""


def exact(
    transport: Transport, bucket: Hashable, partials: Sequence[Tensor], divisor: float | None, tally: Tally | None
) -> Tensor:
    """Along the summation tree: the same bits on any number of workers."""
    return transport.reduce(bucket, partials, divisor, tally)


def native(
    transport: Transport, bucket: Hashable, partials: Sequence[Tensor], divisor: float | None, tally: Tally | None
) -> Tensor:
    """By the backend's own all-reduce: its own order of additions, and nobody knows what it reads."""
    total, *others = partials
    if not transport.computes:
        total.zero_()
    for other in others:
        total.add_(other)
    total = transport.reduce_native(total)
    total = total if divisor is None else total.div_(divisor)
    if tally is not None:
        tally.finished.look(total)
    return total


REDUCTIONS: dict[str, Reduction] = {"exact": exact, "native": native}


Weigh = Callable[[], float | None]
"""Asks all workers for the weights of their shards: returns what sums are divided by, or nothing. Collective."""


class Reducer:
    """Reduces the buckets of one attempt after another, on a thread of its own.

    Buckets are reduced in the order of their plan, whatever order they become ready in, so that all workers agree.
    While an attempt is under way the transport belongs to that thread.

    Args:
        transport: the transport between the workers.
        reduction: the reduction of a bucket, exact or native.
        overlap: whether to reduce a bucket as soon as it is ready; else :meth:`totals` reduces all of them.
        spans: the worker's spans, if they are kept.
    """

    def __init__(
        self, transport: Transport, reduction: Reduction, *, overlap: bool, spans: Spans | None = None
    ) -> None:
        self.transport = transport
        self._reduction, self._spans = reduction, spans
        self._in_background = overlap and transport.world_size > 1
        self._pending_steps: queue.SimpleQueue[_PendingBuckets | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._pending: _PendingBuckets | None = None

    @property
    def tallies(self) -> bool:
        """Whether what is read of partial sums is told."""
        return self.transport.tallies and self._reduction is exact

    def begin(self, buckets: Sequence[Hashable], weigh: Weigh) -> None:
        """An attempt begins, in which these buckets will become ready."""
        self._pending = _PendingBuckets(buckets, weigh, self._spans)
        if self._in_background:
            self._start()
            self._pending_steps.put(self._pending)

    def ready(self, bucket: int, partials: Sequence[Tensor], tally: Tally | None = None) -> None:
        """This worker's partial sums of a bucket are final. The tally is the reducer's until there are totals."""
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
            pending.work(self.transport, self._reduction)
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
        """The attempt failed on this worker. The others wait for buckets that will not come: hang up on them."""
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
            pending.work(self.transport, self._reduction)


@dataclass(frozen=True, slots=True)
class _Ready:
    """A bucket whose partial sums are final."""

    bucket: int
    partials: Sequence[Tensor]
    tally: Tally | None
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

    def work(self, transport: Transport, reduction: Reduction) -> None:
        """Reduce all buckets as they come; an error is for whoever waits."""
        try:
            self._reduce_all(transport, reduction)
        except BaseException as error:  # noqa: BLE001 (raised again by the thread that waits)
            self.error = error
        finally:
            self.done.set()

    def _reduce_all(self, transport: Transport, reduction: Reduction) -> None:
        begun = perf_counter()
        with beside(transport.device):  # or it would come behind all that this worker has yet to compute
            divisor = self.weigh()
        self.seconds += (ended := perf_counter()) - begun
        if self.spans is not None:
            self.spans.add("weigh", begun, ended)
        early: dict[int, _Ready] = {}
        for number, name in enumerate(self.buckets):
            while number not in early:
                ready = self.ready.get()
                if ready is None:
                    return
                early[ready.bucket] = ready
            found = early.pop(number)
            begun = perf_counter()
            with beside(found.handover.device):
                found.handover.accept()
                self.totals.append(reduction(transport, name, found.partials, divisor, found.tally))
                self.handovers.append(Handover(found.handover.device))
            self.seconds += (ended := perf_counter()) - begun
            if self.spans is not None:
                self.spans.add("reduce", begun, ended, number, found.ready_at)
