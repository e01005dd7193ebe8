"""The limits that a container or a Slurm job sets this process by control groups, versions 1 and 2."""

import math
import os
import platform
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

NO_LIMIT = 1 << 60
"""Version 1 writes "no limit" as a number that no machine has."""


@dataclass(frozen=True, slots=True)
class CgroupLimits:
    """The tightest limits on the way up to the root; None where there is none.

    Attributes:
        cpus: CPU seconds per second.
        memory_bytes: memory of all its processes together.
        free_bytes: what is left of the memory, where least is left; caches count as free.
    """

    cpus: float | None = None
    memory_bytes: int | None = None
    free_bytes: int | None = None


def read_limits(table: Path = Path("/proc/self/cgroup"), mount: Path = Path("/sys/fs/cgroup")) -> CgroupLimits:
    """The limits of this process.

    Args:
        table: the file that says which groups the process is in.
        mount: the folder that has the groups.
    """
    if not table.exists():
        return CgroupLimits()
    cpus: list[float] = []
    memory: list[int] = []
    free: list[int] = []
    for line in table.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        for folder in _up_to_root(mount, controllers, path):
            cpus += _cpus(folder)
            limits = _memory(folder)
            memory += limits
            free += [max(limit - _used(folder), 0) for limit in limits]
    return CgroupLimits(min(cpus, default=None), min(memory, default=None), min(free, default=None))


def _up_to_root(mount: Path, controllers: str, path: str) -> Iterator[Path]:
    root = mount / controllers.removeprefix("name=") if controllers else mount
    folder = root / path.lstrip("/")
    while folder != root and root in folder.parents:
        yield folder
        folder = folder.parent
    yield root


def _cpus(folder: Path) -> list[float]:
    if words := _words(folder / "cpu.max"):
        quota, period = words
    else:
        quota = " ".join(_words(folder / "cpu.cfs_quota_us")) or "max"
        period = " ".join(_words(folder / "cpu.cfs_period_us")) or "1"
    return [] if quota in ("max", "-1") else [int(quota) / int(period)]


def _memory(folder: Path) -> list[int]:
    words = _words(folder / "memory.max") or _words(folder / "memory.limit_in_bytes") or ["max"]
    return [] if words[0] == "max" or int(words[0]) >= NO_LIMIT else [int(words[0])]


def _used(folder: Path) -> int:
    """Bytes that the kernel cannot take back at once: without the pages of files that nobody has read lately."""
    words = _words(folder / "memory.current") or _words(folder / "memory.usage_in_bytes") or ["0"]
    about = _words(folder / "memory.stat")
    parts = dict(zip(about[::2], about[1::2], strict=False))
    # In version 1 only the totals are of the groups below, too.
    return int(words[0]) - int(parts.get("total_inactive_file", parts.get("inactive_file", "0")))


def _words(path: Path) -> list[str]:
    return path.read_text().split() if path.is_file() else []


# Processors: how many cores this process may use, and what they are.


CORES = "UNISONO_CORES"
"""The variable by which a launcher that pins its workers tells them how many cores they share."""


def usable_cores() -> int:
    """Those it may run on, or shares with others that are pinned as it is; no more than its control groups allow."""
    told = os.environ.get(CORES, "")
    if re.fullmatch("[1-9][0-9]{0,5}", told):
        return cores_within(read_limits(), int(told))
    mine = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return cores_within(read_limits(), mine)


def cores_within(limits: CgroupLimits, cores: int) -> int:
    """How many of these cores limits allow; at least 1."""
    return cores if limits.cpus is None else max(1, min(cores, math.floor(limits.cpus)))


def leave_too_few_cores(threads: int) -> None:
    """Run on all cores, if a launcher that did not know of so many threads has pinned this process to fewer."""
    if CORES in os.environ and threads > len(os.sched_getaffinity(0)):
        os.sched_setaffinity(0, range(os.cpu_count() or 1))


def processor() -> str:
    """The model of this host's processors."""
    table = Path("/proc/cpuinfo")
    if table.exists():
        for line in table.read_text(encoding="utf-8", errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()
