"""Runs that are cut short in one of several loops go on as if nothing had cut them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import unisono

pytestmark = [pytest.mark.unit, pytest.mark.usefixtures("one_worker")]

Start = Callable[..., unisono.Run]


def data() -> TensorDataset:
    draw = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(96, 4, generator=draw), torch.arange(96) % 3)


def cross_entropy(model: Any, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def epochs(run: unisono.Run) -> str:
    """Nine steps, in a loop per epoch, with a schedule that goes on behind each."""
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    run.prepare(model, optimizer)
    scheduler = run.register("scheduler", torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5))
    for _ in range(3):
        for step in run.steps(data()):
            step.run(cross_entropy)
        scheduler.step()
    return run.finish()


def stages(run: unisono.Run) -> str:
    """Nine steps, in three loops, each with another optimizer, and a head that is another one in the last."""
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    for stage, kind in enumerate((torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)):
        if stage == 2:
            model[2] = nn.Linear(8, 5)
        run.prepare(model, kind(model.parameters(), lr=0.01))
        for step in run.steps(data()):
            step.run(cross_entropy)
    return run.finish()


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler")  # in a run that has the epoch behind it
@pytest.mark.parametrize("script", [epochs, stages])
@pytest.mark.parametrize(("steps", "again"), [(1, 1), (3, 2), (5, 1), (6, 1), (8, 2), (9, 1)])
def test_a_run_that_is_cut_short_in_any_of_its_loops_goes_on_to_the_same_bits(
    script: Any, steps: int, again: int, start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = script(start(run_dir=tmp_path / "undisturbed"))
    monkeypatch.setenv("UNISONO_STOP_AFTER", f"{steps}")
    for _ in range(again):  # the second one finds itself cut short where it begins
        script(start(checkpoints={"every": 4}))
    monkeypatch.delenv("UNISONO_STOP_AFTER")
    assert script(start()) == expected
