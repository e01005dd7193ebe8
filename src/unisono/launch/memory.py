"""How much memory workers need, seen from outside, and a limit to it.

A resource limit would not do: RLIMIT_AS counts addresses, of which torch and CUDA reserve many times what they use,
and RLIMIT_DATA counts no shared memory; both make allocations fail in places that were never tested for it. A control
group needs rights. So the launcher looks itself, at what Linux keeps anyway: the largest resident set so far.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path

import psutil

from unisono.membership.cgroup import read_limits

MIB = 2**20
KIB_PER_MIB = 1024
LOOK_S = 0.05
"""Seconds between two looks."""

FIRST_TO_GO = "1000"
"""For the kernel's choice of whom to end when the whole machine has no memory left."""


def peak_mib(pid: int) -> float:
    """What a process needed at most, and what its children have to themselves now, in MiB; 0 if it has ended."""
    with suppress(OSError, psutil.Error):
        return _own_mib(pid) + sum(_alone_mib(child) for child in _children(pid))
    return 0.0


def offer(pid: int) -> None:
    """Should the machine run out of memory, the kernel ends this process rather than others."""
    with suppress(OSError):
        Path(f"/proc/{pid}/oom_score_adj").write_text(FIRST_TO_GO)


def _own_mib(pid: int) -> float:
    if sys.platform == "linux":
        for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) / KIB_PER_MIB
        return 0.0  # it has ended, and nobody has asked for its exit code yet
    return float(psutil.Process(pid).memory_info().rss) / MIB


def _children(pid: int) -> list[int]:
    if sys.platform == "linux":  # psutil would look at every process of the machine
        files = Path(f"/proc/{pid}/task").glob("*/children")
        return [int(word) for file in files for word in file.read_text(encoding="utf-8").split()]
    return [child.pid for child in psutil.Process(pid).children()]


def _alone_mib(pid: int) -> float:
    with suppress(psutil.Error):  # it has ended meanwhile
        return float(psutil.Process(pid).memory_full_info().uss) / MIB
    return 0.0


def room_mib() -> float:
    """The memory that processes may take now: of the machine, and of this process's control group."""
    left = read_limits().free_bytes
    free = float(psutil.virtual_memory().available)
    return (free if left is None else min(free, left)) / MIB
