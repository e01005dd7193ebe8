"""Strategies whose replicas a central model holds together, or that meet in pairs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from unisono.errors import JobError
from unisono.sync.strategy import Rounds

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class ModelAveraging(Rounds):
    """Synchronous model averaging, SMA (Koliousis et al., CROSSBOW, VLDB 2019), with a central model z.

    In each step every worker updates its replica w_j on its own part of the batch. Before, d_j = w_j - z; after it::

        w_j ← w_j - alpha·d_j        z ← z + Σ alpha·d_j + μ·(z - z_prev)

    The replicas' mean keeps a distance D from z, and so does z from z_prev: without gradients, with n workers ::

        D ← (1 - alpha·(n + 1))·D - μ·(z - z_prev)        z - z_prev ← n·alpha·D + μ·(z - z_prev)

    which grows without end unless alpha·(n + 1 + μ) < 2·(1 + μ). Where workers have become so many that an alpha is too
    large for them, the default is used instead.

    Args:
        alpha: the strength of the correction; 0 for 1 / workers, or 1/2 with one worker.
        momentum: μ, the momentum of the central model.
        round_every: the number of steps in a round, as of :class:`Rounds`.

    Raises:
        JobError: a value is out of range.
    """

    name: ClassVar[str] = "model-averaging"
    part: ClassVar[str] = "unisono_lab.strategies.central_averaging:CentralAveraging"

    alpha: float = 0.0
    momentum: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require_rate("alpha", below=1.0)
        self._require_rate("momentum", below=1.0)

    def require(self, workers: int | None) -> None:
        """Also refuse corrections that overshoot."""
        super().require(workers)
        if workers is not None and not self._settles(workers):
            raise JobError(
                f"strategy={str(self)!r} with {workers} workers: the central model would overshoot further in each "
                f"step. Use an alpha below {self._limit(workers):.4g}, or leave it out: 1 / workers"
            )

    def strength(self, workers: int) -> float:
        """The correction among so many workers."""
        return self.alpha if self.alpha and self._settles(workers) else 1.0 / max(workers, 2)

    def move(self, central: Tensor, previous: Tensor, corrections: Tensor) -> None:
        """Move the central model, and remember where it was; all 1-D, of one length, changed in place.

        Args:
            central: z.
            previous: z_prev; becomes z as it was.
            corrections: Σ alpha·d_j; its content is used up.
        """
        corrections.add_(central - previous, alpha=self.momentum)
        previous.copy_(central)
        central.add_(corrections)

    def _settles(self, workers: int) -> bool:
        return self.alpha < self._limit(workers)

    def _limit(self, workers: int) -> float:
        return 2 * (1 + self.momentum) / (workers + 1 + self.momentum)


@dataclass(frozen=True)
class PairAveraging(Rounds):
    """AD-PSGD (Lian et al., ICML 2018): asynchronous and decentralised.

    A worker computes the gradient of its replica on a part of a batch. Then it and a partner both take the mean of
    their two replicas, in one atomic exchange, so that the mean over all replicas stays; then it applies the gradient.
    As in the paper, workers of even rank ask and those of odd rank answer: no two wait for each other in a circle.

    Args:
        round_every: the number of steps in a round, as of :class:`Rounds`.

    Raises:
        JobError: a value is out of range.
    """

    name: ClassVar[str] = "pair-averaging"
    part: ClassVar[str] = "unisono_lab.strategies.pairs:Pairs"


def average(mine: Tensor, theirs: Tensor) -> Tensor:
    """(mine + theirs) / 2, of any shape: the same bits whoever computes it."""
    return (mine + theirs).mul_(0.5)
