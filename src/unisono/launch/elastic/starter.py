"""Starting workers of an elastic job on this host: each with a seat of its own."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from unisono.launch.command import ElasticSeat, RendezvousSocket, WorkerCommand, elastic_command
from unisono.launch.elastic.elastic import ElasticSettings
from unisono.launch.terminal.output import WorkerOutput
from unisono.launch.worker_start import Warm, WorkerProcess, WorkerStart

__all__ = ["AGENT", "WorkerProcess", "Starter", "JobContext"]

AGENT = "UNISONO_AGENT_PID"
"""The variable that tells a worker which process its agent is."""


@dataclass(frozen=True, slots=True)
class JobContext:
    """The settings that all workers of a host have in common.

    Attributes:
        settings: the settings of the job.
        run_dir: the run folder.
        coordinator: the coordinator's URL.
        token_file: the file with the job's token.
        certificate: the certificate to trust; None for those that the system trusts, or without TLS.
    """

    settings: ElasticSettings
    run_dir: Path
    coordinator: str
    token_file: Path
    certificate: Path | None = None


class Starter:
    """Starts workers.

    Args:
        job: what they have in common.
        say: shows a line to the person at the terminal.
    """

    def __init__(self, job: JobContext, say: Callable[[str], None]) -> None:
        self._job = job
        launch = job.settings.launch
        log = job.run_dir / "logs" / "template.log" if launch.options.launch.warm_start and launch.workers else None
        common = elastic_command(launch, job.run_dir, None)
        self._start = WorkerStart(Warm(common, log), say)

    async def open(self) -> None:
        """Begin to load what warm workers have loaded, while the caller goes on."""
        await self._start.open()

    @property
    def devices(self) -> int:
        """The number of devices of each worker."""
        return self._job.settings.launch.devices

    async def start(
        self, worker: str, place: int, output: WorkerOutput, device: int = 0, meeting: RendezvousSocket | None = None
    ) -> WorkerProcess:
        """Start a worker, or one of its devices, as the leader of a process group of its own.

        Args:
            worker: the worker's id.
            place: a number that no other running worker of this host has.
            output: the pipes and the log that take its output.
            device: the place of the device among those of the worker.
            meeting: the socket at which they meet; None for a worker of one device.

        Raises:
            OSError: it cannot be started.
        """
        job = self._job
        settings = job.settings.launch
        seat = ElasticSeat(
            worker, place, job.coordinator, job.token_file, job.certificate, device, self.devices, meeting
        )
        command = elastic_command(settings, job.run_dir, seat)
        agent = {AGENT: str(os.getpid())}  # a warm worker's launcher is the fork server
        own = WorkerCommand(command.script, agent | dict(command.variables))
        return await self._start.start(own, output, int(meeting.fd) if meeting is not None and not device else None)

    def wake(self) -> None:
        """Workers are about to be ended: whoever says that they have must not stand still."""
        self._start.wake()

    async def close(self) -> None:
        """End the fork server, and with it the workers that it has forked. No worker is started any more."""
        await self._start.close()
