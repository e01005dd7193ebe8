"""Reads one worker's shards, ahead of the steps that need them."""

import atexit
import multiprocessing
import os
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from time import monotonic
from typing import Any, Protocol

from unisono.data.process import LAST_WORDS_S, LoaderProcess
from unisono.data.shards import ShardSource, ShardsRequest
from unisono.data.slot import Slot
from unisono.errors import JobError

DEPTH = 2
"""Steps that each loader process is asked for: one that it loads, and one that comes next, so that it never waits."""


@dataclass(frozen=True, slots=True)
class Processes:
    """The processes that load ahead.

    Attributes:
        count: the number of them; 0 to load in this process when a batch is asked for.
        timeout_s: seconds after which a process is taken to hang.
        ahead: the number of steps that each is asked for.
        begin: a function that each calls first, with its number from 0.
    """

    count: int
    timeout_s: float
    ahead: int = DEPTH
    begin: Callable[[int], None] | None = None


class Loaded(Protocol):
    """Batches, in the order of the steps. Each is a list with the batches of this worker's shards."""

    def __next__(self) -> list[Any]:
        """The next step's shards; waits for them if need be."""

    def is_ready(self) -> bool:
        """Whether the next step's shards are here already."""

    def close(self) -> None:
        """End what loads."""


def load(source: ShardSource, requests: Iterator[ShardsRequest], processes: Processes) -> Loaded:
    """Load steps.

    Args:
        source: gives the samples of each shard.
        requests: one per step. Consumed as far ahead as is loaded.
        processes: the processes that load.

    Raises:
        JobError: this system cannot fork.
    """
    if not processes.count:
        return InProcess(source, requests)
    if "fork" not in multiprocessing.get_all_start_methods():
        raise JobError(f"loader_workers={processes.count}: this system cannot fork processes; use loader_workers=0")
    return Ahead(source, requests, processes)


class InProcess:
    """Loads in this process. Draws from the global random generators: seed them before anything else draws."""

    def __init__(self, source: ShardSource, requests: Iterator[ShardsRequest]) -> None:
        self._source = source
        self._requests = requests

    def __next__(self) -> list[Any]:
        """Load now."""
        return self._source.load(next(self._requests))

    def is_ready(self) -> bool:
        """Nothing is loaded ahead."""
        return False

    def close(self) -> None:
        """There is nothing to end."""


class Ahead:
    """Loads in processes of its own, which live as long as the loop: over all its epochs.

    Batches travel in slots of shared memory and are used where they lie. A slot is filled again when nobody has a
    tensor of its batch any more. Two more than are asked for do: one for the step that is computed, one for the step
    before it, which the script's loop variable holds until it gets the next.
    """

    def __init__(self, source: ShardSource, requests: Iterator[ShardsRequest], processes: Processes) -> None:
        self._source, self._requests = source, requests
        self._timeout_s = processes.timeout_s
        self._owner = os.getpid()
        self._most = processes.ahead * processes.count
        self._slots = [Slot() for _ in range(self._most + 2)]
        self._free = deque(range(len(self._slots)))
        self._asked: deque[tuple[LoaderProcess, int]] = deque()
        self._processes: list[LoaderProcess] = []
        atexit.register(self.close)  # before multiprocessing's own, which would wait for them
        try:
            for number in range(processes.count):
                others = [process.connection for process in self._processes]
                self._processes.append(LoaderProcess(number, source, self._slots, others, processes.begin))
        except BaseException:
            self.close()
            raise
        self._turns = cycle(self._processes)
        self._ask()

    def __next__(self) -> list[Any]:
        """The oldest step that was asked for.

        Raises:
            DataError: its loader process failed, died or hangs.
        """
        if not self._asked:
            raise StopIteration
        process, number = self._asked.popleft()
        packed, slot = process.answer(self._timeout_s), self._slots[number]
        give_back = partial(self._free.append, number)
        shards: list[Any]
        if self._free:
            shards = slot.lend(packed, give_back)
        else:  # the script keeps many batches
            shards = slot.copied(packed)
            give_back()
        self._ask()
        return shards

    def is_ready(self) -> bool:
        """Whether the next answer is here."""
        return bool(self._asked) and self._asked[0][0].is_ready()

    def close(self) -> None:
        """End the processes; those that are loading get a moment."""
        atexit.unregister(self.close)
        if os.getpid() != self._owner:  # a process that the script forked
            return
        processes, self._processes = self._processes, []
        for process in processes:
            process.hang_up()
        until = monotonic() + LAST_WORDS_S
        for process in processes:
            process.end(max(0.0, until - monotonic()))
        slots, self._slots = self._slots, []
        for slot in slots:
            slot.close()
        self._asked.clear()

    def _ask(self) -> None:
        while self._free and len(self._asked) < self._most:
            request = next(self._requests, None)
            if request is None:
                return
            process, slot = next(self._turns), self._free.popleft()
            process.ask(self._source.located(request), slot)
            self._asked.append((process, slot))
