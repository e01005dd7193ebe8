"""This worker's rank, as other frameworks keep it in a variable of theirs: it may change while a job trains."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from operator import eq, ge, gt, index, le, lt, ne
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


def _by_present_rank(act: Callable[..., Any]) -> Callable[..., Any]:
    return lambda rank, *values: act(rank._now, *values)


for _act in (*(eq, ne, lt, le, gt, ge, index), *(bool, int, repr, str, format, hash)):
    setattr(LiveRank, f"__{_act.__name__}__", _by_present_rank(_act))
