"""An elastic worker between two generations: what is heard late of the one before closes no listener of the next."""

import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import partial
from typing import Any

import pytest

from unisono.errors import LaunchError, WorkerLost
from unisono.membership.messages import (
    Arrived,
    JobOver,
    Lost,
    Message,
    Neighbour,
    NewGeneration,
    Ranks,
    Ready,
    Refused,
    StoreReply,
    StoreRequest,
    Target,
    ToWorker,
    Unreached,
    Welcome,
    WorkerHello,
)
from unisono.membership.rendezvous import Generation
from unisono.reduce.transport import Solo
from unisono.train.group.elastic import Elastic
from unisono.train.group.liveness import Probing, Report
from unisono.train.group.meeting import Rendezvous
from unisono.train.group.membership import MemberProgress, StateTransfer
from unisono.train.group.publisher import Publisher
from unisono.train.group.workers import Workers

pytestmark = pytest.mark.unit

PATIENCE_S = 20.0


class Line:
    """To a coordinator that the test plays."""

    def __init__(self, hear: Callable[[ToWorker], None]) -> None:
        self.hear = hear
        self.generation = 0
        self.addresses: list[str] = []
        self.arrived = threading.Event()
        self.unreached: tuple[Unreached, ...] = ()
        self.requests: list[StoreRequest] = []
        self.silent_s = 0.0
        self.answered = threading.Event()
        self.kept: list[Any] = []

    def send(self, message: Message) -> None:
        if isinstance(message, Ready):
            self.addresses.append(message.address)
            self.announce(1)
        elif isinstance(message, Arrived):
            self.addresses.append(message.address)
            self.unreached = message.unreached
            self.arrived.set()

    def announce(self, generation: int, probes: str = "") -> None:
        mine = Neighbour(rank=0, worker="w1", address=self.addresses[-1])
        others = (Target(agent="b", host="i", address=probes),) if probes else ()
        ranks = (Ranks(workers=2, shards=2) if others else Ranks(workers=1, shards=4),)
        self.hear(NewGeneration(generation=generation, ranks=ranks, here=(mine,), hosts=others, source=0))

    def request(self, request: StoreRequest) -> StoreReply:
        self.requests.append(request)
        if len(self.requests) < 3:
            raise LaunchError("the coordinator did not answer")
        self.answered.set()
        return StoreReply(id=1)

    def close(self) -> None:
        """Nothing to close."""


class Host:
    """A worker, its line, and the listeners with which it formed generations."""

    def __init__(self, timeout_s: float = PATIENCE_S) -> None:
        self.forms: Callable[[Rendezvous], None] = lambda rendezvous: None
        self.patience_s = 0.1

        def call(hear: Callable[[ToWorker], None]) -> Any:
            self.line = Line(hear)
            hear(Welcome(joins=False))
            return self.line

        def form(generation: Generation, rendezvous: Rendezvous) -> Workers:
            self.forms(rendezvous)
            return Workers(generation, Solo(4))

        def probe(targets: Sequence[Target], tell: Report) -> Probing:
            return Probing(targets, "t" * 43, self.patience_s, tell)

        hello = WorkerHello(worker="w1", host="h", pid=1, shards=4)
        self.elastic = Elastic(call, hello, form, timeout_s, probe, PATIENCE_S / 2, partial(Publisher, again_s=0.01))

    def regroup(self) -> tuple[threading.Thread, list[Any]]:
        found: list[Any] = []

        def go() -> None:
            try:
                found.append(self.elastic.regroup(WorkerLost("gone"), MemberProgress(1)))
            except WorkerLost as error:
                found.append(error)

        self.line.arrived.clear()
        thread = threading.Thread(target=go)
        thread.start()
        assert self.line.arrived.wait(PATIENCE_S)
        return thread, found


@pytest.fixture
def host() -> Iterator[Host]:
    made = Host()
    yield made
    made.elastic.close()


def test_whoever_does_not_reach_a_host_of_its_generation_stops_waiting_for_it_and_says_so(host: Host) -> None:
    host.forms = lambda rendezvous: rendezvous._listener.gather(0, 2, ())  # type: ignore[attr-defined]
    thread, found = host.regroup()
    host.line.announce(2, probes="127.0.0.1:1")
    thread.join(PATIENCE_S / 2)
    assert isinstance(found[0], WorkerLost)
    assert "out of reach (b: " in str(found[0])
    thread, found = host.regroup()
    assert [each.agent for each in host.line.unreached] == ["b"]
    host.forms = lambda rendezvous: None
    host.line.announce(3)
    thread.join(PATIENCE_S)
    assert isinstance(found[0], StateTransfer)
    thread, found = host.regroup()
    assert host.line.unreached == ()
    host.line.announce(4)
    thread.join(PATIENCE_S)


def test_probes_end_as_soon_as_a_generation_has_formed(host: Host) -> None:
    host.patience_s = 10 * PATIENCE_S
    with socket.create_server(("127.0.0.1", 0)) as silent:
        thread, found = host.regroup()
        host.line.announce(2, probes=f"127.0.0.1:{silent.getsockname()[1]}")
        thread.join(PATIENCE_S)
    assert isinstance(found[0], StateTransfer)
    assert not [each for each in threading.enumerate() if each.name == "unisono-probe"]


def test_a_loss_that_is_heard_of_late_leaves_the_door_to_the_next_generation_open(host: Host) -> None:
    thread, found = host.regroup()
    listener = host.elastic._listener
    host.line.hear(Lost(generation=1, workers=("w2",)))
    assert listener.address.hex() == host.line.addresses[-1]  # a closed one has no address
    host.line.announce(2)
    thread.join(PATIENCE_S)
    assert isinstance(found[0], StateTransfer)


def test_whoever_hears_nothing_of_the_coordinator_for_too_long_is_away_unless_it_was_told_that_all_is_over(
    host: Host,
) -> None:
    host.line.silent_s = 9.9
    assert host.elastic.away() == ""
    host.line.silent_s = 10.1
    assert host.elastic.away() == "no word from the coordinator for 10.1 s, so the job may go on without this worker"
    host.line.hear(JobOver(digest="d"))
    assert host.elastic.away() == ""


def test_whoever_has_finished_waits_for_the_others_as_long_as_the_coordinator_is_heard_of() -> None:
    host = Host(timeout_s=0.05)
    with closing(host.elastic):
        waiting = threading.Thread(target=host.elastic.finished, args=("d",))
        waiting.start()
        waiting.join(20 * 0.05)
        assert waiting.is_alive()
        host.line.hear(JobOver(digest="d"))
        waiting.join(PATIENCE_S)
        assert not waiting.is_alive()


def test_whoever_has_finished_does_not_wait_for_a_coordinator_that_is_gone(host: Host) -> None:
    host.line.silent_s = PATIENCE_S + 0.1
    waiting = threading.Thread(target=host.elastic.finished, args=("d",))
    waiting.start()
    waiting.join(PATIENCE_S)
    assert not waiting.is_alive()


def test_whoever_is_turned_away_is_away(host: Host) -> None:
    host.line.hear(Refused(reason="w1 was given up"))
    assert host.elastic.away() == "the coordinator turns this worker away: w1 was given up"


def test_what_is_published_is_told_again_until_the_coordinator_answers(host: Host) -> None:
    host.elastic.publish("act/0/0", 1)
    assert host.line.answered.wait(PATIENCE_S)
    assert [request.keys for request in host.line.requests] == [("run/act/0/0",)] * 3


def test_whoever_waits_for_the_others_of_a_generation_wakes_when_one_of_them_has_given_up(host: Host) -> None:
    waits = threading.Event()

    def wait_for_a_caller(rendezvous: Any) -> None:
        waits.set()
        rendezvous._listener.gather(0, 2, ())

    host.forms = wait_for_a_caller
    thread, found = host.regroup()
    host.line.announce(2)
    assert waits.wait(PATIENCE_S)
    host.line.hear(Lost(generation=2))
    thread.join(PATIENCE_S / 2)
    assert isinstance(found[0], WorkerLost)
