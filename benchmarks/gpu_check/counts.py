"""What a device is asked for while a job trains: how often the host waits for it, and how many bytes live on it."""

from typing import Any, Protocol

import torch
from torch.profiler import ProfilerActivity, profile

WAITING = {
    *("cudaStreamSynchronize", "cudaEventSynchronize", "cudaDeviceSynchronize", "cudaMemcpy"),
    *("cuStreamSynchronize", "cuEventSynchronize", "cuCtxSynchronize"),
}
"""Calls in which the host waits. Copies that torch makes wait in one of them, if they do."""


class Counter(Protocol):
    """Counts host waits."""

    def start(self) -> None:
        """Begin to count."""

    def stop(self) -> int:
        """Host waits since then."""


class Profiled:
    """Those that torch's profiler hears of, in all threads of this process."""

    def __init__(self) -> None:
        self._profiler = profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA])

    def start(self) -> None:
        """Begin to count."""
        self._profiler.start()

    def stop(self) -> int:
        """Host waits since then.

        Raises:
            RuntimeError: the profiler hears of no calls of CUDA here.
        """
        self._profiler.stop()
        profiler: Any = self._profiler.profiler
        names = [event.name() for event in profiler.kineto_results.events()]
        if not any(name.startswith(("cudaLaunchKernel", "cuLaunchKernel")) for name in names):
            raise RuntimeError("torch's profiler hears of no calls of CUDA here")
        return sum(name in WAITING for name in names)


class Simulated:
    """Those that the simulated accelerator has counted."""

    def __init__(self) -> None:
        self._begun = 0

    def start(self) -> None:
        """Begin to count."""
        self._begun = self._counted()

    def stop(self) -> int:
        """Host waits since then."""
        return self._counted() - self._begun

    def _counted(self) -> int:
        from fakedev import _C  # type: ignore[import-not-found]

        return int(_C.counts().get("host waits", 0))


def counter_of(device: torch.device) -> Counter | None:
    """What counts the waits for a device; None for a kind of which nobody knows how."""
    kinds: dict[str, type[Any]] = {"cuda": Profiled, "fakegpu": Simulated}
    return kinds[device.type]() if device.type in kinds else None


def live_bytes(device: torch.device) -> int:
    """The bytes that tensors of this process have on a device, once it has done all that it was given."""
    torch.accelerator.synchronize(device)
    return int(torch.get_device_module(device).memory_allocated(device))
