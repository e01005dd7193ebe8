"""The update that a script makes by itself: what it is given, and what cannot be."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import unisono
from benchmarks.thread_crew import Trade, train
from struck_run import loss
from unisono.adapt.view import Policy, View
from unisono.errors import JobError
from unisono.job import Job
from unisono.train.run import Run

Start = Callable[..., unisono.Run]

pytestmark = [
    pytest.mark.unit,
    pytest.mark.usefixtures("one_worker"),
    pytest.mark.filterwarnings("ignore:BatchNorm"),
]


class Half(Policy):
    """Halves the learning rate from the first step on."""

    def before_train(self, view: View) -> None:
        self.set_learning_rate(view.learning_rate / 2)


def batches(count: int = 12) -> TensorDataset:
    return TensorDataset(torch.linspace(-2, 2, count * 4).sin().view(-1, 4))


def prepared(run: Run, rate: float = 0.1) -> tuple[nn.ModuleDict, torch.optim.Optimizer]:
    model = nn.ModuleDict({"used": nn.Linear(4, 2), "unused": nn.Linear(4, 2)})
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view(parameter.shape))
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    run.prepare(model, optimizer)
    return model, optimizer


def gradients_of(layer: nn.Module) -> list[Tensor]:
    return [parameter.grad for parameter in layer.parameters() if parameter.grad is not None]


def used(model: Any, batch: Any) -> Tensor:
    return loss(model["used"], batch)


@pytest.mark.parametrize("shards", [1, 3])
def test_the_update_finds_the_mean_gradient_and_may_change_it(start: Start, shards: int) -> None:
    run = start(batch_size=12, shards=shards)
    model, optimizer = prepared(run)
    seen: list[Any] = []

    def update() -> list[bool]:
        gradients = gradients_of(model["used"])
        seen.append([step.loss, gradients[0].clone()])
        for gradient in gradients:
            gradient.zero_()
        optimizer.step()
        return [parameter.grad is None for parameter in model.parameters()]

    for step in run.steps(batches(), shuffle=False):
        before = [parameter.clone() for parameter in model.parameters()]
        whole = loss(model["used"], [batches().tensors[0]])
        (expected,) = torch.autograd.grad(whole, [next(model["used"].parameters())])
        found = step.run(used, update=update)
        assert step.returned == [False, False, True, True]
        assert found == step.loss == seen[0][0]
        torch.testing.assert_close(seen[0][1], expected)
        assert all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
        step.run(used)
        assert step.returned is None


@pytest.mark.parametrize("shards", [1, 3])
def test_parameters_of_other_optimizers_have_no_gradient(start: Start, shards: int) -> None:
    run = start(batch_size=12, shards=shards)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    first, second = (torch.optim.SGD(layer.parameters(), lr=0.1) for layer in model)
    run.prepare(model, [first, second])
    for step in run.steps(batches()):
        step.run(loss, optimizer=first, update=lambda: [one.grad is None for one in model.parameters()])
        assert step.returned == [False, False, True, True]


def test_a_limit_on_the_gradient_holds_before_the_update(start: Start) -> None:
    run = start(batch_size=12)
    model, _ = prepared(run)

    def norm() -> float:
        return float(torch.nn.utils.get_total_norm(gradients_of(model["used"])))

    for step in run.steps(batches()):
        step.run(used, update=norm, clip_norm=1e-3)
        assert step.returned == pytest.approx(1e-3, rel=1e-3)


def test_a_policys_factor_holds_in_each_step_of_an_optimizer_and_not_for_schedulers(start: Start) -> None:
    run = start(batch_size=12, policies=[Half()])
    _, optimizer = prepared(run, rate=1.0)
    scheduler = run.register("scheduler", torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.25))
    rates: list[float] = []

    def update() -> None:
        hook = optimizer.register_step_pre_hook(lambda one, *_: rates.append(one.param_groups[0]["lr"]))
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        hook.remove()
        scheduler.step()
        rates.append(optimizer.param_groups[0]["lr"])

    for step in run.steps(batches(24)):
        step.run(used, update=update)
    assert rates == [1.0, 0.5, 0.25, 0.25, 0.125, 0.0625]


def test_a_step_whose_loss_is_no_number_makes_no_update(start: Start) -> None:
    run = start(batch_size=12, arithmetic={"on_nan": "skip"})
    prepared(run)
    calls: list[int] = []
    for step in run.steps(batches()):
        step.run(lambda model, batch: used(model, batch) * float("nan"), update=lambda: calls.append(1))
        assert (calls, step.returned) == ([], None)


def test_an_update_that_fails_ends_the_run_and_nothing_of_it_counts(start: Start, tmp_path: Path) -> None:
    run = start(batch_size=12, checkpoints={"every": 1})
    _, optimizer = prepared(run)

    def update() -> None:
        optimizer.step()
        raise KeyError("boom")

    steps = run.steps(batches(36), shuffle=False)
    next(steps).run(used)
    step = next(steps)
    with pytest.raises(KeyError, match="boom"):
        step.run(used, update=update)
    for action in (lambda: step.run(used), run.barrier, lambda: next(steps), run.finish):
        with pytest.raises(JobError, match=r"failed halfway \(KeyError: 'boom'\).*newest checkpoint"):
            action()
    run.close()
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00000001"]


def test_collective_calls_in_an_update_are_refused_and_may_follow_it(start: Start) -> None:
    run = start(batch_size=12)
    prepared(run)

    def update() -> str:
        for call in (run.barrier, lambda: run.all_reduce(1.0), lambda: step.run(used)):
            with pytest.raises(JobError, match=r"step.run\(update=…\).* after step.run"):
                call()
        return "refused"

    for step in run.steps(batches()):
        step.run(used, update=update)
        assert step.returned == "refused"
        assert run.all_reduce(1.0) == 1.0


def test_collective_calls_in_functions_that_another_one_calls_are_refused(start: Start) -> None:
    run = start(batch_size=12)
    model, optimizer = prepared(run)

    def refused(*_: Any) -> None:
        for call in (run.barrier, lambda: run.together(refused), lambda: run.prepare(model, optimizer), run.finish):
            with pytest.raises(JobError, match="a collective call inside of another.*workers.all_reduce"):
                call()

    def loss_fn(model: Any, batch: Any) -> Tensor:
        refused()
        return used(model, batch)

    for step in run.steps(batches()):
        step.run(loss_fn)
        run.together(refused)
        run.evaluate(batches(), {"loss": loss_fn})
        assert run.all_reduce(1.0) == 1.0


def test_what_is_no_function_is_refused(start: Start) -> None:
    run = start(batch_size=12)
    _, optimizer = prepared(run)
    for step in run.steps(batches()):
        with pytest.raises(JobError, match=r"got a SGD: .*for instance update=optimizer\.step"):
            step.run(used, update=optimizer)  # type: ignore[arg-type]


def test_workers_with_weights_of_their_own_refuse_it(tmp_path: Path) -> None:
    def updating(run: Run) -> None:
        _, optimizer = prepared(run)
        for step in run.steps(batches()):
            step.run(used, update=optimizer.step)

    trade = Trade(Job.create(batch_size=8, shards=8), 2, tmp_path / "run", strategy="local-sgd:every=2")
    with pytest.raises(JobError, match=r"strategy='local-sgd.*no gradient that all have.*strategy='all-reduce'"):
        train(trade, updating)


async def later() -> None:
    """Makes no update when it is called."""


def bit_by_bit() -> Iterator[None]:
    """Likewise."""
    yield


@pytest.mark.parametrize("update", [later, bit_by_bit])
def test_what_makes_nothing_when_it_is_called_is_refused(start: Start, update: Any) -> None:
    run = start(batch_size=12)
    prepared(run)
    for step in run.steps(batches()):
        with pytest.raises(JobError, match=r"update=.*a coroutine or a generator"):
            step.run(used, update=update)
        step.run(used)
