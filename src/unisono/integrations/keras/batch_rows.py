"""Data sets that give whole batches (``PyDataset``), as a run reads them: sample by sample, each with a number."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from unisono.data.generators import generators_kept, own_generators_kept, seed_generators
from unisono.errors import CheckpointError, DataError
from unisono.integrations.kit import refused
from unisono.plan.order import Stream, stream_seed


@contextmanager
def seeded(source: Any, seed: int) -> Iterator[None]:
    """Seed all generators in the context; those that a data set keeps in attributes are as before afterwards."""
    own = [value for value in vars(source).values() if isinstance(value, OWN)]
    with own_generators_kept(own):
        seed_generators(seed)
        for number, generator in enumerate(own):
            _seed(generator, stream_seed(seed % 2**63, Stream.BATCH, number))
        yield


OWN = (np.random.Generator, np.random.RandomState, random.Random)
"""Kinds of generators that a data set may keep, and that are seeded for each batch."""


def _seed(generator: Any, seed: int) -> None:
    match generator:
        case np.random.Generator():
            generator.bit_generator.state = type(generator.bit_generator)(seed).state
        case np.random.RandomState():
            generator.seed(seed & 0xFFFFFFFF)
        case _:
            generator.seed(seed)


Standard = Callable[[Any], tuple[Any, ...]]
"""Makes tensors of a batch: ``(x,)``, ``(x, y)`` or ``(x, y, sample_weight)``."""


@dataclass(frozen=True)
class DrawKey:
    """The values that determine the numbers that a data set draws.

    ``number`` is that of the ``fit`` in the script; -1 in evaluations.
    """

    seed: int
    number: int = -1

    @property
    def beside(self) -> DrawKey:
        """Return the key of the data that are held out."""
        return DrawKey(self.seed, -2 - self.number)


class BatchRows(Dataset[Any]):
    """The samples of a ``PyDataset``: ``(e * batches + j) * size + row`` is one of batch ``j`` in epoch ``e``.

    A batch is made with all generators seeded by (seed, training, epoch, batch), so it is the same on each worker that
    needs a part of it. The newest one is kept, for this worker's other shards.

    Args:
        standard: a function that makes tensors of a batch.

    Attributes:
        size: the number of samples in each batch but the last.

    Raises:
        DataError: the data set has no length, or no batches.
    """

    def __init__(self, source: Any, standard: Standard, training: DrawKey) -> None:
        self.source, self._standard, self._training = source, standard, training
        self._kept: tuple[int, int, tuple[Any, ...]] | None = None
        self.batches = _batches(source)
        self.size = self.last = 0
        with generators_kept():
            self.last = rows_in(self._made(0, self.batches - 1))
            self.size = rows_in(self._made(0, 0)) if self.batches > 1 else self.last
        if self.last > self.size:
            raise self._uneven(self.batches - 1, self.last)
        self.forget()

    @property
    def changes_between_epochs(self) -> bool:
        """Whether its samples become others when an epoch begins or ends."""
        return changes(self.source)

    def __len__(self) -> int:
        return (self.batches - 1) * self.size + self.last

    def __getitem__(self, number: int) -> Any:
        return self.__getitems__([number])[0]

    def __getitems__(self, numbers: list[int]) -> list[tuple[Any, int]]:
        """Samples of one batch: that batch, and the row of each."""
        whole, row = divmod(numbers[0], self.size)
        epoch, number = divmod(whole, self.batches)
        batch = self._made(epoch, number)
        if (rows := rows_in(batch)) != (self.last if number == self.batches - 1 else self.size):
            raise self._uneven(number, rows)
        return [(batch, row + sample - numbers[0]) for sample in numbers]

    def forget(self) -> None:
        """Keep no batches: the data set may change."""
        self._kept = None

    def _made(self, epoch: int, number: int) -> tuple[Any, ...]:
        if self._kept is None or self._kept[:2] != (epoch, number):
            key = stream_seed(self._training.seed, Stream.BATCH, self._training.number, epoch, number)
            with seeded(self.source, key):
                self._kept = epoch, number, self._standard(self.source[number])
        return self._kept[2]

    def _uneven(self, number: int, rows: int) -> DataError:
        return DataError(
            f"batch {number} of {type(self.source).__name__} has {rows} samples, and others have {self.size}: all "
            f"but the last need as many as the first, and the last no more, in every epoch. Cut the batches so, or "
            f"give a map-style data set"
        )


def collated(rows: list[tuple[Any, int]]) -> tuple[Any, ...]:
    """The part of a batch that has these rows, which lie side by side."""
    batch, first = rows[0]
    part = slice(first, first + len(rows))
    tensors: tuple[Any, ...] = keras.tree.map_structure(lambda leaf: None if leaf is None else leaf[part], batch)
    return tensors


class BatchOrder(Sampler[list[int]]):
    """The batches of an epoch, in order or in a permutation, each as its samples' numbers.

    ``most`` of them are given; None for all.
    """

    def __init__(self, rows: BatchRows, *, most: int | None = None, shuffle: bool = False) -> None:
        self.size, self.last, self.batches = rows.size, rows.last, rows.batches
        self._most, self._shuffle, self._epoch = most, shuffle, 0

    def set_epoch(self, epoch: int) -> None:
        """Note the coming epoch."""
        self._epoch = epoch

    def __len__(self) -> int:
        return self.batches if self._most is None else min(self._most, self.batches)

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(self.batches).tolist() if self._shuffle else range(self.batches)
        for number in order[: len(self)]:
            start = (self._epoch * self.batches + number) * self.size
            yield list(range(start, start + (self.last if number == self.batches - 1 else self.size)))


def loader_of(rows: BatchRows, order: BatchOrder) -> DataLoader[Any]:
    """A loader of these batches, with the processes that the data set asks for.

    A data set that changes between epochs is read in the worker's process, where it changes.
    """
    source = rows.source
    processes = source.workers if source.use_multiprocessing and not changes(source) else 0
    return DataLoader(rows, batch_sampler=order, collate_fn=collated, num_workers=processes)


def changes(source: Any) -> bool:
    """Whether a data set does something between epochs."""
    own, usual = type(source), keras.utils.PyDataset
    return own.on_epoch_end is not usual.on_epoch_end or own.on_epoch_begin is not usual.on_epoch_begin


class DataEpochs:
    """Tells a data set that its epochs begin and end, alike on all workers.

    A worker that joins or resumes makes the missed turns. In a turn, generators are seeded by (seed, training, turn).
    ``turns`` are the beginnings and ends of epochs so far.
    """

    def __init__(self, rows: BatchRows, training: DrawKey) -> None:
        self._rows, self._source, self._training = rows, rows.source, training
        self.turns = 0

    @property
    def is_open(self) -> bool:
        """Whether an epoch has begun, and not ended."""
        return self.turns % 2 == 1

    def turn(self) -> None:
        """Begin an epoch, or end the epoch that has begun.

        Raises:
            DataError: the data set has another number of batches behind it.
        """
        key = stream_seed(self._training.seed, Stream.BATCH, self._training.number, self.turns)
        with generators_kept(), seeded(self._source, key):
            if self.is_open:
                self._source.on_epoch_end()
            else:
                self._source.on_epoch_begin()
        self._rows.forget()
        self.turns += 1
        if (now := _batches(self._source)) != (before := self._rows.batches):
            raise DataError(refused("keras.batches-changed", kind=type(self._source).__name__, now=now, before=before))

    def go_on(self, turns: int) -> None:
        """Make the turns that the data set has missed.

        Raises:
            CheckpointError: it has made more turns, and cannot go back.
        """
        if turns < self.turns:
            raise CheckpointError(refused("keras.epochs-back", kind=type(self._source).__name__))
        while self.turns < turns:
            self.turn()


def rows_in(batch: tuple[Any, ...]) -> int:
    """The number of samples in a batch.

    Raises:
        DataError: its arrays have different numbers.
    """
    lengths = {len(leaf) for leaf in keras.tree.flatten(batch) if leaf is not None}
    if len(lengths) != 1:
        raise DataError(f"a batch has arrays of {sorted(lengths)} samples: give as many of each")
    return lengths.pop()


def _batches(source: Any) -> int:
    batches = source.num_batches
    if not batches:
        raise DataError(
            f"{type(source).__name__} has no batches, or does not say how many and changes between epochs: give it a "
            f"__len__ that returns how many there are"
        )
    return int(batches)
