"""What a ``torch.utils.data.DataLoader`` is made of, and what of it cannot be kept."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, IterableDataset, default_collate
from torch.utils.data._utils import worker
from torch.utils.data.distributed import DistributedSampler

from unisono.data.loader_processes import Processes
from unisono.data.refused import refused
from unisono.data.sampler_order import parts_of
from unisono.data.shards import Collate
from unisono.errors import DataError, JobError

TORCHDATA = "torchdata.stateful_dataloader."

SHARES = (("num_replicas", "rank"), ("num_processes", "process_index"), ("world_size", "rank"))
"""Attributes by which samplers that give each process another share can be told from others."""


@dataclass(frozen=True)
class LoaderParts:
    """What a loop needs of a loader.

    Attributes:
        dataset: the data set.
        sampler: the sampler, or the batch sampler if that is no plain one of torch.
        is_batched: whether the sampler gives whole batches.
        batch_size: the number of samples in a batch; None where the sampler decides it.
        drop_last: whether a last, smaller batch is left out.
        collate: a function that makes a batch of a list of samples; None for torch's ``default_collate``.
        processes: the processes that load.
    """

    dataset: Any
    sampler: Any
    is_batched: bool
    batch_size: int | None
    drop_last: bool
    collate: Collate | None
    processes: Processes

    @classmethod
    def of(cls, loader: DataLoader[Any], timeout_s: float) -> "LoaderParts":
        """Take a loader apart.

        Args:
            loader: the loader.
            timeout_s: seconds after which a loader process is taken to hang, unless the loader says so.

        Raises:
            DataError: the loader reads a stream, gives each process another share, or does not batch.
            JobError: its processes are to be started in another way than by a fork.
        """
        _refuse(loader)
        collate = None if loader.collate_fn is default_collate else loader.collate_fn
        begin = partial(_begin, loader.worker_init_fn, loader.num_workers, loader.dataset)
        processes = replace(processes_of(loader, timeout_s), begin=begin)
        batched = loader.batch_sampler
        if isinstance(batched, BatchSampler) and _is_plain(type(batched)):
            settings = batched.batch_size, batched.drop_last, collate, processes
            return cls(loader.dataset, batched.sampler, False, *settings)
        return cls(loader.dataset, batched, True, None, False, collate, processes)


def keeps_states(loader: DataLoader[Any]) -> bool:
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
    if kind.__iter__ is not DataLoader.__iter__ and not keeps_states(loader):
        raise DataError(refused("loader.own-iteration", module=kind.__module__, kind=kind.__name__))
    if loader.batch_sampler is None:
        raise DataError(refused("loader.no-batches"))
    for part in (*parts_of(loader.batch_sampler), loader.sampler):
        if isinstance(part, DistributedSampler) or any(all(hasattr(part, one) for one in names) for names in SHARES):
            raise DataError(refused("loader.share-of-process", kind=type(part).__name__))


def processes_of(loader: DataLoader[Any], timeout_s: float) -> Processes:
    """The processes that a loader asks for.

    Args:
        loader: the loader.
        timeout_s: seconds after which a loader process is taken to hang, unless the loader says so.

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
