"""A job on this host whose number of workers is fixed: all begin at once, and the first that fails ends it."""

import asyncio
import os
import signal
import socket
import sys
from contextlib import AsyncExitStack, suppress
from typing import Self

from unisono.checkpoint.folder import RunFolder
from unisono.errors import LaunchError
from unisono.launch.cloud_notices import listening_to_cloud
from unisono.launch.command import RendezvousSocket, WorkerCommand, elastic_command, worker_command
from unisono.launch.host_workers import Ended, HostJob, HostWorkers, concluded
from unisono.launch.outcome import Blame, Outcome, WorkerExit, digest_in, with_faults
from unisono.launch.settings import LaunchSettings
from unisono.launch.terminal import Terminal, WorkerName, number
from unisono.launch.worker_start import ColdStart, WarmStart, listening
from unisono.settings.reading import settings_by_path

SETTLE_S = 0.3
"""How long after an exit that is only a consequence its cause may take to end by itself, with its own error."""


def launch(settings: LaunchSettings, folder: RunFolder, terminal: Terminal) -> Outcome:
    """Run all workers of a job to their end, and write how it ended into the run folder. Main thread only.

    The settings are checked already. The folder was opened with ``open_folder``; it is closed at the end.

    Raises:
        LaunchError: a worker could not be started; those that were are ended.
    """
    with Launcher() as launcher:
        return launcher.launch(settings, folder, terminal)


class Launcher:
    """Launches jobs one after the other. A context. Main thread only.

    Args:
        share: whether all jobs share a fork server, so that torch is loaded once. Their settings may then differ in the
            variables of workers, but in neither threads, numerics nor tuning.
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
        """Run one job; see the function of this name."""
        try:
            return concluded(
                lambda: self._runner.run(self._run(settings, folder, terminal)), settings.workers, folder, terminal
            )
        finally:
            folder.close()

    async def _run(self, settings: LaunchSettings, folder: RunFolder, terminal: Terminal) -> Outcome:
        is_warm = settings.options.launch.warm_start and sys.platform == "linux"
        if self._share and is_warm and self._shared is None:
            self._shared = await _shared_fork_server(settings, folder)
        return await FixedJob(settings, folder, terminal, self._shared, is_warm=is_warm).run()


async def _shared_fork_server(settings: LaunchSettings, folder: RunFolder) -> WarmStart | None:
    """A fork server that has only those settings of a launch that all later launches share."""
    arithmetic = settings.options.arithmetic.values
    same = {f"arithmetic.{name}": arithmetic[name] for name in ("threads", "numerics") if name in arithmetic}
    common = LaunchSettings(settings.script, options=settings_by_path(same), tuning=settings.tuning)
    environment = elastic_command(common, folder.path, None).environment(os.environ)
    with suppress(ColdStart):  # then each job tries to start a fork server of its own, and says why it cannot
        return await WarmStart.open(environment, folder.log_of("template"))
    return None


class FixedJob(HostJob):
    """All workers of one launch, which know their ranks from the start: there is no coordinator.

    Each device of a worker is one of them, with a rank of its own.
    """

    LEAVING = "passed on to the workers, which have {} to leave"

    def __init__(
        self,
        settings: LaunchSettings,
        folder: RunFolder,
        terminal: Terminal,
        shared: WarmStart | None,
        *,
        is_warm: bool,
    ) -> None:
        super().__init__(settings, folder, terminal, {})
        is_worth_it = is_warm and settings.processes > 1  # one worker alone would only begin later
        self._start = self._new_start(has_fork_server=is_worth_it, shared=shared if is_warm else None)
        self._workers = HostWorkers(self._group, self._start, self._command, self._worker_ended, self._worker_gone)
        self._ending = False

    async def _serve(self, stack: AsyncExitStack) -> None:
        launch = self._launch
        stack.push_async_callback(self._workers.close)
        await self._start.open()
        async with listening_to_cloud(launch.notice_source, self._group.say, self._noticed):
            if launch.memory_limit_mib is not None:
                stack.callback(asyncio.create_task(self._workers.limit_memory(launch.memory_limit_mib)).cancel)
            with listening(launch.processes) as rendezvous:
                # A signal that came while the fork server was opened found no worker that it could be passed on to.
                for rank in range(launch.processes if self._interrupted is None else 0):
                    self._workers.begin(rank, place=rank // launch.devices, rendezvous=rendezvous)
                await self._workers.until_begun()
            await self._workers.until_gone()

    def _command(self, rank: WorkerName, place: int, device: int, rendezvous: RendezvousSocket | None) -> WorkerCommand:
        return worker_command(self._launch, self._folder.path, int(rank), rendezvous)

    def _worker_ended(self, worker_exit: WorkerExit, end: Ended) -> None:
        if not worker_exit.pid:
            if end.failure is not None:
                why = end.failure.message.removeprefix("it ")
                self._bug = self._bug or LaunchError(f"the worker of rank {worker_exit.rank} {why}")
                self._workers.kill()
            return
        blame = worker_exit.blame(self._interrupted)
        if blame in (Blame.CAUSE, Blame.CONSEQUENCE) and not self._ending:
            self._ending = True
            self._workers.end_quickly(SETTLE_S if blame is Blame.CONSEQUENCE else 0.0)

    def _worker_gone(self, bug: BaseException | None) -> None:
        if bug is not None:
            self._bug = self._bug or bug
            self._workers.kill()

    def _leave(self, number: int) -> None:
        self._workers.pass_on(number if number == signal.SIGINT else signal.SIGTERM)

    def _outcome(self, seconds: float) -> Outcome:
        started = (end for end in self._workers.exits if end.pid)
        exits = with_faults(sorted(started, key=lambda end: number(end.rank)), self._folder)
        host, digest = socket.gethostname(), digest_in(self._folder)
        return Outcome(exits, self._launch.workers, host, seconds, self._interrupted, digest=digest)
