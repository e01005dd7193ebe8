"""A worker's part in a strategy whose workers have weights of their own in between."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from unisono.membership.rendezvous import Generation
from unisono.plan.split import Split
from unisono.reduce.averaging import Averaging
from unisono.reduce.transport import Solo
from unisono.train.group.workers import Workers
from unisono.train.model.prepared import Prepared
from unisono.train.model.update import Update
from unisono.train.strategies.replica import Replica

# A worker that computes something by itself.


class Alone(Workers):
    """A worker that works without the others of its generation for a while.

    Whoever watches those several sees that it gets on.

    Args:
        among: all of these workers.
        shards: the number of shards that it computes.
    """

    def __init__(self, among: Workers, shards: int) -> None:
        super().__init__(
            Generation(among.generation.number, 0, Split.even(shards, 1)), Solo(shards), device=among.device
        )
        self._among = among

    def tick(self) -> None:
        """So does the worker that it is among the others."""
        super().tick()
        self._among.tick()


# What computed samples came to, added up.


@dataclass(slots=True)
class Sums:
    """The sums over the work that one worker computed, part after part.

    Attributes:
        samples: the number of samples.
        loss: the sum of their losses.
        metrics: the sums of what the loss functions logged, over the same samples.
        seconds: the seconds of each kind of work.
        skipped: the number of parts without an update, since their loss or gradient was NaN or infinite.
    """

    samples: int = 0
    loss: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    skipped: int = 0

    def add(self, samples: int, loss: float, metrics: Mapping[str, float], seconds: Mapping[str, float]) -> None:
        """One more part, with its samples' mean loss and metrics."""
        self.samples += samples
        self.loss += loss * samples
        for name, value in metrics.items():
            self.metrics[name] = self.metrics.get(name, 0.0) + value * samples
        for name, value in seconds.items():
            self.seconds[name] = self.seconds.get(name, 0.0) + value

    def mean_loss(self, otherwise: float) -> float:
        """Of a sample; where none was computed, something else."""
        return self.loss / self.samples if self.samples else otherwise

    @property
    def mean_metrics(self) -> dict[str, float]:
        """Of a sample."""
        return {name: value / self.samples for name, value in self.metrics.items()}


@dataclass(frozen=True)
class SyncContext:
    """The workers of a synchroniser, what they train, and their limits.

    Attributes:
        workers: the workers of this generation.
        prepared: models and optimizers.
        timeout_s: the longest wait for another worker, in seconds.
        seed: the job's seed.
    """

    workers: Workers
    prepared: Prepared
    timeout_s: float
    seed: int


class Synchroniser(Update):
    """Makes the updates of this worker, and keeps its weights together with the others'.

    It lives as long as the generation and the strategy. Making it is collective.

    Args:
        context: the workers, what they train, and their limits.

    Attributes:
        parts: the number of parts of a step's work that is not distributed before; 0 if every worker has its own.
        follows: whether it goes on from what this worker knew before a loss.

    Raises:
        WorkerLost: from every method, when another worker is gone.
    """

    parts = 0
    follows = False

    def __init__(self, context: SyncContext) -> None:
        self.workers = context.workers
        self.averaging = Averaging(context.workers.transport)
        self.replica = Replica(context.prepared, context.workers, self.averaging)

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
        """All updates of a step are made; :meth:`synchronise` comes next if the round ends."""

    @abstractmethod
    def synchronise(self, *, after_loss: bool) -> Callable[[], None]:
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
