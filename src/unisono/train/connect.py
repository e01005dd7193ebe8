"""From an environment to workers that can talk to each other."""

import sys
from dataclasses import dataclass
from typing import Literal

import torch

from unisono.errors import JobError
from unisono.job import Job
from unisono.membership.environment import Environment
from unisono.membership.generation import Generation
from unisono.membership.rendezvous import Noticeboard, backend_for, form_group, open_store
from unisono.plan.split import Split
from unisono.reduce.peers import meet
from unisono.reduce.process_group import ProcessGroupTransport
from unisono.reduce.shared_memory import SharedMemoryTransport
from unisono.reduce.transport import Solo, Transport
from unisono.train.workers import Workers

TransportName = Literal["auto", "shared_memory", "process_group"]

TopologyName = Literal["auto", "direct", "ring", "tree", "star"]

TRANSPORTS = ("auto", "shared_memory", "process_group")


@dataclass(frozen=True, slots=True)
class Connection:
    """How workers are to be connected. It decides no bit.

    Attributes:
        transport: ``auto`` takes shared memory where it can.
        topology: the way of the partial sums over a process group.
        device: where this worker computes.
        timeout_s: how long to wait for another worker.
    """

    transport: str
    topology: str
    device: torch.device
    timeout_s: float


def connect(job: Job, environment: Environment, how: Connection) -> Workers:
    """Form the first generation.

    Raises:
        JobError: shared memory was asked for where it cannot be; says why.
        LaunchError: the other workers cannot be reached.
    """
    generation = Generation(1, environment.rank, Split.even(job.shards, environment.world_size))
    if how.transport not in TRANSPORTS:
        raise JobError(f"transport={how.transport!r}: use one of {', '.join(map(repr, TRANSPORTS))}")
    if environment.world_size == 1:
        return Workers(generation, Solo(job.shards))
    obstacle = _obstacle(job, environment, how.device)
    if how.transport == "shared_memory" and obstacle:
        raise JobError(f"transport='shared_memory' cannot be used: {obstacle}; use 'process_group' or 'auto'")
    shares = how.transport != "process_group" and not obstacle
    form = _over_shared_memory if shares else _over_process_group
    return Workers(generation, form(environment, generation, how))


def _obstacle(job: Job, environment: Environment, device: torch.device) -> str:
    if environment.local_world_size != environment.world_size:
        return "the workers are on several hosts"
    if device.type != "cpu":
        return f"the workers compute on {device.type}"
    if job.reduction != "exact":
        return f"reduction={job.reduction!r} is the process group's own"
    return "" if sys.platform == "linux" else f"{sys.platform} has no memory that can be shared without a name"


def _over_shared_memory(environment: Environment, generation: Generation, how: Connection) -> Transport:
    board = Noticeboard(open_store(environment, how.timeout_s), how.timeout_s)
    peers = meet(generation.rank, generation.world_size, board, how.timeout_s)
    return SharedMemoryTransport(peers, generation.rank, generation.split)


def _over_process_group(environment: Environment, generation: Generation, how: Connection) -> Transport:
    store = open_store(environment, how.timeout_s)
    backend = backend_for(how.device, environment)
    group = form_group(store, generation, backend, how.timeout_s)
    where = how.device if backend == "nccl" else torch.device("cpu")
    return ProcessGroupTransport(group, generation.rank, generation.split, where)
