"""The processes of a job, and what they use: memory, files, threads."""

import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Literal

import psutil

from benchmarks.figures import Ratio, bootstrap

Role = Literal["agent", "coordinator", "template", "guard", "oldest worker", "worker", "other"]

WARM_UP_S = 20.0
"""Of a process's life, in which it grows to its size."""

BLOCK = 12
"""Looks that are drawn together: neighbours are alike."""

MB = 1e6
END_S = 10.0


@dataclass(frozen=True, slots=True)
class Process:
    """What a process uses.

    Attributes:
        role: of it.
        pid: of it.
        rss: MB, what it shares included.
        private: MB that are its own, files left out.
        files: descriptors that are open.
        threads: of it.
    """

    role: Role
    pid: int
    rss: float
    private: float
    files: int
    threads: int


@dataclass(frozen=True, slots=True)
class Sample:
    """What all use at one time.

    Attributes:
        at: seconds after the beginning.
        processes: that were there.
        shared: MB of memory that they share, each counted once.
        segments: descriptors of such memory.
    """

    at: float
    processes: list[Process]
    shared: float
    segments: int


class Family:
    """A launcher and all that it has started, at any time.

    Args:
        launcher: its process id.
        folder: of the run.
    """

    def __init__(self, launcher: int, folder: Path) -> None:
        self._launcher, self._folder = psutil.Process(launcher), folder
        self._seen: dict[tuple[int, float], psutil.Process] = {}

    def look(self, at: float) -> Sample:
        """Look at all of them."""
        alive = [self._launcher, *self._launcher.children(recursive=True)]
        self._seen |= {(one.pid, one.create_time()): one for one in alive}
        processes: list[Process] = []
        shared, segments = 0.0, 0
        roles = self._roles(alive)
        for one in alive:
            with suppress(psutil.NoSuchProcess, OSError, KeyError):  # it has ended, or is just ending
                processes.append(_used(one.pid, roles[one.pid]))
                shared += _shared(one.pid)
                segments += _segments(one.pid)
        return Sample(at, processes, shared, segments)

    def left(self) -> list[str]:
        """Who is still there, once the launcher has ended."""
        _, alive = psutil.wait_procs(list(self._seen.values()), timeout=END_S)
        return [f"{one.pid} ({one.name()})" for one in alive if one.is_running()]

    def _roles(self, alive: Sequence[psutil.Process]) -> dict[int, Role]:
        parents: dict[int, int] = {}
        words: dict[int, list[str]] = {}
        for one in alive:
            with suppress(psutil.Error):
                parents[one.pid], words[one.pid] = one.ppid(), one.cmdline()
        template = next((pid for pid, said in words.items() if "unisono.launch.fork_server" in said), -1)
        roles: dict[int, Role] = {}
        for one in alive:
            said = words.get(one.pid, [])
            if one.pid == self._launcher.pid:
                roles[one.pid] = "agent"
            elif "unisono.membership.server" in said:
                roles[one.pid] = "coordinator"
            elif any(word.endswith("guard.py") for word in said):
                roles[one.pid] = "guard"
            elif parents.get(one.pid) == template:
                roles[one.pid] = "worker"
            else:
                roles[one.pid] = "template" if one.pid == template else "other"
        workers = [one for one in alive if roles[one.pid] == "worker"]
        if workers:
            roles[min(workers, key=lambda one: (one.create_time(), one.pid)).pid] = "oldest worker"
        return roles


def growth_per_hour(series: Sequence[tuple[float, int, float]]) -> Ratio | None:
    """How much more it gets in an hour.

    Args:
        series: seconds, process id, value. What differs between processes is no growth.

    Returns:
        the slope, with the interval that drawing blocks of neighbours again gives; None if nothing can be said.
    """
    centred: list[tuple[float, float]] = []
    for _, group in groupby(sorted(series, key=lambda one: (one[1], one[0])), key=lambda one: one[1]):
        life = list(group)
        late = [(at, value) for at, _, value in life if at - life[0][0] >= WARM_UP_S]
        if len(late) > 2:
            middle = [sum(column) / len(late) for column in zip(*late, strict=True)]
            centred += [(at - middle[0], value - middle[1]) for at, value in late]
    blocks = [centred[begin : begin + BLOCK] for begin in range(0, len(centred), BLOCK)]
    if len(blocks) < 2:
        return None
    return bootstrap(blocks, lambda drawn: 3600 * _slope([one for block in drawn for one in block]))


def _slope(points: Sequence[tuple[float, float]]) -> float:
    spread = sum(x * x for x, _ in points)
    return sum(x * y for x, y in points) / spread if spread else 0.0


def _used(pid: int, role: Role) -> Process:
    told = dict(_fields(Path(f"/proc/{pid}/status")))
    return Process(
        role=role,
        pid=pid,
        rss=told["VmRSS"] * 1024 / MB,
        private=told["RssAnon"] * 1024 / MB,
        files=len(list(Path(f"/proc/{pid}/fd").iterdir())),
        threads=told["Threads"],
    )


def _shared(pid: int) -> float:
    # A page that n processes map counts 1/n for each of them.
    return dict(_fields(Path(f"/proc/{pid}/smaps_rollup"))).get("Pss_Shmem", 0) * 1024 / MB


def _segments(pid: int) -> int:
    names = []
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            names.append(str(descriptor.readlink()))
    return sum(name.startswith("/memfd:") or "/shm/" in name for name in names)


def _fields(path: Path) -> Iterator[tuple[str, int]]:
    for line in path.read_text().splitlines():
        if found := re.match(r"(\w+):\s+(\d+)", line):
            yield found[1], int(found[2])
