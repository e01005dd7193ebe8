"""The workers' parts in local SGD and DiLoCo."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from unisono.sync import DiLoCo, LocalSGD
from unisono.train.model.tensors import set_all, set_like
from unisono.train.strategies.synchroniser import SyncContext, Synchroniser


class LocalUpdates(Synchroniser):
    """Makes updates on every worker by itself; every so many steps the weights become the mean of all workers'.

    Args:
        strategy: the settings: the number of steps between two means.
    """

    def __init__(self, context: SyncContext, strategy: LocalSGD) -> None:
        super().__init__(context)
        self.strategy = strategy

    def step_ends(self, step: int, *, ends_round: bool) -> None:
        """Average the weights, if it is time."""
        if (step + 1) % self.strategy.every == 0 and not ends_round:
            self._synchronised()()

    def synchronise(self, *, after_loss: bool) -> Callable[[], None]:
        """Work out the means of weights, buffers and optimizer states."""
        weights = self._synchronised()
        buffers, states = self.replica.average_buffers(), self.replica.average_states()

        def make() -> None:
            weights()
            set_all(buffers)
            states()

        return make

    def _synchronised(self) -> Callable[[], None]:
        """Work out the weights that all workers will have. Collective. Returns a function that sets them here."""
        return partial(self.replica.load, [mean.clone() for mean in self.replica.mean()])


class OuterUpdates(LocalUpdates):
    """Local updates with an outer optimizer, whose velocity is the same on all workers.

    Args:
        strategy: the settings: the number of steps between two means, and those of the outer optimizer.
    """

    def __init__(self, context: SyncContext, strategy: DiLoCo) -> None:
        super().__init__(context, strategy)
        self._outer = strategy
        self._start = self.replica.copies()
        self._velocity = [torch.zeros_like(weight) for weight in self._start]
        self._steps = 0

    def follow(self, before: Synchroniser) -> None:
        """Take over the start, the velocity and the steps from before a loss."""
        super().follow(before)
        assert isinstance(before, OuterUpdates)
        self._start, self._velocity, self._steps = before._start, before._velocity, before._steps

    def round_begins(self) -> None:
        """Start at the present weights, which the script may have changed."""
        self._start = self.replica.copies()

    def synchronise(self, *, after_loss: bool) -> Callable[[], None]:
        """Work out the means with an outer update."""
        if after_loss:  # some workers may have made an outer update that others have not
            self._start, self._velocity = self.common(self._start), self.common(self._velocity)
        return super().synchronise(after_loss=after_loss)

    def step_ends(self, step: int, *, ends_round: bool) -> None:
        """Count the step, and make the outer update if it is time."""
        self._steps += 1
        super().step_ends(step, ends_round=ends_round)

    def state_dict(self) -> dict[str, Any]:
        """Return the velocity."""
        return {"velocity": self._velocity}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set the velocity."""
        set_like(self._velocity, state.get("velocity"), "velocity")

    def _synchronised(self) -> Callable[[], None]:
        is_due = any(self.workers.gather_json(self._steps))
        mean = self.replica.mean()
        moved, velocity = self._start, self._velocity
        if is_due:  # without a step since the last time nothing has changed, and momentum alone must not move weights
            velocity = [tensor.clone() for tensor in self._velocity]
            triples = zip(self._start, mean, velocity, strict=True)
            moved = [self._outer.update(start, average, speed) for start, average, speed in triples]

        def make() -> None:
            if is_due:
                self.replica.load(moved)
            self._start, self._velocity, self._steps = moved, velocity, 0

        return make
