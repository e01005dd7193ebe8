"""What unisono slurm writes runs, on a real Slurm of three nodes on this machine."""

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

from serial_runs import SerialRuns
from slurm_cluster import Cluster, NoCluster, slurm_cluster
from training import Trained, whole_lines
from unisono.errors import JobError
from unisono.launch.settings import Script
from unisono.launch.slurm.batch_job import Allocation, BatchJob
from unisono.launch.slurm.batch_script import text_of

pytestmark = [pytest.mark.procs, pytest.mark.timeout(300)]

SCRIPT = Path(__file__).parent / "scripts" / "small_training.py"

HOSTILE = 'it\'s a $(touch pwned) `touch pwned` \\ "q" # *\n#SBATCH --nodes=9\n-x'
"""A name of a folder, a script and an argument."""


@pytest.fixture(scope="session")
def running(nothing_outlives_the_run: None) -> Iterator[Cluster]:
    try:
        with slurm_cluster() as cluster:
            yield cluster
    except NoCluster as reason:
        pytest.skip(f"NO SLURM: {reason}")


@pytest.fixture
def cluster(running: Cluster) -> Iterator[Cluster]:
    """With free nodes, before the test and after it."""
    yield running
    running.clear()


class Queued(Trained):
    """A training that was given to Slurm with unisono slurm.

    Args:
        cluster: what runs it.
        folder: where it is started.
        words: options of the command.
        settings: variables for the script.
    """

    def __init__(self, cluster: Cluster, folder: Path, *words: str, **settings: str) -> None:
        self.cluster, self.folder = cluster, folder
        self._hurry = folder / "hurry"
        variables = {"HURRY": str(self._hurry), "PACE_S": "0.3", **settings}
        command = [sys.executable, "-m", "unisono", "slurm", str(SCRIPT), "--time", "10", *words, "--submit"]
        said = cluster.run(*command, folder=folder, **variables)
        found = re.fullmatch(r"Submitted batch job (\d+)\n", said)
        assert found, said
        self.job = found[1]
        super().__init__(folder / "runs" / f"slurm-{self.job}")

    def until_step(self, step: int) -> None:
        """Wait until it is committed."""
        shown = self.cluster.show(self.job)
        self.cluster.wait_for(lambda: step in self.steps, lambda: f"step {step}\n{self.cluster.output(shown)}")

    def hurry(self) -> None:
        """From now on it trains as fast as it can."""
        self._hurry.touch()

    def until(self, state: str) -> dict[str, str]:
        """Wait until Slurm says so of it."""
        return self.cluster.until(self.job, state)

    @property
    def sizes(self) -> list[int]:
        """How many workers trained, one after the other."""
        lines = [line["world_size"] for line in whole_lines(self.run_dir / "metrics.jsonl") if "loss" in line]
        return [size for at, size in enumerate(lines) if at == 0 or lines[at - 1] != size]


@pytest.fixture(scope="module")
def serial(serial_runs: SerialRuns) -> str:
    """The digest of the weights that one worker trains."""
    return serial_runs(SCRIPT).end()


def test_a_job_that_is_put_back_into_the_queue_goes_on_with_the_nodes_that_are_left(
    cluster: Cluster, tmp_path: Path, serial: str
) -> None:
    training = Queued(cluster, tmp_path, "--nodes", "1-2", "--workers-per-node", "1")
    training.until_step(3)
    cluster.slurm("scontrol", "update", "NodeName=n2,n3", "State=DRAIN", "Reason=test")
    cluster.requeue(training.job)
    training.hurry()
    ended = training.until("COMPLETED")
    assert (ended["ExitCode"], ended["Restarts"], ended["NumNodes"]) == ("0:0", "1", "1")
    assert training.sizes == [2, 1]
    assert len(set(training.steps)) == len(training.steps), "a step was trained twice"
    assert training.end() == serial


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
