"""What members make known to those who join reaches the coordinator, however long it is away and whoever is lost."""

import threading
from collections.abc import Iterator
from contextlib import closing

import pytest

from unisono.errors import JobError, LaunchError
from unisono.membership.keyvalue import KeyValue, Room
from unisono.membership.messages import StoreReply, StoreRequest
from unisono.train.group.publisher import Publisher, packed, unpacked

pytestmark = pytest.mark.unit

PATIENCE_S = 20.0
AGAIN_S = 0.01


class Store:
    """The coordinator's, as several workers ask it; it may be away."""

    def __init__(self, room: Room | None = None) -> None:
        self.values = KeyValue(room=room)
        self.here = threading.Event()
        self.here.set()
        self.asked: list[StoreRequest] = []
        self.failed = 0
        self._changed = threading.Condition()

    def ask(self, request: StoreRequest) -> StoreReply:
        with self._changed:
            self._changed.notify_all()
            if not self.here.is_set():
                self.failed += 1
                raise LaunchError("the coordinator did not answer")
            self.asked.append(request)
            [(_, reply)] = self.values.handle("w1", request, 0.0)
            return reply

    def value(self, key: str) -> str | None:
        reply = self.values.handle("test", StoreRequest(id=1, operation="get", keys=(key,)), 0.0)[0][1]
        return None if reply.error else reply.value

    def has(self, count: int) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: len(self.values) == count, PATIENCE_S)

    def was_missed(self, times: int) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self.failed >= times, PATIENCE_S)


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture
def members(store: Store) -> Iterator[list[Publisher]]:
    made = [Publisher(store.ask, AGAIN_S) for _ in range(3)]
    yield made
    for one in made:
        one.close()


def test_what_is_published_while_the_coordinator_is_away_is_told_again_until_it_is_answered(
    store: Store, members: list[Publisher]
) -> None:
    members[0].lead(True)
    store.here.clear()
    for number in range(3):
        members[0].publish(f"run/{number}", packed(number))
    assert store.was_missed(5)
    store.here.set()
    assert store.has(3)
    assert [unpacked(store.value(f"run/{number}") or "") for number in range(3)] == [0, 1, 2]


def test_whoever_is_left_tells_all_that_the_lost_one_has_not(store: Store, members: list[Publisher]) -> None:
    first, second, _ = members
    first.lead(True)
    for one in members:
        one.publish("run/0", packed(0))
    assert store.has(1)
    store.here.clear()
    for one in members:
        for number in range(1, 5):
            one.publish(f"run/{number}", packed(number))
    first.close()  # it is killed
    second.lead(True)
    assert store.was_missed(2)
    store.here.set()
    assert store.has(5)


def test_what_is_there_already_is_asked_for_at_once_and_not_told_again(store: Store, members: list[Publisher]) -> None:
    first, second, _ = members
    first.lead(True)
    for number in range(100):
        for one in members:
            one.publish(f"run/{number}", packed(number))
    assert store.has(100)
    store.asked.clear()
    second.lead(True)
    assert second.wait(0, PATIENCE_S)
    assert [request.operation for request in store.asked] == ["check"]
    second.publish("run/100", packed(100))
    assert store.has(101)
    assert [request.operation for request in store.asked] == ["check", "set"]


def test_who_tells_nobody_keeps_no_more_than_it_has_to(store: Store) -> None:
    with closing(Publisher(store.ask, AGAIN_S, many=10)) as tells, closing(Publisher(store.ask, AGAIN_S, 10)) as other:
        tells.lead(True)
        for number in range(100):
            for one in (tells, other):
                one.publish(f"run/{number}", packed(number))
        assert store.has(100)
        assert other.wait(10, PATIENCE_S)


def test_who_joins_is_told_what_the_coordinator_had_no_room_for() -> None:
    store = Store(Room(store=4000))
    with closing(Publisher(store.ask, AGAIN_S)) as member:
        member.lead(True)
        member.publish("run/0", packed("x" * 5000))
        assert store.has(1)
    with pytest.raises(JobError, match="the coordinator does not keep it: the store is full"):
        unpacked(store.value("run/0") or "")
