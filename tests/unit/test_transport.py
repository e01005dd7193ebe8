"""Every transport gives the bits of the tree, for any number of workers; workers are threads here."""

import platform
import re
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from network_keys import private
from side_by_side import Connect, OverProcessGroup, TorchRendezvousStore, over_shared_memory, run_over
from unisono.errors import JobMismatch, NoProgress, WorkerLost
from unisono.plan.split import Split
from unisono.plan.topology import TOPOLOGIES, distinct
from unisono.plan.tree import Node, SummationTree
from unisono.reduce import data_network
from unisono.reduce.buckets import Bucket
from unisono.reduce.data_network import NetworkKeys
from unisono.reduce.process_group import ProcessGroupTransport
from unisono.reduce.transport import Solo, Transport
from unisono.reduce.wire import SocketGroup

pytestmark = pytest.mark.unit

WithWorkers = Callable[..., list[Any]]
SPLITS = [
    Split.even(8, 1),
    Split.even(8, 2),
    Split.even(8, 3),
    Split.even(8, 5),
    Split.even(8, 8),
    Split((0, 1, 7, 8)),
    Split((0, 3, 8)),
    Split.even(7, 3),
    Split.even(5, 5),
    Split.even(13, 4),
    Split.even(8, 2).with_servers(1),
    Split.even(8, 3).with_servers(1),
    Split.even(8, 3).with_servers(2),
    Split.even(13, 5).with_servers(2),
]


@pytest.fixture(autouse=True, scope="module")
def each_worker_has_one_thread() -> Iterator[None]:
    """All workers are on this machine's cores already: threads of their own would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class OverSockets:
    """Sockets of our own with some topology, plain or with TLS, of hosts or of one."""

    def __init__(
        self, topology: str = "direct", keys: Callable[[], NetworkKeys] = lambda: PLAIN, host: str = "127.0.0.1"
    ) -> None:
        self.topology, self.keys, self.host = topology, keys, host

    def __call__(self, rank: int, split: Split, board: TorchRendezvousStore, timeout_s: float) -> Transport:
        wires = data_network.connect_all(rank, self.host, split.workers, board, self.keys(), timeout_s)
        group = SocketGroup(rank, wires, timeout_s)
        return ProcessGroupTransport(group, rank, split, torch.device("cpu"), self.topology)


PLAIN: NetworkKeys = NetworkKeys.plain()


GROUPS: dict[str, Connect] = {
    **{name: OverSockets(name) for name in TOPOLOGIES},
    "tls": OverSockets("direct", private),
    "one host": OverSockets("direct", host=""),
    "gloo": OverProcessGroup("direct"),
    "collectives": OverProcessGroup(None),
}
TRANSPORTS: dict[str, Connect] = {**GROUPS, "shared memory": over_shared_memory}

over_any_topology = pytest.mark.parametrize("with_workers", list(GROUPS.values()), ids=list(GROUPS), indirect=True)
over_any_kind = pytest.mark.parametrize(
    "with_workers",
    [OverSockets(), OverSockets("direct", private), OverProcessGroup("direct"), over_shared_memory],
    ids=["sockets", "tls", "gloo", "shared memory"],
    indirect=True,
)


@pytest.fixture(params=list(TRANSPORTS.values()), ids=list(TRANSPORTS))
def with_workers(request: pytest.FixtureRequest) -> WithWorkers:
    """Run some work on every worker of a real transport, and return what each returned."""
    return partial(run_over, request.param)


def partials_of(values: list[Tensor], shards: range) -> list[Tensor]:
    tree = SummationTree(len(values))
    leaves = {Node(shard, shard + 1): values[shard] for shard in shards}
    partials = [tree.finish(leaves, torch.add, node).clone() for node in tree.cover(shards.start, shards.stop)]
    return partials or [torch.full_like(values[0], 77)]  # of a server, whose values are not read


def tree_sum(values: list[Tensor]) -> Tensor:
    leaves = {Node(shard, shard + 1): value for shard, value in enumerate(values)}
    return SummationTree(len(values)).finish(leaves, torch.add)


@pytest.mark.parametrize("split", SPLITS, ids=lambda split: "-".join(map(str, split.bounds)))
def test_every_worker_gets_the_bits_of_the_tree(split: Split, with_workers: WithWorkers) -> None:
    torch.manual_seed(0)
    lengths = [64, 192, 64 * 101, 64 * 5000]  # fewer pieces than workers, and more
    values = {
        length: [torch.randn(length) * 10.0 ** (shard % 5) for shard in range(split.shards)] for length in lengths
    }
    expected = {length: tree_sum(values[length]) for length in lengths}

    def reduce(transport: Transport) -> list[Tensor]:
        mine = split.of(transport.rank)
        repeated = [*lengths, *lengths[:3]]
        return [transport.reduce("bucket", partials_of(values[length], mine)).clone() for length in repeated]

    for totals in with_workers(split, reduce):
        for total in totals:
            assert torch.equal(total, expected[total.numel()])


def test_a_bucket_without_elements_is_none_to_wait_for(with_workers: WithWorkers) -> None:
    totals = with_workers(Split.even(3, 3), lambda transport: transport.reduce("nothing", [torch.zeros(0)]))
    assert [total.shape for total in totals] == [(0,)] * 3


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64])
def test_other_dtypes_travel_too(dtype: torch.dtype, with_workers: WithWorkers) -> None:
    torch.manual_seed(0)
    values = [(torch.randn(128) * 100).to(dtype) for _ in range(8)]
    split = Split.even(8, 3)
    totals = with_workers(split, lambda transport: transport.reduce(0, partials_of(values, split.of(transport.rank))))
    assert all(torch.equal(total, tree_sum(values)) for total in totals)


def test_the_total_of_a_bucket_stays_until_that_bucket_is_reduced_again(with_workers: WithWorkers) -> None:
    values = [torch.full((64,), float(shard)) for shard in range(4)]
    split = Split.even(4, 2)

    def reduce(transport: Transport) -> tuple[float, float]:
        mine = split.of(transport.rank)
        first = transport.reduce("a", partials_of(values, mine))
        second = transport.reduce("b", partials_of([value * 10 for value in values], mine))
        return first[0].item(), second[0].item()

    assert with_workers(split, reduce) == [(6.0, 60.0), (6.0, 60.0)]


@pytest.mark.parametrize("servers", [1, 2])
def test_what_workers_push_and_pull_is_the_cover_of_their_shards_and_the_sum(
    servers: int, with_workers: WithWorkers
) -> None:
    split = Split.even(8, 5).with_servers(servers)

    def work(transport: Transport) -> int:
        transport.reduce("b", partials_of([torch.ones(64 * 120)] * 8, split.of(transport.rank)))
        return transport.traffic.take()[0]

    tree, size = SummationTree(8), 64 * 120 * 4
    pushed = [size * len(tree.cover(split.of(rank).start, split.of(rank).stop)) for rank in range(5 - servers)]
    assert with_workers(split, work) == [*pushed, *[4 * size // servers] * servers]


def test_a_long_bucket_is_pushed_in_pieces_while_the_first_ones_are_pulled(with_workers: WithWorkers) -> None:
    torch.manual_seed(0)
    values = [torch.randn(5 * 2**19) for _ in range(8)]  # 10 MiB
    split = Split.even(8, 4).with_servers(2)
    totals = with_workers(split, lambda own: own.reduce("b", partials_of(values, split.of(own.rank)), 7.0).clone())
    expected = tree_sum(values).div_(7.0)
    assert all(torch.equal(total, expected) for total in totals)


def test_workers_become_servers_and_compute_again_between_two_steps(with_workers: WithWorkers) -> None:
    torch.manual_seed(0)
    values = [torch.randn(64 * 101) for _ in range(8)]

    def work(transport: Transport) -> list[Tensor]:
        totals = []
        for servers in (0, 2, 1, 0):
            split = Split.even(8, 4).with_servers(servers)
            transport.resplit(split)
            totals.append(transport.reduce("b", partials_of(values, split.of(transport.rank)), 3.0).clone())
        return totals

    for totals in with_workers(Split.even(8, 4), work):
        assert all(torch.equal(total, tree_sum(values).div_(3.0)) for total in totals)


@pytest.mark.parametrize("with_workers", [OverProcessGroup("auto")], indirect=True)
def test_there_is_but_one_way_to_servers_and_nothing_to_measure(with_workers: WithWorkers) -> None:
    def work(transport: Transport) -> tuple[str, int]:
        transport.allocate([Bucket((), 640, torch.float32, torch.device("cpu"))], 1)
        transport.reduce("b", [torch.zeros(640)] * 8)
        return transport.topology, len(transport.measured)

    assert with_workers(Split.even(8, 3).with_servers(1), work) == [("direct", 0)] * 3


@pytest.mark.parametrize("servers", [0, 1])
@pytest.mark.parametrize("with_workers", [OverProcessGroup("direct")], indirect=True)
def test_a_native_sum_agrees_with_the_tree_up_to_rounding_and_servers_add_nothing_of_their_own(
    servers: int, with_workers: WithWorkers
) -> None:
    torch.manual_seed(0)
    values = [torch.randn(640, dtype=torch.float64) for _ in range(8)]
    split = Split.even(8, 3).with_servers(servers)
    totals = with_workers(
        split, lambda own: own.reduce_anyhow("b", partials_of(values, split.of(own.rank)), 2.0).clone()
    )
    assert all(torch.allclose(total, tree_sum(values) / 2, rtol=1e-12) for total in totals)


@over_any_kind
@pytest.mark.parametrize("split", SPLITS[1:], ids=lambda split: "-".join(map(str, split.bounds)))
def test_partial_sums_that_lie_where_the_transport_wants_them_give_the_bits_of_the_tree(
    split: Split, with_workers: WithWorkers
) -> None:
    torch.manual_seed(0)
    sizes = [64, 64 * 700, 192]
    values = [[torch.randn(size) * 10.0 ** (shard % 5) for size in sizes] for shard in range(split.shards)]
    buckets = [Bucket((), size, torch.float32, torch.device("cpu")) for size in sizes]

    def reduce(transport: Transport) -> list[Tensor]:
        mine = split.of(transport.rank)
        rows = transport.allocate(buckets, split.shards)[::-1]  # rows come in any order
        totals = []
        for number in range(len(sizes)):
            partials = partials_of([value[number] for value in values], mine)
            places = [row[number] for row, _ in zip(rows, partials, strict=False)]
            for place, each in zip(places, partials, strict=True):
                place.copy_(each)
            totals.append(transport.reduce(number, places))
        return [total.clone() for total in totals]

    expected = [tree_sum([value[number] for value in values]) for number in range(len(sizes))]
    for totals in with_workers(split, reduce):
        assert all(torch.equal(*each) for each in zip(totals, expected, strict=True))


@pytest.mark.parametrize(
    "split",
    [Split.even(8, 1), Split.even(8, 3), Split((0, 3, 8)), Split.even(5, 5), Split.even(8, 3).with_servers(1)],
    ids=str,
)
def test_workers_that_are_given_other_shards_get_the_bits_of_their_tree(
    split: Split, with_workers: WithWorkers
) -> None:
    torch.manual_seed(0)
    cuts = [split.shards, 2 * split.shards, 6 * split.shards, split.shards]
    sizes = [64 * 7, 64 * 700]
    values = {
        cut: [[torch.randn(size) * 10.0 ** (shard % 5) for shard in range(cut)] for size in sizes] for cut in cuts
    }
    sums = {cut: [tree_sum(each) for each in values[cut]] for cut in cuts}
    buckets = [Bucket((), size, torch.float32, torch.device("cpu")) for size in sizes]

    def reduce(transport: Transport) -> list[tuple[int, Tensor, Tensor]]:
        found = []
        for cut in cuts:
            transport.resplit(split.refined(cut))
            mine = transport.split.of(transport.rank)
            rows = transport.allocate(buckets, cut)
            for number in range(len(sizes)):
                partials = partials_of(values[cut][number], mine)
                placed = [row[number].copy_(partial) for row, partial in zip(rows, partials, strict=False)]
                total = transport.reduce(number, placed, 3.0).clone()
                found.append((number, total, sums[cut][number].div(3.0)))
                copied = transport.reduce("copied", partials).clone()  # from anywhere
                found.append((number, copied, sums[cut][number]))
        return found

    for totals in with_workers(split, reduce):
        assert len(totals) == 16
        assert all(torch.equal(total, expected) for _, total, expected in totals)


def test_a_split_for_other_workers_is_refused() -> None:
    with pytest.raises(ValueError, match="a split among 2 workers, and there are 1"):
        Solo(8).resplit(Split.even(8, 2))


def test_memory_that_was_planned_for_other_shards_is_let_go_of() -> None:
    def work(rank: int) -> bool:
        transport = over_shared_memory(rank, Split.even(4, 2), board, 20)
        (row,) = transport.allocate([Bucket((), 640, torch.float32, torch.device("cpu"))], 1)
        transport.reduce("bucket", row)
        pool = transport._memory._places[row[0].data_ptr()].pool  # type: ignore[attr-defined]
        memory = weakref.ref(pool.view._map)
        del row, pool
        transport.resplit(Split.even(8, 2))
        is_gone = memory() is None
        transport.close()
        return is_gone

    board = TorchRendezvousStore()
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(work, range(2))) == [True, True]


@over_any_kind
@pytest.mark.parametrize(("workers", "numel"), [(1, 2), (2, 2), (5, 2), (3, 0), (3, 1), (3, 10_000), (3, 300_000)])
def test_rows_in_the_order_of_ranks_and_broadcasts_arrive_whole(
    workers: int, numel: int, with_workers: WithWorkers
) -> None:
    def work(transport: Transport) -> bool:
        row = torch.arange(numel, dtype=torch.int64) + transport.rank
        rows = transport.all_gather(row)
        word = row.clone()
        transport.broadcast(word, workers - 1)
        expected = [torch.arange(numel) + rank for rank in range(workers)]
        return len(rows) == workers and all(map(torch.equal, rows, expected)) and torch.equal(word, expected[-1])

    assert with_workers(Split.even(5, workers), work) == [True] * workers


def test_workers_of_a_host_that_make_different_calls_are_told_so() -> None:
    def gather(transport: Transport) -> None:
        rows = 529 if transport.rank == 0 else 8
        with pytest.raises(JobMismatch, match=f"rank {1 - transport.rank} sent .* in different calls.*run.is_main"):
            transport.all_gather(torch.zeros(rows, dtype=torch.uint8))

    def broadcast(transport: Transport) -> None:
        word = torch.zeros(529 if transport.rank == 0 else 8, dtype=torch.uint8)
        with nullcontext() if transport.rank == 0 else pytest.raises(JobMismatch, match="rank 0 sent 529 bytes"):
            transport.broadcast(word, 0)

    for work in (gather, broadcast):
        run_over(over_shared_memory, Split.even(2, 2), work)


class Aborted:
    """A group whose calls return at once, and also when it was aborted, as NCCL's do."""

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> "Aborted":
        return self

    def wait(self) -> bool:
        return True

    def abort(self) -> None:
        return None


def test_what_a_call_has_received_is_not_believed_where_the_group_was_aborted_meanwhile() -> None:
    transport = ProcessGroupTransport(Aborted(), 0, Split.even(2, 2), torch.device("cpu"))
    under_way = transport.receive(torch.empty(8), 1, 0)
    transport.abort()
    with pytest.raises(WorkerLost, match="rank 0 was cut off from the other workers"):
        under_way.wait()
    transport.close()


def test_a_worker_that_leaves_is_noticed_by_the_others_and_not_waited_for(with_workers: WithWorkers) -> None:
    split = Split.even(3, 3)

    def work(transport: Transport) -> str:
        transport.all_gather(torch.zeros(1))
        if transport.rank == 1:
            return "left"
        with pytest.raises(WorkerLost, match=f"rank {transport.rank} lost (its connection|rank [012])"):
            transport.all_gather(torch.zeros(1))
        return "noticed"

    assert with_workers(split, work) == ["noticed", "left", "noticed"]


@over_any_kind
def test_a_worker_that_gives_no_sign_is_not_waited_for_forever(with_workers: WithWorkers) -> None:
    split = Split.even(2, 2)
    others_gave_up = threading.Event()

    def work(transport: Transport) -> str:
        transport.all_gather(torch.zeros(1))
        if transport.rank == 1:
            others_gave_up.wait(20)
            return "hung"
        with pytest.raises(NoProgress, match=rf"rank 0 o[nf] host {re.escape(platform.node())} .*timeout_s"):
            transport.all_gather(torch.zeros(1))
        others_gave_up.set()
        return "gave up"

    assert with_workers(split, work, timeout_s=0.5) == ["gave up", "hung"]


@over_any_topology
def test_a_bucket_has_its_buffers_from_its_first_reduction_on(with_workers: WithWorkers) -> None:
    split = Split.even(8, 3)

    def reduce(transport: Transport) -> set[int]:
        partials = partials_of([torch.ones(64 * 50)] * 8, split.of(transport.rank))
        return {transport.reduce("bucket", partials).data_ptr() for _ in range(3)}

    assert [len(places) for places in with_workers(split, reduce)] == [1, 1, 1]


@over_any_topology
def test_a_worker_that_is_lost_is_noticed_by_all_others_though_not_all_talk_to_it(with_workers: WithWorkers) -> None:
    split = Split.even(8, 5)
    all_noticed = threading.Barrier(4, timeout=20)  # nobody needs another one's script to end

    def work(transport: Transport) -> str:
        partials = partials_of([torch.ones(64 * 50)] * 8, split.of(transport.rank))
        transport.reduce("bucket", partials)
        if transport.rank == 3:
            return "lost"
        with pytest.raises(WorkerLost, match=f"rank {transport.rank} lost its connection"):
            transport.reduce("bucket", partials)
        all_noticed.wait()
        return "noticed"

    assert with_workers(split, work) == ["noticed", "noticed", "noticed", "lost", "noticed"]


@over_any_topology
def test_a_worker_that_does_not_reduce_is_not_waited_for_forever(with_workers: WithWorkers) -> None:
    split = Split.even(8, 3)
    others_gave_up = threading.Barrier(3, timeout=20)

    def work(transport: Transport) -> str:
        partials = partials_of([torch.ones(64 * 50)] * 8, split.of(transport.rank))
        transport.reduce("bucket", partials)
        found = "hung"
        if transport.rank != 1:
            with pytest.raises((NoProgress, WorkerLost)) as error:
                transport.reduce("bucket", partials)
            found = type(error.value).__name__
        others_gave_up.wait()
        return found

    first, hung, last = with_workers(split, work, timeout_s=0.5)
    assert hung == "hung"
    assert "NoProgress" in (first, last)


@over_any_topology
def test_a_reduction_ends_when_this_worker_hangs_up_from_another_thread(with_workers: WithWorkers) -> None:
    split = Split.even(8, 3)
    hung_up = threading.Event()

    def hang_up(transport: Transport) -> None:
        transport.close()
        hung_up.set()

    def work(transport: Transport) -> None:
        partials = partials_of([torch.ones(64 * 50)] * 8, split.of(transport.rank))
        transport.reduce("bucket", partials)
        if transport.rank == 1:  # the others wait for it, and one of them has enough
            hung_up.wait(20)
        hanging_up = threading.Timer(0.05, hang_up, [transport])
        if transport.rank == 0:
            hanging_up.start()
        with pytest.raises(WorkerLost):
            transport.reduce("bucket", partials)
        if transport.rank == 0:
            hanging_up.join()

    with_workers(split, work)


AUTO = pytest.mark.parametrize("with_workers", [OverProcessGroup("auto")], indirect=True)
BUCKETS = [Bucket((), size, torch.float32, torch.device("cpu")) for size in (64, 64 * 700, 192)]


@AUTO
@pytest.mark.parametrize("workers", [2, 3, 5])
def test_auto_measures_on_buckets_of_these_sizes_and_all_workers_read_the_same_table(
    workers: int, with_workers: WithWorkers
) -> None:
    def allocate(transport: Transport) -> list[dict[str, Any]]:
        transport.allocate(BUCKETS, 1)
        transport.allocate(BUCKETS, 1)  # known by now
        return transport.measured

    tables = with_workers(Split.even(8, workers), allocate)
    assert all(table == tables[0] for table in tables)
    assert [line["bytes"] for line in tables[0]] == [256, 768, 64 * 700 * 4]
    for line in tables[0]:
        assert tuple(line["seconds"]) == distinct(workers)
        assert line["fastest"] == min(line["seconds"], key=line["seconds"].get)


def test_the_slowest_workers_time_counts() -> None:
    own = threading.local()

    def clock() -> float:
        own.now += own.tick
        return float(own.now)

    def allocate(transport: Transport) -> list[float]:
        own.now, own.tick = 0, 7 if transport.rank == 1 else 2
        transport.allocate(BUCKETS[:1], 1)
        return list(transport.measured[0]["seconds"].values())

    assert run_over(OverProcessGroup("auto", clock), Split.even(8, 3), allocate) == [[7.0, 7.0, 7.0]] * 3


# -- what is measured, and changed between two steps


@pytest.mark.parametrize("split", [Split.even(8, 2), Split.even(8, 3), Split.even(8, 5)])
def test_whatever_way_the_sums_take_between_two_steps_the_bits_stay(split: Split) -> None:
    values = [torch.randn(1000 * 64, generator=torch.Generator().manual_seed(shard)) for shard in range(8)]
    bucket = Bucket((), values[0].numel(), torch.float32, torch.device("cpu"))

    def work(transport: Transport) -> list[Any]:
        found = []
        transport.allocate([bucket], 1)
        for name in ("ring", "auto", "tree", "star", "direct", "auto"):
            transport.use_topology(name)
            partials = partials_of(values, split.of(transport.rank))
            found.append((transport.topology, transport.reduce("b", partials).clone()))
        return found

    everybody, expected = run_over(OverProcessGroup("direct"), split, work), tree_sum(values)
    for found in everybody:
        assert [name for name, _ in found][::2] == ["ring", "tree", "direct"]
        assert [name for name, _ in found] == [name for name, _ in everybody[0]]
        assert all(torch.equal(total, expected) for _, total in found)


def test_sums_that_went_directly_for_a_while_take_the_way_again_that_they_had() -> None:
    values = [torch.randn(1000 * 64, generator=torch.Generator().manual_seed(shard)) for shard in range(8)]
    split = Split.even(8, 3)

    def work(transport: Transport) -> list[Any]:
        found = []
        for always in (False, True, True, False):
            transport.go_direct(always=always)
            transport.traffic.take()
            total = transport.reduce("b", partials_of(values, split.of(transport.rank))).clone()
            found.append((transport.topology, transport.traffic.take(), total))
        return found

    everybody = run_over(OverProcessGroup("star"), split, work)
    sent = [[traffic for _, traffic, _ in found] for found in everybody]
    for found in everybody:
        assert [name for name, _, _ in found] == ["star", "direct", "direct", "star"]
        assert all(torch.equal(total, tree_sum(values)) for _, _, total in found)
    assert [each[0] for each in sent] == [each[3] for each in sent]
    assert [each[1] for each in sent] == [each[2] for each in sent] != [each[0] for each in sent]


@pytest.mark.parametrize("workers", [2, 3, 5])
def test_links_are_measured_between_each_two_workers_and_known_to_all(workers: int) -> None:
    split = Split.even(8, workers)
    links, *others = run_over(OverProcessGroup("direct"), split, lambda transport: transport.measure_links())
    assert all(other == links for other in others)
    for a in range(workers):
        for b in range(workers):
            assert links.latency_s[a][b] == links.latency_s[b][a]
            assert (links.latency_s[a][b] > 0) == (a != b)
            assert (links.bytes_per_s[a][b] > 0) == (a != b)


def test_workers_that_share_memory_have_no_links() -> None:
    assert run_over(over_shared_memory, Split.even(8, 2), lambda transport: transport.measure_links()) == [None, None]


def test_what_others_read_of_a_workers_memory_counts_as_sent() -> None:
    def work(transport: Transport) -> tuple[int, int]:
        transport.reduce("b", [torch.ones(64 * 100)])
        return transport.traffic.take()

    half = 64 * 50 * 4
    assert run_over(over_shared_memory, Split.even(2, 2), work) == [(half + half, 2)] * 2
