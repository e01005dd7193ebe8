"""Starting workers of an elastic job on this host: warm where that can be, else each as a program of its own."""

import asyncio
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from unisono.launch.command import ElasticSeat, elastic_command
from unisono.launch.elastic import ElasticSettings
from unisono.launch.output import WorkerOutput
from unisono.launch.request import Request
from unisono.launch.warm_start import ColdStart, WarmStart

AGENT = "UNISONO_AGENT_PID"
"""The variable that tells a worker which process its agent is."""


class Process(Protocol):
    """A worker that has been started."""

    @property
    def pid(self) -> int:
        """Its process id, and that of its group."""
        ...

    async def wait(self) -> int:
        """Its exit code, once it has ended; negative for a signal."""
        ...


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What all workers of a host have in common.

    Attributes:
        settings: of the job.
        run_dir: the run folder.
        coordinator: the coordinator's URL.
        token_file: where the job's token is.
        certificate: to trust; None for what the system trusts, or without TLS.
    """

    settings: ElasticSettings
    run_dir: Path
    coordinator: str
    token_file: Path
    certificate: Path | None = None


class Starter:
    """Starts workers.

    Args:
        around: what they have in common.
        say: shows a line to the person at the terminal.
    """

    def __init__(self, around: Surroundings, say: Callable[[str], None]) -> None:
        self._around, self._say = around, say
        self._warm: WarmStart | None = None
        self._is_cold = not around.settings.warm_start
        self._closed = False

    async def open(self) -> None:
        """Begin to load what warm workers have loaded, while the caller goes on."""
        if self._is_cold:
            return
        base = elastic_command(self._around.settings.launch, self._around.run_dir, None).environment(os.environ)
        try:
            self._warm = await WarmStart.open(base, self._around.run_dir / "logs" / "template.log")
        except ColdStart as why:
            self._go_cold(why)

    async def start(self, worker: str, place: int, output: WorkerOutput) -> Process:
        """Start a worker, as the leader of a process group of its own.

        Args:
            worker: its id.
            place: a number that no other running worker of this host has.
            output: where its output goes.

        Raises:
            OSError: it cannot be started.
        """
        around = self._around
        launch = around.settings.launch
        seat = ElasticSeat(worker, place, around.coordinator, around.token_file, around.certificate)
        agent = {AGENT: str(os.getpid())}  # a warm worker's launcher is the template
        if self._warm is not None and not self._is_cold:
            own = {**seat.variables, **agent, **launch.extra_environment}
            request = Request(tuple(launch.script.argv), own, os.getcwd())  # noqa: PTH109 (as text)
            try:
                return await self._warm.start(request, output.out.writing, output.err.writing)
            except ColdStart as why:
                self._go_cold(why)
        if self._closed:
            raise OSError("the agent ends")
        command = elastic_command(launch, around.run_dir, seat)
        return await asyncio.create_subprocess_exec(
            *command.argv,
            env=command.environment(os.environ) | agent,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output.out.writing,
            stderr=output.err.writing,
            start_new_session=True,
        )

    async def close(self) -> None:
        """End the template, and with it the workers that it has forked. No worker is started any more."""
        self._closed = True
        if self._warm is not None:
            await self._warm.close()

    def _go_cold(self, why: ColdStart) -> None:
        # The template stays: the workers that it has forked would end with it.
        if not self._is_cold and not self._closed:
            self._is_cold = True
            self._say(f"workers begin by loading torch from now on: {why}")
