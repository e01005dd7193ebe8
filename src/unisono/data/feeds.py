"""The feeds of loops and evaluations: of streams, and of all other data that a script gives them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sized
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

from torch.utils.data import DataLoader, IterableDataset

from unisono.data.batch_stream import BatchReaders, OpenPass, gives_batches
from unisono.data.content import Glance, content_of_stream
from unisono.data.feed import SAME_SAMPLES, Feed, Options, Shuffle, collate_of, is_stateful, processes_of, refuse_beside
from unisono.data.loading import NO_PROCESSES, Processes
from unisono.data.refusals import refused
from unisono.data.sample_order import KeyedOrder, LoopKey, Order
from unisono.data.shards import Collate, is_indexed
from unisono.data.stream_reader import opens_readers
from unisono.data.stream_readers import OpenReaders, ReadersAhead, StreamSource
from unisono.errors import DataError, JobError
from unisono.host.tracebacks import warn

BATCHES = {"_batched": True, "_unbatched": False, "_unlisted": False}
"""Stages of WebDataset by the names of their functions, and whether batches come out of them."""


def require_samples(stream: Any) -> None:
    """Require that a stream gives samples, and all of them.

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
    """Whether a stream gives batches, by its own attributes."""
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
    while examples is not None and not hasattr(examples, "function"):
        examples = getattr(examples, "ex_iterable", None)
    function = getattr(examples, "function", None)
    is_theirs = str(getattr(function, "__module__", "")).startswith("datasets.")
    return is_theirs and getattr(function, "__name__", "") in ("_batch_fn", "_batch_arrow_table")


PATIENCE = 0.75
"""The part of the time until others miss a worker after which the worker names a loader process that hangs."""


@dataclass(frozen=True)
class StreamFeed:
    """The stream that a loop reads, and the way in which it reads it.

    Attributes:
        batch_size: the number of samples in a batch, if a loader says it.
        collate: a function that makes a batch of a list of samples; None for torch's ``default_collate``.
        keeps: whether the states that the stream tells of itself are used.
        begin: a function that each reader calls with its number before it opens its copy of the stream.
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
    sized_by: ClassVar[str] = "loader"
    is_batched: ClassVar[bool] = False  # no batch sampler decides which samples a batch has

    @property
    def order(self) -> Order:
        """The order in which samples are counted: as they are read. How many there are is not known."""
        return KeyedOrder(0, self.key.seed)

    @classmethod
    def of(cls, data: Any, options: Options, key: LoopKey, timeout_s: float, epochs: int = 1) -> StreamFeed | None:
        """Take data as a script gives it; None if they are no stream.

        ``timeout_s`` are the seconds after which a worker is missed; a loader process that hangs is so a little before,
        unless a loader says when.

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
            _refuse(options.shuffle, options.drop_last)
            return cls(stream, key, None, options.collate_fn, processes=options.processes(timeout_s), epochs=epochs)
        refuse_beside(options)
        _refuse(None, loader.drop_last)
        if loader.batch_size is None:
            raise DataError("batch_size=None: the loader makes no batches: give it the batch_size of the job")
        begin, processes = loader.worker_init_fn, processes_of(loader, timeout_s)
        collate, keeps = collate_of(loader), is_stateful(loader)
        return cls(stream, key, loader.batch_size, collate, keeps, begin, processes, epochs)

    def decides(self, batch_size: int) -> str:
        """Say what decides which samples a batch has, and what to do; for messages."""
        return f"{type(self.stream).__name__} makes its batches itself: have it make them of other sizes"

    def same(self) -> Mapping[str, Any]:
        """Return the values that have to be the same on all workers."""
        return {"kind of stream": type(self.stream).__name__}

    def content(self, look: Glance) -> str:
        """A digest of what some readers give for the first step."""
        return content_of_stream(self._readers(look.readers), self.processes, look)

    @property
    def cure(self) -> str:
        """The advice on what to do where workers' samples differ."""
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
        """Return the source of the samples, with so many readers."""
        opened = self._readers(readers)
        ahead = ReadersAhead(opened, self.processes, self.epochs) if self.processes.count else opened
        return StreamSource(ahead, type(self.stream).__name__)

    def _readers(self, readers: int) -> OpenReaders:
        if readers not in self._opened:
            self._opened[readers] = OpenReaders(
                self.stream, self.key, readers, self.collate, self.begin, keeps=self.keeps
            )
        return self._opened[readers]


def _refuse(shuffle: Shuffle | None, drop_last: bool | None) -> None:
    if shuffle:
        raise JobError("shuffle=True: a stream has its own order. Shuffle in the stream, or the files that it reads")
    if drop_last:
        raise JobError(refused("stream.drop-last"))


def warn_unless_promised(name: str, samples: int, promised: int | None) -> None:
    """Warn of a stream that gave more or fewer samples than it has promised, if it did promise."""
    if promised not in (None, samples):
        warn(
            f"{name} has {samples} samples, and its __len__ says {promised}: all that were read are used. If samples "
            f"are missing or repeated, look how readers share it: reader v of V is worker v of V in "
            f"torch.utils.data.get_worker_info()",
        )


@dataclass(frozen=True)
class BatchFeed(StreamFeed):
    """A stream of batches that a loop reads.

    Attributes:
        begun: the first of its passes, at its first batch; None in evaluations.
    """

    begun: OpenPass | None = None

    is_batched: ClassVar[bool] = True  # the stream decides which samples a batch has

    @property
    def order(self) -> Order:
        """The order in which samples are counted: as they are read. The first batch tells it from others."""
        batch = None if self.begun is None else self.begun.batch
        return KeyedOrder(0, self.key.seed, digest=f"{0 if batch is None else batch.digest:08x}")

    promised: ClassVar[int | None] = None  # it says nothing of samples

    @classmethod
    def of_batches(cls, data: Any, options: Options, key: LoopKey, epochs: int = 1) -> BatchFeed | None:
        """Take a stream of batches; None if data are something else.

        Raises:
            DataError: it has no batches.
            JobError: something is asked for that the stream decides.
        """
        if not gives_batches(data):
            return None
        refuse_beside(options, f"beside {data.name}: it makes its batches itself, so say it there")
        if key.is_evaluation:
            return cls(data, key)
        begun = OpenPass(data, key.passes)
        if begun.batch is None:
            raise DataError(f"{data.name} has no batches: check the path, the split or the filter it was made with")
        return cls(data, key, begun.batch.samples, epochs=epochs, begun=begun)

    def same(self) -> Mapping[str, Any]:
        """Return the values that have to be the same on all workers."""
        return {"kind of stream": self.stream.name} | (
            {} if self.begun is None else {f"first batch ({self.stream.cure})": self.order.digest}
        )

    def content(self, look: Glance) -> str:
        """Nothing: the first batch is compared, and each further one as it is read."""
        return ""

    def source(self, readers: int) -> StreamSource:
        """Return the source of the samples, with so many readers."""
        assert self.begun is not None, "it is read in a loop"
        shared = BatchReaders(self.stream, self.key.passes, readers, self.begun)
        return StreamSource(shared, self.stream.name, self.stream.cure)


# The feeds of a script's loops, one after the other.


class LoopFeeds:
    """The feeds of a script's loops, one after the other."""

    def __init__(self, seed: int, timeout_s: float) -> None:
        self._seed, self._timeout_s = seed, timeout_s
        self._passes: WeakKeyDictionary[Any, int] = WeakKeyDictionary()

    def of(self, data: Any, options: Options, loop: int, epochs: int) -> Feed | StreamFeed:
        """Return the feed of a loop; see :meth:`Feed.of`.

        A loader that had loops before goes on behind all of their epochs, whether or not they came to their end:
        a worker that has skipped them knows no more of them than how many were asked for.
        """
        passes = 0
        if isinstance(data, DataLoader | IterableDataset) or gives_batches(data):
            origin = data.origin if gives_batches(data) else data
            passes = self._passes.get(origin, 0)
            self._passes[origin] = passes + epochs
        return feed_of(data, options, LoopKey(self._seed, loop, passes), self._timeout_s, epochs)


def feed_of(data: Any, options: Options, key: LoopKey, timeout_s: float, epochs: int = 1) -> Feed | StreamFeed:
    """Return the feed of a loop or an evaluation; see :meth:`Feed.of`. Loops shuffle data sets by default."""
    stream = BatchFeed.of_batches(data, options, key, epochs) or StreamFeed.of(data, options, key, timeout_s, epochs)
    if stream is not None:
        return stream
    if not isinstance(data, DataLoader) and options.shuffle is None and not key.is_evaluation:
        options = replace(options, shuffle=True)
    return Feed.of(data, options, key, timeout_s)
