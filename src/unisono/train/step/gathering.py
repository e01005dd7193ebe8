"""How the parameters of a model in slices are gathered for a pass: in a way from which a loss elsewhere wakes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather

from unisono.train.group.membership import Membership
from unisono.train.group.workers import Workers
from unisono.train.model.tensors import COUNTS_HOLDERS, is_held_elsewhere

LARGEST_KEPT = 32 * 2**20
"""Bytes of memory that is used again. What glibc gets back of larger pieces it gives back to the system."""


class Gathering(AllGather):
    """What FSDP calls to gather a unit's parameters, in place of its own way.

    In a collective call any device may find another worker gone, and leaves: the others must not wait for it. Passes
    that a script makes between two calls go their undisturbed way over torch's default group.

    Args:
        workers: a function that returns the workers of the present generation.
    """

    def __init__(self, workers: Callable[[], Workers]) -> None:
        self._workers = workers
        self._kept: dict[tuple[int, torch.dtype], list[Tensor]] = {}

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for the rows of all devices, which they are copied from at once: so it is soon used again."""
        numel = torch.Size(size).numel()
        if device.type != "cpu" or not COUNTS_HOLDERS or numel * dtype.itemsize > LARGEST_KEPT:
            return torch.empty(numel, dtype=dtype, device=device)
        kept = self._kept.setdefault((numel, dtype), [])
        free = next((each for each in kept if not is_held_elsewhere(each)), None)
        if free is None:
            kept.append(free := torch.empty(numel, dtype=dtype))
        return free.detach()

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        """Gather them."""
        workers = self._workers()
        if workers.is_called:
            workers.devices.exchange.gather_into(output_tensor, input_tensor)
        else:
            dist.all_gather_into_tensor(output_tensor, input_tensor, group=group)


_of: WeakKeyDictionary[Membership, Gathering] = WeakKeyDictionary()


def gathering_of(membership: Membership) -> Gathering:
    """The one for all units of a run: they are gathered one after the other, and so in the same memory."""
    if membership not in _of:
        reference = ref(membership)  # which the one that is kept by it must not keep

        def workers() -> Workers:
            found = reference()
            assert found is not None, "a model is in use as long as its run"
            return found.workers

        _of[membership] = Gathering(workers)
    return _of[membership]
