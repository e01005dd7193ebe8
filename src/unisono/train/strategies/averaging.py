"""Strategies that average the weights of all workers, at work: local SGD, DiLoCo, model averaging."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from unisono.sync.averaging import DiLoCo, LocalSGD, ModelAveraging
from unisono.train.model.tensors import set_all, set_like
from unisono.train.strategies.synchroniser import SyncContext, Synchroniser

# Synchronous model averaging at work.


class CentralAveraging(Synchroniser):
    """Every worker updates its replica; a central model, which all have alike, draws them together in each step.

    Args:
        context: the workers, what they train, and their limits.
        strategy: the settings: how strongly the central model draws replicas.
    """

    def __init__(self, context: SyncContext, strategy: ModelAveraging) -> None:
        super().__init__(context)
        self._strategy = strategy
        self._central = self.replica.copies()
        self._previous = self.replica.copies()
        self._apart: list[torch.Tensor] = []

    def follow(self, before: Synchroniser) -> None:
        """The same central model."""
        super().follow(before)
        assert isinstance(before, CentralAveraging)
        self._central, self._previous = before._central, before._previous

    def round_begins(self) -> None:
        """The central model is what all have, which may be what the script has given them."""
        self._central = self.replica.copies()

    def step_begins(self) -> None:
        """How far this replica is from the central model, times the strength of the correction."""
        strength = self._strategy.strength(self.workers.world_size)
        self._apart = [
            (weight - central).mul_(strength)
            for weight, central in zip(self.replica.weights, self._central, strict=True)
        ]

    @torch.no_grad()
    def step_ends(self, step: int, *, ends_round: bool) -> None:
        """Correct the replica, and move the central model."""
        apart = self._apart or [torch.zeros_like(weight) for weight in self._central]
        sums = self.averaging.mean(apart, divisor=1.0)
        for central, previous, total in zip(self._central, self._previous, sums, strict=True):
            self._strategy.move(central, previous, total.clone())
        for weight, correction in zip(self.replica.weights, apart, strict=True):
            weight.sub_(correction)
        self._apart = []

    def synchronise(self, *, after_loss: bool) -> Callable[[], None]:
        """A last correction, all the way: the central model becomes the mean, and what replicas have learned is in it.

        Without, the update after the newest correction would be in no model any more when replicas become the central
        one: in rounds of one step, all of them.
        """
        if after_loss:
            self._previous = self.common(self._previous)
        central = [mean.clone() for mean in self.replica.mean()]
        buffers, states = self.replica.average_buffers(), self.replica.average_states()

        def make() -> None:
            set_all(buffers)
            states()
            self.replica.load(central)
            self._central, self._apart = central, []

        return make

    def state_dict(self) -> dict[str, Any]:
        """Where the central model was before."""
        return {"previous": self._previous}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Where the central model was before."""
        set_like(self._previous, state.get("previous"), "previous")


# Local SGD and DiLoCo at work.


class LocalUpdates(Synchroniser):
    """Every worker makes updates of its own; every so many steps their weights become the mean.

    Args:
        context: the workers, what they train, and their limits.
        strategy: the settings: the number of steps between two means.
    """

    def __init__(self, context: SyncContext, strategy: LocalSGD) -> None:
        super().__init__(context)
        self._strategy = strategy

    def step_ends(self, step: int, *, ends_round: bool) -> None:
        """Average, if this is the time."""
        if (step + 1) % self._strategy.every == 0 and not ends_round:
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
