"""A run whose update is split keeps whole state where users and checkpoints look for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from benchmarks.thread_crew import Trade, train
from unisono.errors import WorkerLost
from unisono.job import Job
from unisono.testing.fault import listening
from unisono.train.config.run_config import Execution
from unisono.train.run import Run
from waves import waved

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.usefixtures("numerics"),
    pytest.mark.filterwarnings("ignore::unisono.errors.UnisonoWarning"),
]

JOB = Job(batch_size=12, shards=6, seed=1, threads=1)
Make = Callable[[Any], torch.optim.Optimizer]


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
        waved(self)

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


def trained(make: Make, run: Run, schedules: bool = False) -> tuple[str, list[dict[str, Any]]]:
    """The digest of the weights, and the optimizer's state of every parameter."""
    model = Net(rare_from=0 if make is OPTIMIZERS["fused SGD"] else 2)  # or torch's own fused SGD fails
    optimizer = make(model.parameters())
    run.prepare(model, optimizer)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5 if schedules else 1.0)
    run.register("scheduler", scheduler)
    for step in run.steps(data(), epochs=1):
        step.run(loss_fn)
        scheduler.step()
    return run.finish(), [dict(optimizer.state[parameter]) for parameter in model.parameters()]


def ends(trade: Trade, make: Make, *, schedules: bool = False) -> tuple[str, list[dict[str, Any]]]:
    """What all workers come to."""
    (first, state), *others = train(trade, lambda run: trained(make, run, schedules))
    assert {digest for digest, _ in others} <= {first}
    assert ("memory shared" in (trade.folder / "journal.jsonl").read_text()) == bool(trade.execution.shard_optimizer)
    return first, state


def trade(folder: Path, workers: int, *, split: bool = True) -> Trade:
    return Trade(JOB, workers, folder, Execution(overlap=False, looks=True, shard_optimizer=split))


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("workers", [2, 3])
def test_weights_and_optimizer_state_are_those_of_an_update_that_is_not_split(
    name: str, workers: int, tmp_path: Path
) -> None:
    digest, expected = ends(trade(tmp_path / "whole", 1, split=False), OPTIMIZERS[name])
    found, state = ends(trade(tmp_path / "split", workers), OPTIMIZERS[name])
    assert found == digest
    for ours, theirs in zip(state, expected, strict=True):
        assert ours.keys() == theirs.keys()
        for key, value in theirs.items():
            assert torch.equal(torch.as_tensor(ours[key]), torch.as_tensor(value)), key


def test_a_run_goes_on_from_a_checkpoint_with_or_without_splitting(tmp_path: Path) -> None:
    expected, _ = ends(trade(tmp_path / "whole", 1, split=False), OPTIMIZERS["Adam"])
    for before, after in [(True, False), (False, True), (True, True)]:
        folder = tmp_path / f"cut-{before}-{after}"
        cut = replace(trade(folder, 2, split=before), checkpoint_every=1, stop_after=3)
        ends(cut, OPTIMIZERS["Adam"])
        (folder / "journal.jsonl").unlink()
        assert ends(trade(folder, 3, split=after), OPTIMIZERS["Adam"])[0] == expected


def test_a_schedulers_learning_rate_reaches_every_part(tmp_path: Path) -> None:
    expected, _ = ends(trade(tmp_path / "whole", 1, split=False), OPTIMIZERS["SGD"], schedules=True)
    assert ends(trade(tmp_path / "split", 3), OPTIMIZERS["SGD"], schedules=True)[0] == expected


def test_nobody_goes_on_from_an_update_that_stopped_half_way(tmp_path: Path) -> None:
    def lose(name: str) -> None:
        if name == "update begins":
            raise WorkerLost("rank 1 is gone")

    def script(run: Run) -> int:
        model, refused = Net(), 0
        run.prepare(model, OPTIMIZERS["SGD"](model.parameters()))
        for step in run.steps(data()):
            if step.number == 0:  # of a whole update
                step.run(loss_fn)
                continue
            with pytest.raises(WorkerLost, match="rank 1 is gone"):
                step.run(loss_fn)
            for go_on in (lambda step=step: step.run(loss_fn), run.finish, run.inside.snapshots.take):
                with pytest.raises(WorkerLost, match="half updated: start the job again"):
                    go_on()
                refused += 1
            break
        return refused

    with listening(lose):
        assert train(trade(tmp_path, 2), script) == [3, 3]
