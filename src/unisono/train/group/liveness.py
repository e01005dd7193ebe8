"""The signs of life of an elastic job's worker, and its probes of other hosts."""

import asyncio
import threading
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from time import perf_counter

from unisono.membership.messages import NewGeneration, Progress, Pulse, Target, Unreached
from unisono.membership.probe import probe, unreached
from unisono.train.group.membership import MemberProgress
from unisono.train.group.workers import Workers

# The main thread's signs of life, as another thread sees them.

BEAT_S = 1.0
"""Seconds between two signs of life."""


class Heartbeat:
    """Watches the main thread, and tells the coordinator what it does.

    One thread calls this object; the main thread only sets plain attributes, here and on its workers.

    Args:
        send: a function that sends a message to the coordinator, and never waits.

    Attributes:
        samples_per_s: the recent throughput of the whole job, in samples per second.
        forms: whether the main thread is connecting with the workers of a new generation.
        shard_s: the recent seconds of computing one shard; 0 while nobody wants to know.
    """

    def __init__(
        self,
        send: Callable[[Progress], None],
        workers: Callable[[], Workers],
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        self._send, self._workers, self._clock = send, workers, clock
        self.progress, self.samples_per_s = MemberProgress(0), 0.0
        self.forms = False
        self.shard_s = 0.0
        self._seen: Hashable = None
        self._was_called = False
        self._since = clock()
        self._longest_s = 0.0
        self._closed = threading.Event()

    def close(self) -> None:
        """Stop beating."""
        self._closed.set()

    def look(self) -> Pulse:
        """Look at the main thread now."""
        now, workers = self._clock(), self._workers()
        waits = self.forms or workers.waits
        signs = (workers.generation.number, workers.ticks, workers.is_called)
        if signs != self._seen and self._was_called:
            self._longest_s = max(self._longest_s, now - self._since)
        if waits or signs != self._seen:
            self._seen, self._since = signs, now
        self._was_called = workers.is_called and not waits
        return Pulse(
            doing="wait" if waits else "call" if workers.is_called else "script",
            still_s=now - self._since,
            longest_s=self._longest_s,
            shard_s=self.shard_s,
        )

    def beat(self) -> None:
        """Send a sign of life again and again until this is closed. Runs on a thread of its own."""
        while not self._closed.wait(BEAT_S):
            progress = self.progress
            self._send(
                Progress(
                    acts=progress.acts,
                    step=progress.step,
                    loop=progress.loop,
                    samples_per_s=self.samples_per_s,
                    pulse=self.look(),
                )
            )


# Probes of a generation's hosts while it forms.

Report = Callable[[tuple[Unreached, ...]], None]
"""Gets the hosts that are not reached, if there are any. It is called on a thread of its own."""


class Probing:
    """Finds out, on a thread of its own, which hosts this worker does not reach.

    ``report`` gets the result. It is called once, unless all hosts are reached or this is closed before.
    """

    def __init__(self, targets: Sequence[Target], token: str, patience_s: float, report: Report) -> None:
        self._report = report
        self._loop = asyncio.new_event_loop()
        self._task = self._loop.create_task(probe(targets, token, patience_s))
        self._thread = threading.Thread(target=self._run, name="unisono-probe", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop probing."""
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._task.cancel)
        self._thread.join()

    def _run(self) -> None:
        try:
            hosts = unreached(self._loop.run_until_complete(self._task))
            if hosts:
                self._report(hosts)
        except asyncio.CancelledError:  # closed: nobody wants the result any more
            pass
        finally:
            self._loop.close()


class OtherHosts:
    """The hosts that this worker probes for its own host. The coordinator names only those that are new or gone."""

    def __init__(self) -> None:
        self._targets: dict[str, Target] = {}
        self._since = 0

    def of(self, new: NewGeneration) -> list[Target]:
        """Return the hosts to probe in a generation; none if another worker of this host probes them."""
        known = self._targets if new.hosts_since and new.hosts_since == self._since else {}
        hosts = {**known, **{target.agent: target for target in new.hosts}}
        self._targets = {agent: target for agent, target in hosts.items() if agent not in new.gone}
        self._since = new.generation
        return list(self._targets.values())
