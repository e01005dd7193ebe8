"""One worker that reduces buckets over three networks in turns: Gloo, sockets of our own, and these with TLS."""

import os
import random
import resource
from contextlib import ExitStack, closing
from pathlib import Path
from time import perf_counter

import torch
import torch.distributed as dist
from pydantic import BaseModel, ConfigDict

from benchmarks.place import Place
from benchmarks.programs import serve
from unisono.membership.environment import recognise
from unisono.membership.rendezvous import Generation, TorchRendezvousStore, form_group, open_store, own_address
from unisono.plan.split import Split
from unisono.reduce.buckets import ALIGNMENT
from unisono.reduce.data_network import NetworkKeys, connect_all
from unisono.reduce.process_group import ProcessGroupTransport
from unisono.reduce.wire import SocketGroup

TIMEOUT_S = 60.0

NETWORKS = ("Gloo", "plain", "TLS")

BYTES_PER_TURN, FEWEST_CALLS, MOST_CALLS = 2**26, 2, 200


class Networked(BaseModel):
    """What the workers are told: how many bytes, how often over each network, and what decides the order."""

    model_config = ConfigDict(frozen=True)

    sizes: tuple[int, ...]
    turns: int
    seed: int


class NetworkedTimes(BaseModel):
    """What one worker found, by size and network, for each turn.

    Attributes:
        seconds: of a reduction.
        processor_s: seconds of processor time of a reduction, on this worker.
        is_right: whether every sum was the sum.
    """

    seconds: dict[int, dict[str, list[float]]]
    processor_s: dict[int, dict[str, list[float]]]
    is_right: bool


def work(task: Networked, folder: Path) -> NetworkedTimes:
    """For each size all networks, in another order in each turn; the first turn warms up."""
    torch.set_num_threads(1)
    place, order = Place.of(), random.Random(task.seed)  # noqa: S311  it has to be the same on all workers
    empty: dict[int, dict[str, list[float]]] = {size: {name: [] for name in NETWORKS} for size in task.sizes}
    found = NetworkedTimes(seconds=empty, processor_s={size: dict(empty[size]) for size in task.sizes}, is_right=True)
    with ExitStack() as opened:
        transports = {name: opened.enter_context(closing(_transport(name, place))) for name in NETWORKS}
        for size in task.sizes:
            numel = -(-size // (4 * ALIGNMENT)) * ALIGNMENT  # as all buckets are
            bucket = torch.full((numel,), float(place.rank + 1))
            for turn in range(1 + task.turns):
                for name in order.sample(NETWORKS, len(NETWORKS)):
                    took, processor_s, is_right = _timed(transports[name], bucket, place.workers)
                    found.is_right &= is_right
                    if turn:
                        found.seconds[size][name] = [*found.seconds[size][name], took]
                        found.processor_s[size][name] = [*found.processor_s[size][name], processor_s]
    return found


def _transport(network: str, place: Place) -> ProcessGroupTransport:
    split, environment = Split.even(place.workers, place.workers), recognise(os.environ)
    store = open_store(environment, TIMEOUT_S)
    scoped = dist.PrefixStore(network, store)
    if network == "Gloo":
        group = form_group(scoped, Generation(1, place.rank, split), "gloo", TIMEOUT_S)
    else:
        board = TorchRendezvousStore(scoped, TIMEOUT_S)
        if place.rank == 0:
            board.post("keys", (NetworkKeys.private() if network == "TLS" else NetworkKeys.plain()).packed())
        keys = NetworkKeys.unpacked(board.read("keys"))
        wires = connect_all(place.rank, own_address(store), place.workers, board, keys, TIMEOUT_S)
        group = SocketGroup(place.rank, wires, TIMEOUT_S)
    return ProcessGroupTransport(group, place.rank, split, torch.device("cpu"))


def _timed(transport: ProcessGroupTransport, bucket: torch.Tensor, workers: int) -> tuple[float, float, bool]:
    """Of one of some calls."""
    calls = max(FEWEST_CALLS, min(MOST_CALLS, BYTES_PER_TURN // bucket.nbytes))
    transport.all_gather(torch.zeros(1))  # all begin together
    before, begun = _processor_s(), perf_counter()
    for _ in range(calls):
        total = transport.reduce("bucket", [bucket.clone()])
    took = (perf_counter() - begun) / calls
    return took, (_processor_s() - before) / calls, bool((total == sum(range(workers + 1))).all())


def _processor_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    serve(Networked, work)
