"""The news that a worker's main thread waits for: the coordinator's messages, and values that others publish."""

import queue
import threading
from collections.abc import Callable
from typing import Any, NoReturn

from unisono.errors import Dismissed, JobEnded, LaunchError
from unisono.membership.messages import JobOver, NewGeneration, Refused, Removed, StoreReply, StoreRequest, Welcome
from unisono.train.group.one_voice import Agreed, Known

WATCH_S = 30.0
"""How long the coordinator lets one question for a value wait."""

AGAIN_S = 1.0
"""From a question that was not answered to the next."""

Farewell = Removed | Refused | JobOver
"""After which there is nothing else to hear."""


_Newest = Welcome | NewGeneration | Known | Agreed | Farewell


class News:
    """Brings them from other threads, in their order.

    Attributes:
        farewell: the newest that was heard; None as long as there is none.
    """

    def __init__(self) -> None:
        self.farewell: Farewell | None = None
        self._queue: queue.SimpleQueue[_Newest] = queue.SimpleQueue()
        self._end: Farewell | None = None
        self._closed = threading.Event()

    def put(self, news: _Newest) -> None:
        """The coordinator says so, or what was watched for is there, or all devices of this worker agree."""
        if isinstance(news, Farewell):
            self.farewell = news
        self._queue.put(news)

    def take(self, *kinds: Any, wanted: Callable[[Any], bool] = lambda news: True) -> Any:
        """Wait for the next of one of these kinds. After a farewell there are no others, however often one asks.

        Raises:
            Dismissed: this worker takes part no more, or the job is done.
            JobEnded: the job has failed.
            LaunchError: the coordinator refuses this worker.
        """
        while True:
            news = self._end or self._queue.get()
            if isinstance(news, kinds) and wanted(news):
                return news
            if isinstance(news, Farewell):
                self._end = news
                _leave(news)

    def brings_farewell(self, within_s: float) -> bool:
        """Whether the next is a farewell, and comes in time. Others are left out."""
        try:
            return isinstance(self._queue.get(timeout=within_s), Farewell)
        except queue.Empty:
            return False

    def watch(self, name: str, request: Callable[[StoreRequest], StoreReply], tell: Callable[[Known], None]) -> None:
        """Have a value told as soon as it is known.

        Args:
            name: the name of the value.
            request: a function that asks the coordinator's store.
            tell: a function that gets the value, on another thread.
        """

        def look() -> None:
            while not self._closed.is_set():
                try:
                    reply = request(StoreRequest(id=0, operation="get", keys=(f"run/{name}",), timeout_s=WATCH_S))
                except LaunchError:  # the coordinator is gone for a while, or this worker is through
                    self._closed.wait(AGAIN_S)
                    continue
                if not reply.error:
                    tell(Known(name=name, value=reply.value))
                    return

        threading.Thread(target=look, name="unisono-watch", daemon=True).start()

    def close(self) -> None:
        """Watch for no more values."""
        self._closed.set()


def _leave(news: Farewell) -> NoReturn:
    if isinstance(news, Removed):
        raise Dismissed(news.reason, preempted=news.preempted)
    if isinstance(news, Refused):
        raise LaunchError(f"the coordinator turns this worker away: {news.reason}")
    if news.digest:
        raise Dismissed("the job is done")
    raise JobEnded(f"the job is over: {news.reason}")
