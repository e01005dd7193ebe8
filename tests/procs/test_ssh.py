"""Jobs whose hosts one command starts over ssh: a real sshd, on a host of its own."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from slurm_jobs import SCRIPT
from ssh_hosts import SshHost, ssh_host
from training import Trained
from two_hosts import Host, NoHosts, two_hosts

pytestmark = [pytest.mark.procs, pytest.mark.timeout(300)]

PATIENCE_S = 120.0


class Job(Trained):
    """A job that is started on host a, with workers on host b."""

    def __init__(self, here: Host, there: SshHost, folder: Path) -> None:
        super().__init__(folder / "run")
        self.there, self.folder = there, folder
        self._here = here
        self._started: list[subprocess.Popen[bytes]] = []

    def run(
        self,
        *options: str,
        script: Path | str = SCRIPT,
        arguments: Sequence[str] = (),
        pace_s: float = 0.0,
        run_dir: Path | None = None,
    ) -> "subprocess.Popen[bytes]":
        """Start it."""
        self.run_dir = run_dir or self.run_dir
        told = {"HURRY": str(self.folder / "hurry"), "PACE_S": str(pace_s)}
        passed_on = [word for name in (*told, "TMPDIR") for word in ("--env", name)]
        command = [sys.executable, "-m", "unisono", "run", "--ssh", self.there.ssh, *passed_on, *options]
        with self.output.open("ab") as output:
            process = subprocess.Popen(
                [*self._here.enter, *command, "--run-dir", str(self.run_dir), str(script), *arguments],
                cwd=self.folder, env={**os.environ, **told}, stdout=output, stderr=output,
            )  # fmt: skip
        self._started.append(process)
        return process

    def ends(self) -> int:
        """Its exit code, once it has ended and nothing of it runs on the other host."""
        code = self._started[-1].wait(PATIENCE_S)
        self.there.until_nothing_runs()
        return code

    def hurry(self) -> None:
        (self.folder / "hurry").touch()

    def until(self, is_so: Callable[[], Any], words: str) -> None:
        begun = time.monotonic()
        while not is_so():
            assert time.monotonic() - begun < PATIENCE_S, f"{words} did not come:\n{self.text}"
            assert self._started[-1].poll() is None or is_so(), f"it ended before {words}:\n{self.text}"
            time.sleep(0.02)

    def until_both_train(self) -> None:
        self.until(self._both_train, "a generation of both hosts")
        reached = len(self.steps)
        self.until(lambda: len(self.steps) > reached + 1, "a step of both hosts")

    def _both_train(self) -> bool:
        hosts = {worker: one["host"] for one in self.journal("asked for") for worker in one["workers"]}
        return any(len({hosts[worker] for worker in one["workers"]}) == 2 for one in self.journal("minted"))

    def agent(self) -> psutil.Process:
        """The process of the other host's agent."""
        return next(one for one in self.there.processes if "unisono.cli.over_ssh" in _words(one))

    @property
    def text(self) -> str:
        return self.output.read_text()

    def close(self) -> None:
        for process in self._started:
            process.kill()
            process.wait()


def _words(process: psutil.Process) -> list[str]:
    with suppress(psutil.Error):  # it has just ended
        return list(process.cmdline())
    return []


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Host, SshHost]]:
    try:
        with two_hosts() as (a, b), ssh_host(b, tmp_path_factory.mktemp("ssh") / "b") as there:
            yield a, there
    except NoHosts as why:
        pytest.skip(f"NO SSH: {why}")


@pytest.fixture
def job(hosts: tuple[Host, SshHost], tmp_path: Path) -> Iterator[Job]:
    found = Job(*hosts, tmp_path)
    yield found
    found.close()
    hosts[1].until_nothing_runs()


@pytest.mark.hosts("ssh", "join")
def test_one_command_trains_on_two_hosts_to_the_weights_of_one_and_shows_the_token_to_nobody(
    job: Job, small_serial: str
) -> None:
    job.run("--hosts", "localhost:1,hostb:2", pace_s=0.2)
    job.until_both_train()
    token = (job.run_dir / "token").read_bytes().strip()
    assert not [
        one for one in psutil.process_iter(["cmdline"]) if token.decode() in " ".join(one.info["cmdline"] or [])
    ]
    assert not [one for one in job.there.processes if token in Path(f"/proc/{one.pid}/environ").read_bytes()]
    job.hurry()
    assert job.ends() == 0, job.text
    assert (job.end(), job.steps) == (small_serial, list(range(40)))
    assert "[hostb] unisono: room for 2 more, run folder" in job.text


def test_a_host_that_cannot_be_used_is_named_with_what_to_do(job: Job) -> None:
    job.run("--hosts", "stranger,refused:2,nowhere,nobody.invalid", script=SCRIPT)
    assert job.ends() == 1
    for words in (
        "the hosts that are left have room for 0 of 5 workers",
        "host stranger: its host key is not the one that is known here, or none is known: log in once with 'ssh -F",
        "host refused: it does not let this user in: log in without a password first ('ssh-copy-id refused')",
        "host nowhere: it cannot be reached: is it up, does sshd run there",
        "host nobody.invalid: nobody knows that name",
    ):
        assert words in job.text, job.text


PYTHONS = {
    "without": f'exec {sys.executable} -S "$@"',
    "older": f"""shift 3
exec {sys.executable} -c '
import sys, unisono
unisono.__version__ = "0.0.9"
from unisono.cli.over_ssh import main
main()'""",
}


def program(path: Path, shell: str) -> str:
    """Write a program in the language of the shell."""
    path.write_text(f"#!/bin/sh\n{shell}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("python", "words"),
    [
        ("/no/python3", "host hostb: there is no /no/python3 that runs there: name the interpreter of the hosts"),
        ("without", "host hostb: there is no Unisono for"),
        ("older", "host hostb: it has Unisono '0.0.9', and this host 0.1.0: install the same version on all hosts"),
    ],
)
@pytest.mark.slow
def test_a_host_with_another_python_is_named_with_what_to_do(job: Job, python: str, words: str) -> None:
    if python in PYTHONS:
        python = program(job.folder / python, PYTHONS[python])
    job.run("--hosts", "hostb:1", "--python", python)
    assert job.ends() == 1
    assert words in job.text, job.text


AN_HOUR_OFF = """
import time
real, real_ns = time.time, time.time_ns
time.time, time.time_ns = lambda: real() + {off}, lambda: real_ns() + {off} * 10**9
"""


@pytest.mark.slow
def test_hosts_that_compute_other_bits_are_refused_with_the_operations_and_the_cure(job: Job) -> None:
    """Of one capability by its name, as processors of two makers are."""
    python = program(job.folder / "another", f'export MKL_CBWR=COMPATIBLE\nexec {sys.executable} "$@"')
    job.run("--hosts", "localhost:1,hostb:1", "--python", python)
    assert job.ends() == 1, job.text
    told = r"rank 1 on host hostb .* than rank 0 on host hosta.*bits of a matrix product: .*run --numerics portable"
    assert re.search(f"JobMismatch: {told}", job.text, re.DOTALL), job.text
    assert not job.steps


@pytest.mark.slow
def test_a_host_whose_clock_is_an_hour_off_trains_along(job: Job, small_serial: str) -> None:
    """Of its Python programs; what OpenSSL reads is in tests/unit/test_entrance.py."""
    off = -3600
    (job.folder / "sitecustomize.py").write_text(AN_HOUR_OFF.format(off=off))
    python = program(job.folder / "astray", f'export PYTHONPATH={job.folder}\nexec {sys.executable} "$@"')
    begun = time.time()
    job.run("--hosts", "localhost:1,hostb:1", "--python", python, "--timeline", pace_s=0.2)
    job.until_both_train()
    job.hurry()
    assert job.ends() == 0, job.text
    assert (job.end(), job.steps) == (small_serial, list(range(40)))
    begins = [json.loads(path.read_text().splitlines()[0])["time"] for path in (job.run_dir / "timeline").iterdir()]
    assert sorted(round((one - begun) / off) for one in begins) == [0, 1], "no clock was wrong"


def test_the_exit_code_and_the_lines_of_a_script_come_home_from_another_host(job: Job) -> None:
    script = job.folder / "fails.py"
    script.write_text("import sys; print('about to fail', flush=True); sys.exit(7)")
    job.run("--hosts", "hostb", "--no-warm-start", script=script)
    assert job.ends() == 7, job.text
    assert "[hostb] [w1] about to fail" in job.text


AFTER_FINISH = SCRIPT.with_name("after_finish.py")


@pytest.mark.slow
@pytest.mark.parametrize(("victim", "where"), [(0, "hostb:1"), (1, "localhost:1,hostb:1")])
def test_of_agents_that_are_killed_after_finish_only_the_main_workers_is_missed(
    job: Job, victim: int, where: str
) -> None:
    process = job.run("--hosts", where, "--no-warm-start", script=AFTER_FINISH, arguments=(str(victim), "wait"))
    job.until(lambda: job.journal("over"), "the end of training")
    job.agent().kill()
    assert process.wait(PATIENCE_S) == (0 if victim else 137), job.text
    complete = f"training was complete by then: weights sha256 {job.end()}"
    assert (complete in job.text) == (not victim)
    if victim:
        assert "an agent on host hostb was killed or lost (training was complete by then, and it is not" in job.text
    else:
        result = json.loads((job.run_dir / "result.json").read_text())
        assert result["exit_code"] == 137
        assert complete in result["error"]["message"]


@pytest.mark.slow
@pytest.mark.hosts("ssh", "kill")
@pytest.mark.parametrize("is_starting", [True, False], ids=["while a host is starting", "later"])
def test_a_launcher_that_is_killed_takes_everything_on_all_hosts_with_it(job: Job, *, is_starting: bool) -> None:
    process = job.run("--hosts", "localhost:1,hostb:2", pace_s=0.2)
    if is_starting:
        job.until(lambda: any("unisono.cli.over_ssh" in _words(one) for one in job.there.processes), "an agent's start")
    else:
        job.until_both_train()
    family = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.wait()
    job.there.until_nothing_runs()
    assert not psutil.wait_procs(family, timeout=PATIENCE_S)[1]
    assert not list(Path(os.environ["TMPDIR"]).glob("unisono-*/token"))


@pytest.mark.slow
@pytest.mark.hosts("ssh", "kill")
def test_the_job_goes_on_without_a_host_whose_agent_is_killed(job: Job, small_serial: str) -> None:
    job.run("--hosts", "localhost:1,hostb:2", pace_s=0.2)
    job.until_both_train()
    job.agent().kill()
    job.until(lambda: job.journal("minted")[-1]["generation"] > 1, "a generation without the host")
    job.hurry()
    assert job.ends() == 0, job.text
    assert (job.end(), job.steps) == (small_serial, list(range(40)))
    assert "host hostb: its agent was killed, or the connection to it was lost" in job.text


@pytest.mark.slow
@pytest.mark.hosts("ssh", "requeue", "drain")
def test_a_job_that_is_asked_to_stop_leaves_on_all_hosts_and_goes_on_later(job: Job, small_serial: str) -> None:
    process = job.run("--hosts", "localhost:1,hostb:2", pace_s=0.2)
    job.until_both_train()
    process.send_signal(signal.SIGINT)
    assert job.ends() == 75, job.text
    hostfile = job.folder / "hostfile"
    hostfile.write_text("# as those of MPI\nhostb slots=1\n\nlocalhost slots=1\n")
    job.hurry()
    job.run("--hosts", str(hostfile))
    assert job.ends() == 0, job.text
    assert (job.end(), job.steps) == (small_serial, list(range(40)))


@pytest.mark.slow
def test_hosts_that_share_no_run_folder_keep_their_own(
    hosts: tuple[Host, SshHost], tmp_path: Path, small_serial: str
) -> None:
    apart = tmp_path / "apart"
    apart.mkdir()
    with two_hosts() as (a, b), ssh_host(b, tmp_path / "ssh", own_files=apart) as there:
        job = Job(a, there, tmp_path)
        job.run("--hosts", "localhost:1,hostb:1", run_dir=apart / "run", pace_s=0.1)
        job.until_both_train()
        job.hurry()
        assert job.ends() == 0, job.text
        assert job.end() == small_serial
        assert {path.name for path in (apart / "run" / "logs").glob("w*.log")} == {"w1.log"}
        job.close()
