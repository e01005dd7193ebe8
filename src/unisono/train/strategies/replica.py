"""This worker's own weights, where workers have different ones, and how all of them become the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from unisono.reduce.reducer import Averaging
from unisono.train.group.workers import Workers
from unisono.train.model.prepared import Prepared
from unisono.train.model.tensors import Values, set_all

SCALARS = frozenset(("step", "mu_product"))
"""State that optimizers keep once per tensor, whatever its size."""


class Replica:
    """The replica of this worker: weights, buffers, and the state of its optimizers."""

    def __init__(self, prepared: Prepared, workers: Workers, averaging: Averaging) -> None:
        self.weights = [parameter.detach() for parameter in prepared.parameters.values()]
        self._prepared, self._workers, self._averaging = prepared, workers, averaging

    @torch.no_grad()
    def load(self, weights: Sequence[Tensor]) -> None:
        """Set these weights."""
        for own, new in zip(self.weights, weights, strict=True):
            own.copy_(new)

    def copies(self) -> list[Tensor]:
        """Return copies of the weights."""
        return [weight.clone() for weight in self.weights]

    def mean(self) -> list[Tensor]:
        """Return the mean of all replicas' weights, see :meth:`Averaging.mean`. Collective."""
        return self._averaging.mean(self.weights)

    @torch.no_grad()
    def average_buffers(self, weight: float = 1.0) -> Values:
        """Work out new values of buffers, without setting them. Collective.

        Buffers of floating-point numbers get the mean of all workers', others the value of the worker with the largest
        weight. If all weights are 0, all workers count equally.
        """
        weights = self._workers.gather_json(weight)
        weights = weights if any(weights) else [1.0] * len(weights)
        own_weight, total = weights[self._workers.rank], sum(weights)
        buffers = [place.tensor for place in self._prepared.buffers if place.tensor.numel()]
        floats = [buffer for buffer in buffers if buffer.is_floating_point()]
        # Not a product with 0: a buffer may hold infinities, and infinity times 0 is NaN.
        parts = [buffer * own_weight if own_weight else torch.zeros_like(buffer) for buffer in floats]
        means = [mean.clone() for mean in self._averaging.mean(parts, divisor=total)]
        whole = [(buffer, buffer.clone()) for buffer in buffers if not buffer.is_floating_point()]
        for _, value in whole:
            self._workers.transport.broadcast(value, weights.index(max(weights)))
        return [*zip(floats, means, strict=True), *whole]

    @torch.no_grad()
    def average_states(self) -> Callable[[], None]:
        """Work out the mean of all workers' optimizer state, which is possible since moments are linear. Collective.

        Counts, and other values without a mean, become those of the worker that has made the most updates. If a worker
        has made no update yet, all take the state of the worker with the most state. The returned function sets the
        state here.
        """
        states = [_State.of(optimizer) for optimizer in self._prepared.optimizers]
        reports = self._workers.gather_json([[state.layout for state in states], [state.updates for state in states]])
        if any(layout != reports[0][0] for layout, _ in reports):
            fullest = max(range(len(reports)), key=lambda rank: (sum(map(len, reports[rank][0])), -rank))
            return self._follow(fullest)
        moments = [moment for state in states for moment in state.moments]
        means = [mean.clone() for mean in self._averaging.mean(moments)]
        others: list[tuple[_State, Sequence[Any]]] = []
        for number, state in enumerate(states):
            if state.others:
                oldest = max(range(len(reports)), key=lambda rank: (reports[rank][1][number], -rank))
                own_values = state.values() if self._workers.rank == oldest else None
                others.append((state, self._workers.broadcast(own_values, oldest)))

        def make() -> None:
            set_all(list(zip(moments, means, strict=True)))
            for state, values in others:
                state.take(values)

        return make

    def _follow(self, source: int) -> Callable[[], None]:
        is_source = self._workers.rank == source
        own = [states_of(optimizer, _owned(optimizer)) for optimizer in self._prepared.optimizers]
        states_of_source = self._workers.broadcast(own if is_source else None, source)

        def make() -> None:
            for optimizer, states in zip(self._prepared.optimizers, states_of_source, strict=True):
                if not is_source:
                    set_states(optimizer, _owned(optimizer), states)

        return make


def states_of(optimizer: Optimizer, parameters: Sequence[Tensor]) -> list[dict[str, Any]]:
    """Return an optimizer's state of each of these parameters, with whether a value is on the CPU. Copies nothing."""
    states = [optimizer.state.get(parameter, {}) for parameter in parameters]
    return [{name: (value, _is_on_cpu(value)) for name, value in state.items()} for state in states]


def set_states(optimizer: Optimizer, parameters: Sequence[Tensor], states: Sequence[Mapping[str, Any]]) -> None:
    """Set an optimizer's state of each of these parameters. A parameter whose new state is empty keeps its state."""
    for parameter, state in zip(parameters, states, strict=True):
        if state:
            # What was sent arrives on the CPU. Counts stay there, moments go to the parameter's device.
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
    """The state of one optimizer, sorted by what happens to it when replicas are averaged.

    Attributes:
        others: the other entries, each as its dictionary and its key: counts, values that follow from them, codes.
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
            has_codes = any(map(_is_code, state.values()))  # the scales of codes have no mean, either
            for name, value in sorted(state.items()):
                if value is None:
                    continue
                layout.append(f"{number} {name} {list(value.shape) if isinstance(value, Tensor) else ''}")
                if isinstance(value, Tensor) and value.is_floating_point() and name not in counts and not has_codes:
                    moments.append(value)
                else:
                    others.append((state, name))
        return cls(moments, others, layout, sum(float(state["step"]) for state in states if "step" in state))

    def values(self) -> list[Any]:
        """The values without a mean. Single elements become numbers, which travel together."""
        values = [state[name] for state, name in self.others]
        return [value.item() if isinstance(value, Tensor) and value.numel() == 1 else value for value in values]

    @torch.no_grad()
    def take(self, values: Sequence[Any]) -> None:
        """Set the values without a mean."""
        for (state, name), value in zip(self.others, values, strict=True):
            own = state[name]
            if not isinstance(own, Tensor):
                state[name] = value
            elif isinstance(value, Tensor):
                own.copy_(value)
            else:
                own.fill_(value)


def _counts(parameter: Tensor, state: Mapping[str, Any]) -> set[str]:
    """The names of values that are kept once for a parameter with more elements or dimensions."""
    tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    return {
        name
        for name, tensor in tensors.items()
        if tensor.numel() == 1 and tensor.dim() < 2 and tensor.shape != parameter.shape
    }


def _is_code(value: Any) -> bool:
    return isinstance(value, Tensor) and value.numel() > 1 and not value.is_floating_point()
