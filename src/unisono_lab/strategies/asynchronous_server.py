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
from unisono.reduce.rpc_message import RpcMessage
from unisono.train.model.prepared import Prepared
from unisono.train.model.tensors import set_all
from unisono.train.model.update import hyperparameters_of, set_hyperparameters, tell_schedulers
from unisono.train.strategies.replica import set_states, states_of
from unisono.train.strategies.synchroniser import SyncContext, Synchroniser
from unisono_lab.strategies.parameter_server import ParameterServer, shares
from unisono_lab.strategies.shared_work import SharedWork

# The weights that a parameter server holds.


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


# The asynchronous parameter server at work.


class AsynchronousServer(SharedWork):
    """A worker takes the next batch, pulls the weights, and pushes its gradient; it may be a server, too.

    Args:
        context: the workers, what they train, and their limits.
        strategy: the settings: which worker serves, and how stale gradients are treated.
    """

    def __init__(self, context: SyncContext, strategy: ParameterServer) -> None:
        super().__init__(context, parts=1, bound=strategy.max_staleness)
        size = self.workers.world_size
        apart = strategy.servers if strategy.servers < size else 0
        self._servers = list(range(size - apart, size)) if apart else list(range(size))
        self._computes = not apart or self.rank < size - apart
        self._prepared, self._strategy = context.prepared, strategy
        self._parameters = list(context.prepared.parameters.values())
        held = shares([weight.nbytes for weight in self.replica.weights], len(self._servers))
        self._held = dict(zip(self._servers, held, strict=True))
        self._central = CentralWeights(strategy, context.prepared, self._held.get(self.rank, []))
        self._serves = True
        self._seen = [0] * len(self._parameters)  # of each, the version that is here
        self._updates = 0
        self.open()

    def follow(self, before: Synchroniser) -> None:
        """What this worker served, and what it has seen of the others', until all have agreed."""
        super().follow(before)
        assert isinstance(before, AsynchronousServer)
        self._central, self._seen = before._central, before._seen

    def synchronise(self, *, after_loss: bool) -> Callable[[], None]:
        """All updates that have arrived are everybody's."""
        self._serves = self.follows or not after_loss  # what is new here, nobody has ever pushed to
        agreed = super().synchronise(after_loss=after_loss)

        def make() -> None:
            agreed()
            self._serves = True
            if after_loss:
                # Newer than any before: who is not through with this when the next worker is lost takes it from who is.
                version = max(self._seen) + 1
                self._central = CentralWeights(self._strategy, self._prepared, self._held.get(self.rank, []), version)
                self._seen = [version] * len(self._parameters)

        return make

    def resume(self) -> None:
        """Nobody is asked for weights before it has them."""
        self.workers.barrier()

    def step_begins(self) -> None:
        """Servers make its update, whoever computes it."""
        super().step_begins()
        tell_schedulers(self._prepared.optimizers)

    def claim(self, step: int) -> int | None:
        """The next batch, and the newest weights for it; nothing for whoever only serves, and goes along."""
        if not self._computes:
            self._go_along(step)
            return None
        part = super().claim(step)
        if part is not None:
            self._pull()
        return part

    def apply(self, optimizers: Sequence[Optimizer]) -> None:
        """Push the gradients to the servers."""
        self._may_push()
        gradients = [parameter.grad for parameter in self._parameters]
        known = self._prepared.optimizers
        chosen = [number for number, one in enumerate(known) if any(one is each for each in optimizers)]
        about = {"ask": "update", "optimizers": [(number, hyperparameters_of(known[number])) for number in chosen]}
        self._ask({server: self._push(gradients, server, about) for server, held in self._held.items() if held})
        self._updates += 1
        self._has_arrived()

    def figures(self) -> dict[str, Any]:
        """Updates that this worker has asked for in the round, and the staleness of those that it made."""
        found = {"updates": self._updates, "staleness": self._central.staleness()}
        self._updates = 0
        return found

    def _push(self, gradients: Sequence[Tensor | None], server: int, about: Mapping[str, Any]) -> RpcMessage:
        mine = [(gradients[number], self.replica.weights[number]) for number in self._held[server]]
        packed = pack([torch.zeros_like(weight) if gradient is None else gradient for gradient, weight in mine])
        used = [gradient is not None for gradient, _ in mine]
        return RpcMessage({**about, "used": used, "version": self._seen[self._held[server][0]]}, packed)

    @torch.no_grad()
    def _pull(self) -> None:
        servers = {server: RpcMessage({"ask": "weights"}) for server, numbers in self._held.items() if numbers}
        for server, message in self._ask(servers).items():
            weights = [self.replica.weights[number] for number in self._held[server]]
            for weight, newest in zip(weights, unpack(message.packed, weights), strict=True):
                weight.copy_(newest)
            for number in self._held[server]:
                self._seen[number] = message.said["version"]
        self._untouched.accept()

    def _answered(self, rank: int, message: RpcMessage) -> RpcMessage:
        if message.said["ask"] == "weights":
            return self._central.pull(rank)
        return self._central.push(rank, message)

    @torch.no_grad()
    def _agreed(self) -> Callable[[], None]:
        """Each parameter comes from whoever has its newest version: its server, or who has seen it, if that is lost."""
        serving = self._central.numbers if self._serves else ()
        told = self.workers.gather_json([serving, self._central.version, self._seen])
        sources: dict[tuple[int, bool], list[int]] = {}
        versions = []
        for number in range(len(self.replica.weights)):
            served = [(version, True, -rank) for rank, (theirs, version, _) in enumerate(told) if number in theirs]
            seen = [(versions_seen[number], False, -rank) for rank, (_, _, versions_seen) in enumerate(told)]
            version, is_server, rank = max(served + seen)
            sources.setdefault((-rank, is_server), []).append(number)
            versions.append(version)
        shared = [self._shared(*source, numbers) for source, numbers in sources.items()]
        buffers = self.replica.average_buffers(self._updates)

        def make() -> None:
            set_all(buffers)
            for numbers, found in zip(sources.values(), shared, strict=True):
                self._take(numbers, *found)
            self._seen = versions

        return make

    def _shared(self, source: int, is_server: bool, numbers: Sequence[int]) -> Any:
        """Weights and what optimizers keep of some parameters, as one worker serves or has seen them. Collective."""
        if self.rank != source:
            return self.workers.broadcast(None, source)
        optimizers = self._central.optimizers if is_server else self._prepared.optimizers
        served: dict[int, Tensor] = dict(zip(self._central.numbers, self._central.weights, strict=True))
        mine = [served[number] if is_server else self._parameters[number] for number in numbers]
        states = [states_of(optimizer, mine) for optimizer in optimizers]
        return self.workers.broadcast([[weight.detach() for weight in mine], states], source)

    @torch.no_grad()
    def _take(self, numbers: Sequence[int], weights: Sequence[Tensor], states: Sequence[Any]) -> None:
        for number, weight in zip(numbers, weights, strict=True):
            self.replica.weights[number].copy_(weight)
        mine = [self._parameters[number] for number in numbers]
        for optimizer, kept in zip(self._prepared.optimizers, states, strict=True):
            set_states(optimizer, mine, kept)
