import itertools
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from unisono.plan.tree import Node, SummationTree
from unisono.reduce.buckets import ALIGNMENT, Bucket, plan_buckets
from unisono.reduce.partial_sums import PartialSumRow, PartialSums, views_of

pytestmark = pytest.mark.unit

SHAPES = [(3,), (64, 3), (5, 7, 2), (), (0,), (1000,), (8, 3, 4, 4)]


def tensors(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.randn(shape).to(dtype) for shape in SHAPES]


def partial_sums(bucket: Bucket, tree: SummationTree) -> PartialSums:
    rows = [PartialSumRow.of(bucket, bucket.allocate()) for _ in range(tree.most_kept(range(tree.shards)))]
    return PartialSums(tree.summands(range(tree.shards)), rows)


def add(sums: PartialSums, bucket: Bucket, shard: Sequence[Tensor | None]) -> None:
    """Put a shard's tensors from the last to the first, as a backward pass does."""
    sums.open()
    for place, entry in enumerate(bucket.entries):
        sums.put(place, shard[entry.index])
    sums.close()


def placed(buckets: tuple[Bucket, ...]) -> list[int]:
    return [entry.index for bucket in buckets for entry in bucket.entries]


@pytest.mark.parametrize("bucket_bytes", [1, 1000, 10**9])
def test_every_tensor_has_one_place_of_its_own(bucket_bytes: int) -> None:
    given = tensors()
    buckets = plan_buckets(given, bucket_bytes)
    flats = [bucket.allocate() for bucket in buckets]
    views = views_of(buckets, flats)
    for view, tensor in zip(views, given, strict=True):
        view.copy_(tensor)
    assert sorted(placed(buckets)) == list(range(len(given)))
    assert all(torch.equal(view, tensor) for view, tensor in zip(views, given, strict=True))


def test_buckets_go_from_the_last_tensor_to_the_first() -> None:
    assert placed(plan_buckets(tensors(), 10**9)) == list(reversed(range(len(SHAPES))))


def test_dtypes_never_share_a_bucket() -> None:
    mixed = [torch.zeros(4), torch.zeros(4, dtype=torch.bfloat16), torch.zeros(4), torch.zeros(4, dtype=torch.float64)]
    buckets = plan_buckets(mixed, 10**9)
    assert sorted(str(bucket.dtype) for bucket in buckets) == ["torch.bfloat16", "torch.float32", "torch.float64"]
    assert sorted(placed(buckets)) == [0, 1, 2, 3]


def test_every_tensor_starts_at_a_multiple_of_sixty_four_elements() -> None:
    (bucket,) = plan_buckets(tensors(), 10**9)
    assert all(entry.offset % ALIGNMENT == 0 for entry in bucket.entries)
    assert bucket.numel % ALIGNMENT == 0


def test_a_channels_last_tensor_keeps_its_memory_format() -> None:
    image = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
    (bucket,) = plan_buckets([image], 10**9)
    (view,) = bucket.views(bucket.allocate())
    assert view.stride() == image.stride()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("shards", [1, 2, 3, 5, 8, 13])
def test_partial_sums_of_a_whole_job_are_the_tree_sum_bit_for_bit(shards: int, dtype: torch.dtype) -> None:
    gradients = [tensors(dtype) for _ in range(shards)]
    tree = SummationTree(shards)
    for bucket in plan_buckets(gradients[0], 2000):
        sums = partial_sums(bucket, tree)
        sums.begin()
        for shard in gradients:
            add(sums, bucket, shard)
        (row,) = sums.rows
        for entry, view in zip(bucket.entries, row.views, strict=True):
            leaves = {node: gradients[node.start][entry.index] for node in map_leaves(tree)}
            assert torch.equal(view, tree.finish(leaves, torch.add))


def map_leaves(tree: SummationTree) -> list[Node]:
    return [tree.cover(shard, shard + 1)[0] for shard in range(tree.shards)]


def test_an_absent_gradient_adds_nothing_not_even_the_sign_of_a_zero() -> None:
    minus_zero = torch.tensor([-0.0, 1.0, -0.0])
    for order in ([minus_zero, None], [None, minus_zero]):
        (bucket,) = plan_buckets([minus_zero], 100)
        sums = partial_sums(bucket, SummationTree(2))
        sums.begin()
        for gradient in order:
            add(sums, bucket, [gradient])
        (row,) = sums.rows
        assert torch.signbit(row.views[0]).tolist() == [True, False, True]


def test_the_first_bucket_of_a_kind_is_small_so_that_its_reduction_starts_early() -> None:
    many = [torch.empty(2**16) for _ in range(40)]  # of a quarter of a MiB
    assert [len(bucket.entries) for bucket in plan_buckets(many, 4 * 2**20)] == [4, 16, 16, 4]


def test_compressed_buckets_hold_narrow_numbers_and_never_mix_what_was_wide() -> None:
    mixed = [torch.zeros(4), torch.zeros(4, dtype=torch.float64), torch.zeros(4, dtype=torch.bfloat16)]
    buckets = plan_buckets([*mixed, torch.zeros(4, dtype=torch.int64)], 10**9, torch.bfloat16)
    assert [bucket.dtype for bucket in buckets] == [torch.int64, *3 * [torch.bfloat16]]


@pytest.mark.parametrize("shards", [2, 3, 5, 8])
def test_compressed_leaves_and_nodes_are_rounded_on_any_split(shards: int) -> None:
    values = [torch.randn(64) for _ in range(shards)]
    (bucket,) = plan_buckets(values[:1], 10**9, torch.bfloat16)
    tree = SummationTree(shards)
    leaves = {node: values[node.start].bfloat16() for node in map_leaves(tree)}
    for start, stop in itertools.combinations(range(shards + 1), 2):
        for order in (range(start, stop), range(start, stop)[::-1]):
            rows = [PartialSumRow.of(bucket, bucket.allocate()) for _ in range(tree.most_kept(order))]
            sums = PartialSums(tree.summands(order), rows)
            sums.begin()
            for shard in order:
                add(sums, bucket, [values[shard]])
            for row, node in zip(sums.rows, tree.cover(start, stop), strict=True):
                expected = tree.finish(leaves, lambda left, right: (left.float() + right.float()).bfloat16(), node)
                assert torch.equal(row.views[0], expected)
