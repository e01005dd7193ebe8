"""`unisono run -n A:B`, from the command line to the coordinator and back. The workers act, and train nothing."""

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from commands import completed
from forks.client import SHARED_FORK_SERVERS
from forks.commands import ForkedCommand, start
from training import control_of

pytestmark = pytest.mark.procs

PATIENCE_S = 60.0
ACTOR = Path(__file__).parent / "scripts" / "actor.py"


Process = ForkedCommand | subprocess.Popen[bytes]


class Job:
    """An elastic job in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.run_dir = folder / "run"
        self._output = (folder / "output").open("wb")
        self.output = folder / "output"
        self._started: list[Process] = []

    def start(self, *options: str) -> Process:
        return self._command("run", *options, "--run-dir", str(self.run_dir), str(ACTOR))

    def join(self, *options: str) -> Process:
        return self._command("join", *options, "--run-dir", str(self.run_dir), str(ACTOR))

    def _command(self, *words: str) -> Process:
        process = start(*words, cwd=self.run_dir.parent, stdout=self._output, stderr=subprocess.STDOUT)
        self._started.append(process)
        return process

    def ask(self, *words: str) -> subprocess.CompletedProcess[str]:
        return completed(*words, "--run-dir", self.run_dir, timeout=PATIENCE_S)

    def status(self) -> dict[str, Any]:
        return control_of(self.run_dir).status()

    def log(self, worker: str) -> str:
        path = self.run_dir / "logs" / f"{worker}.log"
        return path.read_text() if path.exists() else ""

    def formed(self, generation: int, *workers: str) -> None:
        """Until all of these are in a generation."""
        words = f"generation {generation} of {list(workers)}"
        self.until(lambda: all(words in self.log(worker) for worker in workers), words)

    def pid_of(self, worker: str) -> int:
        return int(re.findall(r"pid (\d+)", self.log(worker))[-1])

    @property
    def coordinator(self) -> int:
        return int(json.loads((self.run_dir / "coordinator.json").read_text())["pid"])

    def until(self, is_so: Callable[[], bool], words: str) -> None:
        begun = time.monotonic()
        while not is_so():
            assert time.monotonic() - begun < PATIENCE_S, f"{words} did not come:\n{self.text}"
            assert self._started[-1].poll() is None or is_so(), f"it ended before {words} came:\n{self.text}"
            time.sleep(0.03)

    def finish(self) -> None:
        (self.run_dir / "finish").touch()

    @property
    def text(self) -> str:
        log = self.run_dir / "logs" / "coordinator.log"
        return self.output.read_text() + (log.read_text() if log.exists() else "")

    @property
    def result(self) -> dict[str, Any]:
        found = json.loads((self.run_dir / "result.json").read_text())
        assert isinstance(found, dict)
        return found

    @property
    def events(self) -> list[str]:
        return [json.loads(line)["event"] for line in (self.run_dir / "journal.jsonl").read_text().splitlines()]

    def close(self) -> None:
        for process in self._started:
            process.kill()
            process.wait(PATIENCE_S)
        self._output.close()


@pytest.fixture
def job(warm: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    for name in list(os.environ):
        if name.startswith("UNISONO_"):
            monkeypatch.delenv(name)
    found = Job(tmp_path)
    yield found
    found.close()


def test_a_job_trains_to_its_end_and_leaves_nothing(job: Job) -> None:
    launcher = job.start("-n", "3", "--max-restarts", "1")
    job.formed(1, "w1", "w2", "w3")
    job.finish()
    assert launcher.wait(PATIENCE_S) == 0, job.text
    assert (job.result["exit_code"], job.result["error"], job.result["world_size"]) == (0, None, 3)
    assert "[w2] generation 1 of ['w1', 'w2', 'w3']" in job.text
    assert not (job.run_dir / "coordinator.json").exists()


def test_a_job_goes_on_while_its_coordinator_is_started_again(job: Job) -> None:
    launcher = job.start("-n", "2", "--max-restarts", "1")
    job.formed(1, "w1", "w2")
    before = job.coordinator
    os.kill(before, signal.SIGKILL)
    job.until(lambda: "is started again" in job.text and job.coordinator != before, "another coordinator")
    job.until(lambda: all(worker["connected"] for worker in job.status()["members"]), "its workers")
    assert job.status()["generation"] == 1
    os.kill(job.pid_of("w1"), signal.SIGKILL)
    job.formed(3, "w2", "w3")
    job.finish()
    assert launcher.wait(PATIENCE_S) == 0, job.text


def test_workers_come_and_go_as_people_ask(job: Job) -> None:
    launcher = job.start("-n", "1:4")
    job.until((job.run_dir / "coordinator.json").exists, "a coordinator")
    job.until(lambda: job.ask("resize", "2").returncode == 0, "an answer")
    job.until(lambda: [each["phase"] for each in job.status()["members"]] == ["working"] * 2, "two workers")
    assert job.ask("resize", "3").returncode == 0
    job.until(lambda: len(job.status()["members"]) == 3, "three workers")
    assert "working" in job.ask("status").stdout
    assert len(json.loads(job.ask("status", "--json").stdout)["members"]) == 3
    leaves = job.status()["members"][0]["id"]
    assert job.ask("leave", "0").returncode == 0
    job.until(lambda: leaves not in [each["id"] for each in job.status()["members"]], "one less")
    job.finish()
    assert launcher.wait(PATIENCE_S) == 0, job.text


def test_a_job_that_stops_can_go_on_whatever_it_has_survived_before(job: Job) -> None:
    launcher = job.start("-n", "2", "--max-restarts", "2")
    job.formed(1, "w1", "w2")
    os.kill(job.pid_of("w2"), signal.SIGKILL)
    job.formed(3, "w1", "w3")
    assert job.ask("stop").returncode == 0
    assert launcher.wait(PATIENCE_S) == 75, job.text
    assert job.result["exit_code"] == 75


@pytest.mark.parametrize(
    "how", [pytest.param("SIGTERM", marks=pytest.mark.slow), pytest.param("SIGUSR1", marks=pytest.mark.slow), "stop"]
)
def test_a_job_that_is_asked_to_stop_can_be_started_again(job: Job, how: str) -> None:
    launcher = job.start("-n", "2", "--max-restarts", "1")
    job.formed(1, "w1", "w2")
    if how == "stop":
        assert job.ask("stop").returncode == 0
    else:
        launcher.send_signal(signal.Signals[how])
    if how == "SIGUSR1":  # Slurm sends it to every process of a job
        os.kill(job.coordinator, signal.SIGUSR1)
    assert launcher.wait(PATIENCE_S) == 75, job.text
    assert "is started again" not in job.text
    assert "left with a checkpoint: start it again with the same --run-dir" in job.text
    assert job.result["exit_code"] == 75
    again = job.start("-n", "2", "--max-restarts", "1")
    job.formed(2, "w3", "w4")  # numbers are never used again
    job.finish()
    assert again.wait(PATIENCE_S) == 0, job.text


def test_an_error_in_the_script_ends_the_job_and_its_traceback_comes_last(job: Job) -> None:
    launcher = job.start("-n", "3", "--max-restarts", "5")
    job.formed(1, "w1", "w2", "w3")
    (job.run_dir / "fail-w2").touch()
    assert launcher.wait(PATIENCE_S) == 1, job.text
    said = job.output.read_text()
    assert said.rstrip().endswith("ValueError: boom")
    assert "unisono: worker w2 on host" in said
    assert (job.result["error"]["worker"], job.result["error"]["type"]) == ("w2", "ValueError")


def test_with_no_restarts_left_the_job_says_whom_it_lost(job: Job) -> None:
    launcher = job.start("-n", "1", "--max-restarts", "0")
    job.formed(1, "w1")
    os.kill(job.pid_of("w1"), signal.SIGKILL)
    assert launcher.wait(PATIENCE_S) == 137, job.text
    assert re.search(r"worker w1 on host \S+ was killed by SIGKILL: likely the memory ran out", job.text)


def test_a_launcher_that_is_killed_takes_everything_with_it(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SHARED_FORK_SERVERS, raising=False)  # so that everything is below the launcher
    launcher = job.start("-n", "3", "--max-restarts", "1")
    job.formed(1, "w1", "w2", "w3")
    family = psutil.Process(launcher.pid).children(recursive=True)
    assert len(family) >= 6  # three workers, the fork server, the coordinator and the guard
    launcher.kill()
    assert not psutil.wait_procs(family, timeout=PATIENCE_S)[1]


def test_an_agent_brings_room_and_takes_it_away_again(job: Job) -> None:
    launcher = job.start("-n", "1:4")
    job.until((job.run_dir / "coordinator.json").exists, "a coordinator")
    job.until(lambda: job.ask("resize", "4").returncode == 0, "an answer")
    job.until(lambda: len(job.status()["members"]) == 4, "four workers")
    joined = job.join("-n", "2")
    job.until(lambda: len(job.status()["agents"]) == 2, "a second agent")
    old = [each["id"] for each in job.status()["members"]]
    os.kill(job.pid_of(old[0]), signal.SIGKILL)
    job.until(lambda: len(job.status()["members"]) == 4, "four workers again")
    joined.send_signal(signal.SIGTERM)
    assert joined.wait(PATIENCE_S) in (0, 75), job.text
    job.finish()
    assert launcher.wait(PATIENCE_S) == 0, job.text


def test_a_host_may_have_the_coordinator_and_no_worker(job: Job) -> None:
    launcher = job.start("-n", "1:2", "--here", "0")
    job.until((job.run_dir / "coordinator.json").exists, "a coordinator")
    job.until(lambda: bool(job.status()["agents"]), "the agent of its host")
    joined = job.join("-n", "2")
    job.formed(1, "w1", "w2")
    assert [agent["workers"] for agent in job.status()["agents"]] == [0, 2]
    job.finish()
    assert launcher.wait(PATIENCE_S) == 0, job.text
    assert joined.wait(PATIENCE_S) == 0, job.text


def test_a_script_that_chooses_its_exit_code_ends_the_job_with_it_and_is_not_started_again(tmp_path: Path) -> None:
    script = tmp_path / "exits.py"
    script.write_text("import sys\nsys.exit(5)\n")
    done = completed("run", "-n", "1:2", "--no-warm-start", "--run-dir", tmp_path / "run", script, timeout=PATIENCE_S)
    assert done.returncode == 5, done.stderr
    journal = [json.loads(line) for line in (tmp_path / "run" / "journal.jsonl").read_text().splitlines()]
    assert len([line for line in journal if line["event"] == "starting"]) <= 2
    assert "its script called sys.exit" in json.dumps(journal)


def test_the_help_of_a_script_is_printed_and_the_job_ends_well(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import argparse\nargparse.ArgumentParser(description='how it trains').parse_args()\nimport torch\n"
    )
    run = "run", "-n", "1:3", "--no-warm-start", "--run-dir", tmp_path / "run", script, "--help"
    found = completed(*run, timeout=PATIENCE_S, is_merged=True)
    assert found.returncode == 0, found.stdout
    assert "how it trains" in found.stdout
    assert json.loads((tmp_path / "run" / "result.json").read_text())["exit_code"] == 0
