"""What the shards of a step weigh together; and workers that cut a batch differently find out. Workers are threads."""

from functools import partial
from typing import Any

import pytest
import torch

from side_by_side import OverProcessGroup, run_over
from unisono.errors import PolicyError
from unisono.plan.split import Split
from unisono.plan.tree import Node, SummationTree
from unisono.train.step.loss import require_agreement, total_weight

pytestmark = pytest.mark.unit


together = partial(run_over, OverProcessGroup("direct"))


@pytest.mark.parametrize("split", [Split.even(24, 1), Split.even(13, 5), Split((0, 1, 7, 8)), Split((0, 499, 1000))])
def test_weights_are_added_along_the_tree_to_the_last_bit(split: Split) -> None:
    torch.manual_seed(0)
    weights = (torch.rand(split.shards, dtype=torch.float64) * 10).tolist()
    leaves = {Node(shard, shard + 1): weight for shard, weight in enumerate(weights)}
    expected = SummationTree(split.shards).finish(leaves, lambda left, right: left + right)

    def weigh(transport: Any) -> float:
        mine = split.of(transport.rank)
        return total_weight(transport, weights[mine.start : mine.stop])

    assert together(split, weigh) == [expected] * split.workers


@pytest.mark.parametrize("first", ["weighs", "asks"])
def test_workers_that_cut_a_batch_differently_all_find_out(first: str) -> None:
    split = Split.even(4, 3)

    def work(transport: Any) -> str:
        if transport.rank == 1:
            transport.resplit(split.refined(8))
        with pytest.raises(PolicyError, match=r"\(rank 0: 4, rank 1: 8, rank 2: 4\)") as error:
            if transport.rank == 1 or first == "asks":
                require_agreement(transport, 0)
            else:
                total_weight(transport, [1.0] * len(split.of(transport.rank)))
        return type(error.value).__name__

    assert together(split, work) == ["PolicyError"] * 3


def test_workers_that_decided_otherwise_find_out_before_the_step_is_reduced() -> None:
    split = Split.even(4, 3)

    def work(transport: Any) -> str:
        with pytest.raises(PolicyError, match="decided differently") as error:
            total_weight(transport, [1.0] * len(split.of(transport.rank)), decided=7 if transport.rank else 8)
        return type(error.value).__name__

    assert together(split, work) == ["PolicyError"] * 3
