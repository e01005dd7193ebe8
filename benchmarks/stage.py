"""A coordinator in a process of its own, and crowds of workers in a few others, as a benchmark tells them."""

import asyncio
import json
import os
import socket
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from benchmarks.crew import cleaned
from benchmarks.elastic_job import ROOT
from benchmarks.noticed import Noticed
from benchmarks.programs.crowd import Crowd
from unisono.launch.elastic.coordinator_process import BACKLOG, Listening, server_command
from unisono.launch.elastic.elastic_settings import LOOPBACK, ElasticSettings, make_certificate
from unisono.membership.token import new_token, token_file

LOOK_S = 0.01
PATIENCE_S = 600.0
FAREWELL_S = 10.0
LONGEST_LINE = 2**24
LAST_CHARACTERS = 2000


class StageFailed(Exception):
    """A process ended that was needed, or nothing came of what was awaited; holds the last lines."""


@dataclass(frozen=True, slots=True)
class Use:
    """What a process has used so far.

    Attributes:
        at: the time, in seconds of ``time.monotonic``.
        cpu_s: seconds of a processor.
        memory: bytes that are resident.
    """

    at: float
    cpu_s: float
    memory: int

    @classmethod
    def of(cls, pid: int) -> "Use":
        """What it has used by now."""
        process = psutil.Process(pid)
        spent = process.cpu_times()
        return cls(time.monotonic(), spent.user + spent.system, process.memory_info().rss)


@dataclass(slots=True)
class Stage:
    """A coordinator with its crowds, and what these have noticed so far.

    Attributes:
        folder: the run folder.
        url: the coordinator's.
        coordinator: its process.
        crowds: their processes.
        newest: the newest that each crowd has told.
        homes: the crowd of each worker that was asked for.
        heard: how many members have heard of each generation.
        heard_at: when the last of them did.
        delays: when the store was asked, and the seconds until its answer.
        torn: when workers were lost.
        troubles: reasons for which the coordinator parted with somebody.
        formed: the generations that are known to work.
    """

    folder: Path
    url: str
    coordinator: asyncio.subprocess.Process
    crowds: list[asyncio.subprocess.Process] = field(default_factory=list)
    newest: dict[int, Noticed] = field(default_factory=dict)
    homes: dict[str, int] = field(default_factory=dict)
    heard: Counter[int] = field(default_factory=Counter)
    heard_at: dict[int, float] = field(default_factory=dict)
    delays: list[tuple[float, float]] = field(default_factory=list)
    torn: dict[str, float] = field(default_factory=dict)
    troubles: list[str] = field(default_factory=list)
    formed: set[int] = field(default_factory=set)
    _journal_read: int = field(default=0, init=False)

    @property
    def use(self) -> Use:
        """What the coordinator has used so far."""
        try:
            return Use.of(self.coordinator.pid)
        except psutil.Error as error:
            raise StageFailed(f"the coordinator has ended: {self.last_words}") from error

    @property
    def received(self) -> int:
        """Bytes of messages that workers have received so far."""
        return sum(noticed.received for noticed in self.newest.values())

    @property
    def dialled(self) -> int:
        """Connections that workers have tried to open so far."""
        return sum(noticed.dialled for noticed in self.newest.values())

    @property
    def waiting(self) -> int:
        """Answers of the store that are still to come."""
        return sum(noticed.waiting for noticed in self.newest.values())

    def tell(self, words: str, *crowds: int) -> None:
        """Tell some crowds something, or all of them."""
        for number in crowds or range(len(self.crowds)):
            stdin = self.crowds[number].stdin
            assert stdin is not None
            stdin.write(f"{words}\n".encode())

    async def listen(self, number: int) -> None:
        """Take in what a crowd says, until it ends."""
        stdout = self.crowds[number].stdout
        assert stdout is not None
        while line := await stdout.readline():
            noticed = Noticed.model_validate_json(line)
            self.newest[number] = noticed
            self.homes |= dict.fromkeys(noticed.asked, number)
            for generation, (members, at) in noticed.heard.items():
                self.heard[generation] += members
                self.heard_at[generation] = max(at, self.heard_at.get(generation, 0.0))
            self.delays += noticed.delays
            self.torn |= noticed.torn
            self.troubles += noticed.sent_away

    async def until(self, is_so: Callable[[], bool], words: str) -> None:
        """Wait.

        Raises:
            StageFailed: in vain.
        """
        deadline = time.monotonic() + PATIENCE_S
        while not is_so():
            if process := next((one for one in (self.coordinator, *self.crowds) if one.returncode is not None), None):
                raise StageFailed(f"a process ended with {process.returncode} before this: {words}\n{self.last_words}")
            if self.troubles:
                raise StageFailed(f"the coordinator parted with somebody before this: {words}\n{self.troubles[0]}")
            if time.monotonic() > deadline:
                raise StageFailed(f"not within {PATIENCE_S:g} s: {words}\n{self.last_words}")
            await asyncio.sleep(LOOK_S)

    async def until_formed(self, generation: int, members: int) -> None:
        """Wait until all members have heard of a generation, and the coordinator of all of them."""
        await self.until(lambda: self.heard[generation] == members, f"{members} workers have generation {generation}")
        await self.until(lambda: self._knows_formed(generation), f"generation {generation} is formed")

    @property
    def last_words(self) -> str:
        """The end of what the coordinator and the crowds printed."""
        return _output(self.folder).read_text(errors="replace")[-LAST_CHARACTERS:]

    def _knows_formed(self, generation: int) -> bool:
        with (self.folder / "journal.jsonl").open("rb") as file:
            file.seek(self._journal_read)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._journal_read += len(line)
                if b'"formed"' in line:
                    self.formed.add(json.loads(line)["generation"])
        return generation in self.formed


@asynccontextmanager
async def staged(
    folder: Path, settings: ElasticSettings, crowds: Sequence[Mapping[str, int]], shards: int, *, probes: bool
) -> AsyncIterator[Stage]:
    """A coordinator over TLS on loopback, and its crowds; all end with the block.

    Args:
        folder: the run folder.
        settings: of the job.
        crowds: the agents of each, with the number of workers that each can run. Workers of the first one ask the
            store something behind each heartbeat.
        shards: the job's number of shards.
        probes: whether agents answer probes.

    Raises:
        StageFailed: the coordinator does not start.
    """
    new_token(folder)
    with socket.create_server((LOOPBACK, 0), backlog=BACKLOG) as listener:
        certificate = make_certificate(folder, [LOOPBACK])
        listening = Listening(listener.fileno(), certificate=certificate)
        url = listening.url(listener.getsockname()[1])
        command = [sys.executable, "-P", "-m", *server_command(settings, folder, listening, fresh=True)]
        stage = Stage(folder, url, await _started(folder, command, listener.fileno()))
        listeners: list[asyncio.Task[None]] = []
        try:
            await stage.until((folder / "coordinator.json").exists, "the coordinator listens")
            for number, agents in enumerate(crowds):
                crowd = Crowd(
                    url=url,
                    token_file=token_file(folder),
                    certificate=certificate.chain,
                    agents=dict(agents),
                    shards=shards,
                    asks=number == 0,
                    probes=probes,
                )
                program = [sys.executable, "-m", "benchmarks.programs.crowd", crowd.model_dump_json()]
                stage.crowds.append(await _started(folder, program))
                listeners.append(asyncio.create_task(stage.listen(number)))
            yield stage
        finally:
            for process in (*stage.crowds, stage.coordinator):
                await _ended(process)
            for task in listeners:
                task.cancel()
            await asyncio.gather(*listeners, return_exceptions=True)


def _output(folder: Path) -> Path:
    return folder / "output.txt"


async def _started(folder: Path, command: Sequence[str], *kept: int) -> asyncio.subprocess.Process:
    """A process that ends with this one, however that ends."""
    ours = [sys.executable, "-m", "benchmarks.programs.with_its_parent", str(os.getpid())]
    with _output(folder).open("ab") as output:
        return await asyncio.create_subprocess_exec(
            *ours,
            *command,
            cwd=ROOT,
            env=cleaned(os.environ),
            stdin=asyncio.subprocess.PIPE,
            stdout=output if kept else asyncio.subprocess.PIPE,
            stderr=output,
            pass_fds=kept,
            limit=LONGEST_LINE,
        )


async def _ended(process: asyncio.subprocess.Process) -> None:
    if process.stdin is not None:
        process.stdin.close()
    with suppress(ProcessLookupError):
        process.terminate()
    try:
        async with asyncio.timeout(FAREWELL_S):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()
