"""The loader processes of one worker, and the slots in which they leave batches."""

import atexit
import multiprocessing
import os
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from time import monotonic
from typing import Any

from unisono.data.process import LAST_WORDS_S, LoaderProcess, LoaderRequest
from unisono.data.slot import Packed, Slot
from unisono.errors import DataError, JobError

DEPTH = 2
"""Steps that each loader process is asked for: one that it loads, and one that comes next, so that it never waits."""

IN_USE = 2
"""Steps whose batches are in use: one is computed, and the script's loop variable holds the one before it."""


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


NO_PROCESSES = Processes(0, 0.0)


class Slots:
    """Slots of shared memory in which batches travel, and are used where they lie.

    A slot is filled again when nobody has a tensor of its batch any more.

    Args:
        count: the number of slots.
    """

    def __init__(self, count: int) -> None:
        self.all = [Slot() for _ in range(count)]
        self._free = deque(range(count))

    def take(self) -> int | None:
        """The number of a free slot, which is free no more; None if there is none."""
        return self._free.popleft() if self._free else None

    def give_back(self, number: int) -> None:
        """A slot is free again."""
        self._free.append(number)

    def received(self, packed: Packed, number: int) -> Any:
        """What a process has left in a slot. The last free slot is never lent, so that something can be asked for."""
        if self._free:
            return self.all[number].lend(packed, partial(self.give_back, number))
        found = self.all[number].copied(packed)  # the script keeps many batches
        self.give_back(number)
        return found

    def close(self) -> None:
        """Let go of their memory. Tensors that are in use keep theirs."""
        slots, self.all = self.all, []
        for slot in slots:
            slot.close()


class LoaderProcesses:
    """Forked processes, each of which answers in the order in which it is asked.

    Args:
        fetch: a function that makes what was asked for. Each process has a copy of it as it is now.
        processes: the processes to start.
        share_slots: whether all of them share their slots: only if they are asked, and answer, in turn.

    Raises:
        JobError: this system cannot fork.
    """

    def __init__(self, fetch: Callable[[Any], Any], processes: Processes, *, share_slots: bool) -> None:
        if "fork" not in multiprocessing.get_all_start_methods():
            raise JobError(f"loader_workers={processes.count}: this system cannot fork processes; use loader_workers=0")
        self._timeout_s = processes.timeout_s
        self._owner = os.getpid()
        pools = 1 if share_slots else processes.count
        each = processes.ahead * (processes.count if share_slots else 1) + IN_USE
        self._pools = [Slots(each) for _ in range(pools)]
        self._asked: list[deque[int]] = [deque() for _ in range(processes.count)]
        self._processes: list[LoaderProcess] = []
        atexit.register(self.close)  # before multiprocessing's own, which would wait for them
        try:
            for number in range(processes.count):
                others = [process.connection for process in self._processes]
                slots = self._slots(number).all
                self._processes.append(LoaderProcess(number, fetch, slots, others, processes.begin))
        except BaseException:
            self.close()
            raise

    def ask(self, number: int, request: Callable[[], LoaderRequest | None]) -> bool:
        """Ask a process for something, if there is a free slot for it.

        Args:
            number: the number of the process.
            request: a function that returns the request, or None to ask for nothing; called if there is a slot.

        Returns:
            whether it was asked.
        """
        if (slot := self._slots(number).take()) is None:
            return False
        if (found := request()) is None:
            self._slots(number).give_back(slot)
            return False
        self._processes[number].ask(found, slot)
        self._asked[number].append(slot)
        return True

    def under_way(self, number: int) -> int:
        """How often a process was asked, and has not answered."""
        return len(self._asked[number])

    def answer(self, number: int) -> Any:
        """The oldest answer of a process that was asked.

        Raises:
            DataError: it failed, died or hangs.
        """
        slots, slot = self._slots(number), self._asked[number].popleft()
        try:
            packed = self._processes[number].answer(self._timeout_s)
        except DataError:
            slots.give_back(slot)
            raise
        return slots.received(packed, slot)

    def is_ready(self, number: int) -> bool:
        """Whether the next answer of a process is here."""
        return self._processes[number].is_ready()

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
        for slots in self._pools:
            slots.close()

    def _slots(self, number: int) -> Slots:
        return self._pools[number % len(self._pools)]
