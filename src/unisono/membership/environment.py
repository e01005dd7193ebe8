"""This worker's rank and host, read from its launcher's variables."""

from __future__ import annotations

import os
import re
import socket
import threading
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, replace

from unisono.errors import JobError
from unisono.received import short
from unisono.settings.reading import LAST_PORT, Variables

FIRST_SPECIAL_STEP = 0xFFFFFFF0
"""From this number on, Slurm's steps are no real ones: a batch script, an interactive shell."""

PORTS = range(15000, 30000)
"""The ports of which one is chosen by job and step: below those that systems give to outgoing connections."""


@dataclass(frozen=True, slots=True)
class RendezvousAddress:
    """The address at which the workers meet.

    Attributes:
        store_fd: on rank 0, the file descriptor of the listening socket that the launcher opened; else None.
    """

    address: str
    port: int
    store_fd: int | None = None

    def __str__(self) -> str:
        return f"[{self.address}]:{self.port}" if ":" in self.address else f"{self.address}:{self.port}"


@dataclass(frozen=True, slots=True)
class Environment:
    """A worker's rank and host among the workers that were started with it.

    Attributes:
        launcher: the launcher that started it: ``unisono``, ``torchrun``, ``env``, ``slurm`` or ``single``.
        rank: its rank, 0 … ``world_size`` - 1.
        rendezvous: the address at which the workers meet; None for a single worker.
        note: the assumptions that had to be made, for people; empty if there were none.
    """

    launcher: str
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    host: str
    rendezvous: RendezvousAddress | None = None
    note: str = ""

    def worker(self, devices: int) -> Environment:
        """The rank and host of this process's worker, where each so many processes are the devices of one worker.

        Raises:
            JobError: the processes, or those of this host, are no whole number of such workers.
        """
        for what, count in (("the job", self.world_size), (f"host {self.host}", self.local_world_size)):
            if count % devices:
                raise JobError(
                    f"devices_per_worker={devices}: {what} has {count} processes, which are no whole number of workers "
                    f"of {devices} devices each. All devices of a worker are on one host, since what they tell each "
                    f"other is not encrypted: start a multiple of {devices} processes on each host, or take fewer "
                    f"devices per worker"
                )
        if self.local_rank % devices != self.rank % devices:
            raise JobError(
                f"devices_per_worker={devices}: rank {self.rank} is number {self.local_rank} of host {self.host}. Give "
                f"the processes of a host neighbouring ranks"
            )
        return replace(
            self,
            rank=self.rank // devices,
            world_size=self.world_size // devices,
            local_rank=self.local_rank // devices,
            local_world_size=self.local_world_size // devices,
        )

    def device(self, devices: int) -> Environment:
        """The rank of this process among the devices of its worker, if each worker has so many."""
        rank = self.rank % devices
        return replace(self, rank=rank, world_size=devices, local_rank=rank, local_world_size=devices)

    def describe(self) -> str:
        """One line: ``torchrun: rank 2 of 4 on host a, rendezvous 10.0.0.1:29500``."""
        if self.launcher == "single":
            return f"single: one worker on host {self.host}"
        rendezvous = f", rendezvous {self.rendezvous}" if self.rendezvous else ""
        note = f" ({self.note})" if self.note else ""
        return f"{self.launcher}: rank {self.rank} of {self.world_size} on host {self.host}{rendezvous}{note}"


def device_name(worker: str, device: int) -> str:
    """The name of one of a worker's devices: the worker's name for the first one, ``w3.1`` for the second."""
    return f"{worker}.{device}" if device else worker


def recognise(environ: Mapping[str, str], host: str | None = None) -> Environment:
    """This worker's rank and host, by the first of ``LAUNCHERS`` that finds its variables; else a single worker's.

    Raises:
        JobError: a variable is missing, no number, or contradicts another; names it and its value.
    """
    variables = Variables(environ)
    host = host or socket.gethostname()
    for read_launcher in LAUNCHERS:
        if (environment := read_launcher(variables, host)) is not None:
            return environment
    # The worker of an elastic job learns its rank from the coordinator, and its place on this host from its agent.
    place = variables.count("UNISONO_LOCAL_RANK", "") if "UNISONO_LOCAL_RANK" in variables else 0
    return Environment("single", 0, 1, place, place + 1, host)


def _unisono(variables: Variables, host: str) -> Environment | None:
    """The environment by ``unisono run``, which opens the socket at which the workers meet before it starts them."""
    if "UNISONO_RANK" not in variables and "UNISONO_WORLD_SIZE" not in variables:
        return None
    because = "this worker was started by unisono run"
    rank, size = variables.rank("UNISONO_RANK", "UNISONO_WORLD_SIZE", because)
    local = variables.rank("UNISONO_LOCAL_RANK", "UNISONO_LOCAL_WORLD_SIZE", because)
    rendezvous = _unisono_store(variables, because) if size > 1 else None
    return Environment("unisono", rank, size, *local, host, rendezvous)


def _unisono_store(variables: Variables, because: str) -> RendezvousAddress:
    address, _, port = variables.text("UNISONO_STORE", because).rpartition(":")
    if not address or not re.fullmatch(r"[0-9]{1,5}", port) or int(port) > LAST_PORT:
        raise variables.refusal("UNISONO_STORE", "needs ADDRESS:PORT")
    inherited = "UNISONO_STORE_FD" in variables
    descriptor = variables.count("UNISONO_STORE_FD", because) if inherited else None
    return RendezvousAddress(address.strip("[]"), int(port), descriptor)


def _torchrun(variables: Variables, host: str) -> Environment | None:
    """The environment by ``torchrun``, whose agent sets all variables."""
    if "TORCHELASTIC_RUN_ID" not in variables:
        return None
    because = "this worker was started by torchrun (TORCHELASTIC_RUN_ID is set)"
    rank, size = variables.rank("RANK", "WORLD_SIZE", because)
    local = variables.rank("LOCAL_RANK", "LOCAL_WORLD_SIZE", because)
    return Environment("torchrun", rank, size, *local, host, _master(variables, size))


def _by_hand(variables: Variables, host: str) -> Environment | None:
    """The environment by the variables of ``torch.distributed``, set by hand or by a cluster's operator."""
    # A batch script often exports WORLD_SIZE and leaves the rank to Slurm's step.
    if "RANK" not in variables and ("WORLD_SIZE" not in variables or _is_slurm_step(variables)):
        return None
    because = f"{variables.describe('RANK', 'WORLD_SIZE')}: set both, or neither"
    rank, size = variables.rank("RANK", "WORLD_SIZE", because)
    rendezvous = _master(variables, size)
    address = "localhost" if rendezvous is None else rendezvous.address
    one_host = address == "localhost" or address.startswith(("127.", "::1"))
    local_rank, local_size, note = _local_by_hand(variables, rank, size, one_host)
    return Environment("env", rank, size, local_rank, local_size, host, rendezvous, note)


def _local_by_hand(variables: Variables, rank: int, size: int, one_host: bool) -> tuple[int, int, str]:
    """The local rank, the local world size, and a note. All workers must conclude alike, so only variables count."""
    if "LOCAL_WORLD_SIZE" in variables and "LOCAL_RANK" in variables:
        return *variables.rank("LOCAL_RANK", "LOCAL_WORLD_SIZE", ""), ""
    if "LOCAL_RANK" in variables:
        local = variables.count("LOCAL_RANK", "")
        if local >= size:
            raise JobError(f"LOCAL_RANK={local} and WORLD_SIZE={size} in the environment contradict each other")
        note = "" if one_host else f"LOCAL_WORLD_SIZE is not set: taking all {size} workers to be on one host"
        return local, size, note
    if one_host:
        return rank, size, ""
    return 0, 1, "LOCAL_RANK is not set: taking this worker to be the only one of its host"


def _is_slurm_step(variables: Variables) -> bool:
    """Whether this is a task of a real step; a batch script or a shell of salloc has SLURM_NTASKS and a step, too."""
    if not all(name in variables for name in ("SLURM_PROCID", "SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS")):
        return False
    return variables.count("SLURM_STEP_ID", "") < FIRST_SPECIAL_STEP


def _slurm(variables: Variables, host: str) -> Environment | None:
    """The environment by ``srun``, whose tasks are the workers; they meet on the first host of the step."""
    if not _is_slurm_step(variables):
        return None
    because = "this is a task of a Slurm step (SLURM_STEP_ID is set)"
    rank, size = variables.rank("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", because)
    if "WORLD_SIZE" in variables and variables.count("WORLD_SIZE", because) != size:
        raise JobError(
            f"WORLD_SIZE={variables.text('WORLD_SIZE', because)} and SLURM_STEP_NUM_TASKS={size} in the "
            f"environment contradict each other: leave WORLD_SIZE out, or start as many tasks"
        )
    local_rank = variables.count("SLURM_LOCALID", because)
    local_size, note = _local_size_of_slurm(variables, size, local_rank)
    node = variables.get("SLURMD_NODENAME") or host
    rendezvous = _rendezvous_of_slurm(variables, because) if size > 1 else None
    return Environment("slurm", rank, size, local_rank, local_size, node, rendezvous, note)


def _local_size_of_slurm(variables: Variables, size: int, local_rank: int) -> tuple[int, str]:
    text, node, counts = f"SLURM_STEP_NUM_TASKS={size}", 0, [size]
    note = f"SLURM_STEP_TASKS_PER_NODE is not set: taking all {size} workers to be on one host"
    if "SLURM_STEP_TASKS_PER_NODE" in variables and "SLURM_NODEID" in variables:
        per_node = variables.text("SLURM_STEP_TASKS_PER_NODE", "")
        node = variables.count("SLURM_NODEID", "")
        text = f"SLURM_STEP_TASKS_PER_NODE={short(per_node)}, SLURM_NODEID={node}"
        counts, note = tasks_per_node(per_node), ""
    if node >= len(counts) or local_rank >= counts[node]:
        raise JobError(f"{text} and SLURM_LOCALID={local_rank} in the environment contradict each other")
    return counts[node], note


def _rendezvous_of_slurm(variables: Variables, because: str) -> RendezvousAddress:
    address = variables.get("MASTER_ADDR") or first_host(variables.text("SLURM_STEP_NODELIST", because))
    if "MASTER_PORT" in variables:
        return RendezvousAddress(address, variables.port("MASTER_PORT", because))
    job = variables.count("SLURM_JOB_ID", because)
    step = variables.count("SLURM_STEP_ID", because)
    # Two jobs that share a host, or two steps of one job, must not meet at the same port.
    return RendezvousAddress(address, PORTS[(job * 31 + step) % len(PORTS)])


LAUNCHERS = (_unisono, _torchrun, _by_hand, _slurm)
"""The launchers in the order in which they are tried: one that runs inside another, as torchrun in Slurm, is first."""


def first_host(nodelist: str) -> str:
    """The first host of Slurm's list: ``gpu03`` of ``gpu[03-04,07],x1``.

    Raises:
        JobError: the text is no such list.
    """
    first = re.match(r"(?:[^\s,\[\]]|\[[0-9][-0-9,]*\])+(?=,|$)", nodelist)
    if first is None:
        raise JobError(f"SLURM_STEP_NODELIST={short(nodelist)} in the environment: no list of hosts")
    return re.sub(r"\[([0-9]+)[^\]]*\]", r"\1", first.group())


def tasks_per_node(text: str) -> list[int]:
    """The number of tasks of each host of a Slurm step: ``[2, 2, 1]`` of ``2(x2),1``.

    Raises:
        JobError: the text is no such list.
    """
    counts = []
    for part in text.split(","):
        counted = re.fullmatch(r"([0-9]{1,6})(?:\(x([0-9]{1,6})\))?", part)
        if counted is None:
            raise JobError(f"SLURM_STEP_TASKS_PER_NODE={short(text)} in the environment: no list of counts")
        counts += [int(counted[1])] * int(counted[2] or 1)
    return counts


def _master(variables: Variables, size: int) -> RendezvousAddress | None:
    if size == 1:
        return None
    because = f"{variables.describe('RANK', 'WORLD_SIZE')}: the workers meet at that {{}} of rank 0's host"
    address = variables.text("MASTER_ADDR", because.format("address"))
    return RendezvousAddress(address, variables.port("MASTER_PORT", because.format("port")))


NAMES = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
    *("ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT"),
    *("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS"),
    *("TORCHELASTIC_USE_AGENT_STORE",),
    *("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_NTASKS", "SLURM_NPROCS", "SLURM_NTASKS_PER_NODE"),
    *("SLURM_TASKS_PER_NODE", "SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE"),
    *("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    *("PMI_RANK", "PMI_SIZE", "PMIX_RANK", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK"),
)
"""The variables that are hidden from scripts: libraries that read them start process groups by themselves, or take the
rank in them for the worker's. Variables that a script may want to know, such as SLURM_JOB_ID, are not among them."""


class LaunchVariables:
    """Hides the variables of :data:`NAMES` from the rest of a process, and puts them back."""

    def __init__(self, environ: MutableMapping[str, str]) -> None:
        self._environ = environ
        self._hidden: dict[str, str] = {}
        self._runs = 0
        self._lock = threading.Lock()

    def all(self) -> Mapping[str, str]:
        """All variables, including those that are hidden."""
        return {**self._hidden, **self._environ}

    def hide(self) -> Callable[[], None]:
        """Hide the variables for a run.

        Returns:
            a function that puts them back once it was called for every run. A variable that was set meanwhile stays.
        """
        with self._lock:
            self._runs += 1
            self._hidden |= {name: self._environ.pop(name) for name in NAMES if name in self._environ}
        return self._show

    def _show(self) -> None:
        with self._lock:
            self._runs -= 1
            if self._runs:
                return
            for name, value in self._hidden.items():
                self._environ.setdefault(name, value)
            self._hidden = {}


OF_THIS_PROCESS = LaunchVariables(os.environ)
"""The variables of this process, which all of its runs share."""
