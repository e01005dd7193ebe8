"""A processor that computes wrongly from some step on is found, leaves the job, and leaves no trace in the weights."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from benchmarks.thread_crew import Trade, train
from unisono.errors import MemoryFault
from unisono.job import Job
from unisono.train.config.run_config import Execution
from unisono.train.run import Run
from unisono.train.step.step import Step
from unisono_lab.faults.faults import WrongResult
from unisono_lab.faults.injector import inject

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.usefixtures("torch_settings_restored"),
    pytest.mark.filterwarnings("ignore::unisono.errors.UnisonoWarning"),
]

JOB = Job.create(batch_size=16, shards=4)
STEPS = 12
BIT = 22
SAMPLES = torch.linspace(-2, 2, STEPS * 16 * 4).sin().view(-1, 4)


def script(wrong: int | None, since: int, run: Run) -> str:
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view(parameter.shape))
    run.prepare(model, torch.optim.Adam(model.parameters(), lr=0.05))
    struck: list[int] = []
    victim = run.rank == wrong

    def strike_once(run: Run, step: Step) -> None:
        if victim and step.number == since and not struck:
            struck.append(step.number)
            inject(WrongResult(rank=0, at_step=since, bit=BIT), run)

    run.on("step_begins", strike_once)
    for step in run.steps(TensorDataset(SAMPLES), epochs=1):
        step.run(lambda model, batch: F.cross_entropy(model(batch[0]), (batch[0][:, 0] > 0).long()))
    return run.finish()


def trade(folder: Path, workers: int, audit: float, *, is_elastic: bool = False) -> Trade:
    execution = Execution(overlap=False, audit=audit, looks=True)
    return Trade(JOB, workers, folder, execution, verify_every=2, is_elastic=is_elastic)


@pytest.fixture
def expected(tmp_path: Path) -> str:
    (digest,) = train(trade(tmp_path / "serial", 1, 0.0), partial(script, None, 0))
    return str(digest)


def journal(folder: Path, event: str) -> list[dict[str, Any]]:
    lines = map(json.loads, (folder / "journal.jsonl").read_text().splitlines())
    return [line for line in lines if line["event"] == event]


@pytest.mark.parametrize(("wrong", "since"), [(0, 0), (1, 3), (2, 5), (1, 9)])
def test_it_leaves_an_elastic_job_which_goes_back_and_ends_in_the_serial_runs_weights(
    wrong: int, since: int, expected: str, tmp_path: Path
) -> None:
    folder = tmp_path / "struck"
    found = train(trade(folder, 3, 0.4, is_elastic=True), partial(script, wrong, since))
    assert found == [None if name == wrong else expected for name in range(3)]
    named = journal(folder, "wrong result")
    assert {(line["rank"], line["transient"]) for line in named} == {(wrong, False)}
    assert all(line["step"] >= since for line in named)
    result = json.loads((folder / "result.json").read_text())
    assert [one["rank"] for one in result["wrong_results"]] == [line["rank"] for line in named]
    assert [one["step"] >= since >= one["to"] for one in result["rolled_back"]] == [True]


@pytest.mark.parametrize("wrong", [0, 1, 2])
def test_whoever_begins_with_the_last_step_is_found_however_little_is_audited(
    wrong: int, expected: str, tmp_path: Path
) -> None:
    folder = tmp_path / "struck"
    found = train(trade(folder, 3, 1e-9, is_elastic=True), partial(script, wrong, STEPS - 1))
    assert found == [None if name == wrong else expected for name in range(3)]
    named = journal(folder, "wrong result")
    assert [(line["rank"], line["step"]) for line in named[:1]] == [(wrong, STEPS - 1)]


def test_without_an_audit_it_passes_for_right(expected: str, tmp_path: Path) -> None:
    (found,) = set(train(trade(tmp_path / "struck", 3, 0.0, is_elastic=True), partial(script, 1, 3)))
    assert found != expected


def test_where_workers_stay_the_same_the_job_ends_and_names_it(tmp_path: Path) -> None:
    with pytest.raises(MemoryFault, match=r"step \d+: rank 2 on host \S+ computed shard \d otherwise .* every time"):
        train(trade(tmp_path / "struck", 3, 1.0), partial(script, 2, 3))
