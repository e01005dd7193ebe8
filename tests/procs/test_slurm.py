"""What unisono slurm writes runs, on a real Slurm of three nodes on this machine."""

import os
import subprocess
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from slurm_cluster import NODES, Cluster
from slurm_jobs import HOSTILE, Queued
from unisono.errors import JobError
from unisono.launch.settings import Script
from unisono.launch.slurm_job import Allocation, BatchJob, text_of

pytestmark = [pytest.mark.procs, pytest.mark.timeout(300)]


@pytest.mark.hosts("Slurm", "requeue")
@pytest.mark.parametrize("nodes", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_job_that_is_put_back_into_the_queue_goes_on_with_the_nodes_that_are_left(
    cluster: Cluster, tmp_path: Path, small_serial: str, nodes: int
) -> None:
    training = Queued.submit(cluster, tmp_path, "--nodes", f"{nodes - 1}-{nodes}", "--workers-per-node", "1")
    training.until_step(3)
    drained = ",".join(NODES[nodes - 1 :])
    cluster.slurm("scontrol", "update", f"NodeName={drained}", "State=DRAIN", "Reason=test")
    cluster.requeue(training.job)
    training.hurry()
    ended = training.until("COMPLETED")
    assert (ended["ExitCode"], ended["Restarts"], ended["NumNodes"]) == ("0:0", "1", f"{nodes - 1}")
    assert training.sizes == [nodes, nodes - 1]
    assert len(set(training.steps)) == len(training.steps), "a step was trained twice"
    assert training.end() == small_serial


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
        environment = {"PATH": f"{folder}:/bin:/usr/bin", "SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1"}
        done = subprocess.run(["/bin/bash"], input=os.fsencode(text), env=environment, capture_output=True, check=False)
        assert done.returncode == 0, done.stderr
        run_dir, *found = [os.fsdecode(word) for word in done.stdout.split(b"\0")[:-1]]
        target = f"./{script}" if script.startswith("-") else script
        assert found[found.index("python") + 1 :] == [target, *arguments]
        assert run_dir == f"{Path(runs)}/slurm-7"
        assert list(folder.iterdir()) == [show]
