"""Hosts are groups of threads here: the bits are those of the tree, whatever the number of hosts and workers."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from unisono.errors import WorkerLost
from unisono.plan.split import Split
from unisono.plan.tree import Node, SummationTree
from unisono.reduce.buckets import Bucket
from unisono.reduce.peers import meet
from unisono.reduce.process_group import ProcessGroupTransport
from unisono.reduce.shared_memory import HierarchicalTransport, host_split
from unisono.reduce.transport import Transport

pytestmark = pytest.mark.unit

LAYOUTS = [(2, 1), (2, 2), (3, 1), (2, 3), (3, 2), (4, 2)]
"""Hosts, and workers of each."""

SERVED = [(2, 1, 1), (2, 2, 1), (2, 2, 2), (2, 2, 3), (3, 2, 2), (3, 2, 3)]
"""Also how many of them only serve: some of the last host's, all, or more."""


class Noticeboard:
    """Where threads find each other."""

    def __init__(self, store: dist.Store, host: int) -> None:
        self._store = dist.PrefixStore(f"host/{host}", store)

    def post(self, name: str, value: bytes) -> None:
        self._store.set(name, value.hex())

    def read(self, name: str) -> bytes:
        return bytes.fromhex(self._store.get(name).decode())


def process_group(name: str, rank: int, split: Split, store: dist.Store) -> Transport:
    options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timedelta(seconds=20)
    options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    group = dist.ProcessGroupGloo(dist.PrefixStore(name, store), rank, split.workers, options)
    return ProcessGroupTransport(group, rank, split, torch.device("cpu"))


def on_hosts(hosts: int, local: int, split: Split, work: Callable[[Transport], Any]) -> list[Any]:
    """Run some work on every worker, and return what each returned."""
    store = dist.HashStore()

    def worker(rank: int) -> Any:
        number, place = divmod(rank, local)
        peers = meet(place, local, Noticeboard(store, number), 20)
        across = process_group(f"across/{place}", number, host_split(split, local), store)
        transport = HierarchicalTransport(peers, rank, split, across, process_group("all", rank, split, store))
        try:
            return work(transport)
        finally:
            transport.close()

    with ThreadPoolExecutor(hosts * local) as pool:
        return list(pool.map(worker, range(hosts * local)))


def tree_sum(values: list[Tensor]) -> Tensor:
    leaves = {Node(shard, shard + 1): value for shard, value in enumerate(values)}
    return SummationTree(len(values)).finish(leaves, torch.add)


def partials_of(values: list[Tensor], shards: range) -> list[Tensor]:
    tree = SummationTree(len(values))
    leaves = {Node(shard, shard + 1): values[shard] for shard in shards}
    partials = [tree.finish(leaves, torch.add, node).clone() for node in tree.cover(shards.start, shards.stop)]
    return partials or [torch.full_like(values[0], 77)]  # of a server, whose values are not read


@pytest.mark.parametrize("shards", [8, 13])
@pytest.mark.parametrize(("hosts", "local", "servers"), [*((*each, 0) for each in LAYOUTS), *SERVED])
def test_every_worker_of_every_host_gets_the_bits_of_the_tree(
    hosts: int, local: int, servers: int, shards: int
) -> None:
    torch.manual_seed(0)
    split = Split.even(shards, hosts * local).with_servers(servers)
    sizes = [64, 64 * 101, 192]
    values = [[torch.randn(size) * 10.0 ** (shard % 5) for shard in range(shards)] for size in sizes]
    buckets = [Bucket((), size, torch.float32, torch.device("cpu")) for size in sizes]

    def reduce(transport: Transport) -> list[Tensor]:
        mine = split.of(transport.rank)
        rows = transport.allocate(buckets, shards)
        totals = []
        for number, value in enumerate(values):
            partials = partials_of(value, mine)
            places = [row[number] for row, _ in zip(rows, partials, strict=False)]
            for place, partial in zip(places, partials, strict=True):
                place.copy_(partial)
            totals.append(transport.reduce(number, places, 3.0).clone())
        return totals

    for totals in on_hosts(hosts, local, split, reduce):
        for total, value in zip(totals, values, strict=True):
            assert torch.equal(total, tree_sum(value) / 3)


@pytest.mark.parametrize(("hosts", "local"), [(2, 2), (3, 1), (2, 3)])
def test_hosts_that_are_given_other_shards_get_the_bits_of_their_tree(hosts: int, local: int) -> None:
    torch.manual_seed(0)
    split, cuts = Split.even(7, hosts * local), [7, 14, 42, 7]
    values = {cut: [torch.randn(64 * 101) * 10.0 ** (shard % 5) for shard in range(cut)] for cut in cuts}

    def reduce(transport: Transport) -> list[Tensor]:
        totals = []
        for cut in cuts:
            transport.resplit(split.refined(cut))
            partials = partials_of(values[cut], transport.split.of(transport.rank))
            totals.append(transport.reduce("bucket", partials).clone())
        return totals

    for totals in on_hosts(hosts, local, split, reduce):
        assert all(torch.equal(total, tree_sum(values[cut])) for total, cut in zip(totals, cuts, strict=True))


def test_small_rows_are_gathered_and_broadcast_between_all_hosts() -> None:
    def work(transport: Transport) -> tuple[list[list[int]], int]:
        word = torch.tensor(transport.rank)
        transport.broadcast(word, 3)
        return transport.all_gather(torch.tensor([transport.rank])).tolist(), int(word)

    assert on_hosts(2, 2, Split.even(4, 4), work) == [([[0], [1], [2], [3]], 3)] * 4


def test_a_worker_that_leaves_is_noticed_on_its_own_host_and_on_the_others() -> None:
    def work(transport: Transport) -> str:
        if transport.rank == 1:
            return "left"
        with pytest.raises(WorkerLost):
            for _ in range(2):
                transport.reduce("bucket", partials_of([torch.ones(64)] * 4, transport.split.of(transport.rank)))
        return "noticed"

    assert on_hosts(2, 2, Split.even(4, 4), work) == ["noticed", "left", "noticed", "noticed"]


def test_hosts_need_equal_numbers_of_workers() -> None:
    assert host_split(Split.even(8, 6), 3).bounds == (0, 5, 8)
    with pytest.raises(ValueError, match="5 workers cannot be 2 on every host"):
        host_split(Split.even(8, 5), 2)
