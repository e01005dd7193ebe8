"""A worker's process: its connection to the coordinator, and how it ends."""

from __future__ import annotations

import base64
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING

from simulation.link import Link
from simulation.settings import FAULTS_END_S, SHARDS
from simulation.training import Training
from unisono.membership.client import ANSWER_S, Outbox
from unisono.membership.coordinator import WorkerSession
from unisono.membership.messages import (
    FromWorker,
    Leaving,
    Progress,
    Pulse,
    StoreReply,
    StoreRequest,
    WorkerHello,
    to_worker,
)
from unisono.train.group.publisher import AGAIN_S, Backlog

if TYPE_CHECKING:
    from simulation.host import Host
    from simulation.world import World

WATCH_S = 30.0
"""How long one question for a value waits."""

LATE_S = 75.0
"""How long a value may take to be there when nothing goes wrong any more."""


class Process:
    """A worker's process, whose main thread is :attr:`main`."""

    def __init__(self, world: World, name: str, host: Host) -> None:
        self.world = world
        self.name = name
        self.host = host
        self.alive = True
        self.hung = False
        self.leaving = False
        self.link: Link | None = None
        self.tells_loop = world.chance.random() < 0.5
        self.outbox = Outbox(WorkerHello(worker=name, host=host.name, pid=1, shards=SHARDS))
        self.main = Training(self)
        self.backlog = Backlog()
        self._asks = False
        world.later(world.soon(2.0), self.connect)
        world.later(2.5, self.beat)

    # -- its connection

    def connect(self) -> None:
        if not self.alive or self.hung or self.outbox.is_over or (self.link is not None and self.link.is_whole):
            return
        if not self.world.service.is_up:
            self.world.later(self.world.soon(1.0), self.connect)
            return
        self.link = Link(self.world, self, WorkerSession)
        self.outbox.connected()
        self._send_all()
        self.main.connected()

    def disconnected(self, link: Link) -> None:
        if self.alive and link is self.link:
            self.link = None
            self.outbox.disconnected()
            self.world.later(self.world.soon(1.0), self.connect)

    def say(self, message: FromWorker) -> None:
        self.outbox.put(message)
        self._send_all()

    def ask(self, request: StoreRequest, then: Callable[[StoreReply], None]) -> int:
        """Ask the store, and go on with its answer; the number of the request."""

        def answered(answer: Future[StoreReply]) -> None:
            if self.alive and not self.hung:
                then(answer.result())

        number, answer = self.outbox.put_request(request)
        answer.add_done_callback(answered)
        self._send_all()
        return number

    def _send_all(self) -> None:
        while self.link is not None and (message := self.outbox.next) is not None:
            self.link.say(message)
            self.outbox.sent(message)

    def receive(self, text: str) -> None:
        if not self.alive or self.hung:
            return
        message = to_worker.validate_json(text)
        answer = self.outbox.receive(message)
        if not isinstance(message, StoreReply):
            self.main.hear(message)
        elif answer is not None:
            answer.set_result(message)

    def beat(self) -> None:
        """Signs of life."""
        if self.alive and not self.hung:
            main = self.main
            still_s = 0.0 if main.stuck_since is None else self.world.now - main.stuck_since
            pulse = Pulse(doing="call" if main.is_still else "wait", still_s=still_s)
            loop = main.loop_now if self.tells_loop else None
            self.say(Progress(acts=main.acts, step=main.acts, loop=loop, pulse=pulse))
            self.world.later(2.5, self.beat)

    # -- published values

    def publish(self, name: str, value: str) -> None:
        """Make a value known to those who will join."""
        self.backlog.publish(f"run/{name}", base64.b64encode(value.encode()).decode())
        self._work_off()

    def lead(self, tells: bool) -> None:
        """Whether this worker tells the coordinator what is published."""
        self.backlog.lead(tells)
        self._work_off()

    def _work_off(self) -> None:
        if not self._asks and self.alive and not self.hung and (request := self.backlog.next()) is not None:
            self._asks = True
            number = self.ask(request, lambda reply: self._stored(request, reply))
            self.world.later(ANSWER_S, partial(self._give_up, number))

    def _stored(self, request: StoreRequest, reply: StoreReply) -> None:
        self._asks = False
        if self.backlog.take_reply(request, reply):
            self._work_off()
        else:
            self.world.later(AGAIN_S, self._work_off)

    def _give_up(self, number: int) -> None:
        if self.outbox.cancel(number):
            self._asks = False
            self._work_off()

    def watch(self, name: str, then: Callable[[str], None]) -> None:
        """Go on with a value as soon as it is known."""

        def answered(reply: StoreReply) -> None:
            if reply.error:
                known_since = self.world.life.published.get(name, self.world.now)
                assert self.world.now - max(known_since, FAULTS_END_S) < LATE_S, f"waits for {name} in vain"
                self.world.later(0.01, partial(self.watch, name, then))
            else:
                then(base64.b64decode(reply.value).decode())

        request = StoreRequest(id=0, operation="get", keys=(f"run/{name}",), timeout_s=WATCH_S)
        self.ask(request, answered)

    # -- its end

    def ask_to_leave(self) -> None:
        self.leaving = True
        if self.main.phase == "starting":
            self.die(-15)
        else:
            self.say(Leaving())

    def die(self, code: int, error: str = "") -> None:
        if not self.alive:
            return
        self.alive = False
        if self.link is not None:
            self.link.cut() if code < 0 else self.link.end()
        self.main.leave_group(abruptly=True)
        self.world.later(self.world.soon(), lambda: self.host.reap(self, code, error))
