"""Workers that ask each other, all in one process."""

import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest

from network_keys import private
from unisono.errors import WorkerLost
from unisono.reduce.admission import family_of, listen
from unisono.reduce.transport import Traffic
from unisono_lab.strategies.queued_work import RpcEndpoint
from unisono_lab.strategies.rpc_message import RpcMessage

PATIENCE_S = 20.0


def _has_ipv6() -> bool:
    try:
        listen("::1").close()
    except OSError:
        return False
    return True


OVER_IPV6 = pytest.mark.skipif(not _has_ipv6(), reason="this machine has no IPv6, not even loopback")
SEVERAL_HOSTS = "127.0.0.1"
"""Workers there speak TLS."""

HOSTS = pytest.mark.parametrize(
    "host", ["", SEVERAL_HOSTS, pytest.param("::1", marks=OVER_IPV6)], ids=["one host", "several hosts", "over IPv6"]
)


class Table:
    """Where as many workers gather as have threads here.

    Attributes:
        said: everybody's values, one list for each time.
    """

    def __init__(self, workers: int) -> None:
        self._barrier = threading.Barrier(workers, timeout=PATIENCE_S)
        self._values: list[Any] = [None] * workers
        self.said: list[list[Any]] = []

    def gather(self, rank: int) -> Callable[[Any], list[Any]]:
        def gathered(value: Any) -> list[Any]:
            self._values[rank] = value
            try:
                if self._barrier.wait() == 0:
                    self.said.append(list(self._values))
                self._barrier.wait()
            except threading.BrokenBarrierError:
                raise WorkerLost("somebody left the table") from None
            return self.said[-1]

        return gathered

    def leave(self) -> None:
        self._barrier.abort()


def echo(rank: int, message: RpcMessage) -> RpcMessage:
    return RpcMessage({**message.values, "to": rank}, message.packed)


class Endpoints:
    """Some endpoints in one process; ``ends`` is told whose connections are closed."""

    def __init__(
        self,
        workers: int,
        host: str = "",
        answer: Callable[[int, RpcMessage], RpcMessage] = echo,
        timeout_s: float = PATIENCE_S,
        ends: Callable[[int], None] = lambda rank: None,
    ) -> None:
        self.table = Table(workers)
        self.traffic = [Traffic() for _ in range(workers)]

        def formed(rank: int) -> RpcEndpoint:
            keys = private() if host == SEVERAL_HOSTS else None
            endpoint = RpcEndpoint(
                rank, host, answer, self.traffic[rank], timeout_s, ends=partial(ends, rank), keys=keys
            )
            endpoint.meet(self.table.gather(rank))
            return endpoint

        with ThreadPoolExecutor(workers) as pool:
            self.endpoints = list(pool.map(formed, range(workers)))

    def __enter__(self) -> Sequence[RpcEndpoint]:
        return self.endpoints

    def __exit__(self, *error: object) -> None:
        for endpoint in self.endpoints:
            endpoint.close()


def called(endpoint: RpcEndpoint) -> socket.socket:
    """A stranger's connection to a worker."""
    connection = socket.socket(socket.AF_UNIX if isinstance(endpoint.address, str) else family_of(endpoint.address[0]))
    connection.settimeout(PATIENCE_S)
    try:
        connection.connect(endpoint.address)
    except OSError:
        connection.close()
        raise
    return connection
