"""Several workers as threads of one process, over real transports."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch.distributed as dist

from unisono.errors import WorkerLost
from unisono.membership.rendezvous import Generation
from unisono.plan.split import Split
from unisono.reduce.peers import meet
from unisono.reduce.shared_memory import SharedMemoryTransport
from unisono.reduce.transport import Solo
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


def side_by_side(number: int, work: Callable[[Workers], Any], host: str = "", shards: int | None = None) -> list[Any]:
    """Run some work on each of so many workers, and return what each returned, by rank.

    If one raises, the others are woken; what is raised here is the first cause.
    """
    addresses, split = TorchRendezvousStore(), Split.even(shards or number, number)
    causes: list[BaseException] = []

    def worker(rank: int) -> Any:
        alone = number == 1
        transport = (
            Solo(split.shards)
            if alone
            else SharedMemoryTransport(meet(rank, number, addresses, PATIENCE_S), rank, split)
        )
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
