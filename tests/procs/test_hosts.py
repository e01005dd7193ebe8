"""A job on two hosts that share no files: workers of both train together, over TLS, and either may be lost."""

import json
import os
import re
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from forks.commands import ON_PATH
from leaks import ALLOWED_VARIABLES
from serial_runs import SerialRuns
from training import SCRIPT, SETTINGS, Trained, whole_lines
from two_hosts import Host, NoHosts, two_hosts
from unisono.launch.elastic.elastic_settings import make_certificate
from unisono.launch.tuning import KEEPING

pytestmark = [pytest.mark.procs, pytest.mark.timeout(300)]

PATIENCE_S = 120.0
SILENCE_S = 5.0
"""After which a host is lost."""

LONG = {"EPOCHS": "10", "PACE_S": "0.05"}


AT_A_HOST = SCRIPT.with_name("at_a_host.py")


class Place:
    """One of the hosts, and the process there that starts commands.

    Args:
        host: one of the two.
        process: of ``scripts/at_a_host.py``.
    """

    def __init__(self, host: Host, process: subprocess.Popen[str]) -> None:
        self.host, self._process = host, process

    def answer(self, **asked: Any) -> dict[str, Any]:
        """What that process says."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        if asked:
            self._process.stdin.write(json.dumps(asked) + "\n")
            self._process.stdin.flush()
        found = json.loads(self._process.stdout.readline())
        assert isinstance(found, dict)
        return found


class Command:
    """A command that runs at one of the hosts."""

    def __init__(self, place: Place, pid: int) -> None:
        self._place, self.pid = place, pid

    def poll(self) -> int | None:
        """Its exit code; None while it runs."""
        code = self._place.answer(pid=self.pid)["code"]
        return None if code is None else int(code)

    def wait(self) -> int:
        """Its exit code, once it has ended."""
        begun = time.monotonic()
        while (code := self.poll()) is None:
            assert time.monotonic() - begun < PATIENCE_S, f"process {self.pid} does not end"
            time.sleep(0.02)
        return code

    def kill(self) -> None:
        """End it."""
        if self.poll() is None:
            with suppress(ProcessLookupError):  # it has ended just now
                os.kill(self.pid, signal.SIGKILL)


@contextmanager
def warm_on(host: Host) -> Iterator[Place]:
    """As long as the context lasts, jobs on this host fork their workers from one process that has torch loaded."""
    command = [*host.enter, sys.executable, str(AT_A_HOST), *SETTINGS, *ALLOWED_VARIABLES]
    paths = filter(None, (str(ON_PATH), os.environ.get("PYTHONPATH")))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield Place(host, process)


class Desk(Trained):
    """Where a person sits at one of the hosts: a folder, and the commands that were typed in it."""

    def __init__(self, place: Place, folder: Path) -> None:
        super().__init__(folder / "run")
        self.host, self.folder = place.host, folder
        self._place = place
        folder.mkdir()

    def start(self, *words: str, **settings: str) -> Command:
        """Start a command."""
        return self._started(words, self.output, self.output, settings)

    def ask(self, *words: str) -> "subprocess.CompletedProcess[str]":
        """Run a command to its end."""
        with tempfile.TemporaryDirectory() as name:
            out, err = Path(name, "out"), Path(name, "err")
            code = self._started(words, out, err, {}).wait()
            return subprocess.CompletedProcess(words, code, out.read_text(), err.read_text())

    def _started(self, words: Sequence[str], out: Path, err: Path, settings: Mapping[str, str]) -> Command:
        where = {"folder": str(self.folder), "out": str(out), "err": str(err)}
        return Command(self._place, self._place.answer(words=words, settings=settings, **where)["pid"])

    @property
    def text(self) -> str:
        return f"--- {self.host.name}\n{self.output.read_text() if self.output.exists() else ''}"


class Job:
    """A job that begins on host a, and that agents of host b join."""

    def __init__(self, places: tuple[Place, Place], folder: Path) -> None:
        self.a, self.b = Desk(places[0], folder / "a"), Desk(places[1], folder / "b")
        self._started: list[Command] = []
        self._hurry = folder / "hurry"

    def run(self, *options: str, **settings: str) -> Command:
        where = ("--coordinator", f"{self.a.host.address}:0", "--failure-timeout-s", f"{SILENCE_S:g}")
        hurry = str(self._hurry)
        process = self.a.start("run", *where, *options, "--run-dir", "run", str(SCRIPT), HURRY=hurry, **settings)
        self._started.append(process)
        return process

    def invitation(self) -> list[str]:
        """The command for the other host, as it is shown."""
        self.until(lambda: " unisono join https://" in self.a.text, "the command for another host")
        (line,) = re.findall(r"unisono join (https://.*)", self.a.text)
        return ["join", *shlex.split(line)]

    def join(self, *options: str, without: str = "", **settings: str) -> Command:
        words = [word for word in self.invitation() if word != without]
        self.until(
            lambda: self.a.journal("asked for"), "workers of the first host, the first of which is the main worker"
        )
        for name in ("token", "certificate.pem"):
            shutil.copy2(self.a.run_dir / name, self.b.folder / name)
        process = self.b.start(*words[:2], *options, "--run-dir", "run", *words[2:], HURRY=str(self._hurry), **settings)
        self._started.append(process)
        return process

    def until(self, is_so: Callable[[], Any], words: str) -> None:
        begun = time.monotonic()
        while not is_so():
            assert time.monotonic() - begun < PATIENCE_S, f"{words} did not come:\n{self.text}"
            ended = [process.poll() for process in self._started]
            assert ended[0] is None or is_so(), f"it ended with {ended} before {words} came:\n{self.text}"
            time.sleep(0.02)

    def together(self) -> None:
        """Until workers of both hosts have trained a step together."""
        self.until(lambda: len(self.trains_on()) == 2, "a generation of both hosts")
        number = self.a.journal("minted")[-1]["generation"]
        metrics = self.a.run_dir / "metrics.jsonl"
        self.until(
            lambda: any(line.get("generation", 0) >= number for line in whole_lines(metrics)), "a step of both hosts"
        )

    @contextmanager
    def cut(self) -> Iterator[None]:
        """What host b sends to host a is lost, but for what it sends to the coordinator."""
        (port,) = re.findall(r"https://[0-9.]+:([0-9]+)", self.a.text)
        self.b.host.reach_only(self.a.host, int(port))
        try:
            yield
        finally:
            self.b.host.reach_all()

    def trains_on(self) -> set[str]:
        """The hosts of the newest generation's workers."""
        asked, minted = self.a.journal("asked for"), self.a.journal("minted")
        workers = minted[-1]["workers"] if minted else []
        return {one["host"] for one in asked for worker in one["workers"] if worker in workers}

    def workers_on(self, host: Host) -> list[int]:
        """The process ids of the workers there."""
        status = json.loads(self.a.ask("status", "--run-dir", "run", "--json").stdout)
        return [worker["pid"] for worker in status["members"] if worker["host"] == host.name]

    def family(self, joined: Command) -> list[psutil.Process]:
        """All that host b's agent has started, and who has forked its workers."""
        workers = [psutil.Process(pid) for pid in self.workers_on(self.b.host)]
        assert workers
        fork_servers = {parent for worker in workers if (parent := worker.parent())}
        return [*psutil.Process(joined.pid).children(recursive=True), *workers, *fork_servers]

    def wait(self) -> int:
        """The exit code on host a."""
        return self._started[0].wait()

    def ends_as(self, serial: Trained) -> None:
        """Nothing delays its end any more, and it has the weights and the steps of the undisturbed run."""
        self._hurry.touch()
        assert self.wait() == 0, self.text
        assert self.a.end() == serial.end(), self.text
        assert sorted({*self.a.steps, *self.b.steps}) == serial.steps

    @property
    def text(self) -> str:
        logs = [path for desk in (self.a, self.b) for path in (desk.run_dir / "logs").glob("*.log")]
        return "\n".join([self.a.text, self.b.text, *(f"--- {path}\n{path.read_text()}" for path in logs)])

    def close(self) -> None:
        for process in self._started:
            process.kill()
            process.wait()


@pytest.fixture(scope="module")
def hosts() -> Iterator[tuple[Place, Place]]:
    try:
        with two_hosts() as (a, b), warm_on(a) as first, warm_on(b) as second:
            for place in (first, second):
                place.answer()  # it is ready: both have loaded torch at the same time
            yield first, second
    except NoHosts as why:
        pytest.skip(str(why))


@pytest.fixture
def job(hosts: tuple[Place, Place], tmp_path: Path) -> Iterator[Job]:
    found = Job(hosts, tmp_path)
    yield found
    found.close()


@pytest.fixture(scope="session")
def serial(serial_runs: SerialRuns) -> Trained:
    """The undisturbed run of one worker."""
    return serial_runs(SCRIPT, **LONG | {"PACE_S": "0"})


@pytest.mark.slow
def test_workers_of_two_hosts_train_to_the_weights_of_one_and_the_token_is_nowhere_but_in_its_files(
    job: Job, serial: Trained
) -> None:
    job.run("-n", "2:4", "--here", "2", **LONG)
    joined = job.join(**LONG)
    job.together()
    token = (job.a.run_dir / "token").read_bytes().strip()
    assert not [words for words in _told_to_processes() if token in words]
    job.ends_as(serial)
    assert joined.wait() == 0, job.text
    assert not job.b.steps
    files = [path for desk in (job.a, job.b) for path in desk.folder.rglob("*") if path.is_file()]
    assert sorted(path.name for path in files if token in path.read_bytes()) == ["token", "token"]
    private = (job.a.run_dir / "certificate.key", job.a.run_dir / "token", job.b.folder / "token")
    assert {stat.S_IMODE(path.stat().st_mode) for path in private} == {0o600}


@pytest.mark.slow
@pytest.mark.hosts("unisono join", "kill", "join")
def test_a_worker_of_another_host_dies_and_then_that_host_and_no_bit_changes(job: Job, serial: Trained) -> None:
    job.run("-n", "2:4", "--here", "2", **LONG)
    joined = job.join(**LONG)
    job.together()
    (dies, *_) = job.workers_on(job.b.host)
    os.kill(dies, signal.SIGKILL)
    job.until(lambda: job.a.journal("lost"), "the loss of a worker")
    job.until(lambda: len(job.trains_on()) == 2 and len(job.a.journal("minted")[-1]["workers"]) == 4, "another worker")
    family = job.family(joined)
    joined.kill()
    job.until(lambda: job.trains_on() == {job.a.host.name}, "a generation without the host")
    assert not psutil.wait_procs(family, timeout=PATIENCE_S)[1]
    job.ends_as(serial)


@pytest.mark.slow
@pytest.mark.hosts("unisono join", "kill")
def test_a_host_that_cannot_be_reached_any_more_is_given_up_and_ends_by_itself(job: Job, serial: Trained) -> None:
    job.run("-n", "2:4", "--here", "2", **LONG)
    joined = job.join(**LONG)
    job.together()
    family = job.family(joined)
    job.b.host.cable("down")
    try:
        job.until(lambda: job.trains_on() == {job.a.host.name}, "a generation without the host")
        job.ends_as(serial)
        assert joined.wait() == 1, job.text
        assert f"no coordinator answered at https://{job.a.host.address}:" in job.b.text
        assert not psutil.wait_procs(family, timeout=PATIENCE_S)[1]
    finally:
        job.b.host.cable("up")


@pytest.mark.slow
def test_workers_of_two_devices_on_two_hosts_train_to_the_weights_of_one_and_one_of_them_dies(
    job: Job, serial: Trained
) -> None:
    settings = {**LONG, **KEEPING.variables}  # with the allocator's own for devices, both hosts would load torch anew
    job.run("-n", "1:2", "--here", "1", "--devices-per-worker", "2", **settings)
    joined = job.join("-n", "1", **settings)
    job.together()
    (dies,) = job.workers_on(job.b.host)
    os.kill(dies, signal.SIGKILL)
    job.until(lambda: job.a.journal("lost"), "the loss of a worker")
    job.until(lambda: len(job.trains_on()) == 2, "another worker")
    job.ends_as(serial)
    assert joined.wait() == 0, job.text


@pytest.mark.slow
def test_the_main_worker_may_be_on_a_host_that_shares_no_files(job: Job, serial: Trained) -> None:
    job.run("-n", "1:2", "--here", "1", "--max-restarts", "0", "--checkpoint-every", "10", **LONG)
    joined = job.join("-n", "1", "--checkpoint-every", "10", **LONG)
    job.together()
    (dies,) = job.workers_on(job.a.host)
    os.kill(dies, signal.SIGKILL)
    job.until(lambda: job.trains_on() == {job.b.host.name}, "a generation of the other host")
    job.ends_as(serial)
    assert joined.wait() == 0, job.text
    assert job.b.end() == serial.end()
    assert (job.b.run_dir / "job.json").read_text() == (job.a.run_dir / "job.json").read_text()
    assert list((job.b.run_dir / "checkpoints").glob("step-*"))


@pytest.mark.slow
def test_a_host_that_reaches_the_coordinator_but_not_the_workers_is_told_so_and_the_job_never_stops(
    job: Job, serial: Trained
) -> None:
    job.run("-n", "1:2", "--here", "1", **LONG)
    job.until(lambda: job.trains_on() == {job.a.host.name}, "a generation of the first host")
    with job.cut():
        joined = job.join("-n", "1", **LONG)
        job.until(lambda: "takes no part for now" in job.b.text, "a word at the other host")
        shown = job.a.ask("status", "--run-dir", "run").stdout
        job.ends_as(serial)
        assert joined.wait() == 0, job.text
    said = f"{job.b.host.name} does not reach {job.a.host.name} at {job.a.host.address}:"
    assert said in job.b.text
    assert "GLOO_SOCKET_IFNAME" in job.b.text
    assert f"room for 1, left out: {said}" in shown
    assert len(job.a.journal("minted")) == 1, job.text
    assert [one["host"] for one in job.a.journal("asked for")] == [job.a.host.name]


def test_nobody_takes_part_or_looks_on_who_is_not_let_in(job: Job) -> None:
    job.run("-n", "1", **LONG)
    _, url, *_ = job.invitation()
    token, certificate = job.a.run_dir / "token", job.a.run_dir / "certificate.pem"
    wrong = job.b.folder / "wrong"
    wrong.write_text("x" * 43)
    wrong.chmod(0o600)
    another = make_certificate(job.b.folder, ["hostb"]).chain
    trusted = ("--certificate", str(certificate))
    for words, refusal in (
        (trusted, "--token-file is missing"),
        (("--token-file", str(wrong), *trusted), "token is missing or wrong: each start of a job makes a new one"),
        (("--token-file", str(token)), "one that this system does not trust .* it was not sent the token"),
        (("--token-file", str(token), "--certificate", str(another)), "not the one of .*certificate.pem"),
    ):
        for command in (("status", url, *words), ("join", url, *words, str(SCRIPT))):
            refused = job.b.ask(*command)
            assert refused.returncode == 2, command
            assert re.search(refusal, refused.stderr), (command, refused.stderr)
            assert token.read_text() not in refused.stdout + refused.stderr
    plain = url.replace("https", "http")
    for command in (("status", plain), ("join", plain, str(SCRIPT))):
        refused = job.b.ask(*command[:2], "--token-file", str(token), *command[2:])
        assert refused.returncode == 2
        assert "reached over https, since the token goes there" in refused.stderr
    allowed = job.b.ask("status", url, "--token-file", str(token), *trusted, "--json")
    assert {agent["host"] for agent in json.loads(allowed.stdout)["agents"]} == {job.a.host.name}
    stopped = job.b.ask("stop", url, "--token-file", str(token), *trusted)
    assert stopped.returncode == 0, stopped.stderr
    assert job.wait() == 75, job.text


OVERHEARS = """
import socket, sys
with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.ntohs(3)) as cable, open(sys.argv[2], "wb") as file:
    cable.bind((sys.argv[1], 0))
    print(flush=True)
    while True:
        file.write(cable.recv(2**16))
        file.flush()
"""


@contextmanager
def overheard(host: Host, path: Path) -> Iterator[Path]:
    """A file with all that goes over the cable as long as the context lasts."""
    command = [*host.enter, sys.executable, "-c", OVERHEARS, host.name, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield path
        process.kill()


IN_THE_STATE = b"running_mean"
"""The name of a tensor that a worker is handed when it joins."""


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("--insecure-data",)], ids=["private", "insecure"])
def test_what_workers_of_two_hosts_say_is_read_on_the_way_only_where_the_person_lets_it_and_the_journal_says_so(
    job: Job, serial: Trained, tmp_path: Path, options: tuple[str, ...]
) -> None:
    with overheard(job.b.host, tmp_path / "overheard") as heard:
        job.run("-n", "1:2", "--here", "1", *options, **LONG)
        joined = job.join("-n", "1", **LONG)  # the command that is printed has the option
        job.together()
        job.ends_as(serial)
        assert joined.wait() == 0, job.text
        data = heard.read_bytes()
    assert len(data) > 100_000
    assert (IN_THE_STATE in data) is bool(options)
    assert [one.get("insecure_data", False) for one in job.a.journal("started")] == [bool(options)]


@pytest.mark.slow
def test_a_host_that_was_not_told_that_others_speak_plain_text_is_refused_and_the_job_goes_on(
    job: Job, serial: Trained
) -> None:
    job.run("-n", "1:2", "--here", "1", "--max-restarts", "0", "--insecure-data", **{**LONG, "PACE_S": "0.1"})
    joined = job.join("-n", "1", without="--insecure-data", **LONG)
    assert joined.wait() == 2, job.text
    assert "give --insecure-data to all of them, or to none" in job.b.text
    job.ends_as(serial)


def _told_to_processes() -> Iterator[bytes]:
    """The command line and the environment of every process of this machine."""
    for process in Path("/proc").glob("[0-9]*"):
        for what in ("cmdline", "environ"):
            with suppress(OSError):  # it has ended
                yield (process / what).read_bytes()
