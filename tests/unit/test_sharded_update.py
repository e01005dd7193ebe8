"""A run whose update is split keeps whole state where users and checkpoints look for it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import unisono
from unisono.errors import JobError, WorkerLost

pytestmark = [pytest.mark.unit, pytest.mark.usefixtures("one_worker")]

Start = Callable[..., unisono.Run]

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "fused SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, nesterov=True, fused=True),
    "Adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01, amsgrad=True, foreach=True),
    "fused AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, fused=True),
    "Adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.01),
    "Adadelta": torch.optim.Adadelta,
    "Adamax": torch.optim.Adamax,
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "RMSprop": lambda parameters: torch.optim.RMSprop(parameters, momentum=0.9, centered=True),
}


class Net(nn.Module):
    """Has a parameter without dimensions, and a layer that the first steps leave unused."""

    def __init__(self, rare_from: int = 2) -> None:
        super().__init__()
        self.rare_from = rare_from
        self.first, self.second = nn.Linear(6, 9), nn.Linear(9, 3)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.rare = nn.Linear(6, 3)
        self.conv = nn.Conv2d(1, 2, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.calls: Tensor
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        image = self.conv(x.reshape(len(x), 1, 2, 3).repeat(1, 1, 2, 1)).flatten(1).sum(1, keepdim=True)
        found: Tensor = self.second(torch.tanh(self.first(x))) * self.scale + image
        return found + self.rare(x) if self.calls > self.rare_from else found


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(75, 6, generator=generator), torch.randint(0, 3, (75,), generator=generator))


def loss_fn(model: Any, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def trained(run: unisono.Run, make: Callable[[Any], torch.optim.Optimizer]) -> tuple[str, list[dict[str, Any]]]:
    """The digest of the weights, and the optimizer's state of every parameter."""
    model = Net(rare_from=0 if make is OPTIMIZERS["fused SGD"] else 2)  # or torch's own fused SGD fails
    optimizer = make(model.parameters())
    run.prepare(model, optimizer)
    for step in run.steps(data(), epochs=2):
        step.run(loss_fn)
    state = [dict(optimizer.state[parameter]) for parameter in model.parameters()]
    return run.finish(), state


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("shards", [1, 2])
def test_weights_and_optimizer_state_are_those_of_an_update_that_is_not_split(
    name: str, shards: int, start: Start, tmp_path: Path
) -> None:
    digest, expected = trained(start(shards=shards, run_dir=tmp_path / "whole"), OPTIMIZERS[name])
    split, state = trained(start(shards=shards, shard_optimizer=True), OPTIMIZERS[name])
    assert split == digest
    for ours, theirs in zip(state, expected, strict=True):
        assert ours.keys() == theirs.keys()
        for key, value in theirs.items():
            assert torch.equal(torch.as_tensor(ours[key]), torch.as_tensor(value)), key


def test_a_run_goes_on_from_a_checkpoint_with_or_without_splitting(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, _ = trained(start(run_dir=tmp_path / "whole"), OPTIMIZERS["Adam"])
    for number, (before, after) in enumerate([(True, False), (False, True), (True, True)]):
        folder = tmp_path / f"cut-{number}"
        monkeypatch.setenv("UNISONO_STOP_AFTER", "3")
        trained(start(run_dir=folder, checkpoint_every=1, shard_optimizer=before), OPTIMIZERS["Adam"])
        monkeypatch.delenv("UNISONO_STOP_AFTER")
        assert trained(start(run_dir=folder, shard_optimizer=after), OPTIMIZERS["Adam"])[0] == expected


def test_a_schedulers_learning_rate_reaches_every_part(start: Start, tmp_path: Path) -> None:
    def scheduled(run: unisono.Run) -> str:
        model = Net()
        optimizer = OPTIMIZERS["SGD"](model.parameters())
        run.prepare(model, optimizer)
        scheduler = run.register("scheduler", torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5))
        for step in run.steps(data(), epochs=2):
            step.run(loss_fn)
            scheduler.step()
        return run.finish()

    assert scheduled(start(run_dir=tmp_path / "whole")) == scheduled(start(shard_optimizer=True))


def test_an_optimizer_that_needs_whole_tensors_is_refused_with_the_names_of_those_that_do_not(start: Start) -> None:
    class Own(torch.optim.SGD):
        pass

    model = Net()
    with pytest.raises(JobError, match="cannot split Own: it splits .*SGD, Adam, AdamW"):
        start(shard_optimizer=True).prepare(model, Own(model.parameters(), lr=0.1))


def test_a_script_may_change_weights_between_steps(start: Start, tmp_path: Path) -> None:
    def decayed(run: unisono.Run) -> str:
        model = Net()
        run.prepare(model, OPTIMIZERS["SGD"](model.parameters()))
        for step in run.steps(data(), epochs=2):
            step.run(loss_fn)
            with torch.no_grad():
                model.first.weight.mul_(0.9)
        return run.finish()

    assert decayed(start(run_dir=tmp_path / "whole")) == decayed(start(shard_optimizer=True))


def test_nobody_goes_on_from_an_update_that_stopped_half_way(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    run, model = start(shard_optimizer=True), Net()
    run.prepare(model, OPTIMIZERS["SGD"](model.parameters()))

    def lose(*_: Any) -> Any:
        raise WorkerLost("rank 1 is gone")

    for step in run.steps(data()):
        if step.number == 0:  # of a whole update
            step.run(loss_fn)
            continue
        with monkeypatch.context() as patched, pytest.raises(WorkerLost, match="rank 1 is gone"):
            patched.setattr(torch.optim.SGD, "step", lose)
            step.run(loss_fn)
        for go_on in (lambda step=step: step.run(loss_fn), run.finish, run.inside.snapshots.take):
            with pytest.raises(WorkerLost, match="half updated: start the job again"):
                go_on()
        break
