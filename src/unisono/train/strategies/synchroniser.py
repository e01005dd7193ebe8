"""A worker's part in a strategy whose workers have weights of their own in between."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from unisono.reduce.averaging import Averaging
from unisono.train.group.workers import Workers
from unisono.train.model.prepared import Prepared
from unisono.train.model.update import Update
from unisono.train.strategies.replica import Replica


@dataclass(frozen=True)
class Ground:
    """What a synchroniser stands on.

    Attributes:
        workers: of this generation.
        prepared: models and optimizers.
        timeout_s: how long to wait for another worker.
        seed: of the job.
    """

    workers: Workers
    prepared: Prepared
    timeout_s: float
    seed: int


class Synchroniser(Update):
    """Makes the updates of this worker, and keeps its weights together with the others'.

    It lives as long as the generation and the strategy. Making it is collective.

    Args:
        ground: what it stands on.

    Attributes:
        parts: into how many a step's work is cut that is not shared out beforehand; 0 if every worker has its own part.
        follows: whether it goes on from what this worker knew before a loss.

    Raises:
        WorkerLost: from every method, when another worker is gone.
    """

    parts = 0
    follows = False

    def __init__(self, ground: Ground) -> None:
        self.workers = ground.workers
        self.averaging = Averaging(ground.workers.transport)
        self.replica = Replica(ground.prepared, ground.workers, self.averaging)

    def follow(self, before: Synchroniser) -> None:
        """Some of the workers were lost: take over what this worker knows from before."""
        self.follows = True

    def claim(self, step: int) -> int | None:
        """The next part of a step's work that is this worker's; None if none is left. May wait for other workers."""
        raise NotImplementedError("every worker has its own part")

    def round_begins(self) -> None:
        """The first step of a round is about to begin: all workers have the same weights."""

    def step_begins(self) -> None:
        """A step's first update is about to be computed."""

    def step_ends(self, step: int, *, ends_round: bool) -> None:
        """All updates of a step are made; :meth:`settle` comes next if the round ends."""

    @abstractmethod
    def settle(self, *, after_loss: bool) -> Callable[[], None]:
        """Work out the strategy's central model, with buffers and what optimizers keep. Collective; sets nothing of it.

        If a worker is lost in it, it is done again with those who are left, of whom some may be through.

        Args:
            after_loss: whether workers may be at different steps, and one update or exchange apart.

        Returns:
            what sets it, here.
        """

    def resume(self) -> None:
        """After a loss the central model is set here: go on when it is everywhere. Collective."""

    def common(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The mean of what those have who follow: before a loss all had it alike, or one exchange apart. Collective.

        Whoever does not follow was given another worker's state in the middle of a round, and knows nothing of it.
        """
        counted = sum(self.workers.gather_json(self.follows))
        mine = tensors if self.follows else [torch.zeros_like(tensor) for tensor in tensors]
        return [mean.clone() for mean in self.averaging.mean(mine, divisor=float(counted))]

    def figures(self) -> Mapping[str, Any]:
        """What there is to tell of the round; forgets it."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """What goes on from round to round, the same on all workers: tensors and numbers by name."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""

    def close(self) -> None:
        """Let go of connections."""
