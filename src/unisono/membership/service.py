"""The coordinator's routes, and its clock."""

import asyncio
import os
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from importlib.metadata import version
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route, WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

from unisono.errors import JobError, Unreadable
from unisono.membership import state as machine
from unisono.membership.coordinator import AgentSession, Coordinator, Session, WorkerSession
from unisono.membership.exposition import exposition, newest_line
from unisono.membership.messages import M, Name, parse
from unisono.membership.reception import NotAdmitted, Rate, RequestLimits
from unisono.received import read_part, whole_number

# The messages that wait to be sent on one connection, so that no client that reads slowly delays the others.

MOST_MESSAGES = 8192
MOST_CHARACTERS = 32 * 2**20


class SendQueue:
    """A bounded queue of messages. If it would exceed its bounds, its connection is closed."""

    def __init__(self, most: int = MOST_MESSAGES) -> None:
        self._most = most
        self._waiting: deque[str] = deque()
        self._characters = 0
        self._ends = False
        self._news = asyncio.Event()

    def send(self, text: str) -> None:
        """Queue a message; never waits. After :meth:`hang_up` it does nothing."""
        if self._ends:
            return
        self._waiting.append(text)
        self._characters += len(text)
        if len(self._waiting) > self._most or self._characters > MOST_CHARACTERS:
            self._waiting.clear()  # the client has to connect again, and is sent then what it has missed
            self._ends = True
        self._news.set()

    def hang_up(self) -> None:
        """Close the connection once everything is sent."""
        self._ends = True
        self._news.set()

    async def drain(self, send: Callable[[str], Awaitable[None]]) -> None:
        """Send the queued messages in order, until the connection is to be closed."""
        while True:
            while self._waiting:
                text = self._waiting.popleft()
                self._characters -= len(text)
                await send(text)
            if self._ends:
                return
            self._news.clear()
            await self._news.wait()


TEXT_FORMAT = "text/plain; version=0.0.4; charset=utf-8"
"""The media type of the text that Prometheus reads."""

FAREWELL_S = 5.0
"""The seconds that workers and agents may stay connected after the job is over."""

SHORTEST_WAIT_S = 0.005

READABLE = ("journal.jsonl", "metrics.jsonl", "job.json", "result.json")
"""The files of the run folder that clients with the token may read."""

LARGEST_PART = 2**25


class _Body(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class ResizeBody(_Body):
    """The body of a request for another number of workers."""

    workers: Annotated[int, Field(ge=1, le=65536)]


class LeaveBody(_Body):
    """A worker or an agent by its id, or a worker by its rank."""

    who: Name | Annotated[int, Field(ge=0, le=65535)]


_resize: TypeAdapter[ResizeBody] = TypeAdapter(ResizeBody)
_leave: TypeAdapter[LeaveBody] = TypeAdapter(LeaveBody)


class Service:
    """The coordinator's routes, and its clock.

    Args:
        end: a function that is called when the service is no longer needed.
        changed: an event that is set whenever the coordinator's next deadline may have changed.
    """

    def __init__(
        self, coordinator: Coordinator, limits: RequestLimits, end: Callable[[], None], changed: asyncio.Event
    ) -> None:
        self._coordinator = coordinator
        self._limits = limits
        self._end, self._changed = end, changed

    def routes(self) -> list[BaseRoute]:
        """All routes."""
        return [
            WebSocketRoute("/worker", self._worker),
            WebSocketRoute("/agent", self._agent),
            Route("/health", self._health, methods=["GET"]),
            Route("/status", self._status, methods=["GET"]),
            *(Route(f"/record/{name}", self._record, methods=["GET"]) for name in READABLE),
            Route("/metrics", self._metrics, methods=["GET"]),
            Route("/resize", self._resize, methods=["POST"]),
            Route("/leave", self._leave, methods=["POST"]),
            Route("/replace", self._replace, methods=["POST"]),
            Route("/checkpoint", self._checkpoint, methods=["POST"]),
            Route("/stop", self._stop, methods=["POST"]),
        ]

    async def keep_time(self) -> None:
        """Call the coordinator's tick at each of its deadlines."""
        while True:
            self._changed.clear()
            deadline = self._coordinator.next_deadline()
            delay = None if deadline is None else max(SHORTEST_WAIT_S, deadline - self._coordinator.now())
            try:
                async with asyncio.timeout(delay):
                    await self._changed.wait()
            except TimeoutError:
                self._coordinator.tick()
            else:
                # Clients that send messages all the time must not put a tick off.
                if deadline is not None and deadline <= self._coordinator.now():
                    self._coordinator.tick()

    async def end_in_time(self, lonely_s: float) -> None:
        """End the service some seconds after the job, or when there was no connection for ``lonely_s`` seconds."""
        over = lonely = 0.0
        while over < FAREWELL_S and lonely < lonely_s:
            await asyncio.sleep(0.1)
            alone = self._coordinator.connections == 0
            lonely = lonely + 0.1 if alone else 0.0
            if self._coordinator.state.over is not None:
                over = FAREWELL_S if alone else over + 0.1
        self._end()

    # -- connections

    async def _worker(self, socket: WebSocket) -> None:
        await self._serve(socket, WorkerSession)

    async def _agent(self, socket: WebSocket) -> None:
        await self._serve(socket, AgentSession)

    async def _serve(self, socket: WebSocket, kind: type[Session]) -> None:
        await socket.accept()
        queue = SendQueue()
        session = kind(self._coordinator, queue)
        reading = asyncio.create_task(self._read(socket, session))
        writing = asyncio.create_task(queue.drain(partial(_send, socket)))
        try:
            await asyncio.wait({reading, writing}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            session.close()
            for task in (reading, writing):
                task.cancel()
            results = await asyncio.gather(reading, writing, return_exceptions=True)
            with suppress(WebSocketDisconnect, RuntimeError):  # the client has closed it
                await socket.close()
        for result in results:
            if isinstance(result, Exception) and not isinstance(result, WebSocketDisconnect):
                raise result

    async def _read(self, socket: WebSocket, session: Session) -> None:
        rate = Rate(self._limits.messages_per_s)
        try:
            async with asyncio.timeout(self._limits.hello_s):
                first = await socket.receive()
        except TimeoutError:
            session.refuse(f"no hello came in {self._limits.hello_s:g} s")
            await asyncio.Event().wait()  # this task is cancelled once the refusal is sent
        message = first
        while message["type"] == "websocket.receive":
            if (text := message.get("text")) is not None:
                session.receive(text)
            else:
                session.refuse("a message is text")
            if early_s := rate.take():
                await asyncio.sleep(early_s)
            message = await socket.receive()

    # -- requests

    async def _health(self, request: Request) -> Response:
        return JSONResponse({"pid": os.getpid(), "connections": self._coordinator.connections})

    async def _status(self, request: Request) -> Response:
        return JSONResponse(self._coordinator.status())

    async def _record(self, request: Request) -> Response:
        first, most = (whole_number(request.query_params.get(name, "")) for name in ("first", "most"))
        if first is None or most is None or not (first >= 0 and 0 < most <= LARGEST_PART):
            raise NotAdmitted(400, f"name the first byte (first), and how many to read (most): up to {LARGEST_PART}")
        path = self._coordinator.run_folder / request.url.path.rpartition("/")[2]
        try:
            data = await asyncio.to_thread(read_part, path, first, most)
        except (OSError, Unreadable) as error:
            raise NotAdmitted(404, str(error)) from error
        return Response(data, media_type="application/octet-stream")

    async def _metrics(self, request: Request) -> Response:
        try:
            line = await asyncio.to_thread(newest_line, self._coordinator.run_folder)
            text = exposition(self._coordinator.state, line, version("unisono"))
        except JobError as error:
            raise NotAdmitted(501, str(error)) from error
        return Response(text, media_type=TEXT_FORMAT)

    async def _resize(self, request: Request) -> Response:
        body = await _body(request, _resize)
        return self._handle(machine.ResizeRequested(body.workers))

    async def _leave(self, request: Request) -> Response:
        return await self._handle_named(request, machine.LeaveRequested, lambda state, who: "")

    async def _replace(self, request: Request) -> Response:
        return await self._handle_named(request, machine.ReplaceRequested, machine.why_not_replaced)

    async def _handle_named(
        self, request: Request, event: Callable[[str], machine.Event], obstacle: Callable[[machine.State, str], str]
    ) -> Response:
        who, state = str((await _body(request, _leave)).who), self._coordinator.state
        if machine.find(state, who) is None:
            raise NotAdmitted(404, f"{who} takes no part in this job")
        if why := obstacle(state, who):
            raise NotAdmitted(409, why)
        return self._handle(event(who))

    async def _checkpoint(self, request: Request) -> Response:
        if why := machine.why_no_checkpoint(self._coordinator.state):
            raise NotAdmitted(409, why)
        return self._handle(machine.CheckpointRequested())

    async def _stop(self, request: Request) -> Response:
        return self._handle(machine.StopRequested())

    def _handle(self, event: machine.Event) -> Response:
        self._coordinator.handle(event)
        return JSONResponse(self._coordinator.status())


async def _send(socket: WebSocket, text: str) -> None:
    try:
        await socket.send_text(text)
    except RuntimeError as error:  # the connection was closed, since the client has not answered a ping
        raise WebSocketDisconnect from error


async def _body(request: Request, adapter: TypeAdapter[M]) -> M:
    try:
        return parse(adapter, await request.body())
    except Unreadable as error:
        raise NotAdmitted(400, str(error)) from error


async def not_admitted_response(request: Request, error: Exception) -> Response:
    """The response to a request that is not admitted; starlette would call a plain function on another thread."""
    assert isinstance(error, NotAdmitted)
    return JSONResponse({"error": error.reason}, status_code=error.status)
