"""A script that changes weights on some workers only is told so, however often the run goes back."""

from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from benchmarks.thread_crew import Trade, train
from unisono.errors import JobMismatch
from unisono.job import Job
from unisono.train.config.run_config import Execution
from unisono.train.run import Run

pytestmark = [
    pytest.mark.unit,
    pytest.mark.usefixtures("torch_settings_restored"),
    pytest.mark.filterwarnings("ignore::unisono.errors.UnisonoWarning"),
]

JOB = Job.create(batch_size=16, shards=4)
SAMPLES = torch.linspace(-2, 2, 3 * 16 * 4).sin().view(-1, 4)


def script(last: int, again: float, run: Run) -> str:
    """The main worker changes its bias after the last step: by 1, and by so much more each time it comes by."""
    model, added = nn.Linear(4, 2), 1.0
    run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for step in run.steps(TensorDataset(SAMPLES), epochs=1):
        step.run(lambda model, batch: F.cross_entropy(model(batch[0]), (batch[0][:, 0] > 0).long()))
        if run.is_main and step.number == last:
            model.bias.data.add_(added)
            added += again
    return run.finish()


@pytest.mark.parametrize("last", [1, 2], ids=["between two steps", "at the end"])
@pytest.mark.parametrize(
    ("again", "words"), [(0.0, "did so again"), (1.0, "has not helped")], ids=["alike", "otherwise"]
)
def test_weights_of_one_worker_that_its_script_changes_end_the_job(
    last: int, again: float, words: str, tmp_path: Path
) -> None:
    trade = Trade(JOB, 2, tmp_path, Execution(overlap=False, looks=True), verify_every=2)
    with pytest.raises(JobMismatch, match=words):
        train(trade, partial(script, last, again))
