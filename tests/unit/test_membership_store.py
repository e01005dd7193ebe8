"""The key-value store of the coordinator, the line to it, and process groups that form over them."""

import base64
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from queue import SimpleQueue
from time import monotonic
from typing import Any

import pytest
import torch
import torch.distributed as dist
from websockets.exceptions import ConnectionClosed
from websockets.sync.server import Server, ServerConnection, serve

from unisono.errors import LaunchError
from unisono.membership import messages
from unisono.membership.client import WorkerConnection
from unisono.membership.keyvalue import Answer, KeyValue, Room
from unisono.membership.rendezvous import CoordinatorStore

pytestmark = pytest.mark.unit

PATIENCE_S = 20.0


# -- keys and values


def ask(
    store: KeyValue, operation: Any, *keys: str, now: float = 0.0, worker: str = "w1", id: int = 1, **fields: Any
) -> list[Answer]:
    return store.handle(worker, messages.StoreRequest(id=id, operation=operation, keys=keys, **fields), now)


def coded(value: bytes) -> str:
    return base64.b64encode(value).decode()


def only(answers: list[Answer]) -> messages.StoreReply:
    [(_, reply)] = answers
    return reply


def test_a_value_is_read_back() -> None:
    store = KeyValue()

    assert only(ask(store, "set", "g1/a", value=coded(b"x"))) == messages.StoreReply(id=1)
    assert only(ask(store, "get", "g1/a")).value == coded(b"x")
    assert only(ask(store, "check", "g1/a")).value == "1"
    assert only(ask(store, "check", "g1/a", "g1/b")).value == "0"


def test_who_waits_for_several_keys_waits_for_the_last_one() -> None:
    store = KeyValue()

    assert ask(store, "wait", "g1/a", "g1/b", worker="w2", id=7, timeout_s=5) == []
    assert len(ask(store, "set", "g1/a")) == 1
    assert ask(store, "set", "g1/b")[1:] == [("w2", messages.StoreReply(id=7))]


def test_a_wait_ends_in_time_and_names_the_key() -> None:
    store = KeyValue()
    ask(store, "wait", "g1/a", "g1/b", timeout_s=5, now=2.0)

    assert store.deadline() == 7.0
    assert store.expire(6.9) == []
    assert only(store.expire(7.0)).error == "g1/a: nobody has set it in 5 s"
    assert store.deadline() is None


def test_a_worker_whose_connection_is_gone_waits_no_more() -> None:
    store = KeyValue()
    ask(store, "get", "g1/a", worker="w2", timeout_s=5)

    store.drop("w2")

    assert len(ask(store, "set", "g1/a")) == 1


def test_a_repeated_addition_counts_once() -> None:
    store = KeyValue()

    assert only(ask(store, "add", "g1/n", value="2", id=5)).value == "2"
    assert only(ask(store, "add", "g1/n", value="2", id=5)).value == "2"
    assert only(ask(store, "add", "g1/n", value="-3", id=6)).value == "-1"
    assert only(ask(store, "get", "g1/n")).value == coded(b"-1")


@pytest.mark.parametrize("value", ["", "x", "1.5", "9" * 19, "1" * 30])
def test_what_is_no_whole_number_of_64_bits_is_not_added(value: str) -> None:
    store = KeyValue()
    ask(store, "set", "g1/n", value=coded(b"9" * 18 + b"1"))

    assert only(ask(store, "add", "g1/n", value=value)).error


def test_compare_set_answers_as_the_stores_of_torch() -> None:
    ours, theirs = KeyValue(), dist.HashStore()

    for expected, desired in [("no", "a"), ("", "b"), ("", "c"), ("b", "d"), ("x", "e"), ("d", "")]:
        found = only(
            ask(ours, "compare_set", "g1/k", expected=coded(expected.encode()), value=coded(desired.encode()))
        ).value
        assert base64.b64decode(found) == theirs.compare_set("g1/k", expected, desired)


def test_a_key_is_deleted_once() -> None:
    store = KeyValue()
    ask(store, "set", "g1/a")

    assert [only(ask(store, "delete", "g1/a", id=number)).value for number in (2, 3)] == ["1", "0"]
    assert only(ask(store, "delete", "g1/a", id=2)).value == "1"  # the same request again


@pytest.mark.parametrize("key", ["a", "g/a", "gx/a", "g1", "running", "G1/a", "g-1/a"])
def test_a_key_that_belongs_to_no_generation_is_refused(key: str) -> None:
    assert "keys begin with run/" in only(ask(KeyValue(), "set", key)).error


def test_the_keys_of_a_generation_go_with_it_and_nobody_waits_for_them() -> None:
    store = KeyValue()
    for key in ("run/a", "g1/a", "g2/a"):
        ask(store, "set", key)
    ask(store, "get", "g1/b", worker="w2", id=7, timeout_s=5)

    assert store.forget(2) == [("w2", messages.StoreReply(id=7, error="g1/b: its generation is over"))]

    assert len(store) == 2
    assert "is over" in only(ask(store, "set", "g1/a")).error
    assert only(ask(store, "check", "run/a", "g2/a")).value == "1"


def test_a_store_takes_only_so_much() -> None:
    store = KeyValue(room=Room(store=400, small=100))
    assert not only(ask(store, "set", "run/a", value=coded(bytes(200)))).error

    assert only(ask(store, "set", "run/b", value=coded(bytes(200)))).error == "the store is full"
    assert not only(ask(store, "set", "run/a", value=coded(bytes(300)))).error
    ask(store, "delete", "run/a")
    assert not only(ask(store, "set", "run/b", value=coded(bytes(200)))).error


def test_a_full_store_has_room_for_the_words_that_say_so() -> None:
    store = KeyValue(room=Room(store=400, small=100, reserve=400))
    ask(store, "set", "run/a", value=coded(bytes(300)))

    assert [only(ask(store, "set", f"run/{n}", value=coded(bytes(100)))).error for n in range(3)] == [
        "", "", "the store is full",
    ]  # fmt: skip


def test_a_store_is_made_again_from_its_changes_and_from_its_entries() -> None:
    changes: list[Any] = []
    store = KeyValue(changes.append)
    ask(store, "set", "run/a", value=coded(b"x"))
    ask(store, "add", "g2/n", value="3", id=2)
    ask(store, "set", "g1/b")
    ask(store, "delete", "run/a", id=3)
    ask(store, "set", "run/c", value=coded(b"y"))
    store.forget(2)

    for entries in (changes, list(store.entries())):
        other = KeyValue()
        for entry in entries:
            other.restore(entry)
        assert list(other.entries()) == list(store.entries())
        assert only(ask(other, "add", "g2/n", value="3", id=2)).value == "3"
        assert "is over" in only(ask(other, "set", "g1/b")).error


# -- the line


class FakeCoordinator:
    """Takes connections, keeps what is said, and says what a test wants; the store is a real one."""

    def __init__(self) -> None:
        self.heard: SimpleQueue[Any] = SimpleQueue()
        self.values = KeyValue()
        self.answers = True
        self._sockets: dict[str, ServerConnection] = {}
        self._lock = threading.Lock()
        self._server: Server | None = None
        self._thread: threading.Thread | None = None
        self.port = 0

    def start(self) -> None:
        self._server = serve(self._talk, "127.0.0.1", self.port, compression=None, ping_interval=None)
        self.port = self._server.socket.getsockname()[1]
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    def stop(self) -> None:
        assert self._server is not None
        assert self._thread is not None
        self._server.shutdown()
        self.hang_up()
        self._thread.join()

    def hang_up(self) -> None:
        for socket in list(self._sockets.values()):
            socket.close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def say(self, worker: str, message: messages.ToWorker) -> None:
        self._sockets[worker].send(message.model_dump_json())

    def expect(self, kind: type) -> Any:
        """The next message, which is of this kind; signs of life are passed over."""
        message = self.heard.get(timeout=PATIENCE_S)
        while isinstance(message, messages.Progress) and kind is not messages.Progress:
            message = self.heard.get(timeout=PATIENCE_S)
        assert isinstance(message, kind), message
        return message

    def _talk(self, socket: ServerConnection) -> None:
        assert socket.request is not None
        assert socket.request.headers["Authorization"] == "Bearer secret"
        assert socket.request.path == "/worker"
        worker = ""
        with suppress(ConnectionClosed):
            for text in socket:
                message = messages.from_worker.validate_json(text)
                if isinstance(message, messages.WorkerHello):
                    worker = message.worker
                    self._sockets[worker] = socket
                if isinstance(message, messages.StoreRequest) and self.answers:
                    self._serve(worker, message)
                else:
                    self.heard.put(message)
        if self._sockets.get(worker) is socket:
            del self._sockets[worker]

    def _serve(self, worker: str, request: messages.StoreRequest) -> None:
        with self._lock:
            for whom, reply in self.values.handle(worker, request, 0.0):
                self.say(whom, reply)


@pytest.fixture
def coordinator() -> Iterator[FakeCoordinator]:
    fake = FakeCoordinator()
    fake.start()
    yield fake
    fake.stop()


Open = Callable[..., tuple[WorkerConnection, "SimpleQueue[messages.ToWorker]"]]


@contextmanager
def lines(coordinator: FakeCoordinator) -> Iterator[Open]:
    opened: list[WorkerConnection] = []

    def start(worker: str = "w1") -> tuple[WorkerConnection, SimpleQueue[messages.ToWorker]]:
        told: SimpleQueue[messages.ToWorker] = SimpleQueue()
        hello = messages.WorkerHello(worker=worker, host="here", pid=1, shards=4)
        line = WorkerConnection(coordinator.url, "secret", hello, told.put, PATIENCE_S)
        opened.append(line)
        return line, told

    yield start
    for line in opened:
        line.close()


@pytest.fixture
def connect(coordinator: FakeCoordinator) -> Iterator[Open]:
    with lines(coordinator) as start:
        yield start


def test_a_line_says_hello_and_passes_on_what_it_is_told(coordinator: FakeCoordinator, connect: Open) -> None:
    line, told = connect()

    assert coordinator.expect(messages.WorkerHello).worker == "w1"
    coordinator.say("w1", messages.Welcome(joins=True))
    assert told.get(timeout=PATIENCE_S) == messages.Welcome(joins=True)
    line.send(messages.Ready(loop=1))
    assert coordinator.expect(messages.Ready).loop == 1


def test_a_request_survives_the_end_of_the_connection(coordinator: FakeCoordinator, connect: Open) -> None:
    line, _ = connect()
    coordinator.expect(messages.WorkerHello)
    coordinator.answers = False
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(line.request, messages.StoreRequest(id=0, operation="add", keys=("run/n",), value="2"))
        coordinator.expect(messages.StoreRequest)
        coordinator.answers = True
        coordinator.hang_up()

        assert asked.result(PATIENCE_S).value == "2"


@pytest.mark.parametrize("farewell", [messages.Refused(reason="gone"), messages.JobOver(digest="00")])
def test_after_a_farewell_a_line_does_not_come_back(
    coordinator: FakeCoordinator, connect: Open, farewell: messages.ToWorker
) -> None:
    line, told = connect()
    coordinator.expect(messages.WorkerHello)

    coordinator.say("w1", farewell)

    assert told.get(timeout=PATIENCE_S) == farewell
    line._thread.join(PATIENCE_S)
    assert not line._thread.is_alive()
    with pytest.raises(LaunchError, match="has ended"):
        line.request(messages.StoreRequest(id=0, operation="check", keys=("run/n",)))
    line.send(messages.Ready())  # to nobody


def test_a_line_hears_of_a_coordinator_that_has_nothing_to_say_and_not_of_one_that_is_gone(
    coordinator: FakeCoordinator,
) -> None:
    hello = messages.WorkerHello(worker="w1", host="here", pid=1, shards=4)
    line = WorkerConnection(coordinator.url, "secret", hello, print, PATIENCE_S, look_s=0.01)
    try:
        for _ in range(5):
            before = line._received_at
            awaited(lambda before=before: line._received_at > before)  # type: ignore[misc]
        coordinator.stop()
        awaited(lambda: line.silent_s > 0.3)
    finally:
        line.close()
        coordinator.start()


def awaited(is_so: Callable[[], bool]) -> None:
    deadline = monotonic() + PATIENCE_S
    while not is_so():
        assert monotonic() < deadline
        threading.Event().wait(0.002)


def test_what_was_sent_is_said_before_a_line_closes(coordinator: FakeCoordinator, connect: Open) -> None:
    line, _ = connect()
    for _ in range(20):
        line.send(messages.Formed(generation=1))
    line.close()

    coordinator.expect(messages.WorkerHello)
    for _ in range(20):
        coordinator.expect(messages.Formed)


def test_a_line_to_nobody_says_where_nobody_was() -> None:
    hello = messages.WorkerHello(worker="w1", host="here", pid=1, shards=4)

    with pytest.raises(LaunchError, match=r"http://127\.0\.0\.1:1 could not be reached within 0\.3 s"):
        WorkerConnection("http://127.0.0.1:1", "secret", hello, print, 0.3)


@pytest.mark.parametrize("url", ["http://10.0.0.1:80", "http://example.org", "ftp://127.0.0.1", "https+x://a", "x"])
def test_the_token_is_not_sent_in_the_open_to_other_hosts(url: str) -> None:
    hello = messages.WorkerHello(worker="w1", host="here", pid=1, shards=4)

    with pytest.raises(LaunchError, match="https"):
        WorkerConnection(url, "secret", hello, print, 0.3)


def test_no_proxy_comes_between(coordinator: FakeCoordinator, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "ws_proxy", "wss_proxy", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    with lines(coordinator) as start:
        start()
        coordinator.expect(messages.WorkerHello)


def test_messages_to_a_line_may_be_large(coordinator: FakeCoordinator, connect: Open) -> None:
    _, told = connect()
    coordinator.expect(messages.WorkerHello)
    here = tuple(messages.Neighbour(rank=number, worker=f"w{number}", address="a" * 100) for number in range(20_000))
    new = messages.NewGeneration(generation=1, ranks=(messages.Ranks(workers=20_000, shards=1),), here=here, source=0)

    coordinator.say("w1", new)

    assert told.get(timeout=PATIENCE_S) == new


# -- torch's side of it


@pytest.fixture
def store(coordinator: FakeCoordinator, connect: Open) -> CoordinatorStore:
    line, _ = connect()
    return CoordinatorStore(line, timedelta(seconds=PATIENCE_S))


def test_a_store_has_all_that_a_store_of_torch_has(store: CoordinatorStore) -> None:
    scoped = dist.PrefixStore("run", store)  # calls through torch's C++

    scoped.set("a", "x")
    assert scoped.get("a") == b"x"
    assert scoped.add("n", 2) == 2
    assert scoped.add("n", 3) == 5
    assert scoped.check(["a", "n"])
    assert not scoped.check(["a", "b"])
    scoped.wait(["a", "n"])
    scoped.wait(["a"], timedelta(seconds=1))
    assert scoped.compare_set("a", "x", "y") == b"y"
    assert scoped.delete_key("a")
    assert not scoped.delete_key("a")
    assert store.timeout == timedelta(seconds=PATIENCE_S)


def test_waiting_in_vain_is_an_error_that_names_the_key(coordinator: FakeCoordinator, store: CoordinatorStore) -> None:
    for wait in (store.wait, dist.PrefixStore("run", store).wait):
        with pytest.raises(dist.DistStoreError, match="run/b: nobody has set it"):
            wait(["run/b" if wait == store.wait else "b"], timedelta(0))


def test_process_groups_form_over_the_line(coordinator: FakeCoordinator, connect: Open) -> None:
    workers = 3
    opened = [connect(f"w{number}")[0] for number in range(workers)]

    def reduce(rank: int, generation: int) -> torch.Tensor:
        scoped = dist.PrefixStore(f"g{generation}", CoordinatorStore(opened[rank], timedelta(seconds=PATIENCE_S)))
        options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = timedelta(seconds=PATIENCE_S)
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        group: Any = dist.ProcessGroupGloo(scoped, rank, workers, options)
        value = torch.full((5,), float(rank + 1))
        group.allreduce([value]).wait()
        return value

    for generation in (1, 2):
        with ThreadPoolExecutor(workers) as pool:
            sums = list(pool.map(reduce, range(workers), [generation] * workers))
        assert all(bool((value == 6.0).all()) for value in sums)


def test_a_line_that_trusts_nobody_does_not_start(tmp_path: Path) -> None:
    hello = messages.WorkerHello(worker="w1", host="here", pid=1, shards=4)
    (tmp_path / "empty.pem").touch()

    with pytest.raises(OSError):  # noqa: PT011 - what Python's ssl says about it
        WorkerConnection("https://127.0.0.1:1", "secret", hello, print, 0.3, tmp_path / "empty.pem")
