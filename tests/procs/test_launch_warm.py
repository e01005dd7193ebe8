"""`unisono run` whose workers are forked from one process: what is shown, and how it ends, is what it was without.

Where it is enough that they are forked, that process is itself a fork; elsewhere the launcher starts it, and it loads
torch.
"""

import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from forks.client import SHARED_FORK_SERVERS
from launched import PATIENCE_S, Run

pytestmark = [
    pytest.mark.procs,
    pytest.mark.skipif(sys.platform != "linux", reason="workers are forked on Linux only"),
]

PREAMBLE = """
import os, signal, socket, subprocess, sys
rank = int(os.environ.get("UNISONO_RANK", 0))

def forever():
    print("waiting", os.getpid(), os.getppid(), flush=True)
    while True:
        signal.pause()
"""


@pytest.fixture
def run(warm: None, tmp_path: Path) -> Iterator[Run]:
    """A launcher whose fork server is a fork."""
    started = Run(tmp_path, PREAMBLE)
    yield started
    started.close()


@pytest.fixture
def cold(run: Run, monkeypatch: pytest.MonkeyPatch) -> Run:
    """A launcher that starts its fork server."""
    monkeypatch.delenv(SHARED_FORK_SERVERS, raising=False)
    return run


def until_waiting(run: Run, workers: int) -> list[re.Match[str]]:
    """Read on until so many workers wait; who they are, and who has started them."""
    return [found for line in run.until("waiting", workers) for found in re.finditer(r"waiting (\d+) (\d+)", line)]


FAILS = """
    store = os.environ.get("UNISONO_STORE_FD")
    listens = store and socket.socket(fileno=int(store)).getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    threads = len(os.listdir("/proc/self/task"))
    print("torch" in sys.modules, listens, sys.argv[1:], threads, os.environ["OMP_NUM_THREADS"], file=sys.stderr)
    def train():
        raise ValueError("boom")
    if rank == 1:
        printed = os.open("printed", os.O_RDWR)  # the others have printed their line, too
        for other in range(2):
            os.read(printed, 1)
        train()
    os.write(os.open("printed", os.O_WRONLY), b"1")
    forever()
"""


@pytest.mark.parametrize("threads", [1, 2])  # a shared fork server has one thread: for two, torch is loaded anew
def test_workers_have_what_they_need_and_a_failing_one_ends_the_others_and_is_told(run: Run, threads: int) -> None:
    os.mkfifo(run.folder / "printed")
    run.start(FAILS, "--threads", str(threads), workers=3)
    assert run.end() == 1
    seen = {rank: re.search(rf"\[rank {rank}\] (True .*)", run.text) for rank in range(3)}
    for rank, line in seen.items():
        assert line is not None, run.text
        assert line[1] == f"True {1 if rank == 0 else None} ['an argument'] 1 {threads}"
    report = run.text[run.text.index("unisono: rank 1 on host") :].splitlines()
    assert report[1] == "Traceback (most recent call last):"
    assert report[-1] == "ValueError: boom"
    assert not any("unisono/launch" in line for line in report[1:])
    assert b"ValueError: boom" in run.log(1)
    assert run.result["error"]["rank"] == 1  # type: ignore[index]


@pytest.mark.slow
def test_more_workers_than_a_socket_has_room_for_are_forked_all_the_same(run: Run) -> None:
    run.start('print("forked:", "torch" in sys.modules)', workers=12, argument="x" * 24_000)
    assert run.end() == 0
    assert run.text.count("forked: True") == 12, run.text


def test_a_signal_is_passed_on_and_the_job_ends_with_its_code(run: Run) -> None:
    run.start("forever()", workers=3)
    started_by = {int(found[2]) for found in until_waiting(run, 3)}
    assert len(started_by) == 1
    assert run.process.pid not in started_by  # they are forked
    run.process.send_signal(signal.SIGTERM)
    assert run.end() == 143
    assert "ended by SIGTERM" in run.lines[-1]


def test_a_signal_that_comes_while_torch_is_being_loaded_ends_the_job_at_once(cold: Run) -> None:
    cold.start("print('began', flush=True)")
    while not (loading := psutil.Process(cold.process.pid).children()) or not any(map(_is_template, loading)):
        assert cold.process.poll() is None
    cold.process.send_signal(signal.SIGINT)
    assert cold.end() == 130
    assert "began" not in cold.text
    assert "ended by SIGINT" in cold.lines[-1]


def _is_template(process: psutil.Process) -> bool:
    try:
        return "unisono.launch.fork_server" in process.cmdline()
    except psutil.Error:
        return False


def test_a_launcher_that_is_killed_takes_everything_with_it(cold: Run) -> None:
    cold.start("subprocess.Popen([sys.executable, '-c', 'import signal; signal.pause()'])\nforever()", workers=3)
    until_waiting(cold, 3)
    family = psutil.Process(cold.process.pid).children(recursive=True)
    assert len(family) == 8  # three workers, what they started, the process that they are forked from, and the guard
    cold.process.kill()
    cold.process.wait(PATIENCE_S)
    assert not psutil.wait_procs(family, timeout=PATIENCE_S)[1]


def test_workers_whose_fork_server_is_killed_are_lost_and_the_job_says_so(run: Run) -> None:
    run.start("forever()", workers=3)
    os.kill(int(until_waiting(run, 3)[0][2]), signal.SIGKILL)
    assert run.end() == 137
    assert "was killed by SIGKILL" in run.lines[-1]


@pytest.mark.parametrize("options", [(), ("--max-restarts", "0")], ids=["fixed", "elastic"])
def test_a_job_whose_processes_are_stopped_ends_when_it_is_told_to(run: Run, options: tuple[str, ...]) -> None:
    run.start("forever()", "--grace-s", "1", *options, workers=2)
    waiting = until_waiting(run, 2)
    for pid in {int(number) for each in waiting for number in each.groups()}:  # the workers, and their fork server
        os.kill(pid, signal.SIGSTOP)
    run.process.send_signal(signal.SIGTERM)
    assert run.end() != 0
    assert not any(psutil.pid_exists(int(number)) for each in waiting for number in each.groups())
