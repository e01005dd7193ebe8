"""A worker's connection to the coordinator, on a thread of its own."""

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from time import monotonic

from pydantic import ValidationError
from websockets.asyncio.client import ClientConnection, connect

from unisono.errors import LaunchError
from unisono.membership.connection import Conversation, Reconnection, ShutOut, call
from unisono.membership.messages import FromWorker, Refused, StoreReply, StoreRequest, ToWorker, WorkerHello, to_worker
from unisono.membership.parser import LONGEST_MESSAGE
from unisono.membership.token import context_for, is_private

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
        url: the coordinator's URL, ``http://…`` or ``https://…``.
        token: the job's token.
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
        url: the coordinator's URL.
        kept: objects that have to live as long as the line.
        local_address: the address of this host on the newest connection to the coordinator.
    """

    def __init__(
        self,
        url: str,
        token: str,
        hello: WorkerHello,
        on_message: Callable[[ToWorker], None],
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
            raise LaunchError(f"the coordinator at {url} could not be reached within {timeout_s:g} s: {self._trouble}")

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

    def send(self, message: FromWorker) -> None:
        """Send a message from any thread; never waits.

        While there is no connection, :class:`Progress` is left out, and of other messages the latest are kept.
        """
        with self._lock:
            self._conversation.say(message)
        self._wake()

    def request(self, request: StoreRequest, answer_s: float = ANSWER_S) -> StoreReply:
        """Ask the key-value store, and wait. The line numbers its requests itself.

        Args:
            request: the request to send.
            answer_s: the seconds that the answer may take, besides the request's own ``timeout_s``.

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
            raise LaunchError(f"the coordinator at {self.url} did not answer: {self._trouble}") from error
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
                runner.run(self._keep_connected())
        finally:
            with self._lock:
                unanswered = self._conversation.end()
            for answer in unanswered:
                answer.set_exception(LaunchError(f"the connection to the coordinator at {self.url} has ended"))
            self._opened.set()

    async def _keep_connected(self) -> None:
        try:
            await self._reconnection.keep()
        except ShutOut:
            self._take(Refused(reason=f"the coordinator does not let this worker in: {self._trouble}"))

    @property
    def _trouble(self) -> str:
        return self._reconnection.trouble

    async def _pause(self, seconds: float) -> None:
        await self._sleep(max(seconds, self._cut_until - self._loop.time()))

    def _cut(self, seconds: float) -> None:
        self._cut_until = self._loop.time() + seconds
        if self._socket is not None:
            self._socket.transport.abort()

    def _is_done(self) -> bool:
        return self._closes or self._conversation.is_over

    async def _sleep(self, seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not self._closes:
                    self._news.clear()
                    await self._news.wait()

    def _dial(self) -> connect:
        return call(
            self.url,
            "/worker",
            self._token,
            self._tls,
            open_s=OPEN_S,
            ping_s=self._ping_s,
            close_s=FLUSH_S,
            most=2 * LONGEST_MESSAGE,
        )

    async def _talk(self, socket: ClientConnection) -> None:
        """One connection, until it ends."""
        self.local_address = socket.local_address[0]
        self._socket = socket
        self._begin()
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

    def _begin(self) -> None:
        with self._lock:
            self._conversation.begin()
            self._was_connected = True
        self._opened.set()

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
            self._take(to_worker.validate_json(text))
        except ValidationError as error:
            self._take(Refused(reason=f"the coordinator says what this version does not know: {error}"[:4096]))

    def _take(self, message: ToWorker) -> None:
        with self._lock:
            answer = self._conversation.heard(message)
        if not isinstance(message, StoreReply):
            self._on_message(message)
        elif answer is not None:
            answer.set_result(message)

    def _wake(self) -> None:
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._news.set)
