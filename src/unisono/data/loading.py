"""Loads one worker's shards: in this process, or ahead of the steps that need them in processes of its own."""

import atexit
import gc
import multiprocessing
import os
import select
import signal
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from multiprocessing.connection import Connection
from time import monotonic
from typing import Any, NamedTuple, Protocol

import torch

from unisono.data.shards import LocatedShards, ShardSource, ShardsRequest
from unisono.data.slots import Packed, Slot, Slots
from unisono.errors import DataError, JobError
from unisono.host.process import end_with_parent, request_stacks, write_stacks_on_signal

LONGEST_MS = 2**31 - 1
LAST_WORDS_S = 1.0
"""Seconds that a loader process may take to end once its worker has hung up."""

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


class Loaded(Protocol):
    """Batches, in the order of the steps. Each is a list with the batches of this worker's shards."""

    def __next__(self) -> list[Any]:
        """The next step's shards; waits for them if need be."""

    def is_ready(self) -> bool:
        """Whether the next step's shards are here already."""

    def close(self) -> None:
        """End what loads."""


def load(source: ShardSource, requests: Iterator[ShardsRequest], processes: Processes) -> Loaded:
    """Load steps, for which there is one request each; these are consumed as far ahead as is loaded.

    Raises:
        JobError: this system cannot fork.
    """
    return Ahead(source, requests, processes) if processes.count else InProcess(source, requests)


class InProcess:
    """Loads in this process. Draws from the global random generators: seed them before anything else draws."""

    def __init__(self, source: ShardSource, requests: Iterator[ShardsRequest]) -> None:
        self._source, self._requests = source, requests

    def __next__(self) -> list[Any]:
        return self._source.load(next(self._requests))

    def is_ready(self) -> bool:
        """Return False: nothing is loaded ahead."""
        return False

    def close(self) -> None:
        """Do nothing: there are no processes to end."""


class Ahead:
    """Loads in processes of its own, which live as long as the loop: over all its epochs."""

    def __init__(self, source: ShardSource, requests: Iterator[ShardsRequest], processes: Processes) -> None:
        self._source, self._requests = source, requests
        self._most = processes.ahead * processes.count
        self._pending = deque[LoaderProcess]()
        self._processes = LoaderProcesses(source.fetch, processes, share_slots=True)
        self._turns = cycle(self._processes.all)
        self._next = next(self._turns)
        self._ask()

    def __next__(self) -> list[Any]:
        """Return the oldest requested step.

        Raises:
            DataError: its loader process failed, died or hangs.
        """
        if not self._pending:
            raise StopIteration
        shards: list[Any] = self._pending.popleft().answer()
        self._ask()
        return shards

    def is_ready(self) -> bool:
        """Whether the next answer is here."""
        return bool(self._pending) and self._pending[0].is_ready()

    def close(self) -> None:
        """End the processes; those that are loading get a moment."""
        self._pending.clear()
        self._processes.close()

    def _ask(self) -> None:
        while len(self._pending) < self._most and self._next.ask(self._request):
            self._pending.append(self._next)
            self._next = next(self._turns)

    def _request(self) -> LocatedShards | None:
        request = next(self._requests, None)
        return None if request is None else self._source.located(request)


class LoaderProcesses:
    """Forked processes.

    Args:
        fetch: a function that makes the requested values. Each process has a copy of it as it is now.
        share_slots: whether all of them share their slots: only if they are asked, and answer, in turn.

    Raises:
        JobError: this system cannot fork.
    """

    def __init__(self, fetch: Callable[[Any], Any], processes: Processes, *, share_slots: bool) -> None:
        if "fork" not in multiprocessing.get_all_start_methods():
            raise JobError(f"loader_workers={processes.count}: this system cannot fork processes; use loader_workers=0")
        self._owner = os.getpid()
        pools = 1 if share_slots else processes.count
        size = processes.ahead * (processes.count if share_slots else 1) + IN_USE
        self._pools = [Slots(size) for _ in range(pools)]
        self.all: list[LoaderProcess] = []
        atexit.register(self.close)  # before multiprocessing's own, which would wait for them
        try:
            for number in range(processes.count):
                others = [process.connection for process in self.all]
                self.all.append(LoaderProcess(number, fetch, self._pools[number % pools], others, processes))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the processes; those that are loading get a moment."""
        atexit.unregister(self.close)
        if os.getpid() != self._owner:  # a process that the script forked
            return
        processes, self.all = self.all, []
        for process in processes:
            process.connection.close()  # each ends once it has noticed
        until = monotonic() + LAST_WORDS_S
        for process in processes:
            process.end(max(0.0, until - monotonic()))
        for slots in self._pools:
            slots.close()


class LoaderRequest(Protocol):
    """A request to a loader process."""

    @property
    def name(self) -> str:
        """Its name in messages."""


class Failed(NamedTuple):
    """An exception in a loader process, as text: not every exception can be sent."""

    type: str
    message: str
    trace: str

    @classmethod
    def of(cls, error: Exception) -> "Failed":
        """As an exception says."""
        return cls(type(error).__name__, str(error), "".join(traceback.format_exception(error)))


class LoaderProcess:
    """A forked process, and the connection to it. It answers in the order in which it is asked.

    Args:
        fetch: a function that makes the requested values. The process gets a copy of it as it is now.
        others: connections to the loader processes before this one; they are none of its business.
    """

    def __init__(
        self,
        number: int,
        fetch: Callable[[Any], Any],
        slots: Slots,
        others: Sequence[Connection],
        processes: Processes,
    ) -> None:
        context = multiprocessing.get_context("fork")  # other ways run the script again from its first line
        self.connection, theirs = context.Pipe()
        self._name, self._slots, self._timeout_s = f"loader process {number}", slots, processes.timeout_s
        self._pending: deque[tuple[LoaderRequest, int]] = deque()  # and the slot that is to be filled
        begin = None if processes.begin is None else partial(processes.begin, number)
        self._process = context.Process(
            target=_serve,
            args=(theirs, [*others, self.connection], os.getpid(), begin, fetch, slots.all),
            name=f"unisono-loader-{number}",
            daemon=True,
        )
        self._process.start()
        theirs.close()
        self._incoming = select.poll()
        self._incoming.register(self.connection, select.POLLIN)

    @property
    def under_way(self) -> int:
        """The number of requests without an answer."""
        return len(self._pending)

    def ask(self, make: Callable[[], LoaderRequest | None]) -> bool:
        """Ask for something, if there is a free slot for it. Does not wait.

        ``make`` returns the request, or None to ask for nothing; it is called if there is a slot. Return whether it was
        asked.
        """
        if (slot := self._slots.take()) is None:
            return False
        if (request := make()) is None:
            self._slots.give_back(slot)
            return False
        self._pending.append((request, slot))
        with suppress(OSError):  # it is gone, as the missing answer will tell
            self.connection.send((request, slot))
        return True

    def is_ready(self) -> bool:
        """Whether the next answer is here."""
        return bool(self._incoming.poll(0))

    def answer(self) -> Any:
        """The oldest answer.

        Raises:
            DataError: the process failed, died or hangs; says how, and what it was loading.
        """
        request, slot = self._pending.popleft()
        try:
            packed = self._received(request)
        except DataError:
            self._slots.give_back(slot)
            raise
        return self._slots.received(packed, slot)

    def end(self, patience_s: float) -> None:
        """Wait for its end, and bring that about if it takes long."""
        self._process.join(patience_s)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._process.close()

    def _received(self, request: LoaderRequest) -> Packed:
        try:
            if not self._incoming.poll(min(1000 * self._timeout_s, LONGEST_MS)):
                raise DataError(self._hangs(request.name))
            answer: Packed | Failed = self.connection.recv()
        except (EOFError, ConnectionError):
            raise DataError(self._died(request.name)) from None
        if isinstance(answer, Packed):
            return answer
        if answer.type == DataError.__name__:
            raise DataError(answer.message)
        trouble = f"{self._name} could not load {request.name}: {answer.type}: {answer.message}"
        raise DataError(f"{trouble}\n\nIts traceback:\n{answer.trace}")

    def _died(self, task: str) -> str:
        self._process.join(LAST_WORDS_S)
        code = self._process.exitcode
        how = f"ended with exit code {code}"
        if code is not None and code < 0:
            how = f"was ended by {signal.Signals(-code).name}"
        advice = " Most often that is the system, out of memory: use fewer loader_workers, or smaller batches."
        trouble = f"{self._name} (pid {self._process.pid}) {how} while it loaded {task}."
        return trouble + (advice if code == -signal.SIGKILL else "")

    def _hangs(self, task: str) -> str:
        pid = self._process.pid
        assert pid is not None
        for pause_s in request_stacks(pid):
            self._process.join(pause_s)
        return (
            f"{self._name} (pid {pid}) gave nothing for {self._timeout_s:g} s while it loaded {task}: "
            f"standard error has the stack of where it hangs. If it may take that long, allow more with "
            f"unisono.init(faults={{'timeout_s': …}})"
        )


# --- inside of the process


def _serve(
    connection: Connection,
    others: Sequence[Connection],
    worker: int,
    begin: Callable[[], None] | None,
    fetch: Callable[[Any], Any],
    slots: Sequence[Slot],
) -> None:
    for other in others:
        other.close()
    _settle_in(worker)
    failed: Failed | None = None
    try:
        if begin is not None:
            begin()
    except Exception as error:  # noqa: BLE001 (told to the worker, which raises it)
        failed = Failed.of(error)
    with suppress(EOFError, OSError):  # the worker has hung up, or is gone
        while True:
            request, slot = connection.recv()
            if failed is None:
                _reply(connection, fetch, request, slots[slot])
            else:
                connection.send(failed)


def _settle_in(worker: int) -> None:
    # Ctrl-C and the scheduler's SIGTERM go to all processes of a group; the worker decides what is still loaded.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _ignored)  # unlike SIG_IGN not passed on to programs that the data set starts
    write_stacks_on_signal()
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
        connection.send(Failed.of(error))
