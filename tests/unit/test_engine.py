"""A step that is lost on the way can be computed again."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import unisono
from unisono.errors import WorkerLost
from unisono.train.step.engine import StepEngine

pytestmark = [
    pytest.mark.unit,
    pytest.mark.usefixtures("one_worker"),
    pytest.mark.filterwarnings("ignore:BatchNorm"),
]

Start = Callable[..., unisono.Run]


def loss_fn(model: Any, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def trained(run: unisono.Run, *, again: bool = False) -> tuple[str, list[float]]:
    generator = torch.Generator().manual_seed(0)
    inputs, labels = torch.randn(75, 6, generator=generator), torch.randint(0, 3, (75,), generator=generator)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3))
    run.prepare(model, torch.optim.Adam(model.parameters(), lr=0.01))
    losses = []
    for step in run.steps(TensorDataset(inputs, labels), epochs=2):
        if again:
            with pytest.raises(WorkerLost):
                step.run(loss_fn)
        losses.append(step.run(loss_fn))
    return run.finish(), losses


@pytest.mark.parametrize("shards", [1, 2, 5])
def test_a_step_whose_reduction_failed_is_computed_again_to_the_same_bits(
    start: Start, tmp_path: Path, shards: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = trained(start(shards=shards, run_dir=tmp_path / "undisturbed"))

    lost = [True]
    exchange = StepEngine._exchange

    def lose_every_other(engine: StepEngine, *arguments: Any) -> Any:
        lost[0] = not lost[0]
        if not lost[0]:
            raise WorkerLost("rank 1 is gone")
        return exchange(engine, *arguments)

    monkeypatch.setattr(StepEngine, "_exchange", lose_every_other)
    assert trained(start(shards=shards), again=True) == expected
