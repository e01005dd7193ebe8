"""Policies decide the same, at the same steps, on any number of workers and whatever happens to them."""

import subprocess
from pathlib import Path
from typing import Any

import pytest

import outcomes
from outcomes import outcome, outcome_in
from serial_runs import SerialRuns

pytestmark = [pytest.mark.procs, pytest.mark.timeout(240), pytest.mark.usefixtures("warm")]

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPT, ADA_SCALE = EXAMPLES / "adaptive.py", EXAMPLES / "ada_scale.py"
SHORT = {SCRIPT: ("--epochs", "6"), ADA_SCALE: ("--iterations", "150")}


def train(folder: Path, *options: str, script: Path = SCRIPT, **settings: str) -> subprocess.CompletedProcess[str]:
    return outcomes.train(folder, *options, script=script, arguments=SHORT.get(script, ()), settings=settings)


@pytest.fixture(scope="session")
def serial(serial_runs: SerialRuns) -> tuple[str, list[Any]]:
    return outcome_in(serial_runs(SCRIPT, *SHORT[SCRIPT]).run_dir)


@pytest.mark.parametrize("workers", [2, 3, 5])
def test_decisions_and_weights_are_the_same_on_any_number_of_workers(
    workers: int, serial: tuple[str, list[Any]], tmp_path: Path
) -> None:
    found = outcome(tmp_path / "run", train(tmp_path / "run", "-n", f"{workers}"))
    verbs = {verb for _, _, verb, _, _ in serial[1]}
    assert verbs == {"set_batch_size", "set_learning_rate", "resize"}
    assert found == serial


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


@pytest.fixture(scope="session")
def serial_ada_scale(serial_runs: SerialRuns) -> tuple[str, list[Any]]:
    return outcome_in(serial_runs(ADA_SCALE, *SHORT[ADA_SCALE]).run_dir)


@pytest.mark.parametrize("workers", [2, 3, 5])
def test_ada_scales_rates_and_its_end_are_the_same_on_any_number_of_workers(
    workers: int, serial_ada_scale: tuple[str, list[Any]], tmp_path: Path
) -> None:
    found = outcome(tmp_path / "run", train(tmp_path / "run", "-n", f"{workers}", script=ADA_SCALE))
    rates = [value for _, _, verb, value, _ in serial_ada_scale[1] if verb == "set_learning_rate"]
    assert len(set(rates)) > 10
    assert serial_ada_scale[1][-1][2] == "stop"
    assert found == serial_ada_scale


def test_ada_scale_goes_on_as_before_while_workers_come_and_die(
    serial_ada_scale: tuple[str, list[Any]], tmp_path: Path
) -> None:
    faults = tmp_path / "faults.toml"
    kills = [(6, 0), (14, 1), (22, 0)]
    faults.write_text(
        "".join(f"[[fault]]\nkind = 'kill'\nrank = {r}\nat_step = {s}\nafter_s = 0.002\n" for s, r in kills)
    )
    options = ("-n", "2:3", "--max-restarts", "20", "--faults", str(faults))
    assert outcome(tmp_path / "run", train(tmp_path / "run", *options, script=ADA_SCALE)) == serial_ada_scale
    assert (tmp_path / "run" / "journal.jsonl").read_text().count('"event": "lost"') >= 2


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


@pytest.mark.parametrize("transport", ["shared_memory", "process_group"])
@pytest.mark.parametrize(
    ("verb", "first", "second"),
    [
        (
            "self.set_batch_size(32 if run.rank == 0 else 64)",
            "by-rank: set_batch_size(32)",
            "by-rank: set_batch_size(64)",
        ),
        ("if run.rank == 0: self.set_topology('auto')", "by-rank: set_topology(auto)", "nothing"),
        ("if run.rank == 0: self.measure_links()", "by-rank: measure_links()", "nothing"),
    ],
)
def test_a_policy_that_decides_differently_on_two_workers_is_caught_and_named(
    verb: str, first: str, second: str, transport: str, tmp_path: Path
) -> None:
    script = tmp_path / "local.py"
    script.write_text(LOCAL.replace("self.set_batch_size(32 if run.rank == 0 else 64)", verb))
    ended = train(tmp_path / "run", "-n", "2", script=script, UNISONO_TRANSPORT=transport)
    assert ended.returncode == 1
    said = ended.stdout + ended.stderr
    assert "the policies decided differently before step 3" in said
    assert f"rank 0: {first}" in said
    assert f"rank 1: {second}" in said


def test_policies_come_from_the_command_line(tmp_path: Path) -> None:
    script = tmp_path / "plain.py"
    script.write_text(LOCAL.replace("policies=[ByRank()]", ""))
    ended = train(tmp_path / "run", "-n", "2", "--policy", "noise-scale", script=script)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "gradient_norm" in (tmp_path / "run" / "metrics.jsonl").read_text()
