"""Pair averaging at work."""

from __future__ import annotations

import random
import secrets
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import Optimizer

from unisono.reduce.courier import Letter
from unisono.reduce.packing import pack, unpack
from unisono.sync.pair_averaging import average
from unisono.train.shared_work import SharedWork
from unisono.train.synchroniser import Ground, Synchroniser


@dataclass(frozen=True)
class _Exchange:
    """What an exchange has done to this replica, as long as its partner may not know of it.

    Attributes:
        change: what was added to each tensor.
    """

    change: list[Tensor]


class Pairs(SharedWork):
    """Before each update, this worker's replica and another one's become their mean.

    Workers of even rank ask, those of odd rank answer. Whoever answers keeps what the exchange has done to it until the
    other one says that it has the mean, too; if that one dies before, the exchange is taken back.

    Args:
        ground: what it stands on.
    """

    def __init__(self, ground: Ground) -> None:
        super().__init__(ground, parts=ground.workers.world_size, bound=None)
        self._live = self.replica.copies()  # others change it, while gradients are computed on the model's own weights
        self._lock = threading.Lock()
        self._pending: dict[str, _Exchange] = {}
        self._newest = ""  # the newest exchange that this worker has asked for and completed
        self._exchanges = self._updates = 0
        self._chance = random.Random(f"{ground.seed} {self.rank}")  # noqa: S311 (whom to ask is no secret)
        self.open()

    def follow(self, before: Synchroniser) -> None:
        """The same replica; exchanges that are not complete are taken back when all have told which are."""
        super().follow(before)
        assert isinstance(before, Pairs)
        self._live, self._pending, self._newest = before._live, before._pending, before._newest

    def apply(self, optimizers: Sequence[Optimizer]) -> None:
        """Exchange, then update."""
        if self.rank % 2 == 0 and self.workers.world_size > 1:
            self._exchange(self._chance.randrange(1, self.workers.world_size, 2))
        with self._lock, torch.no_grad():
            self.replica.load(self._live)
            super().apply(optimizers)
            for live, weight in zip(self._live, self.replica.weights, strict=True):
                live.copy_(weight)
            self._updates += 1

    def figures(self) -> dict[str, int]:
        """How many updates and exchanges this worker has made in the round; with those it was asked for."""
        found = {"updates": self._updates, "exchanges": self._exchanges}
        self._updates = self._exchanges = 0
        return found

    def _exchange(self, partner: int) -> None:
        number = secrets.token_hex(8)
        answer = self._ask_one(partner, Letter({"ask": "average", "exchange": number}, pack(self._live)))
        with torch.no_grad():
            for live, mean in zip(self._live, unpack(answer.packed, self._live), strict=True):
                live.copy_(mean)
        self._newest = number
        self._exchanges += 1
        self._ask_one(partner, Letter({"ask": "averaged", "exchange": number}))

    def _answered(self, rank: int, letter: Letter) -> Letter:
        number = letter.said["exchange"]
        if letter.said["ask"] == "averaged":
            with self._lock:
                self._pending.pop(number, None)
            return Letter()
        with self._lock, torch.no_grad():
            means = [
                average(mine, theirs)
                for mine, theirs in zip(self._live, unpack(letter.packed, self._live), strict=True)
            ]
            self._pending[number] = _Exchange([mean - mine for mean, mine in zip(means, self._live, strict=True)])
            for mine, mean in zip(self._live, means, strict=True):
                mine.copy_(mean)
            self._exchanges += 1
            return Letter(packed=pack(means))

    def _agree(self) -> None:
        complete = self.workers.gather_json(self._newest)
        self._take_back(complete)
        means = [mean.clone() for mean in self.averaging.mean(self._live)]
        self.replica.average_buffers()
        self.replica.average_states()
        self.replica.load(means)
        with self._lock:
            self._live = means

    @torch.no_grad()
    def _take_back(self, complete: Sequence[str]) -> None:
        """Exchanges that the one who asked for them does not know to be complete: it is gone, or never got the mean."""
        with self._lock:
            for number, exchange in self._pending.items():
                if number not in complete:
                    for live, change in zip(self._live, exchange.change, strict=True):
                        live.sub_(change)
            self._pending.clear()
