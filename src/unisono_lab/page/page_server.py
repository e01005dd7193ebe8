"""The routes of a page, and its server."""

import asyncio
import hmac
import json
import secrets
import socket
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, MutableMapping
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from time import monotonic
from types import FrameType
from typing import Annotated, Any, Literal, TypeVar

import uvicorn
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request, cookie_parser
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import BaseRoute, Route

from unisono.errors import JobError, LaunchError, Unreadable
from unisono.launch.elastic.address import Control
from unisono.membership.messages import Name, parse
from unisono.membership.reception import (
    App,
    DescriptorErrors,
    HttpProtocol,
    NotAdmitted,
    Rate,
    Receive,
    Scope,
    Send,
    header,
    read_body,
    with_body,
)
from unisono.membership.token import is_loopback
from unisono_lab.page.curves import LARGEST_STEP, Axis, RunSource
from unisono_lab.page.hub import Hub

May = Literal["act", "look"]
MAY: tuple[May, May] = ("look", "act")
"""The right that a key gives, indexed by whether it is the key to act."""

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
HEADERS = [
    (b"content-security-policy", POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cache-control", b"no-store"),
]
PAGE_HEADER = b"x-unisono-page"
"""The header with the session's word, which only scripts of this page know and can send."""

LARGEST_BODY = 4096
BODY_S, TAKE_S = 10.0, 20.0
REQUESTS_PER_S = 50.0
MOST_SESSIONS = 64
FRESH_S = 3600.0
"""Seconds for which an unused link is valid; short, since the link may be in a log."""


@dataclass(frozen=True, slots=True)
class BrowserSession:
    """The session of an admitted browser.

    Attributes:
        page: the word that its page sends with each request, besides the cookie.
    """

    page: str
    may: May


class Keys:
    """The keys of one page, and the sessions that were opened with them.

    Attributes:
        act: the key to press buttons; it opens one session, within an hour.
        look: the key to look; it opens any number of sessions.
    """

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self.act, self.look = secrets.token_urlsafe(32), secrets.token_urlsafe(32)
        self._clock, self._until = clock, clock() + FRESH_S
        self._sessions: dict[str, BrowserSession] = {}

    def enter(self, key: str) -> tuple[str, BrowserSession] | None:
        """Open a session; returns its cookie and the session, or None if the key is not valid."""
        # Compared in constant time, so that the time of an answer reveals nothing of a key.
        is_act = hmac.compare_digest(key.encode(), self.act.encode()) and self._clock() <= self._until
        if not is_act and not hmac.compare_digest(key.encode(), self.look.encode()):
            return None
        if is_act:
            self._until = float("-inf")
        self._drop_oldest()
        cookie, session = secrets.token_urlsafe(32), BrowserSession(secrets.token_urlsafe(32), MAY[is_act])
        self._sessions[cookie] = session
        return cookie, session

    def session(self, cookie: str, page: str) -> BrowserSession | None:
        """The session of a cookie, if the page's word is that of the session."""
        session = self._sessions.get(cookie)
        return session if session is not None and hmac.compare_digest(session.page.encode(), page.encode()) else None

    def _drop_oldest(self) -> None:
        """Make room: of many sessions that may look, the oldest is closed; one that may act is never closed."""
        if len(self._sessions) >= MOST_SESSIONS:
            del self._sessions[next(cookie for cookie, session in self._sessions.items() if session.may == "look")]


class Gate:
    """Admits a request if it comes from this page, has cookie and word of a session, and is within limits.

    Args:
        app: the application that serves admitted requests, which have ``may`` in their scope.
        keys: the keys and sessions.
        cookie: the name of the cookie.
        is_open: a function that says whether a method and path need no session.
        body_s: the seconds within which a whole request must arrive.
        take_s: the seconds within which the browser must take each part of an answer.
    """

    def __init__(
        self,
        app: App,
        keys: Keys,
        cookie: str,
        is_open: Callable[[str, str], bool],
        body_s: float = BODY_S,
        take_s: float = TAKE_S,
    ) -> None:
        self._app, self._keys, self._cookie, self._is_open = app, keys, cookie, is_open
        self._body_s, self._take_s = body_s, take_s
        self._rate = Rate(REQUESTS_PER_S)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer it with an error."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        confined = _with_headers(send, self._take_s)
        try:
            self._check(scope)
            body = await read_body(receive, LARGEST_BODY, self._body_s)
        except NotAdmitted as refusal:
            if scope["type"] == "http":
                answer = JSONResponse({"error": refusal.reason}, status_code=refusal.status)
                await answer(scope, receive, confined)
            else:
                await send({"type": "websocket.close"})
            return
        await self._app(scope, with_body(body, receive), confined)

    def _check(self, scope: Scope) -> None:
        if scope["type"] != "http":
            raise NotAdmitted(400, "a page answers HTTP requests only")
        host = _header_value(scope, b"host")
        if not _is_ours(host):  # a foreign DNS name may point here (DNS rebinding)
            raise NotAdmitted(403, "this is not the address of a page")
        # Browsers send the origin with each POST: without it, or with another one, the request is not this page's.
        origins = {value.lower() for name, value in scope["headers"] if name == b"origin"}
        if origins - {f"http://{host}".lower().encode()} or (scope["method"] != "GET" and not origins):
            raise NotAdmitted(403, "other pages have no access")
        cookies = cookie_parser(_header_value(scope, b"cookie"))
        session = self._keys.session(cookies.get(self._cookie, ""), _header_value(scope, PAGE_HEADER))
        if session is not None:
            if _header_value(scope, b"sec-fetch-site") not in ("", "same-origin", "none"):
                raise NotAdmitted(403, "other pages have no access")
            scope["may"] = session.may
        elif self._rate.take():
            raise NotAdmitted(429, "too many requests")
        elif not self._is_open(scope["method"], scope["path"]):
            raise NotAdmitted(401, "open the page with its printed link")


def _is_ours(host: str) -> bool:
    """Whether a ``name:port`` is a loopback address. The port may differ, for example that of a tunnel."""
    name = host.rpartition(":")[0] if not host.endswith("]") and ":" in host else host
    return is_loopback(name.removeprefix("[").removesuffix("]").lower())


def _with_headers(send: Send, take_s: float) -> Send:
    """Add the headers that confine the page; sending fails if the browser does not take a part in time."""

    async def sent(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message["headers"], *HEADERS]
        async with asyncio.timeout(take_s):
            await send(message)

    return sent


def _header_value(scope: Scope, name: bytes) -> str:
    return header(scope, name).decode("latin-1")


T = TypeVar("T")

WEB = Path(__file__).with_name("web")
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
MOST_VIEWERS = 32
MOST_READING = 8
"""The most ranges that may wait, since they are read one after the other."""


class _Body(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class EnterBody(_Body):
    """The key of a link."""

    key: Annotated[str, Field(max_length=128)]


class AskBody(_Body):
    """A request to the job, as the command line can make it.

    Attributes:
        workers: the number of workers to resize to.
        who: the id of the worker or agent that leaves or is replaced.
    """

    workers: Annotated[int, Field(ge=1, le=65536)] | None = None
    who: Name | None = None


Place = Annotated[float, Field(ge=0, le=LARGEST_STEP, allow_inf_nan=False)]


class FinerBody(_Body):
    """A range of steps, or of seconds since 1970, into which a viewer has zoomed."""

    axis: Axis
    low: Place
    high: Place


_enter: TypeAdapter[EnterBody] = TypeAdapter(EnterBody)
_ask_body: TypeAdapter[AskBody] = TypeAdapter(AskBody)
_finer: TypeAdapter[FinerBody] = TypeAdapter(FinerBody)


def _required(value: T | None, field: str) -> T:
    if value is None:
        raise JobError(f"the request names no {field}")
    return value


VERBS: Mapping[str, Callable[[Control, AskBody], Mapping[str, Any]]] = {
    "resize": lambda control, body: control.resize(_required(body.workers, "number of workers")),
    "leave": lambda control, body: control.leave(_required(body.who, "worker")),
    "replace": lambda control, body: control.replace(_required(body.who, "worker")),
    "checkpoint": lambda control, body: control.checkpoint(),
    "stop": lambda control, body: control.stop(),
}
"""The possible requests, which do what the commands of these names do."""


@cache
def files() -> Mapping[str, tuple[str, bytes]]:
    """The type and the content of the page's files, by the path of their URL. No other files are served."""
    paths = {f"/web/{path.name}": path for path in WEB.iterdir() if path.suffix in TYPES}
    paths["/"] = WEB / "index.html"
    return {url: (f"{TYPES[path.suffix]}; charset=utf-8", path.read_bytes()) for url, path in paths.items()}


def is_open(method: str, path: str) -> bool:
    """Whether a request needs no session: for the page's own files, which have no data of the job, and to enter."""
    return (method in ("GET", "HEAD") and path in files()) or (method == "POST" and path == "/enter")


class _Stream(StreamingResponse):
    """A stream that counts as a viewer exactly as long as its browser takes the news."""

    body_iterator: AsyncGenerator[str, None]

    def __init__(self, hub: Hub, events: AsyncGenerator[str, None]) -> None:
        super().__init__(events, media_type="text/event-stream")
        self._hub = hub

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events."""
        with self._hub.watched():
            await super().__call__(scope, receive, send)

    async def stream_response(self, send: Send) -> None:
        async with aclosing(self.body_iterator):
            await super().stream_response(send)


class Page:
    """The routes of a page."""

    def __init__(self, source: RunSource, keys: Keys, cookie: str) -> None:
        self.hub = Hub(source)
        self._source, self._keys, self._cookie = source, keys, cookie

    def routes(self) -> list[BaseRoute]:
        """All routes."""
        return [
            *(Route(path, self._file, methods=["GET"]) for path in files()),
            Route("/enter", self._entered, methods=["POST"]),
            Route("/stream", self._stream, methods=["GET"]),
            Route("/share", self._share, methods=["GET"]),
            Route("/finer", self._finer, methods=["POST"]),
            *(Route(f"/ask/{verb}", self._control, methods=["POST"]) for verb in VERBS),
        ]

    @asynccontextmanager
    async def running(self, app: Starlette) -> AsyncIterator[None]:
        """Follow the run as long as the page is served."""
        following = asyncio.create_task(self.hub.follow())
        yield
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)

    async def _file(self, request: Request) -> Response:
        kind, content = files()[request.url.path]
        return Response(content, media_type=kind)

    async def _entered(self, request: Request) -> Response:
        entered = self._keys.enter(parse(_enter, await request.body()).key)
        if entered is None:
            why = "this link has been used, or is of another page: unisono page with the run folder gives a new one"
            raise HTTPException(401, why)
        cookie, session = entered
        answer = JSONResponse({"page": session.page, "may": session.may})
        answer.set_cookie(self._cookie, cookie, httponly=True, samesite="strict")
        return answer

    async def _share(self, request: Request) -> Response:
        _require_act(request)
        return JSONResponse({"key": self._keys.look})

    async def _stream(self, request: Request) -> Response:
        if self.hub.viewers >= MOST_VIEWERS:
            raise HTTPException(503, f"{MOST_VIEWERS} browsers look at this page already: close one")
        return _Stream(self.hub, self._events(request.scope["may"]))

    async def _events(self, may: str) -> AsyncGenerator[str, None]:
        first = {"name": self._source.name, "may": may}
        async with aclosing(self.hub.news()) as stream:
            async for news in stream:
                yield f"data: {json.dumps({**first, **news}, allow_nan=False)}\n\n"
                first = {}

    async def _finer(self, request: Request) -> Response:
        if self.hub.reading >= MOST_READING:
            raise HTTPException(503, "too many browsers zoom in at this moment")
        body = parse(_finer, await request.body())
        return JSONResponse({"curves": await self.hub.finer(body.axis, body.low, body.high, request.is_disconnected)})

    async def _control(self, request: Request) -> Response:
        _require_act(request)
        verb = request.url.path.rpartition("/")[2]
        body, control = parse(_ask_body, await request.body()), self._source.control()
        if control is None:
            raise JobError("this job has no coordinator, or is over")
        await asyncio.to_thread(VERBS[verb], control, body)
        return JSONResponse({"done": verb})


def page_app(page: Page, keys: Keys, cookie: str) -> Gate:
    """The application of a page, with its gate."""
    refused = dict.fromkeys((JobError, LaunchError, Unreadable, HTTPException), _refused)
    app = Starlette(routes=page.routes(), lifespan=page.running, exception_handlers=refused)
    return Gate(app, keys, cookie, is_open)


def _require_act(request: Request) -> None:
    if request.scope["may"] != "act":
        raise HTTPException(403, "this page is read-only")


async def _refused(request: Request, error: Exception) -> Response:
    status, words = (error.status_code, error.detail) if isinstance(error, HTTPException) else (400, str(error))
    return JSONResponse({"error": words}, status_code=status, headers=getattr(error, "headers", None))


# The process that serves a page: ``unisono page RUN_DIR``. It needs no torch.


NICE = 10
"""The niceness of the process, so that workers on this host go first."""

FAREWELL_S = 1
"""Seconds in which viewers get the end of the job."""

TICK_S = 30.0
ENOUGH_S = 3
"""Seconds for which requests under way may end when the server shuts down."""

REQUEST_LINE_S = 10.0


class PageServer(uvicorn.Server):
    """A server that wakes at a signal, not ten times a second as uvicorn's does, and sends viewers the end."""

    def __init__(self, config: uvicorn.Config, hub: Hub) -> None:
        super().__init__(config)
        self._hub = hub

    async def main_loop(self) -> None:
        """Serve until the server has to end."""
        self._loop, self._signalled = asyncio.get_running_loop(), asyncio.Event()
        self._loop.set_exception_handler(DescriptorErrors(sys.stderr.write))
        while not await self.on_tick(0):
            with suppress(TimeoutError):
                async with asyncio.timeout(TICK_S):
                    await self._signalled.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Send the viewers the end of the run, and close the connections of those that do not take it."""
        farewell = asyncio.create_task(self._hub.end())
        hanging_up = asyncio.get_running_loop().call_later(FAREWELL_S, self._hang_up)
        await super().shutdown(sockets)
        hanging_up.cancel()
        farewell.cancel()
        await asyncio.gather(farewell, return_exceptions=True)

    def _hang_up(self) -> None:
        for connection in list(self.server_state.connections):
            connection.transport.abort()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Handle a signal: wake the main loop."""
        super().handle_exit(sig, frame)
        if hasattr(self, "_loop"):  # otherwise the main loop sees it when it begins
            self._loop.call_soon_threadsafe(self._signalled.set)


def serve(source: RunSource, port: int, print_link: Callable[[str], None]) -> None:
    """Serve the page of a run until a signal ends it; port 0 is any free one. Main thread only.

    Raises:
        JobError: the port cannot be used.
    """
    try:
        listening = socket.create_server(("127.0.0.1", port), backlog=MOST_VIEWERS)
    except OSError as error:
        raise JobError(f"a page cannot listen on port {port} of this host: {error}; name another with --port") from None
    with listening:
        port = listening.getsockname()[1]
        keys, cookie = Keys(), f"unisono-{port}"
        page = Page(source, keys, cookie)
        app = page_app(page, keys, cookie)
        config = uvicorn.Config(
            app,
            lifespan="on",
            interface="asgi3",
            loop="asyncio",
            http=partial(HttpProtocol, request_line_s=REQUEST_LINE_S),  # type: ignore[arg-type]  # it is called
            ws="none",
            timeout_graceful_shutdown=ENOUGH_S,
            limit_concurrency=4 * MOST_VIEWERS,
            log_config=None,
            log_level="error",  # bad or too many requests must not fill a log
            access_log=False,
            server_header=False,
            date_header=False,  # uvicorn would wake each second to make it
            proxy_headers=False,
        )
        print_link(f"http://127.0.0.1:{port}/#{keys.act}")
        PageServer(config, page.hub).run([listening])
