"""The connection of a generation's workers, from their environment."""

import os
import platform
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from unisono.device import group_of, identity, is_accelerator, nccl_takes_many, speaks_nccl
from unisono.errors import JobError
from unisono.job import Job
from unisono.membership.environment import Environment
from unisono.membership.rendezvous import Generation, TorchRendezvousStore, form_group, own_address
from unisono.membership.token import is_loopback
from unisono.plan.split import Split
from unisono.received import short
from unisono.reduce.data_network import NetworkKeys, connect_all
from unisono.reduce.process_group import ProcessGroupTransport
from unisono.reduce.shared_memory import HierarchicalTransport, SharedMemoryTransport, host_split
from unisono.reduce.transport import Solo, Transport
from unisono.reduce.wire import SocketGroup
from unisono.settings.table import Communication
from unisono.train.config.run_config import RunConfig
from unisono.train.group.rendezvous import Rendezvous
from unisono.train.group.workers import Devices, Mesh, Workers


class Network:
    """The network between the workers of one generation.

    Args:
        config: the configuration of the run.
        rendezvous: the rendezvous of these workers.
        host: the address at which the others reach this worker; empty if all of them are on one host.
        generation: the generation of these workers.

    Attributes:
        keys: what only these workers know; None over a network of torch's.

    Raises:
        JobError: it would be open to others, and nobody has said that it may be; or a setting does not fit it.
    """

    def __init__(self, config: RunConfig, rendezvous: Rendezvous, host: str, generation: Generation) -> None:
        how = config.connection.how
        self._config, self._rendezvous, self._host = config, rendezvous, host
        backend, self._why = self._agreed(generation)
        # Torch's own where it is asked for by name, on GPUs, and where sums may be added up in its order.
        is_torchs = how.transport == "process_group" or backend == "nccl" or config.job.reduction != "exact"
        self._backend = backend if is_torchs else ""
        self._topology = topology_over(backend, config.job, how.topology)
        if host and is_torchs and not how.insecure_data:
            raise JobError(
                f"rank {rendezvous.environment.rank} on host {platform.node()}: between hosts {backend} speaks plain "
                f"text with whoever calls. In a network that only this job's hosts are in, say so: "
                f"unisono.init(communication={{'insecure_data': True}}), or UNISONO_INSECURE_DATA=1. Else leave out "
                f"transport='process_group' and reduction='native', and let workers compute on CPUs"
            )
        self.keys: NetworkKeys | None = None
        if not is_torchs:
            of_hosts = rendezvous.plain_keys if how.insecure_data else rendezvous.private_keys
            self.keys = of_hosts() if host else rendezvous.host_keys()

    def _agreed(self, generation: Generation) -> tuple[str, str]:
        """The kind of process group, and why: NCCL if each worker has a device of its own, else Gloo. Collective.

        NCCL refuses workers that share a device, unless it was told to take them. The workers compare what they have:
        each may see one device alone.

        Raises:
            JobError: NCCL is asked for, and cannot be used; says why.
        """
        device, wanted = self._config.device, self._config.connection.how.transport
        if not is_accelerator(device):
            return "gloo", ""
        if not speaks_nccl(device):
            backend, why = "gloo", f"torch has no NCCL for {device.type}"
        else:
            board = TorchRendezvousStore(
                PrefixStore("devices", self._rendezvous.store()), self._config.connection.timeout_s
            )
            board.post(f"device of {generation.rank}", identity(device).encode())
            backend, why = _common_backend([board.read(f"device of {rank}") for rank in range(generation.world_size)])
            if wanted == "nccl" and backend != "nccl" and nccl_takes_many():
                backend, why = "nccl", f"NCCL_MULTI_RANK_GPU_ENABLE=1, and {why}"
        if wanted == "nccl" and backend != "nccl":
            raise JobError(f"transport='nccl' cannot be used: {why}; leave it out, or use 'sockets'")
        return ("gloo", "transport='sockets'") if wanted == "sockets" else (backend, why)

    def transport(self, generation: Generation, scope: str = "all") -> ProcessGroupTransport:
        """Connect with workers of it. Collective among them.

        Args:
            generation: the generation that they form.
            scope: a name for those who meet.

        Raises:
            LaunchError: the others cannot be reached.
        """
        store, timeout_s = PrefixStore(scope, self._rendezvous.store()), self._config.connection.timeout_s
        rank, where = generation.rank, torch.device("cpu")
        if self.keys is None:
            group = form_group(store, generation, self._backend, timeout_s)
            where = self._config.device if self._backend == "nccl" else where
        else:
            board = TorchRendezvousStore(store, timeout_s)
            keys = self.keys.of(f"{generation.number} {scope}")
            wires = connect_all(rank, self._host, generation.world_size, board, keys, timeout_s)
            group = SocketGroup(rank, wires, timeout_s)
        transport = ProcessGroupTransport(group, rank, generation.split, where, self._topology)
        if self._why:
            transport.measured.append({"backend": "nccl" if self._backend == "nccl" else "host", "why": self._why})
        return transport


def _common_backend(devices: Sequence[bytes]) -> tuple[str, str]:
    sharing = [rank for rank, device in enumerate(devices) if devices.count(device) > 1]
    if not sharing:
        return "nccl", "each worker has a device of its own"
    first = devices[sharing[0]]
    ranks = ", ".join(str(rank) for rank in sharing if devices[rank] == first)
    return "gloo", f"ranks {ranks} share the device {short(first.decode(errors='replace'))}"


def topology_over(backend: str, job: Job, wanted: str) -> str | None:
    """The topology of partial sums over a backend; None where it is only asked for standard collectives.

    Raises:
        JobError: the one that is wanted cannot be used.
    """
    if job.reduction != "exact":
        if wanted != "auto":
            raise JobError(
                f"topology={wanted!r} is a way of exact sums, and reduction={job.reduction!r} goes the backend's own: "
                f"leave topology out"
            )
        return "direct" if backend == "gloo" else None
    if backend == "gloo":
        return wanted
    if wanted not in ("auto", "direct"):
        raise JobError(f"topology={wanted!r} needs CPUs; over {backend} use 'direct' or 'auto'")
    return None  # sends between two workers are not tried on it


def connect(
    config: RunConfig, generation: Generation, rendezvous: Rendezvous, devices: Devices | None = None
) -> Workers:
    """Connect the workers of a generation. Collective.

    Args:
        config: the configuration of the run.
        generation: the generation that they form.
        rendezvous: the rendezvous of its workers.
        devices: the devices of this worker; by default one.

    Raises:
        JobError: a name is unknown, shared memory or a topology was asked for where it cannot be, or another worker has
            another kind of device or transport; says why.
        LaunchError: the other workers cannot be reached.
    """
    job, environment = config.job, rendezvous.environment
    made = partial(Workers, generation, devices=devices, device=config.device)
    if environment.world_size == 1:
        return made(Solo(job.shards))
    chosen = _chosen(config, environment)
    _require_same_place(config, rendezvous)
    if chosen == "shared_memory":
        return made(SharedMemoryTransport(rendezvous.peers(), generation.rank, generation.split))
    host = "" if environment.local_world_size == environment.world_size else own_address(rendezvous.store())
    host = "" if is_loopback(host) else host  # which is one host, whatever its workers call it
    network = Network(config, rendezvous, host, generation)
    everyone = made(network.transport(generation), host, keys=network.keys)
    if chosen == "hierarchical" and _share_hosts(everyone, environment, config.connection.how):
        return made(_over_hosts(everyone, rendezvous, network), host, keys=network.keys)
    return everyone


def _require_same_place(config: RunConfig, rendezvous: Rendezvous) -> None:
    """Refuse to wait where the others do not go: each chooses where to meet by its own device and settings.

    Raises:
        JobError: this worker's are others than those of rank 0; says both.
    """
    here, how = rendezvous.environment, config.connection.how
    mine = f"{config.device.type} and transport={how.transport!r}"
    board = TorchRendezvousStore(dist.PrefixStore("place", rendezvous.store()), rendezvous.timeout_s)
    if here.rank == 0:
        board.post("first", mine.encode())
    elif (first := board.read("first").decode(errors="replace")) != mine:
        raise JobError(
            f"rank {here.rank} on host {platform.node()} has {mine}, and rank 0 {short(first)}: they would wait for "
            f"each other in vain. Give all workers one kind of device (unisono.init(device=…)) and one transport"
        )


def _chosen(config: RunConfig, environment: Environment) -> str:
    how, one_host = config.connection.how, environment.local_world_size == environment.world_size
    obstacle = _obstacle(config, one_host=one_host)
    if how.transport == "nccl" and not is_accelerator(config.device):
        raise JobError("transport='nccl' cannot be used: the workers compute on CPUs; leave it out, or use 'sockets'")
    if how.transport in ("sockets", "process_group", "nccl") or (how.transport == "auto" and obstacle):
        return "network"
    if how.transport == "shared_memory" and not one_host:
        obstacle = obstacle or "the workers are on several hosts"
    if obstacle:
        raise JobError(f"transport={how.transport!r} cannot be used: {obstacle}; use 'sockets' or 'auto'")
    return "shared_memory" if one_host else "hierarchical"


def _obstacle(config: RunConfig, *, one_host: bool) -> str:
    how, reduction = config.connection.how, config.job.reduction
    if config.device.type != "cpu":
        return f"the workers compute on {config.device.type}"
    if reduction != "exact":
        return f"reduction={reduction!r} is that of torch's process group"
    if one_host and how.topology != "auto":
        return f"topology={how.topology!r} is a way between hosts"
    return "" if sys.platform == "linux" else f"{sys.platform} has no memory that can be shared without a name"


def _share_hosts(everyone: Workers, environment: Environment, how: Communication) -> bool:
    """Whether every host has equally many workers, more than one, with neighbouring ranks. Collective."""
    local = environment.local_world_size
    places = everyone.gather_json([local, environment.local_rank])
    if all(place == [local, rank % local] for rank, place in enumerate(places)) and local > 1:
        return True
    if how.transport == "hierarchical":
        listed = ", ".join(f"rank {rank} is number {place[1]} of {place[0]}" for rank, place in enumerate(places))
        everyone.close()
        raise JobError(
            f"transport='hierarchical' needs equally many workers on every host, at least 2, with neighbouring ranks; "
            f"here {listed} on its host. Use 'sockets' or 'auto'"
        )
    return False


def _over_hosts(everyone: Workers, rendezvous: Rendezvous, network: Network) -> Transport:
    generation, local = everyone.generation, rendezvous.environment.local_world_size
    number, place = divmod(generation.rank, local)
    with ExitStack() as opened:  # whatever fails in here, what was opened before it is closed again
        opened.callback(everyone.close)
        peers = rendezvous.peers()
        opened.callback(peers.close)
        hosts = Generation(generation.number, number, host_split(generation.split, local))
        across = network.transport(hosts, f"across/{place}")
        opened.pop_all()
    return HierarchicalTransport(peers, generation.rank, generation.split, across, everyone.transport)


# The devices of one worker.


def connect_devices(config: RunConfig, rendezvous: Rendezvous, mesh: Mesh) -> Devices:
    """Connect the devices of this worker for a generation. They are on one host. Collective among them."""
    here, how = rendezvous.environment, config.connection
    generation = Generation(1, here.rank, Split.even(here.world_size, here.world_size))
    with ExitStack() as opened:
        inside = connect(config, generation, rendezvous)
        opened.callback(inside.close)
        backend = group_of(config.device, how.environment.local_world_size)
        # In NCCL's groups what is sent waits for what was sent before, and stages send to and fro at the same time.
        ways = ["exchange", *(["back"] if backend == "nccl" else [])]
        exchanges = []
        for name in ways:
            with _on_loopback():
                group = form_group(PrefixStore(name, rendezvous.store()), generation, backend, how.timeout_s)
            exchanges.append(ProcessGroupTransport(group, here.rank, generation.split, config.device, None))
            opened.callback(exchanges[-1].close)
        opened.pop_all()
    return Devices(here.rank, here.world_size, mesh, inside, *exchanges)


def mesh_of(config: RunConfig, rendezvous: Rendezvous) -> Mesh:
    """The devices of this worker as long as there is the worker."""
    return Mesh(partial(_form_mesh, config, rendezvous), partial(_speaking, config.device), _speaking_beside)


def _speaking(device: torch.device, mesh: DeviceMesh, group: dist.ProcessGroup | None = None) -> Workers:
    rank, count = mesh.get_local_rank(), mesh.size()
    generation = Generation(1, rank, Split.even(count, count))
    backend = (group or mesh.get_group())._get_backend(device)
    return Workers(generation, ProcessGroupTransport(backend, rank, generation.split, device, None), device=device)


SLOWEST = timedelta(hours=1)
"""For a device to write its share of a checkpoint, while the others wait for it."""


def _speaking_beside(mesh: DeviceMesh) -> Workers:
    with _on_loopback():
        group = dist.new_group(timeout=SLOWEST, backend="gloo")
    return _speaking(torch.device("cpu"), mesh, group)


def _form_mesh(config: RunConfig, rendezvous: Rendezvous) -> DeviceMesh:
    """The devices of this worker as torch's default process group: FSDP's collective calls need one by name."""
    here, process = rendezvous.environment, config.connection.environment
    if dist.is_initialized():
        raise JobError(
            "devices_per_worker needs torch's default process group for the devices of each worker, and the script has "
            "made one: leave torch.distributed.init_process_group out"
        )
    hook = sys.excepthook
    with _on_loopback():
        dist.init_process_group(
            group_of(config.device, process.local_world_size),
            store=dist.PrefixStore("devices", rendezvous.store()),
            rank=here.rank,
            world_size=here.world_size,
            timeout=timedelta(seconds=config.connection.timeout_s),
        )
    sys.excepthook = hook  # torch's writes a rank before each line, once more for every group that there was
    return init_device_mesh(config.device.type, (here.world_size,))


@contextmanager
def _on_loopback() -> Iterator[None]:
    """Gloo listens on loopback alone: what meets in here is on one host."""
    name, before = "GLOO_SOCKET_IFNAME", os.environ.get("GLOO_SOCKET_IFNAME")
    os.environ[name] = next((each for _, each in socket.if_nameindex() if each.startswith("lo")), before or "")
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
