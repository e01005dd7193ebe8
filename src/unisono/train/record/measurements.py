"""What a worker measures of itself: its memory, and how fast sums travel."""

from __future__ import annotations

import math
import os
from time import perf_counter
from typing import Any

import torch

from unisono.host.memory import MIB, own_peak_mib
from unisono.job import Reduction as Name
from unisono.reduce.buckets import ALIGNMENT, Bucket
from unisono.reduce.reducer import REDUCTIONS
from unisono.train.group.workers import Workers

# The most memory that a worker has needed.


def peak_memory(device: torch.device) -> dict[str, Any]:
    """What this process has needed at most so far, in MiB: of the host's memory, and of its device's if it has any."""
    on_device = torch.cuda.max_memory_reserved(device) / MIB if device.type == "cuda" else None
    return {
        "device": str(device),
        "peak_memory_mib": round(own_peak_mib(os.getpid()), 1),
        "peak_device_memory_mib": None if on_device is None else round(on_device, 1),
    }


# How fast this run's workers add up gradients, apart from any model: latency and bandwidth of the reduction itself.

LARGE = 2**20
"""Elements of a bucket of 4 MiB."""

ROUNDS = 10


def reduction_probe(workers: Workers, reduction: Name, device: torch.device) -> dict[str, float] | None:
    """Reduce a small and a large bucket of zeros some times, and take the shortest of each. Collective.

    By the model of an all-reduce by halves: 2 ⌈log2 W⌉ latency + 2 (W - 1)/W · bytes / bandwidth (Thakur, Rabenseifner
    and Gropp, IJHPCA 2005).

    Args:
        workers: the members; nothing is in flight between them.
        reduction: that the job adds up with.
        device: of the gradients.

    Returns:
        ``latency_s`` in seconds and ``bandwidth_bytes_per_s``; None with one worker.
    """
    count = workers.world_size
    if count == 1:
        return None
    small, large = (_seconds(workers, reduction, device, numel) for numel in (ALIGNMENT, LARGE))
    size = (LARGE - ALIGNMENT) * torch.float32.itemsize
    return {
        "latency_s": small / (2 * math.ceil(math.log2(count))),
        "bandwidth_bytes_per_s": 2 * (count - 1) / count * size / max(large - small, 1e-9),
    }


def _seconds(workers: Workers, reduction: Name, device: torch.device, numel: int) -> float:
    transport = workers.transport
    mine = transport.split.of(workers.rank)
    rows = len(transport.tree.cover(mine.start, mine.stop)) or 1  # who serves gives one that nobody reads
    partials = [row[0] for row in transport.allocate([Bucket((), numel, torch.float32, device)], rows)]
    found = []
    for _ in range(ROUNDS):
        workers.barrier()
        begun = perf_counter()
        REDUCTIONS[reduction](transport, ("probe", numel), partials, None)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        found.append(perf_counter() - begun)
    return min(found)
