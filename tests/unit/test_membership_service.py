"""The coordinator's service: who gets in, what it does with what comes in, and what it keeps."""

import asyncio
import http.client
import json
import os
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from unisono.errors import JobError, LaunchError
from unisono.jsonl import read_lines
from unisono.launch.elastic.address import Address
from unisono.membership import messages, service
from unisono.membership.client import WorkerConnection
from unisono.membership.coordinator import Coordinator, WorkerSession
from unisono.membership.reception import ListenAddress, Rate, RequestLimits, hosts, listen, url
from unisono.membership.server import Server
from unisono.membership.service import SendQueue
from unisono.membership.state import AgentMessage, ElasticConfig, LeaveRequested
from unisono.membership.state_log import Journal, StateLog
from unisono.membership.token import make_token, new_token, read_token, token_file
from unisono_lab.page.curves import CoordinatorSource

pytestmark = pytest.mark.unit

PATIENCE_S = 20.0
SETTINGS = ElasticConfig(smallest=1, largest=2, failure_timeout_s=60.0)


class Running:
    """A coordinator that serves, on a thread."""

    def __init__(
        self,
        folder: Path,
        settings: ElasticConfig = SETTINGS,
        fd: int | None = None,
        limits: RequestLimits | None = None,
    ) -> None:
        address = ListenAddress(fd=fd)
        listening = listen(address, tls=False)
        changed = asyncio.Event()
        self.coordinator = Coordinator(folder, settings, changed=changed.set)
        self.token = make_token(folder)
        self.url = url(listening, address, tls=False)
        self.port = listening.getsockname()[1]
        self.server = Server(self.coordinator, changed, self.token, hosts(listening, address), {}, limits)
        self._is_closed = False
        self._thread = threading.Thread(target=self.server.run, args=([listening],))
        self._thread.start()

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self.server.end()
        self._thread.join()
        self.coordinator.close()
        assert self.server.error is None

    def wait_for_its_end(self) -> None:
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.token}"}

    def ask(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> tuple[int, dict[str, Any]]:
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)) as connection:
            data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
            connection.request(method, path, data, self.headers if headers is None else headers)
            answer = connection.getresponse()
            content = answer.read()
            found = json.loads(content) if content.startswith(b"{") else {}
            return answer.status, found

    @contextmanager
    def connect(self, path: str, headers: dict[str, str] | None = None) -> Iterator[ClientConnection]:
        address = f"ws://127.0.0.1:{self.port}{path}"
        wanted = self.headers if headers is None else headers
        options: dict[str, Any] = {"proxy": None, "compression": None, "max_size": 2**26}
        with connect(address, additional_headers=wanted, **options) as connection:
            yield connection

    @contextmanager
    def agent(self, name: str = "a1", workers: int = 2, **fields: Any) -> Iterator[ClientConnection]:
        with self.connect("/agent") as connection:
            say(connection, messages.AgentHello(agent=name, host="here", workers=workers, **fields))
            yield connection

    @contextmanager
    def worker(self, name: str, generation: int = 0) -> Iterator[ClientConnection]:
        with self.connect("/worker") as connection:
            say(connection, messages.WorkerHello(worker=name, host="here", pid=1, shards=4, generation=generation))
            yield connection

    def refuses(self, path: str, headers: dict[str, str] | None = None) -> int:
        """The status with which a connection is refused."""
        with pytest.raises(InvalidStatus) as refused, self.connect(path, headers):
            pass
        return refused.value.response.status_code


def say(connection: ClientConnection, message: messages.Message) -> None:
    connection.send(message.model_dump_json())


def hear(connection: ClientConnection, kind: type, adapter: Any = messages.to_worker) -> Any:
    """The next message of this kind."""
    while True:
        message = adapter.validate_json(connection.recv(timeout=PATIENCE_S))
        if isinstance(message, kind):
            return message


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.005)


Serve = Callable[..., Running]


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    started: list[Running] = []

    def start(**options: Any) -> Running:
        started.append(Running(tmp_path, **options))
        return started[-1]

    yield start
    for running in started:
        running.close()


@pytest.fixture
def running(serve: Serve) -> Running:
    return serve()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """One for all tests that leave it as it was."""
    with closing(Running(tmp_path_factory.mktemp("run"))) as running:
        # Its loop opens sockets as it starts: they are there before the guard of the first test looks.
        until(lambda: running.server.started)
        yield running


# -- who gets in

RECORD = tuple(f"/record/{name}" for name in service.READABLE)
ROUTES = (
    "/worker",
    "/agent",
    "/health",
    "/status",
    "/metrics",
    "/resize",
    "/leave",
    "/replace",
    "/checkpoint",
    "/stop",
    "/",
    "/no",
    "/../status",
    "//status",
    *RECORD,
)
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT", "BREW")


def test_the_walk_below_knows_every_route(shared: Running) -> None:
    found = service.Service(shared.coordinator, RequestLimits(), lambda: None, asyncio.Event()).routes()

    assert {route.path for route in found} <= set(ROUTES)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "token", [None, "", "Bearer", "Bearer ", "Bearer wrong", "Basic {}", "{}", "Bearer {}x", "bearer {}", "Bearer  {}"]
)
def test_nobody_without_the_token_gets_past_the_door(shared: Running, token: str | None) -> None:
    headers = {} if token is None else {"Authorization": token.format(shared.token)}

    for path in ROUTES:
        for method in METHODS:
            assert shared.ask(method, path, headers=headers)[0] == 401, (method, path)
        assert shared.refuses(path, headers) == 401, path


def test_the_token_counts_in_the_header_alone(shared: Running) -> None:
    for path in (f"/status?token={shared.token}", f"/status?access_token={shared.token}"):
        assert shared.ask("GET", path, headers={"Cookie": f"token={shared.token}"})[0] == 401


@pytest.mark.parametrize("name", ["example.org", "127.0.0.1", "127.0.0.1:1", "", "evil.localhost:{}", "127.0.0.2:{}"])
def test_a_request_for_another_host_is_refused(shared: Running, name: str) -> None:
    headers = {**shared.headers, "Host": name.format(shared.port)}

    assert shared.ask("GET", "/status", headers=headers)[0] == 403


@pytest.mark.parametrize("origin", ["http://example.org", "null", "http://127.0.0.1:{}", ""])
def test_a_web_page_is_refused(shared: Running, origin: str) -> None:
    headers = {**shared.headers, "Origin": origin.format(shared.port)}

    assert shared.ask("GET", "/status", headers=headers)[0] == 403
    assert shared.refuses("/worker", headers) == 403


def test_with_the_token_each_route_has_its_methods(shared: Running) -> None:
    assert shared.ask("GET", "/health")[0] == 200
    assert shared.ask("GET", "/status")[0] == 200
    assert shared.ask("GET", "/stop")[0] == 405
    assert shared.ask("POST", "/status")[0] == 405
    assert shared.ask("GET", "/no")[0] == 404


def test_what_a_request_may_not_be(shared: Running) -> None:
    for body in (b"", b"{", b"[]", b'{"workers": "2"}', b'{"workers": 0}', b'{"workers": 1, "more": 1}', b"[" * 10_000):
        assert shared.ask("POST", "/resize", body)[0] == 400, body
    for body in (b"{}", b'{"who": []}', b'{"who": -1}', b'{"who": "../a"}', b'{"who": ""}'):
        assert shared.ask("POST", "/leave", body)[0] == 400, body
    assert shared.ask("POST", "/resize", b" " * (2**14 + 1))[0] == 413


def test_too_many_requests_are_refused(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    app: Any = running.server.config.app
    app._rate = Rate(0.25, lambda: 0.0)

    assert [running.ask("GET", "/health")[0] for _ in range(2)] == [200, 429]


def test_too_many_connections_are_refused(running: Running) -> None:
    app: Any = running.server.config.app
    app._limits = RequestLimits(connections=1)

    with running.connect("/agent"):
        assert running.refuses("/agent") == 503
    until(lambda: app._connections == 0)
    with running.connect("/agent"):
        pass


def test_a_request_that_does_not_end_is_ended(serve: Serve) -> None:
    running = serve(limits=RequestLimits(request_s=0.1))
    with socket.create_connection(("127.0.0.1", running.port), PATIENCE_S) as raw:
        head = f"POST /resize HTTP/1.1\r\nHost: 127.0.0.1:{running.port}\r\nAuthorization: Bearer {running.token}\r\n"
        raw.sendall(f"{head}Content-Length: 100\r\n\r\nx".encode())

        assert raw.recv(100).startswith(b"HTTP/1.1 408 ")


def test_a_connection_on_which_nothing_is_asked_is_ended(serve: Serve) -> None:
    running = serve(limits=RequestLimits(request_line_s=0.1))

    with socket.create_connection(("127.0.0.1", running.port), PATIENCE_S) as raw:
        raw.sendall(b"GET /status HTTP/1.1\r\n")

        assert _rest(raw) == b""


def test_a_connection_that_stops_in_its_second_request_is_ended(serve: Serve) -> None:
    running = serve(limits=RequestLimits(request_line_s=0.1))

    with socket.create_connection(("127.0.0.1", running.port), PATIENCE_S) as raw:
        head = (
            f"GET /health HTTP/1.1\r\nHost: 127.0.0.1:{running.port}\r\nAuthorization: Bearer {running.token}\r\n\r\n"
        )
        raw.sendall(head.encode())
        answer = http.client.HTTPResponse(raw)
        answer.begin()
        answer.read()
        raw.sendall(b"GET /status HT")  # only now: the server's own patience ends with the first byte of it

        while _rest(raw) != b"":
            pass


def _rest(raw: socket.socket) -> bytes:
    try:
        return raw.recv(100)
    except ConnectionResetError:
        return b""


def test_who_connects_and_does_not_say_hello_is_sent_away(serve: Serve) -> None:
    with serve(limits=RequestLimits(hello_s=0.1)).connect("/worker") as silent:
        assert "hello" in hear(silent, messages.Refused).reason
        with pytest.raises(ConnectionClosed):
            silent.recv(timeout=PATIENCE_S)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/worker", messages.Ready()),
        ("/worker", messages.StoreRequest(id=1, operation="set", keys=("run/a",))),
        ("/worker", messages.JobOver()),
        ("/worker", messages.AgentLeaving()),
        ("/agent", messages.WorkerEnded(worker="w1", code=0)),
        ("/agent", messages.Ready()),
    ],
)
def test_who_does_not_say_hello_first_is_refused(shared: Running, path: str, message: messages.Message) -> None:
    before = shared.coordinator.state
    with shared.connect(path) as rude:
        say(rude, message)

        assert hear(rude, messages.Refused, messages.to_worker if path == "/worker" else messages.to_agent)
    assert shared.coordinator.state == before
    assert len(shared.coordinator.values) == 0


def test_a_message_in_bytes_is_refused(shared: Running) -> None:
    with shared.connect("/worker") as rude:
        rude.send(b"{}")

        assert "text" in hear(rude, messages.Refused).reason


def test_another_protocol_is_refused_by_name(shared: Running) -> None:
    with shared.connect("/worker") as other:
        say(other, messages.WorkerHello(worker="w1", host="here", pid=1, shards=4, protocol=99))

        assert f"version {messages.PROTOCOL}, not 99" in hear(other, messages.Refused).reason


def test_a_message_that_is_too_long_ends_the_connection(shared: Running) -> None:
    with shared.connect("/worker") as rude, pytest.raises(ConnectionClosed):
        rude.send(" " * (messages.LONGEST_MESSAGE + 1))
        rude.recv(timeout=PATIENCE_S)


def test_who_sends_too_fast_is_read_more_slowly() -> None:
    rate = Rate(100.0, lambda: 0.0)

    assert [rate.take() for _ in range(400)] == [0.0] * 400
    assert rate.take() == pytest.approx(0.01)


# -- where it listens


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1"])  # noqa: S104 - that is the point
def test_other_hosts_need_tls(host: str) -> None:
    with pytest.raises(JobError, match="--tls-cert"):
        listen(ListenAddress(host=host), tls=False)
    with socket.create_server(("0.0.0.0", 0)) as opened, pytest.raises(JobError, match="--tls-cert"):  # noqa: S104
        listen(ListenAddress(fd=opened.detach()), tls=False)


def test_a_port_that_is_taken_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as opened:
        port = opened.getsockname()[1]
        with pytest.raises(JobError, match=f"cannot listen on 127.0.0.1:{port}"):
            listen(ListenAddress(port=port), tls=False)


def test_it_listens_on_a_socket_that_it_inherits(serve: Serve) -> None:
    opened = socket.create_server(("127.0.0.1", 0))
    port = opened.getsockname()[1]

    running = serve(fd=opened.detach())

    assert running.url == f"http://127.0.0.1:{port}"
    assert running.ask("GET", "/health")[0] == 200


# -- the token


def test_a_token_is_made_once_and_only_its_owner_reads_it(tmp_path: Path) -> None:
    token = make_token(tmp_path)

    assert make_token(tmp_path) == token == read_token(token_file(tmp_path))
    assert len(token) == 43
    assert stat.S_IMODE(token_file(tmp_path).stat().st_mode) == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["token"]


def test_each_start_of_a_job_in_a_folder_has_another_token_and_leaves_what_is_behind_a_link(tmp_path: Path) -> None:
    behind = tmp_path / "behind"
    behind.write_text("another file")
    token_file(tmp_path).symlink_to(behind)
    tokens = [new_token(tmp_path) for _ in range(3)]

    assert len(set(tokens)) == 3
    assert read_token(token_file(tmp_path)) == make_token(tmp_path) == tokens[-1]
    assert stat.S_IMODE(token_file(tmp_path).lstat().st_mode) == 0o600
    assert behind.read_text() == "another file"
    assert {path.name for path in tmp_path.iterdir()} == {"behind", "token"}


def test_a_token_that_others_can_read_or_behind_a_link_is_refused(tmp_path: Path) -> None:
    make_token(tmp_path)
    token_file(tmp_path).chmod(0o644)
    with pytest.raises(JobError, match="chmod 600"):
        make_token(tmp_path)
    token_file(tmp_path).chmod(0o600)
    token_file(tmp_path).rename(tmp_path / "elsewhere")
    token_file(tmp_path).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(JobError, match="cannot be read"):
        make_token(tmp_path)


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir], ids=["pipe", "folder"])
def test_what_is_no_file_is_no_token_and_not_waited_for(make: Callable[..., None], tmp_path: Path) -> None:
    make(token_file(tmp_path), 0o600)
    with pytest.raises(JobError, match="token"):
        read_token(token_file(tmp_path))


@pytest.mark.parametrize(
    "text", [b"", b"\n", b"x" * 43 + b"x", b"x" * 43 + b" " * 300 + b"x", b"\xff" * 43, b"x" * 2**20]
)
def test_what_is_no_token_is_refused(text: bytes, tmp_path: Path) -> None:
    token_file(tmp_path).touch(0o600)
    token_file(tmp_path).write_bytes(text)
    with pytest.raises(JobError, match="no token"):
        read_token(token_file(tmp_path))


# -- what it does


def test_a_job_of_two_workers_forms_trains_and_ends(running: Running, tmp_path: Path) -> None:
    with running.agent() as agent:
        names = hear(agent, messages.Start, messages.to_agent).workers
        with running.worker(names[0]) as one, running.worker(names[1]) as other:
            for worker in (one, other):
                assert not hear(worker, messages.Welcome).joins
                say(worker, messages.Ready())
            new = [hear(worker, messages.NewGeneration) for worker in (one, other)]
            assert new[0] == new[1]
            assert [one.worker for one in new[0].here] == list(names)
            assert running.ask("GET", "/status")[1]["generation"] == 1
            for worker in (one, other):
                say(worker, messages.Formed(generation=1))
                say(worker, messages.Finished(digest="ab"))
            assert hear(one, messages.JobOver).digest == "ab"
            assert hear(agent, messages.JobOver, messages.to_agent).digest == "ab"
    running.wait_for_its_end()
    events = [json.loads(line)["event"] for line in (tmp_path / "journal.jsonl").read_text().splitlines()]
    assert events == ["agent joined", "asked for", "minted", "formed", "over"]


def test_a_new_connection_of_a_worker_replaces_the_old_one_and_exchanges_values(running: Running) -> None:
    with running.agent() as agent:
        names = hear(agent, messages.Start, messages.to_agent).workers
        with running.worker(names[0]) as old:
            hear(old, messages.Welcome)
            with running.worker(names[0]) as new, running.worker(names[1]) as other:
                hear(new, messages.Welcome)
                with pytest.raises(ConnectionClosed):
                    old.recv(timeout=PATIENCE_S)
                say(new, messages.StoreRequest(id=5, operation="get", keys=("g1/a",), timeout_s=PATIENCE_S))
                say(other, messages.StoreRequest(id=1, operation="set", keys=("g1/a",), value="eA=="))
                assert hear(new, messages.StoreReply) == messages.StoreReply(id=5, value="eA==")
                assert hear(other, messages.StoreReply) == messages.StoreReply(id=1)
                say(new, messages.StoreRequest(id=6, operation="get", keys=("g1/b",), timeout_s=0.05))
                assert "nobody has set it" in hear(new, messages.StoreReply).error


def test_an_unknown_worker_is_refused(shared: Running) -> None:
    with shared.worker("w77") as stranger:
        assert hear(stranger, messages.Refused)


def test_who_does_not_read_makes_nobody_wait(serve: Serve) -> None:
    running = serve(limits=RequestLimits(stuck_s=0.3))
    with running.agent() as agent:
        names = hear(agent, messages.Start, messages.to_agent).workers
        with running.worker(names[0]) as reader, _deaf(running, names[1]) as deaf:
            value = "A" * 2**20
            say(reader, messages.StoreRequest(id=1, operation="set", keys=("run/a",), value=value))
            hear(reader, messages.StoreReply)
            for number in range(8):
                deaf.sendall(_frame(messages.StoreRequest(id=number, operation="get", keys=("run/a",))))
            for number in range(2, 10):
                say(reader, messages.StoreRequest(id=number, operation="get", keys=("run/a",)))
                assert hear(reader, messages.StoreReply).id == number
            until(lambda: running.coordinator.connections == 2)  # the deaf one is gone


def _deaf(running: Running, worker: str) -> socket.socket:
    """A worker that says hello, and never reads."""
    raw = socket.socket()
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    raw.connect(("127.0.0.1", running.port))
    key = "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13"
    head = f"GET /worker HTTP/1.1\r\nHost: 127.0.0.1:{running.port}\r\nAuthorization: Bearer {running.token}\r\n"
    raw.sendall(f"{head}Upgrade: websocket\r\nConnection: Upgrade\r\n{key}\r\n\r\n".encode())
    assert raw.recv(12) == b"HTTP/1.1 101"
    raw.sendall(_frame(messages.WorkerHello(worker=worker, host="here", pid=1, shards=4)))
    until(lambda: running.coordinator.connections == 3)
    return raw


def _frame(message: messages.Message) -> bytes:
    """A short text message, masked with zeros."""
    data = message.model_dump_json().encode()
    length = bytes([0x80 | len(data)]) if len(data) < 126 else bytes([0x80 | 126]) + len(data).to_bytes(2, "big")
    return b"\x81" + length + bytes(4) + data


def test_an_outbox_that_nobody_empties_hangs_up() -> None:
    queue = SendQueue(most=3)

    for _ in range(5):
        queue.send("x")

    assert queue._ends
    assert not queue._waiting


# -- what time it is


def test_a_worker_hears_what_the_coordinators_clock_shows(serve: Serve) -> None:
    running = serve()
    with running.agent(workers=1) as agent:
        name = hear(agent, messages.Start, messages.to_agent).workers[0]
    hello = messages.WorkerHello(worker=name, host="here", pid=1, shards=4)
    with closing(WorkerConnection(running.url, running.token, hello, lambda told: None, PATIENCE_S)) as line:
        asked = time.monotonic()
        reply = line.request(messages.StoreRequest(id=0, operation="clock", keys=("run/clock",)))
        assert asked <= int(reply.value) / 1e9 <= time.monotonic()


# -- what it keeps


class Killed(BaseException):
    """The process is gone in the middle of something."""


class Nobody:
    """At the other end of a connection."""

    def send(self, text: str) -> None:
        """It is not heard."""

    def hang_up(self) -> None:
        """Nothing to end."""


@pytest.mark.parametrize("lines_written", [0, 1])
def test_what_a_coordinator_was_killed_before_it_could_journal_is_journalled_by_the_next_one(
    tmp_path: Path, lines_written: int
) -> None:
    hello = messages.AgentHello(agent="a1", host="here", workers=2)

    class CutShort(Journal):
        def append(self, lines: Iterable[Mapping[str, Any]]) -> None:
            if there := list(lines):
                super().append(there[:lines_written])
                raise Killed

    with closing(Coordinator(tmp_path, SETTINGS, journal=CutShort)) as one, pytest.raises(Killed):
        one.agent_connected("a1", Nobody(), hello)
    for _ in range(2):
        Coordinator(tmp_path, SETTINGS).close()

    events = [line["event"] for line in read_lines(tmp_path / "journal.jsonl")]
    assert (events.count("agent joined"), events.count("asked for")) == (1, 1)


def _greeted(coordinator: Coordinator, worker: str) -> list[messages.ToWorker]:
    """What a worker is told after its hello, and what it says after that."""
    heard: list[messages.ToWorker] = []

    class Peer(Nobody):
        def send(self, text: str) -> None:
            heard.append(messages.to_worker.validate_json(text))

    session = WorkerSession(coordinator, Peer())
    session.receive(messages.WorkerHello(worker=worker, host="here", pid=1, shards=4).model_dump_json())
    session.receive(messages.StoreRequest(id=1, operation="set", keys=("run/a",)).model_dump_json())
    session.receive(messages.Ready().model_dump_json())
    return heard


def test_a_worker_that_was_told_that_it_joins_still_does_after_the_coordinator_was_killed(tmp_path: Path) -> None:
    with closing(Coordinator(tmp_path, SETTINGS)) as one:
        one.agent_connected("a1", Nobody(), messages.AgentHello(agent="a1", host="here", workers=1))
        _greeted(one, "w1")
        one.agent_connected("a1", Nobody(), messages.AgentHello(agent="a1", host="here", workers=2, running=("w1",)))
        assert messages.Welcome(joins=True) in _greeted(one, "w2")
        joined = one.state.workers["w2"].joins
    with closing(Coordinator(tmp_path, SETTINGS)) as other:
        assert other.state.workers["w2"].phase != "asked"
        assert other.state.workers["w2"].joins == joined


def test_whoever_takes_no_part_changes_no_value(tmp_path: Path) -> None:
    with closing(Coordinator(tmp_path, SETTINGS)) as coordinator:
        coordinator.agent_connected("a1", Nobody(), messages.AgentHello(agent="a1", host="here", workers=2))
        assert isinstance(_greeted(coordinator, "stranger")[0], messages.Refused)
        assert len(coordinator.values) == 0
        _greeted(coordinator, "w1")
        assert len(coordinator.values) == 1
        ended = messages.WorkerEnded(worker="w1", code=-9)
        coordinator.handle(AgentMessage("a1", ended))
        coordinator.values.forget(None)
        assert isinstance(_greeted(coordinator, "w1")[0], messages.Refused)
        assert len(coordinator.values) == 0


def test_two_coordinators_do_not_work_in_one_folder(tmp_path: Path) -> None:
    with closing(Coordinator(tmp_path, SETTINGS)), pytest.raises(JobError, match="another coordinator already works"):
        Coordinator(tmp_path, SETTINGS)
    Coordinator(tmp_path, SETTINGS).close()


def test_a_coordinator_that_begins_anew_uses_no_number_twice(tmp_path: Path) -> None:
    with closing(Coordinator(tmp_path, SETTINGS)) as one:
        one.values.restore({"key": "run/a", "value": ""})
        one.state = replace(one.state, generation=5, last_worker=7, stopping=True)
        one._state_log.rewrite()
    for fresh in (True, False):
        with closing(Coordinator(tmp_path, SETTINGS, fresh=fresh)) as other:
            assert len(other.values) == 0
            assert (other.state.generation, other.state.last_worker, other.state.stopping) == (5, 7, False)


def test_what_another_version_left_is_refused(tmp_path: Path) -> None:
    (tmp_path / "coordinator.jsonl").write_text('{"now": 1.0, "state": {"colour": "red"}}\n')

    with pytest.raises(JobError, match="another version of Unisono wrote it"):
        Coordinator(tmp_path, SETTINGS)
    Coordinator(tmp_path, SETTINGS, fresh=True).close()


def test_the_time_of_the_job_stands_still_while_no_coordinator_runs(tmp_path: Path) -> None:
    with closing(Coordinator(tmp_path, SETTINGS, lambda: 100.0)) as one:
        one._clock = lambda: 130.0
        one._state_log.rewrite()
    with closing(Coordinator(tmp_path, SETTINGS, lambda: 7.0)) as other:
        assert other.now() == 30.0


class FullNow(StateLog):
    """A log on a disk that is full for one line: half of it is written."""

    fails = False

    def append(self, entry: Mapping[str, Any], *, durable: bool = False) -> bool:
        if not self.fails:
            return super().append(entry, durable=durable)
        FullNow.fails = False
        with self._path.open("ab") as file:
            file.write(b'{"now": 1.0, "changes": {"workers')
        return False


def test_what_did_not_fit_on_the_disk_is_written_with_what_comes_next(tmp_path: Path) -> None:
    with closing(Coordinator(tmp_path, SETTINGS, state_log=FullNow)) as one:
        one.agent_connected("a1", Nobody(), messages.AgentHello(agent="a1", host="here", workers=1))
        FullNow.fails = True
        one.agent_connected("a2", Nobody(), messages.AgentHello(agent="a2", host="there", workers=1))
        one.handle(LeaveRequested("a1"))
    with closing(Coordinator(tmp_path, SETTINGS)) as other:
        assert list(other.state.agents) == ["a1", "a2"]
        assert other.state.agents["a1"].leaving


def test_a_coordinator_does_not_go_on_from_a_state_of_which_lines_are_missing(tmp_path: Path) -> None:
    with closing(Coordinator(tmp_path, SETTINGS)) as one:
        for agent in ("a1", "a2", "a3"):
            one.agent_connected(agent, Nobody(), messages.AgentHello(agent=agent, host="here", workers=1))
    path = tmp_path / "coordinator.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:2], *lines[3:]]))
    with pytest.raises(JobError, match="lines of it are missing"):
        Coordinator(tmp_path, SETTINGS)
    Coordinator(tmp_path, SETTINGS, fresh=True).close()


def test_an_entry_is_as_long_as_what_has_changed(tmp_path: Path) -> None:
    sizes = []
    with closing(Coordinator(tmp_path, replace(SETTINGS, largest=2000))) as one:
        for number in range(2000):
            before = (tmp_path / "coordinator.jsonl").stat().st_size
            one.agent_connected(f"a{number}", Nobody(), messages.AgentHello(agent=f"a{number}", host="here", workers=1))
            sizes.append((tmp_path / "coordinator.jsonl").stat().st_size - before)
    late = [size for size in sizes[1000:] if size > 0]
    assert max(late[:10]) < 2 * max(sizes[10:20])


def test_a_ledger_passes_over_what_was_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    path.write_bytes(b'{"a":1}\n[2]\n{"a":3')

    with closing(StateLog(path, list)) as state_log:
        state_log.append({"a": 4}, durable=True)
        assert list(state_log.read()) == [{"a": 1}, {"a": 4}]


def test_a_ledger_that_grows_is_written_anew(tmp_path: Path) -> None:
    total = 0
    with closing(StateLog(tmp_path / "ledger", lambda: [{"total": total}], small=100)) as state_log:
        for number in range(50):
            total += number
            state_log.append({"number": number})

        found = list(state_log.read())
    assert found[0].pop("total") + sum(entry["number"] for entry in found[1:]) == total
    assert len(found) < 20
    assert stat.S_IMODE((tmp_path / "ledger").stat().st_mode) == 0o600


def test_a_journal_is_read_line_by_line_even_after_one_that_was_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_bytes(b'{"event": "cut')

    journal = Journal(path)
    journal.append([journal.line("joined", {"worker": "w1"})])

    line = json.loads(path.read_text().splitlines()[1])
    assert line.pop("time")
    assert line == {"event": "joined", "worker": "w1"}


# -- people


def test_a_resize_a_leave_and_a_stop_are_taken(running: Running) -> None:
    with running.agent() as agent:
        names = hear(agent, messages.Start, messages.to_agent).workers
        assert running.ask("POST", "/resize", {"workers": 1})[0] == 200
        assert running.ask("POST", "/leave", {"who": names[0]})[0] == 200
        assert running.ask("POST", "/leave", {"who": "w99"})[0] == 404
        assert running.ask("POST", "/stop")[0] == 200


def test_the_only_worker_that_trains_is_not_replaced(running: Running) -> None:
    with running.agent(workers=1) as agent:
        name = hear(agent, messages.Start, messages.to_agent).workers[0]
        with running.worker(name) as worker:
            hear(worker, messages.Welcome)
            say(worker, messages.Ready())
            hear(worker, messages.NewGeneration)
            code, answer = running.ask("POST", "/replace", {"who": name})
    assert code == 409
    assert "unisono resize" in answer["error"]


# -- what was written down, for a page on another host


def test_a_page_on_another_host_reads_the_record_and_nothing_else(running: Running, tmp_path: Path) -> None:
    source = CoordinatorSource(Address(running.url, running.token))
    assert source.read("metrics.jsonl", 0, 100) == b""  # there is none yet
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 0}\n')
    assert source.read("metrics.jsonl", 2, 4) == b"step"
    assert source.control().status()["generation"] == 0
    for name in ("token", "coordinator.jsonl", "../run/token", "journal.jsonl/"):
        with pytest.raises((JobError, LaunchError)):
            source.read(name, 0, 100)


@pytest.mark.parametrize("query", ["", "?first=0", "?first=-1&most=5", "?first=0&most=0", "?first=0&most=99999999999"])
def test_a_part_of_the_record_has_a_first_byte_and_a_size(shared: Running, query: str) -> None:
    assert shared.ask("GET", f"/record/journal.jsonl{query}")[0] == 400
