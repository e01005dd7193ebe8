"""A loader process: loads what it is asked for, beside the worker that computes."""

import gc
import multiprocessing
import os
import select
import signal
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, Protocol

import torch

from unisono.data.slot import Packed, Slot
from unisono.errors import DataError
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
