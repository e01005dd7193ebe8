"""A bit that flips in what a script has registered is found where another worker has a copy, and the run goes back."""

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import TensorDataset

import unisono
from benchmarks.thread_crew import Trade, train
from unisono.errors import JobMismatch
from unisono.job import Job
from unisono.train.config.run_config import Execution
from unisono.train.run import Run
from unisono_lab.faults.injector import flip

pytestmark = [
    pytest.mark.unit,
    pytest.mark.usefixtures("torch_settings_restored"),
    pytest.mark.filterwarnings("ignore::unisono.errors.UnisonoWarning"),
]

JOB = Job.create(batch_size=16, shards=4)
SAMPLES = torch.linspace(-2, 2, 8 * 16 * 4).sin().view(-1, 4)


def script(victim: int | None, run: Run) -> tuple[str, str]:
    """What the weights and their average come to. After step 4 a bit of the victim's average is another one, once."""
    model = nn.Linear(4, 2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view(parameter.shape))
    run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    average, done = run.register("average", AveragedModel(model)), run.rank != victim
    for step in run.steps(TensorDataset(SAMPLES), epochs=1):
        step.run(lambda model, batch: F.cross_entropy(model(batch[0]), (batch[0][:, 0] > 0).long()))
        average.update_parameters(model)
        if step.number == 4 and not done:
            done = True
            flip(next(average.parameters()).detach(), 0, 22)
    return run.finish(), unisono.digest(average)


@pytest.mark.parametrize("workers", [2, 3])
def test_the_run_goes_back_and_the_average_is_that_of_the_serial_run(workers: int, tmp_path: Path) -> None:
    def trade(name: str, size: int) -> Trade:
        return Trade(JOB, size, tmp_path / name, Execution(overlap=False, looks=True), verify_every=2)

    (expected,) = train(trade("serial", 1), partial(script, None))
    assert train(trade("struck", workers), partial(script, workers - 1)) == [expected] * workers
    result = json.loads((tmp_path / "struck" / "result.json").read_text())
    assert [(one["step"], one["to"]) for one in result["rolled_back"]] == [(6, 4)]
    assert result["rolled_back"][0]["why"].endswith("different registered objects (average): average.module.weight")


def restless(visits: Iterator[int], run: Run) -> str:
    """Rank 1 sets its average to another count each time that it comes to the end of step 4."""
    model = nn.Linear(4, 2)
    run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    average = run.register("average", AveragedModel(model))
    for step in run.steps(TensorDataset(SAMPLES), epochs=1):
        step.run(lambda model, batch: F.cross_entropy(model(batch[0]), (batch[0][:, 0] > 0).long()))
        if step.number == 4 and run.rank == 1:
            average.n_averaged += next(visits)
    return run.finish()


@pytest.mark.parametrize("workers", [2, 3])
def test_a_run_that_differs_anew_after_each_return_ends_and_says_why(workers: int, tmp_path: Path) -> None:
    visits = iter(range(1, 17))
    trade = Trade(JOB, workers, tmp_path / "run", Execution(overlap=False, looks=True), verify_every=2)
    with pytest.raises(JobMismatch, match=r"gone back from there 5 times.*may be what the script does on each worker"):
        train(trade, partial(restless, visits))
    assert next(visits) == 7, "the first visit and five more"
