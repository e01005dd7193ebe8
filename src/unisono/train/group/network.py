"""The network between the workers of a generation: which kind it is, and who can read it."""

import platform
from collections.abc import Sequence

import torch
from torch.distributed import PrefixStore

from unisono.device import identity, is_accelerator, nccl_takes_many, speaks_nccl
from unisono.errors import JobError
from unisono.job import Job
from unisono.membership.rendezvous import Generation, TorchRendezvousStore, form_group
from unisono.received import short
from unisono.reduce.data_network import NetworkKeys, connect_all
from unisono.reduce.process_group import ProcessGroupTransport
from unisono.reduce.socket_group import SocketGroup
from unisono.train.config.run_config import RunConfig
from unisono.train.group.rendezvous import Rendezvous


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
