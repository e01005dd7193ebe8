"""The asynchronous parameter server at work."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from unisono.reduce.buckets import pack, unpack
from unisono.train.model.prepared import Prepared
from unisono.train.model.tensors import set_all
from unisono.train.model.update import hyperparameters_of, quiet_schedulers, set_hyperparameters
from unisono.train.strategies.synchroniser import SyncContext, Synchroniser, set_states, states_of
from unisono_lab.strategies.parameter_server import ParameterServer, shares
from unisono_lab.strategies.queued_work import QueuedWork
from unisono_lab.strategies.rpc_message import RpcMessage

# The weights that a parameter server holds.


class CentralWeights:
    """A server's share of the parameters, with their own optimizers. Many threads call its methods.

    Args:
        strategy: the settings, which say how stale gradients are treated.
        prepared: this worker's models and optimizers.
        numbers: the places of this server's parameters in ``prepared.parameters``.
        version: the number from which updates are counted.

    Attributes:
        version: the argument plus the number of updates so far.
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
        """The current weights, for a worker that computes its gradient on them."""
        with self._lock, torch.no_grad():
            if self._strategy.delay_compensation:
                self._read[worker] = [weight.detach().clone() for weight in self.weights]
            return RpcMessage({"version": self.version}, pack(self.weights))

    def push(self, worker: int, message: RpcMessage) -> RpcMessage:
        """Make the update with a worker's gradients.

        Args:
            worker: the rank of the worker.
            message: the packed gradients, with the ``version`` on which they were computed, whether each parameter was
                ``used``, and the ``optimizers`` to update with: the number and the hyperparameters of each.
        """
        request: Mapping[str, Any] = message.values
        with self._lock:
            staleness = self.version - request["version"]
            gradients = unpack(message.packed, self.weights)
            for number, (weight, gradient, used) in enumerate(
                zip(self.weights, gradients, request["used"], strict=True)
            ):
                weight.grad = self._compensated(worker, number, gradient) if used else None
            for number, hyperparameters in request["optimizers"]:
                self._update(self.optimizers[number], hyperparameters, staleness)
            for weight in self.weights:
                weight.grad = None
            self.version += 1
            self._staleness.append(staleness)
        return RpcMessage()

    def staleness(self) -> list[int]:
        """The staleness of each gradient since the last call."""
        with self._lock:
            staleness, self._staleness = self._staleness, []
        return staleness

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
        for group, values in zip(optimizer.param_groups, hyperparameters, strict=True):
            if "lr" in values:
                group["lr"] = group["lr"] / slower
        optimizer.step()


def _restricted(optimizer: Optimizer, twins: Mapping[int, Tensor]) -> Optimizer:
    """A copy of an optimizer, with its state, for the twins of some of its parameters alone."""
    copies: dict[int, Any] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            # Parameters of other servers are shared with the copy, so that deepcopy does not copy them.
            copies[id(parameter)] = twins.get(id(parameter), parameter)
    state = {key: value for key, value in optimizer.state.items() if id(key) in twins}
    full_state, optimizer.state = optimizer.state, type(optimizer.state)(dict, state)
    try:
        twin = copy.deepcopy(optimizer, copies)
    finally:
        optimizer.state = full_state
    for group in twin.param_groups:
        group["params"] = [
            parameter for parameter in group["params"] if any(parameter is weight for weight in twins.values())
        ]
    return twin


# The asynchronous parameter server at work.


class AsynchronousServer(QueuedWork):
    """A worker takes the next batch, pulls the weights, and pushes its gradient; it may be a server, too."""

    def __init__(self, context: SyncContext, strategy: ParameterServer) -> None:
        super().__init__(context, parts=1, bound=strategy.max_staleness)
        size = self.workers.world_size
        dedicated = strategy.servers if strategy.servers < size else 0
        self._servers = list(range(size - dedicated, size)) if dedicated else list(range(size))
        self._computes = not dedicated or self.rank < size - dedicated
        self._prepared, self._strategy = context.prepared, strategy
        self._parameters = list(context.prepared.parameters.values())
        numbers = shares([weight.nbytes for weight in self.replica.weights], len(self._servers))
        self._held = dict(zip(self._servers, numbers, strict=True))
        self._central = CentralWeights(strategy, context.prepared, self._held.get(self.rank, []))
        self._serves = True
        self._seen = [0] * len(self._parameters)  # the version of each parameter's weights here
        self._updates = 0
        self.open()

    def follow(self, before: Synchroniser) -> None:
        """Take over the weights that this worker served, and the versions that it has seen, until all have agreed."""
        super().follow(before)
        assert isinstance(before, AsynchronousServer)
        self._central, self._seen = before._central, before._seen

    def synchronise(self, *, after_loss: bool) -> Callable[[], None]:
        """Work out the newest weights, with all updates that have arrived, for every worker."""
        self._serves = self.follows or not after_loss  # a new server has not got any push yet
        agreed = super().synchronise(after_loss=after_loss)

        def make() -> None:
            agreed()
            self._serves = True
            if after_loss:
                # Newer than any version before: if the next worker is lost now, a worker that has not made this change
                # takes the weights from one that has.
                version = max(self._seen) + 1
                self._central = CentralWeights(self._strategy, self._prepared, self._held.get(self.rank, []), version)
                self._seen = [version] * len(self._parameters)

        return make

    def resume(self) -> None:
        """Wait for all workers, so that no server is asked for weights before it has them."""
        self.workers.barrier()

    def step_begins(self) -> None:
        """Begin a step, whose update the servers make, about which learning rate schedulers must not warn."""
        super().step_begins()
        quiet_schedulers(self._prepared.optimizers)

    def claim(self, step: int) -> int | None:
        """Take the next batch, and pull the newest weights; a worker that only serves waits, and returns None."""
        if not self._computes:
            self._wait_for_step(step)
            return None
        part = super().claim(step)
        if part is not None:
            self._pull()
        return part

    def apply(self, optimizers: Sequence[Optimizer]) -> None:
        """Push the gradients to the servers."""
        self._request_push()
        gradients = [parameter.grad for parameter in self._parameters]
        own_optimizers = self._prepared.optimizers
        chosen = [number for number, own in enumerate(own_optimizers) if any(own is other for other in optimizers)]
        about = {
            "ask": "update",
            "optimizers": [(number, hyperparameters_of(own_optimizers[number])) for number in chosen],
        }
        self._request({server: self._push(gradients, server, about) for server, held in self._held.items() if held})
        self._updates += 1
        self._report_arrival()

    def figures(self) -> dict[str, Any]:
        """The number of updates that this worker asked for in the round, and the staleness of those that it made."""
        figures = {"updates": self._updates, "staleness": self._central.staleness()}
        self._updates = 0
        return figures

    def _push(self, gradients: Sequence[Tensor | None], server: int, about: Mapping[str, Any]) -> RpcMessage:
        pairs = [(gradients[number], self.replica.weights[number]) for number in self._held[server]]
        packed = pack([torch.zeros_like(weight) if gradient is None else gradient for gradient, weight in pairs])
        used = [gradient is not None for gradient, _ in pairs]
        return RpcMessage({**about, "used": used, "version": self._seen[self._held[server][0]]}, packed)

    @torch.no_grad()
    def _pull(self) -> None:
        servers = {server: RpcMessage({"ask": "weights"}) for server, numbers in self._held.items() if numbers}
        for server, message in self._request(servers).items():
            weights = [self.replica.weights[number] for number in self._held[server]]
            for weight, newest in zip(weights, unpack(message.packed, weights), strict=True):
                weight.copy_(newest)
            for number in self._held[server]:
                self._seen[number] = message.values["version"]
        self._untouched.accept()

    def _answer_worker(self, rank: int, message: RpcMessage) -> RpcMessage:
        if message.values["ask"] == "weights":
            return self._central.pull(rank)
        return self._central.push(rank, message)

    @torch.no_grad()
    def _agreed(self) -> Callable[[], None]:
        """Take each parameter from the worker with its newest version: its server, or one that pulled it."""
        serving = self._central.numbers if self._serves else ()
        reports = self.workers.gather_json([serving, self._central.version, self._seen])
        sources: dict[tuple[int, bool], list[int]] = {}
        versions = []
        for number in range(len(self.replica.weights)):
            served = [
                (version, True, -rank)
                for rank, (numbers_served, version, _) in enumerate(reports)
                if number in numbers_served
            ]
            pulled = [(versions_seen[number], False, -rank) for rank, (_, _, versions_seen) in enumerate(reports)]
            version, is_server, rank = max(served + pulled)
            sources.setdefault((-rank, is_server), []).append(number)
            versions.append(version)
        shared = [self._shared(*source, numbers) for source, numbers in sources.items()]
        buffers = self.replica.average_buffers(self._updates)

        def make() -> None:
            set_all(buffers)
            for numbers, values in zip(sources.values(), shared, strict=True):
                self._take(numbers, *values)
            self._seen = versions

        return make

    def _shared(self, source: int, is_server: bool, numbers: Sequence[int]) -> Any:
        """The weights and optimizer states of some parameters, as one worker serves or has seen them. Collective."""
        if self.rank != source:
            return self.workers.broadcast(None, source)
        optimizers = self._central.optimizers if is_server else self._prepared.optimizers
        served: dict[int, Tensor] = dict(zip(self._central.numbers, self._central.weights, strict=True))
        weights = [served[number] if is_server else self._parameters[number] for number in numbers]
        states = [states_of(optimizer, weights) for optimizer in optimizers]
        return self.workers.broadcast([[weight.detach() for weight in weights], states], source)

    @torch.no_grad()
    def _take(self, numbers: Sequence[int], weights: Sequence[Tensor], states: Sequence[Any]) -> None:
        for number, weight in zip(numbers, weights, strict=True):
            self.replica.weights[number].copy_(weight)
        parameters = [self._parameters[number] for number in numbers]
        for optimizer, state in zip(self._prepared.optimizers, states, strict=True):
            set_states(optimizer, parameters, state)
