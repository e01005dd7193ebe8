"""The weights that a parameter server holds."""

from __future__ import annotations

import copy
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from unisono.reduce.buckets import pack, unpack
from unisono.reduce.rpc_message import RpcMessage
from unisono.train.model.prepared import Prepared
from unisono.train.model.update import set_hyperparameters
from unisono_lab.strategies.parameter_server import ParameterServer


class CentralWeights:
    """A server's share of the parameters, with optimizers of its own for them. Many threads ask.

    Args:
        strategy: the settings: how stale gradients are treated.
        prepared: this worker's models and optimizers.
        numbers: the numbers of this server's parameters, in the order of ``prepared.parameters``.
        version: the number from which updates are counted.

    Attributes:
        version: the number of updates so far, counted from the argument.
    """

    def __init__(self, strategy: ParameterServer, prepared: Prepared, numbers: Sequence[int], version: int = 0) -> None:
        self.version = version
        self.numbers = tuple(numbers)
        parameters = list(prepared.parameters.values())
        self.weights = [torch.nn.Parameter(parameters[number].detach().clone()) for number in numbers]
        self._strategy = strategy
        twins = {id(parameters[number]): weight for number, weight in zip(numbers, self.weights, strict=True)}
        self.optimizers = [_restricted(optimizer, twins) for optimizer in prepared.optimizers]
        self._read: dict[int, list[Tensor]] = {}
        self._lock = threading.Lock()
        self._staleness: list[int] = []

    def pull(self, worker: int) -> RpcMessage:
        """The weights as they are now."""
        with self._lock, torch.no_grad():
            if self._strategy.delay_compensation:
                self._read[worker] = [weight.detach().clone() for weight in self.weights]
            return RpcMessage({"version": self.version}, pack(self.weights))

    def push(self, worker: int, message: RpcMessage) -> RpcMessage:
        """Make the update with a worker's gradients.

        Args:
            worker: its rank.
            message: ``version`` that the gradients were computed on, ``used`` parameters, ``optimizers`` to update
                with: the number and the hyperparameters of each.
        """
        said: Mapping[str, Any] = message.said
        with self._lock:
            staleness = self.version - said["version"]
            gradients = unpack(message.packed, self.weights)
            for number, (weight, gradient, used) in enumerate(zip(self.weights, gradients, said["used"], strict=True)):
                weight.grad = self._compensated(worker, number, gradient) if used else None
            for number, hyperparameters in said["optimizers"]:
                self._update(self.optimizers[number], hyperparameters, staleness)
            for weight in self.weights:
                weight.grad = None
            self.version += 1
            self._staleness.append(staleness)
        return RpcMessage()

    def staleness(self) -> list[int]:
        """Of all gradients since this was asked for last."""
        with self._lock:
            found, self._staleness = self._staleness, []
        return found

    @torch.no_grad()
    def _compensated(self, worker: int, number: int, gradient: Tensor) -> Tensor:
        strength = self._strategy.delay_compensation
        if not strength:
            return gradient
        moved = self.weights[number] - self._read[worker][number]
        return gradient + strength * gradient * gradient * moved

    def _update(self, optimizer: Optimizer, hyperparameters: Sequence[Mapping[str, Any]], staleness: int) -> None:
        set_hyperparameters(optimizer, hyperparameters)
        slower = max(1, staleness) if self._strategy.staleness_aware else 1
        for group, told in zip(optimizer.param_groups, hyperparameters, strict=True):
            if "lr" in told:
                group["lr"] = group["lr"] / slower
        optimizer.step()


def _restricted(optimizer: Optimizer, twins: Mapping[int, Tensor]) -> Optimizer:
    """The same optimizer, with what it keeps, for the twins of some of its parameters alone."""
    known: dict[int, Any] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            # What is held elsewhere is left out of the copy, with what is kept of it.
            known[id(parameter)] = twins.get(id(parameter), parameter)
    state = {key: value for key, value in optimizer.state.items() if id(key) in twins}
    whole, optimizer.state = optimizer.state, type(optimizer.state)(dict, state)
    try:
        twin = copy.deepcopy(optimizer, known)
    finally:
        optimizer.state = whole
    for group in twin.param_groups:
        group["params"] = [each for each in group["params"] if any(each is one for one in twins.values())]
    return twin
