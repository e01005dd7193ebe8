"""Several workers as threads of one process, over real transports."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist

from unisono.errors import WorkerLost
from unisono.membership.rendezvous import Generation
from unisono.plan.split import Split
from unisono.reduce.peers import meet
from unisono.reduce.process_group import ProcessGroupTransport
from unisono.reduce.shared_memory import SharedMemoryTransport
from unisono.reduce.transport import Solo, Transport
from unisono.train.group.workers import Workers

PATIENCE_S = 20.0


class TorchRendezvousStore:
    """Where threads find each other."""

    def __init__(self) -> None:
        self._store = dist.HashStore()

    def post(self, name: str, value: bytes) -> None:
        self._store.set(name, value.hex())

    def read(self, name: str) -> bytes:
        return bytes.fromhex(self._store.get(name).decode())


def gloo(
    rank: int, split: Split, board: TorchRendezvousStore, timeout_s: float = PATIENCE_S, name: str = "all"
) -> dist.ProcessGroupGloo:
    """A process group of these workers."""
    options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timedelta(seconds=timeout_s)
    options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    return dist.ProcessGroupGloo(dist.PrefixStore(name, board._store), rank, split.workers, options)


class OverProcessGroup:
    """Gloo with some topology, or standard collectives."""

    def __init__(self, topology: str | None, clock: Callable[[], float] = perf_counter) -> None:
        self.topology, self.clock = topology, clock

    def __call__(self, rank: int, split: Split, board: TorchRendezvousStore, timeout_s: float) -> Transport:
        group = gloo(rank, split, board, timeout_s)
        return ProcessGroupTransport(group, rank, split, torch.device("cpu"), self.topology, self.clock)


def over_shared_memory(rank: int, split: Split, board: TorchRendezvousStore, timeout_s: float) -> Transport:
    """The memory of one host."""
    return SharedMemoryTransport(meet(rank, split.workers, board, timeout_s), rank, split)


Connect = Callable[[int, Split, TorchRendezvousStore, float], Transport]


def run_over(
    connect: Connect, split: Split, work: Callable[[Transport], Any], timeout_s: float = PATIENCE_S
) -> list[Any]:
    """Run some work on every worker of a transport, and return what each returned; if one raises, others are woken."""
    board = TorchRendezvousStore()

    def worker(rank: int) -> Any:
        transport = Solo(split.shards) if split.workers == 1 else connect(rank, split, board, timeout_s)
        try:
            return work(transport)
        except BaseException:
            transport.abort()
            raise
        finally:
            transport.close()

    with ThreadPoolExecutor(split.workers) as pool:
        return list(pool.map(worker, range(split.workers)))


def side_by_side(number: int, work: Callable[[Workers], Any], host: str = "", shards: int | None = None) -> list[Any]:
    """Run some work on each of so many workers, and return what each returned, by rank.

    If one raises, the others are woken; what is raised here is the first cause.
    """
    addresses, split = TorchRendezvousStore(), Split.even(shards or number, number)
    causes: list[BaseException] = []

    def worker(rank: int) -> Any:
        alone = number == 1
        transport = Solo(split.shards) if alone else over_shared_memory(rank, split, addresses, PATIENCE_S)
        workers = Workers(Generation(1, rank, split), transport, host)
        try:
            return work(workers)
        except BaseException as error:
            if not isinstance(error, WorkerLost):
                causes.append(error)
            workers.abort()
            raise
        finally:
            workers.close()

    with ThreadPoolExecutor(number) as pool:
        futures = [pool.submit(worker, rank) for rank in range(number)]
    if causes:
        raise causes[0]
    return [future.result() for future in futures]
