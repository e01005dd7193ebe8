"""Strategies whose workers train by themselves for a while, and then average."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from unisono.sync.strategy import Rounds

if TYPE_CHECKING:
    from torch import Tensor


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
    part: ClassVar[str] = "unisono.train.strategies.averaging:LocalUpdates"

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
    part: ClassVar[str] = "unisono.train.strategies.averaging:OuterUpdates"

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
