"""The host's limits by control groups, its cores and memory, and the instruction sets that libraries use on it."""

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
"""Numbers from here on mean "no limit" in version 1: more bytes than any machine has."""


@dataclass(frozen=True, slots=True)
class CgroupLimits:
    """The tightest limits of a process's control group and those above it; None where there is no limit.

    Attributes:
        cpus: the CPU seconds per second.
        memory_bytes: the bytes of memory of all processes together.
        free_bytes: the bytes of that memory that are free, in the group with the fewest; caches count as free.
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
    """The bytes that the kernel cannot free at once: those in use without pages of files that were not read lately."""
    words = _words(folder / "memory.current") or _words(folder / "memory.usage_in_bytes") or ["0"]
    statistics = _words(folder / "memory.stat")
    parts = dict(zip(statistics[::2], statistics[1::2], strict=False))
    # In version 1 only the totals include the groups below.
    return int(words[0]) - int(parts.get("total_inactive_file", parts.get("inactive_file", "0")))


def _words(path: Path) -> list[str]:
    return path.read_text().split() if path.is_file() else []


# Processors: how many cores this process may use, and their model.

CORES = "UNISONO_CORES"
"""The variable by which a launcher that pins its workers tells them how many cores they share."""


def usable_cores() -> int:
    """The number of cores that this process may use, or that pinned workers share, within its control groups."""
    variable = os.environ.get(CORES, "")
    if re.fullmatch("[1-9][0-9]{0,5}", variable):
        return cores_within(read_limits(), int(variable))
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return cores_within(read_limits(), allowed)


def cores_within(limits: CgroupLimits, cores: int) -> int:
    """The number of these cores that limits allow; at least 1."""
    return cores if limits.cpus is None else max(1, min(cores, math.floor(limits.cpus)))


def unpin_from_too_few_cores(threads: int) -> None:
    """Run on all cores if a launcher that did not know the number of threads has pinned this process to fewer."""
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


# The memory that processes use, measured by themselves or by others, and the free memory of the host.
#
# A resource limit would not do: RLIMIT_AS counts addresses, of which torch and CUDA reserve many times what they use,
# and RLIMIT_DATA counts no shared memory; both make allocations fail in places that were never tested for it. To make a
# control group needs rights. So the launcher itself reads what Linux records anyway: the largest resident set so far.

MIB = 2**20
KIB_PER_MIB = 1024
LOOK_S = 0.05
"""The seconds between two measurements."""

FIRST_TO_GO = "1000"
"""The score of the process that the kernel is to end first when the whole machine has no memory left."""


def peak_mib(pid: int) -> float:
    """The most memory that a process has used, and what its children alone use now, in MiB; 0 if it has ended."""
    import psutil  # here, so that commands that do not need it start sooner

    with suppress(OSError, psutil.Error):
        return own_peak_mib(pid) + sum(_alone_mib(child) for child in _children(pid))
    return 0.0


def offer(pid: int) -> None:
    """Have the kernel end this process before others if the machine runs out of memory."""
    with suppress(OSError):
        Path(f"/proc/{pid}/oom_score_adj").write_text(FIRST_TO_GO)


def own_peak_mib(pid: int) -> float:
    """The largest resident set that a process has had, without its children, in MiB.

    Raises:
        OSError: there is no such process, on Linux or for this process.
        psutil.Error: there is no such process, elsewhere.
    """
    status = Path(f"/proc/{pid}/status")
    if sys.platform == "linux" and status.exists():
        # Not from rusage: there a process begins with the peak of the one that started it.
        for line in status.read_text(encoding="utf-8").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) / KIB_PER_MIB
    if pid != os.getpid():
        import psutil

        return float(psutil.Process(pid).memory_info().rss) / MIB  # 0 if the process has ended and was not waited for
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (MIB if sys.platform == "darwin" else KIB_PER_MIB)


def _children(pid: int) -> list[int]:
    if sys.platform == "linux":  # psutil would read the entry of every process of the machine
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
    """The memory in MiB that is free for processes, on the machine and within the limits of their control group."""
    import psutil

    free = float(psutil.virtual_memory().available)
    return (free if limits.free_bytes is None else min(free, limits.free_bytes)) / MIB


# Variables that make libraries compute on every processor as on an older one. They are read when torch is loaded.

PORTABLE: Mapping[str, str] = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_CBWR": "COMPATIBLE"}
"""The variables of torch's own kernels, oneDNN (convolutions) and MKL (matrix products, LAPACK)."""

LEVEL = "UNISONO_NUMERICS"
"""The variable that asks for a level of numerics."""

AS_EXPORT = "export " + " ".join(f"{name}={shlex.quote(value)}" for name, value in PORTABLE.items())
"""The shell's command that sets these variables."""


def numerics_variables(level: str | None) -> dict[str, str]:
    """The variables that a process needs from its start for a level of numerics."""
    return {LEVEL: level, **PORTABLE} if level == "portable" else {} if level is None else {LEVEL: level}


def missing_portable_variables(environ: Mapping[str, str]) -> list[str]:
    """The variables of :data:`PORTABLE` that an environment lacks or sets otherwise, each as a sentence for people."""
    return [
        f"{name} is {environ.get(name, 'not set')}" for name, value in PORTABLE.items() if environ.get(name) != value
    ]
