"""Workers on this host: starts them, passes signals on, ends them together, and leaves nothing behind.

What is decided (who is to blame, which exit code, what a line is, which command) is decided elsewhere; here it happens.
"""

import asyncio
import os
import signal
import socket
import sys
import time
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from typing import Self

from unisono.checkpoint.folder import RunFolder
from unisono.errors import LaunchError
from unisono.host.guard import kill_group
from unisono.host.memory import LOOK_S, offer, peak_mib
from unisono.launch.command import RendezvousSocket, elastic_command, worker_command
from unisono.launch.ending.outcome import Blame, Outcome, WorkerExit
from unisono.launch.ending.result import JobEnd, conclude, digest_in, with_faults, write_end
from unisono.launch.forkserver.warm_start import ColdStart, WarmStart
from unisono.launch.notices.cloud import Notice
from unisono.launch.notices.listener import listening_to_cloud
from unisono.launch.settings import LaunchSettings
from unisono.launch.terminal.output import WorkerOutput
from unisono.launch.terminal.terminal import Terminal
from unisono.launch.worker_group import WorkerGroup, insist, send
from unisono.launch.worker_start import Warm, WorkerProcess, WorkerStart, listening
from unisono.settings.reading import settings_by_path

SETTLE_S = 0.3
"""After an exit that is only a consequence: how long its cause may take to end by itself, with its own words."""


def launch(settings: LaunchSettings, folder: RunFolder, terminal: Terminal) -> Outcome:
    """Run all workers of a job to their end, and write how it ended into the run folder. Main thread only.

    Args:
        settings: the settings of the launch, already checked.
        folder: the run folder, opened with ``open_folder``; closed at the end.
        terminal: the terminal that shows the workers' output.

    Raises:
        LaunchError: a worker could not be started; those that were are ended.
    """
    with Launcher() as launcher:
        return launcher.launch(settings, folder, terminal)


class Launcher:
    """Launches jobs one after the other. A context. Main thread only.

    Args:
        share: a fork server for all of them, so that torch is loaded once. The settings may then differ in what each
            worker is told, but in neither threads, numerics nor tuning.
    """

    def __init__(self, *, share: bool = False) -> None:
        self._share = share
        self._runner = asyncio.Runner()
        self._shared: WarmStart | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        with self._runner:
            if self._shared is not None:
                self._runner.run(self._shared.close())

    def launch(self, settings: LaunchSettings, folder: RunFolder, terminal: Terminal) -> Outcome:
        """As the function of this name."""
        started, settings = time.monotonic(), settings.told({"UNISONO_TERM": str(folder.term or "")})
        try:
            return conclude(folder, self._runner.run(self._run(settings, folder, terminal)), terminal)
        except LaunchError as error:
            write_end(
                folder, JobEnd(1, {"message": str(error)}, settings.workers, time.monotonic() - started), terminal
            )
            raise
        finally:
            folder.close()

    async def _run(self, settings: LaunchSettings, folder: RunFolder, terminal: Terminal) -> Outcome:
        is_warm = settings.options.launch.warm_start and sys.platform == "linux"
        if self._share and is_warm and self._shared is None:
            self._shared = await _template_for_all(settings, folder)
        gains = is_warm and settings.processes > 1  # one worker alone would only begin later
        log = folder.log_of("template") if gains else None
        warm = Warm(elastic_command(settings, folder.path, None), log, self._shared if is_warm else None)
        return await _FixedWorkers(settings, folder, terminal, warm).run()


async def _template_for_all(settings: LaunchSettings, folder: RunFolder) -> WarmStart | None:
    """A fork server that knows of a launch only what others after it have in common with it."""
    arithmetic = settings.options.arithmetic.values
    same = {f"arithmetic.{name}": arithmetic[name] for name in ("threads", "numerics") if name in arithmetic}
    common = LaunchSettings(settings.script, options=settings_by_path(same), tuning=settings.tuning)
    environment = elastic_command(common, folder.path, None).environment(os.environ)
    with suppress(ColdStart):  # then each tries for itself, and says why not
        return await WarmStart.open(environment, folder.log_of("template"))
    return None


@dataclass(eq=False, slots=True)
class _Worker:
    """A running worker. It leads a process group of its own, with its process id for number."""

    rank: int
    process: WorkerProcess
    output: WorkerOutput
    told_at: float | None = None
    peak_mib: float | None = None
    over_mib: float | None = None


class _FixedWorkers:
    """All workers of one launch."""

    def __init__(self, settings: LaunchSettings, folder: RunFolder, terminal: Terminal, warm: Warm) -> None:
        self._folder = folder
        self._running: dict[int, _Worker] = {}
        self._exits: list[WorkerExit] = []
        self._interrupted: int | None = None
        self._told = asyncio.Event()
        self._ending = False
        pinning = settings.pinning
        self._settings = settings.told(pinning.variables)
        self._group = WorkerGroup(folder, terminal, pinning)
        self._begins = WorkerStart(warm, self._group.say)

    async def run(self) -> Outcome:
        """From the first start to the last end."""
        started = time.monotonic()
        with self._group.opened(self._signalled):
            async with AsyncExitStack() as opened:
                opened.push_async_callback(self._group.all_said)
                opened.push_async_callback(self._begins.close)
                source = self._settings.notice_source
                await opened.enter_async_context(listening_to_cloud(source, self._group.say, self._noticed))
                if self._settings.memory_limit_mib is not None:
                    opened.callback(asyncio.create_task(self._mind_memory(self._settings.memory_limit_mib)).cancel)
                try:
                    await self._start_all()
                except BaseException:
                    self._kill()
                    raise
                finally:
                    await asyncio.gather(*(self._see_off(worker) for worker in list(self._running.values())))
        exits = with_faults(sorted(self._exits, key=lambda each: each.rank), self._folder)
        took, digest = time.monotonic() - started, digest_in(self._folder)
        return Outcome(exits, self._settings.workers, socket.gethostname(), took, self._interrupted, digest=digest)

    async def _start_all(self) -> None:
        await self._begins.open()
        await self._loaded_or_interrupted()
        with listening(self._settings.processes) as rendezvous:
            for rank in range(self._settings.processes):
                if self._interrupted is None:
                    try:
                        self._running[rank] = await self._start(rank, rendezvous)
                    except OSError as error:
                        raise LaunchError(f"the worker of rank {rank} could not be started: {error}") from error
                    if self._interrupted is not None:  # while it was being started
                        self._pass_on(self._interrupted)

    async def _loaded_or_interrupted(self) -> None:
        loaded = asyncio.create_task(self._begins.loaded())
        interrupted = asyncio.create_task(self._told.wait())
        await asyncio.wait({loaded, interrupted}, return_when=asyncio.FIRST_COMPLETED)
        for task in (loaded, interrupted):
            task.cancel()

    async def _start(self, rank: int, rendezvous: RendezvousSocket | None) -> _Worker:
        command = worker_command(self._settings, self._folder.path, rank, rendezvous)
        meets = int(rendezvous.fd) if rendezvous is not None and rank == 0 else None
        worker = rank // self._settings.devices
        process, output = await self._group.begin(
            rank, lambda output: self._begins.start(command, output, meets), worker
        )
        return _Worker(rank, process, output)

    async def _see_off(self, worker: _Worker) -> None:
        """Wait for a worker's end, note how it ended, show the last it wrote."""
        end, pid = await self._group.end(worker.rank, worker.process), worker.process.pid
        del self._running[worker.rank]
        memory = worker.peak_mib, worker.over_mib
        self._note(WorkerExit(worker.rank, end.code, end.at, end.failure, worker.told_at, *memory, pid=pid))
        await worker.output.drain()

    async def _mind_memory(self, limit_mib: float) -> None:
        """End workers that need more than they may, as long as there are any."""
        while True:
            for worker in self._running.values():
                if worker.peak_mib is None:
                    offer(worker.process.pid)
                worker.peak_mib = max(worker.peak_mib or 0.0, peak_mib(worker.process.pid))
                if worker.peak_mib > limit_mib and worker.told_at is None and worker.over_mib is None:
                    worker.over_mib = limit_mib
                    kill_group(worker.process.pid)
            await asyncio.sleep(LOOK_S)

    def _note(self, worker_exit: WorkerExit) -> None:
        self._exits.append(worker_exit)
        blame = worker_exit.blame(self._interrupted)
        if blame in (Blame.CAUSE, Blame.CONSEQUENCE) and not self._ending:
            self._end_the_others(SETTLE_S if blame is Blame.CONSEQUENCE else 0.0)

    def _end_the_others(self, delay: float) -> None:
        self._ending = True
        asyncio.get_running_loop().call_later(delay, self._tell_to_end)
        insist(self._tell_to_end, self._kill, delay)

    def _tell_to_end(self) -> None:
        for worker in self._running.values():
            worker.told_at = worker.told_at or time.time()
        self._send(signal.SIGTERM)

    def _kill(self) -> None:
        self._begins.wake()
        for worker in self._running.values():
            worker.told_at = worker.told_at or time.time()
            kill_group(worker.process.pid)

    def _send(self, number: int) -> None:
        self._begins.wake()
        for worker in self._running.values():
            send(worker.process, number)
            send(worker.process, signal.SIGCONT)  # one that is stopped wakes

    def _noticed(self, notice: Notice) -> None:
        self._folder.journal("notice", words=notice.words, host=socket.gethostname())
        self._group.say(notice.words)
        if notice.takes_away and self._interrupted is None:
            self._signalled(signal.SIGTERM)

    def _signalled(self, number: int) -> None:
        name = signal.Signals(number).name
        if self._interrupted is not None:
            self._group.say(f"{name} again: killing the workers")
            self._kill()
            return
        self._interrupted = number
        self._told.set()
        grace = self._settings.options.launch.grace_s
        self._group.say(f"{name}: passed on to the workers, which have {grace:g} s to leave (once more kills them)")
        self._pass_on(number)
        asyncio.get_running_loop().call_later(grace, self._kill)

    def _pass_on(self, number: int) -> None:
        self._send(number if number == signal.SIGINT else signal.SIGTERM)
