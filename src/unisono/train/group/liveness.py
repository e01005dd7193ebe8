"""What a worker of an elastic job tells the coordinator about itself and its host's connections."""

import asyncio
import threading
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from time import perf_counter

from unisono.membership.messages import NewGeneration, Pulse, Target, Unreached
from unisono.membership.probe import probe, unreached
from unisono.train.group.workers import Workers

# How this worker's main thread does, as another thread sees it.


class Heartbeat:
    """Looks at the main thread now and then, and notices when it comes no further.

    It is called by one thread. The main thread only sets plain attributes, here and on its workers.

    Attributes:
        forms: whether the main thread meets the workers of a new generation.
        shard_s: the seconds that computing one shard takes lately; 0 as long as nobody wants to know.
    """

    def __init__(self) -> None:
        self.forms = False
        self.shard_s = 0.0
        self._seen: Hashable = None
        self._was_called = False
        self._since = perf_counter()
        self._longest_s = 0.0

    def look(self, workers: Workers) -> Pulse:
        """How it does now, at work with these workers."""
        now = perf_counter()
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


def other_hosts(new: NewGeneration, rank: int) -> list[Target]:
    """The hosts of a generation that answer probes, but this worker's own."""
    mine = new.roster[rank].agent
    seats = {seat.agent: seat for seat in new.roster if seat.agent and seat.probes and seat.agent != mine}
    return [Target(agent=seat.agent, host=seat.host, address=seat.probes) for seat in seats.values()]
