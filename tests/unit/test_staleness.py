"""Nobody's gradient becomes staler than the bound, and nobody waits for ever."""

import copy
import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unisono_lab.strategies.parameter_server import StalenessBound

pytestmark = pytest.mark.unit

SERVERS = 2


@dataclass
class Worker:
    """One that reads, computes and pushes, over and over; what is in the way of each server goes at its own pace."""

    number: int
    does: str = "waits"
    pulled: dict[int, int] = field(default_factory=dict)
    pushed: set[int] = field(default_factory=set)


class Servers:
    """Workers that read from and push to servers, in a random order.

    Attributes:
        read: the workers that have read, in the order in which they did.
        staleness: of all gradients.
    """

    def __init__(self, workers: int, bound: int | None, seed: int) -> None:
        self.chance = random.Random(seed)
        self.grants = StalenessBound(bound)
        self.workers = [Worker(number) for number in range(workers)]
        self.read: list[int] = []
        self.versions = [0] * SERVERS
        self.staleness: list[int] = []

    def move(self, worker: Worker) -> bool:
        """One thing happens to a worker; false if it has to wait."""
        server = self.chance.randrange(SERVERS)
        match worker.does:
            case "waits":
                if not self.grants.read(worker.number):
                    return False
                worker.does, worker.pulled, worker.pushed = "pulls", {}, set()
                self.read.append(worker.number)
            case "pulls":
                worker.pulled.setdefault(server, self.versions[server])
                if len(worker.pulled) == SERVERS:
                    worker.does = "computes"
            case "computes":
                if not self.grants.push(worker.number):
                    return False
                worker.does = "pushes"
                self.read.remove(worker.number)
            case "pushes":
                if server not in worker.pushed:
                    worker.pushed.add(server)
                    self.staleness.append(self.versions[server] - worker.pulled[server])
                    self.versions[server] += 1
                if len(worker.pushed) == SERVERS:
                    self.grants.arrived(worker.number)
                    worker.does = "waits"
        return True

    @property
    def is_calm(self) -> bool:
        """Whether no push is on its way."""
        return all(worker.does != "pushes" for worker in self.workers)


cases = given(workers=st.integers(1, 6), bound=st.none() | st.integers(0, 7), seed=st.integers(0, 2**32))


@settings(max_examples=60)
@cases
def test_the_staleness_never_exceeds_the_bound_whatever_overtakes_what(
    workers: int, bound: int | None, seed: int
) -> None:
    servers = Servers(workers, bound, seed)
    for _ in range(80):
        servers.move(servers.chance.choice(servers.workers))
    assert bound is None or max(servers.staleness, default=0) <= bound


@settings(max_examples=60)
@cases
def test_the_one_that_read_first_may_push_as_soon_as_nothing_is_on_its_way(
    workers: int, bound: int | None, seed: int
) -> None:
    servers = Servers(workers, bound, seed)
    for _ in range(80):
        servers.move(servers.chance.choice(servers.workers))
        if servers.is_calm and servers.read:
            assert copy.deepcopy(servers.grants).push(servers.read[0])


@settings(max_examples=60)
@cases
def test_nobody_waits_for_ever(workers: int, bound: int | None, seed: int) -> None:
    servers = Servers(workers, bound, seed)
    for _ in range(100):
        servers.move(servers.chance.choice(servers.workers))
    for worker in servers.workers:  # each in turn makes one update more, as long as the others get on as well
        turns = 0
        made = False
        while not made:
            turns += 1
            assert turns < 200 * workers, f"worker {worker.number} waits for ever"
            before = worker.does
            servers.move(worker)
            made = before == "pushes" and worker.does == "waits"
            servers.move(servers.chance.choice(servers.workers))


def test_with_no_limit_everybody_reads_and_pushes_at_once() -> None:
    grants = StalenessBound(None)
    assert all(grants.read(worker) for worker in range(100))
    assert all(grants.push(worker) for worker in reversed(range(100)))


def test_with_staleness_0_one_after_the_other_reads_and_pushes() -> None:
    grants = StalenessBound(0)
    assert grants.read(0)
    assert not grants.read(1)
    assert grants.push(0)
    assert not grants.read(1)  # what was pushed may not be there yet
    grants.arrived(0)
    assert grants.read(1)


def test_a_push_on_its_way_is_not_overtaken_too_often() -> None:
    grants = StalenessBound(1)
    assert grants.read(0)
    assert grants.read(1)
    assert grants.push(0)
    assert grants.push(1)  # and arrives first: then worker 0's gradient is one update stale
    grants.arrived(1)
    assert grants.read(1)
    assert not grants.push(1)  # it might arrive first again
    grants.arrived(0)
    assert grants.push(1)


def test_what_was_read_and_is_not_going_to_be_used_holds_nobody_up() -> None:
    grants = StalenessBound(0)
    assert grants.read(0)
    assert not grants.read(1)
    grants.give_up(0)
    grants.give_up(0)
    assert grants.read(1)
