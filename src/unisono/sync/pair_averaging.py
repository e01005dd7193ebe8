"""Replicas that meet in pairs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from unisono.sync.strategy import Rounds

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class PairAveraging(Rounds):
    """AD-PSGD (Lian et al., ICML 2018): asynchronous and decentralised.

    A worker computes the gradient of its replica on a part of a batch. Then it and a partner both take the mean of
    their two replicas, in one atomic exchange, so that the mean over all replicas stays; then it applies the gradient.
    As in the paper, workers of even rank ask and those of odd rank answer: no two wait for each other in a circle.

    Args:
        round_every: as for :class:`Rounds`.

    Raises:
        JobError: a value is out of range.
    """

    name: ClassVar[str] = "pair-averaging"


def average(mine: Tensor, theirs: Tensor) -> Tensor:
    """(mine + theirs) / 2, of any shape: the same bits whoever computes it."""
    return (mine + theirs).mul_(0.5)
