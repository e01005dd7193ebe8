"""Loggers follow ``metrics.jsonl``: they get each committed line once, on a thread of the main worker."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from unisono.checkpoint.folder import RunFolder
from unisono.data.sample_order import Order
from unisono.errors import Unreadable
from unisono.host.tracebacks import warn
from unisono.jsonl import open_lines
from unisono.loggers.logger import LoggedRun, Logger, read_note, write_note
from unisono.plan.batches import Batches
from unisono.received import parse_json, why_of
from unisono.train.group.membership import Membership
from unisono.train.state.trained import Doubt
from unisono.train.step.listeners import Listener
from unisono.train.step.step import Step

CHUNK = 2**20
END = 2**18
"""Bytes at the end of the file among which the newest step's line is looked for."""

LARGEST = 2**1023
"""The largest whole number that loggers take: larger ones are no decimal numbers."""

BESIDE = ("step", "time")
"""Numbers of lines that are no figures."""

Figures = tuple[int, dict[str, float]]
"""The number of a step, and its figures."""


class CommittedSteps:
    """Follows the file. Values that a script logs beside a step belong to that step's figures; their line is last."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: BinaryIO | None = None
        self._rest, self._step, self._values = b"", -1, dict[str, float]()

    def is_another(self) -> bool:
        """Whether another file lies there than the one that is followed: steps were dropped from it."""
        try:
            there = self._path.stat()
        except FileNotFoundError:
            return False
        return self._file is None or not os.path.samestat(there, os.fstat(self._file.fileno()))

    def open(self) -> int:
        """Follow the file that lies there, from its beginning. Return the number of its steps."""
        self.close()
        self._rest, self._step, self._values = b"", -1, {}
        self._file = os.fdopen(open_lines(self._path), "rb", buffering=0)
        size = self._file.seek(0, os.SEEK_END)
        self._file.seek(max(0, size - END))
        lines = self._file.read().splitlines(keepends=True)
        self._file.seek(0)
        parsed = (_parsed(line) for line in reversed(lines))
        return next((line["step"] + 1 for line in parsed if line is not None and "loss" in line), 0)

    def read(self) -> Iterator[Sequence[Figures]]:
        """The figures of steps whose lines are whole by now, some at a time."""
        while self._file is not None and (data := self._file.read(CHUNK)):
            *lines, self._rest = (self._rest + data).split(b"\n")
            yield [step for line in lines for step in self._took(_parsed(line + b"\n"))]

    def last(self) -> Sequence[Figures]:
        """The figures that were logged behind the last step."""
        step, values, self._values = self._step, self._values, {}
        return [(step, values)] if values else []

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _took(self, line: Mapping[str, Any] | None) -> Iterator[Figures]:
        if line is None:
            return
        if line["step"] != self._step:
            yield from self.last()
        self._step = line["step"]
        self._values |= figures(line)
        if "loss" in line:
            yield from self.last()


def figures(line: Mapping[str, Any]) -> dict[str, float]:
    """The finite numbers of a line, and the parts of its seconds."""
    parts = line.get("seconds")
    seconds = {f"seconds/{part}": value for part, value in parts.items()} if isinstance(parts, dict) else {}
    values = {**line, **seconds}
    numbers = {name: value for name, value in values.items() if type(value) in (int, float) and name not in BESIDE}
    return {name: value for name, value in numbers.items() if -LARGEST < value < LARGEST}  # not NaN, either


def _parsed(line: bytes) -> Mapping[str, Any] | None:
    with suppress(Unreadable):
        value = parse_json(line) if line.endswith(b"\n") and line.strip() else None
        if isinstance(value, dict) and type(value.get("step")) is int:
            return value
    return None


class LoggedSteps:
    """A logger, and the first step that it lacks. An error of the logger ends its logging. ``failed`` says why."""

    def __init__(self, logger: Logger, folder: Path, job: Mapping[str, Any]) -> None:
        self.logger, self.failed = logger, ""
        self._folder, self._job, self._next = folder, job, 0

    def open(self, steps: int) -> None:
        """Begin, or go on, behind so many committed steps."""
        noted = read_note(self._folder, self.logger.name)
        logged = noted if type(noted) is int and steps else 0
        if not self.failed:
            with self._noting_failure():
                self._next = self.logger.open(LoggedRun(self._folder, self._job, steps, logged))

    def take(self, steps: Sequence[Figures], *, is_computed: bool = True) -> None:
        """Log those of these steps that it lacks, and note that it has them.

        What stands beside a step that was not computed is not noted: a run that goes on computes it.
        """
        new = [(step, values) for step, values in steps if step >= self._next]
        if self.failed or not new:
            return
        with self._noting_failure():
            for step, values in new:
                self.logger.log(step, values)
            self.logger.flush()
            if is_computed:
                self._next = new[-1][0] + 1
                write_note(self._folder, self.logger.name, self._next)

    def close(self) -> None:
        """Close the logger."""
        with self._noting_failure():
            self.logger.close()

    @contextmanager
    def _noting_failure(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:  # noqa: BLE001 (whatever a logger raises, training goes on)
            self.failed = self.failed or why_of(error)


LATEST = 2**62
"""No step comes so late."""

PATIENCE_S = 60.0
"""Seconds that the end of a run waits for loggers, such as one whose server does not answer."""


class LogFollower(Listener):
    """Opens loggers where a worker becomes the main one, and gives them what ``metrics.jsonl`` gets, once a second.

    The file is the one truth: it has each committed step once, whichever worker was the main one, and loses those that
    are computed again. A worker that may not write there gives nothing to its loggers.
    """

    def __init__(
        self,
        folder: RunFolder,
        membership: Membership,
        job: Mapping[str, Any],
        loggers: Sequence[Logger],
        look_s: float,
    ) -> None:
        self._folder, self._membership, self._look_s = folder, membership, look_s
        self._committed = CommittedSteps(folder.metrics.path)
        self._loggers = [LoggedSteps(logger, folder.path, job) for logger in loggers]
        self._reported = set[str]()
        self._again = deque[int]()  # from which steps on others were computed again
        self._closing, self._is_abandoned, self._is_preempted = threading.Event(), False, False
        self._thread: threading.Thread | None = None

    def loop_begins(self, number: int, batches: Batches, order: Order) -> None:
        """Begin to follow the file, which has by now the lines that remain of an earlier start."""
        self._begin()

    def renewed(self) -> None:
        """Begin to follow the file if this worker is the main worker now."""
        self._begin()

    def step_ends(self, step: Step, after: int) -> None:
        """Warn of loggers that failed, once of each."""
        self._report_failures()

    def went_back(self, reached: int, step: int, doubt: Doubt) -> None:
        """Note that figures of the steps from there on may be wrong."""
        self._again.append(step)

    def preempted(self) -> None:
        """Note that the job goes on later, and logs the steps behind its last one again."""
        self._is_preempted = True

    def abandon(self) -> None:
        """Give the loggers nothing more, as if this process had been killed."""
        self._is_abandoned = True
        self.close()

    def close(self) -> None:
        """Give the loggers the remaining steps."""
        self._closing.set()
        if self._thread is None:
            return
        self._thread.join(PATIENCE_S)
        if self._thread.is_alive():
            names = ", ".join(logged.logger.name for logged in self._loggers)
            _warn(f"{names}: not everything is logged after {PATIENCE_S:g} s. The run ends without the rest")
        self._report_failures()

    def _begin(self) -> None:
        if self._loggers and self._thread is None and self._membership.is_main:
            self._thread = threading.Thread(target=self._live, name="unisono-loggers", daemon=True)
            self._thread.start()

    def _report_failures(self) -> None:
        for logged in self._loggers:
            if logged.failed and logged.logger.name not in self._reported:
                self._reported.add(logged.logger.name)
                _warn(
                    f"{logged.logger.name} logs no more: {logged.failed}. The run goes on, and metrics.jsonl has all "
                    f"of it"
                )

    # -- on a thread

    def _live(self) -> None:
        try:
            while not self._closing.wait(self._look_s):
                self._look()
            if not self._is_abandoned:
                self._look()
                self._finish()
        except OSError as error:  # such as a run folder that somebody has removed
            for logged in self._loggers:
                logged.failed = logged.failed or why_of(error)
        finally:
            self._committed.close()
            for logged in self._loggers:
                logged.close()

    def _look(self) -> None:
        if not self._is_ours():
            return
        again = [self._again.popleft() for _ in range(len(self._again))]
        if again or self._committed.is_another():
            count = min(self._committed.open(), *again, LATEST)
            for logged in self._loggers:
                logged.open(count)
        for steps in self._committed.read():
            for logged in self._loggers:
                logged.take(steps)

    def _finish(self) -> None:
        last = self._committed.last()
        if self._is_ours() and not self._is_preempted:
            for logged in self._loggers:
                logged.take(last, is_computed=False)

    def _is_ours(self) -> bool:
        return self._folder.writer is None or self._folder.writer.is_ours()


def _warn(text: str) -> None:
    warn(text)
