"""Python generators as streams of batches: each worker has one of its own, and all of them give the same."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field, replace
from itertools import count, islice
from typing import Any
from weakref import WeakKeyDictionary

import keras

from unisono.data.batch_stream import StreamBatch
from unisono.data.generators import generators_kept, seed_generators
from unisono.errors import DataError
from unisono.integrations.kit import refused
from unisono.plan.order import Stream, stream_seed

MOST_KEPT = 8
"""The newest batches that are kept: some are read ahead, and a step is computed again if a worker is lost."""


@dataclass(eq=False)
class _Source:
    """What has been read of a generator.

    Attributes:
        position: the number of the batch that whoever begins to read gets first.
        read: the number of batches that were read.
    """

    position: int = 0
    read: int = 0
    _kept: dict[int, Any] = field(default_factory=dict)

    def at(self, number: int, generator: Iterator[Any], seed: int) -> Any:
        """The batch with a number, for which the generator is read on; None if it ends before.

        Raises:
            DataError: it was read long ago.
        """
        while self.read <= number:
            with generators_kept():
                seed_generators(stream_seed(seed, Stream.BATCH, self.read))
                batch = next(generator, None)
            if batch is None:
                return None
            self._kept[self.read] = batch
            self._kept.pop(self.read - MOST_KEPT, None)
            self.read += 1
        if number not in self._kept:
            raise DataError(refused("keras.generator-back", number=number, read=self.read))
        return self._kept[number]


_SOURCES: WeakKeyDictionary[Any, _Source] = WeakKeyDictionary()


@dataclass(frozen=True, eq=False)
class GeneratorBatches:
    """The batches of a generator from where it stands, as a run reads them.

    What draws from the generators of torch, NumPy and Python in it draws by (seed, number of the batch). So it gives
    the same on all workers, on one that joins and in a run that resumes, each of which reads it from its beginning.

    Args:
        seed: the seed of the job.
        tensor: a function that makes a tensor of an array.
        most: the number of batches that are read; None for all.
    """

    origin: Any
    seed: int
    tensor: Callable[[Any], Any]
    most: int | None = None

    name = "the generator"
    cure = (
        "give generators that it makes itself a seed, read files in a fixed order, and let it go by nothing that "
        "differs between processes; or give a PyDataset, whose __getitem__ makes batch j"
    )

    batches = None
    is_endless = False

    @property
    def _source(self) -> _Source:
        return _SOURCES.setdefault(self.origin, _Source())

    @property
    def position(self) -> int:
        """The number of the batch that comes next."""
        return self._source.position

    def go_to(self, position: int) -> None:
        """Have the batch with another number come next, also for a script that reads the generator itself."""
        if position > self._source.read:
            self._source.at(position - 1, self.origin, self.seed)
        self._source.position = position

    def cut(self, most: int) -> GeneratorBatches:
        """No more than so many batches."""
        return replace(self, most=most)

    def first(self) -> Any:
        """The first samples of the next batch, by which a model gets its shapes."""
        batch = next(self.open_batches(0), None)
        if batch is None:
            raise DataError(f"{self.name} has no batches left")
        return StreamBatch.of(batch, self.name).part(slice(2))

    def open_batches(self, number: int) -> Iterator[Any]:
        """The batches from here on; see :class:`~unisono.data.batch_stream.BatchStream`."""
        start = self.position
        return islice(self._from(start), self.most)

    def _from(self, start: int) -> Iterator[Any]:
        for number in count(start):
            if (batch := self._source.at(number, self.origin, self.seed)) is None:
                return
            for leaf in keras.tree.flatten(batch):
                if leaf is not None and not hasattr(leaf, "shape"):
                    raise DataError(refused("keras.generator-gives", number=number, kind=type(leaf).__name__))
            yield keras.tree.map_structure(lambda leaf: None if leaf is None else self.tensor(leaf), batch)


def endless(source: Any) -> Generator[Any, None, None]:
    """The batches of a ``PyDataset`` that does not say how many there are."""
    return (source[number] for number in count())
