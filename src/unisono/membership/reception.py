"""The coordinator's listening socket, its protocols, and the checks of each request and connection."""

import asyncio
import errno
import hmac
import ipaddress
import json
import math
import socket
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from time import monotonic
from typing import Any

import psutil
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from unisono.errors import JobError
from unisono.membership.client import SILENT
from unisono.membership.token import OUTDATED, REFUSED, is_loopback

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class NotAdmitted(Exception):
    """The reason why a request or a connection is not admitted, and the status code for it."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status, self.reason = status, reason


def header(scope: Scope, name: bytes) -> bytes:
    """The value of a header that a request has exactly once; otherwise empty."""
    values = [value for key, value in scope["headers"] if key.lower() == name]
    return values[0] if len(values) == 1 else b""


async def read_body(receive: Receive, max_bytes: int, timeout_s: float) -> bytes:
    """The whole body of a request; a part of it if the client goes away, to which no answer can be sent any more.

    Raises:
        NotAdmitted: the body has more than ``max_bytes``, or takes longer than ``timeout_s``.
    """
    body, more = b"", True
    try:
        async with asyncio.timeout(timeout_s):
            while more:
                message = await receive()
                body += message.get("body", b"")
                more = message.get("more_body", False)
                if len(body) > max_bytes:
                    raise NotAdmitted(413, f"a request has at most {max_bytes} bytes")
    except TimeoutError:
        raise NotAdmitted(408, "the request took too long") from None
    return body


def with_body(body: bytes, receive: Receive) -> Receive:
    """A receive function that first returns a body that was read already, and then what follows it."""
    bodies = [body]

    async def read() -> MutableMapping[str, Any]:
        return {"type": "http.request", "body": bodies.pop(), "more_body": False} if bodies else await receive()

    return read


# The layer that lets no request or connection pass without the job's token.


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """The limits on what one coordinator accepts from its clients.

    Attributes:
        body: the size of the largest request, in bytes.
        request_s: the seconds within which a whole request has to arrive.
        requests_per_s: the requests per second of all clients together; four times as many may come at once.
        connections: the number of connections that all workers and agents together may keep open.
        messages_per_s: the messages per second on each connection; four times as many may come at once. A client that
            sends faster is read more slowly.
        hello_s: the seconds within which a hello has to follow the connection of a worker or agent.
        request_line_s: the seconds within which a request has to follow a connection.
        stuck_s: the seconds within which a client has to read what it is sent.
    """

    body: int = 2**14
    request_s: float = 10.0
    requests_per_s: float = 500.0
    connections: int = 8192
    messages_per_s: float = 1000.0
    hello_s: float = 10.0
    request_line_s: float = 10.0
    stuck_s: float = 20.0


class Rate:
    """A token bucket: it allows so many events per second on average, and four times as many at once."""

    def __init__(self, per_s: float, clock: Callable[[], float] = monotonic) -> None:
        self._per_s = per_s
        self._clock = clock
        self._largest = 4 * per_s
        self._tokens = self._largest
        self._updated_at = clock()

    def take(self) -> float:
        """Count one event now. Returns the seconds by which it comes too early: 0 if it does not."""
        now = self._clock()
        self._tokens = min(self._largest, self._tokens + (now - self._updated_at) * self._per_s)
        self._updated_at = now
        if self._tokens < 1:
            return (1 - self._tokens) / self._per_s
        self._tokens -= 1
        return 0.0


class AuthMiddleware:
    """Admits a request or a connection if it has the token, is meant for this address, and is within the limits.

    Args:
        hosts: each ``name:port`` under which clients know this address.
    """

    def __init__(self, app: App, token: str, hosts: frozenset[str], limits: RequestLimits | None = None) -> None:
        self._app = app
        self._expected = f"Bearer {token}".encode()
        self._hosts = hosts
        self._limits = limits or RequestLimits()
        self._rate = Rate(self._limits.requests_per_s)
        self._connections = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass one request or connection on, or refuse it."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        try:
            self._check(scope)
        except NotAdmitted as refusal:
            await _refuse(scope, send, refusal)
            return
        if scope["type"] == "websocket":
            await self._connect(scope, receive, send)
        else:
            await self._request(scope, receive, send)

    def _check(self, scope: Scope) -> None:
        if scope["type"] not in ("http", "websocket"):
            raise NotAdmitted(400, "unknown kind of connection")
        if header(scope, b"host").decode("latin-1").lower() not in self._hosts:
            # Any name server can point a name at this address, so that a web page reaches it.
            raise NotAdmitted(403, "this is not the address of a coordinator")
        if _has_header(scope, b"origin"):
            raise NotAdmitted(403, "web pages have no access")
        if not hmac.compare_digest(header(scope, b"authorization"), self._expected):
            raise NotAdmitted(REFUSED, OUTDATED)
        if self._rate.take():
            raise NotAdmitted(429, "too many requests")

    async def _connect(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._connections >= self._limits.connections:
            await _refuse(scope, send, NotAdmitted(503, "too many connections"))
            return
        self._connections += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._connections -= 1

    async def _request(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            body = await read_body(receive, self._limits.body, self._limits.request_s)
        except NotAdmitted as refusal:
            await _refuse(scope, send, refusal)
        else:
            await self._app(scope, with_body(body, receive), send)


async def _refuse(scope: Scope, send: Send, refusal: NotAdmitted) -> None:
    body = json.dumps({"error": refusal.reason}).encode()
    headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
    if refusal.status == REFUSED:
        headers.append((b"www-authenticate", b"Bearer"))
    kind = "websocket.http.response" if scope["type"] == "websocket" else "http.response"
    if scope["type"] == "websocket" and kind not in scope.get("extensions", {}):
        await send({"type": "websocket.close"})
        return
    if scope["type"] == "http":
        headers.append((b"content-length", str(len(body)).encode()))
    await send({"type": f"{kind}.start", "status": refusal.status, "headers": headers})
    await send({"type": f"{kind}.body", "body": body})


def _has_header(scope: Scope, name: bytes) -> bool:
    return any(key.lower() == name for key, _ in scope["headers"])


# The coordinator's listening socket, the names under which clients know it, and the protocols on it.

_BACKLOG = 1024


@dataclass(frozen=True, slots=True)
class ListenAddress:
    """The address to listen at.

    Attributes:
        host: a name or address.
        port: 0 for any that is free.
        fd: the descriptor of a listening socket that is open already, instead of host and port.
        names: further names under which clients know this host; the first is in the URL that they get.
    """

    host: str = "127.0.0.1"
    port: int = 0
    fd: int | None = None
    names: tuple[str, ...] = ()


def listen(address: ListenAddress, *, tls: bool) -> socket.socket:
    """A listening socket.

    Raises:
        JobError: the address cannot be listened at; or other hosts can reach it, without TLS.
    """
    try:
        listening = _bind(address, tls=tls) if address.fd is None else socket.socket(fileno=address.fd)
    except OSError as error:
        where = f"{address.host}:{address.port}" if address.fd is None else f"descriptor {address.fd}"
        raise JobError(f"the coordinator cannot listen on {where}: {error}") from error
    listening.set_inheritable(False)
    bound = listening.getsockname()[0]
    if not tls and not is_loopback(bound):
        listening.close()
        raise _needs_tls(bound)
    listening.listen(_BACKLOG)
    return listening


def hosts(listening: socket.socket, address: ListenAddress) -> frozenset[str]:
    """The ``name:port`` that clients may have connected to."""
    bound, port = listening.getsockname()[:2]
    names = {"localhost", "127.0.0.1", "::1", bound, address.host.lower(), *(name.lower() for name in address.names)}
    if not is_loopback(bound):
        names |= {socket.gethostname().lower(), socket.getfqdn().lower()}
    if ipaddress.ip_address(bound).is_unspecified:
        names |= {own.address.lower() for interface in psutil.net_if_addrs().values() for own in interface}
    return frozenset(f"[{name}]:{port}" if ":" in name else f"{name}:{port}" for name in names)


def url(listening: socket.socket, address: ListenAddress, *, tls: bool) -> str:
    """The URL at which clients reach the coordinator."""
    bound, port = listening.getsockname()[:2]
    anywhere = ipaddress.ip_address(bound).is_unspecified
    host = next(iter(address.names), socket.getfqdn() if anywhere else bound)
    return f"{'https' if tls else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"


def _bind(address: ListenAddress, *, tls: bool) -> socket.socket:
    family, kind, protocol, _, where = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)[0]
    if not tls and not is_loopback(str(where[0])):
        raise _needs_tls(address.host)
    listening = socket.socket(family, kind, protocol)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(where)
    except OSError:
        listening.close()
        raise
    return listening


def _needs_tls(host: str) -> JobError:
    return JobError(
        f"the coordinator would be reached from other hosts at {host}, where the token could be read on the way: "
        f"give --tls-cert and --tls-key, or let it listen on 127.0.0.1"
    )


_NO_DESCRIPTORS = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
_REPEAT_S = 60.0


class DescriptorErrors:
    """An exception handler of an event loop: asyncio's own would report a lack of descriptors at each attempt."""

    def __init__(self, write: Callable[[str], object]) -> None:
        self._write, self._silent_until = write, -math.inf

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Report an exception."""
        error = context.get("exception")
        if isinstance(error, OSError) and error.errno in _NO_DESCRIPTORS and "socket" in context:
            if loop.time() >= self._silent_until:
                self._silent_until = loop.time() + _REPEAT_S
                self._write(f"unisono: no connection can be accepted at present: {error.strerror}\n")
        # After such an error asyncio tries to listen again, which fails if the socket is closed by then.
        elif not (isinstance(error, ValueError) and "_start_serving" in context["message"]):
            loop.default_exception_handler(context)


class HttpProtocol(H11Protocol):
    """Closes connections whose client sends no request in time, or does not read the answer."""

    _timer: asyncio.TimerHandle | None = None

    def __init__(self, *args: Any, request_line_s: float, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._request_line_s = request_line_s

    def connection_made(self, transport: Any) -> None:
        """Start waiting for the request."""
        super().connection_made(transport)
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop waiting for a request."""
        self._stop_waiting()
        super().connection_lost(exc)

    def handle_websocket_upgrade(self, event: Any) -> None:
        """Stop waiting: from now on :class:`WebSocketProtocol` has the connection."""
        self._stop_waiting()
        super().handle_websocket_upgrade(event)

    def on_response_complete(self) -> None:
        """Start waiting for the next request: uvicorn's own timeout ends with the request's first byte."""
        self._stop_waiting()
        self._wait()
        super().on_response_complete()

    def _wait(self) -> None:
        self._timer = self.loop.call_later(self._request_line_s, self._give_up)

    def _give_up(self) -> None:
        cycle: RequestResponseCycle | None = self.cycle
        if cycle is None or cycle.response_complete:  # a request that is being answered has limits of its own
            self.transport.abort()

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()


class WebSocketProtocol(WebSocketsSansIOProtocol):
    """Sends no more than the client reads, and closes connections whose client reads nothing. It logs nothing."""

    _timer: asyncio.TimerHandle | None = None

    def __init__(self, *args: Any, stuck_s: float, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._stuck_s = stuck_s
        self.conn.logger, self.conn.debug = SILENT, False  # it would log all headers, and so the token

    def pause_writing(self) -> None:
        """Stop sending, since the buffers are full, and give the client some time to read."""
        self.writable.clear()
        self._timer = self.loop.call_later(self._stuck_s, self.transport.abort)

    def resume_writing(self) -> None:
        """Send again, since the client reads again."""
        if self._timer is not None:
            self._timer.cancel()
        self.writable.set()

    def shutdown(self) -> None:
        """Close the connection when the coordinator ends, unless it is being closed already."""
        if self.transport.is_closing():
            self.stop_keepalive()
        else:
            super().shutdown()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wake tasks that wait to send: they learn of the end when they try."""
        self.resume_writing()
        super().connection_lost(exc)
