"""The cores of a host, and how a launcher pins workers to them, anew whenever a worker comes or goes."""

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
        """The processors by the kernel's files in ``cpu`` and ``node``; None if these are missing or contradictory."""
        online = _cpus_in(system / "cpu" / "online")
        cores = {_siblings(system / "cpu" / f"cpu{cpu}" / "topology") & online for cpu in online}
        nodes = [_cpus_in(path / "cpulist") & online for path in sorted(system.glob("node/node[0-9]*"))] or [online]
        cores_of = tuple(tuple(sorted((core for core in cores if core <= node), key=min)) for node in nodes if node)
        topology = cls(tuple(node_cores for node_cores in cores_of if node_cores))
        return topology if online and topology.cpus == online and sum(map(len, cores)) == len(online) else None


def _siblings(topology: Path) -> Cpus:
    """The hardware threads of a core; older kernels have another name for the file."""
    return _cpus_in(topology / "core_cpus_list") or _cpus_in(topology / "thread_siblings_list")


def _cpus_in(path: Path) -> Cpus:
    """The numbers in a list such as ``0-3,8``; none if the file is missing or holds something else."""
    try:
        text = path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return frozenset()
    if not re.fullmatch(r"[0-9]{1,5}(-[0-9]{1,5})?(,[0-9]{1,5}(-[0-9]{1,5})?)*", text):
        return frozenset()
    ranges = [[int(number) for number in part.split("-")] for part in text.split(",")]
    return frozenset(cpu for ends in ranges for cpu in range(ends[0], ends[-1] + 1) if cpu < MOST_CPUS)


@dataclass(frozen=True, slots=True)
class Machine:
    """The facts about a host that decide whether workers are pinned.

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
            return "this launcher may not run on all cores (because of taskset, a container, or a batch system)"
        if self.cores < len(self.allowed):
            return f"a control group gives {self.cores} of {len(self.allowed)} cores' time, of whichever cores"
        if variable := next((name for name in OPENMP if self.variables.get(name)), ""):
            return f"{variable} says where threads run"
        if len(self.topology.nodes) == 1:
            return "" if to_cores else "all cores have the same memory"
        return "it is not known which NUMA node is nearest to which GPU" if self.has_gpus else ""


@dataclass(frozen=True, slots=True)
class Tenant:
    """A worker that runs here.

    Attributes:
        node: the index of its NUMA node in the topology. The worker stays on it, since its memory is there.
        processes: the id of its process, or one id for each of its devices.
    """

    node: int
    processes: tuple[int, ...]


def node_for(topology: Topology, tenants: Sequence[Tenant]) -> int:
    """The NUMA node of a new worker: the first of those on which the fewest processes share a core."""
    processes = [
        sum(len(tenant.processes) for tenant in tenants if tenant.node == node) for node in range(len(topology.nodes))
    ]
    return min(range(len(processes)), key=lambda node: (processes[node] + 1) / len(topology.nodes[node]))


def cpus_of(topology: Topology, tenants: Sequence[Tenant], threads: int, *, to_cores: bool) -> dict[int, Cpus]:
    """The hardware threads of each process.

    If the processes of one node have more threads than the node, no process is pinned: the kernel balances better. With
    ``to_cores`` each process gets cores of its own, with all of their hardware threads, as many as the others or one
    more.
    """
    pinned: dict[int, Cpus] = {}
    for node, cores in enumerate(topology.nodes):
        whole = frozenset[int]().union(*cores)
        processes = [process for tenant in tenants if tenant.node == node for process in tenant.processes]
        count = len(processes)
        if count * threads > len(whole):
            return {process: topology.cpus for tenant in tenants for process in tenant.processes}
        shares = [cores[len(cores) * at // count : len(cores) * (at + 1) // count] for at in range(count)]
        own = [frozenset[int]().union(*share) for share in shares]
        is_enough = to_cores and all(len(cpus) >= threads for cpus in own)
        pinned |= {process: own[at] if is_enough else whole for at, process in enumerate(processes)}
    return pinned


GPUS = (Path("/proc/driver/nvidia/gpus"), Path("/dev/kfd"))
HOST = "\0unisono-pins"
"""The abstract socket that the launcher which pins holds; the kernel frees it when the launcher ends in any way."""

MOST_PASSES = 5
"""The most passes over the threads of a worker, which starts new ones meanwhile."""


@dataclass(frozen=True, slots=True)
class Pinning:
    """The decision of a launcher to pin its workers, or not to.

    Attributes:
        topology: the processors; None if workers are not pinned.
        to_cores: whether each process gets cores of its own, within a NUMA node.
        obstacle: the reason why workers are not pinned although the person has asked for it; otherwise empty.
    """

    topology: Topology | None = None
    threads: int = 1
    to_cores: bool = False
    obstacle: str = ""

    @classmethod
    def of_this_host(cls, wish: bool | None, threads: int) -> Pinning:
        """The decision for this host. A wish of None pins workers to NUMA nodes where there are several."""
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
        """The variable that says how many cores the workers share: each sees only those that it is pinned to."""
        return {} if self.topology is None else {CORES: str(len(self.topology.cpus))}


class Pins:
    """Pins the workers of one launcher; ``host`` is the name of a socket that only one launcher on a host can have."""

    def __init__(self, pinning: Pinning, say: Callable[[str], None], host: str = HOST) -> None:
        self._pinning, self._say, self._host = pinning, say, host
        self._topology: Topology | None = None
        self._tenants: dict[str, Tenant] = {}
        self._pinned: dict[int, Cpus] = {}

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Until the context ends, workers are pinned, unless another launcher on this host pins its own."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as lock:
            obstacle = self._pinning.obstacle
            if self._pinning.topology is not None:
                try:
                    lock.bind(self._host)
                    self._topology = self._pinning.topology
                except OSError:
                    obstacle = "another job on this host pins its own"
            if obstacle:
                self._say(f"workers are not pinned to cores: {obstacle}")
            yield
            self._topology = None

    def began(self, worker: str, process: int) -> None:
        """Pin a process of a worker that has started."""
        if self._topology is None:
            return
        before = self._tenants.get(worker)
        node = before.node if before else node_for(self._topology, list(self._tenants.values()))
        self._tenants[worker] = Tenant(node, (*(before.processes if before else ()), process))
        self._pinned[process] = self._topology.cpus
        self._pin(self._topology)

    def ended(self, process: int) -> None:
        """Give the cores of a process that has ended to those that still run."""
        if self._topology is None:
            return
        self._pinned.pop(process, None)
        tenants = {name: replace(tenant, processes=self._running(tenant)) for name, tenant in self._tenants.items()}
        self._tenants = {name: tenant for name, tenant in tenants.items() if tenant.processes}
        self._pin(self._topology)

    def _running(self, tenant: Tenant) -> tuple[int, ...]:
        return tuple(process for process in tenant.processes if process in self._pinned)

    def _pin(self, topology: Topology) -> None:
        pinning = self._pinning
        cpus_by_process = cpus_of(topology, list(self._tenants.values()), pinning.threads, to_cores=pinning.to_cores)
        for process, cpus in cpus_by_process.items():
            if cpus != self._pinned[process]:
                move(process, self._pinned[process], cpus)
                self._pinned[process] = cpus


def move(process: int, before: Cpus, to: Cpus) -> None:
    """Have all threads of a process, and of the processes that it has started, run on other cores.

    A thread with another affinity than ``before`` was placed by the script or a library, and stays there.
    """
    for _ in range(MOST_PASSES):
        moved = [thread for thread in _threads(process) if _move_thread(thread, before, to)]
        if not moved:
            return


def _move_thread(thread: int, before: Cpus, to: Cpus) -> bool:
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
