"""This worker's rank, as other frameworks keep it in a variable of theirs: it may change while a job trains."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

from unisono.train.run import Run

_RUN: ContextVar[Run | None] = ContextVar("_RUN", default=None)
_newest: list[Run] = []


def follow(run: Run) -> LiveRank:
    """A rank that is this run's from now on, whatever it becomes."""
    _RUN.set(run)
    _newest[:] = [run]
    return LiveRank()


def rank_of(run: Run) -> int:
    """The worker's rank; 1 as long as it has yet to join the others, since it is not the main one."""
    return 1 if run.rank < 0 else run.rank


class LiveRank(int):
    """A number that is compared as the worker's present rank. Threads of a framework's own go by the newest run."""

    @property
    def _now(self) -> int:
        run = _RUN.get()
        return rank_of(_newest[0] if run is None else run)

    def __eq__(self, other: object) -> bool:
        return self._now == other

    def __ne__(self, other: object) -> bool:
        return self._now != other

    def __lt__(self, other: Any) -> bool:
        return bool(self._now < other)

    def __le__(self, other: Any) -> bool:
        return bool(self._now <= other)

    def __gt__(self, other: Any) -> bool:
        return bool(self._now > other)

    def __ge__(self, other: Any) -> bool:
        return bool(self._now >= other)

    def __bool__(self) -> bool:
        return self._now != 0

    def __hash__(self) -> int:
        return hash(self._now)

    def __int__(self) -> int:
        return self._now

    def __index__(self) -> int:
        return self._now

    def __repr__(self) -> str:
        return str(self._now)

    __str__ = __repr__

    def __format__(self, form: str) -> str:
        return format(self._now, form)
