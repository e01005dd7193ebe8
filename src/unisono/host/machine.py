"""The machine: limits of control groups, cores, memory, and on which paths its processors compute."""

from __future__ import annotations

import math
import os
import platform
import re
import resource
import shlex
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

# What a container or a Slurm job allows this process, by control groups of versions 1 and 2.

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
    """The limits of this process."""
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
    variable = os.environ.get(CORES, "")
    if re.fullmatch("[1-9][0-9]{0,5}", variable):
        return cores_within(read_limits(), int(variable))
    mine = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return cores_within(read_limits(), mine)


def cores_within(limits: CgroupLimits, cores: int) -> int:
    """How many of these cores limits allow; at least 1."""
    return cores if limits.cpus is None else max(1, min(cores, math.floor(limits.cpus)))


def unpin_from_too_few_cores(threads: int) -> None:
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


# The memory that processes need, seen from inside and outside, and the memory that the host has left.
#
# A resource limit would not do: RLIMIT_AS counts addresses, of which torch and CUDA reserve many times what they use,
# and RLIMIT_DATA counts no shared memory; both make allocations fail in places that were never tested for it. A control
# group needs rights. So the launcher looks itself, at what Linux keeps anyway: the largest resident set so far.

MIB = 2**20
KIB_PER_MIB = 1024
LOOK_S = 0.05
"""Seconds between two looks."""

FIRST_TO_GO = "1000"
"""For the kernel's choice of whom to end when the whole machine has no memory left."""


def peak_mib(pid: int) -> float:
    """What a process needed at most, and what its children have to themselves now, in MiB; 0 if it has ended."""
    import psutil  # commands that only ask for other things begin sooner without it

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
        import psutil

        return float(psutil.Process(pid).memory_info().rss) / MIB  # 0 if nobody has asked for its exit code yet
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (MIB if sys.platform == "darwin" else KIB_PER_MIB)


def _children(pid: int) -> list[int]:
    if sys.platform == "linux":  # psutil would look at every process of the machine
        files = Path(f"/proc/{pid}/task").glob("*/children")
        return [int(word) for file in files for word in file.read_text(encoding="utf-8").split()]
    import psutil

    return [child.pid for child in psutil.Process(pid).children()]


def _alone_mib(pid: int) -> float:
    import psutil

    with suppress(psutil.Error):  # it has ended meanwhile
        return float(psutil.Process(pid).memory_full_info().uss) / MIB
    return 0.0


def room_mib(limits: CgroupLimits) -> float:
    """The memory that processes may take now: of the machine, and within the limits of their control group."""
    import psutil

    left = limits.free_bytes
    free = float(psutil.virtual_memory().available)
    return (free if left is None else min(free, left)) / MIB


# The variables that have libraries compute on every processor as on an older one. They are read as torch is loaded.

PORTABLE: Mapping[str, str] = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_CBWR": "COMPATIBLE"}
"""For torch's own vectors, oneDNN (convolutions) and MKL (matrix products, LAPACK)."""

LEVEL = "UNISONO_NUMERICS"
"""The variable that asks for a level of numerics."""

AS_EXPORT = "export " + " ".join(f"{name}={shlex.quote(value)}" for name, value in PORTABLE.items())
"""As a shell takes them."""


def numerics_variables(level: str | None) -> dict[str, str]:
    """The variables that a process needs from its start, for a level of numerics."""
    return {LEVEL: level, **PORTABLE} if level == "portable" else {} if level is None else {LEVEL: level}


def missing_portable_variables(environ: Mapping[str, str]) -> list[str]:
    """What of these variables an environment lacks, as a person reads it."""
    return [
        f"{name} is {environ.get(name, 'not set')}" for name, value in PORTABLE.items() if environ.get(name) != value
    ]
