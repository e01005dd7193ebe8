"""The agent of an elastic job: starts and ends this host's workers as the coordinator asks, and tells it of their ends.

What happens to the job is decided by the coordinator; here it happens.
"""

import asyncio
import re
import secrets
import signal
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from unisono.checkpoint.folder import RunFolder
from unisono.errors import PREEMPTED, LaunchError
from unisono.launch.command import ElasticSeat
from unisono.launch.elastic.address import Address, Control
from unisono.launch.elastic.coordinator_line import CoordinatorLine, Probes
from unisono.launch.elastic.coordinator_process import CoordinatorProcess, invitation
from unisono.launch.elastic.elastic import AgentEnd, ElasticSettings, at_the_end, conclusion_of, lines_about, telling
from unisono.launch.elastic.host_workers import HostWorkers, Starter
from unisono.launch.ending.outcome import NOT_MISSED, JobConclusion, Outcome, WorkerExit, describe
from unisono.launch.ending.result import JobEnd, conclude, with_faults, write_end
from unisono.launch.notices.cloud import Notice
from unisono.launch.notices.listener import listening_to_cloud
from unisono.launch.terminal.terminal import Terminal
from unisono.launch.worker_group import WorkerGroup
from unisono.membership.agent_messages import (
    AgentHello,
    AgentLeaving,
    FromAgent,
    LeftOut,
    Probe,
    Start,
    ToAgent,
    TurnedAway,
)
from unisono.membership.agent_messages import End as EndWorkers
from unisono.membership.messages import JobOver, Welcome
from unisono.membership.token import token_file

LAST_WORDS_S = 5.0
"""How long the coordinator's last message may take after its end."""

FAREWELL_S = 10.0
"""How long the coordinator may take to end by itself when the job is over."""

STOP_AGAIN_S = 0.5

MOST_TOLD_AGAIN = 1000


def new_agent() -> str:
    """An id that no other agent has."""
    return f"agent-{secrets.token_hex(8)}"


@dataclass(frozen=True, slots=True)
class Joined:
    """A coordinator that runs elsewhere, for an agent that comes to a job under way.

    Attributes:
        address: the coordinator's address.
        token_file: the file in which workers find the token.
        agent: the id of this agent.
    """

    address: Address
    token_file: Path
    agent: str = field(default_factory=new_agent)


class StartedAgents(Protocol):
    """Agents of other hosts that the agent of the coordinator's host starts."""

    @property
    def are_gone(self) -> bool:
        """Whether all of them have ended."""
        ...

    @property
    def ends(self) -> Sequence[AgentEnd]:
        """How each of them has ended, once the job is over; whoever has not is lost."""
        ...

    async def keep(self, address: Address, group: WorkerGroup, gone: Callable[[], None]) -> None:
        """Start them, and watch them until all have ended; calls ``gone`` at each end.

        Raises:
            LaunchError: too few are left for the job.
        """

    def job_is_over(self) -> None:
        """From now on their ends are nothing to tell of."""

    def end(self) -> None:
        """Have them end now, with all of their workers."""

    async def close(self) -> None:
        """Likewise, and wait until they have; in bounded time."""


def run_agent(
    settings: ElasticSettings,
    folder: RunFolder,
    terminal: Terminal,
    joined: Joined | None = None,
    others: StartedAgents | None = None,
) -> Outcome:
    """Run the workers of an elastic job on this host to its end. Main thread only.

    Args:
        settings: the settings of the job, already checked.
        folder: the run folder, opened with ``open_folder``; closed at the end.
        terminal: the terminal that shows the workers' output.
        joined: the coordinator of the job, if it is under way; by default one is started, and how the job ended is
            written into the run folder.
        others: agents of other hosts that this one starts and ends.

    Raises:
        JobError: the run folder has no token that could be used.
        LaunchError: there is no coordinator, or it does not want this agent.
    """
    started = time.monotonic()
    try:
        outcome = asyncio.run(ElasticAgent(settings, folder, terminal, joined, others).run())
        return conclude(folder, outcome, terminal) if joined is None else outcome
    except LaunchError as error:
        if joined is None:
            end = JobEnd(1, {"message": str(error)}, settings.workers.largest, time.monotonic() - started)
            write_end(folder, end, terminal)
        raise
    finally:
        folder.close()


class ElasticAgent:
    """The agent of this host: all workers of one job on it. Arguments as of :func:`run_agent`."""

    def __init__(
        self,
        settings: ElasticSettings,
        folder: RunFolder,
        terminal: Terminal,
        joined: Joined | None = None,
        others: StartedAgents | None = None,
    ) -> None:
        pinning = settings.launch.pinning
        told = {
            **pinning.variables,
            "UNISONO_TERM": str(folder.term or ""),
            "UNISONO_FAILURE_TIMEOUT_S": str(settings.failure_timeout_s),
        }
        self._settings = replace(settings, launch=settings.launch.told(told))
        self._folder, self._terminal, self._joined, self._others = folder, terminal, joined, others
        self._group = WorkerGroup(folder, terminal, pinning)
        self._id = new_agent() if joined is None else joined.agent
        self._workers = HostWorkers(self._group, self._worker_gone)
        self._over: JobOver | None = None
        self._exits_before_the_end = 0
        self._interrupted: int | None = None
        self._notice = ""
        self._turned_away = ""
        self._finished = asyncio.Event()
        self._gives_up = asyncio.Event()
        self._broken_off = False
        self._bug: BaseException | None = None
        self._line: CoordinatorLine | None = None
        self._probes: Probes
        self._control: Control
        self._coordinator: CoordinatorProcess | None = None
        self._stopping: asyncio.Task[None] | None = None

    async def run(self) -> Outcome:
        """From the first start to the last end."""
        started = time.monotonic()
        with self._group.opened(self._signalled):
            try:
                async with AsyncExitStack() as opened:
                    await self._serve(opened)
            finally:
                await self._group.all_said()
        if self._bug is not None:
            raise self._bug
        return self._outcome(time.monotonic() - started)

    async def _serve(self, opened: AsyncExitStack) -> None:
        tasks: list[asyncio.Task[None]] = []
        opened.push_async_callback(_end_all, tasks)
        if self._joined is None:
            address, tokens = self._address_of_own(opened), token_file(self._folder.path)
            assert self._coordinator is not None, "it was just made"
            tasks.append(asyncio.create_task(self._keep_coordinator(self._coordinator)))
        else:
            address, tokens = self._joined.address, self._joined.token_file
        seat = ElasticSeat("", 0, address.url, tokens, address.certificate)
        starter = Starter(self._settings.launch, self._folder.path, seat, self._group.say)
        line = CoordinatorLine(address, self._greeting, self._hear, self._settings.failure_timeout_s)
        opened.push_async_callback(self._workers.close)
        await self._workers.open(starter, line.say)
        self._probes = Probes(self._id, this_host(), address, self._settings.failure_timeout_s, self._tell)
        opened.push_async_callback(self._probes.close)
        self._line = line
        tasks.append(asyncio.create_task(line.keep()))
        self._control = Control(address)
        if self._others is not None:
            opened.push_async_callback(self._others.close)
            tasks.append(asyncio.create_task(self._others.keep(address, self._group, self._finish_if_done)))
        source = self._settings.launch.notice_source
        async with listening_to_cloud(source, self._group.say, self._noticed):
            await self._until_finished(tasks)
        if self._coordinator is not None and self._over is not None:
            await self._let_coordinator_end(*tasks[:2])

    def _address_of_own(self, opened: AsyncExitStack) -> Address:
        path = self._folder.path
        self._coordinator = CoordinatorProcess(self._settings, path, self._group.guard, self._group.say)
        opened.callback(self._coordinator.close)
        address = Address(self._coordinator.url, self._settings.entrance.token(path), self._coordinator.certificate)
        if self._others is None and (lines := invitation(self._settings, path, address.url)):
            self._group.say("\n".join(lines))
        return address

    async def _keep_coordinator(self, coordinator: CoordinatorProcess) -> None:
        await coordinator.keep()
        if self._over is None:
            await asyncio.sleep(LAST_WORDS_S)
        if self._over is None:
            raise LaunchError("the coordinator has ended without a word about the job")

    async def _until_finished(self, tasks: Sequence[asyncio.Task[None]]) -> None:
        """Until the job is over and its workers here have ended; or what it rests on has failed."""
        finished = asyncio.create_task(self._finished.wait())
        pending: set[asyncio.Task[None] | asyncio.Task[bool]] = {finished, *tasks}
        try:
            while not finished.done():
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    if self._over is None:  # after that, nothing rests on them
                        task.result()
        finally:
            finished.cancel()

    async def _let_coordinator_end(self, coordinator: asyncio.Task[None], line: asyncio.Task[None]) -> None:
        """It ends by itself once it has told everybody; but workers of other hosts may go on."""
        line.cancel()
        gives_up = asyncio.create_task(self._gives_up.wait())
        await asyncio.wait({coordinator, gives_up}, timeout=FAREWELL_S, return_when=asyncio.FIRST_COMPLETED)
        if self._over is not None and self._over.preempted and not coordinator.done() and not gives_up.done():
            self._group.say("the job goes on on other hosts, and its coordinator stays here (a signal ends it)")
            await asyncio.wait({coordinator, gives_up}, return_when=asyncio.FIRST_COMPLETED)
        gives_up.cancel()

    # -- what the coordinator says

    async def _greeting(self, local_address: str) -> list[FromAgent]:
        """Who this is, and what a coordinator that was gone may not have heard."""
        if self._settings.launch.workers:  # nobody needs to reach a host on which none will run
            await self._probes.listen(local_address)
        told_again = self._workers.ended[-MOST_TOLD_AGAIN:]
        hello = AgentHello(
            agent=self._id,
            host=this_host(),
            workers=self._settings.launch.workers,
            running=(*self._workers.names, *(ended.worker for ended in told_again)),
            probes=self._probes.address,
        )
        return [hello, *told_again, *([AgentLeaving(reason=self._notice)] if self._interrupted is not None else [])]

    def _hear(self, message: ToAgent) -> None:
        match message:
            case Welcome():
                if self._coordinator is not None:
                    self._coordinator.in_use = True
            case Start(workers=names, delay_s=delay_s) if self._over is None:
                self._workers.begin(names, delay_s)
            case EndWorkers(workers=names, how=how):
                self._workers.end(names, how)
            case Probe(targets=targets):
                self._probes.probe(targets)
            case LeftOut(reason=reason):
                self._group.say(
                    f"this host takes no part for now: {reason}" if reason else "this host can take part again"
                )
            case TurnedAway():
                self._hear_turned_away(message)
            case JobOver():
                self._job_over(message)

    def _hear_turned_away(self, told: TurnedAway) -> None:
        self._turned_away = told.reason
        if told.reason:
            self._group.say(f"the job goes on without {told.reason}")
        if told.reason and not told.places and self._joined is not None:  # the coordinator's own host stays
            self._tell(AgentLeaving())

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

    # -- ending

    def _worker_gone(self, bug: BaseException | None) -> None:
        if bug is not None:
            self._bug = bug
            self._finished.set()
        self._finish_if_done()

    def _finish_if_done(self) -> None:
        """The job is over, for this agent at least, and nothing runs here."""
        if self._workers.are_gone and self._over is not None and (self._others is None or self._others.are_gone):
            self._finished.set()

    def _noticed(self, notice: Notice) -> None:
        self._folder.journal("notice", words=notice.words, host=this_host())
        self._group.say(notice.words)
        if notice.takes_away and self._interrupted is None:
            self._notice = notice.words
            self._signalled(signal.SIGTERM)

    def _signalled(self, number: int) -> None:
        name = "notice" if self._notice else signal.Signals(number).name
        if self._interrupted is not None:
            self._group.say(f"{signal.Signals(number).name} again: killing the workers")
            self._break_off()
            self._finished.set()
            self._gives_up.set()
            return
        self._interrupted = number
        grace = self._settings.launch.options.launch.grace_s
        self._group.say(f"{name}: the workers leave after this step; they have {grace:g} s (once more kills them)")
        takes_coordinator = self._joined is None and bool(self._notice)
        if self._others is None:
            self._tell(AgentLeaving(reason=self._notice))
        if self._others is not None or takes_coordinator:
            self._stopping = asyncio.create_task(self._stop_all())
        asyncio.get_running_loop().call_later(grace, self._grace_over)

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
        self._workers.kill()
        if self._others is not None:
            self._others.end()

    def _grace_over(self) -> None:
        if self._workers.names or (self._others is not None and not self._others.are_gone):
            self._break_off()
        elif self._joined is not None:  # a coordinator of its own would have said more
            self._finished.set()

    # -- telling

    def _outcome(self, seconds: float) -> Outcome:
        over, elsewhere = self._over, () if self._others is None else self._others.ends
        conclusion = None if over is None else conclusion_of(over, elsewhere)
        if self._turned_away and self._joined is not None and self._goes_on_without():  # those that failed here
            exits = telling(self._workers.exits, over, self._interrupted)
            over, conclusion = None, JobConclusion(1, f"the job goes on without {self._turned_away}")
        elif over is not None and over.is_done:
            exits = at_the_end(self._workers.exits, over)
            self._tell_of_those_not_missed([each for each in self._workers.exits if each not in exits], over)
            for line in lines_about(over, elsewhere):
                self._terminal.say(line)
        elif over is not None and over.preempted and not self._broken_off:
            known = self._exits_before_the_end
            left = [each for each in self._workers.exits[:known] if each.code == PREEMPTED]
            exits = telling([*left, *self._workers.exits[known:]], over, self._interrupted)
        else:
            exits = telling(self._workers.exits, over, self._interrupted)
        is_cut = self._broken_off and (over is None or over.preempted or any(each.code < 0 for each in exits))
        return Outcome(
            exits=with_faults(exits, self._folder),
            workers=len(over.finished) if over is not None and over.finished else self._settings.workers.largest,
            host=socket.gethostname(),
            seconds=seconds,
            interrupted=self._interrupted,
            conclusion=None if is_cut else conclusion,
            digest="" if over is None else over.digest,
            has_main=over is not None and any(each.rank == over.main for each in exits),
        )

    def _goes_on_without(self) -> bool:
        """Whether the job has not failed, and no worker of this host has trained to its end."""
        over = self._over
        if over is None or not over.is_done:
            return over is None or over.preempted
        return not any(each.rank in (over.main, *over.finished) for each in self._workers.exits)

    def _tell_of_those_not_missed(self, exits: Sequence[WorkerExit], over: JobOver) -> None:
        for each in with_faults(exits, self._folder):
            if each.rank in over.finished:
                self._terminal.say(f"{describe(each, socket.gethostname())} ({NOT_MISSED})")

    def _tell(self, message: FromAgent) -> None:
        if self._line is not None:  # or it is part of the first greeting
            self._line.say(message)


async def _end_all(tasks: Sequence[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def this_host() -> str:
    """This host's name, as messages allow it."""
    return re.sub(r"[^A-Za-z0-9._:-]", "-", socket.gethostname())[:128] or "host"
