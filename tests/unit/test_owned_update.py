"""Whole matrices that one worker each updates: the bits of an update that everybody makes."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import unisono
from benchmarks.thread_crew import Trade, train
from one_at_a_time import BLOWS, blows_on
from struck_run import Play, act_out
from unisono.errors import ModelError
from unisono.job import Job
from unisono.plan.split import owners_of
from unisono.train.config.run_config import Execution
from unisono.train.group.workers import Devices
from unisono.train.model import shared_work as registry
from unisono.train.run import Run
from unisono.train.step.owned_update import matrices_of
from waves import waved

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.usefixtures("numerics"),
    pytest.mark.filterwarnings("ignore::unisono.errors.UnisonoWarning"),
]

JOB = Job(batch_size=10, shards=5, seed=1, threads=1)
Make = Callable[[nn.Module], list[torch.optim.Optimizer]]


class Shampoo(torch.optim.Optimizer):
    """Keeps factors in lists, a number in each group, and text; its matrices are preconditioned on both sides."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state, gradient = self.state[parameter], parameter.grad.flatten(1)
                factors = state.setdefault("factors", [torch.eye(size) * 1e-3 for size in gradient.shape])
                factors[0] += gradient @ gradient.T
                factors[1] += gradient.T @ gradient
                state["steps"], state["kind"] = torch.tensor(float(group["steps"])), "shampoo"
                for place, factor in enumerate(factors):
                    values, vectors = torch.linalg.eigh(factor)
                    root = vectors @ torch.diag(values.clamp(min=1e-6) ** -0.25) @ vectors.T
                    gradient = root @ gradient if place == 0 else gradient @ root
                parameter.sub_(group["lr"] * gradient.view_as(parameter))


class Net(nn.Module):
    """Has a layer that the first steps leave unused, and matrices of several sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(12, 12) for _ in range(3))
        self.first, self.last, self.rare = nn.Linear(6, 12), nn.Linear(12, 3), nn.Linear(6, 12)
        self.calls: Tensor
        self.register_buffer("calls", torch.tensor(0))
        waved(self, 0.5)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        out = self.first(x) + self.rare(x) if self.calls > 2 else self.first(x)
        for layer in self.layers:
            out = out + torch.tanh(layer(out))
        found: Tensor = self.last(out)
        return found


def matrices(model: nn.Module, *, are: bool) -> list[nn.Parameter]:
    return [one for one in model.parameters() if (one.ndim == 2) == are]


def muon(model: nn.Module) -> list[torch.optim.Optimizer]:
    first, *others = matrices(model, are=True)
    groups: list[dict[str, Any]] = [{"params": [first], "lr": 0.1, "nesterov": False}, {"params": others}]
    return [torch.optim.Muon(groups, lr=0.05), torch.optim.AdamW(matrices(model, are=False), lr=0.01)]


def shampoo(model: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD(matrices(model, are=False), lr=0.01), Shampoo(matrices(model, are=True))]


@pytest.fixture
def _shampoo_is_known() -> Iterator[None]:
    unisono.whole_matrix(Shampoo)
    yield
    del registry._costs[Shampoo]


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(50, 6, generator=generator), torch.randint(0, 3, (50,), generator=generator))


def loss_fn(model: Any, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def trained(make: Make, run: Run, hook: Callable[[Run, torch.optim.Optimizer], None]) -> tuple[str, list[Any]]:
    """The digest of the weights, and the state of each optimizer."""
    model = Net()
    optimizers = make(model)
    run.prepare(model, optimizers)
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(one, 0.9) for one in optimizers]
    for number, scheduler in enumerate(schedulers):
        run.register(f"scheduler {number}", scheduler)
    for step in run.steps(data(), epochs=1):
        if step.number == 3:
            for one in optimizers:
                hook(run, one)
        step.run(loss_fn, clip_norm=1.0)
        for scheduler in schedulers:
            scheduler.step()
    return run.finish(), [one.state_dict() for one in optimizers]


def plain(run: Run, optimizer: torch.optim.Optimizer) -> None:
    """No hook."""


def ends(
    folder: Path,
    workers: int,
    make: Make,
    *,
    shares: bool,
    hook: Callable[[Run, torch.optim.Optimizer], None] = plain,
) -> tuple[str, list[Any]]:
    execution = Execution(overlap=False, looks=True, shared_from=0 if shares else math.inf)
    trade = Trade(JOB, workers, folder, execution)
    (first, state), *others = train(trade, lambda run: trained(make, run, hook))
    assert {digest for digest, _ in others} <= {first}
    return first, state


def same(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, Tensor):
        return torch.equal(ours, theirs) and ours.dtype == theirs.dtype and ours.stride() == theirs.stride()
    if isinstance(ours, dict):
        return [*ours] == [*theirs] and all(same(value, theirs[name]) for name, value in ours.items())
    if isinstance(ours, list | tuple):
        return len(ours) == len(theirs) and all(map(same, ours, theirs))
    return bool(ours == theirs)


@pytest.mark.usefixtures("_shampoo_is_known")
@pytest.mark.parametrize("make", [muon, shampoo])
def test_weights_and_state_are_those_of_an_update_that_everybody_makes(make: Make, tmp_path: Path) -> None:
    digest, expected = ends(tmp_path / "serial", 1, make, shares=False)
    for workers in (2, 3, 5):
        found, state = ends(tmp_path / f"{workers}", workers, make, shares=True)
        assert found == digest, workers
        assert same(state, expected)


def test_each_owner_steps_with_its_own_matrices_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    class Counting(torch.optim.Muon):
        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            seen.append(sum(one.grad is not None for group in self.param_groups for one in group["params"]))
            return super().step(closure)  # type: ignore[no-untyped-call]

    monkeypatch.setitem(registry._costs, Counting, registry.products)

    def make(model: nn.Module) -> list[torch.optim.Optimizer]:
        return [Counting(matrices(model, are=True)), torch.optim.AdamW(matrices(model, are=False))]

    ends(tmp_path / "run", 3, make, shares=True)
    assert len(seen) == 15  # of three workers in five steps
    assert max(seen) <= 2
    assert sum(seen) == 5 * 6 - 2  # in two steps a layer is unused


def test_a_hook_on_one_worker_has_everybody_update_everything(tmp_path: Path) -> None:
    heard: list[int] = []

    def hook(run: Run, optimizer: torch.optim.Optimizer) -> None:
        if run.rank == 1:
            optimizer.register_step_post_hook(lambda *_: heard.append(run.rank))

    digest, _ = ends(tmp_path / "serial", 1, muon, shares=False)
    assert ends(tmp_path / "run", 2, muon, shares=True, hook=hook)[0] == digest
    assert len(heard) == 2 * 2  # of both optimizers, in the two steps that are left


class Orthogonal(torch.optim.SGD):
    """Momentum of gradients, of which those of matrices are made orthogonal."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and parameter.ndim == 2:
                    left, _, right = torch.linalg.svd(parameter.grad, full_matrices=False)
                    parameter.grad = left @ right
        return super().step(closure)


def orthogonal(parameters: Any) -> torch.optim.Optimizer:
    return Orthogonal(parameters, lr=0.05, momentum=0.9)


SHARED = Execution(overlap=False, looks=True, shared_from=0)


@pytest.mark.parametrize(("workers", "joiners"), [pytest.param(2, 0, marks=pytest.mark.slow), (3, 1)])
def test_a_worker_may_die_anywhere_and_another_one_join(
    workers: int, joiners: int, pool: ThreadPoolExecutor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(registry._costs, Orthogonal, registry.products)
    play = Play(workers, tmp_path, SHARED, joiners=joiners, optimizer=orthogonal)
    (serial,) = act_out(pool, replace(play, workers=1, joiners=0)).digests.values()
    whole = act_out(pool, play)
    assert set(whole.digests.values()) == {serial}
    blows = list(blows_on(whole.world))
    for blow in random.Random(1).sample(blows, min(len(blows), BLOWS // 5)):
        outcome = act_out(pool, play, blow)
        assert outcome.error is None, blow
        assert set(outcome.digests.values()) == {serial}, blow


def test_only_classes_of_optimizers_can_be_named() -> None:
    with pytest.raises(ModelError, match="give it a class of optimizers"):
        unisono.whole_matrix(torch.optim.Muon([nn.Parameter(torch.ones(2, 2))]))  # type: ignore[type-var]


@pytest.mark.usefixtures("_shampoo_is_known")
@pytest.mark.parametrize("cost", [float("nan"), float("inf"), -1.0, "9", None])
def test_a_cost_that_is_no_number_is_refused_with_the_class_and_the_shape(cost: Any) -> None:
    unisono.whole_matrix(Shampoo, cost=lambda shape: cost)
    optimizers = [Shampoo([nn.Parameter(torch.ones(3, 2))])]
    with pytest.raises(ModelError, match=r"Shampoo, cost=…\): a tensor of shape \(3, 2\) costs .*a number >= 0"):
        matrices_of(optimizers, 2, Devices())


def test_owners_have_loads_that_are_as_even_as_whole_matrices_allow() -> None:
    assert owners_of([5, 4, 3, 3, 3], 2) == [0, 1, 1, 0, 1]
    assert owners_of([1.0] * 4, 3) == [0, 1, 2, 0]
    assert owners_of([], 2) == []
    assert owners_of([7, 9], 4) == [1, 0]
