"""The routes of a page, and the server that has them."""

import asyncio
import json
import socket
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import aclosing, asynccontextmanager, suppress
from functools import cache, partial
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, TypeVar

import uvicorn
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import BaseRoute, Route
from starlette.types import Receive, Scope, Send

from unisono.errors import JobError, LaunchError, Unreadable
from unisono.launch.elastic.address import Control
from unisono.membership.listener import FewDescriptors, HttpProtocol
from unisono.membership.messages import Name
from unisono.membership.parser import parse
from unisono_lab.page.curves import LARGEST_STEP, Axis
from unisono_lab.page.gate import Gate, Keys
from unisono_lab.page.hub import Hub
from unisono_lab.page.source import RunSource

T = TypeVar("T")

WEB = Path(__file__).with_name("web")
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
MOST_VIEWERS = 32
MOST_READING = 8
"""Ranges that may be waited for: they are read one after the other."""

LOOK_ONLY = JobError("this page may only be looked at")


class _Body(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class EnterBody(_Body):
    """The key of a link."""

    key: Annotated[str, Field(max_length=128)]


class AskBody(_Body):
    """What the command line can ask of a job.

    Attributes:
        workers: the number of workers, to resize.
        who: a worker's or an agent's id, to leave or be replaced.
    """

    workers: Annotated[int, Field(ge=1, le=65536)] | None = None
    who: Name | None = None


Place = Annotated[float, Field(ge=0, le=LARGEST_STEP, allow_inf_nan=False)]


class FinerBody(_Body):
    """A range of steps, or of seconds since 1970, into which somebody has zoomed."""

    axis: Axis
    low: Place
    high: Place


_enter: TypeAdapter[EnterBody] = TypeAdapter(EnterBody)
_ask: TypeAdapter[AskBody] = TypeAdapter(AskBody)
_finer: TypeAdapter[FinerBody] = TypeAdapter(FinerBody)


def _said(value: T | None, what: str) -> T:
    if value is None:
        raise JobError(f"say {what}")
    return value


VERBS: Mapping[str, Callable[[Control, AskBody], Mapping[str, Any]]] = {
    "resize": lambda control, body: control.resize(_said(body.workers, "how many workers")),
    "leave": lambda control, body: control.leave(_said(body.who, "who")),
    "replace": lambda control, body: control.replace(_said(body.who, "who")),
    "checkpoint": lambda control, body: control.checkpoint(),
    "stop": lambda control, body: control.stop(),
}
"""What may be asked, as the commands of these names do."""


@cache
def files() -> Mapping[str, tuple[str, bytes]]:
    """The files of the page by the path of their URL, each with its type: a closed list."""
    found = {f"/web/{path.name}": path for path in WEB.iterdir() if path.suffix in TYPES}
    found["/"] = WEB / "index.html"
    return {url: (f"{TYPES[path.suffix]}; charset=utf-8", path.read_bytes()) for url, path in found.items()}


def is_open(method: str, path: str) -> bool:
    """Whether a request needs no session: for the page's own files, in which nothing of the job is, and to enter."""
    return (method in ("GET", "HEAD") and path in files()) or (method == "POST" and path == "/enter")


class _Stream(StreamingResponse):
    """Has a place from its first moment until nobody takes the news, and no longer: places are few."""

    body_iterator: AsyncGenerator[str, None]

    def __init__(self, hub: Hub, events: AsyncGenerator[str, None]) -> None:
        super().__init__(events, media_type="text/event-stream")
        self._hub = hub

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send them."""
        with self._hub.watched():
            await super().__call__(scope, receive, send)

    async def stream_response(self, send: Send) -> None:
        async with aclosing(self.body_iterator):
            await super().stream_response(send)


class Page:
    """The routes.

    Args:
        source: the run to show.
        keys: the keys and sessions.
        cookie: the name of the cookie.
    """

    def __init__(self, source: RunSource, keys: Keys, cookie: str) -> None:
        self.hub = Hub(source)
        self._source, self._keys, self._cookie = source, keys, cookie

    def routes(self) -> list[BaseRoute]:
        """All there are."""
        return [
            *(Route(path, self._file, methods=["GET"]) for path in files()),
            Route("/enter", self._entered, methods=["POST"]),
            Route("/stream", self._stream, methods=["GET"]),
            Route("/share", self._share, methods=["GET"]),
            Route("/finer", self._finer, methods=["POST"]),
            *(Route(f"/ask/{verb}", self._asked, methods=["POST"]) for verb in VERBS),
        ]

    @asynccontextmanager
    async def running(self, app: Starlette) -> AsyncIterator[None]:
        """As long as the page is served, the run is followed."""
        following = asyncio.create_task(self.hub.follow())
        yield
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)

    async def _file(self, request: Request) -> Response:
        kind, content = files()[request.url.path]
        return Response(content, media_type=kind)

    async def _entered(self, request: Request) -> Response:
        try:
            entered = self._keys.enter(parse(_enter, await request.body()).key)
        except Unreadable as error:
            return _refused(400, error)
        if entered is None:
            why = "this link has been used, or is of another page: unisono page with the run folder gives a new one"
            return _refused(401, JobError(why))
        cookie, session = entered
        answer = JSONResponse({"page": session.page, "may": session.may})
        answer.set_cookie(self._cookie, cookie, httponly=True, samesite="strict")
        return answer

    async def _share(self, request: Request) -> Response:
        if request.scope["may"] != "act":
            return _refused(403, LOOK_ONLY)
        return JSONResponse({"key": self._keys.look})

    async def _stream(self, request: Request) -> Response:
        if self.hub.viewers >= MOST_VIEWERS:
            return _refused(503, JobError(f"{MOST_VIEWERS} browsers look at this page already: close one"))
        return _Stream(self.hub, self._events(request.scope["may"]))

    async def _events(self, may: str) -> AsyncGenerator[str, None]:
        first = {"name": self._source.name, "may": may}
        async with aclosing(self.hub.news()) as found:
            async for news in found:
                yield f"data: {json.dumps({**first, **news}, allow_nan=False)}\n\n"
                first = {}

    async def _finer(self, request: Request) -> Response:
        if self.hub.reading >= MOST_READING:
            return _refused(503, JobError("too many others zoom in at this moment"))
        try:
            body = parse(_finer, await request.body())
            curves = await self.hub.finer(body.axis, body.low, body.high, request.is_disconnected)
        except (JobError, LaunchError, Unreadable) as error:
            return _refused(400, error)
        return JSONResponse({"curves": curves})

    async def _asked(self, request: Request) -> Response:
        if request.scope["may"] != "act":
            return _refused(403, LOOK_ONLY)
        verb = request.url.path.rpartition("/")[2]
        try:
            body = parse(_ask, await request.body())
            control = self._source.control()
            if control is None:
                raise JobError("this job has no coordinator that could be asked, or it is over")
            await asyncio.to_thread(VERBS[verb], control, body)
        except (JobError, LaunchError, Unreadable) as error:
            return _refused(400, error)
        return JSONResponse({"done": verb})


def page_app(page: Page, keys: Keys, cookie: str) -> Gate:
    """All of it, with the gate around it."""
    app = Starlette(routes=page.routes(), lifespan=page.running)
    return Gate(app, keys, cookie, is_open)


def _refused(status: int, error: Exception) -> Response:
    return JSONResponse({"error": str(error)}, status_code=status)


# The process that serves a page: ``unisono page RUN_DIR``. It needs no torch.


NICE = 10
"""How far it stands back behind those who train."""

FAREWELL_S = 1
"""Seconds in which those who look learn of a job's end."""

TICK_S = 30.0
ENOUGH_S = 3
"""Seconds after which a button that was pressed before it is not waited for any more."""

REQUEST_LINE_S = 10.0


class PageServer(uvicorn.Server):
    """Wakes at a signal; uvicorn's own does ten times a second. Takes leave of those who look.

    Args:
        config: uvicorn's settings.
        hub: the run, and those who look.
    """

    def __init__(self, config: uvicorn.Config, hub: Hub) -> None:
        super().__init__(config)
        self._hub = hub

    async def main_loop(self) -> None:
        """Until it is to end."""
        self._loop, self._signalled = asyncio.get_running_loop(), asyncio.Event()
        self._loop.set_exception_handler(FewDescriptors(sys.stderr.write))
        while not await self.on_tick(0):
            with suppress(TimeoutError):
                async with asyncio.timeout(TICK_S):
                    await self._signalled.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Tell those who look how it ended, and hang up on those who do not take it."""
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
        """A signal has come."""
        super().handle_exit(sig, frame)
        if hasattr(self, "_loop"):  # otherwise the first look sees it
            self._loop.call_soon_threadsafe(self._signalled.set)


def serve(source: RunSource, port: int, say: Callable[[str], None]) -> None:
    """Serve the page of a run until a signal ends it. Main thread only.

    Args:
        source: the run to show.
        port: the port on loopback; 0 for any free one.
        say: a function that is told the link, once.

    Raises:
        JobError: the port cannot be had.
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
            log_level="error",  # who asks for nonsense, or too often, fills no log
            access_log=False,
            server_header=False,
            date_header=False,  # it would have to be made each second
            proxy_headers=False,
        )
        say(f"http://127.0.0.1:{port}/#{keys.act}")
        PageServer(config, page.hub).run([listening])
