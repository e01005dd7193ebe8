"""Batches on their way to the device that computes."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from unisono.data.loader import Loaded, load
from unisono.data.loader_processes import Processes
from unisono.data.shards import ShardSource, ShardsRequest
from unisono.data.slot import replaced
from unisono.device import current_stream, is_accelerator, new_stream, page_locked, within


def to_device(batch: Any, device: torch.device) -> Any:
    """A batch with all its tensors on ``device``: tensors, and tuples, lists and mappings of them."""
    return replaced(batch, Tensor, lambda tensor: tensor.to(device, non_blocking=True))


def prefetch(
    source: ShardSource, requests: Iterator[ShardsRequest], processes: Processes, device: torch.device
) -> Loaded:
    """Load steps for a device. On the CPU batches are used where they were loaded; nothing is copied.

    Args:
        source: a function that loads shards.
        requests: one request per step.
        processes: the processes that load.
        device: the device to which batches are copied.
    """
    if not is_accelerator(device):
        return load(source, requests, processes)
    return Prefetched(load(source, requests, processes), DeviceCopyStream(device))


class CopyStream(Protocol):
    """A way to the device that runs beside the computation."""

    def send(self, shards: list[Any]) -> Any:
        """Start to copy a step's shards. Does not wait; returns what ``receive`` needs."""

    def receive(self, sent: Any) -> list[Any]:
        """The shards on the device, for the computation to use in its turn."""


class Prefetched:
    """Steps on a device: while one is computed, the next is copied, if it is loaded by then."""

    def __init__(self, loaded: Loaded, stream: CopyStream) -> None:
        self._loaded = loaded
        self._stream = stream
        self._coming: Future[Any] | None = None

    def __next__(self) -> list[Any]:
        """The next step's shards; the one after it is on its way then."""
        coming = self._coming or self._sent()
        self._coming = None
        shards = self._stream.receive(coming.result())
        if self._loaded.is_ready():
            self._coming = self._sent()
        return shards

    def is_ready(self) -> bool:
        """Whether the next step's shards are on their way, or could be."""
        return self._coming is not None or self._loaded.is_ready()

    def close(self) -> None:
        """End what loads."""
        self._loaded.close()

    def _sent(self) -> Future[Any]:
        sent: Future[Any] = Future()
        try:
            sent.set_result(self._stream.send(next(self._loaded)))
        except Exception as error:  # noqa: BLE001 (raised when the step is asked for that it belongs to)
            sent.set_exception(error)
        return sent


@dataclass(frozen=True, slots=True)
class Copies:
    """A step's shards on an accelerator, usable once ``arrived``."""

    shards: list[Any]
    arrived: Any


class DeviceCopyStream:
    """Copies on a stream of its own. Nothing here waits for the device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = new_stream(device)

    def send(self, shards: list[Any]) -> Copies:
        """Start to copy, from page-locked memory: from other memory a copy makes the host wait."""
        locked = replaced(shards, Tensor, page_locked)  # torch keeps it until it is copied
        with within(self._stream):
            copies = replaced(locked, Tensor, self._copied)
        return Copies(copies, self._stream.record_event())

    def receive(self, sent: Copies) -> list[Any]:
        """Have the stream that computes wait for the copies."""
        computing = current_stream(self._device)
        computing.wait_event(sent.arrived)

        def lent(tensor: Tensor) -> Tensor:
            if tensor.device == self._device:
                # Its memory belongs to the other stream, which must not reuse it before this one is done with it.
                tensor.record_stream(computing)
            return tensor

        return list(replaced(sent.shards, Tensor, lent))

    def _copied(self, tensor: Tensor) -> Tensor:
        # What is on a device already was made on another stream: it is left to whoever computes.
        return tensor.to(self._device, non_blocking=True) if not is_accelerator(tensor.device) else tensor
