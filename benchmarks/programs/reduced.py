"""One worker that reduces buckets over a process group, by each way that there is, in turns."""

import os
import random
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from time import perf_counter

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from benchmarks.place import Place
from benchmarks.programs import serve
from unisono.membership.environment import recognise
from unisono.membership.rendezvous import Generation, form_group, open_store
from unisono.plan.split import Split
from unisono.plan.topology import distinct
from unisono.plan.tree import SummationTree
from unisono.reduce.process_group import ProcessGroupTransport
from unisono.train.record.result_file import reduction_probe

TIMEOUT_S = 60.0
LOOKS = 9
"""How often the connections are measured."""

SMALL, SMALL_TURNS = 2**16, 5
"""Buckets of fewer bytes take so many times as many turns: they are soon done, and vary more."""

SERVER = "1 server"
"""A way, besides the topologies: the last worker finishes the sums of the others."""


class Reduce(BaseModel):
    """What the workers are told: how many bytes, how often by each way, and what decides the order."""

    model_config = ConfigDict(frozen=True)

    sizes: tuple[int, ...]
    turns: int
    seed: int


class Reduced(BaseModel):
    """What one worker found.

    Attributes:
        seconds: of a reduction, by size and way, for each turn.
        links: latency and bandwidth between each two workers, in seconds and bytes per second, several times.
        bytes_per_s: a worker's bandwidth while all reduce together, as a study measures it.
    """

    seconds: dict[int, dict[str, list[float]]]
    links: list[dict[str, list[list[float]]]]
    bytes_per_s: float


def ways(workers: int) -> dict[str, tuple[str, Split]]:
    """By name: the topology, and who computes one shard or more."""
    even = Split.even(workers, workers)
    return {**{name: (name, even) for name in distinct(workers)}, SERVER: ("direct", even.with_servers(1))}


def work(task: Reduce, folder: Path) -> Reduced:
    """For each size all ways, in another order in each turn; the first one warms up."""
    torch.set_num_threads(1)
    place, order = Place.of(), random.Random(task.seed)  # noqa: S311  it has to be the same on all workers
    known = ways(place.workers)
    even = Split.even(place.workers, place.workers)
    store = open_store(recognise(os.environ), TIMEOUT_S)
    group = form_group(store, Generation(1, place.rank, even), "gloo", TIMEOUT_S)
    with closing(ProcessGroupTransport(group, place.rank, even, torch.device("cpu"))) as transport:
        looks = [asdict(transport.measure_links()) for _ in range(LOOKS)]
        probe = reduction_probe(transport, "exact", torch.device("cpu"))
        assert probe is not None
        found: dict[int, dict[str, list[float]]] = {}
        for size in task.sizes:
            found[size] = {name: [] for name in known}
            for turn in range(1 + task.turns * (SMALL_TURNS if size < SMALL else 1)):
                for name in order.sample(list(known), len(known)):
                    took = _timed(transport, *known[name], size)
                    if turn:
                        found[size][name].append(took)
    return Reduced(seconds=found, links=looks, bytes_per_s=probe["bandwidth_bytes_per_s"])


def _timed(transport: ProcessGroupTransport, topology: str, split: Split, size: int) -> float:
    """Once to make the buffers, once for the figure."""
    transport.resplit(split)
    transport.use_topology(topology)
    partials = list(_partials(split.of(transport.rank), split.shards, size))
    transport.reduce("bucket", partials)
    transport.all_gather(torch.zeros(1))  # all begin together
    begun = perf_counter()
    transport.reduce("bucket", partials)
    return perf_counter() - begun


def _partials(shards: range, count: int, size: int) -> Iterator[Tensor]:
    for _ in SummationTree(count).cover(shards.start, shards.stop) or (None,):
        yield torch.zeros(size // 4)


if __name__ == "__main__":
    serve(Reduce, work)
