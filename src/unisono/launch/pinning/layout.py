"""Which cores workers get, decided from what the kernel says of the processors. Nothing is done here."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

Cpus = frozenset[int]
"""Numbers of hardware threads, as the kernel counts them."""

MOST_CPUS = 2**16
OPENMP = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")
"""The variables by which a person has OpenMP place its threads."""


@dataclass(frozen=True, slots=True)
class Topology:
    """The processors of a host.

    Attributes:
        nodes: the cores of each NUMA node, each with its hardware threads.
    """

    nodes: tuple[tuple[Cpus, ...], ...]

    @property
    def cpus(self) -> Cpus:
        """All hardware threads."""
        return frozenset().union(*(core for node in self.nodes for core in node))

    @classmethod
    def read(cls, system: Path = Path("/sys/devices/system")) -> Topology | None:
        """What the kernel says; None if it says nothing that fits together.

        Args:
            system: the folder of ``cpu`` and ``node``.
        """
        online = _cpus_in(system / "cpu" / "online")
        cores = {_siblings(system / "cpu" / f"cpu{cpu}" / "topology") & online for cpu in online}
        nodes = [_cpus_in(path / "cpulist") & online for path in sorted(system.glob("node/node[0-9]*"))] or [online]
        of_node = tuple(tuple(sorted((core for core in cores if core <= node), key=min)) for node in nodes if node)
        found = cls(tuple(node for node in of_node if node))
        return found if online and found.cpus == online and sum(map(len, cores)) == len(online) else None


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
        variables: the environment.
        has_gpus: whether the host has GPUs.
    """

    topology: Topology | None
    allowed: Cpus
    cores: int
    variables: Mapping[str, str]
    has_gpus: bool = False

    def obstacle(self, *, to_cores: bool) -> str:
        """Why workers are not pinned; empty if they may be.

        Args:
            to_cores: whether each gets cores of its own, within a NUMA node.
        """
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
    there = [sum(len(each.processes) for each in tenants if each.node == node) for node in range(len(topology.nodes))]
    return min(range(len(there)), key=lambda node: (there[node] + 1) / len(topology.nodes[node]))


def cpus_of(topology: Topology, tenants: Sequence[Tenant], threads: int, *, to_cores: bool) -> dict[int, Cpus]:
    """The hardware threads of each process.

    Where the threads of all processes of a node need more than it has, nobody is pinned: the kernel shares better.

    Args:
        topology: the processors.
        tenants: the workers that run now.
        threads: the threads of each process.
        to_cores: whether each gets cores of its own, with all of their hardware threads, as equal shares as can be.
    """
    found: dict[int, Cpus] = {}
    for number, cores in enumerate(topology.nodes):
        whole = frozenset[int]().union(*cores)
        there = [process for tenant in tenants if tenant.node == number for process in tenant.processes]
        if len(there) * threads > len(whole):
            return {process: topology.cpus for tenant in tenants for process in tenant.processes}
        shares = [
            cores[len(cores) * at // len(there) : len(cores) * (at + 1) // len(there)] for at in range(len(there))
        ]
        own = [frozenset[int]().union(*share) for share in shares]
        is_enough = to_cores and all(len(each) >= threads for each in own)
        found |= {process: own[at] if is_enough else whole for at, process in enumerate(there)}
    return found
