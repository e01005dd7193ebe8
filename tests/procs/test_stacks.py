"""A process that hangs says where, whatever it hangs in, and is not harmed by that."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from unisono.host.process import request_stacks

pytestmark = pytest.mark.procs

PATIENCE_S = 60.0
ROUNDS = 100
"""With all stacks written by one thread, the process crashes in one of the first fifty."""

# A function that is called through PyDLL keeps the interpreter's lock.
HANGING = """
import ctypes, os, threading

def with_the_lock():
    print("here", flush=True)
    ctypes.PyDLL(None).read(os.pipe()[0], ctypes.create_string_buffer(1), 1)

def computing():
    print("here", flush=True)
    while True:
        pass

def asleep_beside(function):
    threading.Thread(target=function).start()
    threading.Event().wait()
"""

BUSY = """
import sys, threading
sys.setswitchinterval(1e-5)

def short(depth):
    exec("def made():\\n return [i for i in range(3)]\\nmade()", {})
    if depth:
        short(depth - 1)

def busy():
    while True:
        short(8)

for _ in range(4):
    threading.Thread(target=busy, daemon=True).start()
print("here", flush=True)
threading.Event().wait()
"""


@contextmanager
def worker(folder: Path, body: str) -> Iterator[subprocess.Popen[str]]:
    """The first lines of a worker, without a job, and a script that says ``here``."""
    (folder / "train.py").write_text(body)
    command = [sys.executable, "-m", "unisono.launch.worker", "train.py"]
    environment = {**os.environ, "UNISONO_WORKER": "w1"}
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=log, text=True)
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "here\n"
        yield process
        process.kill()


def ask(process: subprocess.Popen[str], longest_s: float = PATIENCE_S) -> None:
    for pause_s in request_stacks(process.pid):
        time.sleep(min(pause_s, longest_s))


@pytest.mark.parametrize(
    ("last_line", "where"),
    [
        ("with_the_lock()", "with_the_lock"),
        ("computing()", "computing"),
        ("asleep_beside(with_the_lock)", "with_the_lock"),
        ("asleep_beside(computing)", "asleep_beside"),
    ],
)
def test_a_stack_is_shown_whoever_holds_the_interpreters_lock(last_line: str, where: str, tmp_path: Path) -> None:
    with worker(tmp_path, HANGING + last_line) as process:
        ask(process)
    assert f"in {where}\n" in (tmp_path / "log").read_text()


def test_stacks_of_running_threads_are_asked_for_without_harm(tmp_path: Path) -> None:
    with worker(tmp_path, BUSY) as process:
        for _ in range(ROUNDS):
            ask(process, longest_s=0.001)
        assert process.poll() is None
    assert (tmp_path / "log").read_text().count("in busy\n") > 1
