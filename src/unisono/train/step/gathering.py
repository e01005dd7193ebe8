"""How the parameters of a model in slices are gathered for a pass: in a way from which a loss elsewhere wakes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather

from unisono.train.group.workers import Workers


class Gathering(AllGather):
    """What FSDP calls to gather a unit's parameters, in place of its own way.

    In a collective call any device may find another worker gone, and leaves: the others must not wait for it. Passes
    that a script makes between two calls go their undisturbed way over torch's default group.

    Args:
        workers: a function that returns the workers of the present generation.
    """

    def __init__(self, workers: Callable[[], Workers]) -> None:
        self._workers = workers

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for the rows of all devices."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        """Gather them."""
        workers = self._workers()
        if workers.is_called:
            workers.devices.exchange.gather_into(output_tensor, input_tensor)
        else:
            dist.all_gather_into_tensor(output_tensor, input_tensor, group=group)
