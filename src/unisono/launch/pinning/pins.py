"""Pins the workers of a launcher to cores, anew whenever one comes or goes."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from unisono.host.cgroup import CORES, usable_cores
from unisono.launch.pinning.layout import Cpus, Machine, Tenant, Topology, cpus_of, node_for

GPUS = (Path("/proc/driver/nvidia/gpus"), Path("/dev/kfd"))
HOST = "\0unisono-pins"
"""The name that the one launcher on a host has which pins. The kernel forgets it when that ends, however it does."""

MOST_PASSES = 5
"""Over the threads of a worker: it starts new ones meanwhile."""


@dataclass(frozen=True, slots=True)
class Pinning:
    """The decision of a launcher to pin its workers, or not to.

    Attributes:
        topology: the processors; None if nobody is pinned.
        threads: the threads of each process.
        to_cores: whether each process gets cores of its own, within a NUMA node.
        obstacle: the reason why nobody is pinned although a person has asked for it.
    """

    topology: Topology | None = None
    threads: int = 1
    to_cores: bool = False
    obstacle: str = ""

    @classmethod
    def of_this_host(cls, wish: bool | None, threads: int) -> Pinning:
        """What there is, and may be done.

        Args:
            wish: whether workers are pinned to cores; None pins them to NUMA nodes where there are several.
            threads: the threads of each process.
        """
        if wish is False or not hasattr(os, "sched_setaffinity"):
            return cls()
        allowed = frozenset(os.sched_getaffinity(0))
        has_gpus = any(path.exists() for path in GPUS)
        machine = Machine(Topology.read(), allowed, usable_cores(), os.environ, has_gpus=has_gpus)
        obstacle = machine.obstacle(to_cores=bool(wish))
        if obstacle:
            return cls(obstacle=obstacle if wish else "")
        return cls(machine.topology, threads, bool(wish))

    @property
    def variables(self) -> dict[str, str]:
        """What workers are told: how many cores they share, since they see only those that they run on."""
        return {} if self.topology is None else {CORES: str(len(self.topology.cpus))}


class Pins:
    """The pins of one launcher's workers.

    Args:
        pinning: the decision.
        say: a function that shows a line to the person at the terminal.
        host: the name that only one launcher on a host can have.
    """

    def __init__(self, pinning: Pinning, say: Callable[[str], None], host: str = HOST) -> None:
        self._pinning, self._say, self._host = pinning, say, host
        self._topology: Topology | None = None
        self._tenants: dict[str, Tenant] = {}
        self._pinned: dict[int, Cpus] = {}

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Until the context ends, workers are pinned, unless another launcher on this host pins its own."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as held:
            obstacle = self._pinning.obstacle
            if self._pinning.topology is not None:
                try:
                    held.bind(self._host)
                    self._topology = self._pinning.topology
                except OSError:
                    obstacle = "another job on this host pins its own"
            if obstacle:
                self._say(f"workers are not pinned to cores: {obstacle}")
            yield
            self._topology = None

    def began(self, worker: str, process: int) -> None:
        """A process of a worker has started."""
        if self._topology is None:
            return
        before = self._tenants.get(worker)
        node = before.node if before else node_for(self._topology, list(self._tenants.values()))
        self._tenants[worker] = Tenant(node, (*(before.processes if before else ()), process))
        self._pinned[process] = self._topology.cpus
        self._pin(self._topology)

    def ended(self, process: int) -> None:
        """A process has ended; its cores go to those that are left."""
        if self._topology is None:
            return
        self._pinned.pop(process, None)
        kept = {name: replace(one, processes=self._left(one)) for name, one in self._tenants.items()}
        self._tenants = {name: one for name, one in kept.items() if one.processes}
        self._pin(self._topology)

    def _left(self, tenant: Tenant) -> tuple[int, ...]:
        return tuple(process for process in tenant.processes if process in self._pinned)

    def _pin(self, topology: Topology) -> None:
        pinning = self._pinning
        wanted = cpus_of(topology, list(self._tenants.values()), pinning.threads, to_cores=pinning.to_cores)
        for process, cpus in wanted.items():
            if cpus != self._pinned[process]:
                move(process, self._pinned[process], cpus)
                self._pinned[process] = cpus


def move(process: int, before: Cpus, to: Cpus) -> None:
    """Have all threads of a process, and of those that it has started, run on other cores.

    A thread that runs elsewhere than where it was put has been placed by somebody who knows better, and is left alone.
    """
    for _ in range(MOST_PASSES):
        moved = [thread for thread in _threads(process) if _moved(thread, before, to)]
        if not moved:
            return


def _moved(thread: int, before: Cpus, to: Cpus) -> bool:
    with suppress(OSError):  # it has ended
        if os.sched_getaffinity(thread) == before:
            os.sched_setaffinity(thread, to)
            return True
    return False


def _threads(process: int) -> Iterator[int]:
    with suppress(OSError):
        for task in list(Path(f"/proc/{process}/task").iterdir()):
            yield int(task.name)
            with suppress(OSError):
                for child in (task / "children").read_text(encoding="ascii").split():
                    yield from _threads(int(child))
