"""Reduces buckets in the background, while the backward pass that fills the next ones is still under way."""

import queue
import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from time import perf_counter

from torch import Tensor

from unisono.reduce.handover import Handover, beside
from unisono.reduce.reduction import Reduction, exact
from unisono.reduce.tally import Tally
from unisono.reduce.transport import Transport

Weigh = Callable[[], float | None]
"""Asks all workers for the weights of their shards: returns what sums are divided by, or nothing. Collective."""


class Reducer:
    """Reduces the buckets of one attempt after another, on a thread of its own.

    Buckets are reduced in the order of their plan, whatever order they become ready in, so that all workers agree.
    While an attempt is under way the transport belongs to that thread.

    Args:
        transport: to the other workers.
        reduction: exact or native.
        overlap: reduce a bucket as soon as it is ready; else all of them in :meth:`totals`.
    """

    def __init__(self, transport: Transport, reduction: Reduction, *, overlap: bool) -> None:
        self.transport = transport
        self._reduction = reduction
        self._in_background = overlap and transport.world_size > 1
        self._attempts: queue.SimpleQueue[_Attempt | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._attempt: _Attempt | None = None

    @property
    def tallies(self) -> bool:
        """Whether what is read of partial sums is told."""
        return self.transport.tallies and self._reduction is exact

    def begin(self, buckets: Sequence[Hashable], weigh: Weigh) -> None:
        """An attempt begins, in which these buckets will become ready."""
        self._attempt = _Attempt(buckets, weigh)
        if self._in_background:
            self._start()
            self._attempts.put(self._attempt)

    def ready(self, bucket: int, partials: Sequence[Tensor], tally: Tally | None = None) -> None:
        """This worker's partial sums of a bucket are final. The tally is the reducer's until there are totals."""
        assert self._attempt is not None
        self._attempt.ready.put(_Ready(bucket, partials, tally, Handover(partials[0].device)))

    def totals(self) -> tuple[tuple[Tensor, ...], float]:
        """Wait until all buckets are reduced.

        Returns:
            the total of every bucket, divided (see :meth:`Transport.reduce`), and the seconds that reducing took,
            which may have passed while this worker computed.

        Raises:
            WorkerLost: another worker is gone.
        """
        attempt, self._attempt = self._attempt, None
        assert attempt is not None
        if not self._in_background:
            attempt.work(self.transport, self._reduction)
        attempt.done.wait()
        if attempt.error is not None:
            raise attempt.error
        for handover in attempt.handovers:
            handover.accept()
        return tuple(attempt.totals), attempt.seconds

    def abandon(self) -> None:
        """The attempt failed on this worker. The others wait for buckets that will not come: hang up on them."""
        attempt, self._attempt = self._attempt, None
        if attempt is not None and self._in_background:
            attempt.ready.put(None)
            self.transport.close()
            attempt.done.wait()

    def close(self) -> None:
        """End the thread; an attempt that is under way is abandoned."""
        self.abandon()
        if self._thread is not None:
            self._attempts.put(None)
            self._thread.join()
            self._thread = None

    def _start(self) -> None:
        if self._thread is None:
            # A daemon, so that a script which ends in the middle of a step is not kept by it.
            self._thread = threading.Thread(target=self._work, name="unisono-reducer", daemon=True)
            self._thread.start()

    def _work(self) -> None:
        while (attempt := self._attempts.get()) is not None:
            attempt.work(self.transport, self._reduction)


@dataclass(frozen=True, slots=True)
class _Ready:
    """A bucket whose partial sums are final."""

    bucket: int
    partials: Sequence[Tensor]
    tally: Tally | None
    handover: Handover


@dataclass(slots=True)
class _Attempt:
    """The buckets of one attempt, on their way to their totals."""

    buckets: Sequence[Hashable]
    weigh: Weigh
    ready: "queue.SimpleQueue[_Ready | None]" = field(default_factory=queue.SimpleQueue)
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
        divisor = self.weigh()
        self.seconds += perf_counter() - begun
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
            self.seconds += perf_counter() - begun
