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

from unisono.device import group_of, identity, is_accelerator, nccl_shares_devices, supports_nccl
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
from unisono.train.group.meeting import Rendezvous
from unisono.train.group.workers import Devices, Mesh, Workers


class Network:
    """The network between the workers of one generation.

    Args:
        host: the address at which the others reach this worker; empty if all of them are on one host.

    Attributes:
        keys: the secrets that only these workers know; None over torch's own network.

    Raises:
        JobError: the network would be open to others, and no setting allows that; or a setting does not fit the
            network.
    """

    def __init__(self, config: RunConfig, rendezvous: Rendezvous, host: str, generation: Generation) -> None:
        communication = config.connection.how
        self._config, self._rendezvous, self._host = config, rendezvous, host
        backend, self._why = self._agreed(generation)
        # Torch's own network serves where it is asked for by name, on GPUs, and where its order of sums is allowed.
        uses_torch = communication.transport == "process_group" or backend == "nccl" or config.job.reduction != "exact"
        self._backend = backend if uses_torch else ""
        self._topology = topology_over(backend, config.job, communication.topology)
        if host and uses_torch and not communication.insecure_data:
            raise JobError(
                f"rank {rendezvous.environment.rank} on host {platform.node()}: the traffic of {backend} between hosts "
                f"is not encrypted, and open to anyone who can connect. If only this job's hosts are in the network, "
                f"allow it with unisono.init(communication={{'insecure_data': True}}), or UNISONO_INSECURE_DATA=1. "
                f"Else leave out transport='process_group' and reduction='native', and let workers compute on CPUs"
            )
        self.keys: NetworkKeys | None = None
        if not uses_torch:
            make_keys = rendezvous.plain_keys if communication.insecure_data else rendezvous.private_keys
            self.keys = make_keys() if host else rendezvous.host_keys()

    def _agreed(self, generation: Generation) -> tuple[str, str]:
        """Agree on the backend of the process group, and return it with the reason. Collective.

        It is NCCL if each worker has a device of its own, else Gloo: NCCL refuses workers that share a device, unless a
        variable tells it to take them. Each worker may see one device alone, so the workers compare theirs.

        Raises:
            JobError: NCCL is asked for, and cannot be used; says why.
        """
        device, wanted = self._config.device, self._config.connection.how.transport
        if not is_accelerator(device):
            return "gloo", ""
        if not supports_nccl(device):
            backend, why = "gloo", f"torch has no NCCL for {device.type}"
        else:
            board = TorchRendezvousStore(
                PrefixStore("devices", self._rendezvous.store()), self._config.connection.timeout_s
            )
            board.post(f"device of {generation.rank}", identity(device).encode())
            backend, why = _common_backend([board.read(f"device of {rank}") for rank in range(generation.world_size)])
            if wanted == "nccl" and backend != "nccl" and nccl_shares_devices():
                backend, why = "nccl", f"NCCL_MULTI_RANK_GPU_ENABLE=1, and {why}"
        if wanted == "nccl" and backend != "nccl":
            raise JobError(f"transport='nccl' cannot be used: {why}; leave it out, or use 'sockets'")
        return ("gloo", "transport='sockets'") if wanted == "sockets" else (backend, why)

    def transport(self, generation: Generation, scope: str = "all") -> ProcessGroupTransport:
        """Connect with the workers of this network that give the same scope. Collective among them.

        Raises:
            LaunchError: the others cannot be reached.
        """
        store, timeout_s = PrefixStore(scope, self._rendezvous.store()), self._config.connection.timeout_s
        rank, device = generation.rank, torch.device("cpu")
        if self.keys is None:
            group = form_group(store, generation, self._backend, timeout_s)
            device = self._config.device if self._backend == "nccl" else device
        else:
            board = TorchRendezvousStore(store, timeout_s)
            keys = self.keys.of(f"{generation.number} {scope}")
            wires = connect_all(rank, self._host, generation.world_size, board, keys, timeout_s)
            group = SocketGroup(rank, wires, timeout_s)
        transport = ProcessGroupTransport(group, rank, generation.split, device, self._topology)
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
    """The topology of partial sums over a backend; None where the backend's standard collectives are used instead.

    Raises:
        JobError: the wanted topology cannot be used.
    """
    if job.reduction != "exact":
        if wanted != "auto":
            raise JobError(
                f"topology={wanted!r} applies to exact sums only, and reduction={job.reduction!r} uses the backend's "
                f"all-reduce: leave topology out"
            )
        return "direct" if backend == "gloo" else None
    if backend == "gloo":
        return wanted
    if wanted not in ("auto", "direct"):
        raise JobError(f"topology={wanted!r} needs CPUs; over {backend} use 'direct' or 'auto'")
    return None  # sends between two workers have not been tried on other backends


def connect(
    config: RunConfig, generation: Generation, rendezvous: Rendezvous, devices: Devices | None = None
) -> Workers:
    """Connect the workers of a generation. Collective.

    Raises:
        JobError: a name is unknown, shared memory or a topology was asked for where it cannot be, or another worker has
            another kind of device or transport; says why.
        LaunchError: the other workers cannot be reached.
    """
    job, environment = config.job, rendezvous.environment
    make_workers = partial(Workers, generation, devices=devices, device=config.device)
    if environment.world_size == 1:
        return make_workers(Solo(job.shards))
    kind = _chosen(config, environment)
    _require_same_place(config, rendezvous)
    if kind == "shared_memory":
        return make_workers(SharedMemoryTransport(rendezvous.peers(), generation.rank, generation.split))
    host = "" if environment.local_world_size == environment.world_size else own_address(rendezvous.store())
    host = "" if is_loopback(host) else host  # these workers are on one host, whatever name it has
    network = Network(config, rendezvous, host, generation)
    everyone = make_workers(network.transport(generation), host, keys=network.keys)
    if kind == "hierarchical" and _share_hosts(everyone, environment, config.connection.how):
        return make_workers(_over_hosts(everyone, rendezvous, network), host, keys=network.keys)
    return everyone


def _require_same_place(config: RunConfig, rendezvous: Rendezvous) -> None:
    """Refuse to wait for workers that connect elsewhere: each chooses its way by its own device and settings.

    Raises:
        JobError: this worker's device or transport is another one than that of rank 0; says both.
    """
    environment, communication = rendezvous.environment, config.connection.how
    own = f"{config.device.type} and transport={communication.transport!r}"
    board = TorchRendezvousStore(dist.PrefixStore("place", rendezvous.store()), rendezvous.timeout_s)
    if environment.rank == 0:
        board.post("first", own.encode())
    elif (first := board.read("first").decode(errors="replace")) != own:
        raise JobError(
            f"rank {environment.rank} on host {platform.node()} has {own}, and rank 0 {short(first)}: they would wait "
            f"for each other in vain. Give all workers one kind of device (unisono.init(device=…)) and one transport"
        )


def _chosen(config: RunConfig, environment: Environment) -> str:
    communication, one_host = config.connection.how, environment.local_world_size == environment.world_size
    obstacle = _obstacle(config, one_host=one_host)
    if communication.transport == "nccl" and not is_accelerator(config.device):
        raise JobError("transport='nccl' cannot be used: the workers compute on CPUs; leave it out, or use 'sockets'")
    if communication.transport in ("sockets", "process_group", "nccl") or (
        communication.transport == "auto" and obstacle
    ):
        return "network"
    if communication.transport == "shared_memory" and not one_host:
        obstacle = obstacle or "the workers are on several hosts"
    if obstacle:
        raise JobError(f"transport={communication.transport!r} cannot be used: {obstacle}; use 'sockets' or 'auto'")
    return "shared_memory" if one_host else "hierarchical"


def _obstacle(config: RunConfig, *, one_host: bool) -> str:
    communication, reduction = config.connection.how, config.job.reduction
    if config.device.type != "cpu":
        return f"the workers compute on {config.device.type}"
    if reduction != "exact":
        return f"reduction={reduction!r} is that of torch's process group"
    if one_host and communication.topology != "auto":
        return f"topology={communication.topology!r} is a way between hosts"
    return "" if sys.platform == "linux" else f"{sys.platform} has no memory that can be shared without a name"


def _share_hosts(everyone: Workers, environment: Environment, how: Communication) -> bool:
    """Whether every host has equally many workers, more than one, with neighbouring ranks. Collective."""
    local = environment.local_world_size
    places = everyone.gather_json([local, environment.local_rank])
    if all(place == [local, rank % local] for rank, place in enumerate(places)) and local > 1:
        return True
    if how.transport == "hierarchical":
        positions = ", ".join(f"rank {rank} is number {place[1]} of {place[0]}" for rank, place in enumerate(places))
        everyone.close()
        raise JobError(
            f"transport='hierarchical' needs equally many workers on every host, at least 2, with neighbouring ranks; "
            f"here {positions} on its host. Use 'sockets' or 'auto'"
        )
    return False


def _over_hosts(everyone: Workers, rendezvous: Rendezvous, network: Network) -> Transport:
    generation, local = everyone.generation, rendezvous.environment.local_world_size
    host_number, place = divmod(generation.rank, local)
    with ExitStack() as opened:  # if anything fails in here, what is open is closed
        opened.callback(everyone.close)
        peers = rendezvous.peers()
        opened.callback(peers.close)
        hosts = Generation(generation.number, host_number, host_split(generation.split, local))
        across = network.transport(hosts, f"across/{place}")
        opened.pop_all()
    return HierarchicalTransport(peers, generation.rank, generation.split, across, everyone.transport)


# The devices of one worker.


def connect_devices(config: RunConfig, rendezvous: Rendezvous, mesh: Mesh) -> Devices:
    """Connect the devices of this worker, all on one host, for a generation. Collective among them."""
    environment, connection = rendezvous.environment, config.connection
    generation = Generation(1, environment.rank, Split.even(environment.world_size, environment.world_size))
    with ExitStack() as opened:
        inside = connect(config, generation, rendezvous)
        opened.callback(inside.close)
        backend = group_of(config.device, connection.environment.local_world_size)
        # NCCL sends over a group one after the other, and stages send in both directions at once: they need two.
        names = ["exchange", *(["back"] if backend == "nccl" else [])]
        exchanges = []
        for name in names:
            with _on_loopback():
                group = form_group(PrefixStore(name, rendezvous.store()), generation, backend, connection.timeout_s)
            exchanges.append(ProcessGroupTransport(group, environment.rank, generation.split, config.device, None))
            opened.callback(exchanges[-1].close)
        opened.pop_all()
    return Devices(environment.rank, environment.world_size, mesh, inside, *exchanges)


def mesh_of(config: RunConfig, rendezvous: Rendezvous) -> Mesh:
    """Return the mesh of this worker's devices, which lives as long as the worker."""
    return Mesh(partial(_form_mesh, config, rendezvous), partial(_speaking, config.device), _speaking_beside)


def _speaking(device: torch.device, mesh: DeviceMesh, group: dist.ProcessGroup | None = None) -> Workers:
    rank, count = mesh.get_local_rank(), mesh.size()
    generation = Generation(1, rank, Split.even(count, count))
    backend = (group or mesh.get_group())._get_backend(device)
    return Workers(generation, ProcessGroupTransport(backend, rank, generation.split, device, None), device=device)


SLOWEST = timedelta(hours=1)
"""The longest time for a device to write its share of a checkpoint, while the others wait for it."""


def _speaking_beside(mesh: DeviceMesh) -> Workers:
    with _on_loopback():
        group = dist.new_group(timeout=SLOWEST, backend="gloo")
    return _speaking(torch.device("cpu"), mesh, group)


def _form_mesh(config: RunConfig, rendezvous: Rendezvous) -> DeviceMesh:
    """Make this worker's devices torch's default process group: FSDP's collective calls need a group with a name."""
    environment, process = rendezvous.environment, config.connection.environment
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
            rank=environment.rank,
            world_size=environment.world_size,
            timeout=timedelta(seconds=config.connection.timeout_s),
        )
    sys.excepthook = hook  # torch's own hook writes a rank before each line, once for each group so far
    return init_device_mesh(config.device.type, (environment.world_size,))


@contextmanager
def _on_loopback() -> Iterator[None]:
    """Have Gloo listen on loopback alone: the processes that connect in here are on one host."""
    name, previous = "GLOO_SOCKET_IFNAME", os.environ.get("GLOO_SOCKET_IFNAME")
    os.environ[name] = next(
        (interface for _, interface in socket.if_nameindex() if interface.startswith("lo")), previous or ""
    )
    try:
        yield
    finally:
        if previous is None:
            del os.environ[name]
        else:
            os.environ[name] = previous
