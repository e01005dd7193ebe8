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
from unisono.reduce.reducer import Averaging
from unisono.reduce.transport import Solo
from unisono.train.group.workers import Workers
from unisono.train.model.prepared import Prepared
from unisono.train.model.update import Update
from unisono.train.strategies.replica import Replica

# A worker that computes by itself.


class Alone(Workers):
    """A worker that works without the others of its generation for a while.

    It reports progress in those workers, too, for a process that watches them.

    Args:
        among: all workers of the generation.
        shards: the number of shards that it computes.
    """

    def __init__(self, among: Workers, shards: int) -> None:
        super().__init__(
            Generation(among.generation.number, 0, Split.even(shards, 1)), Solo(shards), device=among.device
        )
        self._among, self.named_rank = among, among.rank

    def tick(self) -> None:
        """Note progress here and among all workers."""
        super().tick()
        self._among.tick()


# The results of computed samples, added up.


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
        """Add one more part, with the mean loss and the mean metrics of its samples."""
        self.samples += samples
        self.loss += loss * samples
        for name, value in metrics.items():
            self.metrics[name] = self.metrics.get(name, 0.0) + value * samples
        for name, value in seconds.items():
            self.seconds[name] = self.seconds.get(name, 0.0) + value

    def mean_loss(self, otherwise: float) -> float:
        """The mean loss of a sample; ``otherwise`` if no sample was computed."""
        return self.loss / self.samples if self.samples else otherwise

    @property
    def mean_metrics(self) -> dict[str, float]:
        """The mean metrics of a sample."""
        return {name: value / self.samples for name, value in self.metrics.items()}


@dataclass(frozen=True)
class SyncContext:
    """The workers of a synchroniser, what they train, and their limits.

    Attributes:
        timeout_s: the longest wait for another worker, in seconds.
    """

    workers: Workers
    prepared: Prepared
    timeout_s: float
    seed: int


class Synchroniser(Update):
    """Makes the updates of this worker, and synchronises its weights with the others'.

    It lives as long as the generation and the strategy. Making it is collective.

    Attributes:
        parts: the number of parts of a step's work that are distributed while it is done; 0 if every worker has its own
            part from the beginning.
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
        """Take over what this worker knows from before the loss of some workers."""
        self.follows = True

    def claim(self, step: int) -> int | None:
        """Return this worker's next part of a step's work; None if none is left. May wait for other workers."""
        raise NotImplementedError("every worker has its own part")

    def round_begins(self) -> None:
        """Prepare for the first step of a round. All workers have the same weights."""

    def step_begins(self) -> None:
        """Prepare for the first update of a step."""

    def step_ends(self, step: int, *, ends_round: bool) -> None:
        """End a step whose updates are all made. :meth:`synchronise` comes next if the round ends."""

    @abstractmethod
    def synchronise(self, *, after_loss: bool) -> Callable[[], None]:
        """Work out the strategy's central model, with buffers and optimizer states. Collective; sets nothing yet.

        If a worker is lost during it, it is done again with those that are left. Some of these may have completed it.

        Args:
            after_loss: whether workers may be at different steps, and one update or exchange apart.

        Returns:
            a function that sets the result here.
        """

    def resume(self) -> None:
        """Go on after a loss: wait until the central model, which is set here, is set everywhere. Collective."""

    def common(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the mean of the tensors of the workers that follow. Collective.

        Before a loss all of them had the same tensors, or were one exchange apart. A worker that does not follow was
        given another worker's state in the middle of a round, so its tensors do not count.
        """
        counted = sum(self.workers.gather_json(self.follows))
        own_tensors = tensors if self.follows else [torch.zeros_like(tensor) for tensor in tensors]
        return [mean.clone() for mean in self.averaging.mean(own_tensors, divisor=float(counted))]

    def figures(self) -> Mapping[str, Any]:
        """Return figures of the round, and forget them."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Return the state that lasts from round to round, the same on all workers: tensors and numbers by name."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the result of :meth:`state_dict`."""

    def close(self) -> None:
        """Let go of connections."""
