"""What unisono slurm writes runs, on a cluster of stand-ins for sbatch, srun and scontrol."""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from slurm_cluster import Cluster
from unisono.errors import JobError
from unisono.launch.settings import Script
from unisono.launch.slurm.batch_job import Allocation, BatchJob
from unisono.launch.slurm.batch_script import text_of

pytestmark = [pytest.mark.procs, pytest.mark.timeout(300)]

PATIENCE_S = 240.0

HOSTILE = 'it\'s a $(touch pwned) `touch pwned` \\ "q" # *\n#SBATCH --nodes=9\n-x'
"""A name of a folder, a script and an argument."""

TRAINS = """
import os, signal, sys
import torch, unisono
assert sys.argv[1:] in ([], [{argument!r}, "--help", ""]), sys.argv
run = unisono.init(batch_size=16, shards=4, seed=0)
model = torch.nn.Linear(4, 1)
model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
data = torch.utils.data.TensorDataset(torch.randn(64, 4, generator=torch.Generator().manual_seed(0)))
for step in run.steps(data, epochs=2):
    step.run(lambda model, batch: model(batch[0]).square().mean())
    if step.number == 2 and sys.argv[1:] and not os.environ.get("SLURM_RESTART_COUNT"):
        os.kill(os.getpid(), signal.SIGTERM)  # as Slurm does, to all
run.finish(model)
"""
"""With arguments, it is asked to leave in its third step."""


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path / "cluster")
    yield cluster
    cluster.close()


def slurm(cluster: Cluster, folder: Path, *words: str, **variables: str) -> str:
    """Call unisono slurm, and wait for the job; what the command prints."""
    done = subprocess.run(
        [sys.executable, "-m", "unisono", "slurm", *words],
        cwd=folder, env={**cluster.environ, **variables}, stdin=subprocess.DEVNULL, capture_output=True, text=True,
        timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    cluster.wait(PATIENCE_S)
    return done.stdout


def results(folder: Path) -> dict[str, dict[str, object]]:
    found = {path.parent.name: json.loads(path.read_text()) for path in sorted(folder.glob("runs/*/result.json"))}
    assert found, "\n".join(path.read_text() for path in folder.glob("slurm-*.out"))
    return found


def test_an_array_trains_the_same_weights_on_one_two_and_four_workers(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAINS.format(argument=""))
    options = ["--time", "00:30:00", "--nodes", "2", "--workers-per-node", "2", "--workers", "1,2,4", "--submit"]
    said = slurm(cluster, tmp_path, "train.py", *options, UNISONO_STOP_AFTER="6")
    found = re.fullmatch(r"Submitted batch job (\d+)\n", said)
    assert found, said
    ended = results(tmp_path)
    assert list(ended) == [f"slurm-{found[1]}_{element}" for element in range(3)]
    assert [one["world_size"] for one in ended.values()] == [1, 2, 4]
    assert len({one["weights_sha256"] for one in ended.values()}) == 1
    assert all(one["steps"] == 6 for one in ended.values())
    output = (tmp_path / f"slurm-{found[1]}_2.out").read_text()
    assert "launched by slurm: rank 0 of 4" in output
    assert cluster.calls == []


@pytest.mark.slow
def test_a_preempted_job_goes_on_when_it_starts_again_whatever_things_are_called(
    cluster: Cluster, tmp_path: Path
) -> None:
    folder = tmp_path / HOSTILE
    folder.mkdir()
    script = f"-{HOSTILE}.py".replace("/", "")
    (folder / script).write_text(TRAINS.format(argument=HOSTILE))
    name = HOSTILE.replace("\n", " ")
    options = ["--time", "10", "--workers-per-node", "2", "--job-name", name, "--output", "-job", "--submit"]
    said = slurm(cluster, folder, *options, "--", script, HOSTILE, "--help", "")
    assert said.startswith("written: -job\nSubmitted batch job ")
    ((run, result),) = results(folder).items()
    job = run.removeprefix("slurm-")
    assert cluster.calls == [f"requeue incomplete {job}"]
    output = (folder / f"slurm-{job}.out").read_text()
    assert re.findall(r"ended with (\d+)", output) == ["75", "0"]
    assert (result["steps"], result["world_size"], result["exit_code"]) == (8, 2, 0)
    assert not list(tmp_path.rglob("pwned"))

    command = [sys.executable, f"./{script}", HOSTILE, "--help", ""]
    alone = subprocess.run(
        command, cwd=folder, env={**cluster.environ, "SLURM_RESTART_COUNT": "1"}, capture_output=True, text=True,
        timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    assert str(result["weights_sha256"]) in alone.stdout, alone.stdout + alone.stderr


words = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])) | st.binary().map(
    lambda text: os.fsdecode(text.replace(b"\0", b""))
)


@settings(max_examples=60)
@given(st.lists(words), words.map(lambda text: text.replace("/", "") or "x"), words)
@example(["-c", "", "$(touch pwned)", "`touch pwned`", "\n\r\t\x7f", "'\\'", "\udcff", "!!", "~", "*"], HOSTILE, "\n")
def test_bash_hands_every_word_on_as_it_was_given(arguments: list[str], script: str, runs: str) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        show = folder / "srun"
        show.write_text('#!/bin/sh\nprintf "%s\\0" "$UNISONO_RUN_DIR" "$@"\n')
        show.chmod(0o755)
        job = BatchJob(
            Script(script, tuple(arguments)), Allocation("10", gpus=1), script.strip("\n") or "x", folder, "python",
            runs=Path(runs),
        )  # fmt: skip
        try:
            text = text_of(job, ["unisono", *arguments])
        except JobError:  # a name that Slurm could not be told
            text = text_of(replace(job, name="x"), ["unisono", *arguments])
        environment = {"PATH": f"{folder}:/bin:/usr/bin", "SLURM_JOB_ID": "7"}
        done = subprocess.run(["/bin/bash"], input=os.fsencode(text), env=environment, capture_output=True, check=False)
        assert done.returncode == 0, done.stderr
        run_dir, *found = [os.fsdecode(word) for word in done.stdout.split(b"\0")[:-1]]
        target = f"./{script}" if script.startswith("-") else script
        assert found[found.index("python") + 1 :] == [target, *arguments]
        assert run_dir == f"{Path(runs)}/slurm-7"
        assert list(folder.iterdir()) == [show]
