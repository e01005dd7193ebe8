"""Synchronous model averaging, and averaging in pairs, at work."""

from __future__ import annotations

import random
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from unisono.reduce.buckets import pack, unpack
from unisono.train.model.tensors import set_all, set_like
from unisono.train.model.update import quiet_schedulers
from unisono.train.strategies.synchroniser import SyncContext, Synchroniser
from unisono_lab.strategies.averaging import ModelAveraging, PairAveraging, average
from unisono_lab.strategies.queued_work import QueuedWork
from unisono_lab.strategies.rpc_message import RpcMessage


class CentralAveraging(Synchroniser):
    """Every worker updates its replica; a central model, equal on all workers, corrects the replicas in each step."""

    def __init__(self, context: SyncContext, strategy: ModelAveraging) -> None:
        super().__init__(context)
        self._strategy = strategy
        self._central = self.replica.copies()
        self._previous = self.replica.copies()
        self._apart: list[torch.Tensor] = []

    def follow(self, before: Synchroniser) -> None:
        """Take over the central model."""
        super().follow(before)
        assert isinstance(before, CentralAveraging)
        self._central, self._previous = before._central, before._previous

    def round_begins(self) -> None:
        """Set the central model to the weights, which all workers share, and which the script may have changed."""
        self._central = self.replica.copies()

    def step_begins(self) -> None:
        """Compute the correction: this replica's distance from the central model, times the strength."""
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
        """Work out a full correction: the central model becomes the mean of the replicas.

        Without it, the updates since the newest correction would be lost when the replicas are set to the central
        model; in rounds of one step, that is every update.
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
        """The previous central model."""
        return {"previous": self._previous}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set the previous central model."""
        set_like(self._previous, state.get("previous"), "previous")


@dataclass
class _Exchange:
    """The effect of an exchange on this replica.

    Attributes:
        number: the identifier of the exchange, which both sides know.
        change: the tensors that were added to the weights; empty once it is known that both sides have the mean.
    """

    number: str = ""
    change: Sequence[Tensor] = ()


class Pairs(QueuedWork):
    """Before each update, this worker's replica and another one's become their mean.

    Workers of even rank ask, those of odd rank answer. The worker that asked confirms that it has the mean, and the
    other one acknowledges that. Until then both keep the change by the exchange: if workers are lost, the others report
    which exchanges they have, and an exchange that is on one side alone is taken back.
    """

    def __init__(self, context: SyncContext, strategy: PairAveraging) -> None:
        super().__init__(context, parts=context.workers.world_size, bound=None)
        # A copy, since other threads change it while gradients are computed on the model's weights.
        self._live = self.replica.copies()
        self._lock = threading.Lock()
        self._requested = _Exchange()  # the newest exchange that this worker asked for
        self._granted: dict[int, _Exchange] = {}  # the newest exchange that each other worker asked for, by rank
        self._exchanges = self._updates = 0
        self._chance = random.Random(f"{context.seed} {self.rank}")  # noqa: S311 (whom to ask is no secret)
        self.open()

    def follow(self, before: Synchroniser) -> None:
        """Take over the replica and the newest exchanges; incomplete ones are taken back when all workers agree."""
        super().follow(before)
        assert isinstance(before, Pairs)
        self._live, self._requested, self._granted = before._live, before._requested, before._granted

    def step_begins(self) -> None:
        """Begin a step; faster workers may make all its updates, about which learning rate schedulers must not warn."""
        super().step_begins()
        quiet_schedulers(self._context.prepared.optimizers)

    def apply(self, optimizers: Sequence[Optimizer]) -> None:
        """Average with a partner, then update."""
        if self.rank % 2 == 0 and self.workers.world_size > 1:
            self._exchange(self._chance.randrange(1, self.workers.world_size, 2))
        with self._lock, torch.no_grad():
            self.replica.load(self._live)
            super().apply(optimizers)
            for live, weight in zip(self._live, self.replica.weights, strict=True):
                live.copy_(weight)
            self._untouched.accept()
            self._updates += 1

    def figures(self) -> dict[str, int]:
        """The number of updates and exchanges of this worker in the round, with exchanges that others asked for."""
        figures = {"updates": self._updates, "exchanges": self._exchanges}
        self._updates = self._exchanges = 0
        return figures

    def _exchange(self, partner: int) -> None:
        number = secrets.token_hex(8)
        answer = self._request_from(partner, RpcMessage({"ask": "average", "exchange": number}, pack(self._live)))
        self._requested = self._moved(number, unpack(answer.packed, self._live))
        self._request_from(partner, RpcMessage({"ask": "averaged"}))
        self._requested.change = ()

    def _answer_worker(self, rank: int, message: RpcMessage) -> RpcMessage:
        with self._lock:
            if message.values["ask"] == "averaged":
                self._granted[rank].change = ()
                return RpcMessage()
            means = list(map(average, self._live, unpack(message.packed, self._live)))
            self._granted[rank] = self._moved(message.values["exchange"], means)
            return RpcMessage(packed=pack(means))

    @torch.no_grad()
    def _moved(self, number: str, means: Sequence[Tensor]) -> _Exchange:
        change = [mean - live for mean, live in zip(means, self._live, strict=True)]
        for live, mean in zip(self._live, means, strict=True):
            live.copy_(mean)
        self._exchanges += 1
        return _Exchange(number, change)

    def _agreed(self) -> Callable[[], None]:
        self._take_back()
        means = [mean.clone() for mean in self.averaging.mean(self._live)]
        self._live = means  # before any worker can go on, and ask for them
        buffers, states = self.replica.average_buffers(self._updates), self.replica.average_states()
        weights = [mean.clone() for mean in means]

        def make() -> None:
            self.replica.load(weights)
            set_all(buffers)
            states()

        return make

    @torch.no_grad()
    def _take_back(self) -> None:
        """Undo exchanges that are on one side alone: the other worker is lost, or never got the mean. Collective."""
        reports = self.workers.gather_json([self._requested.number, [grant.number for grant in self._granted.values()]])
        complete = {requested for requested, _ in reports} & {number for _, granted in reports for number in granted}
        for exchange in (self._requested, *self._granted.values()):
            if exchange.number not in complete:
                for live, change in zip(self._live, exchange.change, strict=False):
                    live.sub_(change)
                exchange.number = ""
            exchange.change = ()
