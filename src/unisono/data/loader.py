"""Reads one worker's shards, ahead of the steps that need them."""

from collections import deque
from collections.abc import Iterator
from itertools import cycle
from typing import Any, Protocol

from unisono.data.loader_processes import LoaderProcesses, Processes
from unisono.data.shards import LocatedShards, ShardSource, ShardsRequest


class Loaded(Protocol):
    """Batches, in the order of the steps. Each is a list with the batches of this worker's shards."""

    def __next__(self) -> list[Any]:
        """The next step's shards; waits for them if need be."""

    def is_ready(self) -> bool:
        """Whether the next step's shards are here already."""

    def close(self) -> None:
        """End what loads."""


def load(source: ShardSource, requests: Iterator[ShardsRequest], processes: Processes) -> Loaded:
    """Load steps.

    Args:
        source: gives the samples of each shard.
        requests: one per step. Consumed as far ahead as is loaded.
        processes: the processes that load.

    Raises:
        JobError: this system cannot fork.
    """
    if not processes.count:
        return InProcess(source, requests)
    return Ahead(source, requests, processes)


class InProcess:
    """Loads in this process. Draws from the global random generators: seed them before anything else draws."""

    def __init__(self, source: ShardSource, requests: Iterator[ShardsRequest]) -> None:
        self._source = source
        self._requests = requests

    def __next__(self) -> list[Any]:
        """Load now."""
        return self._source.load(next(self._requests))

    def is_ready(self) -> bool:
        """Nothing is loaded ahead."""
        return False

    def close(self) -> None:
        """There is nothing to end."""


class Ahead:
    """Loads in processes of its own, which live as long as the loop: over all its epochs."""

    def __init__(self, source: ShardSource, requests: Iterator[ShardsRequest], processes: Processes) -> None:
        self._source, self._requests = source, requests
        self._most = processes.ahead * processes.count
        self._asked = deque[int]()
        self._processes = LoaderProcesses(source.fetch, processes, share_slots=True)
        self._turns = cycle(range(processes.count))
        self._next = next(self._turns)
        self._ask()

    def __next__(self) -> list[Any]:
        """The oldest step that was asked for.

        Raises:
            DataError: its loader process failed, died or hangs.
        """
        if not self._asked:
            raise StopIteration
        shards: list[Any] = self._processes.answer(self._asked.popleft())
        self._ask()
        return shards

    def is_ready(self) -> bool:
        """Whether the next answer is here."""
        return bool(self._asked) and self._processes.is_ready(self._asked[0])

    def close(self) -> None:
        """End the processes; those that are loading get a moment."""
        self._asked.clear()
        self._processes.close()

    def _ask(self) -> None:
        while len(self._asked) < self._most and self._processes.ask(self._next, self._request):
            self._asked.append(self._next)
            self._next = next(self._turns)

    def _request(self) -> LocatedShards | None:
        request = next(self._requests, None)
        return None if request is None else self._source.located(request)
