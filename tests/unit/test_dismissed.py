"""A worker that is dismissed ends at once and without an error, wherever in its script it stands."""

import base64
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NoReturn

import pytest

from unisono.errors import Dismissed, WorkerLost
from unisono.launch.failure import dismissal_in
from unisono.membership.messages import (
    Arrived,
    JobOver,
    Message,
    Neighbour,
    NewGeneration,
    Ranks,
    Ready,
    Removed,
    StoreReply,
    StoreRequest,
    ToWorker,
    Welcome,
    WorkerHello,
)
from unisono.reduce.transport import Solo
from unisono.train.group.collectives import CollectiveCalls
from unisono.train.group.elastic import Elastic
from unisono.train.group.membership import Recovers
from unisono.train.group.workers import Workers

pytestmark = pytest.mark.unit

SURPLUS = Removed(reason="the job goes on with 1 workers")
PREEMPTED = Removed(reason="all were asked to leave", preempted=True)


class Line:
    """To a coordinator that answers one question, or one kind of message, by the end of this worker's part."""

    def __init__(self, hear: Callable[[ToWorker], None], farewell: ToWorker, after: type[Message]) -> None:
        self.hear, self.farewell, self.after = hear, farewell, after
        self.generation = 0
        self.kept: list[Any] = []
        self.closed = threading.Event()

    def send(self, message: Message) -> None:
        if isinstance(message, self.after):
            self.hear(self.farewell)
        elif isinstance(message, Ready) and message.loop is None:
            here = (Neighbour(rank=0, worker="w1", address=message.address),)
            self.hear(NewGeneration(generation=1, ranks=(Ranks(workers=1, shards=4),), here=here, source=0))

    def request(self, request: StoreRequest) -> StoreReply:
        if request.operation == "get" and self.after is StoreRequest:
            self.hear(self.farewell)
        if request.operation == "get":
            self.closed.wait(0.05)  # nobody makes it known
            return StoreReply(id=request.id, error="timeout")
        return StoreReply(id=request.id, value=base64.b64encode(b"").decode())

    def close(self) -> None:
        self.closed.set()


Opened = Callable[..., Elastic]


@pytest.fixture
def opened() -> Iterator[Opened]:
    made: list[Elastic] = []

    def open_one(*, joins: bool, after: type[Message], farewell: ToWorker = SURPLUS) -> Elastic:
        def call(hear: Callable[[ToWorker], None]) -> Any:
            hear(farewell if after is WorkerHello else Welcome(joins=joins))
            return Line(hear, farewell, after)

        hello = WorkerHello(worker="w1", host="h", pid=1, shards=4)
        made.append(Elastic(call, hello, lambda generation, rendezvous: Workers(generation, Solo(4)), 20.0))
        return made[-1]

    yield open_one
    for one in made:
        one.close()


def lose(workers: Workers) -> None:
    raise WorkerLost("the others regroup")


def agree(acts: CollectiveCalls) -> None:
    acts.agree("model", {"layer": 1})


def enter(acts: CollectiveCalls) -> None:
    acts.enter(0)


def evaluate(acts: CollectiveCalls) -> None:
    acts.together(lose)


def regroup(acts: CollectiveCalls) -> None:
    acts.regroup(None, at_boundary=True)


def await_end(acts: CollectiveCalls) -> None:
    acts.await_end()


PLACES = [
    pytest.param(agree, True, StoreRequest, id="a joiner catches up"),
    pytest.param(enter, True, Ready, id="a joiner waits to be taken in"),
    pytest.param(evaluate, False, Arrived, id="a member loses the others in a call"),
    pytest.param(regroup, False, Arrived, id="a member stands at a boundary"),
]


@pytest.mark.parametrize(("stands", "joins", "after"), PLACES)
def test_a_dismissed_worker_exits_with_code_0_wherever_it_stands(
    stands: Callable[[CollectiveCalls], None], joins: bool, after: type[Message], opened: Opened
) -> None:
    departed: list[str] = []

    class Noting(Recovers):
        def depart(self, dismissed: Dismissed) -> NoReturn:
            departed.append(dismissed.reason)
            raise dismissed

    acts = CollectiveCalls(opened(joins=joins, after=after), Noting())
    with pytest.raises(SystemExit) as left:
        stands(acts)
    assert (left.value.code, departed) == (0, [SURPLUS.reason])


@pytest.mark.parametrize(("stands", "joins", "after"), PLACES)
def test_a_script_that_catches_everything_is_told_again_instead_of_waiting_for_ever(
    stands: Callable[[CollectiveCalls], None], joins: bool, after: type[Message], opened: Opened
) -> None:
    acts = CollectiveCalls(opened(joins=joins, after=after))
    for place in (stands, stands, regroup, await_end):
        with pytest.raises(Dismissed):
            place(acts)


@pytest.mark.parametrize("after", [WorkerHello, Ready], ids=["as it connects", "as it waits for the first generation"])
@pytest.mark.parametrize("farewell", [SURPLUS, PREEMPTED, JobOver(digest="abc")], ids=["surplus", "preempted", "done"])
def test_a_worker_that_is_dismissed_before_there_is_a_run_exits_with_code_0(
    after: type[Message], farewell: ToWorker, opened: Opened
) -> None:
    with pytest.raises(SystemExit) as left:
        opened(joins=False, after=after, farewell=farewell)
    assert left.value.code == 0


def test_the_end_of_the_job_is_told_again_too(opened: Opened) -> None:
    acts = CollectiveCalls(opened(joins=True, after=Ready, farewell=JobOver(digest="abc")))
    for _ in range(2):
        with pytest.raises(SystemExit) as left:
            acts.enter(0)
        assert left.value.code == 0


def test_a_dismissal_in_a_thread_of_the_script_ends_the_main_thread_at_its_next_call(opened: Opened) -> None:
    acts = CollectiveCalls(opened(joins=False, after=Arrived))
    with ThreadPoolExecutor(1) as pool:
        assert isinstance(pool.submit(evaluate, acts).exception(20.0), SystemExit)  # of which a thread says nothing
    with pytest.raises(Dismissed):
        regroup(acts)


def test_a_dismissal_that_the_script_turned_into_an_error_is_still_one() -> None:
    try:
        try:
            raise Dismissed("fewer workers")
        except BaseException as error:
            raise RuntimeError("training failed") from error
    except RuntimeError as error:
        found = dismissal_in(error)
    assert found is not None
    assert found.reason == "fewer workers"
    assert dismissal_in(RuntimeError("by itself")) is None
