"""Workers and agents without processes or training: their connections to a coordinator, and what they say there.

Protocol, messages, TLS and token are the real ones. Hundreds of workers share one process and its event loop.
"""

import asyncio
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from websockets.asyncio.client import ClientConnection, connect

from benchmarks.noticed import Noticed
from unisono.launch.elastic.address import Address
from unisono.launch.elastic.coordinator_process import CoordinatorLine
from unisono.membership.client import FLUSH_S, OPEN_S, PING_S, Outbox, Reconnection, open_connection
from unisono.membership.messages import (
    LONGEST_MESSAGE,
    AgentHello,
    Arrived,
    End,
    Formed,
    FromAgent,
    JobOver,
    Lost,
    NewGeneration,
    Probe,
    Probed,
    Progress,
    Pulse,
    Ready,
    Refused,
    RegroupDue,
    Removed,
    Start,
    StoreReply,
    StoreRequest,
    ToAgent,
    ToWorker,
    Welcome,
    WorkerEnded,
    WorkerHello,
    to_worker,
)

BEAT_S = 1.0
"""Between two heartbeats of a worker, in seconds, as in life."""

STEPS = 1000
"""Of a generation, as far as its members say: all of them arrive at the same one."""

PATIENCE_S = 300.0
KILLED = -9


@dataclass(frozen=True, slots=True)
class Place:
    """The world of a crowd.

    Attributes:
        address: the coordinator's address.
        tls: the TLS context that all connections share.
        shards: the job's number of shards.
        asks: whether its workers ask the store something behind each heartbeat, for heartbeats are not answered.
        noticed: a report that workers and agents add to.
        opened: an event after which workers connect.
        rests: an event after which nobody asks the store any more.
    """

    address: Address
    tls: Any
    shards: int
    asks: bool
    noticed: Noticed
    opened: asyncio.Event
    rests: asyncio.Event


class CrowdedWorker:
    """A worker that connects, becomes ready, is a member of generations and gives signs of life, and computes nothing.

    Args:
        name: its id.
        host: the name of its host.
        place: the world of its crowd.
        number: its number in the crowd.
    """

    def __init__(self, name: str, host: str, place: Place, number: int) -> None:
        self._place, self._number = place, number
        self._outbox = Outbox(WorkerHello(worker=name, host=host, pid=os.getpid(), shards=place.shards))
        self._reconnection = Reconnection(self._dial, self._talk, asyncio.sleep, lambda: self._outbox.is_over)
        self._news = asyncio.Event()
        self._socket: ClientConnection | None = None
        self._asked_at: dict[int, float] = {}
        self._greeted = False
        self._arrived = self._beats = 0

    async def live(self) -> None:
        """Keep the connection, until the coordinator wants no more of it, or this is cancelled."""
        await self._place.opened.wait()
        try:
            async with asyncio.TaskGroup() as tasks:
                beating = tasks.create_task(self._beat())
                await self._reconnection.keep()
                beating.cancel()
        finally:
            self._place.noticed.waiting -= len(self._asked_at)

    async def _beat(self) -> None:
        await asyncio.sleep(BEAT_S * (self._number * 0.618 % 1))  # spread over the second, as chance does it
        while True:
            if (generation := self._outbox.generation) > 0:
                self._beats += 1
                step = STEPS * (generation - 1) + self._beats
                pulse = Pulse(doing="call", still_s=0.1, longest_s=0.3)
                self._say(Progress(acts=step, step=step, samples_per_s=1000.0, loop=0, pulse=pulse))
                if self._place.asks and not self._place.rests.is_set():
                    self._ask()
            await asyncio.sleep(BEAT_S)

    def tear(self) -> None:
        """Lose the connection as a process that is killed does."""
        if self._socket is not None:
            self._socket.transport.abort()

    def _say(self, message: Any) -> None:
        self._outbox.put(message)
        self._news.set()

    def _ask(self) -> None:
        number, _ = self._outbox.put_request(StoreRequest(id=0, operation="check", keys=("run/benchmark",)))
        self._asked_at[number] = time.monotonic()
        self._place.noticed.waiting += 1
        self._news.set()

    def _dial(self) -> connect:
        self._place.noticed.dialled += 1
        address, wait_s = self._place.address, {"open_s": OPEN_S, "ping_s": PING_S, "close_s": FLUSH_S}
        return open_connection(
            address.url, "/worker", address.token, self._place.tls, max_bytes=2 * LONGEST_MESSAGE, **wait_s
        )

    async def _talk(self, socket: ClientConnection) -> None:
        self._socket = socket
        self._outbox.connected()
        sending = asyncio.create_task(self._send_all(socket))
        try:
            async for text in socket:
                assert isinstance(text, str), "messages are texts"
                self._reconnection.reset_pause()
                self._place.noticed.received += len(text)
                self._hear(to_worker.validate_json(text))
                if self._outbox.is_over:
                    break
        finally:
            self._outbox.disconnected()
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)

    async def _send_all(self, socket: ClientConnection) -> None:
        while True:
            self._news.clear()
            while (message := self._outbox.next) is not None:
                await socket.send(message.model_dump_json())
                self._outbox.sent(message)
            await self._news.wait()

    def _hear(self, message: ToWorker) -> None:
        self._outbox.receive(message)
        match message:
            case StoreReply(id=number):
                asked_at = self._asked_at.pop(number)
                self._place.noticed.waiting -= 1
                self._place.noticed.delays.append((asked_at, time.monotonic() - asked_at))
            case Welcome(joins=joins) if not self._greeted:
                self._greeted = True
                self._say(Ready(loop=0 if joins else None, address=f"127.0.0.1:{10000 + self._number}"))
            case NewGeneration(generation=number) if number > self._outbox.generation:
                self._enter(number)
            case RegroupDue(generation=number):
                self._arrive(number, at_boundary=True)
            case Lost(generation=number):
                self._arrive(number, at_boundary=False)
            case Removed(reason=why) | Refused(reason=why) | JobOver(reason=why):
                self._place.noticed.sent_away.append(why)

    def _enter(self, generation: int) -> None:
        self._outbox.enter(generation)
        self._beats = 0
        members, _ = self._place.noticed.heard.get(generation, (0, 0.0))
        self._place.noticed.heard[generation] = members + 1, time.monotonic()
        self._say(Formed(generation=generation, seconds={"regroup": 0.1, "form": 0.1, "copy": 0.1}))

    def _arrive(self, generation: int, *, at_boundary: bool) -> None:
        if generation != self._outbox.generation or generation == self._arrived:
            return
        self._arrived, step = generation, STEPS * generation
        self._say(Arrived(generation=generation, acts=step, loop=0, at_boundary=at_boundary, step=step))


class CrowdedAgent:
    """An agent whose workers are those of a crowd.

    Args:
        name: its id.
        room: the number of workers that it can run.
        probes: whether it says that it answers probes, and that it reaches all others.
        place: the world of its crowd.
        tasks: the group in which its workers live.
    """

    def __init__(self, name: str, room: int, probes: bool, place: Place, tasks: asyncio.TaskGroup) -> None:
        self._name, self._room, self._probes = name, room, probes
        self._place, self._tasks = place, tasks
        self._workers: dict[str, tuple[CrowdedWorker, asyncio.Task[None]]] = {}
        self._known: set[str] = set()
        self.line = CoordinatorLine(place.address, self._greeting, self._hear, PATIENCE_S)

    def lose(self, worker: str) -> bool:
        """Let a worker end as by ``kill -9``, and say so; whether it was one of this agent's."""
        if worker not in self._workers:
            return False
        self._place.noticed.torn[worker] = time.monotonic()
        self._end(worker, KILLED)
        return True

    async def _greeting(self, local_address: str) -> Sequence[FromAgent]:
        probes = f"{local_address}:9" if self._probes else ""
        return [
            AgentHello(
                agent=self._name, host=self._name, workers=self._room, running=tuple(self._workers), probes=probes
            )
        ]

    def _hear(self, message: ToAgent) -> None:
        match message:
            case Start(workers=names):
                for name in names:
                    self._begin(name)
            case End(workers=names):
                for name in names:
                    if name in self._workers:
                        self._end(name, KILLED)
            case Probe(targets=targets):
                self.line.send(Probed(reached=tuple(target.agent for target in targets)))
            case JobOver(reason=why):
                self._place.noticed.sent_away.append(why)

    def _begin(self, name: str) -> None:
        if name not in self._known:  # an agent that was away is told again
            self._known.add(name)
            worker = CrowdedWorker(name, self._name, self._place, int(name.removeprefix("w")))
            self._workers[name] = worker, self._tasks.create_task(worker.live())
            self._place.noticed.asked.append(name)

    def _end(self, name: str, code: int) -> None:
        worker, life = self._workers.pop(name)
        worker.tear()
        life.cancel()
        self.line.send(WorkerEnded(worker=name, code=code))
