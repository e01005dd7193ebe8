"""This worker's rank, as Lightning asks for it: it may change while a job trains."""

from __future__ import annotations

from unisono.integrations import live_rank
from unisono.integrations.lightning.framework import fabric
from unisono.integrations.live_rank import rank_of
from unisono.train.run import Run

_rank_zero_only = fabric("utilities.rank_zero").rank_zero_only
_ClusterEnvironment = fabric("plugins.environments").ClusterEnvironment


def follow(run: Run) -> None:
    """Lightning's functions for rank 0 alone go by this run from now on."""
    _rank_zero_only.rank = live_rank.follow(run)


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
