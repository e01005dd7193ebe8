"""The coordinator as a process of its own: killed and started again, asked to end, and reached over TLS."""

import json
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import psutil
import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

from commands import python
from unisono.errors import LaunchError
from unisono.launch.elastic.elastic_settings import make_certificate
from unisono.membership.client import WorkerConnection
from unisono.membership.messages import (
    AgentHello,
    AgentLeaving,
    Finished,
    JobOver,
    Message,
    NewGeneration,
    Ready,
    Start,
    StoreRequest,
    ToWorker,
    Welcome,
    WorkerEnded,
    WorkerHello,
    to_agent,
)
from unisono.membership.token import context_for, read_token, token_file

pytestmark = pytest.mark.procs

PATIENCE_S = 30.0
MODULE = "unisono.membership.server"
MIB = 2**20
CONNECTIONS = 64


class Coordinator:
    """A coordinator in a run folder, on a socket that outlives it."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.folder = folder
        self._options = options
        self.listening = socket.create_server(("127.0.0.1", 0))
        self.process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        fd = self.listening.fileno()
        command = [sys.executable, "-P", "-m", MODULE, "--run-dir", str(self.folder), "--fd", str(fd)]
        self.process = subprocess.Popen(
            [*command, "--failure-timeout", "20", *self._options], stderr=subprocess.PIPE, text=True, pass_fds=[fd]
        )
        until((self.folder / "coordinator.json").exists)

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        assert self.process is not None
        self.process.send_signal(number)
        return self.wait()

    def wait(self) -> int:
        """Its exit code; it must have had nothing to complain of."""
        assert self.process is not None
        _, words = self.process.communicate(timeout=PATIENCE_S)
        assert words == ""
        return self.process.returncode

    @property
    def url(self) -> str:
        return str(json.loads((self.folder / "coordinator.json").read_text())["url"])

    @property
    def token(self) -> str:
        return read_token(token_file(self.folder))

    @contextmanager
    def agent(self, running: tuple[str, ...] = ()) -> Iterator[ClientConnection]:
        address = f"ws://127.0.0.1:{self.listening.getsockname()[1]}/agent"
        with connect(address, additional_headers={"Authorization": f"Bearer {self.token}"}, proxy=None) as connection:
            say(connection, AgentHello(agent="a1", host="here", workers=1, running=running))
            yield connection


def say(connection: ClientConnection, message: Message) -> None:
    connection.send(message.model_dump_json())


def hear(connection: ClientConnection, kind: type[Message]) -> Message:
    while True:
        message = to_agent.validate_json(connection.recv(timeout=PATIENCE_S))
        if isinstance(message, kind):
            return message


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[Coordinator]:
    made = Coordinator(tmp_path)
    made.start()
    yield made
    assert made.process is not None
    made.process.kill()
    made.process.communicate()
    made.listening.close()


def open_line(coordinator: Coordinator, worker: str, told: "SimpleQueue[ToWorker]", **options: Any) -> WorkerConnection:
    hello = WorkerHello(worker=worker, host="here", pid=1, shards=1)
    return WorkerConnection(coordinator.url, coordinator.token, hello, told.put, PATIENCE_S, **options)


def hear_worker(told: "SimpleQueue[ToWorker]", kind: type[Message]) -> ToWorker:
    while not isinstance(message := told.get(timeout=PATIENCE_S), kind):
        pass
    return message


def test_a_coordinator_needs_no_torch() -> None:
    check = f"import sys, {MODULE}; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"

    assert python("-c", check).returncode == 0


def test_only_its_owner_reads_where_it_is_and_what_it_knows(coordinator: Coordinator) -> None:
    for name in ("coordinator.json", "coordinator.jsonl", "token"):
        assert stat.S_IMODE((coordinator.folder / name).stat().st_mode) == 0o600
    assert coordinator.process is not None
    assert coordinator.token not in " ".join(map(str, coordinator.process.args))  # type: ignore[arg-type]


def test_a_job_outlives_a_coordinator_that_is_killed(coordinator: Coordinator) -> None:
    told: SimpleQueue[ToWorker] = SimpleQueue()
    with coordinator.agent() as agent:
        started = hear(agent, Start)
        assert isinstance(started, Start)
        (name,) = started.workers
        line = open_line(coordinator, name, told)
        with closing(line):
            assert hear_worker(told, Welcome) == Welcome(joins=False)
            line.send(Ready())
            hear_worker(told, NewGeneration)
            line.generation = 1
            line.request(StoreRequest(id=0, operation="set", keys=("g1/a",), value="eA=="))

            assert coordinator.end(signal.SIGKILL) == -signal.SIGKILL
            coordinator.start()

            assert line.request(StoreRequest(id=0, operation="get", keys=("g1/a",))).value == "eA=="
            with coordinator.agent(running=(name,)) as again:
                line.send(Finished(digest="ab"))
                over = hear_worker(told, JobOver)
                assert isinstance(over, JobOver)
                assert over.digest == "ab"
                assert hear(again, JobOver) == over
                say(again, WorkerEnded(worker=name, code=0))
    assert coordinator.wait() == 0
    assert not (coordinator.folder / "coordinator.json").exists()
    journal = [json.loads(line)["event"] for line in (coordinator.folder / "journal.jsonl").read_text().splitlines()]
    assert journal.count("minted") == 1
    assert journal[-1] == "over"


def test_a_coordinator_that_is_asked_to_end_says_that_its_job_is_not_over(coordinator: Coordinator) -> None:
    with coordinator.agent() as agent:
        hear(agent, Start)

        assert coordinator.end() == 128 + signal.SIGTERM
        with pytest.raises(ConnectionClosed):
            while True:
                agent.recv(timeout=PATIENCE_S)
    assert not (coordinator.folder / "coordinator.json").exists()


def test_a_job_that_all_leave_ends(coordinator: Coordinator) -> None:
    with coordinator.agent() as agent:
        started = hear(agent, Start)
        assert isinstance(started, Start)
        say(agent, AgentLeaving())
        say(agent, WorkerEnded(worker=started.workers[0], code=-15))
        over = hear(agent, JobOver)
        assert isinstance(over, JobOver)
        assert over.preempted
    assert coordinator.wait() == 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--host", "0.0.0.0"], "give --tls-cert and --tls-key"),  # noqa: S104 - that is the point
        (["--smallest", "3", "--largest", "2"], "3:2 workers"),
        (["--tls-cert", "nothing.pem"], "--tls-cert and --tls-key belong together"),
        (["--run-dir", "nowhere"], "nowhere is no run folder"),
        (["--fd", "999"], "cannot listen on descriptor 999"),
        (["--port", "many"], "invalid int value"),
    ],
)
def test_what_cannot_work_is_refused_with_the_reason(tmp_path: Path, options: list[str], words: str) -> None:
    ended = python("-m", MODULE, "--run-dir", tmp_path, *options, cwd=tmp_path)

    assert ended.returncode == 2
    assert words in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.fixture
def secured(tmp_path: Path) -> Iterator[Coordinator]:
    """Over TLS, with ``certificate.pem`` in its folder."""
    made = make_certificate(tmp_path, ["127.0.0.1"])
    coordinator = Coordinator(tmp_path, "--tls-cert", str(made.chain), "--tls-key", str(made.key))
    coordinator.start()
    with closing(coordinator.listening):
        yield coordinator
        coordinator.end()


@pytest.mark.parametrize("key", ["another's", "locked"])
def test_a_key_that_cannot_be_used_with_the_certificate_is_refused_in_one_line(tmp_path: Path, key: str) -> None:
    (tmp_path / "another").mkdir()
    chain, other = (make_certificate(folder, ["a"]) for folder in (tmp_path, tmp_path / "another"))
    if key == "locked":
        locks = ["openssl", "pkey", "-in", str(chain.key), "-aes256", "-passout", "pass:x", "-out", str(other.key)]
        subprocess.run(locks, check=True, capture_output=True)

    ended = python("-m", MODULE, "--run-dir", tmp_path, "--tls-cert", chain.chain, "--tls-key", other.key, cwd=tmp_path)

    assert ended.returncode == 2
    assert "cannot be used together: " in ended.stderr
    assert ended.stderr.count("\n") == 1


def test_over_tls_a_worker_trusts_the_certificate_that_it_was_given(secured: Coordinator) -> None:
    assert secured.url.startswith("https://127.0.0.1:")
    told: SimpleQueue[ToWorker] = SimpleQueue()
    with closing(open_line(secured, "w77", told, certificates=secured.folder / "certificate.pem")):
        assert told.get(timeout=PATIENCE_S).kind == "refused"  # by name: it was heard
    with pytest.raises(LaunchError, match="certificate"):
        hello = WorkerHello(worker="w77", host="here", pid=1, shards=1)
        WorkerConnection(secured.url, secured.token, hello, told.put, 1.0)


def test_a_connection_over_tls_takes_less_than_a_fifth_of_a_mebibyte(secured: Coordinator) -> None:
    assert secured.process is not None
    process, context = psutil.Process(secured.process.pid), context_for(secured.url, secured.folder / "certificate.pem")
    assert context is not None

    def dial(opened: ExitStack) -> None:
        plain = opened.enter_context(socket.create_connection(secured.listening.getsockname()))
        opened.enter_context(context.wrap_socket(plain, server_hostname="127.0.0.1"))

    with ExitStack() as opened:
        dial(opened)  # what all share is there now
        before = process.memory_info().rss
        for _ in range(CONNECTIONS):
            dial(opened)
        assert process.memory_info().rss - before < CONNECTIONS * MIB / 5
