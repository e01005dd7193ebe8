"""The agent of an elastic job: it starts and ends this host's workers for the coordinator, and reports their ends."""

import asyncio
import os
import socket
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

from unisono.checkpoint.folder import RunFolder
from unisono.errors import PREEMPTED, LaunchError
from unisono.launch.cloud_notices import listening_to_cloud
from unisono.launch.command import ElasticSeat, RendezvousSocket, WorkerCommand, elastic_command
from unisono.launch.elastic.address import Address, Control, new_agent
from unisono.launch.elastic.coordinator_process import CoordinatorLine, CoordinatorProcess, Probes, invitation
from unisono.launch.elastic.elastic_settings import (
    ElasticSettings,
    conclusion_of,
    exits_that_count,
    exits_that_ended_it,
    lines_about,
)
from unisono.launch.elastic.host_agents import HostAgents
from unisono.launch.host_workers import Ended, HostJob, HostWorkers, concluded, this_host
from unisono.launch.outcome import (
    NOT_MISSED,
    JobConclusion,
    Outcome,
    WorkerExit,
    describe,
    with_faults,
)
from unisono.launch.terminal import Terminal, WorkerName
from unisono.membership.messages import (
    AgentHello,
    AgentLeaving,
    FromAgent,
    JobOver,
    LeftOut,
    Probe,
    Start,
    ToAgent,
    TurnedAway,
    Welcome,
    WorkerEnded,
)
from unisono.membership.messages import End as EndWorkers
from unisono.membership.token import token_file

AGENT = "UNISONO_AGENT_PID"
"""The variable with the process id of a worker's agent."""

LAST_WORDS_S = 5.0
"""How long the coordinator's last message may take after its end."""

FAREWELL_S = 10.0
"""How long the coordinator may take to end by itself when the job is over."""

STOP_AGAIN_S = 0.5

MOST_REPEATED = 1000


@dataclass(frozen=True, slots=True)
class Joined:
    """A coordinator that runs elsewhere, for an agent that comes to a job under way."""

    address: Address
    token_file: Path
    agent: str = field(default_factory=new_agent)


def run_agent(
    settings: ElasticSettings,
    folder: RunFolder,
    terminal: Terminal,
    joined: Joined | None = None,
    others: HostAgents | None = None,
) -> Outcome:
    """Run the workers of an elastic job on this host to its end. Main thread only.

    The settings are checked already, and the folder was opened with ``open_folder``; it is closed at the end. Without
    ``joined`` a coordinator is started, and how the job ended is written into the folder.

    Raises:
        JobError: the run folder has no token that can be used.
        LaunchError: there is no coordinator, or it refuses this agent.
    """

    def run() -> Outcome:
        return asyncio.run(ElasticAgent(settings, folder, terminal, joined, others).run())

    try:
        return run() if joined is not None else concluded(run, settings.workers.largest, folder, terminal)
    finally:
        folder.close()


class ElasticAgent(HostJob):
    """The agent of this host: all workers of one job on it. Arguments as of :func:`run_agent`."""

    LEAVING = "the workers leave after this step; they have {}"

    def __init__(
        self,
        settings: ElasticSettings,
        folder: RunFolder,
        terminal: Terminal,
        joined: Joined | None = None,
        others: HostAgents | None = None,
    ) -> None:
        timeout_s = str(settings.failure_timeout_s)
        # The parent of a forked worker is the fork server, so each worker gets the process id of its agent.
        variables = {"UNISONO_FAILURE_TIMEOUT_S": timeout_s, AGENT: str(os.getpid())}
        super().__init__(settings.launch, folder, terminal, variables)
        self._settings = replace(settings, launch=self._launch)
        self._joined, self._others = joined, others
        self._id = new_agent() if joined is None else joined.agent
        self._begun: set[str] = set()
        self._reports: list[WorkerEnded] = []
        self._over: JobOver | None = None
        self._exits_before_the_end = 0
        self._turned_away = ""
        self._finished = asyncio.Event()
        self._gives_up = asyncio.Event()
        self._broken_off = False
        self._line: CoordinatorLine | None = None
        self._probes: Probes
        self._control: Control
        self._seat: ElasticSeat
        self._coordinator: CoordinatorProcess | None = None
        self._stopping: asyncio.Task[None] | None = None

    async def _serve(self, stack: AsyncExitStack) -> None:
        tasks: list[asyncio.Task[None]] = []
        stack.push_async_callback(_cancel_all, tasks)
        if self._joined is None:
            address, tokens = self._open_coordinator(stack), token_file(self._folder.path)
            assert self._coordinator is not None, "it was just made"
            tasks.append(asyncio.create_task(self._keep_coordinator(self._coordinator)))
        else:
            address, tokens = self._joined.address, self._joined.token_file
        self._seat = ElasticSeat("", 0, address.url, tokens, address.certificate, devices=self._launch.devices)
        self._control = Control(address)
        line = CoordinatorLine(address, self._greeting, self._handle, self._settings.failure_timeout_s)
        is_warm = self._launch.options.launch.warm_start and self._launch.workers > 0
        start = self._new_start(has_fork_server=is_warm)
        self._workers = HostWorkers(
            self._group, start, self._command, self._worker_ended, self._worker_gone, self._launch.devices
        )
        stack.push_async_callback(self._workers.close)
        await start.open()
        self._probes = Probes(self._id, this_host(), address, self._settings.failure_timeout_s, self._send)
        stack.push_async_callback(self._probes.close)
        self._line = line
        tasks.append(asyncio.create_task(line.keep()))
        if self._others is not None:
            stack.push_async_callback(self._others.close)
            tasks.append(asyncio.create_task(self._others.keep(address, self._group, self._finish_if_done)))
        async with listening_to_cloud(self._launch.notice_source, self._group.say, self._noticed):
            await self._until_finished(tasks)
        if self._coordinator is not None and self._over is not None:
            await self._let_coordinator_end(*tasks[:2])

    def _open_coordinator(self, stack: AsyncExitStack) -> Address:
        path = self._folder.path
        self._coordinator = CoordinatorProcess(self._settings, path, self._group.guard, self._group.say)
        stack.callback(self._coordinator.close)
        address = Address(self._coordinator.url, self._settings.entrance.token(path), self._coordinator.certificate)
        if self._others is None and (lines := invitation(self._settings, path, address.url)):
            self._group.say("\n".join(lines))
        return address

    async def _keep_coordinator(self, coordinator: CoordinatorProcess) -> None:
        await coordinator.keep()
        if self._over is None:
            await asyncio.sleep(LAST_WORDS_S)
        if self._over is None:
            raise LaunchError("the coordinator has ended without saying how the job ended")

    async def _until_finished(self, tasks: Sequence[asyncio.Task[None]]) -> None:
        """Wait until the job is over and its workers here have ended, or a task that it needs has failed."""
        finished = asyncio.create_task(self._finished.wait())
        pending: set[asyncio.Task[None] | asyncio.Task[bool]] = {finished, *tasks}
        try:
            while not finished.done():
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    if self._over is None:  # once the job is over, it needs none of them
                        task.result()
        finally:
            finished.cancel()

    async def _let_coordinator_end(self, coordinator: asyncio.Task[None], line: asyncio.Task[None]) -> None:
        """Wait for the coordinator, which ends once it has told all agents; workers of other hosts may go on."""
        line.cancel()
        gives_up = asyncio.create_task(self._gives_up.wait())
        await asyncio.wait({coordinator, gives_up}, timeout=FAREWELL_S, return_when=asyncio.FIRST_COMPLETED)
        if self._over is not None and self._over.preempted and not coordinator.done() and not gives_up.done():
            self._group.say("the job goes on on other hosts, and its coordinator stays here (a signal ends it)")
            await asyncio.wait({coordinator, gives_up}, return_when=asyncio.FIRST_COMPLETED)
        gives_up.cancel()

    # -- messages of the coordinator

    async def _greeting(self, local_address: str) -> list[FromAgent]:
        """The first messages of a connection: a hello, and reports that the coordinator may not have received."""
        if self._launch.workers:  # no other host needs to reach a host without workers
            await self._probes.listen(local_address)
        repeated = self._reports[-MOST_REPEATED:]
        hello = AgentHello(
            agent=self._id,
            host=this_host(),
            workers=self._launch.workers,
            running=(*map(str, self._workers.names), *(ended.worker for ended in repeated)),
            probes=self._probes.address,
        )
        return [hello, *repeated, *([AgentLeaving(reason=self._notice)] if self._interrupted is not None else [])]

    def _handle(self, message: ToAgent) -> None:
        match message:
            case Welcome():
                if self._coordinator is not None:
                    self._coordinator.in_use = True
            case Start(workers=names, delay_s=delay_s) if self._over is None:
                for name in names:
                    if name not in self._begun:  # after a reconnection the coordinator repeats its messages
                        self._begun.add(name)
                        self._workers.begin(name, delay_s)
            case EndWorkers(workers=names, how=how):
                self._workers.end(names, how)
            case Probe(targets=targets):
                self._probes.probe(targets)
            case LeftOut(reason=reason):
                self._group.say(
                    f"this host takes no part for now: {reason}" if reason else "this host can take part again"
                )
            case TurnedAway():
                self._handle_turned_away(message)
            case JobOver():
                self._job_over(message)

    def _handle_turned_away(self, message: TurnedAway) -> None:
        self._turned_away = message.reason
        if message.reason:
            self._group.say(f"the job goes on without {message.reason}")
        if message.reason and not message.places and self._joined is not None:  # the coordinator's own host stays
            self._send(AgentLeaving())

    def _job_over(self, over: JobOver) -> None:
        if self._over is not None:
            return
        self._over, self._exits_before_the_end = over, len(self._workers.exits)
        if self._others is not None:
            self._others.job_is_over()
        self._workers.end_unstarted()
        if not over.is_done and not over.preempted:
            self._workers.end_quickly()
        self._finish_if_done()

    # -- workers

    def _command(self, name: WorkerName, place: int, device: int, rendezvous: RendezvousSocket | None) -> WorkerCommand:
        seat = replace(self._seat, worker=str(name), place=place, device=device, rendezvous=rendezvous)
        return elastic_command(self._launch, self._folder.path, seat)

    def _worker_ended(self, worker_exit: WorkerExit, end: Ended) -> None:
        code, failure = end.code, end.failure
        # An exception that only follows from the loss of another worker is no error of this one.
        called_exit = end.is_scripts and failure is None and code not in (0, PREEMPTED)
        error = "its script called sys.exit" if called_exit else ""
        if failure is not None and not failure.consequence:
            error = _printable(f"{failure.type}: {failure.message}")
        self._reports.append(WorkerEnded(worker=str(worker_exit.rank), code=code, error=error))
        self._send(self._reports[-1])

    # -- ending

    def _worker_gone(self, bug: BaseException | None) -> None:
        if bug is not None:
            self._bug = bug
            self._finished.set()
        self._finish_if_done()

    def _finish_if_done(self) -> None:
        """Finish if the job is over, for this agent at least, and neither workers nor other agents run."""
        if self._workers.are_gone and self._over is not None and (self._others is None or self._others.are_gone):
            self._finished.set()

    def _signalled(self, number: int) -> None:
        is_first = self._interrupted is None
        super()._signalled(number)
        if not is_first:
            self._finished.set()
            self._gives_up.set()

    def _leave(self, number: int) -> None:
        takes_coordinator = self._joined is None and bool(self._notice)
        if self._others is None:
            self._send(AgentLeaving(reason=self._notice))
        if self._others is not None or takes_coordinator:
            self._stopping = asyncio.create_task(self._stop_all())

    async def _stop_all(self) -> None:
        """Have the workers of all hosts leave. The coordinator may just be starting, or starting again."""
        while self._over is None:
            try:
                await asyncio.to_thread(self._control.stop)
                return
            except LaunchError:
                await asyncio.sleep(STOP_AGAIN_S)

    def _break_off(self) -> None:
        self._broken_off = True
        super()._break_off()
        if self._others is not None:
            self._others.end()

    def _grace_over(self) -> None:
        if self._workers.names or (self._others is not None and not self._others.are_gone):
            self._break_off()
        elif self._joined is not None:  # a coordinator of its own says itself when the job is over
            self._finished.set()

    # -- the outcome

    def _outcome(self, seconds: float) -> Outcome:
        over, agent_ends = self._over, () if self._others is None else self._others.ends
        conclusion = None if over is None else conclusion_of(over, agent_ends)
        if self._turned_away and self._joined is not None and self._goes_on_without():
            exits = exits_that_ended_it(self._workers.exits, over, self._interrupted)
            over, conclusion = None, JobConclusion(1, f"the job goes on without {self._turned_away}")
        elif over is not None and over.is_done:
            exits = exits_that_count(self._workers.exits, over)
            self._say_not_missed([end for end in self._workers.exits if end not in exits], over)
            for line in lines_about(over, agent_ends):
                self._terminal.say(line)
        elif over is not None and over.preempted and not self._broken_off:
            earlier = self._exits_before_the_end
            left = [end for end in self._workers.exits[:earlier] if end.code == PREEMPTED]
            exits = exits_that_ended_it([*left, *self._workers.exits[earlier:]], over, self._interrupted)
        else:
            exits = exits_that_ended_it(self._workers.exits, over, self._interrupted)
        is_cut = self._broken_off and (over is None or over.preempted or any(end.code < 0 for end in exits))
        return Outcome(
            exits=with_faults(exits, self._folder),
            workers=len(over.finished) if over is not None and over.finished else self._settings.workers.largest,
            host=socket.gethostname(),
            seconds=seconds,
            interrupted=self._interrupted,
            conclusion=None if is_cut else conclusion,
            digest="" if over is None else over.digest,
            has_main=over is not None and any(end.rank == over.main for end in exits),
        )

    def _goes_on_without(self) -> bool:
        """Whether the job has not failed, and no worker of this host has trained to its end."""
        over = self._over
        if over is None or not over.is_done:
            return over is None or over.preempted
        return not any(end.rank in (over.main, *over.finished) for end in self._workers.exits)

    def _say_not_missed(self, exits: Sequence[WorkerExit], over: JobOver) -> None:
        for end in with_faults(exits, self._folder):
            if end.rank in over.finished:
                self._terminal.say(f"{describe(end, socket.gethostname())} ({NOT_MISSED})")

    def _send(self, message: FromAgent) -> None:
        if self._line is not None:  # before that, the first greeting will have it
            self._line.send(message)


async def _cancel_all(tasks: Sequence[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


LONGEST_ERROR = 4096


def _printable(text: str) -> str:
    """A script's message in valid UTF-8, as messages to the coordinator need it: names of files may hold surrogates."""
    return text.encode(errors="backslashreplace").decode()[:LONGEST_ERROR]
