"""The devices of a worker hear the same in the same order, and its first one speaks for all."""

import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest

from unisono.errors import LaunchError, WorkerLost
from unisono.membership.messages import JobOver, Lost, Ready, RegroupDue, StoreReply, StoreRequest, Welcome
from unisono.train.group.device_line import GONE, DeviceLine, FirstLine
from unisono.train.group.device_messages import Agreed, ToDevice, Watched, WorkedOut

pytestmark = pytest.mark.unit

PATIENCE_S = 20.0


class Board:
    """A store that devices share."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()

    def post(self, name: str, value: bytes) -> None:
        with self._changed:
            self._values[name] = value
            self._changed.notify_all()

    def read(self, name: str) -> bytes:
        with self._changed:
            assert self._changed.wait_for(lambda: name in self._values, PATIENCE_S)
            return self._values[name]


class Outside:
    """The connection to a coordinator that answers each request with its key."""

    url, local_address, generation, silent_s = "http://127.0.0.1:1", "127.0.0.1", 0, 0.0

    def __init__(self, hear: Callable[[Any], None]) -> None:
        self.hear, self.kept, self.sent = hear, list[object](), queue.SimpleQueue[Any]()

    def send(self, message: Any) -> None:
        self.sent.put(message)

    def request(self, request: StoreRequest, answer_s: float = 0.0) -> StoreReply:
        if request.keys[0] == "refused":
            raise LaunchError("no")
        return StoreReply(id=99, value=request.keys[0])

    def close(self) -> None:
        """Nothing is open."""


class Group:
    """A worker of three devices.

    Attributes:
        heard: what each device has heard.
    """

    def __init__(self) -> None:
        board = Board()
        self.heard = [queue.SimpleQueue[ToDevice]() for _ in range(3)]
        self.others: dict[int, DeviceLine] = {}

        def call(device: int) -> None:
            put = self.heard[device].put
            self.others[device] = DeviceLine(device, board, Outside.url, put, PATIENCE_S)

        calling = [threading.Thread(target=call, args=(device,)) for device in (1, 2)]
        for each in calling:
            each.start()
        self.first = FirstLine(3, board, self._open, self.heard[0].put, PATIENCE_S)
        for each in calling:
            each.join()

    def _open(self, hear: Callable[[Any], None]) -> Any:
        self.outside = Outside(hear)
        return self.outside

    def line(self, device: int) -> FirstLine | DeviceLine:
        return self.others[device] if device else self.first

    def hears(self, device: int) -> ToDevice:
        return self.heard[device].get(timeout=PATIENCE_S)

    def close(self) -> None:
        for device in (1, 2, 0):
            self.line(device).close()


@pytest.fixture
def group() -> Iterator[Group]:
    found = Group()
    yield found
    found.close()


def test_what_the_coordinator_says_all_devices_hear_in_its_order(group: Group) -> None:
    said: list[ToDevice] = [Welcome(joins=False), RegroupDue(generation=1), Lost(generation=1)]
    for each in said:
        group.outside.hear(each)
    said.append(Watched(name="a", value="b"))
    group.first.deliver(said[-1])
    assert [[group.hears(device) for _ in said] for device in range(3)] == 3 * [said]


def test_the_coordinator_is_told_what_all_devices_say_and_they_what_they_agree_on(group: Group) -> None:
    for device in (2, 0, 1):
        group.line(device).send(Ready(address=str(device)))
        group.line(device).send(WorkedOut(generation=1, acts=2))
    assert group.outside.sent.get(timeout=PATIENCE_S) == Ready(address="0,1,2")
    assert [group.hears(device) for device in range(3)] == 3 * [Agreed(generation=1, acts=2, holds=True)]


def test_every_device_asks_the_coordinators_store(group: Group) -> None:
    asked = StoreRequest(id=0, operation="get", keys=("key",))
    assert [group.line(device).request(asked).value for device in range(3)] == 3 * ["key"]
    assert group.line(1).request(asked.model_copy(update={"keys": ("refused",)})).error == "no"
    assert {group.line(device).local_address for device in range(3)} == {"127.0.0.1"}


def test_a_device_that_is_gone_ends_the_worker_on_all_others(group: Group) -> None:
    group.others[1]._connection.shutdown(2)
    over = JobOver(reason=GONE)
    assert group.hears(0) == group.hears(2) == over
    assert group.hears(1) == over


def test_a_first_device_that_is_gone_ends_the_others_and_answers_what_they_ask(group: Group) -> None:
    group.first.close()
    assert group.hears(1) == group.hears(2) == JobOver(reason=GONE)
    with pytest.raises(LaunchError, match="another device of this worker is gone"):
        for _ in range(1000):  # it may hear of the end a little later
            group.line(1).request(StoreRequest(id=0, operation="get", keys=("key",)))


def test_the_end_of_a_job_is_no_loss_of_a_device(group: Group) -> None:
    over = JobOver(digest="d")
    group.outside.hear(over)
    assert [group.hears(device) for device in range(3)] == 3 * [over]
    group.close()
    assert [each.empty() for each in group.heard] == 3 * [True]


def test_a_first_device_waits_for_the_others_no_longer_than_it_may() -> None:
    with pytest.raises(WorkerLost, match="waited in vain"):
        FirstLine(2, Board(), cast("Any", None), cast("Any", None), 0.05)


def test_a_door_that_is_none_is_refused() -> None:
    board = Board()
    board.post("device line", b"/tmp/somewhere")
    with pytest.raises(WorkerLost, match="posted address .* is not valid"):
        DeviceLine(1, board, "", cast("Any", None), PATIENCE_S)
