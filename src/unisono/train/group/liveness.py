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

# How this worker's main thread does, as another thread sees it.

BEAT_S = 1.0
"""Between two signs of life."""


class Heartbeat:
    """Looks at the main thread now and then, and tells the coordinator how it does.

    It is called by one thread. The main thread only sets plain attributes, here and on its workers.

    Args:
        send: a function that sends a message to the coordinator, and never waits.
        workers: a function that returns the workers of the present generation.
        clock: a clock, in seconds.

    Attributes:
        progress: the progress of the main thread.
        samples_per_s: the recent throughput of the whole job, in samples per second.
        forms: whether the main thread is connecting with the workers of a new generation.
        shard_s: the seconds that computing one shard takes lately; 0 as long as nobody wants to know.
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
        """It beats no more."""
        self._closed.set()

    def look(self) -> Pulse:
        """How it does now."""
        now, workers = self._clock(), self._workers()
        waits = self.forms or workers.waits
        seen = (workers.generation.number, workers.ticks, workers.is_called)
        if seen != self._seen and self._was_called:
            self._longest_s = max(self._longest_s, now - self._since)
        if waits or seen != self._seen:
            self._seen, self._since = seen, now
        self._was_called = workers.is_called and not waits
        return Pulse(
            doing="wait" if waits else "call" if workers.is_called else "script",
            still_s=now - self._since,
            longest_s=self._longest_s,
            shard_s=self.shard_s,
        )

    def beat(self) -> None:
        """Tell it again and again, until this is closed. On a thread of its own."""
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

Tell = Callable[[tuple[Unreached, ...]], None]
"""Called with the hosts that are not reached, if there are any, on a thread of its own."""


class Probing:
    """Finds out, on a thread of its own, which hosts this worker does not reach.

    Args:
        targets: the agents of those hosts.
        token: the job's token.
        patience_s: seconds after which one is given up.
        tell: a function that gets the result; called once, unless all are reached or this is closed before.
    """

    def __init__(self, targets: Sequence[Target], token: str, patience_s: float, tell: Tell) -> None:
        self._tell = tell
        self._loop = asyncio.new_event_loop()
        self._task = self._loop.create_task(probe(targets, token, patience_s))
        self._thread = threading.Thread(target=self._run, name="unisono-probe", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Give up."""
        with suppress(RuntimeError):  # it has ended
            self._loop.call_soon_threadsafe(self._task.cancel)
        self._thread.join()

    def _run(self) -> None:
        try:
            found = unreached(self._loop.run_until_complete(self._task))
            if found:
                self._tell(found)
        except asyncio.CancelledError:
            pass
        finally:
            self._loop.close()


class OtherHosts:
    """The hosts that this worker probes for its own: the coordinator names those that are new or gone."""

    def __init__(self) -> None:
        self._known: dict[str, Target] = {}
        self._since = 0

    def of(self, new: NewGeneration) -> list[Target]:
        """Those of a generation; none if another worker of this host probes them."""
        known = self._known if new.hosts_since and new.hosts_since == self._since else {}
        found = {**known, **{target.agent: target for target in new.hosts}}
        self._known = {agent: target for agent, target in found.items() if agent not in new.gone}
        self._since = new.generation
        return list(self._known.values())
