"""One shard's samples, fetched, augmented and collated alike wherever that happens."""

from collections.abc import Callable, Iterator, Sequence, Sized
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.utils.data import Dataset, IterableDataset, TensorDataset, default_collate

from unisono.data.streams import generators_kept, seed_generators
from unisono.errors import DataError
from unisono.plan.streams import Stream, stream_seed

Collate = Callable[[list[Any]], Any]


class ShardRequest(NamedTuple):
    """Which samples make up a shard."""

    epoch: int
    indices: tuple[int, ...]


@dataclass(frozen=True)
class ShardSource(Dataset[Any]):
    """A data set that is read shard by shard; it may live in a loader's process.

    Each sample is fetched with all generators seeded by (seed, epoch, sample), so random augmentation does
    not depend on which process fetches it, or when.
    """

    dataset: Any
    seed: int
    collate: Collate | None = None

    def __getitem__(self, request: ShardRequest) -> Any:
        """The collated samples of a shard, or None for an empty one.

        Raises:
            DataError: the samples cannot be collated; names the indices.
        """
        if not request.indices:
            return None
        if type(self.dataset) is TensorDataset and self.collate is None:
            # Nothing random can happen in there, and one gather replaces a loop over samples.
            rows = torch.tensor(request.indices)
            return [tensor[rows] for tensor in self.dataset.tensors]
        with generators_kept(), _one_thread():
            samples = self._fetch(request)
            return self._collated(samples, request.indices)

    def _fetch(self, request: ShardRequest) -> list[Any]:
        # One by one, also where the data set could fetch many at once: a sample's stream must not depend on which
        # other samples are in its shard.
        samples = []
        for index in request.indices:
            seed_generators(stream_seed(self.seed, Stream.SAMPLE, request.epoch, index))
            samples.append(self.dataset[index])
        return samples

    def _collated(self, samples: list[Any], indices: Sequence[int]) -> Any:
        collate = self.collate or default_collate
        try:
            return collate(samples)
        except Exception as error:
            odd = _first_odd(samples, indices)
            raise DataError(
                f"samples {indices[0]} … {indices[-1]} of the data set cannot be collated into one batch: {error}."
                f"{odd} Make all samples alike, or pass run.steps(…, collate_fn=…)"
            ) from error


@contextmanager
def _one_thread() -> Iterator[None]:
    # Loader processes have one thread, and other numbers of threads give other bits.
    threads = torch.get_num_threads()
    if threads != 1:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        if threads != 1:
            torch.set_num_threads(threads)


def check_dataset(dataset: Any) -> int:
    """The number of samples of a map-style data set.

    Raises:
        DataError: it is empty, has no length, or is a stream; says what to use instead.
    """
    kind = type(dataset).__name__
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        raise DataError(
            f"{kind} can only be read from front to back, but samples are shared out among workers by index: "
            f"use a map-style data set (with __len__ and __getitem__); a finite stream becomes one with "
            f"list(stream), a large one when its samples are written to files and indexed"
        )
    if not isinstance(dataset, Sized):
        raise DataError(f"{kind} has no length: give it a __len__ that returns the number of samples")
    if len(dataset) == 0:
        raise DataError(f"the data set ({kind}) is empty: check the path, the split or the filter it was made with")
    return len(dataset)


def _first_odd(samples: Sequence[Any], indices: Sequence[int]) -> str:
    expected = _form(samples[0])
    for sample, index in zip(samples, indices, strict=True):
        if _form(sample) != expected:
            return f" Sample {index} is {_form(sample)}, sample {indices[0]} is {expected}."
    return f" Sample {indices[0]} is {expected}."


def _form(sample: Any) -> str:
    if hasattr(sample, "shape"):
        dtype = str(getattr(sample, "dtype", "")).removeprefix("torch.")
        return f"{type(sample).__name__}{list(sample.shape)} {dtype}".strip()
    if isinstance(sample, dict):
        return "{" + ", ".join(f"{key}: {_form(value)}" for key, value in sample.items()) + "}"
    if isinstance(sample, tuple | list):
        return "(" + ", ".join(_form(part) for part in sample) + ")"
    return type(sample).__name__
