"""With audits a worker whose memory flips a bit is not taken for one that computes wrongly."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from unisono.job import Job
from unisono.testing.crew import Trade, train
from unisono.testing.flip import flip_in
from unisono.train.engine import Execution
from unisono.train.run import Run

pytestmark = [
    pytest.mark.unit,
    pytest.mark.usefixtures("torch_settings_restored"),
    pytest.mark.filterwarnings("ignore::unisono.errors.UnisonoWarning"),
]

JOB = Job.create(batch_size=16, shards=4)
SAMPLES = torch.linspace(-2, 2, 8 * 16 * 4).sin().view(-1, 4)


def prepared(run: Run) -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view(parameter.shape))
    run.prepare(model, torch.optim.Adam(model.parameters(), lr=0.05))
    return model


def loss(model: Any, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), (batch[0][:, 0] > 0).long())


def script(at: int | None, run: Run) -> str:
    prepared(run)
    done = run.rank != 1
    for step in run.steps(TensorDataset(SAMPLES), epochs=1):
        if step.number == at and not done:
            done = True
            flip_in(run, "weights", 22)
        step.run(loss)
    return run.finish()


def crew(folder: Path, workers: int, audit: float, work: Callable[[Run], str]) -> list[str]:
    execution = Execution(overlap=False, audit=audit, looks=True)
    return train(Trade(JOB, workers, folder, execution, verify_every=2), work)


@pytest.mark.parametrize("workers", [2, 3])
def test_a_flipped_weight_is_healed_or_gone_back_from_and_no_processor_is_blamed(workers: int, tmp_path: Path) -> None:
    (expected,) = crew(tmp_path / "serial", 1, 0.0, partial(script, None))
    folder = tmp_path / "struck"
    assert crew(folder, workers, 1.0, partial(script, 5)) == [expected] * workers
    result = json.loads((folder / "result.json").read_text())
    assert result["wrong_results"] == []
    assert len(result["healed"]) + len(result["rolled_back"]) == 1
