"""The order that a loader's sampler gives, the same on every worker and however often it is asked for."""

import hashlib
import operator
from collections.abc import Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from itertools import accumulate, islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, RandomSampler, Sampler, SequentialSampler, SubsetRandomSampler
from torch.utils.data import WeightedRandomSampler as Weighted

from unisono.data.refused import refused
from unisono.data.streams import generators_kept, seed_generators
from unisono.errors import DataError
from unisono.plan.epoch_cut import EpochCut, EvenCut, ListedCut
from unisono.plan.order import Indices, Stream, stream_seed

STATELESS = (BatchSampler, RandomSampler, SequentialSampler, SubsetRandomSampler, Weighted)
"""Samplers of torch that remember nothing of an epoch but their generator's state."""

KEPT = 2
"""Epochs whose order is kept: one under way, and one that is loaded ahead."""

ENDLESS = 2**20
"""An epoch has no more items than this, or sixteen times the samples of the data set."""


@dataclass(frozen=True, slots=True)
class LoopKey:
    """What a loop's order follows from, besides its sampler.

    Attributes:
        seed: the job's seed.
        loop: the number of the loop in the script; -1 for evaluations.
        passes: the number of epochs that earlier loops of the script have asked this sampler for.
    """

    seed: int
    loop: int
    passes: int = 0

    @property
    def is_evaluation(self) -> bool:
        """Whether it is no loop."""
        return self.loop < 0


@dataclass(frozen=True, slots=True)
class EpochOrder:
    """One epoch: its samples, and the place behind the last one of each batch if the sampler decides that."""

    samples: Indices
    stops: Sequence[int] | None


class SamplerOrder:
    """Asks a copy of a sampler, epoch by epoch, with all generators seeded by (seed, loop, epoch).

    The sampler itself is never touched. A sampler that remembers something from one epoch to the next is asked for all
    epochs before, too, unless it has ``set_epoch``.

    Args:
        sampler: the sampler, or the batch sampler; any iterable.
        dataset: the data set, which is not copied where the sampler refers to it.
        key: what the order follows from besides.
        is_batched: whether the sampler gives whole batches.
        drop_last: whether a last, smaller batch is left out.

    Raises:
        DataError: the sampler cannot be copied; says what to do.
    """

    def __init__(self, sampler: Any, dataset: Any, key: LoopKey, *, is_batched: bool, drop_last: bool = False) -> None:
        self._shared = [dataset, *(each.data_source for each in parts_of(sampler) if hasattr(each, "data_source"))]
        self._first = self._asked = self._copied(sampler)
        self._own_seeds = [generator.initial_seed() % 2**63 for generator in _generators_of(sampler)]
        self._key, self._is_batched, self._drop_last = key, is_batched, drop_last
        self._most = max(ENDLESS, 16 * len(dataset))
        self._remembers = not all(hasattr(one, "set_epoch") or type(one) in STATELESS for one in parts_of(sampler))
        self._next = 0
        self._epochs: dict[int, EpochOrder] = {}

    @property
    def digest(self) -> str:
        """A digest of the first epoch."""
        found = self._epoch(0)
        stops = np.array([] if found.stops is None else found.stops, np.int64)
        return hashlib.blake2b(found.samples.tobytes() + stops.tobytes(), digest_size=8).hexdigest()

    def samples_at(self, epoch: int, places: range) -> Indices:
        """Which samples stand at these places of an epoch; a sampler may give one several times."""
        return self._epoch(epoch).samples[places.start : places.stop]

    def counted_at(self, epoch: int, places: range) -> Indices:
        """The places themselves."""
        return np.arange(places.start, places.stop)

    def stream(self, epoch: int, place: int, sample: int) -> int:
        """The seed of what a sample draws at this place: elsewhere in the epoch it draws other numbers."""
        return stream_seed(self._key.seed, Stream.PLACE, self._key.loop, epoch, place)

    def quiet_stream(self, epoch: int) -> int:
        """The seed of what all samples of an epoch find, as long as none of them draws."""
        return stream_seed(self._key.seed, Stream.QUIET, self._key.loop, epoch)

    def cut(self, epoch: int, batch_size: int) -> EpochCut:
        """The sampler's own batches, or batches of one size."""
        found = self._epoch(epoch)
        if found.stops is not None:
            return ListedCut(found.stops)
        return EvenCut(len(found.samples), batch_size, self._drop_last)

    def _epoch(self, epoch: int) -> EpochOrder:
        if epoch not in self._epochs:
            while len(self._epochs) >= KEPT:
                del self._epochs[next(iter(self._epochs))]
            self._epochs[epoch] = self._asked_for(self._key.passes + max(epoch, 0))  # evaluations have epoch -1
        return self._epochs[epoch]

    def _asked_for(self, number: int) -> EpochOrder:
        if not self._remembers:
            return self._pass(number)
        if self._asked is self._first or number < self._next:
            self._asked, self._next = self._copied(self._first), 0
        for before in range(self._next, number):
            self._pass(before)
        self._next = number + 1
        return self._pass(number)

    def _pass(self, number: int) -> EpochOrder:
        with generators_kept():
            seed_generators(stream_seed(self._key.seed, Stream.SAMPLER, self._key.loop, number))
            for generator, own in zip(_generators_of(self._asked), self._own_seeds, strict=False):
                generator.manual_seed(stream_seed(self._key.seed, Stream.SAMPLER, self._key.loop, number, own))
            for part in parts_of(self._asked):
                if hasattr(part, "set_epoch"):
                    part.set_epoch(number)
            found = list(islice(iter(self._asked), self._most + 1))
        if len(found) > self._most:
            raise DataError(refused("sampler.endless", kind=type(self._first).__name__, count=self._most))
        return self._listed(found) if self._is_batched else EpochOrder(_indices(found, self._first), None)

    def _listed(self, found: Sequence[Any]) -> EpochOrder:
        batches = [_indices(batch, self._first) for batch in found]
        stops = list(accumulate(len(batch) for batch in batches if len(batch)))
        return EpochOrder(np.concatenate([np.empty(0, np.int64), *batches]), stops)

    def _copied(self, sampler: Any) -> Any:
        try:
            return deepcopy(sampler, {id(each): each for each in self._shared})
        except Exception as error:
            raise DataError(refused("sampler.not-copied", kind=type(sampler).__name__, error=error)) from error


def parts_of(sampler: Any) -> list[Any]:
    """A sampler, and those that it holds."""
    found = [sampler]
    for part in found:
        held = (each for each in getattr(part, "__dict__", {}).values() if isinstance(each, Sampler))
        found += [each for each in held if not any(each is known for known in found)]
    return found


def _generators_of(sampler: Any) -> list[torch.Generator]:
    held = (value for part in parts_of(sampler) for value in getattr(part, "__dict__", {}).values())
    return [value for value in held if isinstance(value, torch.Generator)]


def _indices(found: Iterable[Any], sampler: Any) -> Indices:
    try:
        return np.fromiter((operator.index(each) for each in found), np.int64)
    except (TypeError, RuntimeError, OverflowError) as error:
        raise DataError(refused("sampler.no-index", kind=type(sampler).__name__, error=error)) from error
