"""Synchronous model averaging at work."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from unisono.train.model.tensors import set_all, set_like
from unisono.train.strategies.synchroniser import SyncContext, Synchroniser
from unisono_lab.strategies.averaging import ModelAveraging


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
