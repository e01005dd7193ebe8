"""Follows a run for all who look at its page; while nobody does, it does nothing."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from unisono.errors import JobError, LaunchError, UnisonoError, Unreadable
from unisono.received import parse_object, why_of
from unisono_lab.page.curves import Axis, FinerCurves
from unisono_lab.page.run_model import RunModel, Viewed
from unisono_lab.page.source import JOB, JOURNAL, METRICS, RESULT, Follower, NewLines, RunSource

METRICS_S = 1.0
"""How often the metrics are looked at, in seconds: each step costs the same, and each look besides."""

STATUS_S = 5.0
PACE_S = 0.2
"""Seconds between two messages to one viewer, at least."""

PULSE_S = 5.0
"""Seconds after which a viewer hears something, though there is no news."""

LARGEST_FILE = 2**20


class Hub:
    """The run, and the viewers who wait for its news.

    Args:
        source: the run.

    Attributes:
        model: what is known of it.
        viewers: the number of those who look.
        reading: the number of ranges that are waited for.
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
        self._asked_at = self._measured_at = -STATUS_S

    async def follow(self) -> None:
        """Follow the run until it is cancelled."""
        while True:
            await self._watched.wait()
            try:
                is_behind = await self.look()
            except Exception as error:  # noqa: BLE001 (a page that stands still has to say so)
                expected = isinstance(error, (UnisonoError, OSError))
                self.model.trouble, is_behind = (str(error) if expected else why_of(error))[:400], False
                await self._tell()
                await asyncio.sleep(STATUS_S)
            await asyncio.sleep(0 if is_behind else self._source.poll_s)

    async def look(self) -> bool:
        """Look once, and tell the viewers what is new.

        Returns:
            whether there is more to read at once.

        Raises:
            JobError: the run cannot be read.
            LaunchError: its coordinator does not answer.
        """
        async with self._looking:
            return await self._look()

    async def end(self) -> None:
        """Tell the viewers how it ended, and let them go."""
        self._asked_at = self._measured_at = -STATUS_S
        if self.viewers:
            with suppress(UnisonoError, OSError):
                await self.look()
        self._is_over = True
        await self._tell()

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
        if now - self._asked_at >= STATUS_S or journal.lines:
            is_news |= await self._ask()
        if is_news:
            await self._tell()
        return is_behind

    @contextmanager
    def watched(self) -> Iterator[None]:
        """As long as a viewer looks. It counts at once, so that a thousand who come together are counted."""
        self.viewers += 1
        self._watched.set()
        try:
            yield
        finally:
            self.viewers -= 1
            if not self.viewers:
                self._watched.clear()

    async def news(self) -> AsyncGenerator[dict[str, Any], None]:
        """All that is known of the run, and then whatever is new, until the viewer goes."""
        seen, version = Viewed(), -1
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(PULSE_S), self._changed:
                    await self._changed.wait_for(lambda known=version: self._version != known)  # type: ignore[misc]  # of this turn
            version, is_last = self._version, self._is_over
            yield self.model.news_for(seen)
            if is_last:
                return
            await asyncio.sleep(PACE_S)

    async def finer(
        self, axis: Axis, low: float, high: float, is_gone: Callable[[], Awaitable[bool]]
    ) -> dict[str, Any]:
        """The curves of a range, made again of its lines; none if there is nothing finer, or nobody waits any more.

        Args:
            axis: what the range is of.
            low: its lower end.
            high: its upper end.
            is_gone: a function that says whether who has asked is gone.

        Raises:
            JobError: the run cannot be read.
            LaunchError: its coordinator does not answer.
        """
        self.reading += 1
        try:
            async with self._turn:  # one range at a time, so that browsers share one thread
                curves = FinerCurves(axis, low, high, self.model.stretches.of(axis, low, high))
                while not await is_gone():
                    if not await asyncio.to_thread(curves.take, self._source.read):
                        return curves.points()
            return {}
        finally:
            self.reading -= 1

    async def _new_in(self, name: str, follower: Follower) -> NewLines:
        """What has come in a file. Its stamp is looked at first; what has one is on this host, and needs no thread."""
        stamp = self._source.stamp(name)
        if stamp is not None and stamp == self._stamps.get(name):
            return NewLines([])
        read = self._source.read
        found = await asyncio.to_thread(follower.news, read) if stamp is None else follower.news(read)
        self._stamps[name] = None if found.more else stamp
        return found

    def _object(self, name: str) -> Mapping[str, Any]:
        data = self._source.read(name, 0, LARGEST_FILE)
        with suppress(Unreadable):  # it is just being written, or none of ours
            return parse_object(data) if data else {}
        return {}

    async def _ask(self) -> bool:
        """How it stands; whether that is news."""
        before = self.model.status, self.model.result
        self._asked_at = asyncio.get_running_loop().time()
        self.model.result, self.model.status = await asyncio.to_thread(lambda: (self._object(RESULT), self._status()))
        return before != (self.model.status, self.model.result)

    def _status(self) -> Mapping[str, Any] | None:
        try:
            control = self._source.control()
            return None if control is None else control.status()
        except (JobError, LaunchError):  # it is being started again, or has just ended
            return None

    async def _tell(self) -> None:
        async with self._changed:
            self._version += 1
            self._changed.notify_all()
