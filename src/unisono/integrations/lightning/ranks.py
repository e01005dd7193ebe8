"""This worker's rank, as Lightning asks for it: it may change while a job trains."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

from unisono.integrations.lightning.framework import fabric
from unisono.train.run import Run

_rank_zero_only = fabric("utilities.rank_zero").rank_zero_only
_ClusterEnvironment = fabric("plugins.environments").ClusterEnvironment

_RUN: ContextVar[Run | None] = ContextVar("_RUN", default=None)
_newest: list[Run] = []


def follow(run: Run) -> None:
    """Lightning's functions for rank 0 alone go by this run from now on."""
    _RUN.set(run)
    _newest[:] = [run]
    _rank_zero_only.rank = _LiveRank()


def rank_of(run: Run) -> int:
    """The worker's rank; 1 as long as it has yet to join the others, since it is not the main one."""
    return 1 if run.rank < 0 else run.rank


class _LiveRank(int):
    """A number that is compared as the worker's present rank. Threads of Lightning's own go by the newest run."""

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


class WorkersEnvironment(_ClusterEnvironment):  # type: ignore[misc,valid-type]  # Lightning is not looked into by mypy
    """The workers of a run, started by whoever started them. Batches come from one loader, whatever their number.

    Args:
        run: the run.
    """

    def __init__(self, run: Run) -> None:
        super().__init__()
        self._run = run

    @property
    def creates_processes_externally(self) -> bool:
        """Lightning starts no processes."""
        return True

    @property
    def main_address(self) -> str:
        """Nobody connects there."""
        return "127.0.0.1"

    @property
    def main_port(self) -> int:
        """Nobody connects there."""
        return 0

    @staticmethod
    def detect() -> bool:
        """It is never chosen by itself."""
        return False

    def world_size(self) -> int:
        """One, so that nothing that a script derives of it depends on the number of workers."""
        return 1

    def set_world_size(self, size: int) -> None:
        """It stays."""

    def global_rank(self) -> int:
        """The worker's rank."""
        return rank_of(self._run)

    def set_global_rank(self, rank: int) -> None:
        """It is the run's to say."""

    def local_rank(self) -> int:
        """Each worker has one device, and the run has chosen it."""
        return 0

    def node_rank(self) -> int:
        """Hosts make no difference."""
        return 0
