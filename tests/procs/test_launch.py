"""`unisono run` with real processes and real signals. The scripts are plain Python: no torch, no training.

Where the command itself is tested, its signals and its outputs, it is started as a program; elsewhere it is forked.
"""

import os
import platform
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from commands import python
from forks.client import SHARED_FORK_SERVERS
from launched import PATIENCE_S, Run
from said import options
from unisono.errors import LaunchError
from unisono.launch.local import launch
from unisono.launch.outcome import open_folder
from unisono.launch.settings import LaunchSettings, Script
from unisono.launch.terminal import SilentTerminal

pytestmark = pytest.mark.procs

PROMISE_S = 2.0

PREAMBLE = """
import os, signal, subprocess, sys, threading, time
from pathlib import Path
rank = int(os.environ["UNISONO_RANK"])
run_dir = Path(os.environ["UNISONO_RUN_DIR"])

def forever():
    print("waiting", flush=True)
    while True:
        signal.pause()

def when(path):
    while not path.exists():
        time.sleep(0.005)

def child():
    sleeper = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    print("child", sleeper.pid, flush=True)
    return sleeper
"""


@pytest.fixture
def run(warm: None, tmp_path: Path) -> Iterator[Run]:
    """A launcher that is forked from a process that has loaded it."""
    started = Run(tmp_path, PREAMBLE, "--no-warm-start")  # since these scripts need no torch
    yield started
    started.close()


@pytest.fixture
def program(run: Run, monkeypatch: pytest.MonkeyPatch) -> Run:
    """A launcher that is a program of its own."""
    monkeypatch.delenv(SHARED_FORK_SERVERS, raising=False)
    return run


def gone(lines: list[str]) -> bool:
    """Whether the processes that these lines name are gone, or go soon."""
    found = [psutil.Process(pid) for line in lines for pid in map(int, re.findall(r"child (\d+)", line)) if alive(pid)]
    return not psutil.wait_procs(found, timeout=PATIENCE_S)[1]


def alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)


# --- what is shown


def test_lines_stand_behind_their_rank_and_logs_hold_what_was_written(run: Run) -> None:
    body = """
        os.write(1, b"one\\n")
        os.write(2, b"\\xff no newline at the end" + str(rank).encode())
    """
    assert run(body) == 0
    shown = [line for line in run.lines if line.startswith("[rank ")]
    assert sorted(shown) == sorted(
        line
        for rank in (0, 1)
        for line in (f"[rank {rank}] one\n", f"[rank {rank}] \ufffd no newline at the end{rank}\n")
    )
    assert run.log(1) == b"one\n\xff no newline at the end1"


def test_a_long_line_and_a_lot_of_output_arrive_whole(run: Run) -> None:
    assert run("print('x' * 300_000)\nfor n in range(20_000): print(n)", workers=1) == 0
    shown = [line.removeprefix("[rank 0] ").rstrip("\n") for line in run.lines if line.startswith("[rank 0]")]
    assert "".join(line for line in shown if line.startswith("x")) == "x" * 300_000
    assert [line for line in shown if not line.startswith("x")] == [str(n) for n in range(20_000)]
    assert run.log(0).decode() == "x" * 300_000 + "\n" + "".join(f"{n}\n" for n in range(20_000))


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="there is no tuning for another C library")
def test_workers_see_the_tuning_unless_it_is_switched_off(program: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MALLOC_MMAP_MAX_", raising=False)
    monkeypatch.setenv("MALLOC_ARENA_MAX", "3")
    shows = "print('mmap', os.environ.get('MALLOC_MMAP_MAX_'), 'arenas', os.environ['MALLOC_ARENA_MAX'], flush=True)"
    assert program(shows) == 0
    assert [program.log(rank) for rank in (0, 1)] == [b"mmap 0 arenas 3\n"] * 2
    assert program(shows, "--no-tuning") == 0
    assert [program.log(rank) for rank in (0, 1)] == [b"mmap 0 arenas 3\nmmap None arenas 3\n"] * 2


def test_output_that_nobody_reads_does_not_stop_the_job(program: Run) -> None:
    program.start("print('first')\nwhen(run_dir / 'closed')\nfor n in range(1000): print(n)", workers=1)
    program.until("first")
    program.output.close()
    (program.run_dir / "closed").touch()
    assert program.process.wait(PATIENCE_S) == 0
    assert program.log(0).endswith(b"998\n999\n")


def test_a_launcher_without_any_output_runs_the_job(program: Run) -> None:
    (program.folder / "train.py").write_text("import sys\nprint('hello')\nprint('there', file=sys.stderr)")
    options = ["-n", "2", "--run-dir", "run", "--no-warm-start"]
    command = shlex.join([sys.executable, "-m", "unisono", "run", *options, "train.py"])
    closed = ["sh", "-c", f"{command} <&- >&- 2>&-"]
    assert subprocess.run(closed, cwd=program.folder, check=False, timeout=PATIENCE_S).returncode == 0
    assert program.log(1) == b"hello\nthere\n"


def test_a_second_start_in_a_run_folder_is_refused_until_the_first_is_gone_even_if_that_was_killed(
    program: Run,
) -> None:
    program.start("forever()", workers=1)
    program.until("waiting")
    for size in ("1", "1:2"):
        words = ("run", "-n", size, "--run-dir", program.run_dir, "train.py")
        second = python("-m", "unisono", *words, cwd=program.folder)
        assert second.returncode == 2, second.stderr
        who = rf"process {program.process.pid} on host {re.escape(platform.node())} has held it since 20"
        assert re.search(rf"run folder .* is in use: {who}", second.stderr), second.stderr
    program.close()
    program.start("print('again')", workers=1)
    assert program.end() == 0, program.text


def test_the_installed_command_is_the_same_as_the_module() -> None:
    installed, module = [Path(sys.executable).with_name("unisono")], [sys.executable, "-m", "unisono"]
    said = [
        subprocess.run([*each, "--version"], capture_output=True, check=True).stdout for each in (installed, module)
    ]
    assert said[0] == said[1] != b""


# --- how it ends


def test_what_the_main_worker_says_about_the_result_stands(run: Run) -> None:
    body = 'if rank == 0: (run_dir / "result.json").write_text(\'{"exit_code": 0, "steps": 7, "error": null}\')'
    assert run(body) == 0
    assert run.result == {"exit_code": 0, "steps": 7, "error": None}


def test_the_scripts_own_exit_code_is_the_jobs(program: Run) -> None:
    assert program("if rank == 1: sys.exit(3)\nforever()") == 3
    assert "rank 1 on host" in program.lines[-1]
    assert "ended with exit code 3" in program.lines[-1]


def test_a_failing_worker_ends_the_others_and_its_traceback_comes_last(run: Run) -> None:
    body = """
        def train():
            raise ValueError("boom")
        if rank == 1:
            when(run_dir / "ready")
            train()
        (run_dir / "ready").touch()
        forever()
    """
    assert run(body, workers=3) == 1
    report = run.text[run.text.index("unisono: rank 1 on host") :].splitlines()
    assert "failed (exit code 1, log " in report[0]
    assert report[1] == "Traceback (most recent call last):"
    assert report[-1] == "ValueError: boom"
    assert not any("unisono/launch" in line or "runpy" in line for line in report[1:])
    error = run.result["error"]
    assert isinstance(error, dict)
    assert (error["rank"], error["type"], error["message"]) == (1, "ValueError", "boom")


@pytest.mark.alone
def test_the_others_are_gone_within_two_seconds_even_if_they_will_not_listen(program: Run) -> None:
    body = """
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        child()
        if rank != 1:
            (run_dir / f"ready-{rank}").touch()
            forever()
        for other in (0, 2): when(run_dir / f"ready-{other}")
        raise ValueError("boom")
    """
    assert program(body, workers=3) == 1
    took = time.time() - program.began(1)
    assert took < PROMISE_S
    assert gone(program.lines)


@pytest.mark.alone
def test_a_failed_worker_that_cannot_end_does_not_keep_the_others(program: Run) -> None:
    body = """
        if rank == 0: forever()
        threading.Thread(target=threading.Event().wait).start()
        raise ValueError("boom")
    """
    assert program(body) == 1
    assert time.time() - program.began(1) < PROMISE_S
    assert program.lines[-1] == "ValueError: boom\n"


def test_the_cause_is_found_behind_its_consequences(run: Run) -> None:
    body = """
        from unisono.errors import WorkerLost
        if rank == 0: raise WorkerLost("rank 1 is gone")
        when(run_dir / "logs" / "rank-0.error.json")
        raise KeyError("the cause")
    """
    assert run(body) == 1
    assert run.lines[-1] == "KeyError: 'the cause'\n"
    assert "rank 1 on host" in run.lines[-1 - run.lines[::-1].index("Traceback (most recent call last):\n") - 1]
    assert "[rank 0] unisono.errors.WorkerLost: rank 1 is gone\n" in run.lines
    assert "[rank 0] Traceback (most recent call last):\n" not in run.lines


def test_an_exit_code_of_the_script_counts_though_others_end_sooner(run: Run) -> None:
    body = """
        import atexit
        from unisono.errors import WorkerLost
        def linger():
            (run_dir / "lingers").touch()
            forever()
        if rank == 1:
            atexit.register(linger)
            sys.exit(5)
        when(run_dir / "lingers")
        raise WorkerLost("rank 1 is gone")
    """
    assert run(body) == 5
    assert "rank 1 on host" in run.lines[-1]


def test_a_worker_killed_by_the_system_is_named_with_signal_and_likely_reason(run: Run) -> None:
    assert run("if rank == 1: os.kill(os.getpid(), signal.SIGKILL)\nforever()") == 137
    assert re.match(r"unisono: rank 1 on host \S+ was killed by SIGKILL: likely the memory ran out", run.lines[-1])
    assert (run.result["exit_code"], run.result["error"]["rank"]) == (137, 1)  # type: ignore[index]


def test_a_crash_in_native_code_leaves_its_stacks_in_the_log(run: Run) -> None:
    assert run("import faulthandler\ndef deep(): faulthandler._sigsegv()\ndeep()", workers=1) == 139
    assert b"in deep" in run.log(0)
    assert "was killed by SIGSEGV" in run.lines[-1]


def test_what_a_worker_started_goes_with_it(run: Run) -> None:
    assert run("child()") == 0
    assert len(re.findall(r"child \d+", run.text)) == 2
    assert gone(run.lines)


def test_a_program_that_left_its_workers_group_does_not_keep_the_job(run: Run) -> None:
    body = """
        away = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"], start_new_session=True)
        print("away", away.pid)
    """
    assert run(body, workers=1) == 0
    (pid,) = re.findall(r"away (\d+)", run.text)
    assert alive(int(pid))  # a program may want to outlive the job, and has to say so
    os.kill(int(pid), signal.SIGKILL)


def test_workers_that_cannot_be_started_are_an_error_and_leave_a_result(program: Run) -> None:
    (program.folder / "train.py").touch()
    too_long = Script(str(program.folder / "train.py"), ("x" * 4_000_000,))
    folder = open_folder(program.run_dir, "train")
    with pytest.raises(LaunchError, match="the worker of rank 0 could not be started: .*too long"):
        launch(LaunchSettings(too_long, workers=2, options=options(warm_start=False)), folder, SilentTerminal())
    assert program.result["exit_code"] == 1


# --- signals


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGUSR1, 138), (signal.SIGUSR2, 140)],
)
def test_a_signal_is_passed_on_and_ends_the_job_with_its_code(program: Run, number: signal.Signals, code: int) -> None:
    hung_up = signal.signal(
        signal.SIGHUP, signal.SIG_DFL
    )  # whoever runs the tests under nohup hands on that it is ignored
    try:
        program.start("forever()")
    finally:
        signal.signal(signal.SIGHUP, hung_up)
    program.until("waiting", times=2)
    program.process.send_signal(number)
    assert program.end() == code
    assert f"ended by {number.name}" in program.lines[-1]
    assert "Traceback" not in program.text
    assert program.result["exit_code"] == code


def test_ctrl_c_says_where_each_worker_was(run: Run) -> None:
    run.start("def deep(): forever()\ndeep()", workers=1)
    run.until("waiting")
    run.process.send_signal(signal.SIGINT)
    assert run.end() == 130
    assert re.search(r"\[rank 0\] KeyboardInterrupt at .*train\.py:\d+ in forever", run.text)


def test_ctrl_c_works_from_a_shell_script_in_the_background(program: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # what such a shell hands on
    try:
        program.start("forever()", workers=1)
    finally:
        signal.signal(signal.SIGINT, before)
    program.until("waiting")
    program.process.send_signal(signal.SIGINT)
    assert program.end() == 130


def test_workers_may_leave_with_a_checkpoint_when_they_are_asked_to(run: Run) -> None:
    run.start("signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))\nforever()")
    run.until("waiting", times=2)
    run.process.send_signal(signal.SIGTERM)
    assert run.end() == 75


def test_the_second_signal_kills(program: Run) -> None:
    program.start("for n in (2, 15): signal.signal(n, lambda *_: print('heard', flush=True))\nchild()\nforever()")
    program.until("waiting", times=2)
    program.process.send_signal(signal.SIGTERM)
    program.until("heard", times=2)
    program.process.send_signal(signal.SIGTERM)
    assert program.end() == 143
    assert "killing the workers" in program.text
    assert gone(program.lines)


def test_workers_that_do_not_leave_are_killed_after_their_grace(run: Run) -> None:
    run.start("signal.signal(2, signal.SIG_IGN)\nforever()", "--grace-s", "0.2")
    run.until("waiting", times=2)
    run.process.send_signal(signal.SIGINT)
    assert run.end() == 130


def test_a_failure_while_leaving_is_told(run: Run) -> None:
    body = """
        def leave(*_):
            raise OSError("disk full")
        signal.signal(signal.SIGTERM, leave if rank == 1 else signal.SIG_IGN)
        forever()
    """
    run.start(body)
    run.until("waiting", times=2)
    run.process.send_signal(signal.SIGTERM)
    assert run.end() == 1
    assert run.lines[-1] == "OSError: disk full\n"


def test_a_launcher_killed_at_once_takes_everything_with_it(program: Run) -> None:
    program.start("child()\nprint('child', os.getpid(), flush=True)\nforever()", workers=3)
    program.until("waiting", times=3)
    family = psutil.Process(program.process.pid).children(recursive=True)
    assert len(family) == 7  # three workers, what they started, and the guard
    program.process.kill()
    program.process.wait(PATIENCE_S)
    assert not psutil.wait_procs(family, timeout=PATIENCE_S)[1]
    assert gone(program.lines)
