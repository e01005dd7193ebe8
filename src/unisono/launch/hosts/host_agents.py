"""The agents of other hosts: started over ssh, listened to, and ended with this launcher however that ends."""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from unisono.errors import PREEMPTED, LaunchError
from unisono.host.guard import kill_group
from unisono.launch.elastic.address import Address, Control
from unisono.launch.elastic.agent import new_agent, this_host
from unisono.launch.elastic.coordinator_line import CoordinatorLine
from unisono.launch.elastic.elastic import AgentEnd
from unisono.launch.elastic.host_order import HostOrder
from unisono.launch.hosts.hostfile import HostSlots
from unisono.launch.hosts.order import HostHello
from unisono.launch.hosts.ssh import FAILED, Ssh, explained
from unisono.launch.terminal.output import LineSplitter
from unisono.launch.terminal.terminal import Stream, Terminal
from unisono.launch.worker_group import WorkerGroup
from unisono.membership.agent_messages import AgentHello, AgentLeaving, FromAgent, ToAgent
from unisono.membership.messages import JobOver

ANSWER_S = 90.0
"""How long a host may take from the start of ssh to its hello: Python may lie on a slow file system."""

LAST_WORDS_S = 5.0
"""How long the coordinator's last message may take after the end of the last host's agent."""

ENDS_S = 10.0
"""How long an agent may take to end when its standard input has ended."""

AGAIN_S = 0.5

CHUNK = 2**16
KEPT_LINES = 5


@dataclass(eq=False, slots=True)
class _Agent:
    """The agent of a host, as far as ssh tells."""

    host: HostSlots
    id: str = field(default_factory=new_agent)
    process: asyncio.subprocess.Process | None = None
    has_answered: bool = False
    code: int | None = None
    why: str = ""
    said: deque[str] = field(default_factory=lambda: deque(maxlen=KEPT_LINES))


class HostAgents:
    """Agents of other hosts, for one job. Runs inside of an event loop.

    Each ssh has a pipe to this process for its standard input. However this process ends, that ends as well, and with
    it the agent there.

    Args:
        hosts: the hosts.
        ssh: the command that reaches them.
        order: a function that makes what a host is told, given the id of its agent and the coordinator's address.
        smallest: the fewest workers with which the job may begin.
        here: the number of workers for which this host has room.
        silence_s: the seconds of silence after which a host counts as lost.
        terminal: the terminal that shows what the hosts' agents write.
    """

    def __init__(
        self,
        hosts: Sequence[HostSlots],
        ssh: Ssh,
        order: Callable[[HostSlots, str, Address], HostOrder],
        *,
        smallest: int,
        here: int,
        silence_s: float,
        terminal: Terminal,
    ) -> None:
        self._agents = [_Agent(host) for host in hosts]
        self._ssh, self._order, self._terminal = ssh, order, terminal
        self._smallest, self._here, self._silence_s = smallest, here, silence_s
        self._over = asyncio.Event()
        self._address: Address
        self._group: WorkerGroup

    @property
    def are_gone(self) -> bool:
        """Whether all of them have ended."""
        return all(agent.code is not None for agent in self._agents)

    @property
    def ends(self) -> list[AgentEnd]:
        """How each has ended, once the job is over; whoever has not is lost."""
        return [AgentEnd(one.id, f"host {one.host.name}", _own_code(one.code)) for one in self._agents]

    async def keep(self, address: Address, group: WorkerGroup, gone: Callable[[], None]) -> None:
        """Start them, and watch them until all have ended.

        Args:
            address: the coordinator's address.
            group: the processes of this host.
            gone: a function that is called when an agent has ended.

        Raises:
            LaunchError: too few are left for the job; names each host that has none, and says what to do.
        """
        self._address, self._group = address, group
        running = {asyncio.create_task(self._live(agent)) for agent in self._agents}
        try:
            while running:
                done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
                gone()
                await self._require_enough()
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    def job_is_over(self) -> None:
        """From now on their ends are nothing to tell of."""
        self._over.set()

    def end(self) -> None:
        """Have them end now."""
        for agent in self._agents:
            _hang_up(agent)

    async def close(self) -> None:
        """Have them end, and wait until they have; in bounded time."""
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
        if room >= self._smallest:
            return
        if room and await self._has_begun():
            return
        with suppress(TimeoutError):  # the job's end may be on its way
            async with asyncio.timeout(LAST_WORDS_S):
                await self._over.wait()
        if not self._over.is_set():
            missing = "".join(f"\n  host {one.host.name}: {one.why}" for one in self._agents if one.code is not None)
            raise LaunchError(f"the hosts that are left have room for {room} of {self._smallest} workers{missing}")

    async def _has_begun(self) -> bool:
        while True:
            try:
                found = await asyncio.to_thread(Control(self._address).status)
            except LaunchError:  # it is just starting; who waits for it in vain is this host's own agent
                await asyncio.sleep(AGAIN_S)
            else:
                return int(found["generation"]) > 0

    async def _live(self, agent: _Agent) -> None:
        """An agent's life."""
        words = self._ssh.words(agent.host.name, self._silence_s)
        try:
            agent.process = await asyncio.create_subprocess_exec(
                *words,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as error:
            agent.why = f"{words[0]} cannot be started: {error}"
            self._note(agent, FAILED)
            return
        self._group.guard.watch(agent.process.pid)
        assert agent.process.stdout is not None
        assert agent.process.stderr is not None
        late = asyncio.get_running_loop().call_later(ANSWER_S, self._give_up, agent)
        try:
            await asyncio.gather(
                self._pump(agent, "out", agent.process.stdout), self._pump(agent, "err", agent.process.stderr)
            )
            code = await agent.process.wait()
        finally:
            late.cancel()
        self._group.guard.forget(agent.process.pid)
        self._note(agent, code)
        if agent.has_answered and code not in (0, PREEMPTED) and not self._over.is_set():
            await self._tell_of_its_end(agent)

    async def _tell_of_its_end(self, agent: _Agent) -> None:
        """Say to the coordinator, in the agent's place, that its workers have ended: it would wait for its return."""
        hello = AgentHello(agent=agent.id, host=this_host(), workers=agent.host.slots)
        told = asyncio.Event()

        async def greeting(_: str) -> list[FromAgent]:
            return [hello, AgentLeaving()]

        def hear(message: ToAgent) -> None:
            if isinstance(message, JobOver):  # for an agent that has left
                told.set()

        line = asyncio.create_task(CoordinatorLine(self._address, greeting, hear, LAST_WORDS_S).keep())
        heard = asyncio.create_task(told.wait())
        await asyncio.wait({line, heard}, timeout=LAST_WORDS_S, return_when=asyncio.FIRST_COMPLETED)
        for task in (line, heard):
            task.cancel()
        await asyncio.gather(line, heard, return_exceptions=True)

    def _give_up(self, agent: _Agent) -> None:
        if not agent.has_answered and agent.process is not None and agent.process.returncode is None:
            agent.why = f"it has not answered for {ANSWER_S:g} s"
            kill_group(agent.process.pid)

    def _note(self, agent: _Agent, code: int) -> None:
        agent.code = code
        if agent.why:
            pass
        elif not agent.has_answered:
            agent.why = explained(self._ssh, agent.host.name, code, [*agent.said])
        elif code == FAILED:
            agent.why = "its agent was killed, or the connection to it was lost"
        else:
            agent.why = f"its agent ended with exit code {code}"
        if not self._over.is_set() and code:
            self._group.say(f"host {agent.host.name}: {agent.why}")

    async def _pump(self, agent: _Agent, stream: Stream, reader: asyncio.StreamReader) -> None:
        """Show what an agent writes, from its hello on."""
        splitter = LineSplitter()
        while data := await reader.read(CHUNK):
            await self._hear(agent, stream, splitter.feed(data, time.monotonic()))
        await self._hear(agent, stream, splitter.flush())

    async def _hear(self, agent: _Agent, stream: Stream, lines: Sequence[str]) -> None:
        for at, line in enumerate(lines):
            if agent.has_answered:
                await asyncio.to_thread(self._terminal.show, agent.host.name, stream, lines[at:])
                break
            if stream == "out" and (hello := HostHello.from_line(line)) is not None:
                await self._answer(agent, hello)
        if stream == "err":
            agent.said.extend(lines)

    async def _answer(self, agent: _Agent, hello: HostHello) -> None:
        if obstacle := hello.obstacle():
            agent.why = obstacle
            _hang_up(agent)
            return
        assert agent.process is not None
        assert agent.process.stdin is not None
        agent.has_answered = True
        with suppress(ConnectionError):  # its end tells more
            agent.process.stdin.write(self._order(agent.host, agent.id, self._address).to_line())
            await agent.process.stdin.drain()


def _own_code(code: int | None) -> int | None:
    """The exit code of an agent; None if ssh has ended without it."""
    return None if code is None or code < 0 or code == FAILED else code


def _hang_up(agent: _Agent) -> None:
    if agent.process is not None and agent.process.stdin is not None:
        agent.process.stdin.close()
