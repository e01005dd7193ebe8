"""The connections of workers and agents to the coordinator, opened again after a loss, and what is said over them."""

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

SHUT_OUT = (REFUSED, 403)
"""Answers after which it is of no use to call again."""

SILENT = logging.Logger("unisono", logging.CRITICAL + 1)
"""For libraries that would log a connection's headers, and so the token. It has no parent and nobody finds it by name:
whatever a script sets for its own loggers, this one stays silent."""


class QuietConnection(ClientConnection):
    """A connection that draws nothing from Python's global generator, from which the script's own thread draws."""

    _pings = 0

    async def ping(self, data: Any = None) -> Awaitable[float]:
        """Send a ping; the library would draw what tells it from others."""
        if data is None:
            self._pings += 1
            data = self._pings.to_bytes(8)
        return await super().ping(data)


def call(
    url: str,
    route: str,
    token: str,
    tls: ssl.SSLContext | None,
    *,
    open_s: float,
    ping_s: float,
    close_s: float,
    most: int,
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
        most: the largest message, in bytes.
    """
    scheme, *rest = urlsplit(url)
    address = urlunsplit(("wss" if scheme == "https" else "ws", *rest))
    return connect(
        address.rstrip("/") + route,
        additional_headers={"Authorization": f"Bearer {token}"},
        ssl=tls,
        proxy=None,  # the job's own business, whatever the environment says about the web
        compression=None,
        # Whoever gives up too soon and calls again makes a coordinator that a thousand workers call only slower.
        open_timeout=max(open_s, ping_s),
        ping_interval=ping_s,
        ping_timeout=ping_s,
        close_timeout=close_s,
        max_size=most,
        logger=SILENT,
        create_connection=QuietConnection,
    )


class ShutOut(Exception):
    """The coordinator lets nobody in who comes with this token. Its cause is the answer.

    Attributes:
        is_outdated: whether it is another job's, or an earlier one's.
    """

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.is_outdated = code == REFUSED


class Reconnection:
    """Opens a connection again whenever it ends. Pauses in between grow until :meth:`went_well`.

    Args:
        dial: a function that opens a connection.
        talk: a function that talks on a connection until it ends, however it does.
        pause: a function that waits so many seconds before the next connection. What it raises ends all.
        is_over: a function that says whether no further connection is wanted.

    Attributes:
        trouble: the reason for which the newest attempt failed, for people.
    """

    def __init__(
        self,
        dial: Callable[[], AbstractAsyncContextManager[ClientConnection]],
        talk: Callable[[ClientConnection], Awaitable[None]],
        pause: Callable[[float], Awaitable[None]],
        is_over: Callable[[], bool] = lambda: False,
    ) -> None:
        self.trouble = "it does not listen"
        self._dial, self._talk, self._pause, self._is_over = dial, talk, pause, is_over
        self._pause_s = FIRST_PAUSE_S

    def went_well(self) -> None:
        """The coordinator is there: when it is gone, call again at once."""
        self._pause_s = FIRST_PAUSE_S

    async def keep(self) -> None:
        """Connect, and connect again, until it is over or cancelled.

        Raises:
            ShutOut: the coordinator lets nobody in who comes with this token.
        """
        while not self._is_over():
            try:
                async with self._dial() as connection:
                    await self._talk(connection)
            except InvalidStatus as error:
                code = error.response.status_code
                self.trouble = OUTDATED if code == REFUSED else f"it answers {code}"
                if code in SHUT_OUT:
                    raise ShutOut(code) from error
            except (OSError, TimeoutError, EOFError, WebSocketException) as error:
                self.trouble = str(error) or type(error).__name__
            if not self._is_over():
                await self._pause(self._pause_s)
                self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)


# What a worker has to say to the coordinator, over one connection after the other.

MOST_UNSENT = 256
"""Messages that wait for a connection."""

_FAREWELLS = (messages.Refused, messages.JobOver)  # after these nobody is there to talk to
_STANDING = (
    messages.Ready,
    messages.Arrived,
    messages.Leaving,
    messages.Finished,
)  # true until something comes of it: said again on a new connection
_SAID_ANEW = (messages.WorkerHello, messages.Progress, messages.StoreRequest, *_STANDING)
_OF_A_GENERATION = (messages.Ready, messages.Arrived)  # until the next generation


class Conversation:
    """Decides what is said, in which order, and what is said again on a new connection.

    Nothing here knows sockets or threads: whoever has the connection asks for the :attr:`next` message, and tells what
    became of it.

    Attributes:
        is_over: whether nothing more is said: the coordinator has said farewell, or the process ends.
    """

    def __init__(self, hello: messages.WorkerHello) -> None:
        self.is_connected = False
        self.is_over = False
        self._hello = hello
        self._numbers = itertools.count(1)
        self._unsent: deque[messages.FromWorker] = deque()
        self._standing: dict[str, messages.FromWorker] = {}
        self._asked: dict[int, tuple[messages.StoreRequest, Future[messages.StoreReply]]] = {}

    @property
    def generation(self) -> int:
        """The generation that this worker is in; 0 before the first."""
        return self._hello.generation

    def enter(self, generation: int) -> None:
        """The worker is in another generation: what it said in an earlier one is outdated."""
        self._hello = self._hello.model_copy(update={"generation": generation})
        for kind in [kind for kind, message in self._standing.items() if isinstance(message, _OF_A_GENERATION)]:
            del self._standing[kind]

    def say(self, message: messages.FromWorker) -> None:
        """Have a message sent.

        While there is no connection, :class:`Progress` is left out, and of other messages the latest are kept.
        """
        if self.is_over:
            return
        if isinstance(message, _STANDING):
            self._standing[message.kind] = message
        if self.is_connected or not isinstance(message, (messages.Progress, *_STANDING)):
            self._unsent.append(message)
        while len(self._unsent) > MOST_UNSENT and not self.is_connected:
            self._unsent.popleft()

    def ask(self, request: messages.StoreRequest) -> tuple[int, Future[messages.StoreReply]]:
        """Have a request sent, again and again until it is answered or given up; its number and its answer."""
        request = request.model_copy(update={"id": next(self._numbers)})
        answer: Future[messages.StoreReply] = Future()
        self._asked[request.id] = request, answer
        if self.is_connected:
            self._unsent.append(request)
        return request.id, answer

    def give_up(self, number: int) -> bool:
        """Nobody waits for the answer to this request any more. Returns whether it was still to come."""
        return self._asked.pop(number, None) is not None

    def begin(self) -> None:
        """There is a connection. It begins with a hello and with what still matters."""
        others = [message for message in self._unsent if not isinstance(message, _SAID_ANEW)]
        asked = [request for request, _ in self._asked.values()]
        self._unsent = deque([self._hello, *others, *self._standing.values(), *asked])
        self.is_connected = True

    def break_off(self) -> None:
        """There is no connection any more."""
        self.is_connected = False

    @property
    def next(self) -> messages.FromWorker | None:
        """The message to send next; None if there is none."""
        return self._unsent[0] if self._unsent else None

    def sent(self, message: messages.FromWorker) -> None:
        """It was sent."""
        if self.next is message:
            self._unsent.popleft()

    def heard(self, message: messages.ToWorker) -> Future[messages.StoreReply] | None:
        """Take what the coordinator said. Returns what waits for it, if it is an answer that somebody waits for."""
        if isinstance(message, _FAREWELLS):
            self.is_over = True
        if isinstance(message, messages.StoreReply):
            _, answer = self._asked.pop(message.id, (None, None))
            return answer
        return None

    def end(self) -> list[Future[messages.StoreReply]]:
        """Nothing more is said. Returns what still waits for answers."""
        self.is_over = True
        return [answer for _, answer in self._asked.values()]


# A worker's connection, on a thread of its own.

ANSWER_S = 60.0
"""Seconds that an answer may take besides what it waits for: enough for a coordinator to be started again."""

OPEN_S = 5.0
PING_S = 20.0
"""Seconds between two looks at whether the coordinator is still there, and how long one takes; less if ``timeout_s``
is short."""

FLUSH_S = 2.0


class Line:
    """A connection that comes back by itself as long as the process lives.

    On each new connection it says hello again, with the generation that it is in, and repeats what still matters;
    requests that wait for an answer are asked again. It ends for good when the coordinator says that this worker, or
    the job, is through.

    Args:
        hello: this worker's first message, which says who it is.
        on_message: a function that gets each message except answers to requests, on the line's thread, one at a
            time. On a new connection the coordinator may say things again.
        timeout_s: the seconds for which to try to connect.
        certificates: the trusted certificates, PEM, as of :func:`~unisono.membership.token.context_for`; None for
            those that this host trusts.
        look_s: the seconds between two looks at whether the coordinator is still there.

    Raises:
        LaunchError: there is no coordinator that takes this token, or the token would be readable on the way.

    Attributes:
        kept: objects that have to live as long as the line.
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
        self._heard_at = monotonic()
        self.kept: list[object] = []
        self._token = token
        self._tls = context_for(url, certificates)
        self._on_message = on_message
        self._lock = threading.Lock()  # around all that is said
        self._conversation = Conversation(hello)
        self._was_connected = False
        self._closes = False
        self._reconnection = Reconnection(self._dial, self._talk, self._pause, self._is_done)
        self._cut_until = 0.0
        self._socket: ClientConnection | None = None
        self._opened = threading.Event()  # or has failed
        self._loop = asyncio.new_event_loop()
        self._news = asyncio.Event()
        self._thread = threading.Thread(target=self._live, name="unisono-line", daemon=True)
        self._thread.start()
        if not self._opened.wait(timeout_s) or not self._was_connected:
            self.close()
            raise LaunchError(
                f"the coordinator at {url} could not be reached within {timeout_s:g} s: {self._reconnection.trouble}"
            )

    @property
    def silent_s(self) -> float:
        """Seconds since the coordinator was heard of last, at most so many more than lie between two looks."""
        return monotonic() - self._heard_at

    @property
    def generation(self) -> int:
        """The generation that this worker is in; 0 before the first. What it said in an earlier one is outdated."""
        return self._conversation.generation

    @generation.setter
    def generation(self, generation: int) -> None:
        with self._lock:
            self._conversation.enter(generation)

    def send(self, message: messages.FromWorker) -> None:
        """Send a message from any thread; never waits.

        While there is no connection, :class:`Progress` is left out, and of other messages the latest are kept.
        """
        with self._lock:
            self._conversation.say(message)
        self._wake()

    def request(self, request: messages.StoreRequest, answer_s: float = ANSWER_S) -> messages.StoreReply:
        """Ask the key-value store, and wait ``answer_s`` beyond the request's own ``timeout_s``.

        The line numbers its requests itself.

        Raises:
            LaunchError: no answer came in time, or the line has ended.
        """
        with self._lock:
            if self._conversation.is_over:
                raise LaunchError(f"the connection to the coordinator at {self.url} has ended")
            number, answer = self._conversation.ask(request)
        self._wake()
        try:
            return answer.result(request.timeout_s + answer_s)
        except TimeoutError as error:
            raise LaunchError(f"the coordinator at {self.url} did not answer: {self._reconnection.trouble}") from error
        finally:
            with self._lock:
                self._conversation.give_up(number)

    def cut(self, seconds: float) -> None:
        """Lose the connection, and open none for so many seconds, as a network fault does."""
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._cut, seconds)

    def close(self) -> None:
        """End the connection after what was sent. May be called from any thread, and again."""
        with self._lock:
            self._closes = True
        self._wake()
        if threading.current_thread() is not self._thread:
            self._thread.join(max(OPEN_S, self._ping_s) + 2 * FLUSH_S)

    # -- on the line's thread

    def _live(self) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(self._reconnection.keep())
        except ShutOut:
            trouble = self._reconnection.trouble
            self._take(messages.Refused(reason=f"the coordinator does not let this worker in: {trouble}"))
        finally:
            with self._lock:
                unanswered = self._conversation.end()
            for answer in unanswered:
                answer.set_exception(LaunchError(f"the connection to the coordinator at {self.url} has ended"))
            self._opened.set()

    async def _pause(self, seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(max(seconds, self._cut_until - self._loop.time())):
                while not self._closes:
                    self._news.clear()
                    await self._news.wait()

    def _cut(self, seconds: float) -> None:
        self._cut_until = self._loop.time() + seconds
        if self._socket is not None:
            self._socket.transport.abort()

    def _is_done(self) -> bool:
        return self._closes or self._conversation.is_over

    def _dial(self) -> connect:
        return call(
            self.url,
            "/worker",
            self._token,
            self._tls,
            open_s=OPEN_S,
            ping_s=self._ping_s,
            close_s=FLUSH_S,
            most=2 * messages.LONGEST_MESSAGE,
        )

    async def _talk(self, socket: ClientConnection) -> None:
        """One connection, until it ends."""
        self.local_address = socket.local_address[0]
        self._socket = socket
        with self._lock:
            self._conversation.begin()
            self._was_connected = True
        self._opened.set()
        sending = asyncio.create_task(self._send_all(socket))
        looking = asyncio.create_task(self._look(socket))
        try:
            async for text in socket:
                self._hear(text)
                if self._conversation.is_over:
                    break
        finally:
            with self._lock:
                self._conversation.break_off()
            sending.cancel()
            looking.cancel()
            await asyncio.gather(sending, looking, return_exceptions=True)

    async def _look(self, socket: ClientConnection) -> None:
        """Hear of the coordinator again and again, also when it has nothing to say."""
        while True:
            await (await socket.ping())
            self._heard_at = monotonic()
            await asyncio.sleep(self._look_s)

    async def _send_all(self, socket: ClientConnection) -> None:
        try:
            while True:
                self._news.clear()
                while (message := self._conversation.next) is not None:
                    await socket.send(message.model_dump_json())
                    with self._lock:
                        self._conversation.sent(message)
                if self._closes:
                    return
                await self._news.wait()
        finally:
            # Whoever reads learns that it is over, in good or bad.
            await socket.close()

    def _hear(self, text: str | bytes) -> None:
        self._heard_at = monotonic()
        self._reconnection.went_well()
        try:
            self._take(messages.to_worker.validate_json(text))
        except ValidationError as error:
            self._take(messages.Refused(reason=f"the coordinator says what this version does not know: {error}"[:4096]))

    def _take(self, message: messages.ToWorker) -> None:
        with self._lock:
            answer = self._conversation.heard(message)
        if not isinstance(message, messages.StoreReply):
            self._on_message(message)
        elif answer is not None:
            answer.set_result(message)

    def _wake(self) -> None:
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._news.set)
