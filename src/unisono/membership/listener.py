"""The coordinator's listening socket, the names under which clients know it, and the protocols on it."""

import asyncio
import errno
import ipaddress
import math
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import psutil
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from unisono.errors import JobError
from unisono.membership.connection import SILENT
from unisono.membership.token import is_loopback

_BACKLOG = 1024


@dataclass(frozen=True, slots=True)
class ListenAddress:
    """The address to listen at.

    Attributes:
        host: a name or address.
        port: 0 for any that is free.
        fd: a listening socket that is open already, instead of both.
        names: further names under which clients know this host; the first is the one that they are told.
    """

    host: str = "127.0.0.1"
    port: int = 0
    fd: int | None = None
    names: tuple[str, ...] = ()


def listen(address: ListenAddress, *, tls: bool) -> socket.socket:
    """A listening socket.

    Raises:
        JobError: it cannot be had; or others than this host can reach it, without TLS.
    """
    try:
        found = _bound(address, tls=tls) if address.fd is None else socket.socket(fileno=address.fd)
    except OSError as error:
        where = f"{address.host}:{address.port}" if address.fd is None else f"descriptor {address.fd}"
        raise JobError(f"the coordinator cannot listen on {where}: {error}") from error
    found.set_inheritable(False)
    bound = found.getsockname()[0]
    if not tls and not is_loopback(bound):
        found.close()
        raise _needs_tls(bound)
    found.listen(_BACKLOG)
    return found


def hosts(listening: socket.socket, address: ListenAddress) -> frozenset[str]:
    """The ``name:port`` that clients may have connected to."""
    bound, port = listening.getsockname()[:2]
    names = {"localhost", "127.0.0.1", "::1", bound, address.host.lower(), *(name.lower() for name in address.names)}
    if not is_loopback(bound):
        names |= {socket.gethostname().lower(), socket.getfqdn().lower()}
    if ipaddress.ip_address(bound).is_unspecified:
        names |= {each.address.lower() for known in psutil.net_if_addrs().values() for each in known}
    return frozenset(f"[{name}]:{port}" if ":" in name else f"{name}:{port}" for name in names)


def url(listening: socket.socket, address: ListenAddress, *, tls: bool) -> str:
    """Where clients find it."""
    bound, port = listening.getsockname()[:2]
    anywhere = ipaddress.ip_address(bound).is_unspecified
    host = next(iter(address.names), socket.getfqdn() if anywhere else bound)
    return f"{'https' if tls else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"


def _bound(address: ListenAddress, *, tls: bool) -> socket.socket:
    family, kind, protocol, _, where = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)[0]
    if not tls and not is_loopback(str(where[0])):
        raise _needs_tls(address.host)
    found = socket.socket(family, kind, protocol)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(where)
    except OSError:
        found.close()
        raise
    return found


def _needs_tls(host: str) -> JobError:
    return JobError(
        f"the coordinator would be reached from other hosts at {host}, where the token could be read on the way: "
        f"give --tls-cert and --tls-key, or let it listen on 127.0.0.1"
    )


_NO_DESCRIPTORS = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
_SAID_AGAIN_S = 60.0


class FewDescriptors:
    """An event loop's handler of exceptions: asyncio's own writes so many a second while it can accept nobody.

    Args:
        say: a function that shows a line.
    """

    def __init__(self, say: Callable[[str], object]) -> None:
        self._say, self._silent_until = say, -math.inf

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Say it, and once in a minute."""
        error = context.get("exception")
        if isinstance(error, OSError) and error.errno in _NO_DESCRIPTORS and "socket" in context:
            if loop.time() >= self._silent_until:
                self._silent_until = loop.time() + _SAID_AGAIN_S
                self._say(f"unisono: nobody can be let in for the moment: {error.strerror}\n")
        elif not (isinstance(error, ValueError) and "_start_serving" in context["message"]):  # tried when all is over
            loop.default_exception_handler(context)


class HttpProtocol(H11Protocol):
    """Hangs up on whoever connects, or has had an answer, and does not say what it wants, or does not take the answer.

    Args:
        request_line_s: seconds that it may take to do so.
    """

    _patience: asyncio.TimerHandle | None = None

    def __init__(self, *args: Any, request_line_s: float, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._request_line_s = request_line_s

    def connection_made(self, transport: Any) -> None:
        """Start waiting for the request."""
        super().connection_made(transport)
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        """There is nothing to wait for."""
        self._forget()
        super().connection_lost(exc)

    def handle_websocket_upgrade(self, event: Any) -> None:
        """It has said what it wants: from now on the other protocol cares for it."""
        self._forget()
        super().handle_websocket_upgrade(event)

    def on_response_complete(self) -> None:
        """Start waiting for the next request: uvicorn's own patience ends with the first byte of it."""
        self._forget()
        self._wait()
        super().on_response_complete()

    def _wait(self) -> None:
        self._patience = self.loop.call_later(self._request_line_s, self._give_up)

    def _give_up(self) -> None:
        cycle: RequestResponseCycle | None = self.cycle
        if cycle is None or cycle.response_complete:  # one that is answered has limits of its own
            self.transport.abort()

    def _forget(self) -> None:
        if self._patience is not None:
            self._patience.cancel()


class WebSocketProtocol(WebSocketsSansIOProtocol):
    """Waits before it sends more than the other side takes, and hangs up on one that takes nothing. It logs nothing.

    Args:
        stuck_s: seconds in which whoever is sent something has to take it.
    """

    _patience: asyncio.TimerHandle | None = None

    def __init__(self, *args: Any, stuck_s: float, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._stuck_s = stuck_s
        self.conn.logger, self.conn.debug = SILENT, False  # it would log all headers, and so the token

    def pause_writing(self) -> None:
        """The kernel's buffer and ours are full."""
        self.writable.clear()
        self._patience = self.loop.call_later(self._stuck_s, self.transport.abort)

    def resume_writing(self) -> None:
        """The other side takes something again."""
        if self._patience is not None:
            self._patience.cancel()
        self.writable.set()

    def shutdown(self) -> None:
        """The coordinator ends. Whoever is hanging up just now need not be told."""
        if self.transport.is_closing():
            self.stop_keepalive()
        else:
            super().shutdown()

    def connection_lost(self, exc: Exception | None) -> None:
        """Whoever waits to send learns of the end when it tries."""
        self.resume_writing()
        super().connection_lost(exc)
