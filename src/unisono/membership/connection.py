"""How workers and agents call the coordinator, again and again, and what is written down of it: nothing."""

import logging
import ssl
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from urllib.parse import urlsplit, urlunsplit

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import InvalidStatus, WebSocketException

from unisono.membership.token import OUTDATED, REFUSED

FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 2.0

SHUT_OUT = (REFUSED, 403)
"""Answers after which it is of no use to call again."""

SILENT = logging.Logger("unisono", logging.CRITICAL + 1)
"""For libraries that would log a connection's headers, and so the token. It has no parent and nobody finds it by name:
whatever a script sets for its own loggers, this one stays silent."""


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
        route: behind it.
        token: the job's token.
        tls: the TLS context with the trusted certificates; None without TLS.
        open_s: seconds in which it opens.
        ping_s: between two looks at whether the other side is still there, and how long one takes.
        close_s: seconds in which it closes.
        most: bytes of a message.
    """
    scheme, *rest = urlsplit(url)
    address = urlunsplit(("wss" if scheme == "https" else "ws", *rest))
    return connect(
        address.rstrip("/") + route,
        additional_headers={"Authorization": f"Bearer {token}"},
        ssl=tls,
        proxy=None,  # the job's own business, whatever the environment says about the web
        compression=None,
        open_timeout=open_s,
        ping_interval=ping_s,
        ping_timeout=ping_s,
        close_timeout=close_s,
        max_size=most,
        logger=SILENT,
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
    """One connection after the other. Between two there are pauses, which grow until :meth:`went_well`.

    Args:
        dial: opens a connection.
        talk: talks until it ends, however it does.
        pause: waits so many seconds before the next one. What it raises ends all.
        is_over: whether no further one is wanted.

    Attributes:
        trouble: why there was no connection the last time, for people.
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
