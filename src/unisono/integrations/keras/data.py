"""The data that Keras users give to ``fit``, as a run reads them: arrays, data sets, loaders and streams."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from types import GeneratorType
from typing import Any

import keras
import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset, default_collate

from unisono.data.generators import generators_kept
from unisono.data.shards import is_indexed
from unisono.data.stream_reader import Reader, ReaderKey, ReaderState, opens_readers
from unisono.errors import DataError
from unisono.integrations.keras.batch_rows import (
    BatchOrder,
    BatchRows,
    DataEpochs,
    DrawKey,
    Standard,
    changes,
    loader_of,
)
from unisono.integrations.keras.generator import GeneratorBatches, endless
from unisono.integrations.keras.tf_data import TfBatches, is_tf_data
from unisono.integrations.kit import refused

WHOLE = TfBatches | GeneratorBatches
"""Data that give whole batches, one after the other."""

_CANNOT_BE_READ = (
    "{} can be read once, and workers that join and runs that resume read again: give arrays, a PyDataset (whose "
    "__getitem__ makes batch j), a tf.data.Dataset, a data set of torch (a map-style one, or an IterableDataset, whose "
    "__iter__ makes a generator anew each time) or a DataLoader over one"
)


@dataclass(frozen=True)
class KerasData:
    """Data, and how a batch of it becomes ``(x, y, sample_weight)``.

    Attributes:
        form: the structure of the arrays: a number for each array, None where there is none; None for other data.
        epochs: the data set's own epochs, if it changes between them.
        standard: a function that makes tensors of a batch, where that is not done before.
    """

    data: Any
    form: Any = None
    epochs: DataEpochs | None = None
    standard: Standard | None = None

    @classmethod
    def of(
        cls,
        x: Any,
        training: DrawKey,
        y: Any = None,
        sample_weight: Any = None,
        class_weight: Mapping[int, float] | None = None,
        *,
        shuffle: bool = False,
    ) -> KerasData:
        """Take what ``fit``, ``evaluate`` or ``predict`` was given.

        Args:
            x: arrays in any structure, a ``PyDataset``, a ``tf.data.Dataset``, a data set of torch or a ``DataLoader``.
            training: the key of the draws of a ``PyDataset``.
            y: the targets, beside arrays.
            sample_weight: a weight for each sample, beside arrays.
            class_weight: a weight for each class, beside arrays, a ``PyDataset`` or a ``tf.data.Dataset``.
            shuffle: whether to permute the batches of a ``PyDataset``.

        Raises:
            DataError: there is no way to read it again, or the arrays have different lengths; says what to do.
        """
        if isinstance(x, keras.utils.PyDataset) and x.num_batches is None and not changes(x):
            x = endless(x)
        if isinstance(x, keras.utils.PyDataset):
            _refuse_beside(x, y=y, sample_weight=sample_weight)
            rows = BatchRows(x, partial(_standard, class_weight=class_weight), training)
            loader = loader_of(rows, BatchOrder(rows, shuffle=shuffle))
            return cls(loader, epochs=DataEpochs(rows, training) if changes(x) else None)
        if is_tf_data(x) or isinstance(x, GeneratorType):
            _refuse_beside(x, y=y, sample_weight=sample_weight)
            batches = TfBatches(x) if is_tf_data(x) else GeneratorBatches(x, training.seed, _tensor)
            return cls(batches, standard=partial(_standard, class_weight=class_weight))
        if isinstance(x, DataLoader | Dataset) or opens_readers(x):
            _refuse_beside(x, y=y, sample_weight=sample_weight, class_weight=class_weight)
            return cls(x)
        if class_weight is not None:
            if sample_weight is not None:
                raise DataError(refused("keras.two-weights"))
            sample_weight = _weights_of(y, class_weight)
        whole = [x, y, sample_weight]
        while len(whole) > 1 and whole[-1] is None:
            whole.pop()
        return cls._of_arrays(tuple(whole))

    @classmethod
    def _of_arrays(cls, whole: tuple[Any, ...]) -> KerasData:
        leaves: list[Tensor] = []

        def numbered(leaf: Any) -> int | None:
            if leaf is None:
                return None
            leaves.append(_tensor(leaf))
            return len(leaves) - 1

        form = keras.tree.map_structure(numbered, whole)  # its order need not be that of flatten
        lengths = sorted({len(leaf) for leaf in leaves})
        if len(lengths) != 1:
            raise DataError(f"the arrays have {' and '.join(map(str, lengths)) or 'no'} samples: give as many of each")
        return cls(TensorDataset(*leaves), form)

    def __len__(self) -> int:
        return len(self._source)

    @property
    def _source(self) -> Any:
        return self.data.dataset if isinstance(self.data, DataLoader) else self.data

    @property
    def is_batched(self) -> bool:
        """Whether the data decide order and batches."""
        return isinstance(self.data, DataLoader | WHOLE)

    @property
    def is_read_once(self) -> bool:
        """Whether the data are a generator, which every worker reads from front to back."""
        return isinstance(self.data, GeneratorBatches)

    @property
    def position(self) -> int:
        """The number of the batch of a generator that comes next; 0 for other data."""
        return self.data.position if isinstance(self.data, GeneratorBatches) else 0

    def go_to(self, position: int) -> None:
        """Have another batch of a generator come next."""
        if isinstance(self.data, GeneratorBatches):
            self.data.go_to(position)

    @property
    def is_stream(self) -> bool:
        """Whether the data are read from front to back."""
        return isinstance(self.data, WHOLE) or opens_readers(self._source) or not is_indexed(self._source)

    def size(self, batch_size: int) -> int | None:
        """Return the number of samples in a batch, unless the data alone decide it."""
        return None if isinstance(self.data, WHOLE) else self.batch_size or batch_size

    @property
    def batch_size(self) -> int | None:
        """The samples in a batch, if a loader decides it."""
        if not isinstance(self.data, DataLoader):
            return None
        batches = self.data.batch_sampler
        return batches.size if isinstance(batches, BatchOrder) else self.data.batch_size

    def steps(self, batch_size: int) -> int | None:
        """The number of batches in a pass; None if that is known behind it.

        Raises:
            DataError: there is none.
        """
        if isinstance(self.data, WHOLE):
            batches = self.data.batches
        elif self.is_stream:
            batches = None
        else:
            batches = len(self.data) if self.is_batched else math.ceil(len(self) / batch_size)
        if batches == 0:
            raise DataError("the data have no batch: there are no samples, or drop_last or a sampler leaves none")
        return batches

    def passes(self, epochs: int, steps_per_epoch: int | None, steps_in_pass: int | None) -> int:
        """The most passes that so many epochs need: the end of a pass ends an epoch, too, as in Keras.

        Raises:
            DataError: a pass never ends, and nobody says how many steps an epoch has.
        """
        is_endless = isinstance(self.data, WHOLE) and self.data.is_endless
        if steps_per_epoch is None and is_endless:
            raise DataError("a tf.data.Dataset that never ends: say steps (fit: steps_per_epoch, validation_steps)")
        if is_endless or self.is_read_once:
            return 1
        return (
            epochs if steps_per_epoch is None else math.ceil(epochs / math.ceil((steps_in_pass or 1) / steps_per_epoch))
        )

    def unpack(self, batch: Any) -> tuple[Any, ...]:
        """Return the arguments of ``train_step`` for a collated batch."""
        if self.standard is not None:
            return self.standard(batch)
        if self.form is None:
            return tuple(batch) if isinstance(batch, list | tuple) else (batch,)
        parts: tuple[Any, ...] = keras.tree.map_structure(
            lambda number: None if number is None else batch[number], self.form
        )
        return parts

    def first(self) -> tuple[Any, ...]:
        """A batch of the first two samples, by which a model gets its shapes."""
        if isinstance(self.data, WHOLE):
            return self.unpack(self.data.first())
        self.steps(1)
        collate = self.data.collate_fn if isinstance(self.data, DataLoader) else default_collate
        with generators_kept():
            if self.is_stream:
                samples = Reader(self._source, ReaderKey(0, 0, 0, 0, 0, 1), ReaderState()).take(2)
            else:
                samples = [self._source[index] for index in range(min(2, len(self)))]
            return self.unpack(collate(samples))

    def collated(self, batch_size: int) -> Iterator[Any]:
        """All batches, in the order of the data; ``batch_size`` counts where the data do not decide it."""
        if isinstance(self.data, WHOLE):
            yield from self.data.open_batches(0)
        elif not self.is_stream:
            yield from self.data if self.is_batched else DataLoader(self.data, batch_size)
        else:
            collate = self.data.collate_fn if isinstance(self.data, DataLoader) else default_collate
            reader = Reader(self._source, ReaderKey(0, 0, 0, 0, 0, 1), ReaderState())
            while samples := reader.take(self.batch_size or batch_size):
                yield collate(samples)

    @contextmanager
    def epoch(self) -> Iterator[None]:
        """An epoch of the data set, if it changes between them."""
        if self.epochs is not None:
            self.epochs.turn()
        yield
        if self.epochs is not None:
            self.epochs.turn()

    def cut(self, steps: int | None, batch_size: int) -> KerasData:
        """The samples of the first batches alone.

        Raises:
            DataError: a loader or a stream decides it; or it never ends.
        """
        if isinstance(self.data, WHOLE):
            self.passes(1, steps, None)
            return self if steps is None else replace(self, data=self.data.cut(steps))
        known = self.steps(batch_size)
        if steps is None or (known is not None and steps >= known):
            return self
        if known is None:
            raise DataError(f"only {steps} batches of a stream: have the stream end there")
        if isinstance(self._source, BatchRows):
            rows = self._source
            return replace(self, data=loader_of(rows, BatchOrder(rows, most=steps)))
        if self.is_batched:
            raise DataError(f"only {steps} of the loader's {len(self.data)} batches: give it a Subset of its data set")
        return KerasData(Subset(self.data, range(steps * batch_size)), self.form)


def _refuse_beside(x: Any, **beside: Any) -> None:
    if given := [name for name, value in beside.items() if value is not None]:
        raise DataError(f"{' and '.join(given)} beside a {type(x).__name__}: let it return (x, y, sample_weight)")


def _standard(batch: Any, class_weight: Mapping[int, float] | None = None) -> tuple[Any, ...]:
    """Return a batch of a ``PyDataset``, as tensors."""
    parts = tuple(batch) if isinstance(batch, list | tuple) else (batch,)
    if not 1 <= len(parts) <= 3:
        raise DataError(f"a batch of {len(parts)} parts: return (x,), (x, y) or (x, y, sample_weight)")
    if class_weight is not None:
        if len(parts) != 2:
            raise DataError("class_weight needs batches (x, y), without sample_weight")
        parts = (*parts, _weights_of(parts[1], class_weight))
    tensors: tuple[Any, ...] = keras.tree.map_structure(lambda leaf: None if leaf is None else _tensor(leaf), parts)
    return tensors


def split(arrays: Sequence[Any], share: float) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """The first samples, and the last ones that are held out for validation.

    ``arrays`` are x, y and sample_weight, each any structure of arrays, or None; ``share`` of the samples is held out.

    Raises:
        DataError: they are no arrays, or one of the parts would be empty.
    """
    leaves = [leaf for leaf in keras.tree.flatten(list(arrays)) if leaf is not None]
    if not leaves or not all(hasattr(leaf, "__getitem__") and hasattr(leaf, "shape") for leaf in leaves):
        raise DataError(f"validation_split={share} needs arrays: give validation_data=… instead")
    samples = int(leaves[0].shape[0])
    bound = math.floor(samples * (1.0 - share))
    if not 0 < bound < samples:
        raise DataError(f"validation_split={share} of {samples} samples leaves nothing to train or to validate with")

    def part(of: slice) -> tuple[Any, ...]:
        return tuple(keras.tree.map_structure(lambda leaf: None if leaf is None else leaf[of], tree) for tree in arrays)

    return part(slice(0, bound)), part(slice(bound, None))


def _tensor(leaf: Any) -> Tensor:
    array = leaf.to_numpy() if hasattr(leaf, "to_numpy") else leaf
    if array is not leaf and array.ndim == 1:  # a column of pandas is one for Keras, too
        array = np.expand_dims(array, -1)
    if not isinstance(array, np.ndarray | Tensor):
        raise DataError(_CANNOT_BE_READ.format(type(leaf).__name__))
    if isinstance(array, np.ndarray):
        array = torch.as_tensor(np.require(array, requirements=["C", "W"]))  # torch warns of memory that is read-only
    tensor = array.detach()
    if tensor.dim() == 0:
        raise DataError("an array of one number has no samples: give one row for each")
    return tensor.to(getattr(torch, keras.config.floatx())) if tensor.is_floating_point() else tensor


def _weights_of(y: Any, class_weight: Mapping[int, float]) -> Tensor:
    labels = _tensor(y)
    if labels.dim() > 1:
        labels = labels.argmax(-1) if labels.shape[-1] != 1 else labels.squeeze(-1)
    weights = [class_weight.get(int(label), 1.0) for label in labels.double().round().tolist()]
    return torch.tensor(weights, dtype=getattr(torch, keras.config.floatx()))
