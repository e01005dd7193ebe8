"""Pair averaging at work."""

from __future__ import annotations

import random
import secrets
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import Optimizer

from unisono.reduce.buckets import pack, unpack
from unisono.reduce.rpc_message import RpcMessage
from unisono.train.model.tensors import set_all
from unisono.train.model.update import tell_schedulers
from unisono.train.strategies.synchroniser import SyncContext, Synchroniser
from unisono_lab.strategies.averaging import PairAveraging, average
from unisono_lab.strategies.shared_work import SharedWork


@dataclass
class _Exchange:
    """The effect of an exchange on this replica.

    Attributes:
        number: the number of the exchange, known to both sides.
        change: what was added to each tensor; nothing once it is known that both sides have the mean.
    """

    number: str = ""
    change: Sequence[Tensor] = ()


class Pairs(SharedWork):
    """Before each update, this worker's replica and another one's become their mean.

    Workers of even rank ask, those of odd rank answer. Whoever has asked confirms that it has the mean, and is told
    that this was heard. Until then both keep what the exchange has done to them: if workers are lost, the others tell
    which exchanges they have, and one that is not on both sides is taken back.

    Args:
        context: the workers, what they train, and their limits.
        strategy: the strategy, which has no settings of its own.
    """

    def __init__(self, context: SyncContext, strategy: PairAveraging) -> None:
        super().__init__(context, parts=context.workers.world_size, bound=None)
        self._live = self.replica.copies()  # others change it, while gradients are computed on the model's own weights
        self._lock = threading.Lock()
        self._asked = _Exchange()  # the newest one that this worker has asked for
        self._granted: dict[int, _Exchange] = {}  # the newest one that each of the others has asked it for, by rank
        self._exchanges = self._updates = 0
        self._chance = random.Random(f"{context.seed} {self.rank}")  # noqa: S311 (whom to ask is no secret)
        self.open()

    def follow(self, before: Synchroniser) -> None:
        """The same replica; exchanges that are not complete are taken back when all have told which are."""
        super().follow(before)
        assert isinstance(before, Pairs)
        self._live, self._asked, self._granted = before._live, before._asked, before._granted

    def step_begins(self) -> None:
        """Others may be faster, and make all of its updates."""
        super().step_begins()
        tell_schedulers(self._context.prepared.optimizers)

    def apply(self, optimizers: Sequence[Optimizer]) -> None:
        """Exchange, then update."""
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
        """How many updates and exchanges this worker has made in the round; with those it was asked for."""
        found = {"updates": self._updates, "exchanges": self._exchanges}
        self._updates = self._exchanges = 0
        return found

    def _exchange(self, partner: int) -> None:
        number = secrets.token_hex(8)
        answer = self._ask_one(partner, RpcMessage({"ask": "average", "exchange": number}, pack(self._live)))
        self._asked = self._moved(number, unpack(answer.packed, self._live))
        self._ask_one(partner, RpcMessage({"ask": "averaged"}))
        self._asked.change = ()

    def _answered(self, rank: int, message: RpcMessage) -> RpcMessage:
        with self._lock:
            if message.said["ask"] == "averaged":
                self._granted[rank].change = ()
                return RpcMessage()
            means = list(map(average, self._live, unpack(message.packed, self._live)))
            self._granted[rank] = self._moved(message.said["exchange"], means)
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
        self._live = means  # before anybody can go on, and ask for them
        buffers, states = self.replica.average_buffers(self._updates), self.replica.average_states()
        weights = [mean.clone() for mean in means]

        def make() -> None:
            self.replica.load(weights)
            set_all(buffers)
            states()

        return make

    @torch.no_grad()
    def _take_back(self) -> None:
        """Exchanges that are on one side alone: the other one is gone, or never got the mean. Collective."""
        told = self.workers.gather_json([self._asked.number, [each.number for each in self._granted.values()]])
        whole = {asked for asked, _ in told} & {number for _, granted in told for number in granted}
        for exchange in (self._asked, *self._granted.values()):
            if exchange.number not in whole:
                for live, change in zip(self._live, exchange.change, strict=False):
                    live.sub_(change)
                exchange.number = ""
            exchange.change = ()
