import math
from collections.abc import Sequence
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.plan.split import Split
from unisono.plan.tree import Node, SummationTree, children

pytestmark = pytest.mark.unit

Floats = np.ndarray[tuple[int, ...], np.dtype[np.float32]]


def plain_recursion(values: list[Floats]) -> Floats:
    """The reference: written from the definition, knowing nothing of nodes and covers."""
    if len(values) == 1:
        return values[0]
    half = 1
    while half * 2 < len(values):
        half *= 2
    total: Floats = plain_recursion(values[:half]) + plain_recursion(values[half:])
    return total


def streamed(values: list[Floats], shards: Sequence[int]) -> list[Floats]:
    """The partial sums that a worker with these shards sends, which come in this order."""
    held: dict[Node, Floats] = {}
    for shard, siblings in zip(shards, SummationTree(len(values)).merges(shards), strict=True):
        node, value = Node(shard, shard + 1), values[shard]
        for sibling in siblings:
            value = value + held.pop(sibling)
            node = Node(min(node.start, sibling.start), max(node.stop, sibling.stop))
        held[node] = value
    return [held[node] for node in sorted(held)]


@st.composite
def splits(draw: st.DrawFn) -> Split:
    shards = draw(st.integers(1, 40))
    cuts = draw(st.sets(st.integers(1, shards - 1))) if shards > 1 else set()
    return Split((0, *sorted(cuts), shards))


@given(split=splits(), seed=st.integers(0, 2**32 - 1), order=st.randoms(use_true_random=False))
def test_every_split_and_order_of_arrival_gives_the_bits_of_the_plain_recursion(
    split: Split, seed: int, order: Random
) -> None:
    generator = np.random.default_rng(seed)
    magnitudes = 10.0 ** generator.integers(-8, 8, size=(split.shards, 1))
    values = list((generator.standard_normal((split.shards, 5)) * magnitudes).astype(np.float32))
    tree = SummationTree(split.shards)
    partials: dict[Node, Floats] = {}
    for rank in range(split.workers):
        mine = split.of(rank)
        for arrival in (mine, mine[::-1], order.sample(mine, len(mine))):
            partials |= dict(zip(tree.cover(mine.start, mine.stop), streamed(values, arrival), strict=True))
            assert tree.most_kept(arrival) <= len(arrival)
    total = tree.finish(partials, lambda left, right: left + right)
    assert total.tobytes() == plain_recursion(values).tobytes()


def test_another_order_of_additions_gives_other_bits_so_the_comparison_can_fail() -> None:
    generator = np.random.default_rng(0)
    values = list(generator.standard_normal((8, 1000)).astype(np.float32))
    in_a_row = values[0]
    for value in values[1:]:
        in_a_row = in_a_row + value
    assert in_a_row.tobytes() != plain_recursion(values).tobytes()


def test_shards_three_to_seven_of_eight_are_covered_by_a_leaf_and_a_half() -> None:
    assert SummationTree(8).cover(3, 8) == (Node(3, 4), Node(4, 8))


def test_the_left_half_of_a_node_is_the_largest_power_of_two_below_its_size() -> None:
    assert children(Node(0, 8)) == (Node(0, 4), Node(4, 8))
    assert children(Node(0, 7)) == (Node(0, 4), Node(4, 7))
    assert children(Node(4, 7)) == (Node(4, 6), Node(6, 7))
    assert children(Node(0, 2)) == (Node(0, 1), Node(1, 2))


@pytest.mark.parametrize("shards", [2**power for power in range(10)])
def test_a_worker_keeps_at_most_log2_of_shards_plus_one_partial_sums(shards: int) -> None:
    tree = SummationTree(shards)
    for workers in {1, 2, 3, 5, 7, shards // 2, shards - 1, shards}:
        if not 1 <= workers <= shards:
            continue
        split = Split.even(shards, workers)
        for rank in range(workers):
            mine = split.of(rank)
            most = tree.most_kept(mine)
            assert most <= math.log2(shards) + 1, f"{shards} shards, worker {rank} of {workers}"


def test_a_missing_partial_sum_is_an_error_and_not_a_smaller_sum() -> None:
    tree = SummationTree(4)
    with pytest.raises(KeyError, match="shard 2"):
        tree.finish({Node(0, 2): 1.0, Node(3, 4): 1.0}, lambda left, right: left + right)


def test_a_tree_without_shards_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1 shard"):
        SummationTree(0)


@given(shards=st.integers(1, 200), data=st.data())
def test_an_even_split_gives_every_shard_one_owner_and_sizes_that_differ_by_one_at_most(
    shards: int, data: st.DataObject
) -> None:
    workers = data.draw(st.integers(1, shards))
    split = Split.even(shards, workers)
    owners = [rank for rank in range(workers) for _ in split.of(rank)]
    sizes = [len(split.of(rank)) for rank in range(workers)]
    assert len(owners) == shards
    assert max(sizes) - min(sizes) <= 1
    assert [split.owner(shard) for shard in range(shards)] == owners
    assert split.widest == max(sizes)


@pytest.mark.parametrize("bounds", [(), (0,), (1, 2), (0, 0), (0, 0, 2), (0, 2, 2, 3), (0, 3, 1), (0, 3, 1, 1)])
def test_a_split_with_a_gap_or_an_empty_worker_in_front_of_others_is_refused(bounds: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="ascending bounds"):
        Split(bounds)


def test_more_workers_than_shards_cannot_be_split() -> None:
    with pytest.raises(ValueError, match="2 shards cannot be split among 3 workers"):
        Split.even(2, 3)
