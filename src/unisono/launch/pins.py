"""Which cores a host has for its workers, and how a launcher pins them to these, anew when one comes or goes."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from unisono.host.machine import CORES, usable_cores

Cpus = frozenset[int]
"""Numbers of hardware threads, as the kernel counts them."""

MOST_CPUS = 2**16
OPENMP = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")
"""The variables by which a person has OpenMP place its threads."""


@dataclass(frozen=True, slots=True)
class Topology:
    """The processors of a host: the cores of each NUMA node, each with its hardware threads."""

    nodes: tuple[tuple[Cpus, ...], ...]

    @property
    def cpus(self) -> Cpus:
        """All hardware threads."""
        return frozenset().union(*(core for node in self.nodes for core in node))

    @classmethod
    def read(cls, system: Path = Path("/sys/devices/system")) -> Topology | None:
        """What the kernel says in ``cpu`` and ``node`` of a folder; None if it says nothing that fits together."""
        online = _cpus_in(system / "cpu" / "online")
        cores = {_siblings(system / "cpu" / f"cpu{cpu}" / "topology") & online for cpu in online}
        nodes = [_cpus_in(path / "cpulist") & online for path in sorted(system.glob("node/node[0-9]*"))] or [online]
        of_node = tuple(tuple(sorted((core for core in cores if core <= node), key=min)) for node in nodes if node)
        topology = cls(tuple(node for node in of_node if node))
        return topology if online and topology.cpus == online and sum(map(len, cores)) == len(online) else None


def _siblings(topology: Path) -> Cpus:
    """The hardware threads of a core, by the newer name or the older one."""
    return _cpus_in(topology / "core_cpus_list") or _cpus_in(topology / "thread_siblings_list")


def _cpus_in(path: Path) -> Cpus:
    """``0-3,8`` as numbers; none if the file is missing or says something else."""
    try:
        text = path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return frozenset()
    if not re.fullmatch(r"[0-9]{1,5}(-[0-9]{1,5})?(,[0-9]{1,5}(-[0-9]{1,5})?)*", text):
        return frozenset()
    ends = [[int(number) for number in part.split("-")] for part in text.split(",")]
    return frozenset(cpu for part in ends for cpu in range(part[0], part[-1] + 1) if cpu < MOST_CPUS)


@dataclass(frozen=True, slots=True)
class Machine:
    """All that decides whether workers are pinned at all.

    Attributes:
        topology: the processors; None if they are not known.
        allowed: the hardware threads that the launcher may run on.
        cores: the number of cores whose time its control group gives it.
    """

    topology: Topology | None
    allowed: Cpus
    cores: int
    variables: Mapping[str, str]
    has_gpus: bool = False

    def obstacle(self, *, to_cores: bool) -> str:
        """Why workers are not pinned, to cores of their own or to NUMA nodes; empty if they may be."""
        if self.topology is None:
            return "the kernel does not say what the processors are"
        if self.allowed != self.topology.cpus:
            return "somebody has chosen the cores of this launcher already (taskset, a container, a batch system)"
        if self.cores < len(self.allowed):
            return f"a control group gives {self.cores} of {len(self.allowed)} cores' time, of whichever cores"
        if placed := next((name for name in OPENMP if self.variables.get(name)), ""):
            return f"{placed} says where threads run"
        if len(self.topology.nodes) == 1:
            return "" if to_cores else "all cores have the same memory"
        return "it is not known which NUMA node is nearest to which GPU" if self.has_gpus else ""


@dataclass(frozen=True, slots=True)
class Tenant:
    """A worker that runs here.

    Attributes:
        node: the place of its NUMA node among those of the topology. It stays there, with its memory.
        processes: its process, or one for each of its devices, by their ids.
    """

    node: int
    processes: tuple[int, ...]


def node_for(topology: Topology, tenants: Sequence[Tenant]) -> int:
    """The NUMA node of a new worker: where the fewest processes share a core, the first of several."""
    there = [
        sum(len(tenant.processes) for tenant in tenants if tenant.node == node) for node in range(len(topology.nodes))
    ]
    return min(range(len(there)), key=lambda node: (there[node] + 1) / len(topology.nodes[node]))


def cpus_of(topology: Topology, tenants: Sequence[Tenant], threads: int, *, to_cores: bool) -> dict[int, Cpus]:
    """The hardware threads of each process.

    Where the threads of all processes of a node need more than it has, nobody is pinned: the kernel shares better. With
    ``to_cores`` each process gets cores of its own, with all of their hardware threads, as equal shares as can be.
    """
    pinned: dict[int, Cpus] = {}
    for number, cores in enumerate(topology.nodes):
        whole = frozenset[int]().union(*cores)
        there = [process for tenant in tenants if tenant.node == number for process in tenant.processes]
        if len(there) * threads > len(whole):
            return {process: topology.cpus for tenant in tenants for process in tenant.processes}
        shares = [
            cores[len(cores) * at // len(there) : len(cores) * (at + 1) // len(there)] for at in range(len(there))
        ]
        own = [frozenset[int]().union(*share) for share in shares]
        is_enough = to_cores and all(len(cpus) >= threads for cpus in own)
        pinned |= {process: own[at] if is_enough else whole for at, process in enumerate(there)}
    return pinned


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
        to_cores: whether each process gets cores of its own, within a NUMA node.
        obstacle: the reason why nobody is pinned although a person has asked for it.
    """

    topology: Topology | None = None
    threads: int = 1
    to_cores: bool = False
    obstacle: str = ""

    @classmethod
    def of_this_host(cls, wish: bool | None, threads: int) -> Pinning:
        """What there is, and may be done. None as a wish pins workers to NUMA nodes where there are several."""
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
    """The pins of one launcher's workers; ``host`` is a name that only one launcher on a host can have."""

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
        kept = {name: replace(tenant, processes=self._left(tenant)) for name, tenant in self._tenants.items()}
        self._tenants = {name: tenant for name, tenant in kept.items() if tenant.processes}
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
