"""Copying batches to the device that computes."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from operator import methodcaller
from typing import Any, Protocol

import torch
from torch import Tensor

from unisono.data.loading import Loaded, Processes, load
from unisono.data.shards import ShardSource, ShardsRequest
from unisono.data.slots import replaced
from unisono.device import current_stream, in_stream, in_use, is_accelerator, new_stream, page_locked


def to_device(batch: Any, device: torch.device) -> Any:
    """Return a batch with all its tensors on ``device``: tensors, and tuples, lists and mappings of them."""
    if device.type == "cpu" and in_use() is None:  # this process uses no accelerator: its tensors are on the CPU
        return batch
    return replaced(batch, Tensor, methodcaller("to", device, non_blocking=True))


def prefetch(
    source: ShardSource, requests: Iterator[ShardsRequest], processes: Processes, device: torch.device
) -> Loaded:
    """Load steps for a device: the CPU uses batches where they were loaded, other devices get copies."""
    if not is_accelerator(device):
        return load(source, requests, processes)
    return Prefetched(load(source, requests, processes), DeviceCopyStream(device))


class CopyStream(Protocol):
    """Copies to a device, beside the computation."""

    def send(self, shards: list[Any]) -> Any:
        """Start to copy a step's shards, without waiting. Returns what :meth:`receive` needs."""

    def receive(self, sent: Any) -> list[Any]:
        """Return the shards on the device, for computations that are started after this call."""


class Prefetched:
    """Loads steps for a device: while one step is computed, the next one is copied if it is loaded by then."""

    def __init__(self, loaded: Loaded, stream: CopyStream) -> None:
        self._loaded = loaded
        self._stream = stream
        self._coming: Future[Any] | None = None

    def __next__(self) -> list[Any]:
        """Return the next step's shards, and start to copy those of the step after it."""
        copying = self._coming or self._sent()
        self._coming = None
        shards = self._stream.receive(copying.result())
        if self._loaded.is_ready():
            self._coming = self._sent()
        return shards

    def is_ready(self) -> bool:
        """Whether the next step's shards are being copied, or could be."""
        return self._coming is not None or self._loaded.is_ready()

    def close(self) -> None:
        """End loading."""
        self._loaded.close()

    def _sent(self) -> Future[Any]:
        copying: Future[Any] = Future()
        try:
            copying.set_result(self._stream.send(next(self._loaded)))
        except Exception as error:  # noqa: BLE001 (raised when the step that it belongs to is asked for)
            copying.set_exception(error)
        return copying


@dataclass(frozen=True, slots=True)
class Copies:
    """A step's shards on an accelerator, usable once ``arrived``."""

    shards: list[Any]
    arrived: Any


class DeviceCopyStream:
    """Copies on a stream of its own. No call waits for the device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = new_stream(device)

    def send(self, shards: list[Any]) -> Copies:
        """Start to copy, from page-locked memory: a copy from other memory makes the host wait."""
        locked = replaced(shards, Tensor, page_locked)  # torch keeps this memory until it is copied
        with in_stream(self._stream):
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
        # A tensor that is on a device already was made on another stream: the computation moves it if it has to.
        return tensor.to(self._device, non_blocking=True) if not is_accelerator(tensor.device) else tensor
