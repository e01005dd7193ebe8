"""What waits to be sent on one connection: whoever reads slowly makes nobody else wait."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable

MOST_MESSAGES = 8192
MOST_CHARACTERS = 32 * 2**20


class Outbox:
    """A bounded queue of messages. One that would grow beyond its bounds hangs up instead."""

    def __init__(self) -> None:
        self._waiting: deque[str] = deque()
        self._characters = 0
        self._ends = False
        self._news = asyncio.Event()

    def send(self, text: str) -> None:
        """Queue a message. Never waits; after :meth:`hang_up` it does nothing."""
        if self._ends:
            return
        self._waiting.append(text)
        self._characters += len(text)
        if len(self._waiting) > MOST_MESSAGES or self._characters > MOST_CHARACTERS:
            self._waiting.clear()  # it has to connect again anyway, and learns then what it missed
            self._ends = True
        self._news.set()

    def hang_up(self) -> None:
        """End the connection when everything is sent."""
        self._ends = True
        self._news.set()

    async def drain(self, send: Callable[[str], Awaitable[None]]) -> None:
        """Send what comes, in order, until it is time to hang up."""
        while True:
            while self._waiting:
                text = self._waiting.popleft()
                self._characters -= len(text)
                await send(text)
            if self._ends:
                return
            self._news.clear()
            await self._news.wait()
