"""The workers that an agent runs on its host, from the moment in which each is asked for to its end."""

import asyncio
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from unisono.errors import NOT_STARTED, PREEMPTED
from unisono.host.guard import kill_group
from unisono.host.stacks import ask_for_stacks
from unisono.launch.command import ElasticSeat, RendezvousSocket, WorkerCommand, elastic_command
from unisono.launch.ending.failure import Failure
from unisono.launch.ending.outcome import WorkerExit
from unisono.launch.settings import LaunchSettings
from unisono.launch.terminal.output import WorkerOutput
from unisono.launch.worker_group import Ended, WorkerGroup, insist, send
from unisono.launch.worker_start import Warm, WorkerProcess, WorkerStart, listening
from unisono.membership.agent_messages import WorkerEnded
from unisono.membership.environment import device_name

# Starting workers of an elastic job on this host: each with a seat of its own.

__all__ = ["AGENT", "WorkerProcess", "Starter"]

AGENT = "UNISONO_AGENT_PID"
"""The variable that tells a worker which process its agent is."""


class Starter:
    """Starts workers.

    Args:
        launch: the settings with which they start.
        run_dir: the run folder.
        common: a seat with all that theirs have in common: the way to the coordinator.
        say: shows a line to the person at the terminal.
    """

    def __init__(self, launch: LaunchSettings, run_dir: Path, common: ElasticSeat, say: Callable[[str], None]) -> None:
        self._launch, self._run_dir, self._common = launch, run_dir, common
        log = run_dir / "logs" / "template.log" if launch.options.launch.warm_start and launch.workers else None
        self._start = WorkerStart(Warm(elastic_command(launch, run_dir, None), log), say)

    async def open(self) -> None:
        """Begin to load what warm workers have loaded, while the caller goes on."""
        await self._start.open()

    @property
    def devices(self) -> int:
        """The number of devices of each worker."""
        return self._launch.devices

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
        seat = replace(
            self._common, worker=worker, place=place, device=device, devices=self.devices, rendezvous=meeting
        )
        command = elastic_command(self._launch, self._run_dir, seat)
        agent = {AGENT: str(os.getpid())}  # a warm worker's launcher is the fork server
        own = WorkerCommand(command.script, agent | dict(command.variables))
        return await self._start.start(own, output, int(meeting.fd) if meeting is not None and not device else None)

    def wake(self) -> None:
        """Workers are about to be ended: whoever says that they have must not stand still."""
        self._start.wake()

    async def close(self) -> None:
        """End the fork server, and with it the workers that it has forked. No worker is started any more."""
        await self._start.close()


LONGEST_ERROR = 4096


@dataclass(eq=False, slots=True)
class _Worker:
    """A worker: one process, or one for each of its devices. Each leads a process group with its id for number."""

    name: str
    place: int
    processes: list[WorkerProcess] = field(default_factory=list)  # those that run
    pid: int = 0  # of the first
    told_at: float | None = None
    how: str = ""
    unwanted: asyncio.Event = field(default_factory=asyncio.Event)


class HostWorkers:
    """The workers of a host: starts and ends them, and tells the coordinator of their ends.

    Args:
        group: the workers' processes and their output.
        gone: a function that is called when nothing is left to do for a worker; with an error, if that is a bug.

    Attributes:
        exits: the ends of workers so far.
        ended: the same, as the coordinator is told.
    """

    def __init__(self, group: WorkerGroup, gone: Callable[[BaseException | None], None]) -> None:
        self._group, self._gone = group, gone
        self.exits: list[WorkerExit] = []
        self.ended: list[WorkerEnded] = []
        self._workers: dict[str, _Worker] = {}
        self._known: set[str] = set()
        self._lives: set[asyncio.Task[None]] = set()
        self._starter: Starter
        self._tell: Callable[[WorkerEnded], None]

    async def open(self, starter: Starter, tell: Callable[[WorkerEnded], None]) -> None:
        """Before the first one is asked for.

        Args:
            starter: starts each.
            tell: tells the coordinator.
        """
        self._starter, self._tell = starter, tell
        await starter.open()

    async def close(self) -> None:
        """Kill those that are left, and wait for their ends. Only after :meth:`open`."""
        self.kill()
        await self._starter.close()
        while self._lives:
            await asyncio.wait(set(self._lives))

    @property
    def names(self) -> tuple[str, ...]:
        """Those whose ends were not told yet."""
        return tuple(self._workers)

    @property
    def are_gone(self) -> bool:
        """Whether there is nothing left to do for any of them."""
        return not self._lives

    def begin(self, names: Sequence[str], delay_s: float) -> None:
        """Start workers, in a while; but not those that were asked for before: an agent that was away is told again."""
        for name in names:
            if name not in self._known:
                self._begin(name, delay_s)

    def end(self, names: Sequence[str], how: str) -> None:
        """End workers, in one of the ways that :class:`~unisono.membership.agent_messages.End` knows."""
        for name in names:
            if (worker := self._workers.get(name)) is not None:
                self._end(worker, how)

    def end_unstarted(self) -> None:
        """Start no worker that has no process yet."""
        self.end([worker.name for worker in self._workers.values() if not worker.pid], "leave")

    def end_quickly(self) -> None:
        """The job has failed: on the second SIGTERM workers leave at once, and whoever does not is killed."""
        self._end_all()
        insist(self._end_all, self.kill)

    def kill(self) -> None:
        """Kill all of them now."""
        for worker in list(self._workers.values()):
            worker.told_at, worker.how = worker.told_at or time.time(), "kill"
            worker.unwanted.set()
            self._kill(worker)

    def _begin(self, name: str, delay_s: float) -> None:
        self._known.add(name)
        taken = {worker.place for worker in self._workers.values()}
        worker = _Worker(name, next(place for place in range(len(taken) + 1) if place not in taken))
        self._workers[name] = worker
        life = asyncio.create_task(self._live(worker, delay_s))
        self._lives.add(life)
        life.add_done_callback(self._life_ended)

    def _life_ended(self, life: asyncio.Task[None]) -> None:
        self._lives.discard(life)
        self._gone(None if life.cancelled() else life.exception())

    async def _live(self, worker: _Worker, delay_s: float) -> None:
        """A worker's life, from now, or a while later, to its end."""
        with suppress(TimeoutError):
            async with asyncio.timeout(delay_s):
                await worker.unwanted.wait()
        if worker.unwanted.is_set():
            self._note(worker, Ended(-signal.SIGTERM, time.time(), None))
            return
        devices = []
        with listening(self._starter.devices) as meeting:
            for device in range(self._starter.devices):
                try:
                    devices.append(await self._begin_device(worker, device, meeting))
                except OSError as error:
                    self._kill(worker)  # the devices before it
                    name = device_name(worker.name, device)
                    self._note(worker, Ended(NOT_STARTED, time.time(), _not_started(name, error)))
                    break
        ends = [asyncio.create_task(self._see_off(worker, *each)) for each in devices]
        end = cause_of([await each for each in asyncio.as_completed(ends)])
        if end is not None and self._is_ours(worker):
            self._note(worker, end)
        for _, _, output in devices:
            await output.drain()

    async def _begin_device(
        self, worker: _Worker, device: int, meeting: RendezvousSocket | None
    ) -> tuple[str, WorkerProcess, WorkerOutput]:
        name = device_name(worker.name, device)
        process, output = await self._group.begin(
            name, lambda output: self._starter.start(worker.name, worker.place, output, device, meeting), worker.name
        )
        worker.processes.append(process)
        worker.pid = worker.pid or process.pid
        if worker.unwanted.is_set():
            self._end(worker, worker.how)
        return name, process, output

    async def _see_off(self, worker: _Worker, name: str, process: WorkerProcess, _: WorkerOutput) -> Ended:
        """Wait for the end of a device. One that is lost takes the others of its worker with it, at once."""
        end = await self._group.end(name, process)
        worker.processes.remove(process)
        if end.code not in (0, PREEMPTED):
            self._kill(worker)
        return end

    def _note(self, worker: _Worker, end: Ended) -> None:
        del self._workers[worker.name]
        code, failure = end.code, end.failure
        self.exits.append(WorkerExit(worker.name, code, end.at, failure, worker.told_at, pid=worker.pid))
        # What only follows from the loss of another worker is no word about this one.
        has_chosen = end.is_scripts and failure is None and code not in (0, PREEMPTED)
        error = "its script called sys.exit" if has_chosen else ""
        if failure is not None and not failure.consequence:
            error = _printable(f"{failure.type}: {failure.message}")
        self.ended.append(WorkerEnded(worker=worker.name, code=code, error=error))
        self._tell(self.ended[-1])

    def _end_all(self) -> None:
        self.end(self.names, "leave")

    def _end(self, worker: _Worker, how: str) -> None:
        worker.told_at, worker.how = worker.told_at or time.time(), how
        worker.unwanted.set()
        if not worker.processes:
            return  # it is seen to when it has begun, or does not begin at all
        if how == "leave":
            self._send(worker, signal.SIGTERM)
        elif how == "drop":
            self._kill(worker)
        else:
            self._starter.wake()
            self._kill_later(worker, _asking(worker))

    def _kill_later(self, worker: _Worker, asking: Iterator[float]) -> None:
        """Kill a worker once its threads have been asked for their stacks, one after the other."""
        if not self._is_ours(worker):
            return
        if (pause_s := next(asking, None)) is None:
            self._kill(worker)
        else:
            asyncio.get_running_loop().call_later(pause_s, self._kill_later, worker, asking)

    def _kill(self, worker: _Worker) -> None:
        if worker.processes and self._is_ours(worker):
            self._starter.wake()
            for process in worker.processes:  # of another one that has ended the id may be another's by now
                kill_group(process.pid)

    def _is_ours(self, worker: _Worker) -> bool:
        """Whether it was not seen off yet: after that, its process id may be another's."""
        return self._workers.get(worker.name) is worker

    def _send(self, worker: _Worker, number: int) -> None:
        if worker.processes:
            self._starter.wake()
        for process in worker.processes:
            send(process, number)


def cause_of(ends: Sequence[Ended]) -> Ended | None:
    """Of the ends of a worker's devices the one that tells why it ended; None if there is none.

    An error of the script says most, and what only follows from the end of another one least; else the first one tells,
    after which the others were killed.

    Args:
        ends: the ends, in the order in which they came.
    """

    def rank(end: Ended) -> int:
        if end.failure is not None:
            return 2 if end.failure.consequence else 0
        return 1 if end.code else 3

    return min(ends, key=rank, default=None)


def _asking(worker: _Worker) -> Iterator[float]:
    """Ask the threads of a worker's devices for their stacks; yields seconds to wait, and stops at a device's end."""
    devices = list(worker.processes)
    for process in devices:
        for pause_s in ask_for_stacks(process.pid):
            yield pause_s
            if worker.processes != devices:
                return


def _printable(words: str) -> str:
    """A message of a script, as messages to the coordinator allow it: names of files may hold halves of characters."""
    return words.encode(errors="backslashreplace").decode()[:LONGEST_ERROR]


def _not_started(name: str, error: OSError) -> Failure:
    words = f"it could not be started: {error}"
    return Failure(name, socket.gethostname(), 0, "OSError", words, f"OSError: {words}\n", False, time.time())
