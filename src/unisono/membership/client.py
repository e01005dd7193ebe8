"""The connections of workers and agents to the coordinator, which are opened again after a loss, and what they send."""

import asyncio
import itertools
import logging
import ssl
import threading
from collections import deque
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, suppress
from pathlib import Path
from time import monotonic
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from pydantic import ValidationError
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import InvalidStatus, WebSocketException

from unisono.errors import LaunchError
from unisono.membership import messages
from unisono.membership.token import OUTDATED, REFUSED, context_for, is_private

FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 2.0

DENIED = (REFUSED, 403)
"""The status codes after which another attempt is of no use."""

SILENT = logging.Logger("unisono", logging.CRITICAL + 1)
"""For libraries that would log a connection's headers, and so the token. It has no parent and is not registered by
name, so it stays silent whatever a script sets for its loggers."""


class QuietConnection(ClientConnection):
    """A connection that draws nothing from Python's global generator, from which the script's own thread draws."""

    _pings = 0

    async def ping(self, data: Any = None) -> Awaitable[float]:
        """Send a ping with a number of its own; the library would draw random bytes for it."""
        if data is None:
            self._pings += 1
            data = self._pings.to_bytes(8)
        return await super().ping(data)


def open_connection(
    url: str,
    route: str,
    token: str,
    tls: ssl.SSLContext | None,
    *,
    open_s: float,
    ping_s: float,
    close_s: float,
    max_bytes: int,
) -> connect:
    """A connection to the coordinator, to be awaited or entered.

    Args:
        url: the coordinator's URL, ``http://…`` or ``https://…``.
        route: the path that follows the URL.
        token: the job's token.
        tls: the TLS context with the trusted certificates; None without TLS.
        open_s: the seconds within which it opens, or more if the answer to a ping may take longer.
        ping_s: the seconds between two pings, and the longest wait for an answer to one.
        close_s: the seconds within which it closes.
        max_bytes: the size of the largest message.
    """
    scheme, *rest = urlsplit(url)
    address = urlunsplit(("wss" if scheme == "https" else "ws", *rest))
    return connect(
        address.rstrip("/") + route,
        additional_headers={"Authorization": f"Bearer {token}"},
        ssl=tls,
        proxy=None,  # the environment's proxy is for the web, and not for connections within the job
        compression=None,
        # Attempts that give up too soon and start again would slow down a coordinator with a thousand workers further.
        open_timeout=max(open_s, ping_s),
        ping_interval=ping_s,
        ping_timeout=ping_s,
        close_timeout=close_s,
        max_size=max_bytes,
        logger=SILENT,
        create_connection=QuietConnection,
    )


class AccessDenied(Exception):
    """The coordinator refuses this token. The cause of this error is the response.

    Attributes:
        is_outdated: whether the token is that of another job, or of an earlier start.
    """

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.is_outdated = code == REFUSED


class Reconnection:
    """Opens a connection again whenever it ends. The pauses in between grow until :meth:`reset_pause`.

    Args:
        dial: a function that opens a connection.
        talk: a function that sends and receives on a connection until it ends.
        pause: a function that waits so many seconds before the next connection. An error that it raises ends all.
        is_over: a function that says whether no further connection is wanted.

    Attributes:
        last_error: the reason for which the newest attempt failed, for people.
    """

    def __init__(
        self,
        dial: Callable[[], AbstractAsyncContextManager[ClientConnection]],
        talk: Callable[[ClientConnection], Awaitable[None]],
        pause: Callable[[float], Awaitable[None]],
        is_over: Callable[[], bool] = lambda: False,
    ) -> None:
        self.last_error = "it does not listen"
        self._dial, self._talk, self._pause, self._is_over = dial, talk, pause, is_over
        self._pause_s = FIRST_PAUSE_S

    def reset_pause(self) -> None:
        """Make the next pause short: the coordinator has answered."""
        self._pause_s = FIRST_PAUSE_S

    async def keep(self) -> None:
        """Connect, and connect again, until it is over or cancelled.

        Raises:
            AccessDenied: the coordinator refuses the token.
        """
        while not self._is_over():
            try:
                async with self._dial() as connection:
                    await self._talk(connection)
            except InvalidStatus as error:
                code = error.response.status_code
                self.last_error = OUTDATED if code == REFUSED else f"it answers {code}"
                if code in DENIED:
                    raise AccessDenied(code) from error
            except (OSError, TimeoutError, EOFError, WebSocketException) as error:
                self.last_error = str(error) or type(error).__name__
            if not self._is_over():
                await self._pause(self._pause_s)
                self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)


# The messages of a worker to the coordinator, over one connection after the other.

MOST_UNSENT = 256
"""The most messages that wait for a connection."""

_LAST_MESSAGES = (messages.Refused, messages.JobOver)  # the coordinator closes the connection after these
# A worker sends these again on a new connection: they hold until the coordinator has acted on them.
_REPEATED = (messages.Ready, messages.Arrived, messages.Leaving, messages.Finished)
_SENT_ANEW = (messages.WorkerHello, messages.Progress, messages.StoreRequest, *_REPEATED)
_OF_A_GENERATION = (messages.Ready, messages.Arrived)  # they hold until the next generation


class Outbox:
    """Decides what is sent, in which order, and what is sent again on a new connection.

    It uses no sockets and threads: the owner of the connection sends the :attr:`next` message, and reports that it was
    :meth:`sent`.

    Attributes:
        is_over: whether nothing more is sent: the coordinator has ended the connection for good, or the process ends.
    """

    def __init__(self, hello: messages.WorkerHello) -> None:
        self.is_connected = False
        self.is_over = False
        self._hello = hello
        self._numbers = itertools.count(1)
        self._unsent: deque[messages.FromWorker] = deque()
        self._repeated: dict[str, messages.FromWorker] = {}
        self._requests: dict[int, tuple[messages.StoreRequest, Future[messages.StoreReply]]] = {}

    @property
    def generation(self) -> int:
        """The generation that this worker is in; 0 before the first."""
        return self._hello.generation

    def enter(self, generation: int) -> None:
        """Note that the worker is in another generation: messages of an earlier one are not sent again."""
        self._hello = self._hello.model_copy(update={"generation": generation})
        for kind in [kind for kind, message in self._repeated.items() if isinstance(message, _OF_A_GENERATION)]:
            del self._repeated[kind]

    def put(self, message: messages.FromWorker) -> None:
        """Queue a message. While there is no connection, Progress is dropped, and only the newest others are kept."""
        if self.is_over:
            return
        if isinstance(message, _REPEATED):
            self._repeated[message.kind] = message
        if self.is_connected or not isinstance(message, (messages.Progress, *_REPEATED)):
            self._unsent.append(message)
        while len(self._unsent) > MOST_UNSENT and not self.is_connected:
            self._unsent.popleft()

    def put_request(self, request: messages.StoreRequest) -> tuple[int, Future[messages.StoreReply]]:
        """Queue a request, which each new connection repeats until it is answered or cancelled.

        Returns:
            the number of the request, and the future of its reply.
        """
        request = request.model_copy(update={"id": next(self._numbers)})
        reply: Future[messages.StoreReply] = Future()
        self._requests[request.id] = request, reply
        if self.is_connected:
            self._unsent.append(request)
        return request.id, reply

    def cancel(self, number: int) -> bool:
        """Cancel a request. Returns whether its reply was still to come."""
        return self._requests.pop(number, None) is not None

    def connected(self) -> None:
        """Note that a connection is open. It begins with a hello and with the messages that still hold."""
        others = [message for message in self._unsent if not isinstance(message, _SENT_ANEW)]
        requests = [request for request, _ in self._requests.values()]
        self._unsent = deque([self._hello, *others, *self._repeated.values(), *requests])
        self.is_connected = True

    def disconnected(self) -> None:
        """Note that there is no connection any more."""
        self.is_connected = False

    @property
    def next(self) -> messages.FromWorker | None:
        """The message to send next; None if there is none."""
        return self._unsent[0] if self._unsent else None

    def sent(self, message: messages.FromWorker) -> None:
        """Remove the next message from the queue, since it was sent."""
        if self.next is message:
            self._unsent.popleft()

    def receive(self, message: messages.ToWorker) -> Future[messages.StoreReply] | None:
        """Take a message from the coordinator. Returns the future that waits for it, if it is a reply."""
        if isinstance(message, _LAST_MESSAGES):
            self.is_over = True
        if isinstance(message, messages.StoreReply):
            _, reply = self._requests.pop(message.id, (None, None))
            return reply
        return None

    def close(self) -> list[Future[messages.StoreReply]]:
        """End sending. Returns the futures that still wait for replies."""
        self.is_over = True
        return [reply for _, reply in self._requests.values()]


# A worker's connection, on a thread of its own.

ANSWER_S = 60.0
"""The seconds that a reply may take beyond the request's own timeout: a coordinator can be started again meanwhile."""

OPEN_S = 5.0
PING_S = 20.0
"""The seconds between two pings, and the longest wait for a pong; less if ``timeout_s`` is short."""

FLUSH_S = 2.0


class WorkerConnection:
    """A worker's connection to the coordinator, which is opened again whenever it breaks, as long as the process lives.

    Each new connection begins with a hello that names the worker's generation, and repeats the messages that still hold
    and the requests without a reply. It ends for good when the coordinator says that this worker, or the job, is done.

    Args:
        hello: this worker's first message, which says who it is.
        on_message: a function that gets each message except replies to requests, on the connection's thread, one at a
            time. On a new connection the coordinator may repeat messages.
        timeout_s: the seconds for which to try to connect.
        certificates: the trusted certificates, PEM, as of :func:`~unisono.membership.token.context_for`; None for
            those that this host trusts.
        look_s: the seconds between two checks whether the coordinator still answers.

    Raises:
        LaunchError: there is no coordinator that accepts this token, or the token could be read on the way.

    Attributes:
        kept: objects that have to live as long as the connection.
        local_address: the address of this host on the newest connection to the coordinator.
    """

    def __init__(
        self,
        url: str,
        token: str,
        hello: messages.WorkerHello,
        on_message: Callable[[messages.ToWorker], None],
        timeout_s: float,
        certificates: Path | None = None,
        look_s: float = PING_S,
    ) -> None:
        if not is_private(url):
            raise LaunchError(f"{url}: a coordinator on another host is reached over https, since the token goes there")
        self.url = url
        self.local_address = ""
        self._ping_s, self._look_s = min(PING_S, timeout_s / 4), look_s
        self._received_at = monotonic()
        self.kept: list[object] = []
        self._token = token
        self._tls = context_for(url, certificates)
        self._on_message = on_message
        self._lock = threading.Lock()  # guards the outbox
        self._outbox = Outbox(hello)
        self._was_connected = False
        self._is_closing = False
        self._reconnection = Reconnection(self._dial, self._talk, self._pause, self._is_done)
        self._cut_until = 0.0
        self._socket: ClientConnection | None = None
        self._first_attempt = threading.Event()  # set once the first connection is open, or none will be
        self._loop = asyncio.new_event_loop()
        self._wakeup = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="unisono-line", daemon=True)
        self._thread.start()
        if not self._first_attempt.wait(timeout_s) or not self._was_connected:
            self.close()
            raise LaunchError(
                f"the coordinator at {url} could not be reached within {timeout_s:g} s: {self._reconnection.last_error}"
            )

    @property
    def silent_s(self) -> float:
        """The seconds since the last sign of the coordinator; while it answers, at most those between two checks."""
        return monotonic() - self._received_at

    @property
    def generation(self) -> int:
        """The generation that this worker is in; 0 before the first."""
        return self._outbox.generation

    @generation.setter
    def generation(self, generation: int) -> None:
        with self._lock:
            self._outbox.enter(generation)

    def send(self, message: messages.FromWorker) -> None:
        """Send a message from any thread, as :meth:`Outbox.put` does; never waits."""
        with self._lock:
            self._outbox.put(message)
        self._wake()

    def request(self, request: messages.StoreRequest, answer_s: float = ANSWER_S) -> messages.StoreReply:
        """Send a request to the key-value store and wait, at most ``answer_s`` beyond the request's ``timeout_s``.

        The connection gives the request its number.

        Raises:
            LaunchError: no reply came in time, or the connection has ended.
        """
        with self._lock:
            if self._outbox.is_over:
                raise LaunchError(f"the connection to the coordinator at {self.url} has ended")
            number, reply = self._outbox.put_request(request)
        self._wake()
        try:
            return reply.result(request.timeout_s + answer_s)
        except TimeoutError as error:
            raise LaunchError(
                f"the coordinator at {self.url} did not answer: {self._reconnection.last_error}"
            ) from error
        finally:
            with self._lock:
                self._outbox.cancel(number)

    def cut(self, seconds: float) -> None:
        """Simulate a network fault: break the connection, and open none for so many seconds."""
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._cut, seconds)

    def close(self) -> None:
        """Close the connection once everything is sent. May be called from any thread, and more than once."""
        with self._lock:
            self._is_closing = True
        self._wake()
        if threading.current_thread() is not self._thread:
            self._thread.join(max(OPEN_S, self._ping_s) + 2 * FLUSH_S)

    # -- on the connection's thread

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(self._reconnection.keep())
        except AccessDenied:
            error = self._reconnection.last_error
            self._handle(messages.Refused(reason=f"the coordinator does not let this worker in: {error}"))
        finally:
            with self._lock:
                unanswered = self._outbox.close()
            for reply in unanswered:
                reply.set_exception(LaunchError(f"the connection to the coordinator at {self.url} has ended"))
            self._first_attempt.set()

    async def _pause(self, seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(max(seconds, self._cut_until - self._loop.time())):
                while not self._is_closing:
                    self._wakeup.clear()
                    await self._wakeup.wait()

    def _cut(self, seconds: float) -> None:
        self._cut_until = self._loop.time() + seconds
        if self._socket is not None:
            self._socket.transport.abort()

    def _is_done(self) -> bool:
        return self._is_closing or self._outbox.is_over

    def _dial(self) -> connect:
        return open_connection(
            self.url,
            "/worker",
            self._token,
            self._tls,
            open_s=OPEN_S,
            ping_s=self._ping_s,
            close_s=FLUSH_S,
            max_bytes=2 * messages.LONGEST_MESSAGE,
        )

    async def _talk(self, socket: ClientConnection) -> None:
        self.local_address = socket.local_address[0]
        self._socket = socket
        with self._lock:
            self._outbox.connected()
            self._was_connected = True
        self._first_attempt.set()
        sending = asyncio.create_task(self._send_all(socket))
        pinging = asyncio.create_task(self._keep_pinging(socket))
        try:
            async for text in socket:
                self._receive(text)
                if self._outbox.is_over:
                    break
        finally:
            with self._lock:
                self._outbox.disconnected()
            sending.cancel()
            pinging.cancel()
            await asyncio.gather(sending, pinging, return_exceptions=True)

    async def _keep_pinging(self, socket: ClientConnection) -> None:
        """Ping the coordinator, which may have nothing to send, to see that it still answers."""
        while True:
            await (await socket.ping())
            self._received_at = monotonic()
            await asyncio.sleep(self._look_s)

    async def _send_all(self, socket: ClientConnection) -> None:
        try:
            while True:
                self._wakeup.clear()
                while (message := self._outbox.next) is not None:
                    await socket.send(message.model_dump_json())
                    with self._lock:
                        self._outbox.sent(message)
                if self._is_closing:
                    return
                await self._wakeup.wait()
        finally:
            await socket.close()  # so that the task which receives ends, too

    def _receive(self, text: str | bytes) -> None:
        self._received_at = monotonic()
        self._reconnection.reset_pause()
        try:
            self._handle(messages.to_worker.validate_json(text))
        except ValidationError as error:
            reason = f"the coordinator has sent a message that this version of Unisono does not know: {error}"
            self._handle(messages.Refused(reason=reason[:4096]))

    def _handle(self, message: messages.ToWorker) -> None:
        with self._lock:
            reply = self._outbox.receive(message)
        if not isinstance(message, messages.StoreReply):
            self._on_message(message)
        elif reply is not None:
            reply.set_result(message)

    def _wake(self) -> None:
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._wakeup.set)
