"""The memory that processes need, seen from inside and outside, and the memory that the host has left.

A resource limit would not do: RLIMIT_AS counts addresses, of which torch and CUDA reserve many times what they use,
and RLIMIT_DATA counts no shared memory; both make allocations fail in places that were never tested for it. A control
group needs rights. So the launcher looks itself, at what Linux keeps anyway: the largest resident set so far.
"""

from __future__ import annotations

import os
import resource
import sys
from contextlib import suppress
from pathlib import Path

import psutil

from unisono.host.cgroup import CgroupLimits

MIB = 2**20
KIB_PER_MIB = 1024
LOOK_S = 0.05
"""Seconds between two looks."""

FIRST_TO_GO = "1000"
"""For the kernel's choice of whom to end when the whole machine has no memory left."""


def peak_mib(pid: int) -> float:
    """What a process needed at most, and what its children have to themselves now, in MiB; 0 if it has ended."""
    with suppress(OSError, psutil.Error):
        return own_peak_mib(pid) + sum(_alone_mib(child) for child in _children(pid))
    return 0.0


def offer(pid: int) -> None:
    """Should the machine run out of memory, the kernel ends this process rather than others."""
    with suppress(OSError):
        Path(f"/proc/{pid}/oom_score_adj").write_text(FIRST_TO_GO)


def own_peak_mib(pid: int) -> float:
    """The largest resident set that a process has had by itself, in MiB.

    Raises:
        OSError: there is no such process.
        psutil.Error: likewise.
    """
    status = Path(f"/proc/{pid}/status")
    if sys.platform == "linux" and status.exists():
        # Not from rusage: Linux hands that on to whatever a process starts.
        for line in status.read_text(encoding="utf-8").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) / KIB_PER_MIB
    if pid != os.getpid():
        return float(psutil.Process(pid).memory_info().rss) / MIB  # 0 if nobody has asked for its exit code yet
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (MIB if sys.platform == "darwin" else KIB_PER_MIB)


def _children(pid: int) -> list[int]:
    if sys.platform == "linux":  # psutil would look at every process of the machine
        files = Path(f"/proc/{pid}/task").glob("*/children")
        return [int(word) for file in files for word in file.read_text(encoding="utf-8").split()]
    return [child.pid for child in psutil.Process(pid).children()]


def _alone_mib(pid: int) -> float:
    with suppress(psutil.Error):  # it has ended meanwhile
        return float(psutil.Process(pid).memory_full_info().uss) / MIB
    return 0.0


def room_mib(limits: CgroupLimits) -> float:
    """The memory that processes may take now: of the machine, and within the limits of their control group."""
    left = limits.free_bytes
    free = float(psutil.virtual_memory().available)
    return (free if left is None else min(free, left)) / MIB
