"""Strategies whose replicas are averaged: over time, around a center, or in pairs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from unisono.errors import JobError
from unisono.sync.strategy import Rounds

if TYPE_CHECKING:
    from torch import Tensor


# Workers that train by themselves for a while, and then average.


@dataclass(frozen=True)
class LocalSGD(Rounds):
    """K local steps, then the mean of all replicas (Stich, ICLR 2019, arXiv 1805.09767).

    In each step a worker updates its replica on its own part of the batch. After every K steps w_j ← Σ w_i / n.

    Args:
        every: K, the number of steps from one averaging to the next.
        round_every: the number of steps in a round, as of :class:`Rounds`; rounded up to a multiple of ``every``.

    Raises:
        JobError: a value is out of range.
    """

    name: ClassVar[str] = "local-sgd"

    every: int = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require_count("every", 1)

    @property
    def round_steps(self) -> int:
        """A multiple of ``every``."""
        return -(-self.round_every // self.every) * self.every


@dataclass(frozen=True)
class DiLoCo(LocalSGD):
    """Local steps by an inner optimizer, and an outer one for what comes of them (Douillard et al., arXiv 2311.08105).

    The script's optimizer is the inner one; each worker keeps its state. After every K steps, with θ_prev where they
    began, Δ = θ_prev - Σ θ_i / n is a gradient for SGD with Nesterov momentum::

        v ← μ·v + Δ        θ ← θ_prev - η·(Δ + μ·v)

    The authors' μ = 0.9 lets one outer gradient move the weights seven times as far as it says, over the next dozens of
    outer updates. A run that has only a few overshoots with it, so the default is less.

    Args:
        every: K, the number of steps from one outer update to the next.
        outer_rate: η, the outer learning rate.
        outer_momentum: μ, the outer momentum; 0.9 for a run of hundreds of outer updates.
        round_every: the number of steps in a round, as of :class:`LocalSGD`.

    Raises:
        JobError: a value is out of range.
    """

    name: ClassVar[str] = "diloco"

    every: int = 32
    outer_rate: float = 0.7
    outer_momentum: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require_rate("outer_rate")
        self._require_rate("outer_momentum", below=1.0)

    def update(self, start: Tensor, mean: Tensor, velocity: Tensor) -> Tensor:
        """The outer update.

        Args:
            start: θ_prev, of any shape.
            mean: the mean of the replicas, of the same shape.
            velocity: v, of the same shape, changed in place.

        Returns:
            θ, a new tensor.
        """
        delta = start - mean
        velocity.mul_(self.outer_momentum).add_(delta)
        return start - (delta.add_(velocity, alpha=self.outer_momentum)).mul_(self.outer_rate)


# Replicas that a central model holds together.


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


# Replicas that meet in pairs.


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


def average(mine: Tensor, theirs: Tensor) -> Tensor:
    """(mine + theirs) / 2, of any shape: the same bits whoever computes it."""
    return (mine + theirs).mul_(0.5)
