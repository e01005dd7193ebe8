"""This worker's own weights, where workers have different ones, and how they become everybody's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from unisono.reduce.averaging import Averaging
from unisono.train.group.workers import Workers
from unisono.train.model.prepared import Prepared
from unisono.train.model.tensors import Values, set_all

SCALARS = frozenset(("step", "mu_product"))
"""State that optimizers keep once per tensor, whatever its size."""


class Replica:
    """The replica of this worker: weights, buffers, and the state of its optimizers.

    Args:
        prepared: models and optimizers.
        workers: the workers of this generation.
        averaging: the collective mean over these workers.
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
    def average_buffers(self, weight: float = 1.0) -> Values:
        """What buffers are to be: of floating-point numbers the mean of all workers', others those of the heaviest.

        Collective; sets nothing.

        Args:
            weight: this worker's weight in the mean; if all weights are 0, all workers count alike.
        """
        weights = self._workers.gather_json(weight)
        weights = weights if any(weights) else [1.0] * len(weights)
        own, total = weights[self._workers.rank], sum(weights)
        buffers = [place.tensor for place in self._prepared.buffers if place.tensor.numel()]
        floats = [buffer for buffer in buffers if buffer.is_floating_point()]
        # A buffer may hold infinities, of which nothing must be left where it does not count.
        parts = [buffer * own if own else torch.zeros_like(buffer) for buffer in floats]
        means = [mean.clone() for mean in self._averaging.mean(parts, divisor=total)]
        whole = [(buffer, buffer.clone()) for buffer in buffers if not buffer.is_floating_point()]
        for _, value in whole:
            self._workers.transport.broadcast(value, weights.index(max(weights)))
        return [*zip(floats, means, strict=True), *whole]

    @torch.no_grad()
    def average_states(self) -> Callable[[], None]:
        """What optimizers are to keep: the mean of all workers', since moments are linear. Collective.

        Counts, and whatever else has no mean, become those of the one worker that has made the most updates. Where a
        worker has made no update yet, all take what the one with the most has.

        Returns:
            what sets it, here.
        """
        states = [_State.of(optimizer) for optimizer in self._prepared.optimizers]
        told = self._workers.gather_json([[state.layout for state in states], [state.updates for state in states]])
        if any(layout != told[0][0] for layout, _ in told):
            fullest = max(range(len(told)), key=lambda rank: (sum(map(len, told[rank][0])), -rank))
            return self._follow(fullest)
        moments = [moment for state in states for moment in state.moments]
        means = [mean.clone() for mean in self._averaging.mean(moments)]
        others: list[tuple[_State, Sequence[Any]]] = []
        for number, state in enumerate(states):
            if state.others:
                oldest = max(range(len(told)), key=lambda rank: (told[rank][1][number], -rank))
                own = state.told() if self._workers.rank == oldest else None
                others.append((state, self._workers.broadcast(own, oldest)))

        def make() -> None:
            set_all(list(zip(moments, means, strict=True)))
            for state, values in others:
                state.take(values)

        return make

    def _follow(self, source: int) -> Callable[[], None]:
        mine = self._workers.rank == source
        ours = [states_of(optimizer, _owned(optimizer)) for optimizer in self._prepared.optimizers]
        theirs = self._workers.broadcast(ours if mine else None, source)

        def make() -> None:
            for optimizer, states in zip(self._prepared.optimizers, theirs, strict=True):
                if not mine:
                    set_states(optimizer, _owned(optimizer), states)

        return make


def states_of(optimizer: Optimizer, parameters: Sequence[Tensor]) -> list[dict[str, Any]]:
    """What an optimizer keeps of each of these parameters, and whether on the CPU in any case; no copies."""
    states = [optimizer.state.get(parameter, {}) for parameter in parameters]
    return [{name: (value, _is_on_cpu(value)) for name, value in state.items()} for state in states]


def set_states(optimizer: Optimizer, parameters: Sequence[Tensor], states: Sequence[Mapping[str, Any]]) -> None:
    """Set what an optimizer keeps of each of these parameters; where there is nothing to set, it stays."""
    for parameter, state in zip(parameters, states, strict=True):
        if state:
            # What was sent arrives on the CPU, where counts stay and moments do not.
            optimizer.state[parameter] = {
                name: value.to("cpu" if on_cpu else parameter.device, copy=True) if isinstance(value, Tensor) else value
                for name, (value, on_cpu) in state.items()
            }


def _is_on_cpu(value: Any) -> bool:
    return isinstance(value, Tensor) and value.device.type == "cpu"


def _owned(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


@dataclass(frozen=True)
class _State:
    """The state of one optimizer, by what becomes of it when replicas are averaged.

    Attributes:
        moments: the tensors of which means are made.
        others: the other entries, each as its dictionary and its key: counts, what follows from them, codes.
        layout: a description of all entries, in words.
        updates: the number of updates of all parameters together, as far as they are counted.
    """

    moments: list[Tensor]
    others: list[tuple[dict[str, Any], str]]
    layout: list[str]
    updates: float

    @classmethod
    def of(cls, optimizer: Optimizer) -> _State:
        owned = _owned(optimizer)
        states: list[dict[str, Any]] = [optimizer.state.get(parameter, {}) for parameter in owned]
        counts = SCALARS.union(*map(_counts, owned, states))
        moments: list[Tensor] = []
        others: list[tuple[dict[str, Any], str]] = []
        layout: list[str] = []
        for number, state in enumerate(states):
            has_codes = any(map(_is_code, state.values()))  # whose scales have no mean, either
            for name, value in sorted(state.items()):
                if value is None:
                    continue
                layout.append(f"{number} {name} {list(value.shape) if isinstance(value, Tensor) else ''}")
                if isinstance(value, Tensor) and value.is_floating_point() and name not in counts and not has_codes:
                    moments.append(value)
                else:
                    others.append((state, name))
        return cls(moments, others, layout, sum(float(state["step"]) for state in states if "step" in state))

    def told(self) -> list[Any]:
        """What has no mean: single elements as numbers, which travel together."""
        values = [state[name] for state, name in self.others]
        return [value.item() if isinstance(value, Tensor) and value.numel() == 1 else value for value in values]

    @torch.no_grad()
    def take(self, told: Sequence[Any]) -> None:
        """Set what has no mean."""
        for (state, name), value in zip(self.others, told, strict=True):
            mine = state[name]
            if not isinstance(mine, Tensor):
                state[name] = value
            elif isinstance(value, Tensor):
                mine.copy_(value)
            else:
                mine.fill_(value)


def _counts(parameter: Tensor, state: Mapping[str, Any]) -> set[str]:
    """What is kept once of a parameter that has more elements, or dimensions."""
    tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    return {
        name for name, each in tensors.items() if each.numel() == 1 and each.dim() < 2 and each.shape != parameter.shape
    }


def _is_code(value: Any) -> bool:
    return isinstance(value, Tensor) and value.numel() > 1 and not value.is_floating_point()
