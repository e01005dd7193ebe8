"""Handing a tensor from one CUDA stream to another without stopping the device. On the CPU there is nothing to do."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch


class Handover:
    """A moment in the current stream of a device, for another stream to wait for.

    Args:
        device: where the tensors live that are handed over.
    """

    def __init__(self, device: torch.device) -> None:
        self._event: Any = None
        if device.type == "cuda":
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(device))
        self.device = device

    def accept(self) -> None:
        """What the current stream does from now on happens after that moment."""
        if self._event is not None:
            torch.cuda.current_stream(self.device).wait_event(self._event)


def beside(device: torch.device) -> AbstractContextManager[Any]:
    """Work in a stream of its own, beside the one that computes."""
    return torch.cuda.stream(_stream(device)) if device.type == "cuda" else nullcontext()


@cache
def _stream(device: torch.device) -> Any:
    return torch.cuda.Stream(device)
