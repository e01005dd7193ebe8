"""Listens for notices of a cloud, beside the workers of a host. Whatever becomes of it, training goes on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial

from unisono.errors import Unreadable
from unisono.launch.notices.cloud import CLOUDS, Ask, Cloud, Notice, ask
from unisono.launch.notices.source import AUTO, NoticeSource

AGAIN_S = 5.0
"""Seconds until a service that has failed is asked again."""


@asynccontextmanager
async def listening_to_cloud(
    source: NoticeSource | None, say: Callable[[str], None], heard: Callable[[Notice], None], pace: float = 1.0
) -> AsyncIterator[None]:
    """Until the context ends, a notice is said to the person at the terminal, and a function is called with it.

    Args:
        source: the clouds to listen to; None for none.
        say: a function that shows a line to the person at the terminal.
        heard: a function that gets each notice, once.
        pace: the factor of all pauses between two questions.
    """
    if source is None:
        yield
        return
    listener = NoticeListener(source, say, heard, pace)
    task = asyncio.create_task(listener.keep())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await listener.left()


class NoticeListener:
    """Asks a metadata service again and again. Arguments as of :func:`listening_to_cloud`."""

    def __init__(
        self, source: NoticeSource, say: Callable[[str], None], heard: Callable[[Notice], None], pace: float
    ) -> None:
        self._source, self._say, self._heard, self._pace = source, say, heard, pace
        self._cloud: Cloud | None = None
        self._last: Notice | None = None
        self._told: set[str] = set()

    async def keep(self) -> None:
        """Listen until the machine is taken away, or there is no cloud."""
        self._cloud = await self._find()
        if self._cloud is None:
            return
        obstacle = ""
        while self._last is None:
            before, obstacle = obstacle, await self._look(self._cloud)
            if obstacle and not before:
                self._say(
                    f"no notices of {self._cloud.name} can be heard ({obstacle}); training goes on, and its metadata "
                    f"service is asked again every {AGAIN_S:g} s"
                )
            elif before and not obstacle:
                self._say(f"notices of {self._cloud.name} can be heard again")
            await asyncio.sleep(self._pace * (AGAIN_S if obstacle else self._cloud.pause_s))

    async def left(self) -> None:
        """Nothing of the job runs here any more. It is no matter if the cloud does not hear of it."""
        if self._cloud is not None and self._last is not None:
            with suppress(OSError, Unreadable):
                await self._cloud.left(self._ask(self._cloud), self._last)

    async def _find(self) -> Cloud | None:
        """The cloud of this machine: all are asked at the same time."""
        clouds = [CLOUDS[name]() for name in self._source.endpoints]
        if self._source.cloud != AUTO:
            return clouds[0]
        found = await asyncio.gather(*map(self._is_here, clouds))
        here = [cloud for cloud, is_here in zip(clouds, found, strict=True) if is_here]
        if here:
            self._say(f"notices of {here[0].name} are listened for")
            return here[0]
        self._say(f"no metadata service of a cloud answers here ({', '.join(CLOUDS)}): there are no notices")
        return None

    async def _is_here(self, cloud: Cloud) -> bool:
        with suppress(OSError, Unreadable):
            return await cloud.is_here(self._ask(cloud))
        return False

    async def _look(self, cloud: Cloud) -> str:
        """Ask once; what is in the way, if something is."""
        try:
            notices = await cloud.look(self._ask(cloud))
        except TimeoutError:
            return "no answer in time"
        except (OSError, Unreadable) as error:
            return str(error)
        for notice in notices:
            self._hear(notice)
        return ""

    def _hear(self, notice: Notice) -> None:
        if notice.words in self._told:
            return
        self._told.add(notice.words)
        if notice.takes_away:
            self._last = self._last or notice
        self._heard(notice)

    def _ask(self, cloud: Cloud) -> Ask:
        return partial(ask, self._source.endpoints[cloud.name])
