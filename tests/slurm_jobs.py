"""Trainings that were given to a Slurm cluster, for its tests."""

import re
import sys
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import Any

from slurm_cluster import Cluster
from training import Trained, whole_lines

SCRIPT = Path(__file__).parent / "procs" / "scripts" / "small_training.py"

LONG: Any = {"EPOCHS": "40"}
"""Of a job that ends when it is told to hurry, and not before."""

HOSTILE = 'it\'s a $(touch pwned) `touch pwned` \\ "q" # *\n#SBATCH --nodes=9\n-x'
"""A name of a folder, a script and an argument."""


class Queued(Trained):
    """A training that Slurm runs.

    Args:
        cluster: the cluster.
        job: the number of the job.
        run_dir: its run folder.
        hurry: the file that makes its script hurry.
    """

    def __init__(self, cluster: Cluster, job: str, run_dir: Path, hurry: Path) -> None:
        super().__init__(run_dir)
        self.cluster, self.job, self._hurry = cluster, job, hurry

    @classmethod
    def submit(
        cls, cluster: Cluster, folder: Path, *words: str, script: str = str(SCRIPT), **settings: str
    ) -> "Queued":
        """Give a script to Slurm with unisono slurm.

        Args:
            cluster: what runs it.
            folder: where it is started.
            words: options of the command.
            script: what trains.
            settings: variables for the script.
        """
        variables = {"HURRY": str(folder / "hurry"), "PACE_S": "0.3", **settings}
        command = [sys.executable, "-m", "unisono", "slurm", "--time", "10", "--submit", *words, "--", script]
        said = cluster.run(*command, folder=folder, **variables)
        found = re.fullmatch(r"Submitted batch job (\d+)\n", said)
        assert found, said
        return cls(cluster, found[1], folder / "runs" / f"slurm-{found[1]}", folder / "hurry")

    def until_step(self, step: int) -> None:
        """Wait until it is committed."""
        self._wait_for(lambda: step in self.steps, f"step {step}")

    def until_workers(self, count: int) -> None:
        """Wait until so many train."""
        self._wait_for(lambda: bool(self._workers) and self._workers[-1] == count, f"{count} workers")

    def until_started_again(self) -> None:
        """Wait until Slurm has put it back into the queue."""
        self._wait_for(lambda: self.cluster.show(self.job)["Restarts"] == "1", "a second start")

    def _wait_for(self, is_so: Callable[[], bool], words: str) -> None:
        self.cluster.wait_for(is_so, lambda: f"{words}\n{self.cluster.output(self.cluster.show(self.job))}")

    def hurry(self) -> None:
        """From now on it trains as fast as it can."""
        self._hurry.touch()

    def until(self, state: str) -> dict[str, str]:
        """Wait until Slurm says so of it."""
        return self.cluster.until(self.job, state)

    @property
    def _workers(self) -> list[int]:
        return [line["world_size"] for line in whole_lines(self.run_dir / "metrics.jsonl") if "loss" in line]

    @property
    def sizes(self) -> list[int]:
        """How many workers trained, one after the other."""
        return [size for size, _ in groupby(self._workers)]
