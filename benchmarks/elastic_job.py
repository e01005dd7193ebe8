"""An elastic job under way, as the benchmarks that disturb it see it."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from benchmarks.crew import cleaned
from unisono.errors import JobError, LaunchError
from unisono.launch.elastic.address import Control, address_of

ROOT = Path(__file__).parents[1]
LOOK_S = 0.02
PATIENCE_S = 120.0
CALM_STEPS = 6
"""Of a complete roster, before it is disturbed again."""

PROGRAM = ("-m", "benchmarks.programs.elastic")


@dataclass(frozen=True, slots=True)
class Job:
    """An elastic job.

    Attributes:
        folder: of the run.
        launcher: its ``unisono run``; None for a job that is only looked at.
    """

    folder: Path
    launcher: subprocess.Popen[bytes] | None = None

    # -- what it has left

    def commits(self, worker: str) -> list[tuple[int, float]]:
        """The steps that a worker has committed, each with the time."""
        path = self.folder / f"commits-{worker}.txt"
        lines = path.read_text().splitlines() if path.exists() else []
        return [(int(step), float(at)) for step, at in (line.split() for line in lines if line.count(" ") == 1)]

    def journal(self, event: str) -> list[dict[str, Any]]:
        """The events of one kind."""
        return [one for one in self.events() if one["event"] == event]

    def events(self) -> list[dict[str, Any]]:
        """All events."""
        path = self.folder / "journal.jsonl"
        text = path.read_text() if path.exists() else ""
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def roster(self) -> list[str]:
        """Who trains together now."""
        minted = self.journal("minted")
        return list(minted[-1]["workers"]) if minted else []

    # -- what it is asked

    @property
    def control(self) -> Control:
        """The coordinator."""
        return Control(address_of(self.folder))

    def status(self) -> dict[str, Any]:
        """As the coordinator tells it; nothing while that is being started again."""
        try:
            return self.control.status()
        except (JobError, LaunchError):
            return {}

    def pid(self, worker: str) -> int:
        """The process of a worker."""
        members = self.control.status()["members"]
        return int(next(member["pid"] for member in members if member["id"] == worker))

    # -- waiting

    def until(self, is_so: Callable[[], bool], words: str) -> None:
        """Wait.

        Raises:
            TimeoutError: in vain.
        """
        deadline = time.monotonic() + PATIENCE_S
        while not is_so():
            if self.launcher is not None and self.launcher.poll() is not None:
                raise RuntimeError(f"the job ended with {self.launcher.returncode}, before {words}: {self.last_words}")
            if time.monotonic() > deadline:
                raise TimeoutError(f"{words}: not within {PATIENCE_S:g} s; see {self.folder}")
            time.sleep(LOOK_S)

    def await_calm(self, workers: int) -> list[str]:
        """Wait until so many train together, and have done so for some steps."""

        def is_calm() -> bool:
            minted = self.journal("minted")
            if not minted or len(minted[-1]["workers"]) != workers:
                return False
            begun = seconds_of(minted[-1]["time"])
            last = ([at for _, at in self.commits(worker)[-CALM_STEPS:]] for worker in minted[-1]["workers"])
            return all(len(times) == CALM_STEPS and times[0] > begun for times in last)

        self.until(is_calm, f"{workers} workers train together")
        return self.roster()

    @property
    def last_words(self) -> str:
        """The end of what the launcher printed."""
        path = self.folder.with_name("output.txt")
        return path.read_text(errors="replace")[-2000:] if path.exists() else ""


@contextmanager
def running(
    options: Sequence[str],
    script: Sequence[str],
    variables: Mapping[str, str] | None = None,
    folder: Path | None = None,
    enter: Sequence[str] = (),
) -> Iterator[Job]:
    """A job of ``unisono run`` that is ended with the block, if it runs by then.

    Args:
        options: of ``unisono run``.
        script: and its arguments.
        variables: on top of the environment.
        folder: of the run; by default one that is removed in the end.
        enter: what goes before the command, so that it runs on another host.
    """
    with tempfile.TemporaryDirectory(prefix="benchmark-") as name:
        run_dir = folder or Path(name) / "run"
        command = ["-m", "unisono", "run", *options, "--run-dir", str(run_dir), *script]
        with launched(command, variables or {}, run_dir, enter) as job:
            yield job


@contextmanager
def launched(
    command: Sequence[str], variables: Mapping[str, str], folder: Path, enter: Sequence[str] = ()
) -> Iterator[Job]:
    """A program that starts workers, or is one. It is ended with the block, if it runs by then.

    Args:
        command: what Python is given.
        variables: on top of the environment.
        folder: where it leaves what it does. Beside it is what it prints.
        enter: what goes before the command, so that it runs on another host.
    """
    ours = [sys.executable, "-m", "benchmarks.programs.with_its_parent", str(os.getpid())]
    with folder.with_name("output.txt").open("ab") as output:
        process = subprocess.Popen(
            [*ours, *_found(enter), sys.executable, *command],
            cwd=ROOT,
            env={**cleaned(os.environ), **variables},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        yield Job(folder, process)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGCONT)  # a job that is stopped would not hear the other one
            process.terminate()
        process.wait()


def _found(enter: Sequence[str]) -> list[str]:
    return [shutil.which(enter[0]) or enter[0], *enter[1:]] if enter else []


def seconds_of(stamp: str) -> float:
    """A journal's time, in seconds since 1970."""
    return datetime.fromisoformat(stamp).timestamp()
