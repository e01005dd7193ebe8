"""One worker of the all-reduce alone: shared memory, Gloo, and the memory's bandwidth, in turns."""

import random
from collections.abc import Callable
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from time import perf_counter

import torch
import torch.distributed as dist
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from benchmarks.place import Place
from benchmarks.programs import serve
from unisono.membership.rendezvous import TorchRendezvousStore
from unisono.plan.split import Split, even_bounds
from unisono.reduce.buckets import ALIGNMENT, Bucket
from unisono.reduce.peers import meet
from unisono.reduce.shared_memory import SharedMemoryTransport
from unisono.reduce.transport import PIECE, Transport

TIMEOUT_S = 60.0
BYTES_PER_TURN = 2**26
FEWEST_CALLS, MOST_CALLS = 3, 300

WAYS = ("shared memory", "Gloo", "bound")


class Exchange(BaseModel):
    """What the workers are told.

    Attributes:
        sizes: bytes of what is reduced; float32.
        turns: of each way, for each size; one more warms up.
        seed: of the order.
    """

    model_config = ConfigDict(frozen=True)

    sizes: tuple[int, ...]
    turns: int
    seed: int


class Exchanged(BaseModel):
    """What one worker found.

    Attributes:
        seconds: of a call, by size and way, for each turn.
        is_right: whether every way's sum was the sum.
    """

    seconds: dict[int, dict[str, list[float]]]
    is_right: bool


def work(task: Exchange, folder: Path) -> Exchanged:
    """For each size: all ways in turns."""
    place = Place.of()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT_S))
    order = random.Random(task.seed)  # noqa: S311  it has to be the same on all workers
    store = dist.distributed_c10d._get_default_store()
    found = Exchanged(seconds={}, is_right=True)
    try:
        for number, size in enumerate(task.sizes):
            with closing(_shared_memory(place, store_of(number, store))) as transport:
                ways = _ways(transport, place, size // 4)
                found.is_right &= all(_is_sum(ways[way], place) for way in WAYS[:2])
                found.seconds[size] = _in_turns(ways, calls_for(size), task.turns, order)
    finally:
        dist.destroy_process_group()
    return found


def calls_for(size: int) -> int:
    """How many calls one after the other make a turn."""
    return max(FEWEST_CALLS, min(MOST_CALLS, BYTES_PER_TURN // size))


Way = Callable[[float | None], Tensor]
"""Reduces what lies there; given a value, this worker's input is that before. Returns the result."""


def _ways(transport: Transport, place: Place, numel: int) -> dict[str, Way]:
    """Three ways. Each finds its input where gradients lie when they are ready, and nothing is allocated in a call."""
    padded = -(-numel // ALIGNMENT) * ALIGNMENT
    bucket = Bucket((), padded, torch.float32, torch.device("cpu"))
    ((mine,),) = transport.allocate([bucket], 1)
    filled, gathered = torch.empty(numel).fill_(0.0), traffic(place, padded)

    def shared_memory(value: float | None) -> Tensor:
        _fill(mine, value)
        return transport.reduce(0, [mine])

    def gloo(value: float | None) -> Tensor:
        _fill(filled, value)
        dist.all_reduce(filled)
        return filled

    def bound(value: float | None) -> Tensor:
        return gathered()

    _fill(mine, 0.0)
    return dict(zip(WAYS, (shared_memory, gloo, bound), strict=True))


def traffic(place: Place, numel: int) -> Callable[[], Tensor]:
    """What no exact all-reduce between workers of one host can do without, and nothing else.

    Each of W workers adds its 1/W of all W inputs into its 1/W of the one result: for 2 workers one
    ``torch.add(a, b, out=c)`` over halves. Together they read every input once and write the result once, in memory
    that was allocated and touched before. No worker waits for another, and nothing is copied: this is the memory's
    bandwidth with as many workers as there are, in the instructions that an all-reduce has to use. For more than 2
    workers the sums are made in pieces that stay in the cache.
    """
    bounds = [unit * ALIGNMENT for unit in even_bounds(numel // ALIGNMENT, place.workers)]
    part = bounds[place.rank + 1] - bounds[place.rank]
    inputs = [torch.empty(part).fill_(0.0) for _ in range(place.workers)]
    result = torch.empty(part).fill_(0.0)
    piece = part if place.workers == 2 else PIECE
    pieces = [slice(start, min(start + piece, part)) for start in range(0, part, max(piece, 1))]

    def add() -> Tensor:
        for here in pieces:
            torch.add(inputs[0][here], inputs[1][here], out=result[here])
            for other in inputs[2:]:
                result[here].add_(other[here])
        return result

    return add


def _fill(tensor: Tensor, value: float | None) -> None:
    if value is not None:
        tensor.fill_(value)


def _is_sum(way: Way, place: Place) -> bool:
    total = way(float(place.rank + 1))
    right = bool((total == sum(range(place.workers + 1))).all())
    dist.barrier()  # nobody overwrites its input while others still read the result
    way(0.0)
    return right


def _in_turns(ways: dict[str, Way], calls: int, turns: int, order: random.Random) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(turns + 1):
        for name in order.sample(list(ways), len(ways)):
            dist.barrier()
            took = _timed(ways[name], calls)
            if turn:
                seconds[name].append(took)
    return seconds


def _timed(way: Way, calls: int) -> float:
    begun = perf_counter()
    for _ in range(calls):
        way(None)
    return (perf_counter() - begun) / calls


def store_of(number: int, store: dist.Store) -> TorchRendezvousStore:
    """Of one meeting alone: on a store of all, whoever comes first reads what the others posted for the one before."""
    return TorchRendezvousStore(dist.PrefixStore(f"meeting-{number}", store), TIMEOUT_S)


def _shared_memory(place: Place, addresses: TorchRendezvousStore) -> Transport:
    peers = meet(place.rank, place.workers, addresses, TIMEOUT_S)
    return SharedMemoryTransport(peers, place.rank, Split.even(place.workers, place.workers))


if __name__ == "__main__":
    serve(Exchange, work)
