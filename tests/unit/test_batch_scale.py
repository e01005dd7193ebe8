"""A batch that is multiplied from outside, and what goes with it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import unisono
from unisono.errors import JobError
from unisono.jsonl import read_lines

pytestmark = [pytest.mark.unit, pytest.mark.usefixtures("one_worker")]

Start = Callable[..., unisono.Run]


def data() -> torch.utils.data.TensorDataset:
    draw = torch.Generator().manual_seed(1)
    return torch.utils.data.TensorDataset(torch.randn(96, 4, generator=draw), torch.arange(96) % 3)


def loss_of(model: Any, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def trained(run: unisono.Run) -> list[float]:
    """The learning rates of the steps."""
    model = nn.Linear(4, 3)
    run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for step in run.steps(data(), epochs=4):
        step.run(loss_of)
    run.finish()
    lines = read_lines(run.dir / "metrics.jsonl")
    return [line["lr"] * line.get("lr_factor", 1.0) for line in lines]


def test_the_learning_rate_grows_to_its_multiple_over_the_samples_of_the_first_steps(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UNISONO_BATCH_SCALE", "3")
    monkeypatch.setenv("UNISONO_BATCH_SCALE_WARMUP", "12")  # of 16 samples: 4 of 48
    rates = trained(start(batch_size=16, shards=2))
    assert rates == pytest.approx([0.1, 0.15, 0.2, 0.25, 0.3, 0.3, 0.3, 0.3])


def test_a_script_that_scales_its_rate_by_itself_is_told_to_leave_one_of_the_two_out(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UNISONO_BATCH_SCALE", "2")
    with pytest.raises(JobError, match="UNISONO_BATCH_SCALE=2 .* LinearScaling"):
        start(policies=[unisono.LinearScaling(2, 100)])


def test_a_batch_that_is_set_from_outside_goes_before_the_scripts_and_is_journalled(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UNISONO_BATCH_SIZE", "24")
    run = start(batch_size=16, shards=2)
    assert (run.job.batch_size, run.job.shards) == (24, 2)
    trained(run)
    assert {line["batch_size"] for line in read_lines(run.dir / "metrics.jsonl")} == {24}
    (told,) = (line for line in read_lines(run.dir / "journal.jsonl") if line["event"] == "batch size set from outside")
    assert (told["variable"], told["script"], told["batch_size"]) == ("UNISONO_BATCH_SIZE", 16, 24)
