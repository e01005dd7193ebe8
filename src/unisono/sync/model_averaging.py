"""Replicas that a central model holds together."""

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
        alpha: the strength of the correction; 0 for 1 / workers, and 1/2 for one that is left alone.
        momentum: μ of the central model.
        round_every: as for :class:`Rounds`.

    Raises:
        JobError: a value is out of range.
    """

    name: ClassVar[str] = "model-averaging"

    alpha: float = 0.0
    momentum: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require_rate("alpha", below=1.0)
        self._require_rate("momentum", below=1.0)

    def require(self, workers: int | None, *, shards_optimizer: bool = False) -> None:
        """Also refuse corrections that overshoot."""
        super().require(workers, shards_optimizer=shards_optimizer)
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
