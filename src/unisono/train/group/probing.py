"""Probes of a generation's hosts while it forms."""

import asyncio
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress

from unisono.membership.messages import Minted, Target, Unreached
from unisono.membership.probe import probe, unreached

Tell = Callable[[tuple[Unreached, ...]], None]
"""Called with the hosts that are not reached, if there are any, on a thread of its own."""


class Probing:
    """Finds out, on a thread of its own, which hosts this worker does not reach.

    Args:
        targets: the agents of those hosts.
        token: of the job.
        patience_s: seconds after which one is given up.
        tell: called once, unless all are reached or this is closed before.
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


def other_hosts(minted: Minted, rank: int) -> list[Target]:
    """The hosts of a generation that answer probes, but this worker's own."""
    mine = minted.roster[rank].agent
    seats = {seat.agent: seat for seat in minted.roster if seat.agent and seat.probes and seat.agent != mine}
    return [Target(agent=seat.agent, host=seat.host, address=seat.probes) for seat in seats.values()]
