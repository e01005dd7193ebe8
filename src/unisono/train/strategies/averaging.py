"""Local SGD and DiLoCo at work."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from unisono.sync.averaging import DiLoCo, LocalSGD
from unisono.train.model.tensors import set_all, set_like
from unisono.train.strategies.synchroniser import SyncContext, Synchroniser


class LocalUpdates(Synchroniser):
    """Every worker makes updates of its own; every so many steps their weights become the mean.

    Args:
        context: the workers, what they train, and their limits.
        strategy: the settings: the number of steps between two means.
    """

    def __init__(self, context: SyncContext, strategy: LocalSGD) -> None:
        super().__init__(context)
        self.strategy = strategy

    def step_ends(self, step: int, *, ends_round: bool) -> None:
        """Average, if this is the time."""
        if (step + 1) % self.strategy.every == 0 and not ends_round:
            self._synchronised()()

    def synchronise(self, *, after_loss: bool) -> Callable[[], None]:
        """The mean of everything."""
        weights = self._synchronised()
        buffers, states = self.replica.average_buffers(), self.replica.average_states()

        def make() -> None:
            weights()
            set_all(buffers)
            states()

        return make

    def _synchronised(self) -> Callable[[], None]:
        """Work out the weights that all are to have. Collective. Returns what sets them, here."""
        return partial(self.replica.load, [mean.clone() for mean in self.replica.mean()])


class OuterUpdates(LocalUpdates):
    """Local updates with an outer optimizer, whose velocity is the same on all workers.

    Args:
        context: the workers, what they train, and their limits.
        strategy: the settings: the number of steps between two means, and the outer optimizer's.
    """

    def __init__(self, context: SyncContext, strategy: DiLoCo) -> None:
        super().__init__(context, strategy)
        self._outer = strategy
        self._start = self.replica.copies()
        self._velocity = [torch.zeros_like(weight) for weight in self._start]
        self._steps = 0

    def follow(self, before: Synchroniser) -> None:
        """Begin where all began."""
        super().follow(before)
        assert isinstance(before, OuterUpdates)
        self._start, self._velocity, self._steps = before._start, before._velocity, before._steps

    def round_begins(self) -> None:
        """Begin where all are, which may be where the script has put them."""
        self._start = self.replica.copies()

    def synchronise(self, *, after_loss: bool) -> Callable[[], None]:
        """An outer update, too."""
        if after_loss:  # one of them may have made an outer update that others have not
            self._start, self._velocity = self.common(self._start), self.common(self._velocity)
        return super().synchronise(after_loss=after_loss)

    def step_ends(self, step: int, *, ends_round: bool) -> None:
        """Count, and make the outer update, if this is the time."""
        self._steps += 1
        super().step_ends(step, ends_round=ends_round)

    def state_dict(self) -> dict[str, Any]:
        """The velocity."""
        return {"velocity": self._velocity}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The velocity."""
        set_like(self._velocity, state.get("velocity"), "velocity")

    def _synchronised(self) -> Callable[[], None]:
        is_due = any(self.workers.gather_json(self._steps))
        mean = self.replica.mean()
        moved, velocity = self._start, self._velocity
        if is_due:  # without a step in between nothing has changed, and momentum alone must not move the weights
            velocity = [each.clone() for each in self._velocity]
            pairs = zip(self._start, mean, velocity, strict=True)
            moved = [self._outer.update(start, each, speed) for start, each, speed in pairs]

        def make() -> None:
            if is_due:
                self.replica.load(moved)
            self._start, self._velocity, self._steps = moved, velocity, 0

        return make
