"""What another user of this host can do to workers whose meeting point everybody can read and change."""

import json
import os
import socket
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from other_user import another_user, needs_root
from unisono.errors import WorkerLost
from unisono.job import Job
from unisono.membership.environment import Environment, RendezvousAddress
from unisono.membership.rendezvous import Generation, TorchRendezvousStore
from unisono.plan.split import Split
from unisono.reduce.admission import address_of, calling, listen, present
from unisono.reduce.data_network import NetworkKeys
from unisono.reduce.host_memory import Segment, created
from unisono.settings.table import Communication
from unisono.train.config.run_config import Connection, RunConfig
from unisono.train.group.connect import connect
from unisono.train.group.meeting import FixedRendezvous
from unisono.train.group.workers import Workers

pytestmark = [pytest.mark.procs, needs_root]

PATIENCE_S = 20.0
HERE = "127.0.0.1"
SCOPE = "unisono/7"


class OverTorchStore(FixedRendezvous):
    """At a store of torch, as torchrun and Slurm's jobs have it: whoever knows the port can read and write there."""

    def __init__(self, port: int, rank: int, timeout_s: float) -> None:
        environment = Environment("torchrun", rank, 2, rank, 2, "here", RendezvousAddress(HERE, port))
        super().__init__(environment, timeout_s, meeting=7)
        self._port = port

    def store(self) -> dist.Store:
        return dist.PrefixStore(SCOPE, opened(self._port))


def opened(port: int) -> dist.Store:
    return dist.TCPStore(HERE, port, None, False, timeout=timedelta(seconds=PATIENCE_S), wait_for_workers=False)


def gathered(port: int, rank: int, transport: str, timeout_s: float = PATIENCE_S) -> list[float]:
    """What a worker has when all have told the others a number, and whether others can reach these connections."""
    job, generation = Job.create(batch_size=8, shards=2), Generation(1, rank, Split.even(2, 2))
    how = Connection(Communication(transport=transport), timeout_s)  # type: ignore[arg-type]
    config = RunConfig(job, torch.device("cpu"), connection=how)
    workers: Workers = connect(config, generation, OverTorchStore(port, rank, timeout_s))
    try:
        rows: list[float] = workers.transport.all_gather(torch.tensor([rank + 0.5])).flatten().tolist()
        return [*rows, workers.is_open]
    finally:
        workers.close()


def between_with(port: int, board: str, name: str, report: Callable[[str], None]) -> None:
    """Has the worker of rank 1 call this process in place of rank 0, and changes what both say then."""
    store = TorchRendezvousStore(dist.PrefixStore(f"{SCOPE}/{board}", opened(port)), PATIENCE_S)
    told = store.read(name)
    if name.startswith("peer"):
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listening.bind(told[:-4] + b"0000")
        listening.listen()
        store.post(name, listening.getsockname())
        report("ready")
        listening.accept()[0].recv(100)
        return
    found = json.loads(told)
    address = found if isinstance(found, str) else (found[0], found[1])
    listening = listen("" if isinstance(address, str) else HERE)
    store.post(name, json.dumps(address_of(listening)).encode())
    report("ready")
    caller, _ = listening.accept()
    called = calling(address)
    called.connect(address)
    if not os.fork():
        while data := called.recv(2**16):
            caller.sendall(data)
    for _ in range(2):  # who calls, and what proves that it may
        called.sendall(caller.recv(2**16))
    while data := caller.recv(2**16):
        called.sendall(data[:-4] + torch.tensor([1000.0]).numpy().tobytes() if len(data) > 4 else data)


def calls_first(port: int, board: str, name: str, report: Callable[[str], None]) -> None:
    """Calls rank 0 as rank 1 would, and knows all that can be known from the store and from how it is reached."""
    prefixed = dist.PrefixStore(SCOPE, opened(port))
    found = json.loads(TorchRendezvousStore(dist.PrefixStore(board, prefixed), PATIENCE_S).read(name))
    address = found if isinstance(found, str) else (found[0], found[1])
    keys = NetworkKeys(f"{SCOPE} at port {port}")
    if prefixed.check(["keys/board/network"]):
        keys = NetworkKeys.unpacked(bytes.fromhex(prefixed.get("keys/board/network").decode()))
    connection = calling(address)
    try:
        connection.settimeout(PATIENCE_S)
        connection.connect(address)
        present(connection, 1, keys.of("1 all").secret_of(0))
    except (OSError, EOFError):
        report("refused")
    else:
        report("let in")


def job(
    transport: str, does: Callable[..., None], *args: str, timeout_s: float = PATIENCE_S
) -> tuple[str, Future[list[float]], Future[list[float]]]:
    """What the other user reports, before the second worker begins; and how both workers end."""
    server = dist.TCPStore(HERE, 0, None, True, wait_for_workers=False)
    with another_user(partial(does, server.port, *args)) as other, ThreadPoolExecutor(2) as pool:
        first = pool.submit(gathered, server.port, 0, transport, timeout_s)
        reported = other.reports()
        second = pool.submit(gathered, server.port, 1, transport)
    return reported, first, second


@pytest.mark.parametrize(
    ("transport", "board", "name"),
    [("sockets", "all", "data/0"), ("shared_memory", "host/0", "peer/0")],
)
def test_who_stands_between_workers_changes_nothing_and_is_named(transport: str, board: str, name: str) -> None:
    reported, _, second = job(transport, between_with, board, name, timeout_s=1.0)  # nobody will call rank 0
    assert reported == "ready"
    with pytest.raises(WorkerLost, match="a process of another user answers"):
        second.result()


def test_who_has_read_the_store_and_calls_first_is_not_let_in() -> None:
    reported, first, second = job("sockets", calls_first, "all", "data/0")
    assert reported == "refused"
    assert first.result() == second.result() == [0.5, 1.5, False]


@pytest.mark.parametrize(("transport", "is_open"), [("shared_memory", False), ("process_group", True)])
def test_only_torchs_own_network_is_open_to_other_users(transport: str, is_open: bool) -> None:
    _, first, second = job(transport, lambda port, report: report("looks on"))
    assert first.result() == second.result() == [0.5, 1.5, is_open]


def looks_into(process: int, paths: list[str], report: Callable[[str], None]) -> None:
    """Tries to read what a process has, as root's children that have become another user cannot inherit it."""
    opened = []
    for path in paths:
        with suppress(PermissionError), Path(f"/proc/{process}/{path}").open("rb"):
            opened.append(path)
    report(f"opened {opened}")


def test_shared_memory_and_what_proc_tells_of_a_forked_worker_are_closed_to_others() -> None:
    segment = Segment(created(4096), 4096)
    reading, writing = os.pipe()
    worker = os.fork()  # as the fork server does
    if not worker:
        os.read(reading, 1)
        os._exit(0)
    try:
        paths = [f"fd/{segment.descriptor}", "environ", "mem", "maps"]
        with another_user(partial(looks_into, worker, paths)) as other:
            assert other.reports() == "opened []"
        for path in paths:  # which are there, for this user
            Path(f"/proc/{worker}/{path}").open("rb").close()
    finally:
        os.write(writing, b"x")
        os.waitpid(worker, 0)
        os.close(reading)
        os.close(writing)
