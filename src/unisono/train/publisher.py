"""Making values known to those who join later, until the coordinator has them."""

import threading
import warnings
from collections.abc import Callable, Iterable
from itertools import islice

from unisono.errors import LaunchError, UnisonoWarning
from unisono.membership.messages import StoreReply, StoreRequest
from unisono.train.published import unpublishable

MANY = 256
"""Values that are asked for at once, and that a member keeps before it asks which of them are there."""

AGAIN_S = 1.0
"""After a question that the coordinator did not answer, or values that are not yet there."""

Ask = Callable[[StoreRequest], StoreReply]
"""Asks the coordinator's store; raises :class:`LaunchError` if no answer comes."""


class Publisher:
    """Every member keeps what was published until it knows that the coordinator has it; one of them tells it.

    When that one is lost, the next one tells all that is not there yet. Nobody waits here: a thread of its own asks,
    and asks again until it is answered.

    Args:
        ask: the coordinator's store.
    """

    def __init__(self, ask: Ask) -> None:
        self._ask = ask
        self._kept: dict[str, str] = {}  # by key, in the order in which they were published
        self._tells = self._checks = self._is_closed = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def wait(self, most: int, timeout_s: float) -> bool:
        """Wait until the coordinator has all values but so many at most; False if it takes longer."""
        with self._changed:
            return self._changed.wait_for(lambda: len(self._kept) <= most, timeout_s)

    def publish(self, key: str, text: str) -> None:
        """Keep a value, the same on all members, until the coordinator has it."""
        with self._changed:
            self._kept[key] = text
            if self._thread is None and not self._is_closed:
                self._thread = threading.Thread(target=self._live, name="unisono-publisher", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def lead(self, tells: bool) -> None:
        """Whether this member tells the coordinator from now on. What it has kept another one may have told."""
        with self._changed:
            self._checks = bool(self._kept) and (self._checks or not self._tells)
            self._tells = tells
            self._changed.notify_all()

    def close(self) -> None:
        """Tell nothing more; the others have what is not there."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    # -- on a thread

    def _live(self) -> None:
        while (batch := self._next()) is not None:
            try:
                done = self._look(batch) if self._checks or not self._tells else self._tell(batch)
            except LaunchError:  # it is gone for a while, or for good: then this is closed soon
                done = False
            if not done:
                self._pause()

    def _next(self) -> dict[str, str] | None:
        """What there is to do, some of the oldest; None when there is nothing to do any more."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or (self._kept and self._tells) or len(self._kept) > MANY)
            return None if self._is_closed else dict(islice(self._kept.items(), MANY))

    def _look(self, batch: dict[str, str]) -> bool:
        """Let go of values that are all there."""
        reply = self._ask(StoreRequest(id=0, operation="check", keys=tuple(batch)))
        if reply.value == "1":
            self._let_go(batch)
        else:
            self._checks = False
        return reply.value == "1" or self._tells

    def _tell(self, batch: dict[str, str]) -> bool:
        for key, text in batch.items():
            reply = self._ask(StoreRequest(id=0, operation="set", keys=(key,), value=text))
            if reply.error:  # whoever joins is told why it cannot
                reason = unpublishable(f"the coordinator does not keep it: {reply.error}")
                reply = self._ask(StoreRequest(id=0, operation="set", keys=(key,), value=reason))
            if reply.error:
                warnings.warn(f"no worker can join any more: {reply.error}", UnisonoWarning, stacklevel=2)
            self._let_go([key])
        return True

    def _let_go(self, keys: Iterable[str]) -> None:
        with self._changed:
            for key in keys:
                self._kept.pop(key, None)
            self._checks = self._checks and bool(self._kept)
            self._changed.notify_all()

    def _pause(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed, AGAIN_S)
