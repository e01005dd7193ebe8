"""The samples of a shard, fetched, augmented and collated alike on every worker and loader process."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol
from zlib import crc32

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset, default_collate

from unisono.data.generators import DrawWatch, seed_generators
from unisono.data.refusals import refused
from unisono.data.sample_order import KeyedOrder, Order
from unisono.errors import DataError
from unisono.host.tracebacks import warn
from unisono.plan.batches import Batch
from unisono.plan.order import Indices
from unisono.received import short


def alike(sample: Any, other: Any) -> bool:
    """Whether two samples hold the same: tensors, arrays, numbers, text and bytes, in lists, tuples and mappings.

    Of other things only the type is compared.
    """
    if type(sample) is not type(other):
        return False
    if isinstance(sample, Tensor):
        return (
            sample.shape == other.shape
            and sample.dtype == other.dtype
            and bool(((sample == other) | ((sample != sample) & (other != other))).all())  # NaN is like NaN
        )
    if isinstance(sample, np.ndarray):
        return bool(sample.dtype == other.dtype and sample.tobytes() == other.tobytes())
    if isinstance(sample, Mapping):
        return sample.keys() == other.keys() and all(alike(sample[key], other[key]) for key in sample)
    if isinstance(sample, list | tuple):
        return len(sample) == len(other) and all(alike(*pair) for pair in zip(sample, other, strict=True))
    is_plain_value = isinstance(sample, int | float | str | bytes)
    return not is_plain_value or bool(sample == other or (sample != sample and other != other))


Collate = Callable[[list[Any]], Any]

_STOPPED = "the data set raised StopIteration, and a sample has to come of an index (did a next(…) in it find nothing?)"


class Source(Protocol):
    """Gives the batches of any shard of the step that is under way."""

    @property
    def unlike(self) -> str:
        """Why workers may have different samples in a step, and what to do, for messages."""

    def of(self, batch: Batch, shards: Iterable[int]) -> list[Any]:
        """The batches of some shards of a step; None for an empty one."""

    def mark(self, batch: Batch) -> int:
        """A number below 2**32 that tells which samples a step has, where the job does not say it: 0 where it does."""


class ShardsRequest(NamedTuple):
    """A request for a worker's shards, as places in an epoch's order."""

    epoch: int
    places: tuple[range, ...]


class LocatedShards(NamedTuple):
    """A request for shards, with the samples at their places."""

    request: ShardsRequest
    samples: tuple[Indices, ...]

    @property
    def name(self) -> str:
        """Its name in messages."""
        if not self.request.places:  # a worker that only serves has no shards
            return f"no places of epoch {self.request.epoch}"
        first, last = self.request.places[0].start, self.request.places[-1].stop - 1
        return f"places {first} … {last} of epoch {self.request.epoch}"


@dataclass(frozen=True)
class ShardSource:
    """A data set that is read shard by shard; it may live in a loader's process.

    Each sample that draws is fetched with all generators seeded as its order says, so random augmentation does not
    depend on which process fetches it, or when. A data set that fetches many samples at once is asked for a shard, and
    finds what its first sample would.

    Attributes:
        collate: a function that makes a batch of a list of samples; None for torch's ``default_collate``.
        samples: the number of samples that the data set has, as its order was made for; None to leave that open.
    """

    dataset: Any
    order: Order
    collate: Collate | None = None
    samples: int | None = None
    watch: DrawWatch = field(default_factory=DrawWatch)

    @property
    def unlike(self) -> str:
        """Why workers may have different samples in a step, and what to do, for messages."""
        return (
            "The loader's sampler draws from something that is not seeded, such as numpy.random.default_rng() or the "
            "time: draw from torch, random or numpy.random, which are seeded here, or seed it by epoch in set_epoch"
        )

    def load(self, request: ShardsRequest) -> list[Any]:
        """Each shard's collated samples; None for an empty shard.

        Draws from the global random generators, and leaves them as the last sample did: seed them before anything
        else draws.

        Raises:
            DataError: the samples cannot be collated; names the indices.
        """
        return self.fetch(self.located(request))

    def of(self, batch: Batch, shards: Iterable[int]) -> list[Any]:
        """The batches of some shards of a step; see :meth:`load`."""
        return self.load(ShardsRequest(batch.epoch, tuple(batch.shard(number) for number in shards)))

    def sample(self, epoch: int, place: int) -> Any:
        """The sample at a place of an epoch, before it is collated; where each comes once, the one of that number.

        Draws from the global random generators.
        """
        at = range(place, place + 1)
        has_each = isinstance(self.order, KeyedOrder)  # which draws alike wherever it stands
        (sample,) = self._seeded(epoch, at, list(at) if has_each else self.order.samples_at(epoch, at).tolist())
        return sample

    def mark(self, batch: Batch) -> int:
        """A number that tells which samples a step has, where a sampler says it."""
        if not self.order.digest:
            return 0
        return crc32(self.order.samples_at(batch.epoch, range(batch.start, batch.stop)).tobytes())

    def located(self, request: ShardsRequest) -> LocatedShards:
        """Return the requested samples. Only the worker asks the sampler for them, and no loader process does.

        Raises:
            DataError: the data set has become longer or shorter.
        """
        if self.samples is not None and (now := len(self.dataset)) != self.samples:
            kind, epoch, before = type(self.dataset).__name__, request.epoch, self.samples
            raise DataError(refused("dataset.length-changed", kind=kind, now=now, epoch=epoch, before=before))
        return LocatedShards(request, tuple(self.order.samples_at(request.epoch, places) for places in request.places))

    def fetch(self, shards: LocatedShards) -> list[Any]:
        """The shards whose samples are known; see :meth:`load`."""
        if self.collate is None and is_plain(self.dataset):
            return [_gathered(self.dataset, indices) if indices.size else None for indices in shards.samples]
        epoch, batches = shards.request.epoch, list[Any]()
        with one_thread():
            quiet = self._quiet(shards)
            for number, (places, samples) in enumerate(zip(shards.request.places, shards.samples, strict=True)):
                if not (indices := samples.tolist()):
                    batches.append(None)
                elif quiet is None:
                    batches.append(self._collated(self._seeded(epoch, places, indices), indices))
                else:
                    if self.collate is not None:  # it may draw: it finds what the last sample has left
                        seed_generators(self.order.stream(epoch, places[-1], indices[-1]))
                    batches.append(self._collated(quiet[number], indices))
        return batches

    def _quiet(self, shards: LocatedShards) -> list[list[Any]] | None:
        """The samples of all shards without a seed for each; None if they draw, and so need one."""
        if self.watch.has_seen or _fetches_many(self.dataset):
            return None
        wanted = [indices.tolist() for indices in shards.samples]
        seed = self.order.quiet_stream(shards.request.epoch)
        first: list[int] = next((indices[:1] for indices in wanted if indices), [])
        if not self.watch.is_new:
            return self._watched(seed, wanted)
        if self._watched(seed, [first]) is None:  # most that draw do so in each sample
            if self._watched(seed, [first]) is not None:
                self._warn(first, "drew something when it was asked for, and nothing when it was asked for again")
            return None
        return self._watched(seed, wanted)

    def _warn(self, first: Sequence[int], fault: str) -> None:
        """Warn of samples that depend on who has asked for them before; looked at once in a loop, in each process."""
        warn(
            f"sample {first[0]} of the data set ({type(self.dataset).__name__}) {fault}: which samples are trained on "
            f"then depends on workers and loader processes, and the weights with them. Draw in each __getitem__, keep "
            f"nothing of it, and draw from the global generators of torch, NumPy and Python, which are seeded before",
        )

    def _watched(self, seed: int, wanted: Sequence[Sequence[int]]) -> list[list[Any]] | None:
        self.watch.begin(seed)
        try:
            samples = [self._fetched(indices) for indices in wanted]
        except Exception:
            if self.watch.end():  # with numbers that were not meant for it
                return None
            raise
        return None if self.watch.end() else samples

    def _seeded(self, epoch: int, places: range, indices: Sequence[int]) -> list[Any]:
        if _fetches_many(self.dataset):  # a shard's samples are always asked for together
            seed_generators(self.order.stream(epoch, places[0], indices[0]))
            return _many(self.dataset, indices)
        samples = []
        for place, index in zip(places, indices, strict=True):
            seed_generators(self.order.stream(epoch, place, index))
            samples += self._fetched([index])
        return samples

    def _fetched(self, indices: Sequence[int]) -> list[Any]:
        samples: list[Any] = []
        try:
            for index in indices:
                samples.append(self.dataset[index])  # noqa: PERF401 (an error names the index)
        except StopIteration as error:  # which would end the loop over it, or come out of that as another error
            raise DataError(f"sample {indices[len(samples)]} of the data set: {_STOPPED}") from error
        except Exception as error:
            error.add_note(f"(while sample {indices[len(samples)]} of the data set was loaded)")
            raise
        return samples

    def _collated(self, samples: list[Any], indices: Sequence[int]) -> Any:
        return collated(self.collate, samples, indices, "the data set")


def collated(collate: Collate | None, samples: list[Any], numbers: Sequence[int], whose: str) -> Any:
    """A batch of samples.

    Raises:
        DataError: they cannot be collated; names them, and the first one that is unlike the others.
    """
    try:
        return (collate or default_collate)(samples)
    except Exception as error:
        odd = _first_odd(samples, numbers)
        raise DataError(
            refused("dataset.not-collated", first=numbers[0], last=numbers[-1], whose=whose, error=error, odd=odd)
        ) from error


def _fetches_many(dataset: Any) -> bool:
    """Whether it fetches many samples at once by itself. A ``Subset`` asks its data set for them."""
    return _fetches_many(dataset.dataset) if type(dataset) is Subset else bool(getattr(dataset, "__getitems__", None))


def _many(dataset: Any, indices: Sequence[int]) -> list[Any]:
    try:
        samples = list(dataset.__getitems__(list(indices)))
    except StopIteration as error:
        raise DataError(f"samples {indices[0]} … {indices[-1]} of the data set: {_STOPPED}") from error
    except Exception as error:
        error.add_note(f"(while samples {indices[0]} … {indices[-1]} of the data set were loaded)")
        raise
    if (given := len(samples)) != len(indices):
        raise DataError(refused("dataset.getitems", kind=type(dataset).__name__, given=given, asked=len(indices)))
    return samples


def is_plain(dataset: Any) -> bool:
    """Whether it is a TensorDataset, or a part of one: nothing random can happen in there."""
    return is_plain(dataset.dataset) if type(dataset) is Subset else type(dataset) is TensorDataset


def _gathered(dataset: Any, indices: Indices) -> list[Tensor]:
    """Gather the samples at once, with the result that collating them one by one would have."""
    if type(dataset) is Subset:
        inner = range(check_dataset(dataset.dataset))  # makes negative indices positive
        return _gathered(dataset.dataset, np.array([inner[dataset.indices[index]] for index in indices.tolist()]))
    samples = len(dataset)
    if (odd := indices[(indices < -samples) | (indices >= samples)]).size:
        raise DataError(f"the sampler gave the index {odd[0]}, and the data set has {samples} samples")
    rows = torch.from_numpy(np.where(indices < 0, indices + samples, indices))
    # Where it can be used, this is several times as fast as an index in brackets.
    return [tensor.index_select(0, rows) if tensor.device.type == "cpu" else tensor[rows] for tensor in dataset.tensors]


@contextmanager
def one_thread() -> Iterator[None]:
    """Have torch compute with one thread."""
    # Loader processes have one thread, and other numbers of threads give other bits.
    threads = torch.get_num_threads()
    if threads != 1:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        if threads != 1:
            torch.set_num_threads(threads)


def is_indexed(dataset: Any) -> bool:
    """Whether samples can be had by their index, also of what torch calls an iterable data set and has a length."""
    get = getattr(type(dataset), "__getitem__", None)
    if not isinstance(dataset, IterableDataset):
        return get is not None
    return get is not Dataset.__getitem__ and isinstance(dataset, Sized)  # others give columns in brackets


_TENSORS = "write torch.utils.data.TensorDataset(X, Y) of two tensors, or a class with __len__ and __getitem__"
"""What to do about data that are none."""


def _are_columns(parts: Sequence[Any]) -> bool:
    """Whether these are arrays that have a row for each sample, such as inputs and labels, and no samples."""
    shapes = [tuple(part.shape) for part in parts if isinstance(part, Tensor | np.ndarray)]
    return len(shapes) == len(parts) and len({shape[:1] for shape in shapes}) == 1 < len(set(shapes))


def check_dataset(dataset: Any) -> int:
    """The number of samples of a map-style data set.

    Raises:
        DataError: it is empty, has no length, or is a stream; says what to use instead.
    """
    kind = type(dataset).__name__
    if isinstance(dataset, str | bytes):
        raise DataError(f"{short(dataset)} is text, and no data set: {_TENSORS}")
    if isinstance(dataset, tuple) and _are_columns(dataset):
        raise DataError(f"a tuple of {len(dataset)} arrays is no data set, which has a sample per index: {_TENSORS}")
    if isinstance(dataset, dict) and not all(isinstance(key, int) for key in dataset):
        raise DataError(f"a dict with names is no data set, which has a sample per index: {_TENSORS}")
    if not is_indexed(dataset):
        raise DataError(refused("dataset.no-index", kind=kind))
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
