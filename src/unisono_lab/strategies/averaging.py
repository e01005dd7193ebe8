"""Strategies whose replicas a central model holds together, or that meet in pairs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from unisono.errors import JobError
from unisono.sync import Rounds

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class ModelAveraging(Rounds):
    """Synchronous model averaging, SMA (Koliousis et al., CROSSBOW, VLDB 2019), with a central model z.

    In each step every worker updates its replica w_j on its own part of the batch. After the
    update, with d_j = w_j - z from before it::

        w_j ← w_j - alpha·d_j        z ← z + Σ alpha·d_j + μ·(z - z_prev)

    The replicas' mean keeps a distance D from z, and so does z from z_prev: without gradients, with n workers ::

        D ← (1 - alpha·(n + 1))·D - μ·(z - z_prev)        z - z_prev ← n·alpha·D + μ·(z - z_prev)

    which grows without bound unless alpha·(n + 1 + μ) < 2·(1 + μ). If a job grows to so many workers that alpha is too
    large for them, the default is used instead.

    Args:
        alpha: the strength of the correction; 0 for 1 / workers, or 1/2 with one worker.
        momentum: μ, the momentum of the central model.
        round_every: the number of steps in a round, as of :class:`Rounds`.

    Raises:
        JobError: a value is out of range.
    """

    name: ClassVar[str] = "model-averaging"
    part: ClassVar[str] = "unisono_lab.strategies.replicas:CentralAveraging"

    alpha: float = 0.0
    momentum: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require_rate("alpha", below=1.0)
        self._require_rate("momentum", below=1.0)

    def require(self, workers: int | None) -> None:
        """Refuse also corrections that overshoot."""
        super().require(workers)
        if workers is not None and not self._settles(workers):
            raise JobError(
                f"strategy={str(self)!r} with {workers} workers: the central model would overshoot further in each "
                f"step. Use an alpha below {self._limit(workers):.4g}, or leave it out: 1 / workers"
            )

    def strength(self, workers: int) -> float:
        """The strength of the correction with this number of workers."""
        return self.alpha if self.alpha and self._settles(workers) else 1.0 / max(workers, 2)

    def move(self, central: Tensor, previous: Tensor, corrections: Tensor) -> None:
        """Move the central model. All tensors are of one shape, and changed in place.

        Args:
            central: z, which is moved.
            previous: z_prev, which becomes the old z.
            corrections: Σ alpha·d_j, which is overwritten.
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
    part: ClassVar[str] = "unisono_lab.strategies.replicas:Pairs"


def average(mine: Tensor, theirs: Tensor) -> Tensor:
    """(mine + theirs) / 2, of any shape: both workers of a pair get the same bits."""
    return (mine + theirs).mul_(0.5)
