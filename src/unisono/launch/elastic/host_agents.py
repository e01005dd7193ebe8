"""The agents of other hosts: started by an engine, watched, and ended with this launcher, in whatever way that ends."""

import asyncio
import os
import re
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from unisono.errors import PREEMPTED, JobError, LaunchError
from unisono.host.guard import kill_group
from unisono.launch.command import PER_WORKER
from unisono.launch.elastic.address import Address, Control, HostHello, HostOrder, new_agent
from unisono.launch.elastic.coordinator_process import CoordinatorLine
from unisono.launch.elastic.elastic_settings import AgentEnd, ElasticSettings
from unisono.launch.engine import FAILED, explanation, reach
from unisono.launch.host_workers import WorkerGroup, this_host
from unisono.launch.hostfile import HostPlan, HostSlots
from unisono.launch.terminal import LineSplitter, Stream, Terminal
from unisono.membership.messages import AgentHello, AgentLeaving, FromAgent, JobOver, ToAgent

PASSED_ON = re.compile(r"(UNISONO|OMP|MKL|NCCL)_.*|PYTHONPATH")
"""Variables of the launcher that all hosts get."""

OF_THIS_HOST = frozenset({*PER_WORKER, "UNISONO_RUN_DIR", "UNISONO_LAUNCHER_PID"})


def passed_on(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables of the launcher that all hosts get, even if no option names them."""
    return {name: value for name, value in environ.items() if PASSED_ON.fullmatch(name) and name not in OF_THIS_HOST}


def join_words(settings: ElasticSettings, host: HostSlots, run_dir: Path) -> tuple[str, ...]:
    """The options and arguments of ``unisono join`` on a host, except the URL, token and certificate."""
    own = ("-n", str(host.slots), "--run-dir", os.path.abspath(run_dir))  # noqa: PTH100 (as for the run folder)
    return (*own, *settings.words())


ANSWER_S = 90.0
"""How long a host may take from the start of its command to its hello: Python may lie on a slow file system."""

LAST_WORDS_S = 5.0
"""How long the coordinator's last message may take after the end of the last host's agent."""

ENDS_S = 10.0
"""How long an agent may take to end when its standard input has ended."""

AGAIN_S = 0.5

CHUNK = 2**16
KEPT_LINES = 5


@dataclass(eq=False, slots=True)
class _Agent:
    """The agent of a host.

    Attributes:
        code: the exit code of its command; None while it runs.
        why: why it has ended, or never began, for people.
        errors: the last lines of its errors before its hello.
    """

    host: HostSlots
    id: str = field(default_factory=new_agent)
    process: asyncio.subprocess.Process | None = None
    has_answered: bool = False
    code: int | None = None
    why: str = ""
    errors: deque[str] = field(default_factory=lambda: deque(maxlen=KEPT_LINES))


class HostAgents:
    """Agents of other hosts, for one job. Runs inside of an event loop.

    The standard input of each command is a pipe to this process. When this process ends, in whatever way, the pipe is
    closed, and the agent ends.
    """

    def __init__(
        self,
        settings: ElasticSettings,
        plan: HostPlan,
        environment: Mapping[str, str],
        run_dir: Path,
        terminal: Terminal,
    ) -> None:
        self._settings, self._here, self._engine = settings, plan.here, plan.engine
        self._agents = [_Agent(host) for host in plan.elsewhere]
        self._environment, self._run_dir, self._terminal = environment, run_dir, terminal
        self._over = asyncio.Event()
        self._address: Address
        self._group: WorkerGroup

    @property
    def are_gone(self) -> bool:
        """Whether all agents have ended."""
        return all(agent.code is not None for agent in self._agents)

    @property
    def ends(self) -> list[AgentEnd]:
        """The ends of all agents, once the job is over; an agent that has not ended counts as lost."""
        return [AgentEnd(agent.id, f"host {agent.host.name}", _own_code(agent.code)) for agent in self._agents]

    async def keep(self, address: Address, group: WorkerGroup, on_end: Callable[[], None]) -> None:
        """Start all agents, and watch them until all have ended; ``on_end`` is called whenever one has.

        Raises:
            LaunchError: the agents that are left have too little room; names each host without one, and what to do.
        """
        self._address, self._group = address, group
        running = {asyncio.create_task(self._run(agent)) for agent in self._agents}
        try:
            while running:
                done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
                on_end()
                await self._require_enough()
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    def job_is_over(self) -> None:
        """Note that the job is over: an agent that ends from now on is no failure."""
        self._over.set()

    def end(self) -> None:
        """Have all agents end, without waiting for it."""
        for agent in self._agents:
            _close_input(agent)

    async def close(self) -> None:
        """Have all agents end, and wait for it, in bounded time."""
        self.end()
        running = [agent.process for agent in self._agents if agent.process is not None and agent.code is None]
        with suppress(TimeoutError):
            async with asyncio.timeout(ENDS_S):
                await asyncio.gather(*(process.wait() for process in running))
        for process in running:
            if process.returncode is None:
                kill_group(process.pid)
                await process.wait()
            self._group.guard.forget(process.pid)

    async def _require_enough(self) -> None:
        if self._over.is_set() or not all(agent.has_answered or agent.code is not None for agent in self._agents):
            return
        room = self._here + sum(agent.host.slots for agent in self._agents if agent.code is None)
        if room >= (smallest := self._settings.workers.smallest):
            return
        if room and await self._has_begun():
            return
        with suppress(TimeoutError):  # the message about the job's end may still be on its way
            async with asyncio.timeout(LAST_WORDS_S):
                await self._over.wait()
        if not self._over.is_set():
            missing = "".join(
                f"\n  host {agent.host.name}: {agent.why}" for agent in self._agents if agent.code is not None
            )
            raise LaunchError(f"the hosts that are left have room for {room} of {smallest} workers{missing}")

    async def _has_begun(self) -> bool:
        while True:
            try:
                status = await asyncio.to_thread(Control(self._address).status)
            except LaunchError:  # it is just starting; this host's own agent gives up if it never answers
                await asyncio.sleep(AGAIN_S)
            else:
                return int(status["generation"]) > 0

    async def _run(self, agent: _Agent) -> None:
        try:
            words = reach(self._engine, agent.host.name, self._settings.failure_timeout_s)
            agent.process = await asyncio.create_subprocess_exec(
                *words,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                start_new_session=True,
            )
        except (OSError, JobError) as error:
            agent.why = f"its command cannot be started: {error}"
            self._note(agent, FAILED)
            return
        self._group.guard.watch(agent.process.pid)
        assert agent.process.stdout is not None
        assert agent.process.stderr is not None
        timer = asyncio.get_running_loop().call_later(ANSWER_S, self._give_up, agent)
        try:
            await asyncio.gather(
                self._pump(agent, "out", agent.process.stdout), self._pump(agent, "err", agent.process.stderr)
            )
            code = await agent.process.wait()
        finally:
            timer.cancel()
        self._group.guard.forget(agent.process.pid)
        self._note(agent, code)
        if agent.has_answered and code not in (0, PREEMPTED) and not self._over.is_set():
            await self._report_end(agent)

    async def _report_end(self, agent: _Agent) -> None:
        """Tell the coordinator, in the agent's place, that it leaves: else that would wait for its return."""
        hello = AgentHello(agent=agent.id, host=this_host(), workers=agent.host.slots)
        is_over = asyncio.Event()

        async def greeting(_: str) -> list[FromAgent]:
            return [hello, AgentLeaving()]

        def handle(message: ToAgent) -> None:
            if isinstance(message, JobOver):  # the coordinator sends it to an agent that has left
                is_over.set()

        line = asyncio.create_task(CoordinatorLine(self._address, greeting, handle, LAST_WORDS_S).keep())
        reply = asyncio.create_task(is_over.wait())
        await asyncio.wait({line, reply}, timeout=LAST_WORDS_S, return_when=asyncio.FIRST_COMPLETED)
        for task in (line, reply):
            task.cancel()
        await asyncio.gather(line, reply, return_exceptions=True)

    def _give_up(self, agent: _Agent) -> None:
        if not agent.has_answered and agent.process is not None and agent.process.returncode is None:
            agent.why = f"it has not answered for {ANSWER_S:g} s"
            kill_group(agent.process.pid)

    def _note(self, agent: _Agent, code: int) -> None:
        agent.code = code
        if agent.why:
            pass
        elif not agent.has_answered:
            agent.why = explanation(self._engine, agent.host.name, code, [*agent.errors])
        elif code == FAILED:
            agent.why = "its agent was killed, or the connection to it was lost"
        else:
            agent.why = f"its agent ended with exit code {code}"
        if not self._over.is_set() and code:
            self._group.say(f"host {agent.host.name}: {agent.why}")

    async def _pump(self, agent: _Agent, stream: Stream, reader: asyncio.StreamReader) -> None:
        """Show the output of an agent, from its hello on."""
        splitter = LineSplitter()
        while data := await reader.read(CHUNK):
            await self._read(agent, stream, splitter.feed(data, time.monotonic()))
        await self._read(agent, stream, splitter.flush())

    async def _read(self, agent: _Agent, stream: Stream, lines: Sequence[str]) -> None:
        for number, line in enumerate(lines):
            if agent.has_answered:
                await asyncio.to_thread(self._terminal.show, agent.host.name, stream, lines[number:])
                break
            if stream == "out" and (hello := HostHello.from_line(line)) is not None:
                await self._send_order(agent, hello)
        if stream == "err":
            agent.errors.extend(lines)

    async def _send_order(self, agent: _Agent, hello: HostHello) -> None:
        if obstacle := hello.obstacle():
            agent.why = obstacle
            _close_input(agent)
            return
        assert agent.process is not None
        assert agent.process.stdin is not None
        agent.has_answered = True
        with suppress(ConnectionError):  # it has ended, which is noted with its exit code
            agent.process.stdin.write(self._order(agent).to_line())
            await agent.process.stdin.drain()

    def _order(self, agent: _Agent) -> HostOrder:
        certificate = self._address.certificate
        return HostOrder(
            url=self._address.url,
            is_seen_from_there=not self._settings.entrance.host,
            token=self._address.token,
            certificate="" if certificate is None else certificate.read_text(encoding="ascii"),
            folder=os.getcwd(),  # noqa: PTH109 (as text)
            agent=agent.id,
            words=join_words(self._settings, agent.host, self._run_dir),
            environment=self._environment,
        )


def _own_code(code: int | None) -> int | None:
    """The exit code of an agent; None if its command ended without one: it was killed, or ssh has failed."""
    return None if code is None or code < 0 or code == FAILED else code


def _close_input(agent: _Agent) -> None:
    if agent.process is not None and agent.process.stdin is not None:
        agent.process.stdin.close()
