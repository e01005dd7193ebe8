"""The workers that one launcher has on this host: started, listened to, and seen off."""

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from unisono.checkpoint.folder import RunFolder
from unisono.errors import LaunchError
from unisono.host.guard import Guard, kill_group
from unisono.host.signals import NOTICES
from unisono.launch.ending.failure import Failure, end_of, noted_end
from unisono.launch.pinning.pins import Pinning, Pins
from unisono.launch.terminal.output import WorkerOutput
from unisono.launch.terminal.terminal import Terminal, WorkerName
from unisono.launch.worker_start import WorkerProcess

NOBODY = Pinning()

SECOND_TERM_S = 0.2
KILL_S = 0.7
"""A worker leaves at a step's end on the first SIGTERM, at once on the second. Those that do neither are killed."""


@dataclass(frozen=True, slots=True)
class Ended:
    """The end of a worker's process.

    Attributes:
        code: its exit code; negative for a signal.
        at: the time of its end, or that of its script if it is known, in seconds since 1970.
        failure: the exception that ended its script; None if it recorded none.
        is_scripts: whether the script chose the code itself, with ``sys.exit``.
    """

    code: int
    at: float
    failure: Failure | None
    is_scripts: bool = False


class WorkerGroup:
    """The workers of one launcher, of a fixed or of an elastic job. Runs inside of an event loop.

    Args:
        folder: the run folder.
        terminal: the terminal that shows the workers' output.
        pinning: the decision whether workers are pinned to cores.
    """

    def __init__(self, folder: RunFolder, terminal: Terminal, pinning: Pinning = NOBODY) -> None:
        self._folder, self._terminal = folder, terminal
        self._pins = Pins(pinning, self.say)
        self._said: set[asyncio.Task[None]] = set()
        self.guard: Guard

    @contextmanager
    def opened(self, signalled: Callable[[int], None]) -> Iterator[None]:
        """Until the context ends, a guard stands by, and signals to the launcher call a function with their number.

        Raises:
            LaunchError: the guard cannot be started.
        """
        with _hearing_signals(signalled), _guarding() as self.guard, self._pins.opened():
            yield

    async def begin(
        self, name: WorkerName, start: Callable[[WorkerOutput], Awaitable[WorkerProcess]], worker: WorkerName
    ) -> tuple[WorkerProcess, WorkerOutput]:
        """Start a worker, and show what it writes.

        Args:
            name: the worker's name.
            start: a function that starts its process, which leads a process group of the same number.
            worker: the worker of which it is a device, or the same name.

        Raises:
            OSError: it cannot be started.
        """
        output = WorkerOutput(name, self._folder.log_of(name), self._terminal, self.say)
        try:
            process = await start(output)
        except OSError:
            output.abandon()
            raise
        output.worker_started()
        self.guard.watch(process.pid)
        self._pins.began(str(worker), process.pid)
        return process, output

    async def end(self, name: WorkerName, process: WorkerProcess) -> Ended:
        """Wait for a worker's end, and end what it has started."""
        code, at = end_of(self._folder, name, await process.wait())
        kill_group(process.pid)
        self.guard.forget(process.pid)
        self._pins.ended(process.pid)
        noted = noted_end(self._folder, name)
        return Ended(code, at, self._failure_of(name), noted is not None and noted[0] == code)

    def say(self, words: str) -> None:
        """Show a line to the person at the terminal. Never waits."""
        task = asyncio.create_task(asyncio.to_thread(self._terminal.say, words))
        self._said.add(task)
        task.add_done_callback(self._said.discard)

    async def all_said(self) -> None:
        """Wait until every line is shown."""
        await asyncio.gather(*self._said)

    def _failure_of(self, name: WorkerName) -> Failure | None:
        try:
            return Failure.read(self._folder, name)
        except LaunchError as error:
            self.say(str(error))
            return None


def send(process: WorkerProcess, number: int) -> None:
    """Send a signal to a worker alone: what it has started is the worker's to end, as long as it lives."""
    with suppress(ProcessLookupError):
        os.kill(process.pid, number)


def insist(tell: Callable[[], None], kill: Callable[[], None], told_in_s: float = 0.0) -> None:
    """Tell workers to end once more, and kill those that have not, after they are told for the first time.

    Args:
        tell: sends all of them SIGTERM.
        kill: ends those that are left.
        told_in_s: seconds until they are told for the first time.
    """
    loop = asyncio.get_running_loop()
    loop.call_later(told_in_s + SECOND_TERM_S, tell)
    loop.call_later(told_in_s + KILL_S, kill)


@contextmanager
def _hearing_signals(heard: Callable[[int], None]) -> Iterator[None]:
    """Until the context ends, signals that ask for an end call a function with their number. In an event loop."""
    numbers = [signal.SIGINT, signal.SIGTERM]
    # What is ignored stays so: nohup ignores SIGHUP.
    numbers += [number for number in (signal.SIGHUP, *NOTICES) if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.getsignal(number) for number in numbers}
    loop = asyncio.get_running_loop()
    for number in numbers:
        loop.add_signal_handler(number, heard, number)
    try:
        yield
    finally:
        for number, handler in before.items():
            loop.remove_signal_handler(number)
            signal.signal(number, handler)


@contextmanager
def _guarding() -> Iterator[Guard]:
    """A guard until the context ends.

    Raises:
        LaunchError: it cannot be started.
    """
    try:
        guard = Guard()
    except OSError as error:
        raise LaunchError(f"no process can be started: {error}") from error
    try:
        yield guard
    finally:
        guard.close()
