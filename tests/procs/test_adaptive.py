"""Policies at work in real jobs. What they decide on any number of workers: ``tests/unit/test_adaptive.py``."""

import subprocess
from pathlib import Path
from typing import Any

import pytest

import outcomes
from outcomes import outcome, outcome_in
from serial_runs import SerialRuns

pytestmark = [pytest.mark.procs, pytest.mark.timeout(240), pytest.mark.usefixtures("warm")]

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPT = EXAMPLES / "adaptive.py"
SHORT = ("--epochs", "6")


def train(folder: Path, *options: str, script: Path = SCRIPT, **settings: str) -> subprocess.CompletedProcess[str]:
    return outcomes.train(
        folder, *options, script=script, arguments=SHORT if script == SCRIPT else (), settings=settings
    )


@pytest.fixture(scope="session")
def serial(serial_runs: SerialRuns) -> tuple[str, list[Any]]:
    return outcome_in(serial_runs(SCRIPT, *SHORT).run_dir)


@pytest.mark.slow  # workers that are threads show it in each suite
def test_decisions_and_weights_are_the_same_while_workers_come_and_die(
    serial: tuple[str, list[Any]], tmp_path: Path
) -> None:
    faults = tmp_path / "faults.toml"
    kills = [(12, 0), (35, 1), (41, 0), (60, 2), (80, 0)]
    faults.write_text(
        "".join(f"[[fault]]\nkind = 'kill'\nrank = {r}\nat_step = {s}\nafter_s = 0.002\n" for s, r in kills)
    )
    options = ("-n", "1:4", "--max-restarts", "20", "--faults", str(faults))
    found = outcome(tmp_path / "run", train(tmp_path / "run", *options))
    assert found == serial
    journal = (tmp_path / "run" / "journal.jsonl").read_text()
    assert journal.count('"event": "lost"') >= 3
    assert '"event": "resized"' in journal


LOCAL = """
import os

import torch
from torch import nn

import unisono


class ByRank(unisono.Policy):
    def after_step(self, view):
        if view.step == 3:
            self.set_batch_size(32 if run.rank == 0 else 64)


run = unisono.init(batch_size=16, shards=4, policies=[ByRank()])
model = nn.Linear(4, 2)
run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
data = torch.utils.data.TensorDataset(torch.randn(256, 4))
for step in run.steps(data, epochs=2):
    step.run(lambda model, batch: model(batch[0]).square().mean())
run.finish()
"""


@pytest.mark.slow
def test_a_policy_that_decides_differently_on_two_workers_is_caught_and_named(tmp_path: Path) -> None:
    script = tmp_path / "local.py"
    script.write_text(LOCAL)
    ended = train(tmp_path / "run", "-n", "2", script=script, UNISONO_TRANSPORT="sockets")
    assert ended.returncode == 1
    said = ended.stdout + ended.stderr
    assert "the policies decided differently before step 3" in said
    assert "rank 0: by-rank: set_batch_size(32)" in said
    assert "rank 1: by-rank: set_batch_size(64)" in said


@pytest.mark.slow
def test_policies_come_from_the_command_line(tmp_path: Path) -> None:
    script = tmp_path / "plain.py"
    script.write_text(LOCAL.replace("policies=[ByRank()]", ""))
    ended = train(tmp_path / "run", "-n", "2", "--policy", "noise-scale", script=script)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "gradient_norm" in (tmp_path / "run" / "metrics.jsonl").read_text()
