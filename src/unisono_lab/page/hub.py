"""Follows a run for all viewers of its page, as long as there are some."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from unisono.errors import JobError, LaunchError, UnisonoError, Unreadable
from unisono.received import parse_object, why_of
from unisono_lab.page.curves import JOB, JOURNAL, METRICS, RESULT, Axis, FinerCurves, Follower, NewLines, RunSource
from unisono_lab.page.run_model import RunModel, Viewed

METRICS_S = 1.0
"""Seconds between looks at the metrics, since each look takes some time besides that of the new steps."""

STATUS_S = 5.0
PACE_S = 0.2
"""The least seconds between two messages to one viewer."""

PULSE_S = 5.0
"""Seconds after which a viewer gets a message even if there is no news."""

LARGEST_FILE = 2**20


class Hub:
    """The run, and the viewers that wait for its news.

    Attributes:
        reading: the number of ranges that are read or wait.
    """

    def __init__(self, source: RunSource) -> None:
        self.model = RunModel()
        self.viewers = self.reading = 0
        self._source = source
        self._journal, self._metrics = Follower(JOURNAL), Follower(METRICS)
        self._stamps: dict[str, object] = {}
        self._watched, self._changed = asyncio.Event(), asyncio.Condition()
        self._version = 0
        self._turn = asyncio.Lock()
        self._looking, self._is_over = asyncio.Lock(), False
        self._status_at = self._measured_at = -STATUS_S

    async def follow(self) -> None:
        """Follow the run until it is cancelled."""
        while True:
            await self._watched.wait()
            try:
                is_behind = await self.look()
            except Exception as error:  # noqa: BLE001 (the page shows the error, and goes on)
                expected = isinstance(error, (UnisonoError, OSError))
                self.model.trouble, is_behind = (str(error) if expected else why_of(error))[:400], False
                await self._notify()
                await asyncio.sleep(STATUS_S)
            await asyncio.sleep(0 if is_behind else self._source.poll_s)

    async def look(self) -> bool:
        """Look once, send the news to the viewers, and return whether there is more to read at once.

        Raises:
            JobError: the run cannot be read.
            LaunchError: the coordinator does not answer.
        """
        async with self._looking:
            return await self._look()

    async def end(self) -> None:
        """Send the viewers the end of the run, and end their streams."""
        self._status_at = self._measured_at = -STATUS_S
        if self.viewers:
            with suppress(UnisonoError, OSError):
                await self.look()
        self._is_over = True
        await self._notify()

    async def _look(self) -> bool:
        if not self.model.job:
            self.model.job = await asyncio.to_thread(self._object, JOB)
        now = asyncio.get_running_loop().time()
        with_metrics = self.model.is_behind or now - self._measured_at >= METRICS_S
        journal = await self._new_in(JOURNAL, self._journal)
        metrics = await self._new_in(METRICS, self._metrics) if with_metrics else NewLines([])
        self._measured_at = now if with_metrics else self._measured_at
        self.model.take_journal(journal.lines, anew=journal.anew)
        self.model.take_metrics(metrics)
        is_behind = journal.more or metrics.more
        is_news = bool(journal.lines or metrics.lines or self.model.trouble or is_behind != self.model.is_behind)
        self.model.is_behind, self.model.trouble = is_behind, ""
        if now - self._status_at >= STATUS_S or journal.lines:
            is_news |= await self._read_status()
        if is_news:
            await self._notify()
        return is_behind

    @contextmanager
    def watched(self) -> Iterator[None]:
        """The context of a viewer. It counts at once, so that the limit holds if many come at the same time."""
        self.viewers += 1
        self._watched.set()
        try:
            yield
        finally:
            self.viewers -= 1
            if not self.viewers:
                self._watched.clear()

    async def news(self) -> AsyncGenerator[dict[str, Any], None]:
        """Everything about the run, and then the news, until the viewer leaves or the run ends."""
        seen, version = Viewed(), -1
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(PULSE_S), self._changed:
                    await self._changed.wait_for(lambda seen_version=version: self._version != seen_version)  # type: ignore[misc]  # of this turn
            version, is_last = self._version, self._is_over
            yield self.model.news_for(seen)
            if is_last:
                return
            await asyncio.sleep(PACE_S)

    async def finer(
        self, axis: Axis, low: float, high: float, is_disconnected: Callable[[], Awaitable[bool]]
    ) -> dict[str, Any]:
        """The curves of a range, made again from its lines; empty if there is nothing finer, or the viewer has left.

        Raises:
            JobError: the run cannot be read.
            LaunchError: the coordinator does not answer.
        """
        self.reading += 1
        try:
            async with self._turn:  # one range at a time, so that browsers share one thread
                curves = FinerCurves(axis, low, high, self.model.stretches.of(axis, low, high))
                while not await is_disconnected():
                    if not await asyncio.to_thread(curves.take, self._source.read):
                        return curves.points()
            return {}
        finally:
            self.reading -= 1

    async def _new_in(self, name: str, follower: Follower) -> NewLines:
        """The new lines of a file, if its stamp has changed. A file with a stamp is local, and needs no thread."""
        stamp = self._source.stamp(name)
        if stamp is not None and stamp == self._stamps.get(name):
            return NewLines([])
        read = self._source.read
        news = await asyncio.to_thread(follower.news, read) if stamp is None else follower.news(read)
        self._stamps[name] = None if news.more else stamp
        return news

    def _object(self, name: str) -> Mapping[str, Any]:
        data = self._source.read(name, 0, LARGEST_FILE)
        with suppress(Unreadable):  # the file is being written, or is not ours
            return parse_object(data) if data else {}
        return {}

    async def _read_status(self) -> bool:
        """Read result and status; returns whether they have changed."""
        before = self.model.status, self.model.result
        self._status_at = asyncio.get_running_loop().time()
        self.model.result, self.model.status = await asyncio.to_thread(lambda: (self._object(RESULT), self._status()))
        return before != (self.model.status, self.model.result)

    def _status(self) -> Mapping[str, Any] | None:
        try:
            control = self._source.control()
            return None if control is None else control.status()
        except (JobError, LaunchError):  # the coordinator is being started again, or has just ended
            return None

    async def _notify(self) -> None:
        async with self._changed:
            self._version += 1
            self._changed.notify_all()
