"""`unisono run -n A:B`, from the command line to the coordinator and back. The workers act, and train nothing."""

import json
import os
import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest

from commands import completed
from forks.client import SHARED_FORK_SERVERS
from forks.commands import ForkedCommand, start
from training import PATIENCE_S, Training, control_of, whole_lines

pytestmark = pytest.mark.procs

ACTOR = Path(__file__).parent / "scripts" / "actor.py"


class Job(Training):
    """An elastic job in a folder of its own."""

    def __init__(self, folder: Path, *options: str) -> None:
        super().__init__(folder / "run", *options, script=ACTOR)
        self._joined: list[ForkedCommand | subprocess.Popen[bytes]] = []

    def join(self, *options: str) -> "ForkedCommand | subprocess.Popen[bytes]":
        words = ("join", *options, "--run-dir", str(self.run_dir), str(ACTOR))
        self._joined.append(start(*words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
        return self._joined[-1]

    def asked(self, *words: str) -> "subprocess.CompletedProcess[str]":
        return completed(*words, "--run-dir", self.run_dir, timeout=PATIENCE_S)

    def status(self) -> dict[str, Any]:
        return control_of(self.run_dir).status()

    def until_there_are(self, workers: int) -> None:
        self.until_so(lambda: len(self.status()["members"]) == workers, f"{workers} workers")

    def until_resized(self, workers: int) -> None:
        """Ask for so many workers until a coordinator answers, and wait for them."""
        self.until_so((self.run_dir / "coordinator.json").exists, "a coordinator")
        self.until_so(lambda: self.asked("resize", str(workers)).returncode == 0, "an answer")
        self.until_there_are(workers)

    def until_formed(self, generation: int, *workers: str) -> None:
        """Until all of these are in a generation."""
        words, logs = f"generation {generation} of {list(workers)}", self.run_dir / "logs"
        paths = [logs / f"{worker}.log" for worker in workers]
        self.until_so(lambda: all(path.exists() and words in path.read_text() for path in paths), words)

    def ends_well(self) -> None:
        (self.run_dir / "finish").touch()
        assert self.process.wait(PATIENCE_S) == 0, self.text

    @property
    def text(self) -> str:
        log = self.run_dir / "logs" / "coordinator.log"
        return self.output.read_text() + (log.read_text() if log.exists() else "")

    @property
    def result(self) -> dict[str, Any]:
        found = json.loads((self.run_dir / "result.json").read_text())
        assert isinstance(found, dict)
        return found

    def close(self) -> None:
        for process in self._joined:
            process.kill()
            process.wait(PATIENCE_S)
        super().close()


Begin = Callable[..., Job]


@pytest.fixture
def begin(warm: None, tmp_path: Path) -> Iterator[Begin]:
    with ExitStack() as opened:

        def begun(*options: str) -> Job:
            job = Job(tmp_path, *options)
            opened.callback(job.close)
            return job

        yield begun


def test_a_job_trains_to_its_end_and_leaves_nothing(begin: Begin) -> None:
    job = begin("-n", "3", "--max-restarts", "1")
    job.until_formed(1, "w1", "w2", "w3")
    job.ends_well()
    assert (job.result["exit_code"], job.result["error"], job.result["world_size"]) == (0, None, 3)
    assert "[w2] generation 1 of ['w1', 'w2', 'w3']" in job.text
    assert not (job.run_dir / "coordinator.json").exists()


def test_a_job_goes_on_while_its_coordinator_is_started_again(begin: Begin) -> None:
    job = begin("-n", "2", "--max-restarts", "1")
    job.until_formed(1, "w1", "w2")
    before = job.coordinator
    os.kill(before, signal.SIGKILL)
    job.until_so(lambda: "is started again" in job.text and job.coordinator != before, "another coordinator")
    job.until_so(lambda: all(worker["connected"] for worker in job.status()["members"]), "its workers")
    assert job.status()["generation"] == 1
    os.kill(job.pid_of("w1"), signal.SIGKILL)
    job.until_formed(3, "w2", "w3")
    job.ends_well()


def test_workers_come_and_go_as_people_ask(begin: Begin) -> None:
    job = begin("-n", "1:4")
    job.until_resized(2)
    job.until_so(lambda: [each["phase"] for each in job.status()["members"]] == ["working"] * 2, "two workers")
    job.until_resized(3)
    assert "working" in job.asked("status").stdout
    assert len(json.loads(job.asked("status", "--json").stdout)["members"]) == 3
    leaves = job.status()["members"][0]["id"]
    job.ask("leave", "0")
    job.until_so(lambda: leaves not in [each["id"] for each in job.status()["members"]], "one less")
    job.ends_well()


def test_a_job_that_stops_can_go_on_whatever_it_has_survived_before(begin: Begin) -> None:
    job = begin("-n", "2", "--max-restarts", "2")
    job.until_formed(1, "w1", "w2")
    os.kill(job.pid_of("w2"), signal.SIGKILL)
    job.until_formed(3, "w1", "w3")
    job.ask("stop")
    assert job.process.wait(PATIENCE_S) == 75, job.text
    assert job.result["exit_code"] == 75


@pytest.mark.parametrize("how", [pytest.param("SIGUSR1", marks=pytest.mark.slow), "stop"])
def test_a_job_that_is_asked_to_stop_can_be_started_again(begin: Begin, how: str) -> None:
    job = begin("-n", "2", "--max-restarts", "1")
    job.until_formed(1, "w1", "w2")
    if how == "stop":
        job.ask("stop")
    else:  # Slurm sends it to every process of a job
        job.process.send_signal(signal.SIGUSR1)
        os.kill(job.coordinator, signal.SIGUSR1)
    assert job.process.wait(PATIENCE_S) == 75, job.text
    assert "is started again" not in job.text
    assert "left with a checkpoint: start it again with the same --run-dir" in job.text
    assert job.result["exit_code"] == 75
    again = begin("-n", "2", "--max-restarts", "1")
    again.until_formed(2, "w3", "w4")  # numbers are never used again
    again.ends_well()


@pytest.mark.slow
def test_an_error_in_the_script_ends_the_job_and_its_traceback_comes_last(begin: Begin) -> None:
    job = begin("-n", "3", "--max-restarts", "5")
    job.until_formed(1, "w1", "w2", "w3")
    (job.run_dir / "fail-w2").touch()
    assert job.process.wait(PATIENCE_S) == 1, job.text
    said = job.output.read_text()
    assert said.rstrip().endswith("ValueError: boom")
    assert "unisono: worker w2 on host" in said
    assert (job.result["error"]["worker"], job.result["error"]["type"]) == ("w2", "ValueError")


def test_with_no_restarts_left_the_job_says_whom_it_lost(begin: Begin) -> None:
    job = begin("-n", "1", "--max-restarts", "0")
    job.until_formed(1, "w1")
    os.kill(job.pid_of("w1"), signal.SIGKILL)
    assert job.process.wait(PATIENCE_S) == 137, job.text
    assert re.search(r"worker w1 on host \S+ was killed by SIGKILL: likely the memory ran out", job.text)


def test_a_launcher_that_is_killed_takes_everything_with_it(begin: Begin, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SHARED_FORK_SERVERS, raising=False)  # so that everything is below the launcher
    job = begin("-n", "3", "--max-restarts", "1")
    job.until_formed(1, "w1", "w2", "w3")
    family = psutil.Process(job.process.pid).children(recursive=True)
    assert len(family) >= 6  # three workers, the fork server, the coordinator and the guard
    job.process.kill()
    assert not psutil.wait_procs(family, timeout=PATIENCE_S)[1]


def test_an_agent_brings_room_and_takes_it_away_again(begin: Begin) -> None:
    job = begin("-n", "1:4")
    job.until_resized(4)
    joined = job.join("-n", "2")
    job.until_so(lambda: len(job.status()["agents"]) == 2, "a second agent")
    os.kill(job.status()["members"][0]["pid"], signal.SIGKILL)
    job.until_there_are(4)
    joined.send_signal(signal.SIGTERM)
    assert joined.wait(PATIENCE_S) in (0, 75), job.text
    job.ends_well()


def test_a_host_may_have_the_coordinator_and_no_worker(begin: Begin) -> None:
    job = begin("-n", "1:2", "--here", "0")
    job.until_so((job.run_dir / "coordinator.json").exists, "a coordinator")
    job.until_so(lambda: bool(job.status()["agents"]), "the agent of its host")
    joined = job.join("-n", "2")
    job.until_formed(1, "w1", "w2")
    assert [agent["workers"] for agent in job.status()["agents"]] == [0, 2]
    job.ends_well()
    assert joined.wait(PATIENCE_S) == 0


def test_a_script_that_chooses_its_exit_code_ends_the_job_with_it_and_is_not_started_again(tmp_path: Path) -> None:
    script = tmp_path / "exits.py"
    script.write_text("import sys\nsys.exit(5)\n")
    done = completed("run", "-n", "1:2", "--no-warm-start", "--run-dir", tmp_path / "run", script, timeout=PATIENCE_S)
    assert done.returncode == 5, done.stderr
    journal = whole_lines(tmp_path / "run" / "journal.jsonl")
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
