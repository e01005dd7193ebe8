"""The loader processes of one worker, and the slots in which they leave batches."""

import atexit
import gc
import multiprocessing
import os
import select
import signal
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from time import monotonic
from typing import Any, NamedTuple, Protocol

import torch

from unisono.data.slot import Packed, Slot
from unisono.errors import DataError, JobError
from unisono.host.parent_death import end_with_parent
from unisono.host.stacks import ask_for_stacks, write_when_asked

LONGEST_MS = 2**31 - 1
LAST_WORDS_S = 1.0
"""How long a loader process may take to end once its worker has hung up."""


class LoaderRequest(Protocol):
    """What a loader process is asked for."""

    @property
    def name(self) -> str:
        """Its name in messages."""


class Failed(NamedTuple):
    """An exception in a loader process, as text: not every exception can be sent."""

    type: str
    message: str
    trace: str


class LoaderProcess:
    """A forked process, and the connection to it. It answers in the order in which it is asked.

    Args:
        number: the process' number, from 0.
        fetch: a function that makes what was asked for. The process gets a copy of it as it is now.
        slots: the shared memory that batches are written to.
        others: connections to the loader processes before this one; they are none of its business.
        begin: a function that the process calls first, with its number.
    """

    def __init__(
        self,
        number: int,
        fetch: Callable[[Any], Any],
        slots: Sequence[Slot],
        others: Sequence[Connection],
        begin: Callable[[int], None] | None = None,
    ) -> None:
        context = multiprocessing.get_context("fork")  # other ways run the script again from its first line
        self.connection, theirs = context.Pipe()
        self._name = f"loader process {number}"
        self._asked: deque[LoaderRequest] = deque()
        self._process = context.Process(
            target=_serve,
            args=(theirs, [*others, self.connection], Serving(fetch, slots, begin, number), os.getpid()),
            name=f"unisono-loader-{number}",
            daemon=True,
        )
        self._process.start()
        theirs.close()
        self._incoming = select.poll()
        self._incoming.register(self.connection, select.POLLIN)

    def ask(self, request: LoaderRequest, slot: int) -> None:
        """Have something loaded into a slot. Does not wait."""
        self._asked.append(request)
        with suppress(OSError):  # it is gone, as the missing answer will tell
            self.connection.send((request, slot))

    def is_ready(self) -> bool:
        """Whether the next answer is here."""
        return bool(self._incoming.poll(0))

    def answer(self, timeout_s: float) -> Packed:
        """The next answer.

        Args:
            timeout_s: seconds after which the process is taken to hang.

        Raises:
            DataError: the process failed, died or hangs; says how, and what it was loading.
        """
        try:
            if not self._incoming.poll(min(1000 * timeout_s, LONGEST_MS)):
                raise DataError(self._hangs(timeout_s))
            answer: Packed | Failed = self.connection.recv()
        except (EOFError, ConnectionError):
            raise DataError(self._died()) from None
        asked = self._asked.popleft()
        if isinstance(answer, Packed):
            return answer
        if answer.type == DataError.__name__:
            raise DataError(answer.message)
        what = f"{self._name} could not load {asked.name}: {answer.type}: {answer.message}"
        raise DataError(f"{what}\n\nIts traceback:\n{answer.trace}")

    def hang_up(self) -> None:
        """Tell the process that nothing more will be asked; it ends once it has noticed."""
        self.connection.close()

    def end(self, patience_s: float) -> None:
        """Wait for its end, and bring that about if it takes long."""
        self._process.join(patience_s)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._process.close()

    def _died(self) -> str:
        self._process.join(LAST_WORDS_S)
        code = self._process.exitcode
        how = f"ended with exit code {code}"
        if code is not None and code < 0:
            how = f"was ended by {signal.Signals(-code).name}"
        advice = " Most often that is the system, out of memory: use fewer loader_workers, or smaller batches."
        told = f"{self._name} (pid {self._process.pid}) {how} while it loaded {self._asked[0].name}."
        return told + (advice if code == -signal.SIGKILL else "")

    def _hangs(self, timeout_s: float) -> str:
        pid = self._process.pid
        assert pid is not None
        for pause_s in ask_for_stacks(pid):
            self._process.join(pause_s)
        return (
            f"{self._name} (pid {pid}) gave nothing for {timeout_s:g} s while it loaded {self._asked[0].name}: "
            f"standard error has the stack of where it hangs. If it may take that long, allow more with "
            f"unisono.init(faults={{'timeout_s': …}})"
        )


# --- inside of the process


class Serving(NamedTuple):
    """What a loader process has to work with."""

    fetch: Callable[[Any], Any]
    slots: Sequence[Slot]
    begin: Callable[[int], None] | None
    number: int


def _serve(connection: Connection, others: Sequence[Connection], serving: Serving, worker: int) -> None:
    for other in others:
        other.close()
    _settle_in(worker)
    failed = _begun(serving)
    with suppress(EOFError, OSError):  # the worker has hung up, or is gone
        while True:
            request, slot = connection.recv()
            if failed is None:
                _reply(connection, serving.fetch, request, serving.slots[slot])
            else:
                connection.send(failed)


def _begun(serving: Serving) -> Failed | None:
    if serving.begin is not None:
        try:
            serving.begin(serving.number)
        except Exception as error:  # noqa: BLE001 (told to the worker, which raises it)
            return _failure(error)
    return None


def _settle_in(worker: int) -> None:
    # Ctrl-C and the scheduler's SIGTERM go to all processes of a group; the worker decides what is still loaded.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _ignored)  # unlike SIG_IGN not passed on to programs that the data set starts
    write_when_asked()
    end_with_parent(worker)  # not to outlive it with copies of its connections
    with suppress(AttributeError, OSError):  # Linux: waking it up does not push the worker off its core
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    gc.freeze()  # what the worker left for its collector is not collected here
    torch.set_num_threads(1)


def _ignored(number: int, frame: Any) -> None:
    """A handler that does nothing."""


def _reply(connection: Connection, fetch: Callable[[Any], Any], request: LoaderRequest, slot: Slot) -> None:
    try:
        connection.send(slot.write(fetch(request)))
    except ConnectionError:
        raise
    except Exception as error:  # noqa: BLE001 (told to the worker, which raises it)
        connection.send(_failure(error))


def _failure(error: Exception) -> Failed:
    return Failed(type(error).__name__, str(error), "".join(traceback.format_exception(error)))


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
