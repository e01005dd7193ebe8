"""What a loop or an evaluation of a stream reads."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sized
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch.utils.data import DataLoader, IterableDataset

from unisono.data.content import Glance, content_of_stream
from unisono.data.feed import SAME_SAMPLES, Asked, Shuffle, collate_of, keeps_states, processes_of, refuse_beside
from unisono.data.loader_processes import NO_PROCESSES, Processes
from unisono.data.order import KeyedOrder, Order
from unisono.data.refused import refused
from unisono.data.sampler_order import LoopKey
from unisono.data.shards import Collate, is_indexed
from unisono.data.stream_reader import opens_readers
from unisono.data.stream_readers import OpenReaders
from unisono.data.stream_source import ReadersAhead, StreamSource
from unisono.errors import DataError, JobError, UnisonoWarning

BATCHES = {"_batched": True, "_unbatched": False, "_unlisted": False}
"""Stages of WebDataset by the names of their functions, and whether batches come out of them."""


def require_samples(stream: Any) -> None:
    """A stream gives samples, and all of them.

    Raises:
        DataError: it gives batches, a share of the samples for each process, or draws its files anew in each.
    """
    name = type(stream).__name__
    if gives_whole_batches(stream):
        raise DataError(refused("stream.whole-batches", name=name))
    share: Any = getattr(stream, "_distributed", None)
    if getattr(share, "world_size", 1) > 1:
        raise DataError(refused("stream.split-by-node", name=name, share=share.rank, count=share.world_size))
    if _resamples(stream):
        raise DataError(refused("stream.resampled", name=name))


def gives_whole_batches(stream: Any) -> bool:
    """Whether what a stream gives are batches, as far as it tells."""
    if type(stream).__name__ == "BatcherIterDataPipe":
        return True
    is_batched = False
    for stage in _stages(stream):
        if isinstance(stage, DataLoader):
            is_batched = stage.batch_size is not None or gives_whole_batches(stage.dataset)
        is_batched = BATCHES.get(getattr(getattr(stage, "f", None), "__name__", ""), is_batched)
    return is_batched or _batches_last(getattr(stream, "_ex_iterable", None))


def _stages(stream: Any) -> list[Any]:
    """The stages of a stream of WebDataset; none of others."""
    stages = getattr(stream, "pipeline", None)
    return stages if isinstance(stages, list) else []


def _resamples(stream: Any) -> bool:
    """Whether a stage of a stream draws files with replacement: by the clock, or by how often it was read before."""
    return type(stream).__name__ == "ResampledShards" or any(
        _resamples(stage.dataset if isinstance(stage, DataLoader) else stage) for stage in _stages(stream)
    )


def _batches_last(examples: Any) -> bool:
    """Whether the last function that Hugging Face maps over examples makes batches of them."""
    mapped = next((one for one in _chain(examples) if hasattr(one, "function")), None)
    function = getattr(mapped, "function", None)
    is_theirs = str(getattr(function, "__module__", "")).startswith("datasets.")
    return is_theirs and getattr(function, "__name__", "") in ("_batch_fn", "_batch_arrow_table")


def _chain(examples: Any) -> Iterator[Any]:
    """An iterable of examples, and those that it reads, the last one first."""
    while examples is not None:
        yield examples
        examples = getattr(examples, "ex_iterable", None)


PATIENCE = 0.75
"""Of the time after which others miss a worker: a loader process that hangs is named before, as nobody else can do."""


@dataclass(frozen=True)
class StreamFeed:
    """What is read, and how.

    Attributes:
        stream: the stream.
        key: what the draws of its samples follow from.
        batch_size: the number of samples in a batch, if a loader says it.
        collate: a function that makes a batch of a list of samples; None for torch's ``default_collate``.
        keeps: whether the states that the stream tells of itself are used.
        begin: a function that each reader calls with its number before it opens its copy of the stream.
        processes: the processes that read.
        epochs: the number of epochs to read.
    """

    stream: Any
    key: LoopKey
    batch_size: int | None = None
    collate: Collate | None = None
    keeps: bool = False
    begin: Callable[[int], None] | None = None
    processes: Processes = NO_PROCESSES
    epochs: int = 1
    _opened: dict[int, OpenReaders] = field(default_factory=dict, init=False, repr=False, compare=False)

    shuffle: ClassVar[bool] = False  # a stream has its own order
    drop_last: ClassVar[bool] = False  # all that is read is used
    is_batched: ClassVar[bool] = False  # no batch sampler decides which samples a batch has

    @property
    def order(self) -> Order:
        """The order in which samples are counted: as they are read. How many there are is not known."""
        return KeyedOrder(0, self.key.seed)

    @classmethod
    def of(cls, data: Any, asked: Asked, key: LoopKey, timeout_s: float, epochs: int = 1) -> StreamFeed | None:
        """Take data as a script gives it; None if they are no stream.

        Args:
            data: the data.
            asked: what the script asks for beside them.
            key: what draws follow from.
            timeout_s: seconds after which a worker is missed; a loader process that hangs is so a little before, unless
                a loader says when.
            epochs: the number of epochs to read.

        Raises:
            DataError: the loader makes no batches, the stream makes them, or gives each process a share.
            JobError: something is asked for that a stream cannot give.
        """
        loader = data if isinstance(data, DataLoader) else None
        stream = data if loader is None else loader.dataset
        if not opens_readers(stream) and (not isinstance(stream, IterableDataset) or is_indexed(stream)):
            return None
        require_samples(stream)
        timeout_s *= PATIENCE
        if loader is None:
            _refuse(asked.shuffle, asked.drop_last)
            return cls(stream, key, None, asked.collate_fn, processes=asked.processes(timeout_s), epochs=epochs)
        refuse_beside(asked)
        _refuse(None, loader.drop_last)
        if loader.batch_size is None:
            raise DataError("batch_size=None: the loader makes no batches: give it the batch_size of the job")
        begin, processes = loader.worker_init_fn, processes_of(loader, timeout_s)
        collate, keeps = collate_of(loader), keeps_states(loader)
        return cls(stream, key, loader.batch_size, collate, keeps, begin, processes, epochs)

    def decides(self, batch_size: int) -> str:
        """What decides which samples a batch has, and what to do, for messages."""
        return f"{type(self.stream).__name__} makes its batches itself: have it make them of other sizes"

    def same(self) -> Mapping[str, Any]:
        """What has to be the same on all workers."""
        return {"kind of stream": type(self.stream).__name__}

    def content(self, look: Glance) -> str:
        """A digest of what some readers give for the first step."""
        return content_of_stream(self._readers(look.readers), self.processes, look)

    @property
    def cure(self) -> str:
        """What to do where workers' samples differ."""
        return (
            f"{SAME_SAMPLES}. What shuffles or mixes a stream needs a seed (shuffle(seed=0), "
            f"interleave_datasets(…, seed=0)), or is made after unisono.init where it draws from the global generators "
            f"of torch, NumPy and Python. Leave out WebDataset's resampled=True, and what gives each process a share"
        )

    @property
    def promised(self) -> int | None:
        """The number of samples that the stream says it has; None if it says nothing."""
        try:
            return len(self.stream) if isinstance(self.stream, Sized) else None
        except TypeError:  # a __len__ that says that there is none
            return None

    def source(self, readers: int) -> StreamSource:
        """What gives the samples, read by so many readers."""
        opened = self._readers(readers)
        ahead = ReadersAhead(opened, self.processes, self.epochs) if self.processes.count else opened
        return StreamSource(ahead, type(self.stream).__name__)

    def _readers(self, readers: int) -> OpenReaders:
        if readers not in self._opened:
            self._opened[readers] = OpenReaders(
                self.stream, self.key, readers, self.collate, self.begin, keeps=self.keeps
            )
        return self._opened[readers]


def warn_unless_promised(what: str, samples: int, promised: int | None) -> None:
    """Warn of a stream that gave more or fewer samples than it has promised, if it did promise."""
    if promised not in (None, samples):
        warnings.warn(
            f"{what} has {samples} samples, and its __len__ says {promised}: all that were read are used. If samples "
            f"are missing or repeated, look how readers share it: reader v of V is worker v of V in "
            f"torch.utils.data.get_worker_info()",
            UnisonoWarning,
            stacklevel=2,
        )


def _refuse(shuffle: Shuffle | None, drop_last: bool | None) -> None:
    if shuffle:
        raise JobError("shuffle=True: a stream has its own order. Shuffle in the stream, or the files that it reads")
    if drop_last:
        raise JobError(refused("stream.drop-last"))
