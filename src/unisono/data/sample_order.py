"""The order of samples in an epoch, and the seeds of their draws."""

import hashlib
import operator
from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, islice
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch.utils.data import BatchSampler, RandomSampler, Sampler, SequentialSampler, SubsetRandomSampler
from torch.utils.data import WeightedRandomSampler as Weighted

from unisono.data.generators import generators_kept, seed_generators
from unisono.data.refusals import refused
from unisono.errors import DataError
from unisono.plan.batches import EpochCut, EvenCut, ListedCut
from unisono.plan.order import BlockedOrder, BlockShuffle, Indices, Stream, sample_order, stream_seed

BLOCK = 4096
"""Places of an epoch's order that are computed at once: a thousand cost hardly more than ten."""


class Order(Protocol):
    """The order in which a loop goes through its data set."""

    @property
    def digest(self) -> str:
        """The digest that tells the order from those of other samplers; empty where settings determine the order."""

    def samples_at(self, epoch: int, places: range) -> Indices:
        """Return the samples at these places of an epoch."""

    def counted_at(self, epoch: int, places: range) -> Indices:
        """Return numbers for the samples at these places; each number comes once in an epoch."""

    def stream(self, epoch: int, place: int, sample: int) -> int:
        """The seed of a sample's draws at a place."""

    def quiet_stream(self, epoch: int) -> int:
        """The seed that all samples of an epoch find, as long as none of them draws."""

    def cut(self, epoch: int, batch_size: int) -> EpochCut:
        """Return the cut of an epoch into batches."""


@dataclass(frozen=True, slots=True)
class KeyedOrder:
    """Every sample once, as they are numbered or in a keyed permutation.

    What a sample draws is keyed by (seed, epoch, sample).

    Attributes:
        blocks: the blocks of neighbours that come in a keyed order, with the samples of a few of them mixed; None to
            shuffle all samples.
        digest: a text that tells the order from others where the settings do not.
    """

    samples: int
    seed: int
    shuffle: bool = False
    drop_last: bool = False
    blocks: BlockShuffle | None = None
    digest: str = ""

    def samples_at(self, epoch: int, places: range) -> Indices:
        """Return the samples at these places of an epoch."""
        if not self.shuffle or not places:
            return np.arange(places.start, places.stop)
        blocks = range(places.start // BLOCK, -(-places.stop // BLOCK))
        order = np.concatenate([_visited(self, epoch, block) for block in blocks])
        first = blocks.start * BLOCK
        return order[places.start - first : places.stop - first]

    def permutation(self, epoch: int) -> Callable[[Indices], Indices]:
        """Return a function that gives the samples at places of an epoch that is shuffled."""
        if self.blocks is not None:
            return BlockedOrder(self.seed, epoch, self.samples, self.blocks)
        return sample_order(self.seed, epoch, self.samples)

    def counted_at(self, epoch: int, places: range) -> Indices:
        """The samples themselves."""
        return self.samples_at(epoch, places)

    def stream(self, epoch: int, place: int, sample: int) -> int:
        """The seed of a sample's draws, at any place."""
        return stream_seed(self.seed, Stream.SAMPLE, epoch, sample)

    def quiet_stream(self, epoch: int) -> int:
        """The seed that all samples of an epoch find, as long as none of them draws."""
        return stream_seed(self.seed, Stream.QUIET, epoch)

    def cut(self, epoch: int, batch_size: int) -> EpochCut:
        """Batches of one size, the last of which may be smaller."""
        return EvenCut(self.samples, batch_size, self.drop_last)


@lru_cache(maxsize=4)
def _visited(order: KeyedOrder, epoch: int, block: int) -> Indices:
    """The samples that the places of a block stand for."""
    return order.permutation(epoch)(np.arange(block * BLOCK, min((block + 1) * BLOCK, order.samples)))


# The order that a loader's sampler gives, the same on every worker and however often it is asked for.

STATELESS = (BatchSampler, RandomSampler, SequentialSampler, SubsetRandomSampler, Weighted)
"""Samplers of torch that remember nothing of an epoch but their generator's state."""

KEPT = 2
"""Epochs whose order is kept: one under way, and one that is loaded ahead."""

ENDLESS = 2**20
"""An epoch has no more items than this, or sixteen times the samples of the data set."""


@dataclass(frozen=True, slots=True)
class LoopKey:
    """The values that determine a loop's order, besides its sampler.

    Attributes:
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


class EpochOrder(NamedTuple):
    """An epoch: its samples, and the place behind the last sample of each batch if the sampler decides that."""

    samples: Indices
    stops: Sequence[int] | None


class SamplerOrder:
    """Asks a copy of a sampler, epoch by epoch, with all generators seeded by (seed, loop, epoch).

    The sampler itself is never touched. A sampler that remembers something from one epoch to the next is asked for all
    epochs before, too, unless it has ``set_epoch``.

    Args:
        sampler: the sampler, or the batch sampler; any iterable.
        dataset: the data set, which is not copied where the sampler refers to it.

    Raises:
        DataError: the sampler cannot be copied; says what to do.
    """

    def __init__(self, sampler: Any, dataset: Any, key: LoopKey, *, is_batched: bool, drop_last: bool = False) -> None:
        self._shared = [dataset, *(part.data_source for part in parts_of(sampler) if hasattr(part, "data_source"))]
        self._first = self._current = self._copied(sampler)
        self._own_seeds = [generator.initial_seed() % 2**63 for generator in _generators_of(sampler)]
        self._key, self._is_batched, self._drop_last = key, is_batched, drop_last
        self._most = max(ENDLESS, 16 * len(dataset))
        self._remembers = not all(hasattr(part, "set_epoch") or type(part) in STATELESS for part in parts_of(sampler))
        self._next = 0
        self._epochs: dict[int, EpochOrder] = {}

    @cached_property
    def digest(self) -> str:
        """A digest of the first epoch. Each step asks for it."""
        samples, listed = self._epoch(0)
        stops = np.array([] if listed is None else listed, np.int64)
        return hashlib.blake2b(samples.tobytes() + stops.tobytes(), digest_size=8).hexdigest()

    def samples_at(self, epoch: int, places: range) -> Indices:
        """Return the samples at these places of an epoch; a sampler may give a sample several times."""
        return self._epoch(epoch).samples[places.start : places.stop]

    def counted_at(self, epoch: int, places: range) -> Indices:
        """The places themselves."""
        return np.arange(places.start, places.stop)

    def stream(self, epoch: int, place: int, sample: int) -> int:
        """The seed of a sample's draws at this place: elsewhere in the epoch it draws other numbers."""
        return stream_seed(self._key.seed, Stream.PLACE, self._key.loop, epoch, place)

    def quiet_stream(self, epoch: int) -> int:
        """The seed that all samples of an epoch find, as long as none of them draws."""
        return stream_seed(self._key.seed, Stream.QUIET, self._key.loop, epoch)

    def cut(self, epoch: int, batch_size: int) -> EpochCut:
        """The sampler's own batches, or batches of one size."""
        samples, stops = self._epoch(epoch)
        return EvenCut(len(samples), batch_size, self._drop_last) if stops is None else ListedCut(stops)

    def _epoch(self, epoch: int) -> EpochOrder:
        if epoch not in self._epochs:
            while len(self._epochs) >= KEPT:
                del self._epochs[next(iter(self._epochs))]
            self._epochs[epoch] = self._order_of(self._key.passes + max(epoch, 0))  # evaluations have epoch -1
        return self._epochs[epoch]

    def _order_of(self, number: int) -> EpochOrder:
        if not self._remembers:
            return self._pass(number)
        if self._current is self._first or number < self._next:
            self._current, self._next = self._copied(self._first), 0
        for before in range(self._next, number):
            self._pass(before)
        self._next = number + 1
        return self._pass(number)

    def _pass(self, number: int) -> EpochOrder:
        with generators_kept():
            seed_generators(stream_seed(self._key.seed, Stream.SAMPLER, self._key.loop, number))
            for generator, own in zip(_generators_of(self._current), self._own_seeds, strict=False):
                generator.manual_seed(stream_seed(self._key.seed, Stream.SAMPLER, self._key.loop, number, own))
            for part in parts_of(self._current):
                if hasattr(part, "set_epoch"):
                    part.set_epoch(number)
            values = list(islice(iter(self._current), self._most + 1))
        if len(values) > self._most:
            raise DataError(refused("sampler.endless", kind=type(self._first).__name__, count=self._most))
        if not self._is_batched:
            return EpochOrder(_indices(values, self._first), None)
        batches = [_indices(batch, self._first) for batch in values]
        stops = list(accumulate(len(batch) for batch in batches if len(batch)))
        return EpochOrder(np.concatenate([np.empty(0, np.int64), *batches]), stops)

    def _copied(self, sampler: Any) -> Any:
        try:
            return deepcopy(sampler, {id(shared): shared for shared in self._shared})
        except Exception as error:
            raise DataError(refused("sampler.not-copied", kind=type(sampler).__name__, error=error)) from error


def parts_of(sampler: Any) -> list[Any]:
    """A sampler, and those that it holds."""
    parts = [sampler]
    for part in parts:
        held = (value for value in getattr(part, "__dict__", {}).values() if isinstance(value, Sampler))
        parts += [value for value in held if not any(value is known for known in parts)]
    return parts


def _generators_of(sampler: Any) -> list[torch.Generator]:
    held = (value for part in parts_of(sampler) for value in getattr(part, "__dict__", {}).values())
    return [value for value in held if isinstance(value, torch.Generator)]


def _indices(values: Iterable[Any], sampler: Any) -> Indices:
    try:
        return np.fromiter((operator.index(item) for item in values), np.int64)
    except (TypeError, RuntimeError, OverflowError) as error:
        raise DataError(refused("sampler.no-index", kind=type(sampler).__name__, error=error)) from error
