"""Jobs on the nodes of a real Ray cluster: what happens to nodes there changes no bit."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from pages import printed
from ray_cluster import NoCluster, RayNodes, ray_nodes, wait_for, words_of
from slurm_jobs import LONG, SCRIPT
from training import Trained, whole_lines

pytestmark = [pytest.mark.procs, pytest.mark.timeout(400)]


@pytest.fixture
def start() -> Iterator[Callable[..., RayNodes]]:
    """Starts a cluster, of which ray_nodes says more; skips the test, loudly, where none can be made."""
    with ExitStack() as opened:

        def started(head_cpus: int = 0, spare: int = 0) -> RayNodes:
            try:
                return opened.enter_context(ray_nodes(head_cpus, spare))
            except NoCluster as error:
                pytest.skip(f"NO RAY CLUSTER: {error}")

        yield started


class OnRay(Trained):
    """A training on a cluster, and the command that waits for it.

    Args:
        cluster: the cluster.
        folder: the working folder of the command.
    """

    def __init__(self, cluster: RayNodes, folder: Path) -> None:
        super().__init__(folder / "run")
        self.cluster, self.folder = cluster, folder
        self.driver: subprocess.Popen[str]

    def begin(
        self, *words: str, pace_s: float = 0.5, script: Path = SCRIPT, arguments: Sequence[str] = (), **settings: str
    ) -> None:
        """Start the command."""
        variables = {"PACE_S": str(pace_s), "HURRY": str(self.folder / "hurry"), **settings}
        told = [word for name, value in variables.items() for word in ("--env", f"{name}={value}")]
        where = ("--on", "ray", "--run-dir", "run", "--failure-timeout-s", "20")
        self.driver = self.cluster.start(
            "unisono", "run", *where, *told, *words, str(script), *arguments, folder=self.folder
        )

    @property
    def text(self) -> str:
        """What the command has printed."""
        return (self.folder / "output").read_text()

    @property
    def sizes(self) -> list[int]:
        """The number of workers of each step so far."""
        return [line["world_size"] for line in whole_lines(self.run_dir / "metrics.jsonl") if "loss" in line]

    def until(self, workers: int) -> None:
        """Wait until so many train."""
        self.wait_for(lambda: self.sizes[-1:] == [workers], f"{workers} workers")

    def wait_for(self, is_so: Callable[[], bool], words: str) -> None:
        """Wait until something is so, while the command runs."""

        def looked() -> bool:
            assert self.driver.poll() is None or is_so(), f"{words}\n{self.sizes}\n{self.text}"
            return is_so()

        wait_for(looked, lambda: f"{words}\n{self.sizes}\n{self.text}")

    def agents(self) -> list[psutil.Process]:
        """The processes of the agents."""
        return [each for each in self.cluster.running() if "unisono.cli.by_order" in words_of(each)]

    def copies_of_the_token(self) -> set[Path]:
        """The agents' own."""
        return set(self.cluster.folder.glob("unisono-*/token"))

    def hurry(self) -> None:
        """From now on it trains as fast as it can."""
        (self.folder / "hurry").touch()

    def send(self, number: int) -> None:
        """Send the command a signal; who waits for it here is nsenter."""
        (command,) = psutil.Process(self.driver.pid).children()
        command.send_signal(number)

    def code(self) -> int:
        """The command's exit code, once it has ended; no process of Unisono is left then."""
        code = self.driver.wait(300)
        self.until_nothing_is_left()
        return code

    def until_nothing_is_left(self) -> None:
        """Wait until no process of Unisono is left in the cluster."""
        wait_for(lambda: not self._left, lambda: str(self._left))

    @property
    def _left(self) -> list[str]:
        return [line for line in self.cluster.processes() if "unisono" in line or "small_training" in line]


def test_a_job_on_ray_ends_with_the_weights_of_the_serial_run_and_leaves_nothing_behind(
    start: Callable[..., RayNodes], tmp_path: Path, small_serial: str
) -> None:
    job = OnRay(start(2), tmp_path)
    job.begin("-n", "2", pace_s=0)
    assert job.code() == 0, job.text
    assert job.end() == small_serial
    assert set(job.sizes) == {2}
    assert f"weights sha256 {small_serial}" in job.text, "the workers' output comes to the driver"
    assert job.cluster.requested() == 0
    assert "https://10.80.0.1:" in job.text
    token = (job.run_dir / "token").read_text()
    assert not [line for line in job.cluster.processes() if token in line]
    assert not job.copies_of_the_token()


@pytest.mark.slow
@pytest.mark.skipif(find_spec("opencensus") is None, reason="NO METRICS OF RAY: make with-ray-default has them")
def test_rays_own_metrics_have_the_figures_of_the_job_under_the_names_of_the_coordinators(
    start: Callable[..., RayNodes], tmp_path: Path
) -> None:
    job = OnRay(start(2), tmp_path)
    job.begin("-n", "2", pace_s=1.0, **LONG)
    job.until(2)
    found: dict[str, Sample] = {}

    def told() -> bool:
        found.clear()
        for family in text_string_to_metric_families(job.cluster.metrics()):
            found.update({one.name: one for one in family.samples if one.labels.get("run") == "run"})
        return {"ray_unisono_step", "ray_unisono_loss"} <= found.keys() and found["ray_unisono_step"].value >= 3

    job.wait_for(told, "figures")
    assert found["ray_unisono_workers"].value == 2
    assert found["ray_unisono_workers"].labels["phase"] == "working"
    losses = [line.get("loss") for line in whole_lines(job.run_dir / "metrics.jsonl")]
    assert found["ray_unisono_loss"].value in losses
    job.agents()[0].kill()
    counter = "ray_unisono_departures_total"  # Ray shows counters from their first event on
    job.wait_for(lambda: told() and counter in found and found[counter].value == 1, "a departure")
    job.hurry()
    assert job.code() == 0, job.text


@pytest.mark.slow
@pytest.mark.hosts("Ray", "drain")
def test_a_node_that_its_cloud_takes_away_is_left_and_another_one_taken(
    start: Callable[..., RayNodes], tmp_path: Path, long_serial: Trained
) -> None:
    cluster = start(1)
    taken = cluster.add(cloud="aws")
    job = OnRay(cluster, tmp_path)
    job.begin("-n", "1:2", "--notices", "aws", pace_s=1.0, **LONG)
    job.until(2)
    cluster.take_away(taken)
    job.until(1)
    assert "AWS takes this machine away (terminate)" in job.text
    cluster.add()
    cluster.kill(taken)
    job.until(2)
    job.hurry()
    assert job.code() == 0, job.text
    assert job.end() == long_serial.end()
    assert job.steps == long_serial.steps
    assert not job.copies_of_the_token()


@pytest.mark.slow
def test_the_pages_script_trains_the_weights_of_the_serial_run(
    start: Callable[..., RayNodes], tmp_path: Path, small_serial: str
) -> None:
    (tmp_path / "submit.py").write_text(printed("ray.md", "submit.py"))
    shutil.copy(SCRIPT, tmp_path / "train.py")
    job = OnRay(start(2), tmp_path)
    job.driver = job.cluster.start(sys.executable, "submit.py", folder=tmp_path)
    assert job.code() == 0, job.text
    assert job.text.splitlines()[-1] == f"0 {small_serial}"
    assert job.end() == small_serial
    assert set(job.sizes) == {2}


@pytest.mark.slow
def test_lines_after_finish_come_home_after_the_coordinators_end_or_it_is_said_that_they_were_cut_short(
    start: Callable[..., RayNodes], tmp_path: Path
) -> None:
    cluster = start(2)
    after_finish = SCRIPT.with_name("after_finish.py")
    job = OnRay(cluster, tmp_path)
    job.begin("-n", "2:3", "--grace-s", "200", script=after_finish, arguments=("1", "wait"))
    job.wait_for((job.run_dir / "exported-0").exists, "the end of one worker's script")
    job.wait_for(lambda: not any("membership.server" in line for line in cluster.processes()), "the coordinator's end")
    assert job.driver.poll() is None
    (job.run_dir / "go").touch()
    assert job.code() == 0, job.text
    assert "these are the last words" in job.text
    assert "cut short" not in job.text
    assert (job.run_dir / "exported-1").exists()
    (tmp_path / "short").mkdir()
    short = OnRay(cluster, tmp_path / "short")
    short.begin("-n", "2", "--grace-s", "1", script=after_finish, arguments=("1", "wait"))
    assert short.code() == 0, short.text
    assert "agents that have not ended 1 s after the job are killed (1 of them)" in short.text
    assert "was killed or lost (training was complete by then, and it is not missed)" in short.text
    assert (short.run_dir / "exported-0").exists()
    assert not (short.run_dir / "exported-1").exists()


@pytest.mark.slow
def test_an_actor_that_is_killed_leaves_no_copy_of_the_token(
    start: Callable[..., RayNodes], tmp_path: Path, long_serial: Trained
) -> None:
    """Neither one whose group is killed with it, nor one of a node that dies."""
    cluster = start(1)
    dies = cluster.add()
    job = OnRay(cluster, tmp_path)
    job.begin("-n", "1:2", pace_s=1.0, **LONG)
    job.until(2)
    before = job.copies_of_the_token()
    assert len(before) == 2
    cluster.kill(dies)
    job.until(1)
    job.wait_for(lambda: len(job.copies_of_the_token()) == 1, "the end of the copy of the node that died")
    (agent,) = job.agents()
    actor = agent.parent()
    assert actor is not None
    os.killpg(agent.pid, signal.SIGKILL)
    actor.kill()
    job.wait_for(lambda: job.copies_of_the_token().isdisjoint(before), "the end of the copy of the actor that died")
    job.until(1)
    job.hurry()
    assert job.code() == 0, job.text
    assert job.end() == long_serial.end()
    assert not job.copies_of_the_token()


@pytest.mark.slow
@pytest.mark.hosts("Ray", "kill", "join", "drain")
def test_a_node_dies_others_come_one_is_drained_and_no_bit_changes(
    start: Callable[..., RayNodes], tmp_path: Path, long_serial: Trained
) -> None:
    cluster = start(0)
    dies, drained, _ = (cluster.add() for _ in range(3))
    job = OnRay(cluster, tmp_path)
    job.begin("-n", "2:4", pace_s=1.0, **LONG)
    job.until(3)
    assert cluster.requested() == 1
    cluster.kill(dies)
    job.until(2)
    cluster.add()
    job.until(3)
    cluster.drain(drained)
    job.until(2)
    assert "is about to go: its worker leaves after this step" in job.text
    cluster.add()
    cluster.kill(drained)
    job.until(3)
    job.hurry()
    assert job.code() == 0, job.text
    assert job.end() == long_serial.end()
    assert job.steps == long_serial.steps
    assert cluster.requested() == 0


@pytest.mark.slow
def test_a_job_grows_with_the_nodes_that_rays_autoscaler_adds_for_it_and_they_go_after_its_end(
    start: Callable[..., RayNodes], tmp_path: Path, long_serial: Trained
) -> None:
    cluster = start(1, spare=2)
    assert cluster.alive() == 1
    job = OnRay(cluster, tmp_path)
    job.begin("-n", "1:3", pace_s=1.0, **LONG)
    job.until(3)
    assert cluster.alive() == 3
    assert cluster.requested() == 0
    job.hurry()
    assert job.code() == 0, job.text
    assert job.end() == long_serial.end()
    wait_for(lambda: cluster.alive() == 1, lambda: "the autoscaler takes idle nodes away")


@pytest.mark.slow
@pytest.mark.hosts("Ray", "requeue")
def test_a_job_that_was_asked_to_leave_goes_on_with_fewer_workers_when_it_is_started_again(
    start: Callable[..., RayNodes], tmp_path: Path, small_serial: str
) -> None:
    cluster = start(3)
    job = OnRay(cluster, tmp_path)
    job.begin("-n", "3", pace_s=1.0)
    job.until(3)
    job.send(signal.SIGTERM)
    assert job.code() == 75, job.text
    job.hurry()
    job.begin("-n", "2")
    assert job.code() == 0, job.text
    assert job.end() == small_serial
    assert sorted(set(job.sizes)) == [2, 3]


@pytest.mark.slow
def test_when_the_driver_is_killed_all_ends_by_itself(start: Callable[..., RayNodes], tmp_path: Path) -> None:
    job = OnRay(start(2), tmp_path)
    job.begin("-n", "2:3", pace_s=1.0)
    job.until(2)
    assert job.cluster.requested() == 1
    job.send(signal.SIGKILL)
    job.driver.wait(120)
    job.until_nothing_is_left()
    wait_for(lambda: job.cluster.requested() == 0, lambda: "the autoscaler is asked no more")
