"""What a run leaves to its strategies."""

from __future__ import annotations

from dataclasses import dataclass

from unisono.errors import JobError
from unisono.job import Reduction
from unisono.sync.parameter_server import ParameterServer
from unisono.sync.strategy import Strategy


@dataclass(frozen=True, slots=True)
class StrategyConstraints:
    """What every strategy of a run has to agree with: the one that it begins with, and those that policies choose.

    Attributes:
        reduction: of the job.
        splits_update: whether the workers of a host share parameters, and each updates a part of them.
        compares_bits: whether somebody compares this run's bits with another one's.
    """

    reduction: Reduction = "exact"
    splits_update: bool = False
    compares_bits: bool = False

    def require(self, strategy: Strategy, workers: int | None = None) -> None:
        """Refuse a strategy that cannot be.

        Args:
            strategy: that is to be used.
            workers: that there are; None where that may change.

        Raises:
            JobError: says what to change.
        """
        if self.reduction != "exact" and isinstance(strategy, ParameterServer) and strategy.synchronous:
            raise JobError(
                f"strategy={str(strategy)!r} has servers finish exact sums, and reduction={self.reduction!r} is the "
                f"backend's own: leave one of them out"
            )
        if self.compares_bits and not strategy.is_exact:
            raise JobError(
                f"unisono verify and unisono chaos compare bits, which strategy={str(strategy)!r} does not promise: "
                f"only all-reduce and the synchronous parameter-server do"
            )
        strategy.require(workers, shards_optimizer=self.splits_update)
