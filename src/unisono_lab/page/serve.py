"""The process that serves a page: ``unisono page RUN_DIR``. It needs no torch.

It is a process of its own, so that whoever looks at a job takes nothing from it, and listens on loopback.
"""

import asyncio
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from types import FrameType

import uvicorn

from unisono.errors import JobError
from unisono.membership.listener import FewDescriptors, HttpProtocol
from unisono_lab.page.app import MOST_VIEWERS, Page, page_app
from unisono_lab.page.gate import Keys
from unisono_lab.page.hub import Hub
from unisono_lab.page.source import RunSource

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
