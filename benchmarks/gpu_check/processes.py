"""Programs and jobs of the check, as processes that a deadline ends, and what they have printed."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu_check.parts import Deadline
from forks.commands import start

ENDS_WITHIN_S = 10.0
"""How long a job may take to end that was asked to."""


@dataclass(frozen=True, slots=True)
class Ended:
    """A process that has ended.

    Attributes:
        code: its exit code; None if the deadline has ended it.
        said: what it has printed, errors too.
    """

    code: int | None
    said: str

    @property
    def told(self) -> list[dict[str, Any]]:
        """Its lines of JSON."""
        return [json.loads(line) for line in re.findall(r'\{".*\}$', self.said, re.MULTILINE)]

    @property
    def why(self) -> str:
        """Why it has failed, as far as it says so: its last line with an error."""
        if self.code is None:
            return "it did not end in time"
        lines = [line.strip() for line in self.said.splitlines() if line.strip()]
        errors = [line for line in lines if re.search(r"\w(Error|Exception|Fault|Lost|Mismatch)\b|error:|cannot", line)]
        return [f"it ended with {self.code}", *lines[-1:], *errors[-1:]][-1][:300]

    @property
    def digest(self) -> str | None:
        """The digest of a job's weights."""
        found = re.findall("weights sha256 ([0-9a-f]{64})", self.said)
        return found[-1][:12] if found and self.code == 0 else None

    @property
    def device(self) -> str:
        """Where a job has computed."""
        return ", ".join(sorted({*re.findall(r"computed on (\S+)", self.said)}))


@dataclass(frozen=True, slots=True)
class Setting:
    """On what is checked.

    Attributes:
        device: as torch names it; by default the accelerator that there is.
        small: whether everything is small, for a dry run.
        folder: for what processes print, and for run folders.
    """

    device: str | None
    small: bool
    folder: Path

    @property
    def words(self) -> list[str]:
        """The options of every program and job."""
        return [*(["--device", self.device] if self.device else []), *(["--small"] if self.small else [])]

    def program(self, name: str, *words: str, deadline: Deadline, **variables: str) -> Ended:
        """Run a module of this package to its end."""
        output = self._output(name)
        command = [sys.executable, "-m", f"benchmarks.gpu_check.{name}", *words, *self.words]
        with output.open("wb") as file:
            process = subprocess.Popen(
                command,
                env={**os.environ, **variables},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        code: int | None = None
        try:
            code = process.wait(deadline.left)
        except subprocess.TimeoutExpired:
            pass
        finally:  # what it has forked, too
            _kill_session(process.pid)
            process.wait()
        return Ended(code, output.read_text(errors="replace"))

    def job(
        self,
        name: str,
        *words: str,
        workers: int,
        deadline: Deadline,
        options: tuple[str, ...] = (),
        variables: Mapping[str, str] | None = None,
    ) -> Ended:
        """Train a model of :mod:`benchmarks.gpu_check.job` on so many workers."""
        output = self._output(name)
        if self.small and workers == 1:
            options = (*options, "--max-restarts", "1")  # an elastic job's worker is forked from one that has torch
        launch = ("run", "-n", str(workers), *options, "--run-dir", str(output.with_suffix("")))
        with output.open("wb") as file:
            process = start(
                *(*launch, "-m", "benchmarks.gpu_check.job", *words, *self.words),
                env={**os.environ, **(variables or {})},
                stdout=file,
                stderr=subprocess.STDOUT,
            )
        code: int | None = None
        try:
            code = process.wait(deadline.left)
        except subprocess.TimeoutExpired:
            pass
        finally:
            _end(process)
        return Ended(code, output.read_text(errors="replace"))

    def journal(self, name: str, event: str) -> list[dict[str, Any]]:
        """The events of one kind of the last job of that name."""
        return [line for line in self._lines(name) if line["event"] == event]

    def _lines(self, name: str) -> Iterator[dict[str, Any]]:
        for path in sorted(self.folder.glob(f"*-{name}/journal.jsonl"))[-1:]:
            yield from (json.loads(line) for line in path.read_text().splitlines())

    def _output(self, name: str) -> Path:
        self.folder.mkdir(parents=True, exist_ok=True)
        return self.folder / f"{len(list(self.folder.glob('*.txt'))):02}-{name}.txt"


def _end(job: Any) -> None:
    if job.poll() is not None:
        return
    job.terminate()
    try:
        job.wait(ENDS_WITHIN_S)
    except subprocess.TimeoutExpired:
        job.kill()
        job.wait()


def _kill_session(leader: int) -> None:
    try:
        os.killpg(leader, signal.SIGKILL)
    except ProcessLookupError:
        return  # nothing of it is left
