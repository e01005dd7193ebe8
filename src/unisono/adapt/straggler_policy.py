"""What to do about a worker that is slower than the others."""

from collections.abc import Mapping
from statistics import median
from typing import Any, ClassVar

from unisono.adapt.policy import Policy
from unisono.adapt.view import View
from unisono.errors import JobError

UNEVEN_S = 20.0
"""Seconds of training after which shards that could be split better have been: from then on they stay as they are."""


class StragglerPolicy(Policy):
    """Gives a slow worker fewer shards, and has it replaced if it is so slow that even this does not help.

    Every step waits for the slowest worker. Shards that are split by speed make up for one that is somewhat slower;
    one shard is the least that a worker can have, though, so a worker that takes several times as long for it as the
    others holds them up anyway. Both take an elastic job. No bit of the weights depends on either.

    Args:
        factor: how many times as long as the others a worker takes for a shard when it is slow.
        replace_at: how many times as long when it is replaced, once shards are split by speed.
        patience: steps in a row that a worker has to be slow.

    Raises:
        JobError: a number is out of range.
    """

    _forms: ClassVar[Mapping[str, Any]] = {"generation": int, "slow": dict[str, list[float]], "balanced": list[float]}

    def __init__(self, factor: float = 1.5, replace_at: float = 3.0, patience: int = 10) -> None:
        if not 1 < factor <= replace_at or patience < 1:
            raise JobError(
                f"StragglerPolicy(factor={factor}, replace_at={replace_at}, patience={patience}): the factors need to "
                f"be above 1, the second not below the first, and the patience above 0"
            )
        self._factor, self._replace_at, self._patience = factor, replace_at, patience
        self.generation = 0
        self.slow: dict[str, list[float]] = {}
        self.balanced: list[float] = []  # in which generation that was asked for, and after how many seconds

    def after_step(self, view: View) -> None:
        """Compare the workers' times for a shard."""
        if view.generation != self.generation:
            self.generation, self.slow = view.generation, {}
        if view.world_size < 2:
            return
        for rank, ratio in enumerate(_ratios([worker.shard_s for worker in view.workers])):
            name = str(rank)
            self.slow[name] = [*self.slow.get(name, []), ratio] if ratio > self._factor else []
        slowest = max(self.slow, key=lambda name: self.slow[name][-1:])
        ratios = self.slow[slowest][-self._patience :]
        if len(ratios) < self._patience:
            return
        rank, ratio = int(slowest), median(ratios)
        if not self.balanced:
            self.balanced = [view.generation, view.seconds]
            self.set_balance("speed", rank=rank, times_slower=ratio, shard_s=view.workers[rank].shard_s)
        elif ratio > self._replace_at and self._is_split_anew(view):
            self.replace(rank, times_slower=ratio, shard_s=view.workers[rank].shard_s)
        else:
            return
        self.slow = {}

    def _is_split_anew(self, view: View) -> bool:
        generation, seconds = self.balanced
        return view.generation > generation or view.seconds > seconds + UNEVEN_S


def _ratios(seconds: list[float]) -> list[float]:
    """How many times as long as the others each worker takes. Who only serves takes none for a shard."""
    others = ([one for one in seconds[:rank] + seconds[rank + 1 :] if one > 0] for rank in range(len(seconds)))
    return [each / median(other) if other else 1.0 for each, other in zip(seconds, others, strict=True)]
