"""A command or a coordinator that a shared fork server has forked is what a fresh one would be."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import psutil
import pytest

from forks.client import LONGEST_ANSWER, asked, code_in, pid_in
from forks.commands import ForkedCommand, start
from forks.request import cold_command

pytestmark = [
    pytest.mark.procs,
    pytest.mark.slow,  # what the tests themselves are made of
    pytest.mark.usefixtures("warm"),
    pytest.mark.skipif(sys.platform != "linux", reason="commands are forked on Linux only"),
]

PATIENCE_S = 60.0
LOOK = """
import ctypes, faulthandler, gc, logging, os, resource, signal, sys, tempfile, threading
main = sys.modules["__main__"]
print(sys.argv, sys.orig_argv, sys.path, sys.flags)
print(main.__name__, main.__file__, main.__package__, main.__spec__, main.__cached__, main.__loader__)
print(os.getcwd(), os.getpid() == os.getpgrp() == os.getsid(0), os.nice(0), os.umask(0o22))
print(sorted((name, value) for name, value in os.environ.items() if name != "UNISONO_LAUNCHER_PID"))
print([(each, signal.getsignal(each)) for each in signal.valid_signals()], signal.set_wakeup_fd(-1))
print([line for line in open("/proc/self/status") if line.startswith(STATUS)])
print([resource.getrlimit(getattr(resource, name)) for name in dir(resource) if name.startswith("RLIMIT_")])
print([(number, os.readlink(f"/proc/self/fd/{number}"), os.get_inheritable(number)) for number in (0, 1, 2, KEPT)])
print(sorted(map(int, os.listdir("/proc/self/fd")))[:5])
held = [os.open("/dev/null", os.O_RDONLY) for _ in range(40)]
gc.collect()  # an object of the shared fork server that still owned a number would close it now
print(all(os.fstat(descriptor) for descriptor in held), held)
for stream in (sys.stdin, sys.stdout, sys.stderr):
    print(stream.fileno(), stream.encoding, stream.errors, stream.line_buffering, stream.write_through, stream.closed)
died = ctypes.c_int(-1)
ctypes.CDLL(None).prctl(2, ctypes.byref(died), 0, 0, 0)
print(died, faulthandler.is_enabled(), sys.gettrace(), sys.getprofile(), threading.enumerate()[1:])
print(threading.current_thread() is threading.main_thread(), gc.isenabled(), gc.get_threshold(), tempfile.tempdir)
print(logging.getLogger().handlers, logging.getLogger().level, "torch" in sys.modules, sys.stdin.read())
print(sys.getswitchinterval(), sys.getrecursionlimit(), sys.excepthook, sys.displayhook, sys.breakpointhook)
"""
"""Shows a program's surroundings. ``KEPT`` is a descriptor that it was given, ``STATUS`` the lines of its status."""
STATUS = ("SigPnd", "SigBlk", "SigIgn", "SigCgt", "ShdPnd", "Cap", "Threads", "Umask")
"""Not ``SigQ``: it counts the signals that wait for any process of the same user."""


def look(kept: int) -> tuple[str, ...]:
    """A module of Python's own that runs it."""
    return "timeit", "-n", "1", "-r", "1", f"KEPT = {kept}; STATUS = {STATUS}", *LOOK.strip().splitlines()


def lines(text: str) -> list[str]:
    """What was shown, without what differs from process to process, and without the time that `timeit` tells."""
    return re.sub(r" at 0x[0-9a-f]+", "", text).splitlines()[:-1]


def forked(command: tuple[str, ...], folder: Path, environment: Mapping[str, str], kept: int) -> int | None:
    with (folder / "output").open("wb") as out, Path(os.devnull).open("r+b") as nothing:
        numbers = {0: nothing.fileno(), 1: out.fileno(), 2: out.fileno(), kept: kept}
        with asked(command, environment, numbers, str(folder)) as channel:
            pid_in(channel.recv(LONGEST_ANSWER))
            return code_in(channel)


def cold(command: tuple[str, ...], folder: Path, environment: Mapping[str, str], kept: int) -> int:
    with (folder / "output").open("wb") as out:
        return subprocess.run(
            cold_command(command),
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            check=False,
            timeout=PATIENCE_S,
            start_new_session=True,
            pass_fds=[kept],
        ).returncode


def test_a_fork_sees_what_a_fresh_program_sees(tmp_path: Path) -> None:
    environment = {**os.environ, "UNISONO_OWN": "1", "SHLVL": "7"}
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    kept = os.open(tmp_path, os.O_RDONLY)
    seen = []
    try:
        for see in (forked, cold):
            assert see(look(kept), tmp_path, environment, kept) == 0
            seen.append(lines((tmp_path / "output").read_text()))
    finally:
        os.close(kept)
        signal.signal(signal.SIGHUP, before)
    for one, other in zip(*seen, strict=True):
        assert one == other
    assert len(seen[0]) == len(re.findall("^ *print", LOOK, re.MULTILINE)) + 2  # one of them prints three times


# --- how it ends

ENDS = (
    "import sys; sys.exit(7)",
    "import sys; sys.exit('words')",
    "1 / 0",
    "print('hello'); import atexit; atexit.register(print, 'at exit')",
    "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    "import os; os._exit(9)",
    "import threading, time; threading.Thread(target=lambda: (time.sleep(0.05), print('thread'))).start()",
)


@pytest.mark.parametrize("body", ENDS)
def test_a_fork_ends_as_a_fresh_program_does(body: str, tmp_path: Path) -> None:
    command = ("timeit", "-n", "1", "-r", "1", body)
    ends = []
    for run in (forked, cold):
        code = run(command, tmp_path, os.environ, 0)
        said = [line for line in (tmp_path / "output").read_text().splitlines() if "loop, best" not in line]
        ends.append((code, said[-1:]))
    assert ends[0] == ends[1]


def test_the_system_shows_the_command_of_a_fork(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import signal; signal.pause()")
    with start("run", "--run-dir", "run", "train.py", cwd=tmp_path, stdout=subprocess.DEVNULL) as process:
        assert isinstance(process, ForkedCommand)
        assert " ".join(psutil.Process(process.pid).cmdline()).startswith(f"{sys.executable} -P -m unisono run")
        process.kill()


def test_a_forked_command_is_waited_for_like_any_other(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import signal; signal.pause()")
    process = start("run", "--run-dir", "run", "train.py", cwd=tmp_path, stdout=subprocess.DEVNULL)
    assert isinstance(process, ForkedCommand)
    assert process.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.01)
    process.send_signal(signal.SIGKILL)
    assert process.wait(PATIENCE_S) == process.poll() == process.returncode == -signal.SIGKILL
    process.kill()  # as with Popen, this is no error


def test_a_command_that_would_be_another_one_is_started_as_a_program(tmp_path: Path) -> None:
    said = tmp_path / "said"
    with said.open("wb") as out:
        process = start("--version", env={**os.environ, "LD_BIND_NOW": "1"}, stdout=out)
    assert isinstance(process, subprocess.Popen)
    assert process.wait(PATIENCE_S) == 0
    assert said.read_text().startswith("unisono ")


def test_no_fork_has_torch_or_another_forks_numbers(tmp_path: Path) -> None:
    shows = "import random, sys; print('torch' in sys.modules, random.random())"
    drawn = []
    for _ in range(3):
        assert forked(("timeit", "-n", "1", "-r", "1", shows), tmp_path, os.environ, 0) == 0
        has_torch, number = (tmp_path / "output").read_text().split()[:2]
        assert has_torch == "False"
        drawn.append(number)
    assert len(set(drawn)) == 3
