"""The feed of a loop or an evaluation: a data set, its order, and how it is loaded."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler, default_collate
from torch.utils.data._utils import worker
from torch.utils.data.distributed import DistributedSampler

from unisono.data.content import Glance, content_of_samples
from unisono.data.loading import Processes
from unisono.data.refusals import refused
from unisono.data.sample_order import KeyedOrder, LoopKey, Order, SamplerOrder, parts_of
from unisono.data.shards import Collate, ShardSource, check_dataset
from unisono.errors import DataError, JobError
from unisono.plan.order import BlockShuffle
from unisono.received import short

SAME_SAMPLES = "All workers need the same samples, or some are trained on twice and others never"
"""Why."""

MOST_PROCESSES = 4096
"""That a worker may load with."""

Shuffle = bool | str | BlockShuffle
"""Whether and how to shuffle."""


@dataclass(frozen=True, slots=True)
class Options:
    """The options that a script sets beside its data; None for an option that it leaves open.

    Attributes:
        shuffle: whether to shuffle, or the blocks by which to; "blocks" for those that the data set names.
        drop_last: whether to leave out a last, smaller batch.
        loader_workers: the number of processes that load.
        batch_size: the number of samples in a batch.
        collate_fn: a function that makes a batch of a list of samples.
    """

    shuffle: Shuffle | None = None
    drop_last: bool | None = None
    loader_workers: int | None = None
    batch_size: int | None = None
    collate_fn: Collate | None = None

    def processes(self, timeout_s: float) -> Processes:
        """The processes that are asked for.

        Args:
            timeout_s: seconds after which one is taken to hang.

        Raises:
            JobError: there is no such number of them.
        """
        workers = self.loader_workers or 0
        if not 0 <= workers <= MOST_PROCESSES:
            limit = f", at most {MOST_PROCESSES}" if workers > 0 else ""
            how = f"use 0 to load in this process, or a number of processes{limit}"
            raise JobError(f"loader_workers={short(workers)}: {how}")
        return Processes(workers, timeout_s)


@dataclass(frozen=True)
class Feed:
    """The samples that a loop reads, and the way in which it reads them.

    Attributes:
        source: gives the samples of each shard.
        processes: the processes that load.
        batch_size: the number of samples in a batch, if a loader says it.
        is_batched: whether a loader's batch sampler decides which samples a batch has.
        shuffle: whether the order is shuffled, where no sampler decides it.
        drop_last: whether a last, smaller batch is left out.
        sized_by: the part of the script's data that says ``batch_size``.
    """

    source: ShardSource
    processes: Processes
    batch_size: int | None = None
    is_batched: bool = False
    shuffle: bool = False
    drop_last: bool = False
    sized_by: str = "loader"

    @property
    def order(self) -> Order:
        """The order of its samples."""
        return self.source.order

    def decides(self, batch_size: int) -> str:
        """Say what decides which samples a batch has, and what to do; for messages."""
        return (
            f"the loader's batch_sampler decides which samples a batch has: give the DataLoader a sampler and "
            f"batch_size={batch_size} instead"
        )

    def same(self) -> Mapping[str, Any]:
        """Return the values that have to be the same on all workers."""
        values: dict[str, Any] = {"number of samples": len(self.source.dataset)}
        return values | ({"order of the sampler": digest} if (digest := self.order.digest) else {})

    def content(self, look: Glance) -> str:
        """A digest of samples at a few places of an epoch; empty of data that change between epochs.

        A joiner has such data as they were at first, until it is told of the epochs that it has missed.
        """
        if getattr(self.source.dataset, "changes_between_epochs", False):
            return ""
        return content_of_samples(self.source, self.processes, look)

    @property
    def cure(self) -> str:
        """The advice on what to do where workers' samples differ."""
        return (
            f"{SAME_SAMPLES}. Data that are split, shuffled or made with random numbers need a seed "
            f"(torch.Generator().manual_seed(0), numpy.random.default_rng(0)), or are drawn after unisono.init, which "
            f"seeds torch, NumPy and Python. In __getitem__ draw from their global generators. Give every worker the "
            f"whole data set, and no share by rank"
        )

    @classmethod
    def of(cls, data: Any, options: Options, key: LoopKey, timeout_s: float) -> "Feed":
        """Take data as a script gives it.

        Raises:
            DataError: the data set is empty or has no length, or the loader has what cannot be kept.
            JobError: something is asked for that the loader decides; or no number of processes.
        """
        if isinstance(data, DataLoader):
            return cls._of_loader(data, options, key, timeout_s)
        processes = options.processes(timeout_s)
        shuffle, drop_last, samples = bool(options.shuffle), bool(options.drop_last), check_dataset(data)
        blocks = _blocks_of(data, options.shuffle)
        digest = "" if blocks is None else str(blocks)
        order = KeyedOrder(samples, key.seed, shuffle, drop_last, blocks, digest)
        source = ShardSource(data, order, options.collate_fn, samples)
        return cls(source, processes, shuffle=shuffle, drop_last=drop_last)

    @classmethod
    def _of_loader(cls, loader: DataLoader[Any], options: Options, key: LoopKey, timeout_s: float) -> "Feed":
        refuse_beside(options)
        _refuse(loader)
        dataset: Any = loader.dataset
        batched, sampler = loader.batch_sampler, loader.sampler
        is_batched = not (isinstance(batched, BatchSampler) and _is_plain(type(batched)))
        size, drop_last = None, False
        if isinstance(batched, BatchSampler) and not is_batched:
            size, drop_last, sampler = batched.batch_size, batched.drop_last, batched.sampler
        samples = check_dataset(dataset)
        order: Order
        if not is_batched and type(sampler) is SequentialSampler and sampler.data_source is dataset:
            order = KeyedOrder(samples, key.seed, drop_last=drop_last)
        else:
            order = SamplerOrder(
                batched if is_batched else sampler, dataset, key, is_batched=is_batched, drop_last=drop_last
            )
        begin = partial(_begin, loader.worker_init_fn, loader.num_workers, dataset)
        processes = replace(processes_of(loader, timeout_s), begin=begin)
        source = ShardSource(dataset, order, collate_of(loader), samples)
        sized_by = "loader" if loader.batch_size is not None else "loader's batch_sampler"
        return cls(source, processes, size, is_batched, drop_last=drop_last, sized_by=sized_by)


def _blocks_of(data: Any, shuffle: Shuffle | None) -> BlockShuffle | None:
    """The blocks by which to shuffle; None to shuffle all samples, or not at all."""
    if shuffle is None or isinstance(shuffle, bool):
        return None
    size = getattr(data, "block_size", None)
    blocks = shuffle if isinstance(shuffle, BlockShuffle) else BlockShuffle(1 if size is None else size)
    if isinstance(shuffle, str) and shuffle != "blocks":
        raise JobError(
            f"shuffle={short(shuffle)}: use True, False, 'blocks', or unisono.BlockShuffle(size=…, window=…)"
        )
    if isinstance(shuffle, str) and size is None:
        raise JobError(refused("shuffle.no-block-size", kind=type(data).__name__))
    for name, value in (("size", blocks.size), ("window", blocks.window)):
        if type(value) is not int or value < 1:
            raise JobError(f"BlockShuffle({name}={short(value)}): needs a number from 1 on")
    return blocks


def refuse_beside(options: Options, why: str = "beside a DataLoader: the loader decides it, so say it there") -> None:
    """Refuse what a script says beside data that decide it.

    Raises:
        JobError: it says something.
    """
    values = {field.name: getattr(options, field.name) for field in fields(options)}
    if beside := [f"{name}={short(value)}" for name, value in values.items() if value is not None]:
        raise JobError(f"{', '.join(beside)} {why}")


# What a ``DataLoader`` is made of, and what of it cannot be kept.

TORCHDATA = "torchdata.stateful_dataloader."

SHARES = (("num_replicas", "rank"), ("num_processes", "process_index"), ("world_size", "rank"))
"""Attributes by which samplers that give each process another share can be told from others."""


def collate_of(loader: DataLoader[Any]) -> Collate | None:
    """A function that makes a loader's batches of samples; None for torch's ``default_collate``."""
    return None if loader.collate_fn is default_collate else loader.collate_fn


def is_stateful(loader: DataLoader[Any]) -> bool:
    """Whether it is torchdata's ``StatefulDataLoader``, which goes on from the states of its data set.

    It iterates as torch's loader does.
    """
    return str(getattr(type(loader).__iter__, "__module__", "")).startswith(TORCHDATA)


def _is_plain(kind: type[BatchSampler]) -> bool:
    """Whether a batch sampler only puts together what a sampler gives."""
    return kind is BatchSampler or kind.__module__.startswith(TORCHDATA)


def _refuse(loader: DataLoader[Any]) -> None:
    kind = type(loader)
    if isinstance(loader.dataset, IterableDataset):
        raise DataError(refused("loader.stream", kind=type(loader.dataset).__name__))
    if kind.__iter__ is not DataLoader.__iter__ and not is_stateful(loader):
        raise DataError(refused("loader.own-iteration", module=kind.__module__, kind=kind.__name__))
    if loader.batch_sampler is None:
        raise DataError(refused("loader.no-batches"))
    for part in (*parts_of(loader.batch_sampler), loader.sampler):
        if isinstance(part, DistributedSampler) or any(all(hasattr(part, name) for name in names) for names in SHARES):
            raise DataError(refused("loader.share-of-process", kind=type(part).__name__))


def processes_of(loader: DataLoader[Any], timeout_s: float) -> Processes:
    """The processes that a loader asks for.

    Raises:
        JobError: they are to be started in another way than by a fork.
    """
    count, context = loader.num_workers, loader.multiprocessing_context
    if count and context is not None and context.get_start_method() != "fork":
        raise JobError(refused("loader.not-forked", method=context.get_start_method()))
    usual = Processes(count, loader.timeout or timeout_s)
    return usual if loader.prefetch_factor is None else replace(usual, ahead=loader.prefetch_factor)


def _begin(first: Callable[[int], None] | None, count: int, dataset: Any, number: int) -> None:
    """Begin a loader process as torch does: data sets and collate functions may ask which one they are in."""
    worker._worker_info = worker.WorkerInfo(id=number, num_workers=count, seed=number, dataset=dataset)
    if first is not None:
        first(number)
