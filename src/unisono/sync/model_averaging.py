"""Replicas that a central model holds together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from unisono.sync.strategy import Rounds

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class ModelAveraging(Rounds):
    """Synchronous model averaging, SMA (Koliousis et al., CROSSBOW, VLDB 2019), with a central model z.

    In each step every worker updates its replica w_j on its own part of the batch. Before, d_j = w_j - z; after it::

        w_j ← w_j - alpha·d_j        z ← z + Σ alpha·d_j + μ·(z - z_prev)

    Args:
        alpha: the strength of the correction; 0 for 1 / workers.
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

    def strength(self, workers: int) -> float:
        """The correction among so many workers."""
        return self.alpha or 1.0 / workers

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
