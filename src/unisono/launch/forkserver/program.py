"""A program of ours that a shared fork server forks, which has loaded it; without one, started as any program."""

import asyncio
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from unisono.jsonl import open_lines
from unisono.launch.forkserver.client import SHARED_FORK_SERVER, NotForked, request_fork
from unisono.launch.forkserver.request import cold_command


class Process(Protocol):
    """A program that runs, as ``asyncio.subprocess.Process`` describes it."""

    @property
    def pid(self) -> int:
        """Its process id."""
        ...

    @property
    def returncode(self) -> int | None:
        """Its exit code, negative for a signal; None while it runs."""
        ...

    def kill(self) -> None:
        """End it.

        Raises:
            ProcessLookupError: it has ended already.
        """
        ...

    def terminate(self) -> None:
        """Ask it to end.

        Raises:
            ProcessLookupError: it has ended already.
        """
        ...

    async def wait(self) -> int:
        """Its exit code, once it has ended."""
        ...


@dataclass(frozen=True, slots=True)
class Program:
    """A program ``python -m MODULE ARGUMENTS``, in a session of its own, with an empty standard input.

    Attributes:
        command: the module, and its arguments.
        environment: its environment, which may say where a shared fork server is.
        log: the file for its output and errors.
        kept: further descriptors of this process that it inherits, under the same numbers.
    """

    command: tuple[str, ...]
    environment: Mapping[str, str]
    log: Path
    kept: tuple[int, ...] = ()

    async def start(self) -> Process:
        """Start it. If there is a shared fork server that does not help, the log says why.

        Raises:
            OSError: it cannot be started.
        """
        with os.fdopen(open_lines(self.log), "ab", 0) as log, Path(os.devnull).open("rb") as nothing:
            numbers = {0: nothing.fileno(), 1: log.fileno(), 2: log.fileno(), **{each: each for each in self.kept}}
            try:
                return await request_fork(self.command, self.environment, numbers)
            except NotForked as why:
                if SHARED_FORK_SERVER in self.environment:
                    log.write(f"{self.command[0]} loads all that it needs itself: {why}\n".encode())
            return await asyncio.create_subprocess_exec(
                *cold_command(self.command),
                env=self.environment,
                stdin=nothing,
                stdout=log,
                stderr=log,
                start_new_session=True,
                pass_fds=self.kept,
            )
