"""Starting workers on this host: forked from the fork server where that can be, else each as a program of its own."""

import asyncio
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from unisono.launch.command import RendezvousSocket, WorkerCommand
from unisono.launch.forkserver.request import FIRST_KEPT, WorkerRequest
from unisono.launch.forkserver.warm_start import ColdStart, WarmStart
from unisono.launch.terminal.output import WorkerOutput


class WorkerProcess(Protocol):
    """The process of a worker that has been started."""

    @property
    def pid(self) -> int:
        """Its process id, and that of its group."""
        ...

    async def wait(self) -> int:
        """Its exit code, once it has ended; negative for a signal."""
        ...


@dataclass(frozen=True, slots=True)
class Warm:
    """The source of workers that have torch loaded from the start.

    Attributes:
        common: the command, with what all workers have in common.
        log: the file for the output of a fork server of their own; None if they shall have none.
        shared: a running fork server that serves other launchers, too; or None.
    """

    common: WorkerCommand
    log: Path | None
    shared: WarmStart | None = None


class WorkerStart:
    """Starts the workers of one launcher.

    Args:
        source: the source of workers that have torch loaded.
        say: a function that shows a line to the person at the terminal.
    """

    def __init__(self, source: Warm, say: Callable[[str], None]) -> None:
        self._source, self._say = source, say
        self._warm: WarmStart | None = source.shared
        self._is_cold = source.shared is None and source.log is None
        self._closed = False

    async def open(self) -> None:
        """Begin to load what warm workers have loaded, while the caller goes on."""
        if self._source.log is None or self._warm is not None:
            return
        try:
            self._warm = await WarmStart.open(self._source.common.environment(os.environ), self._source.log)
        except ColdStart as why:
            self._go_cold(why)

    async def loaded(self) -> None:
        """Wait until workers begin at once, or it is clear that they will not."""
        if self._warm is not None:
            with suppress(ColdStart):  # said when a worker is started
                await self._warm.ready()

    async def start(self, command: WorkerCommand, output: WorkerOutput, inherited: int | None = None) -> WorkerProcess:
        """Start a worker, as the leader of a process group of its own.

        Args:
            command: the command of the worker.
            output: the pipes and the log that take its output.
            inherited: a descriptor that it inherits, the one that ``UNISONO_STORE_FD`` names.

        Raises:
            OSError: it cannot be started.
        """
        if self._warm is not None and not self._is_cold:
            try:
                return await self._fork(self._warm, command, output, inherited)
            except ColdStart as why:
                self._go_cold(why)
        if self._closed:
            raise OSError("the launcher ends")
        return await asyncio.create_subprocess_exec(
            *command.argv,
            env=command.environment(os.environ),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output.out.writing,
            stderr=output.err.writing,
            start_new_session=True,
            pass_fds=[] if inherited is None else [inherited],
        )

    def wake(self) -> None:
        """Workers are about to be ended: whoever says that they have must not stand still."""
        if self._warm is not None:
            self._warm.wake()

    async def close(self) -> None:
        """End the fork server, unless it is shared, and with it the workers that it has forked. No more are started."""
        self._closed = True
        if self._warm is not None and self._source.shared is None:
            await self._warm.close()

    @staticmethod
    async def _fork(
        warm: WarmStart, command: WorkerCommand, output: WorkerOutput, inherited: int | None
    ) -> WorkerProcess:
        further = () if inherited is None else (inherited,)
        own = {} if inherited is None else {"UNISONO_STORE_FD": str(FIRST_KEPT)}
        request = WorkerRequest(command.script, {**command.variables, **own}, os.getcwd())  # noqa: PTH109 (as text)
        return await warm.start(request, output.out.writing, output.err.writing, *further)

    def _go_cold(self, why: ColdStart) -> None:
        # The fork server stays: the workers that it has forked would end with it.
        if not self._is_cold and not self._closed:
            self._is_cold = True
            self._say(f"workers begin by loading torch from now on: {why}")


@contextmanager
def listening(processes: int) -> Iterator[RendezvousSocket | None]:
    """A socket on loopback, at a port that the system chooses, open before any of those who meet there looks for it.

    Args:
        processes: the number of those who meet; one alone meets nobody.
    """
    if processes == 1:
        yield None
        return
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(processes * 2 + 128)
        yield RendezvousSocket(listener.getsockname()[1], listener.fileno())
