"""What a run that resumes says of the script's settings that its checkpoint replaces."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import unisono

pytestmark = [pytest.mark.unit, pytest.mark.usefixtures("one_worker")]

Start = Callable[..., unisono.Run]
Make = Callable[[Any], torch.optim.Optimizer]


def data() -> TensorDataset:
    draw = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(96, 4, generator=draw), torch.arange(96) % 3)


def cross_entropy(model: Any, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def train(run: unisono.Run, optimizer_of: Make, schedule_of: Any = None, *, epochs: int = 2, until: int = 9) -> int:
    """Some steps; returns how many."""
    model = nn.Linear(4, 3)
    optimizer = optimizer_of(model.parameters())
    run.prepare(model, optimizer)
    schedule = None if schedule_of is None else run.register("schedule", schedule_of(optimizer))
    steps = 0
    for step in run.steps(data(), epochs):
        if step.number == until:
            run.close()
            return steps
        step.run(cross_entropy)
        steps += 1
        if schedule is not None:
            schedule.step()
    run.finish()
    return steps


def sgd(lr: float, **settings: Any) -> Make:
    return lambda parameters: torch.optim.SGD(parameters, lr=lr, **settings)


@pytest.mark.parametrize(
    ("optimizer_of", "told"),
    [
        (sgd(0.2, momentum=0.9), "SGD lr 0.1 (not 0.2)"),
        (sgd(0.2), "SGD lr 0.1 (not 0.2), momentum 0.9 (not 0)"),
        (
            lambda parameters: torch.optim.SGD([{"params": list(parameters), "lr": 0.3}], lr=0.1, momentum=0.9),
            "SGD lr 0.1 (not 0.3)",
        ),
    ],
)
def test_settings_of_an_optimizer_that_the_checkpoint_replaces_are_told_in_a_line(
    optimizer_of: Make, told: str, start: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    train(start(checkpoints={"every": 1}), sgd(0.1, momentum=0.9), until=4)
    capsys.readouterr()
    train(start(), optimizer_of)
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "not as in the script" in line]
    assert line == (
        f"unisono: the optimizers go on as in the checkpoint, not as in the script: {told}. Set in the loop's body "
        f"what is to change"
    )


@pytest.mark.parametrize(
    "schedule_of",
    [
        None,
        lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5),
        lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.5, total_steps=10),
        lambda optimizer: torch.optim.lr_scheduler.CyclicLR(optimizer, 0.01, 0.5),
    ],
)
def test_what_a_schedule_has_changed_is_no_other_setting(
    schedule_of: Any, start: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    train(start(checkpoints={"every": 1}), sgd(0.1, momentum=0.9), schedule_of, until=4)
    train(start(), sgd(0.1, momentum=0.9), schedule_of)
    assert "not as in the script" not in capsys.readouterr().out


def test_a_loop_that_is_over_says_so_where_a_finished_run_is_given_more_epochs(
    start: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    train(start(checkpoints={"every": 1}), sgd(0.1))
    run = start()
    assert train(run, sgd(0.1), epochs=5) == 0
    assert (
        f"unisono: resumes after step 6 from {run.dir}, after the script's first loop: it trains nothing more, also "
        f"with more epochs" in capsys.readouterr().out.splitlines()
    )
