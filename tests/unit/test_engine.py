"""A step that is lost on the way can be computed again."""

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import unisono
from benchmarks.thread_crew import Trade, run_of
from unisono.errors import WorkerLost
from unisono.job import Job
from unisono.membership.rendezvous import Generation
from unisono.plan.split import Split
from unisono.reduce.transport import Solo
from unisono.train.group.membership import Fixed
from unisono.train.group.workers import Workers

pytestmark = [
    pytest.mark.unit,
    pytest.mark.usefixtures("one_worker"),
    pytest.mark.filterwarnings("ignore:BatchNorm"),
]


def loss_fn(model: Any, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def trained(run: unisono.Run, broken: "Breaking | None" = None) -> tuple[str, list[float]]:
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    inputs, labels = torch.randn(75, 6, generator=generator), torch.randint(0, 3, (75,), generator=generator)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3))
    run.prepare(model, torch.optim.Adam(model.parameters(), lr=0.01))
    losses = []
    for step in run.steps(TensorDataset(inputs, labels), epochs=2):
        if broken is not None:
            broken.breaks = True
            with pytest.raises(WorkerLost):
                step.run(loss_fn)
        losses.append(step.run(loss_fn))
    return run.finish(), losses


@pytest.mark.parametrize("shards", [1, 2, 5])
def test_a_step_whose_reduction_failed_is_computed_again_to_the_same_bits(tmp_path: Path, shards: int) -> None:
    def run_over(transport: Solo, name: str) -> unisono.Run:
        job = Job.create(batch_size=32, shards=shards)
        membership = Fixed(Workers(Generation(1, 0, Split.even(shards, 1)), transport))
        return run_of(Trade(job, 1, tmp_path / name), membership)

    with closing(run_over(Solo(shards), "undisturbed")) as run:
        expected = trained(run)
    broken = Breaking(shards)
    with closing(run_over(broken, "disturbed")) as run:
        assert trained(run, broken) == expected


class Breaking(Solo):
    """Loses the control word of the next step, if it is told to."""

    breaks = False

    def all_gather(self, row: Tensor) -> Tensor:
        if self.breaks:
            self.breaks = False
            raise WorkerLost("rank 1 is gone")
        return super().all_gather(row)
