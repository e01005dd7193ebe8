"""This worker's own weights, where workers have different ones, and how they become everybody's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from unisono.reduce.averaging import Averaging
from unisono.train.prepared import Prepared
from unisono.train.workers import Workers


class Replica:
    """What this worker trains by itself: weights, buffers, and what its optimizers keep.

    Args:
        prepared: models and optimizers.
        workers: of this generation.
        averaging: between them.
    """

    def __init__(self, prepared: Prepared, workers: Workers, averaging: Averaging) -> None:
        self.weights = [parameter.detach() for parameter in prepared.parameters.values()]
        self._prepared, self._workers, self._averaging = prepared, workers, averaging

    @torch.no_grad()
    def load(self, weights: Sequence[Tensor]) -> None:
        """Take these weights."""
        for mine, theirs in zip(self.weights, weights, strict=True):
            mine.copy_(theirs)

    def copies(self) -> list[Tensor]:
        """The weights as they are now."""
        return [weight.clone() for weight in self.weights]

    def mean(self) -> list[Tensor]:
        """The mean of all replicas' weights, see :meth:`Averaging.mean`. Collective."""
        return self._averaging.mean(self.weights)

    @torch.no_grad()
    def average_buffers(self) -> None:
        """Buffers of floating-point numbers become the mean of all workers'; others those of rank 0. Collective."""
        buffers = [place.tensor for place in self._prepared.buffers if place.tensor.numel()]
        floats = [buffer for buffer in buffers if buffer.is_floating_point()]
        means = [mean.clone() for mean in self._averaging.mean(floats)]
        whole = [buffer.clone() for buffer in buffers if not buffer.is_floating_point()]
        for value in whole:
            self._workers.transport.broadcast(value, 0)
        for buffer, mean in zip(floats, means, strict=True):
            buffer.copy_(mean)
        for buffer, value in zip((one for one in buffers if not one.is_floating_point()), whole, strict=True):
            buffer.copy_(value)

    @torch.no_grad()
    def average_states(self) -> None:
        """What optimizers keep becomes the mean of all workers': moments are linear. Counts become the largest.

        Where a worker has made no update yet, all take what the one with the most has. Collective.
        """
        states = [_State.of(optimizer) for optimizer in self._prepared.optimizers]
        layouts = self._workers.gather_json([[state.layout for state in states], [state.counts for state in states]])
        if any(layout != layouts[0][0] for layout, _ in layouts):
            fullest = max(range(len(layouts)), key=lambda rank: (sum(map(len, layouts[rank][0])), -rank))
            self._follow(fullest)
            return
        means = self._averaging.mean([moment for state in states for moment in state.moments])
        found = iter(mean.clone() for mean in means)
        for number, state in enumerate(states):
            state.load([next(found) for _ in state.moments], [counts[number] for _, counts in layouts])

    def _follow(self, source: int) -> None:
        mine = self._workers.rank == source
        ours = [states_of(optimizer, _owned(optimizer)) for optimizer in self._prepared.optimizers]
        theirs = self._workers.broadcast(ours if mine else None, source)
        for optimizer, states in zip(self._prepared.optimizers, theirs, strict=True):
            if not mine:
                set_states(optimizer, _owned(optimizer), states)


def states_of(optimizer: Optimizer, parameters: Sequence[Tensor]) -> list[dict[str, Any]]:
    """What an optimizer keeps of each of these parameters; no copies."""
    return [dict(optimizer.state.get(parameter, {})) for parameter in parameters]


def set_states(optimizer: Optimizer, parameters: Sequence[Tensor], states: Sequence[Mapping[str, Any]]) -> None:
    """Set what an optimizer keeps of each of these parameters; where there is nothing to set, it stays."""
    for parameter, state in zip(parameters, states, strict=True):
        if state:
            optimizer.state[parameter] = {
                name: value.clone() if isinstance(value, Tensor) else value for name, value in state.items()
            }


def _owned(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


@dataclass(frozen=True)
class _State:
    """What an optimizer keeps: moments, which are as large as parameters, and counts."""

    moments: list[Tensor]
    scalars: list[Tensor]
    layout: list[str]

    @classmethod
    def of(cls, optimizer: Optimizer) -> _State:
        moments: list[Tensor] = []
        scalars: list[Tensor] = []
        layout: list[str] = []
        for number, parameter in enumerate(_owned(optimizer)):
            for name, value in sorted(optimizer.state.get(parameter, {}).items()):
                if isinstance(value, Tensor):
                    is_moment = value.is_floating_point() and value.shape == parameter.shape and value.dim() > 0
                    (moments if is_moment else scalars).append(value)
                    layout.append(f"{number} {name}")
        return cls(moments, scalars, layout)

    @property
    def counts(self) -> list[float]:
        return [float(scalar.max()) for scalar in self.scalars]

    def load(self, moments: Sequence[Tensor], counts: Sequence[Sequence[float]]) -> None:
        for mine, mean in zip(self.moments, moments, strict=True):
            mine.copy_(mean)
        for scalar, values in zip(self.scalars, zip(*counts, strict=True), strict=True):
            scalar.fill_(max(values))
