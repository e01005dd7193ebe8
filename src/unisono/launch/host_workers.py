"""The workers that a launcher has on its host, in jobs of every kind: how they are started, watched and ended."""

import asyncio
import os
import re
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar

from unisono.checkpoint.folder import RunFolder
from unisono.errors import NOT_STARTED, PREEMPTED, LaunchError
from unisono.host.guard import Guard, kill_group
from unisono.host.machine import LOOK_S, offer, peak_mib
from unisono.host.process import NOTICES, request_stacks
from unisono.launch.cloud_notices import Notice
from unisono.launch.command import RendezvousSocket, WorkerCommand, elastic_command
from unisono.launch.failure import Failure, end_of, noted_end
from unisono.launch.outcome import JobEnd, Outcome, WorkerExit, conclude, write_end
from unisono.launch.pins import Pinning, Pins
from unisono.launch.settings import LaunchSettings
from unisono.launch.terminal import Terminal, WorkerName
from unisono.launch.worker_output import WorkerOutput
from unisono.launch.worker_start import WarmStart, WorkerProcess, WorkerStart, listening
from unisono.membership.environment import device_name

NOT_PINNED = Pinning()

SECOND_TERM_S = 0.2
KILL_S = 0.7
"""A worker leaves at a step's end on the first SIGTERM, at once on the second. One that does neither is killed."""


@dataclass(frozen=True, slots=True)
class Ended:
    """The end of a worker's process.

    Attributes:
        code: its exit code; negative for a signal.
        at: the time of its end, or that of its script if it is known, in seconds since 1970.
        failure: the exception that ended its script; None if it recorded none.
        is_scripts: whether the code is the one with which the script ended, as with ``sys.exit``.
    """

    code: int
    at: float
    failure: Failure | None
    is_scripts: bool = False


class WorkerGroup:
    """The workers of one launcher, of a fixed or of an elastic job. Runs inside of an event loop."""

    def __init__(self, folder: RunFolder, terminal: Terminal, pinning: Pinning = NOT_PINNED) -> None:
        self._folder, self._terminal = folder, terminal
        self._pins = Pins(pinning, self.say)
        self._unsaid: set[asyncio.Task[None]] = set()
        self.guard: Guard

    @contextmanager
    def opened(self, on_signal: Callable[[int], None]) -> Iterator[None]:
        """Until the context ends, a guard runs, and a signal to the launcher calls ``on_signal`` with its number."""
        with _handling_signals(on_signal), _guarding() as self.guard, self._pins.opened():
            yield

    async def begin(
        self, name: WorkerName, start: WorkerStart, command: WorkerCommand, worker: str
    ) -> tuple[WorkerProcess, WorkerOutput]:
        """Start a worker, or one of its devices, and show what it writes. All devices of a worker share ``worker``.

        Raises:
            OSError: it cannot be started.
        """
        output = WorkerOutput(name, self._folder.log_of(name), self._terminal, self.say)
        try:
            process = await start.start(command, output)
        except OSError:
            output.abandon()
            raise
        output.worker_started()
        self.guard.watch(process.pid)
        self._pins.began(worker, process.pid)
        return process, output

    async def end(self, name: WorkerName, process: WorkerProcess) -> Ended:
        """Wait for a worker's end, and kill the processes that it has started."""
        code, at = end_of(self._folder, name, await process.wait())
        kill_group(process.pid)
        self.guard.forget(process.pid)
        self._pins.ended(process.pid)
        noted = noted_end(self._folder, name)
        return Ended(code, at, self._failure_of(name), noted is not None and noted[0] == code)

    def say(self, words: str) -> None:
        """Show a line to the person at the terminal. Never waits."""
        task = asyncio.create_task(asyncio.to_thread(self._terminal.say, words))
        self._unsaid.add(task)
        task.add_done_callback(self._unsaid.discard)

    async def all_said(self) -> None:
        """Wait until every line is shown."""
        await asyncio.gather(*self._unsaid)

    def _failure_of(self, name: WorkerName) -> Failure | None:
        try:
            return Failure.read(self._folder, name)
        except LaunchError as error:
            self.say(str(error))
            return None


@contextmanager
def _handling_signals(on_signal: Callable[[int], None]) -> Iterator[None]:
    numbers = [signal.SIGINT, signal.SIGTERM]
    # A signal that is ignored stays ignored: nohup ignores SIGHUP.
    numbers += [number for number in (signal.SIGHUP, *NOTICES) if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.getsignal(number) for number in numbers}
    loop = asyncio.get_running_loop()
    for number in numbers:
        loop.add_signal_handler(number, on_signal, number)
    try:
        yield
    finally:
        for number, handler in before.items():
            loop.remove_signal_handler(number)
            signal.signal(number, handler)


@contextmanager
def _guarding() -> Iterator[Guard]:
    try:
        guard = Guard()
    except OSError as error:
        raise LaunchError(f"no process can be started: {error}") from error
    try:
        yield guard
    finally:
        guard.close()


@dataclass(eq=False, slots=True)
class _Worker:
    """A worker: one process, or one for each of its devices. Each leads a process group that has its process id.

    Attributes:
        processes: the processes that run.
        pid: the id of the first process; 0 before it has one.
        told_at: the time at which it was first told to end; None if it was not.
        how: the way in which it was told to end; empty if it was not.
        pending_signal: the signal to pass on as soon as the worker has begun; 0 for none.
        unwanted: set when the worker need not be started any more.
        begun: set when it has been started, or never will be.
    """

    name: WorkerName
    place: int
    processes: list[WorkerProcess] = field(default_factory=list)
    pid: int = 0
    told_at: float | None = None
    how: str = ""
    pending_signal: int = 0
    unwanted: asyncio.Event = field(default_factory=asyncio.Event)
    begun: asyncio.Event = field(default_factory=asyncio.Event)
    peak_mib: float | None = None
    over_mib: float | None = None


CommandOf = Callable[[WorkerName, int, int, RendezvousSocket | None], WorkerCommand]
"""Gives the command of a worker's device, from the worker's name, its place, the device, and the socket to meet at."""


class HostWorkers:
    """The workers of a host: starts them, ends them, and reports their ends. The caller decides about them.

    ``on_end`` is called at the end of each worker, ``on_gone`` when nothing is left to do for one: with an exception if
    there is a bug.
    """

    def __init__(
        self,
        group: WorkerGroup,
        start: WorkerStart,
        command_of: CommandOf,
        on_end: Callable[[WorkerExit, Ended], None],
        on_gone: Callable[[BaseException | None], None],
        devices: int = 1,
    ) -> None:
        self._group, self._start, self._command_of = group, start, command_of
        self._on_end, self._on_gone, self._devices = on_end, on_gone, devices
        self.exits: list[WorkerExit] = []
        self._workers: dict[WorkerName, _Worker] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def names(self) -> tuple[WorkerName, ...]:
        """The names of the workers whose ends were not reported yet."""
        return tuple(self._workers)

    @property
    def are_gone(self) -> bool:
        """Whether nothing is left to do for any worker."""
        return not self._tasks

    async def until_begun(self) -> None:
        """Wait until each worker has been started, or never will be."""
        await asyncio.gather(*(worker.begun.wait() for worker in self._workers.values()))

    async def until_gone(self) -> None:
        """Wait until nothing is left to do for any worker."""
        while self._tasks:
            await asyncio.wait(set(self._tasks))

    async def close(self) -> None:
        """Kill the workers that still run, and wait for their ends."""
        self.kill()
        await self._start.close()
        await self.until_gone()

    def begin(
        self,
        name: WorkerName,
        delay_s: float = 0.0,
        place: int | None = None,
        rendezvous: RendezvousSocket | None = None,
    ) -> None:
        """Start a worker after a delay, at this place on the host; by default at one that no other worker has.

        It meets other workers at ``rendezvous``; the devices of one worker have a socket of their own.
        """
        taken = {worker.place for worker in self._workers.values()}
        free = next(number for number in range(len(taken) + 1) if number not in taken)
        worker = self._workers[name] = _Worker(name, free if place is None else place)
        task = asyncio.create_task(self._run(worker, delay_s, rendezvous))
        self._tasks.add(task)
        task.add_done_callback(partial(self._task_ended, worker))

    def end(self, names: Sequence[WorkerName], how: str) -> None:
        """End workers, in one of the ways that :class:`~unisono.membership.messages.End` knows."""
        for name in names:
            if (worker := self._workers.get(name)) is not None:
                self._end(worker, how)

    def end_unstarted(self) -> None:
        """End the workers that have no process yet, so that none is started."""
        self.end([worker.name for worker in self._workers.values() if not worker.pid], "leave")

    def end_quickly(self, delay_s: float = 0.0) -> None:
        """End all workers of a failed job: by SIGTERM, a second one, on which they leave at once, and SIGKILL."""
        loop = asyncio.get_running_loop()
        loop.call_later(delay_s, self._end_all)
        loop.call_later(delay_s + SECOND_TERM_S, self._end_all)
        loop.call_later(delay_s + KILL_S, self.kill)

    def pass_on(self, number: int) -> None:
        """Pass on a signal that was sent to the launcher. No more workers are started."""
        for worker in self._workers.values():
            if not worker.pid:
                worker.pending_signal = number
                worker.unwanted.set()
            self._send_signal(worker, number)

    def kill(self) -> None:
        """Kill all workers now."""
        for worker in list(self._workers.values()):
            worker.told_at, worker.how = worker.told_at or time.time(), "kill"
            worker.unwanted.set()
            self._kill(worker)

    async def limit_memory(self, limit_mib: float) -> None:
        """Kill each worker that needs more memory than the limit. Runs until it is cancelled."""
        while True:
            for worker in self._workers.values():
                if not worker.processes:
                    continue
                if worker.peak_mib is None:
                    for process in worker.processes:
                        offer(process.pid)
                worker.peak_mib = max(worker.peak_mib or 0.0, *(peak_mib(process.pid) for process in worker.processes))
                if worker.peak_mib > limit_mib and worker.told_at is None and worker.over_mib is None:
                    worker.over_mib = limit_mib
                    self._kill(worker)
            await asyncio.sleep(LOOK_S)

    def _task_ended(self, worker: _Worker, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        worker.begun.set()  # a worker that was not started never will be
        self._on_gone(None if task.cancelled() else task.exception())

    async def _run(self, worker: _Worker, delay_s: float, rendezvous: RendezvousSocket | None) -> None:
        """Start a worker after a delay, and see to it until its end."""
        with suppress(TimeoutError):
            async with asyncio.timeout(delay_s):
                await worker.unwanted.wait()
        if not worker.unwanted.is_set():
            await self._start.loaded(worker.unwanted)
        if worker.unwanted.is_set():
            self._note(worker, Ended(-signal.SIGTERM, time.time(), None))
            return
        devices = []
        with listening(self._devices) as own_rendezvous:
            for device in range(self._devices):
                try:
                    devices.append(await self._begin_device(worker, device, own_rendezvous or rendezvous))
                except OSError as error:
                    self._kill(worker)  # the devices before it
                    self._note(worker, Ended(NOT_STARTED, time.time(), _not_started(worker.name, error)))
                    break
        worker.begun.set()
        ends = [asyncio.create_task(self._until_ended(worker, *device)) for device in devices]
        end = cause_of([await end for end in asyncio.as_completed(ends)])
        if end is not None and self._is_ours(worker):
            self._note(worker, end)
        for _, _, output in devices:
            await output.drain()

    async def _begin_device(
        self, worker: _Worker, device: int, rendezvous: RendezvousSocket | None
    ) -> tuple[WorkerName, WorkerProcess, WorkerOutput]:
        name = device_name(str(worker.name), device) if device else worker.name
        command = self._command_of(worker.name, worker.place, device, rendezvous)
        process, output = await self._group.begin(name, self._start, command, str(worker.place))
        worker.processes.append(process)
        worker.pid = worker.pid or process.pid
        if worker.how:
            self._end(worker, worker.how)
        elif worker.pending_signal:
            self._send_signal(worker, worker.pending_signal)
        return name, process, output

    async def _until_ended(self, worker: _Worker, name: WorkerName, process: WorkerProcess, _: WorkerOutput) -> Ended:
        """Wait for the end of a device. If it is lost, the other devices of its worker are killed at once."""
        end = await self._group.end(name, process)
        worker.processes.remove(process)
        if end.code not in (0, PREEMPTED):
            self._kill(worker)
        return end

    def _note(self, worker: _Worker, end: Ended) -> None:
        del self._workers[worker.name]
        memory = worker.peak_mib, worker.over_mib
        self.exits.append(
            WorkerExit(worker.name, end.code, end.at, end.failure, worker.told_at, *memory, pid=worker.pid)
        )
        self._on_end(self.exits[-1], end)

    def _end_all(self) -> None:
        self.end(self.names, "leave")

    def _end(self, worker: _Worker, how: str) -> None:
        worker.told_at, worker.how = worker.told_at or time.time(), how
        worker.unwanted.set()
        if not worker.processes:
            return  # it is ended as soon as it has begun, or does not begin at all
        if how == "leave":
            self._send_signal(worker, signal.SIGTERM)
        elif how == "drop":
            self._kill(worker)
        else:
            self._start.wake()
            self._kill_later(worker, _request_stacks(worker))

    def _kill_later(self, worker: _Worker, pauses: Iterator[float]) -> None:
        """Kill a worker once its threads have been asked for their stacks, one after the other."""
        if not self._is_ours(worker):
            return
        if (pause_s := next(pauses, None)) is None:
            self._kill(worker)
        else:
            asyncio.get_running_loop().call_later(pause_s, self._kill_later, worker, pauses)

    def _kill(self, worker: _Worker) -> None:
        if worker.processes and self._is_ours(worker):
            self._start.wake()
            for process in worker.processes:  # only those that run: the system may have given away the others' ids
                kill_group(process.pid)

    def _is_ours(self, worker: _Worker) -> bool:
        """Whether its end was not reported yet: after that, the system may have given its process id away."""
        return self._workers.get(worker.name) is worker

    def _send_signal(self, worker: _Worker, number: int) -> None:
        """Signal a worker's own processes: as long as it lives, it ends those that it has started itself."""
        if worker.processes:
            self._start.wake()
        for process in worker.processes:
            for signal_number in (number, signal.SIGCONT):  # a stopped process has to continue to handle the signal
                with suppress(ProcessLookupError):
                    os.kill(process.pid, signal_number)


def cause_of(ends: Sequence[Ended]) -> Ended | None:
    """The end, of those of a worker's devices in their order, that says why the worker ended; None if there is none.

    An error of the script says most, then an exit code, then an error that only follows from the end of another device.
    Of several alike it is the first, after which the other devices were killed.
    """

    def rank(end: Ended) -> int:
        if end.failure is not None:
            return 2 if end.failure.consequence else 0
        return 1 if end.code else 3

    return min(ends, key=rank, default=None)


def _request_stacks(worker: _Worker) -> Iterator[float]:
    """Request the stacks of the threads of a worker's devices; yield seconds to wait, until a device ends."""
    devices = list(worker.processes)
    for process in devices:
        for pause_s in request_stacks(process.pid):
            yield pause_s
            if worker.processes != devices:
                return


def _not_started(name: WorkerName, error: OSError) -> Failure:
    words = f"it could not be started: {error}"
    return Failure(name, socket.gethostname(), 0, "OSError", words, f"OSError: {words}\n", False, time.time())


def this_host() -> str:
    """This host's name, as messages allow it."""
    return re.sub(r"[^A-Za-z0-9._:-]", "-", socket.gethostname())[:128] or "host"


class HostJob:
    """A job on this host: handles signals and notices, and has the workers leave. Every worker gets ``variables``."""

    LEAVING: ClassVar[str]
    """What the launcher says after a first signal, with a place for the seconds that workers have."""

    _workers: HostWorkers

    def __init__(
        self, launch: LaunchSettings, folder: RunFolder, terminal: Terminal, variables: Mapping[str, str]
    ) -> None:
        pinning = launch.pinning
        self._launch = launch.with_variables({**pinning.variables, "UNISONO_TERM": str(folder.term or ""), **variables})
        self._folder, self._terminal = folder, terminal
        self._group = WorkerGroup(folder, terminal, pinning)
        self._interrupted: int | None = None
        self._notice = ""
        self._bug: BaseException | None = None

    def _new_start(self, *, has_fork_server: bool, shared: WarmStart | None = None) -> WorkerStart:
        log = self._folder.log_of("template") if has_fork_server else None
        return WorkerStart(elastic_command(self._launch, self._folder.path, None), log, self._group.say, shared)

    async def run(self) -> Outcome:
        """Run all workers, from the first start to the last end."""
        started = time.monotonic()
        with self._group.opened(self._signalled):
            try:
                async with AsyncExitStack() as stack:
                    await self._serve(stack)
            finally:
                await self._group.all_said()
        if self._bug is not None:
            raise self._bug
        return self._outcome(time.monotonic() - started)

    async def _serve(self, stack: AsyncExitStack) -> None:
        raise NotImplementedError

    def _outcome(self, seconds: float) -> Outcome:
        raise NotImplementedError

    def _leave(self, number: int) -> None:
        """Have the workers leave, after a first signal or a notice."""
        raise NotImplementedError

    def _break_off(self) -> None:
        self._workers.kill()

    def _grace_over(self) -> None:
        if self._workers.names:
            self._break_off()

    def _noticed(self, notice: Notice) -> None:
        self._folder.journal("notice", words=notice.text, host=this_host())
        self._group.say(notice.text)
        if notice.takes_away and self._interrupted is None:
            self._notice = notice.text
            self._signalled(signal.SIGTERM)

    def _signalled(self, number: int) -> None:
        name = signal.Signals(number).name
        if self._interrupted is not None:
            self._group.say(f"{name} again: killing the workers")
            self._break_off()
            return
        self._interrupted, grace = number, self._launch.options.launch.grace_s
        leaving = self.LEAVING.format(f"{grace:g} s")
        self._group.say(f"{'notice' if self._notice else name}: {leaving} (once more kills them)")
        self._leave(number)
        asyncio.get_running_loop().call_later(grace, self._grace_over)


def concluded(run: Callable[[], Outcome], workers: int, folder: RunFolder, terminal: Terminal) -> Outcome:
    """Run a job to its end, and write how it ended into the run folder.

    Raises:
        LaunchError: raised by ``run``; it is written into the run folder, too.
    """
    started = time.monotonic()
    try:
        return conclude(folder, run(), terminal)
    except LaunchError as error:
        write_end(folder, JobEnd(1, {"message": str(error)}, workers, time.monotonic() - started), terminal)
        raise
