"""Loss functions that went backward by themselves: their gradients are taken as they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import unisono
from unisono.errors import LossError

Start = Callable[..., unisono.Run]

pytestmark = [pytest.mark.unit, pytest.mark.usefixtures("one_worker")]

INPUTS = torch.linspace(-2, 2, 44).sin().view(11, 4)


def mean(model: Any, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), (batch[0][:, 0] > 0).long())


def gone_backward(model: Any, batch: Any) -> unisono.BackwardDone:
    loss = mean(model, batch)
    loss.backward()
    return unisono.BackwardDone(loss)


def trained(start: Start, loss_fn: Any, shards: int, inputs: Tensor = INPUTS) -> tuple[str, list[float]]:
    run = start(batch_size=8, shards=shards, seed=1)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    losses = [step.run(loss_fn) for step in run.steps(TensorDataset(inputs), epochs=2)]
    return run.finish(), losses


@contextmanager
def first_step(start: Start, model: Any, inputs: Tensor, shards: int) -> Iterator[Any]:
    run = start(batch_size=len(inputs), shards=shards)
    run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    yield next(steps := run.steps(TensorDataset(inputs), shuffle=False))
    steps.close()


@pytest.mark.parametrize("shards", [1, 2, 4])
def test_where_weights_are_powers_of_two_the_bits_are_those_of_a_returned_loss(start: Start, shards: int) -> None:
    inputs = {"inputs": INPUTS[:8]}  # shards of 8, 4 and 2 samples
    assert trained(start, gone_backward, shards, **inputs) == trained(start, mean, shards, **inputs)


def test_each_gradient_counts_by_the_weight_of_its_shard(start: Start) -> None:
    model = nn.Linear(4, 2)
    with first_step(start, model, INPUTS, shards=3) as step:
        expected: list[Tensor] = []
        for samples, part in zip((4, 4, 3), INPUTS.split((4, 4, 3)), strict=True):
            expected.append(samples * torch.autograd.grad(mean(model, [part]), [model.weight])[0])
        whole = mean(model, [INPUTS]).item()
        loss = step.run(gone_backward, update=lambda: None if model.weight.grad is None else model.weight.grad.clone())
        assert torch.equal(step.returned, (expected[0] + expected[1] + expected[2]) / 11)
        assert loss == pytest.approx(whole)


def test_several_passes_in_one_shard_add_up(start: Start) -> None:
    def in_pieces(model: Any, batch: Any) -> unisono.BackwardDone:
        (inputs,) = batch
        total = 0.0
        for piece in inputs.split(2):
            loss = mean(model, [piece]) * len(piece) / len(inputs)
            loss.backward()
            total += float(loss.detach())
        return unisono.BackwardDone(total)

    _, losses = trained(start, in_pieces, 2)
    _, expected = trained(start, mean, 2)
    assert losses == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("shards", [2, 4])
def test_a_function_may_leave_its_gradients_in_memory_that_it_uses_again(start: Start, shards: int) -> None:
    kept: dict[Tensor, Tensor] = {}

    def from_memory(model: Any, batch: Any) -> unisono.BackwardDone:
        loss = mean(model, batch)
        for parameter, gradient in zip(
            model.parameters(), torch.autograd.grad(loss, [*model.parameters()]), strict=True
        ):
            parameter.grad = kept.setdefault(parameter, torch.empty_like(gradient)).copy_(gradient)
        return unisono.BackwardDone(loss)

    assert trained(start, from_memory, shards) == trained(start, gone_backward, shards)


def test_one_tensor_may_be_the_gradient_of_two_parameters(start: Start) -> None:
    def shared(model: Any, batch: Any) -> unisono.BackwardDone:
        gradient = batch[0].mean(0).expand(2, 4)
        model[0].weight.grad = model[1].weight.grad = gradient
        return unisono.BackwardDone(0.0)

    model = nn.Sequential(nn.Linear(4, 2), nn.Linear(4, 2))
    with first_step(start, model, INPUTS[:6], shards=2) as step:
        step.run(shared, update=lambda: [layer.weight.grad for layer in model])
        for found in step.returned:
            torch.testing.assert_close(found, INPUTS[:6].mean(0).expand(2, 4))


def test_a_weight_may_be_given_and_a_shard_of_weight_0_counts_for_nothing(start: Start) -> None:
    def of_some(model: Any, batch: Any) -> unisono.BackwardDone:
        (inputs,) = batch
        kept = inputs[inputs[:, 0] > 0]
        if not len(kept):
            return unisono.BackwardDone(0.0, 0)
        loss = mean(model, [kept])
        loss.backward()
        return unisono.BackwardDone(loss, torch.tensor(len(kept)))

    def returned(model: Any, batch: Any) -> unisono.Weighted:
        kept = batch[0][batch[0][:, 0] > 0]
        return unisono.Weighted(mean(model, [kept]) if len(kept) else torch.tensor(0.0), len(kept))

    _, losses = trained(start, of_some, 8)
    _, expected = trained(start, returned, 8)
    assert losses == pytest.approx(expected, rel=1e-5)


def test_gradients_that_something_else_left_do_not_count(start: Start) -> None:
    model = nn.Linear(4, 2)
    with first_step(start, model, INPUTS, shards=1) as step:
        (expected,) = torch.autograd.grad(mean(model, [INPUTS]), [model.weight])
        model.weight.grad = torch.full((2, 4), 5.0)
        step.run(gone_backward, update=lambda: torch.clone(model.weight.grad))
        torch.testing.assert_close(step.returned, expected)


def test_a_memory_check_covers_them_with_one_shard_too(start: Start) -> None:
    run, model, seen = start(batch_size=11, shards=1), nn.Linear(4, 2), list[int]()
    run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for step in run.steps(TensorDataset(INPUTS)):
        run.inside.exact.require_engine().witness = lambda what, kept: seen.append(len(kept))
        step.run(gone_backward)
    assert sum(seen)


@pytest.mark.parametrize(
    ("loss_fn", "said"),
    [
        (lambda model, batch: unisono.BackwardDone(mean(model, batch)), "BackwardDone, and no trained parameter has a"),
        (lambda model, batch: unisono.BackwardDone(torch.ones(2)), r"a tensor of shape \[2\]"),
        (lambda model, batch: unisono.BackwardDone(1.0, -1.0), "the weight -1.0"),
        (lambda model, batch: unisono.BackwardDone(None), "returned nothing"),  # type: ignore[arg-type]
        (lambda model, batch: unisono.BackwardDone("low"), "returned a str"),  # type: ignore[arg-type]
    ],
)
def test_what_cannot_be_taken_is_refused_in_clear_words(start: Start, loss_fn: Any, said: str) -> None:
    with pytest.raises(LossError, match=rf"step 0, shard 0, rank 0: .*{said}"):
        trained(start, loss_fn, 2)


def test_a_loss_whose_graph_is_gone_says_what_to_return(start: Start) -> None:
    def loss_fn(model: Any, batch: Any) -> Tensor:
        loss = mean(model, batch)
        loss.backward()
        return loss

    with pytest.raises(LossError, match=r"step 0, shard 0, rank 0: .*return unisono.BackwardDone\(loss\)"):
        trained(start, loss_fn, 2)
