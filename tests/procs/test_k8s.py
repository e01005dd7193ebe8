"""The commands in the pods of a JobSet, for real: what happens to pods there changes no bit."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml

from pods_played import NoPods, PlayedJobSet, network
from slurm_jobs import LONG, SCRIPT
from training import Trained, whole_lines

pytestmark = [pytest.mark.procs, pytest.mark.timeout(300), pytest.mark.slow]

NAME = "small-training"


class OnPods(Trained):
    """A training whose pods are played.

    Args:
        played: the JobSet.
        folder: its files.
    """

    def __init__(self, played: PlayedJobSet, folder: Path) -> None:
        super().__init__(folder / "claim" / NAME)
        self.played, self._hurry = played, folder / "hurry"

    @property
    def sizes(self) -> list[int]:
        """The number of workers of each step so far."""
        return [line["world_size"] for line in whole_lines(self.run_dir / "metrics.jsonl") if "loss" in line]

    def until(self, workers: int) -> None:
        """Wait until so many train."""
        self.played.until(lambda: self.sizes[-1:] == [workers], f"{workers} workers, not {self.sizes}")

    def until_over(self) -> str:
        """Have it train as fast as it can; how the JobSet has ended."""
        self._hurry.touch()
        self.played.until(lambda: self.played.state != "Running", "the end")
        return self.played.state


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., OnPods]]:
    """Writes the manifests with the command, and starts their pods; skips the test, loudly, if none can be."""
    with ExitStack() as opened:

        def started(*words: str, pace_s: float = 0.3, script: Path = SCRIPT) -> OnPods:
            folder = tmp_path
            manifest, keys = folder / "job.yaml", folder / "keys.yaml"
            own = ["--image", "registry.example/train:1", "--name", NAME, "--claim", "runs"]
            files = ["--new-secret", str(keys), "-o", str(manifest)]
            command = [sys.executable, "-m", "unisono", "k8s", str(script), *own, *files, *words]
            subprocess.run(command, check=True)
            (folder / "claim").mkdir()
            try:
                net = opened.enter_context(network(folder, f"{NAME}-coordinator-0-0.{NAME}"))
            except NoPods as error:
                pytest.skip(f"NO PODS: {error}")
            variables = {"PACE_S": str(pace_s), "HURRY": str(folder / "hurry"), **LONG}
            secret = yaml.safe_load(keys.read_text())["stringData"]
            played = PlayedJobSet(NAME, _spec(manifest), secret, net, folder, variables)
            opened.callback(played.close)
            played.start()
            return OnPods(played, folder)

        yield started


def _spec(manifest: Path) -> dict[str, Any]:
    first = next(iter(yaml.safe_load_all(manifest.read_text())))
    found: dict[str, Any] = first["spec"] if first["kind"] == "JobSet" else first["spec"]["template"]["spec"]
    return found


@pytest.mark.hosts("Kubernetes", "kill", "join", "drain")
def test_a_pod_is_killed_another_is_evicted_both_are_replaced_and_no_bit_changes(
    start: Callable[..., OnPods], long_serial: Trained
) -> None:
    job = start("-n", "1:2", pace_s=1)
    job.until(2)
    running = job.played.processes()
    assert [line for line in running if "unisono join" in line], running
    assert not [line for line in running if job.played.secret["token"] in line]
    killed, evicted = job.played.nodes()
    killed.kill()
    assert killed.wait() == 137
    job.until(1)
    job.until(2)
    evicted.evict()
    assert evicted.wait() == 75, evicted.text
    job.until(1)
    job.until(2)
    assert job.until_over() == "Completed", job.played.text
    assert job.end() == long_serial.end()
    assert job.steps == long_serial.steps
    assert sorted(end for end in job.played.ended if end[1]) == [("node", 75), ("node", 137)]
    assert job.played.failures == {"node": 1}, "an evicted pod is no failure"
    assert job.played.restarts == 0


@pytest.mark.hosts("Kubernetes", "requeue")
def test_a_job_whose_coordinator_is_killed_is_started_again_and_goes_on(
    start: Callable[..., OnPods], long_serial: Trained
) -> None:
    job = start("-n", "2", "--checkpoint-every", "2", "--kubeflow")
    job.until(2)
    job.played.until(lambda: len(job.steps) > 4, "some steps")
    job.played.coordinator().kill()
    job.played.until(lambda: job.played.restarts == 1, "another start")
    assert job.until_over() == "Completed", job.played.text
    assert job.end() == long_serial.end()
    assert job.played.restarts == 1
    assert ("coordinator", 137) in job.played.ended


@pytest.mark.hosts("Kubernetes", "requeue")
def test_a_job_that_is_suspended_leaves_with_a_checkpoint_and_goes_on(
    start: Callable[..., OnPods], long_serial: Trained
) -> None:
    job = start("-n", "1:2", pace_s=1)
    job.until(2)
    job.played.until(lambda: len(job.steps) > 3, "some steps")
    pods = job.played.pods
    job.played.close()  # all are told at once
    assert {pod.wait() for pod in pods} == {75}, job.played.text
    assert len(job.steps) < len(long_serial.steps)
    job.played.start()
    assert job.until_over() == "Completed", job.played.text
    assert job.end() == long_serial.end()
    assert job.steps == long_serial.steps, "it has not begun anew"


def test_a_job_whose_script_fails_has_failed_and_is_not_started_again(
    start: Callable[..., OnPods], tmp_path: Path
) -> None:
    script = tmp_path / "wrong.py"
    script.write_text("import unisono\nunisono.init(batch_size=8)\nraise SystemExit('as wrong as can be')\n")
    job = start("-n", "1:2", script=script)
    assert job.until_over() == "Failed", job.played.text
    assert job.played.restarts == 0
    assert job.played.ended[-1] == ("coordinator", 1), job.played.ended
