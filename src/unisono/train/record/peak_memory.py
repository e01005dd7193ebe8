"""The most memory that a worker has needed."""

from __future__ import annotations

import resource
import sys
from pathlib import Path
from typing import Any

import torch

STATUS = Path("/proc/self/status")
MIB = 2**20


def peak_memory(device: torch.device) -> dict[str, Any]:
    """What this process has needed at most so far, in MiB: of the host's memory, and of its device's if it has any."""
    on_device = torch.cuda.max_memory_reserved(device) / MIB if device.type == "cuda" else None
    return {
        "device": str(device),
        "peak_memory_mib": round(host_memory_mib(), 1),
        "peak_device_memory_mib": None if on_device is None else round(on_device, 1),
    }


def host_memory_mib() -> float:
    """The largest resident set of this process, in MiB."""
    # Linux hands the maximum in rusage on to whatever a process starts; this one is the program's own.
    if sys.platform == "linux" and STATUS.exists():
        for line in STATUS.read_text(encoding="utf-8").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) / 1024
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most / MIB if sys.platform == "darwin" else most / 1024
