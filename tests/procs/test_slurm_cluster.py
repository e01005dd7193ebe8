"""What people do with Slurm, and what happens to their jobs there: the weights are those of the serial run."""

import json
import os
import re
import shutil
import sys
from pathlib import Path

import pytest

from pages import GUIDE, printed
from slurm_cluster import Cluster
from slurm_jobs import HOSTILE, SCRIPT, Queued

pytestmark = [pytest.mark.procs, pytest.mark.slow, pytest.mark.timeout(400)]

STOPS = """
import os, signal, sys
import torch, unisono
assert sys.argv[1:] == [{argument!r}, "--help", ""], sys.argv
run = unisono.init(batch_size=16, shards=4, seed=0)
model = torch.nn.Linear(4, 1)
model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
data = torch.utils.data.TensorDataset(torch.randn(64, 4, generator=torch.Generator().manual_seed(0)))
for step in run.steps(data, epochs=2):
    step.run(lambda model, batch: model(batch[0]).square().mean())
    if step.number == 2 and not os.environ.get("SLURM_RESTART_COUNT"):
        os.kill(os.getpid(), signal.SIGTERM)  # as Slurm does, to all
run.finish(model)
"""
"""It is asked to leave in its third step."""

PAGE = "slurm.md"

THREE = ("--nodes", "3", "--workers-per-node", "1")


def batch(cluster: Cluster, folder: Path, name: str, *options: str, pace_s: float = 1.0) -> str:
    """Submit a script of the guide's page; the number of its Slurm job."""
    (folder / name).write_text(printed(PAGE, name))
    shutil.copy(SCRIPT, folder / "train.py")
    command = ("sbatch", "--parsable", "--time=10", *options, name)
    return cluster.run(*command, folder=folder, **variables(folder, pace_s)).strip()


def has_gone_on(training: Queued, serial: str) -> None:
    """It ends after one restart, with each step trained once and the weights of the serial run."""
    training.hurry()
    ended = training.until("COMPLETED")
    assert (ended["ExitCode"], ended["Restarts"]) == ("0:0", "1")
    assert len(set(training.steps)) == len(training.steps), "a step was trained twice"
    assert training.end() == serial


def variables(folder: Path, pace_s: float) -> dict[str, str]:
    """What the training and the scripts read."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {"HURRY": str(folder / "hurry"), "PACE_S": str(pace_s), "PATH": path}


def test_an_array_trains_the_same_weights_on_one_two_and_three_nodes(
    cluster: Cluster, tmp_path: Path, small_serial: str
) -> None:
    training = Queued.submit(cluster, tmp_path, *THREE, "--workers", "1,2,3", PACE_S="0")
    for element in range(3):
        ended = cluster.until(f"{training.job}_{element}", "COMPLETED")
        assert (ended["ExitCode"], ended["Restarts"]) == ("0:0", "0")
    found = [json.loads((tmp_path / f"runs/slurm-{training.job}_{one}/result.json").read_text()) for one in range(3)]
    assert [one["world_size"] for one in found] == [1, 2, 3]
    assert {one["weights_sha256"] for one in found} == {small_serial}
    assert "launched by slurm: rank 0 of 3" in (tmp_path / f"slurm-{training.job}_2.out").read_text()


def test_a_job_is_put_back_into_the_queue_whatever_things_are_called(cluster: Cluster, tmp_path: Path) -> None:
    folder = tmp_path / HOSTILE
    folder.mkdir()
    script = f"-{HOSTILE}.py".replace("/", "")
    (folder / script).write_text(STOPS.format(argument=HOSTILE))
    name = HOSTILE.replace("\n", " ")
    options = ["--time", "10", "--workers-per-node", "2", "--job-name", name, "--output", "-job", "--submit"]
    command = [sys.executable, "-m", "unisono", "slurm", *options, "--", script, HOSTILE, "--help", ""]
    said = cluster.run(*command, folder=folder)
    found = re.fullmatch(r"written: -job\nSubmitted batch job (\d+)\n", said)
    assert found, said
    ended = cluster.until(found[1], "COMPLETED")
    assert (ended["ExitCode"], ended["Restarts"]) == ("0:0", "1")
    result = json.loads((folder / f"runs/slurm-{found[1]}/result.json").read_text())
    assert (result["steps"], result["world_size"]) == (8, 2)
    assert not list(tmp_path.rglob("pwned"))
    alone = [sys.executable, f"./{script}", HOSTILE, "--help", ""]
    assert result["weights_sha256"] in cluster.run(*alone, folder=folder, SLURM_RESTART_COUNT="1")


@pytest.mark.hosts("Slurm", "kill")
def test_a_job_goes_on_from_its_last_checkpoint_without_a_node_that_has_died(
    own_cluster: Cluster, tmp_path: Path, small_serial: str
) -> None:
    options = ["--nodes", "2-3", "--workers-per-node", "1", "--checkpoint-every", "2"]
    training = Queued.submit(own_cluster, tmp_path, *options)
    training.until_step(5)
    own_cluster.kill("n2")
    training.hurry()
    ended = training.until("COMPLETED")
    assert (ended["ExitCode"], ended["Restarts"], ended["NumNodes"]) == ("0:0", "1", "2")
    assert training.sizes == [3, 2]
    assert training.end() == small_serial


@pytest.mark.hosts("Slurm", "requeue")
def test_two_minutes_before_its_limit_a_job_leaves_with_a_checkpoint_and_starts_again(
    cluster: Cluster, tmp_path: Path, small_serial: str
) -> None:
    training = Queued.submit(cluster, tmp_path, *THREE, PACE_S="3")  # Slurm looks every half minute
    training.until_step(3)
    cluster.slurm("scontrol", "update", f"JobId={training.job}", "TimeLimit=2")
    training.until_started_again()
    # Or it is asked to leave again at once.
    cluster.slurm("scontrol", "update", f"JobId={training.job}", "TimeLimit=10")
    has_gone_on(training, small_serial)


@pytest.mark.hosts("Slurm", "drain")
def test_a_job_makes_room_for_an_urgent_one_and_goes_on_after_it(
    cluster: Cluster, tmp_path: Path, small_serial: str
) -> None:
    training = Queued.submit(cluster, tmp_path, *THREE, PACE_S="1")
    training.until_step(3)
    command = ("sbatch", "--parsable", "--partition=urgent", "--nodes=3", "--exclusive", "--wrap=echo there")
    urgent = cluster.run(*command, folder=tmp_path).strip()
    cluster.until(urgent, "COMPLETED")
    has_gone_on(training, small_serial)


def test_plain_srun_leaves_with_a_checkpoint_on_the_signal_that_was_asked_for_and_goes_on(
    cluster: Cluster, tmp_path: Path, small_serial: str
) -> None:
    job = batch(cluster, tmp_path, "train.sh")
    training = Queued(cluster, job, tmp_path / "runs" / job, tmp_path / "hurry")
    training.until_step(2)
    cluster.slurm("scancel", "--signal=USR1", job)
    training.until_started_again()
    has_gone_on(training, small_serial)


def test_slurm_shows_how_a_job_has_ended(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "fails.py").write_text("raise ValueError('boom')")
    one = ("--workers-per-node", "1")
    failed = Queued.submit(cluster, tmp_path, *one, script="fails.py")
    given_up = Queued.submit(cluster, tmp_path, *one, "--requeues", "0")
    cancelled = Queued.submit(cluster, tmp_path, *one)
    given_up.until_step(1)
    cancelled.until_step(1)
    cluster.slurm("scancel", "--signal=TERM", given_up.job)
    cluster.slurm("scancel", cancelled.job)
    assert failed.until("FAILED")["ExitCode"] == "1:0"
    assert given_up.until("FAILED")["ExitCode"] == "75:0"
    ended = cancelled.until("CANCELLED")
    assert (ended["ExitCode"], ended["Restarts"]) == ("75:0", "0")  # of the script; nobody starts it again
    assert "asked to leave: checkpoint after step" in cluster.output(ended)


@pytest.mark.hosts("Slurm", "join")
def test_elements_of_an_array_come_to_an_elastic_job_and_go(
    cluster: Cluster, tmp_path: Path, small_serial: str
) -> None:
    main = batch(cluster, tmp_path, "main.sh", pace_s=3)  # until all have come and gone
    training = Queued(cluster, main, tmp_path / "runs" / "elastic", tmp_path / "hurry")
    training.until_step(1)
    first = batch(cluster, tmp_path, "room.sh")
    training.until_workers(3)
    cluster.slurm("scancel", f"{first}_1")
    training.until_workers(2)
    more = batch(cluster, tmp_path, "room.sh", "--array=3-4")
    training.until_workers(4)
    training.hurry()
    assert training.until("COMPLETED")["ExitCode"] == "0:0"
    for job in (f"{first}_2", f"{more}_3", f"{more}_4"):
        assert cluster.until(job, "COMPLETED")["ExitCode"] == "0:0"
    assert cluster.until(f"{first}_1", "CANCELLED")["Restarts"] == "0"
    assert training.end() == small_serial


def test_a_function_that_submitit_starts_trains_and_is_started_again_from_its_newest_step(
    cluster: Cluster, tmp_path: Path, small_serial: str
) -> None:
    (tmp_path / "submit.py").write_text(printed(PAGE, "submit.py"))
    shutil.copy(SCRIPT, tmp_path / "train.py")
    told = {**variables(tmp_path, 1.0), "UNISONO_RUN_DIR": "run"}
    job = cluster.run(sys.executable, "submit.py", folder=tmp_path, **told).strip()
    training = Queued(cluster, job, tmp_path / "run", tmp_path / "hurry")
    training.until_step(3)
    cluster.slurm("scancel", "--signal=USR2", job)
    training.until_started_again()
    training.hurry()
    assert training.until("COMPLETED")["ExitCode"] == "0:0"
    assert len(set(training.steps)) == len(training.steps), "a step was trained twice"
    assert training.end() == small_serial
    assert (tmp_path / "log" / f"{job}_0_result.pkl").exists()


def test_a_study_as_an_array_makes_one_report(cluster: Cluster, tmp_path: Path) -> None:
    shutil.copy(SCRIPT, tmp_path / "train.py")
    options = ["--time", "10", "--workers-per-node", "2", "--cores-per-worker", "1", "--workers", "1,2", "--submit"]
    study = ["study", "--steps", "12", "--warmup", "2", "--repeats", "1"]
    command = [sys.executable, "-m", "unisono", "slurm", "train.py", *options, "--", *study]
    job = cluster.run(*command, folder=tmp_path, **variables(tmp_path, 0)).split()[-1]
    for element in range(2):
        assert cluster.until(f"{job}_{element}", "COMPLETED")["ExitCode"] == "0:0"
    found = re.search(r"^    (awk .*)$", (GUIDE / PAGE).read_text(), re.MULTILINE)
    assert found
    merged = found[1].replace("JOBID", job)
    cluster.run("sh", "-c", merged, folder=tmp_path, **variables(tmp_path, 0))
    lines = (tmp_path / "all.csv").read_text().splitlines()
    assert len(lines) == 3, lines
    assert list(tmp_path.glob("**/report.html")), list(tmp_path.rglob("*"))
