"""Gradients of stages: added up by autograd where the tree allows it, with the bits of shards taken one by one."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from unisono.adapt.squared_norms import SquaredNorms
from unisono.plan.tree import Node, SummationTree
from unisono.reduce.reducer import Reducer
from unisono.reduce.transport import Solo
from unisono.train.step.gradients import Fusion
from unisono.train.step.pipeline import StagedGradients

pytestmark = pytest.mark.unit

Backward = Callable[[Tensor, Tensor], None]
"""Goes backward for one shard, of which this is to be the gradient."""

ORDERS = [range(6), range(6)[::-1], range(8), range(3), range(1)]


def whole(parameter: Tensor, gradient: Tensor) -> None:
    (parameter * gradient).sum().backward()


def in_parts(parameter: Tensor, gradient: Tensor) -> None:
    whole(parameter, 0.3 * gradient)
    whole(parameter, 0.7 * gradient)


def staged(parameters: Sequence[Tensor], order: Sequence[int], schedule: str = "1f1b") -> StagedGradients:
    schedule = "looped-bfs" if order[0] > order[-1] else schedule
    staging: Any = SimpleNamespace(block_of=int, places=SimpleNamespace(schedule=schedule))
    reducer = Reducer(Solo(len(order)), "exact", overlap=False)
    named = {str(block): one for block, one in enumerate(parameters)}
    return StagedGradients(named, reducer, Fusion(2**20, None), SquaredNorms(len(named)), staging=staging)


def totals(gradients: StagedGradients, order: Sequence[int], backward: Backward, given: Tensor) -> Tensor:
    """What an attempt comes to, of a parameter in each of two blocks; some shards leave one out."""
    gradients.begin()
    for place in order:
        for block, parameter in enumerate(gradients.parameters):
            if (place + block) % 5 != 4:
                backward(parameter, given[place])
            gradients.take(block, place)
    gradients.send(lambda: None)
    gradients.finish()
    found, _ = gradients.totals()
    gradients.assign(found, 1.0, gradients.used, writable=False)
    return torch.stack([parameter.grad for parameter in gradients.parameters if parameter.grad is not None])


def expected(order: Sequence[int], backward: Backward, given: Tensor) -> Tensor:
    """Shard after shard by itself, then along the tree."""
    tree, found = SummationTree(len(order)), list[Tensor]()
    for block in range(2):
        leaves = {}
        for shard in order:
            parameter = torch.ones(1000, requires_grad=True)
            if (shard + block) % 5 != 4:
                backward(parameter, given[shard])
            none = torch.full((1000,), -0.0)
            leaves[Node(shard, shard + 1)] = none if parameter.grad is None else parameter.grad
        found.append(tree.finish(leaves, lambda one, other: one + other))
    return torch.stack(found)


@pytest.mark.parametrize("order", ORDERS, ids=str)
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved-zero-bubble"])
def test_shards_that_autograd_adds_up_have_the_bits_of_the_tree(order: Sequence[int], schedule: str) -> None:
    given = torch.randn(len(order), 1000)
    gradients = staged([torch.ones(1000, requires_grad=True) for _ in range(2)], order, schedule)
    for _ in range(2):
        assert torch.equal(totals(gradients, order, whole, given), expected(order, whole, given))
        assert not gradients.came_twice
        for parameter in gradients.parameters:
            parameter.grad = None


def test_a_gradient_that_comes_in_parts_is_noticed_and_then_each_shard_is_taken() -> None:
    order, given = range(8), torch.randn(8, 1000)
    gradients = staged([torch.ones(1000, requires_grad=True) for _ in range(2)], order)
    assert not torch.equal(totals(gradients, order, in_parts, given), expected(order, in_parts, given))
    assert gradients.came_twice
    gradients.stop_listening()
    for parameter in gradients.parameters:
        parameter.grad = None
    assert torch.equal(totals(gradients, order, in_parts, given), expected(order, in_parts, given))
    assert not gradients.came_twice


def test_a_hook_of_the_script_sees_the_gradient_of_one_shard() -> None:
    order, given = range(4), torch.randn(4, 1000)
    parameters = [torch.ones(1000, requires_grad=True) for _ in range(2)]
    seen: list[Tensor] = []
    parameters[0].register_post_accumulate_grad_hook(lambda one: seen.append(one.grad.clone()))
    gradients = staged(parameters, order)
    totals(gradients, order, whole, given)
    assert gradients.came_twice
    gradients.stop_listening()
    for parameter in parameters:
        parameter.grad = None
    seen.clear()
    assert torch.equal(totals(gradients, order, whole, given), expected(order, whole, given))
    assert all(torch.equal(one, shard) for one, shard in zip(seen, given, strict=True))
