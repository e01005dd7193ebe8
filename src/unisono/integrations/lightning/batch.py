"""What Lightning's loops and hooks hold in place of a batch, whose samples are with several workers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor

from unisono.errors import ModelError


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
    raise ModelError(
        "this batch is distributed among the workers, and hooks around a step (on_train_batch_start, "
        "on_validation_batch_end …) have no samples of it: do that in training_step or validation_step, or change "
        "samples in on_after_batch_transfer, which get the shards"
    )


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
