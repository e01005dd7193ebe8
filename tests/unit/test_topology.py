"""Whatever way partial sums take, the same two numbers meet at the same node."""

from collections import defaultdict
from fractions import Fraction
from math import log2

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.plan.split import Split
from unisono.plan.topology import TOPOLOGIES, Plan, Transfer, distinct, plan
from unisono.plan.tree import Node, SummationTree, children

pytestmark = pytest.mark.unit


def expression(node: Node) -> str:
    """The sum at a node, written from the definition of the tree."""
    if node.stop - node.start == 1:
        return str(node.start)
    left, right = children(node)
    return f"({expression(left)}+{expression(right)})"


def carried_out(graph: Plan) -> list[dict[tuple[int, Node], str]]:
    """Let all workers take their turns, as far as they get; returns what each holds in the end."""
    split, tree = graph.split, SummationTree(graph.split.shards)
    turns = {rank: list(graph.turns(rank)) for rank in range(split.workers)}
    under_way: dict[Transfer, list[str]] = {}
    held: list[dict[tuple[int, Node], str]] = []
    for rank in range(split.workers):
        cover = tree.cover(split.of(rank).start, split.of(rank).stop)
        held.append({(piece, node): expression(node) for piece in range(graph.pieces) for node in cover})
    moved = True
    while moved:
        moved = False
        for rank, mine in enumerate(held):
            while turns[rank] and (turns[rank][0].received is None or turns[rank][0].received in under_way):
                moved = True
                received, sums, sends = turns[rank].pop(0)
                if received is not None:
                    assert received.receiver == rank
                    values = under_way.pop(received)
                    mine |= {(received.piece, node): value for node, value in zip(received.nodes, values, strict=True)}
                for one in sums:
                    assert (one.left, one.right) == children(one.node)
                    mine[one.piece, one.node] = (
                        f"({mine.pop((one.piece, one.left))}+{mine.pop((one.piece, one.right))})"
                    )
                for message in sends:
                    assert message.sender == rank
                    take = mine.__getitem__ if message.nodes == (tree.root,) else mine.pop
                    under_way[message] = [take((message.piece, node)) for node in message.nodes]
    assert not under_way
    assert not any(turns.values()), "workers wait for each other in a circle"
    return held


@st.composite
def splits(draw: st.DrawFn) -> Split:
    shards = draw(st.integers(2, 24))
    cuts = draw(st.sets(st.integers(1, shards - 1), min_size=1, max_size=11))
    return Split((0, *sorted(cuts), shards))


@st.composite
def served(draw: st.DrawFn) -> Split:
    split = draw(splits())
    return split.with_servers(draw(st.integers(1, split.workers - 1)))


@given(split=splits() | served(), topology=st.sampled_from(TOPOLOGIES), pieces=st.integers(1, 13))
def test_every_worker_ends_with_the_root_of_every_piece_and_with_nothing_else(
    split: Split, topology: str, pieces: int
) -> None:
    root = Node(0, split.shards)
    for held in carried_out(plan(split, topology, pieces)):
        assert held == {(piece, root): expression(root) for piece in range(pieces)}


@given(split=splits() | served(), topology=st.sampled_from(TOPOLOGIES))
def test_a_message_waits_only_for_messages_of_earlier_rounds(split: Split, topology: str) -> None:
    graph = plan(split, topology, split.workers + 1)
    numbers = {message: number for number, messages in enumerate(graph.rounds) for message in messages}
    for rank in range(split.workers):
        for turn in graph.turns(rank):
            begun = numbers[turn.received] if turn.received else -1
            assert all(begun < numbers[message] for message in turn.sends)


@given(split=splits(), pieces=st.integers(1, 13))
def test_on_a_ring_partial_sums_go_to_the_next_neighbour_and_roots_to_the_one_before(split: Split, pieces: int) -> None:
    root = (Node(0, split.shards),)
    for message in plan(split, "ring", pieces).messages:
        assert message.receiver == (message.sender + (-1 if message.nodes == root else 1)) % split.workers


@given(split=served(), topology=st.sampled_from(TOPOLOGIES), pieces=st.integers(1, 13))
def test_servers_finish_the_pieces_in_turn_and_the_others_add_nothing_and_talk_to_nobody_else(
    split: Split, topology: str, pieces: int
) -> None:
    graph, root = plan(split, topology, pieces), (Node(0, split.shards),)
    server = {piece: split.servers[piece % len(split.servers)] for piece in range(pieces)}
    for rank in range(split.workers):
        for turn in graph.turns(rank):
            assert all(server[one.piece] == rank for one in turn.sums)
    computing = range(split.servers.start)
    pushed = [message for message in graph.messages if message.receiver == server[message.piece]]
    pulled = [message for message in graph.messages if message.sender == server[message.piece]]
    assert len(pushed) + len(pulled) == len(list(graph.messages))
    assert sorted((one.piece, one.sender) for one in pushed) == [(p, rank) for p in range(pieces) for rank in computing]
    assert all(one.nodes == root for one in pulled)
    others = [(p, rank) for p in range(pieces) for rank in range(split.workers) if rank != server[p]]
    assert sorted((one.piece, one.receiver) for one in pulled) == others


@given(split=splits(), pieces=st.integers(1, 4))
def test_in_a_star_everything_goes_through_rank_0(split: Split, pieces: int) -> None:
    assert all(0 in (message.sender, message.receiver) for message in plan(split, "star", pieces).messages)


@pytest.mark.parametrize("workers", [2, 4, 8, 16])
def test_in_a_tree_a_worker_sends_one_partial_sum_after_at_most_log2_rounds(workers: int) -> None:
    graph = plan(Split.even(workers, workers), "tree", 1)
    assert len(graph.rounds) == 2 * log2(workers)
    assert {len(message.nodes) for message in graph.messages} == {1}


@pytest.mark.parametrize("workers", [2, 3, 5, 8])
def test_the_pieces_of_a_ring_follow_each_other_so_that_everybody_sends_one_in_every_round(workers: int) -> None:
    graph = plan(Split.even(8, workers), "ring", workers)
    assert len(graph.rounds) == 2 * (workers - 1)
    assert all(sorted(message.sender for message in messages) == list(range(workers)) for messages in graph.rounds)


@pytest.mark.parametrize("topology", ["tree", "star"])
def test_further_pieces_take_two_rounds_less_than_one_after_the_other(topology: str) -> None:
    split = Split.even(8, 8)
    alone = len(plan(split, topology, 1).rounds)
    assert len(plan(split, topology, 5).rounds) == alone + 4


def test_a_worker_waits_for_what_comes_first() -> None:
    ups = [turn.received for turn in plan(Split.even(8, 8), "tree", 1).turns(0) if turn.received]
    assert [message.sender for message in ups] == [1, 2, 4]


def buckets_sent(split: Split, topology: str) -> list[Fraction]:
    """How many buckets' worth of bytes each worker sends, where pieces are equally long."""
    sent: dict[int, Fraction] = defaultdict(Fraction)
    for message in plan(split, topology, split.workers).messages:
        sent[message.sender] += Fraction(len(message.nodes), split.workers)
    return [sent[rank] for rank in range(split.workers)]


@pytest.mark.parametrize(
    ("topology", "bounds", "sent"),
    [
        ("direct", (0, 1, 2, 3), (4, 4, 4)),  # the bytes of a ring all-reduce
        ("direct", (0, 1, 7, 8), (4, 10, 4)),
        ("direct", (0, 3, 6, 8), (6, 6, 4)),
        ("direct", (0, 2, 3, 8, 11, 13), (8, 8, 12, 12, 12)),
        ("ring", (0, 3, 6, 8), (7, 6, 5)),
        ("ring", (0, 1, 7, 8), (5, 9, 6)),
        ("ring", (0, 3, 6, 9, 11, 13), (19, 17, 15, 16, 14)),
    ],
)
def test_partial_sums_that_are_not_finished_are_sent_once_to_whoever_finishes_them(
    topology: str, bounds: tuple[int, ...], sent: tuple[int, ...]
) -> None:
    split = Split(bounds)
    assert buckets_sent(split, topology) == [Fraction(each, split.workers) for each in sent]


def test_a_tree_moves_the_bytes_of_a_star_and_spreads_them() -> None:
    split = Split.even(8, 8)
    assert buckets_sent(split, "tree") == [3, 1, 2, 1, 3, 1, 2, 1]
    assert buckets_sent(split, "star") == [7, 1, 1, 1, 1, 1, 1, 1]
    assert sum(buckets_sent(split, "tree")) == sum(buckets_sent(split, "star")) == 2 * 7


def test_between_few_workers_some_topologies_are_the_same_graph() -> None:
    assert distinct(2) == ("direct", "tree")
    assert distinct(3) == ("direct", "ring", "tree")
    assert distinct(4) == distinct(9) == TOPOLOGIES


def test_no_piece_is_no_message() -> None:
    assert plan(Split.even(8, 3), "ring", 0).rounds == ()
