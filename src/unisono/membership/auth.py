"""The outermost layer of the coordinator: nobody gets past it without the job's token."""

import asyncio
import hmac
import json
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from time import monotonic
from typing import Any

from unisono.membership.token import OUTDATED, REFUSED

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """The limits on what one coordinator takes from its clients.

    Attributes:
        body: the largest request, in bytes.
        request_s: the seconds within which a whole request has to arrive.
        requests_per_s: the requests per second of all clients together; four times as many may come at once.
        connections: the number of connections that all workers and agents together may keep open.
        messages_per_s: the messages per second on each connection; four times as many may come at once. A client that
            sends faster is read more slowly.
        hello_s: the seconds within which a worker or agent that has connected has to say who it is.
        request_line_s: the seconds within which whoever connects has to say what it wants.
        stuck_s: the seconds within which whoever is sent something has to take it.
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
    """Lets so many things happen per second on average, and four times as many at once.

    Args:
        per_s: the allowed number per second.
        clock: a clock in seconds.
    """

    def __init__(self, per_s: float, clock: Callable[[], float] = monotonic) -> None:
        self._per_s = per_s
        self._clock = clock
        self._most = 4 * per_s
        self._left = self._most
        self._then = clock()

    def take(self) -> float:
        """Let one thing happen now, and say how many seconds it comes too early: 0 if it does not."""
        now = self._clock()
        self._left = min(self._most, self._left + (now - self._then) * self._per_s)
        self._then = now
        if self._left < 1:
            return (1 - self._left) / self._per_s
        self._left -= 1
        return 0.0


class _Refusal(Exception):
    """Why somebody does not get in."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status
        self.reason = reason


class AuthMiddleware:
    """Lets a request or a connection in if it holds the token, was meant for this address, and is within limits.

    Args:
        app: the application that serves admitted requests.
        token: the job's token.
        hosts: ``name:port`` under which clients know this address.
    """

    def __init__(self, app: App, token: str, hosts: frozenset[str], limits: RequestLimits | None = None) -> None:
        self._app = app
        self._expected = f"Bearer {token}".encode()
        self._hosts = hosts
        self._limits = limits or RequestLimits()
        self._rate = Rate(self._limits.requests_per_s)
        self._connections = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let one request or connection through, or answer it here."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        try:
            self._check(scope)
        except _Refusal as refusal:
            await _refuse(scope, send, refusal)
            return
        if scope["type"] == "websocket":
            await self._connect(scope, receive, send)
        else:
            await self._request(scope, receive, send)

    def _check(self, scope: Scope) -> None:
        if scope["type"] not in ("http", "websocket"):
            raise _Refusal(400, "unknown kind of connection")
        if _header(scope, b"host").decode("latin-1").lower() not in self._hosts:
            raise _Refusal(403, "this is not the address of a coordinator")  # a name that somebody pointed here
        if _has(scope, b"origin"):
            raise _Refusal(403, "web pages have no access")
        if not hmac.compare_digest(_header(scope, b"authorization"), self._expected):
            raise _Refusal(REFUSED, OUTDATED)
        if self._rate.take():
            raise _Refusal(429, "too many requests")

    async def _connect(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._connections >= self._limits.connections:
            await _refuse(scope, send, _Refusal(503, "too many connections"))
            return
        self._connections += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._connections -= 1

    async def _request(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with asyncio.timeout(self._limits.request_s):
                body = await _read(receive, self._limits.body)
        except TimeoutError:
            await _refuse(scope, send, _Refusal(408, "the request took too long"))
        except _Refusal as refusal:
            await _refuse(scope, send, refusal)
        else:
            await self._app(scope, _replay(body, receive), send)


async def _read(receive: Receive, most: int) -> bytes:
    """The whole body of a request; what comes of it when the client goes away does not matter any more."""
    body = b""
    more = True
    while more:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
        if len(body) > most:
            raise _Refusal(413, f"a request has at most {most} bytes")
    return body


def _replay(body: bytes, receive: Receive) -> Receive:
    bodies = [body]

    async def read() -> MutableMapping[str, Any]:
        return {"type": "http.request", "body": bodies.pop(), "more_body": False} if bodies else await receive()

    return read


async def _refuse(scope: Scope, send: Send, refusal: _Refusal) -> None:
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


def _header(scope: Scope, name: bytes) -> bytes:
    """The value of a header that is there exactly once; otherwise empty."""
    values = [value for key, value in scope["headers"] if key.lower() == name]
    return values[0] if len(values) == 1 else b""


def _has(scope: Scope, name: bytes) -> bool:
    return any(key.lower() == name for key, _ in scope["headers"])
