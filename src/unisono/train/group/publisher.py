"""Making values known to those who join later, until the coordinator has them."""

import threading
from collections.abc import Callable

from unisono.errors import LaunchError
from unisono.membership.messages import StoreReply, StoreRequest
from unisono.train.group.backlog import Backlog

AGAIN_S = 1.0
"""After a question that the coordinator did not answer, or values that are not yet there."""

Ask = Callable[[StoreRequest], StoreReply]
"""Asks the coordinator's store; raises :class:`LaunchError` if no answer comes."""


class Publisher:
    """A backlog, and a thread that works it off. Nobody else waits: the thread asks again until it is answered.

    Args:
        ask: the coordinator's store.
    """

    def __init__(self, ask: Ask) -> None:
        self._ask = ask
        self._backlog = Backlog()
        self._is_closed = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def wait(self, most: int, timeout_s: float) -> bool:
        """Wait until the coordinator has all values but so many at most; False if it takes longer."""
        with self._changed:
            return self._changed.wait_for(lambda: len(self._backlog) <= most, timeout_s)

    def publish(self, key: str, text: str) -> None:
        """Keep a value, the same on all members, until the coordinator has it."""
        with self._changed:
            self._backlog.publish(key, text)
            if self._thread is None and not self._is_closed:
                self._thread = threading.Thread(target=self._live, name="unisono-publisher", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def lead(self, tells: bool) -> None:
        """Whether this member tells the coordinator from now on. What it has kept another one may have told."""
        with self._changed:
            self._backlog.lead(tells)
            self._changed.notify_all()

    def close(self) -> None:
        """Tell nothing more; the others have what is not there."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    # -- on a thread

    def _live(self) -> None:
        while (request := self._next()) is not None:
            try:
                reply = self._ask(request)
            except LaunchError:  # it is gone for a while, or for good: then this is closed soon
                self._pause()
                continue
            with self._changed:
                goes_on = self._backlog.answered(request, reply)
                self._changed.notify_all()
            if not goes_on:
                self._pause()

    def _next(self) -> StoreRequest | None:
        """What there is to ask; None when there is nothing to ask any more."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or self._backlog.next() is not None)
            return None if self._is_closed else self._backlog.next()

    def _pause(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed, AGAIN_S)
