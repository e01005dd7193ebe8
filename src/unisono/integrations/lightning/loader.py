"""A training loader as Lightning's loops see it: as long as it was, and with a step in place of each batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils.data import BatchSampler

from unisono.errors import DataError, ModelError
from unisono.integrations.loaders import Cut, like
from unisono.integrations.refused import refused


@dataclass(eq=False)
class GlobalBatch:
    """Stands for a batch in the hooks around a step: each worker has a part of it.

    Attributes:
        extent: a tensor of shape (samples, 0), by which Lightning finds the number of samples.
    """

    extent: Tensor

    @classmethod
    def of(cls, samples: int) -> GlobalBatch:
        """A batch of so many samples."""
        return cls(torch.empty(samples, 0))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # what copies and compares objects
            raise AttributeError(name)
        _refuse()

    def __getitem__(self, key: Any) -> Any:
        _refuse()


def _refuse() -> NoReturn:
    raise ModelError(refused("lightning.distributed-batch"))


def let_pass(module: Any) -> Callable[[], None]:
    """Have batches that are distributed pass a module's hook for batches before they move to the device.

    Returns:
        a function that lets go of it again.
    """
    found = module._on_before_batch_transfer

    def pass_on(batch: Any, dataloader_idx: int = 0) -> Any:
        return batch if isinstance(batch, GlobalBatch) else found(batch, dataloader_idx=dataloader_idx)

    vars(module)["_on_before_batch_transfer"] = pass_on
    return lambda: vars(module).pop("_on_before_batch_transfer", None)


class TrainingLoader:
    """Gives a batch for each step of the run's loop, which goes on from epoch to epoch.

    Args:
        loader: the script's loader.
        next_step: a function that goes on to the next step.

    Attributes:
        loader: the script's loader.
    """

    def __init__(self, loader: Any, next_step: Callable[[], GlobalBatch]) -> None:
        self.loader = loader
        self._next = next_step

    def __len__(self) -> int:
        """The number of batches of an epoch."""
        return len(self.loader)

    def __iter__(self) -> TrainingLoader:
        return self

    def __next__(self) -> GlobalBatch:
        return self._next()


def require_length(loader: Any) -> None:
    """Refuse a training loader that does not know the number of its batches.

    Raises:
        DataError: it is one; says what to do.
    """
    try:
        len(loader)
    except TypeError:
        dataset = getattr(loader, "dataset", loader)
        raise DataError(refused("lightning.no-length", kind=type(dataset).__name__)) from None


def limited(loader: Any, batches: int) -> Any:
    """A loader whose epochs end after so many batches."""
    if batches >= len(loader):
        return loader
    if type(loader.batch_sampler) is not BatchSampler:
        return like(loader, batch_sampler=Cut(loader.batch_sampler, stop=batches))
    sampler = Cut(loader.batch_sampler.sampler, stop=batches * loader.batch_size)
    return like(loader, batch_size=loader.batch_size, sampler=sampler, drop_last=loader.drop_last)
