"""The outermost layer of the coordinator: nobody gets past it without the job's token."""

import hmac
import json
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic

from unisono.membership.asgi import App, NotAdmitted, Receive, Scope, Send, body_of, header, read_already
from unisono.membership.token import OUTDATED, REFUSED


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
            raise NotAdmitted(403, "this is not the address of a coordinator")  # a name that somebody pointed here
        if _has(scope, b"origin"):
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
            body = await body_of(receive, self._limits.body, self._limits.request_s)
        except NotAdmitted as refusal:
            await _refuse(scope, send, refusal)
        else:
            await self._app(scope, read_already(body, receive), send)


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


def _has(scope: Scope, name: bytes) -> bool:
    return any(key.lower() == name for key, _ in scope["headers"])
