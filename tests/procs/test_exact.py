"""The promise: one job, one bit pattern, on any number of workers."""

import json
import os
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from commands import python
from launches import Launches, launches
from serial_runs import SerialRuns
from training import Trained
from unisono.checkpoint.checkpoint_store import load_weights

pytestmark = [pytest.mark.procs, pytest.mark.timeout(600)]  # the first test waits for all jobs

Results = dict[int, dict[str, list[Any]]]

JOBS = Path(__file__).parent / "scripts" / "exact_jobs.py"
WORKERS = (1, 2, 3, 5)
WHAT_TRAVELS = {
    "batch_norm_dropout_tied_unused",
    "a_batch_that_shards_do_not_divide",
    "a_last_batch_smaller_than_the_number_of_shards",
    "thirteen_shards",
    "float64",
    "bf16_parameters",
    "small_buckets",
    "a_parameter_that_only_some_shards_use",
    "token_weighted_loss_with_a_shard_without_tokens",
    "a_gan_with_two_updates_on_one_batch",
    "gradients_compressed_to_bf16",
}
"""Jobs that differ in what goes from worker to worker. The others are tried over fewer ways and numbers of workers."""


ON_ALL_NUMBERS = WHAT_TRAVELS | {
    "exact_strategies_in_turn",
    "state_outside_of_the_model",
    "metrics_and_a_scheduler",
    "random_augmentation_in_this_process",
    "random_augmentation_in_loader_processes",
}
"""Jobs in which the number of workers decides who does what. The others are tried on one and on three."""

OF_ALL_JOBS = (1, 3)

SHARDS = {"UNISONO_SHARDS": "8"}
QUIET = {**os.environ, "PYTHONWARNINGS": "ignore::UserWarning", "OMP_WAIT_POLICY": "passive"}
"""There are more threads than cores: none is to wait for another one by keeping a core busy."""


@pytest.fixture(scope="module")
def launch() -> Iterator[Launches]:
    with launches(QUIET, **SHARDS) as found:
        yield found


def alone(*command: str, folder: Path) -> str:
    """Run a script to its end as one worker, by itself: no launcher forks it. Returns what it printed."""
    own = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "UNISONO_RUN_DIR": str(folder)}
    done = python(*command, env={**QUIET, **SHARDS, **own}, timeout=240)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-3000:]}\n{done.stderr[-5000:]}"
    return done.stdout


def by_job(output: str) -> dict[str, list[Any]]:
    """What every worker reported of each job."""
    reports = [json.loads(line) for line in re.findall(r"RESULT (.*)", output)]
    return {name: [report for report in reports if report["job"] == name] for name in {each["job"] for each in reports}}


@pytest.fixture(scope="module")
def results(launch: Launches, tmp_path_factory: pytest.TempPathFactory) -> Results:
    """For each number of workers and each job, what every worker reported."""
    found: Results = {}
    for workers in WORKERS:
        jobs = job_names() if workers in OF_ALL_JOBS else ON_ALL_NUMBERS
        command = (str(JOBS), *sorted(jobs))
        folder = tmp_path_factory.mktemp("exact") / "run"
        output = alone(*command, folder=folder) if workers == 1 else launch(workers, *command, folder=folder)
        found[workers] = by_job(output)
    return found


slow = pytest.mark.slow


@pytest.mark.slow
@pytest.mark.parametrize(("topology", "workers"), [("direct", 3), ("ring", 3), ("tree", 5)])
def test_between_hosts_the_bits_are_those_of_shared_memory(
    topology: str, workers: int, launch: Launches, results: Results, tmp_path: Path
) -> None:
    output = launch(workers, str(JOBS), *WHAT_TRAVELS, folder=tmp_path / "run", UNISONO_TOPOLOGY=topology)
    assert by_job(output) == {job: results[1][job] * workers for job in WHAT_TRAVELS}


SERVED = (
    "batch_norm_dropout_tied_unused",
    "a_last_batch_smaller_than_the_number_of_shards",
    "adamw_clipped_by_norm",
    "a_gan_with_two_updates_on_one_batch",
    "metrics_and_a_scheduler",
    "gradients_that_are_watched",
    "random_augmentation_in_loader_processes",
    "gradients_compressed_to_bf16",
)
"""Jobs in which a worker that only serves could fail in a way of its own."""


@pytest.mark.parametrize(
    ("servers", "workers", "transport"), [(1, 2, "shared_memory"), pytest.param(2, 3, "sockets", marks=slow)]
)
def test_whether_workers_or_servers_finish_the_sums_changes_no_bit(
    servers: int, workers: int, transport: str, launch: Launches, results: Results, tmp_path: Path
) -> None:
    way = {"UNISONO_STRATEGY": f"parameter-server:servers={servers}", "UNISONO_TRANSPORT": transport}
    output = launch(workers, str(JOBS), *SERVED, folder=tmp_path / "run", **way)
    assert by_job(output) == {job: results[1][job] * workers for job in SERVED}


def test_the_topology_that_was_measured_to_be_the_fastest_changes_no_bit_and_is_in_the_journal(
    launch: Launches, results: Results, tmp_path: Path
) -> None:
    job, workers = "batch_norm_dropout_tied_unused", 3
    output = launch(workers, str(JOBS), job, folder=tmp_path / "run", UNISONO_TRANSPORT="sockets")
    assert by_job(output) == {job: results[1][job] * workers}
    measured = Trained(tmp_path / "run").journal("topology")
    assert measured
    for line in measured:
        assert set(line["seconds"]) == {"direct", "ring", "tree"}
        assert line["fastest"] in line["seconds"]


CUT_OFF = """
import sys
sys.path.insert(0, {folder!r})
from exact_jobs import Net, cross_entropy, images
import torch, unisono
run = unisono.init(batch_size=61, shards=8, seed=3)
model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
run.prepare(model, optimizer)
for step in run.steps(images(150), epochs=3):
    step.run(cross_entropy)
    if step.number == 4:
        run.checkpoint()
run.finish()
"""


@pytest.mark.usefixtures("serial_launches")
def test_a_model_with_everything_goes_on_in_the_middle_of_an_epoch_on_another_number_of_workers(
    launch: Launches, serial_runs: SerialRuns, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(CUT_OFF.format(folder=str(JOBS.parent)))
    launch(2, str(script), folder=tmp_path / "run", UNISONO_STOP_AFTER="5")
    launch(3, str(script), folder=tmp_path / "run")
    assert Trained(tmp_path / "run").end() == serial_runs(script).end()


NATIVE = """
import sys
sys.path.insert(0, {folder!r})
from exact_jobs import cross_entropy, images
import torch, unisono
from torch import nn
run = unisono.init(batch_size=61, shards=8, seed=3, arithmetic=unisono.Arithmetic(reduction=sys.argv[1]))
model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))
run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
for step in run.steps(images(150), epochs=3):
    step.run(cross_entropy)
run.checkpoint()
run.finish()
"""


@pytest.mark.slow
def test_native_reduction_agrees_with_exact_to_a_hundred_thousandth(launch: Launches, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(NATIVE.format(folder=str(JOBS.parent)))

    def weights(reduction: str) -> torch.Tensor:
        launch(3, str(script), reduction, folder=tmp_path / reduction)
        return torch.cat([value.flatten() for value in load_weights(tmp_path / reduction).values()])

    exact, native = weights("exact"), weights("native")
    assert (exact - native).norm() <= 1e-5 * exact.norm()


@cache
def job_names() -> list[str]:
    return re.findall(r"@job\ndef (\w+)", JOBS.read_text())


@pytest.mark.parametrize("job", job_names())
def test_every_worker_of_any_number_ends_with_the_same_bits(job: str, results: Results) -> None:
    serial = results[1][job][0]
    for workers in WORKERS if job in ON_ALL_NUMBERS else OF_ALL_JOBS:
        assert len(results[workers][job]) == workers
        assert all(report == serial for report in results[workers][job]), f"{workers} workers"


@slow
def test_as_many_workers_as_shards_end_with_the_same_bits(launch: Launches, results: Results, tmp_path: Path) -> None:
    found = by_job(launch(8, str(JOBS), *WHAT_TRAVELS, folder=tmp_path / "run"))
    assert found == {job: results[1][job] * 8 for job in WHAT_TRAVELS}


def test_another_seed_other_shards_or_another_batch_size_give_other_bits(results: Results) -> None:
    names = ("batch_norm_dropout_tied_unused", "another_seed", "other_shards", "another_batch_size")
    assert len({results[1][name][0]["digest"] for name in names}) == len(names)


WHOLE = "batch_norm_dropout_tied_unused"


@pytest.mark.parametrize(
    ("workers", "one", "other"),
    [
        (3, WHOLE, "small_buckets"),
        (3, "reduced_beside_the_backward_pass", "reduced_after_the_backward_pass"),
        (2, "random_augmentation_in_this_process", "random_augmentation_in_loader_processes"),
        *((workers, WHOLE, "exact_strategies_in_turn") for workers in WORKERS),
    ],
)
def test_buckets_overlap_loader_processes_and_servers_that_come_and_go_change_no_bit(
    workers: int, one: str, other: str, results: Results
) -> None:
    assert results[workers][one][0]["digest"] == results[workers][other][0]["digest"]


def test_compression_gives_other_bits(results: Results) -> None:
    whole, compressed = results[1]["a_batch_that_shards_do_not_divide"], results[1]["gradients_compressed_to_bf16"]
    assert whole[0]["digest"] != compressed[0]["digest"]
