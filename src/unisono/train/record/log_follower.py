"""Loggers follow ``metrics.jsonl``: what is committed there they get once, on a thread of the main worker."""

from __future__ import annotations

import os
import threading
import warnings
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from unisono.checkpoint.folder import RunFolder
from unisono.data.order import Order
from unisono.errors import UnisonoWarning, Unreadable
from unisono.jsonl import open_lines
from unisono.loggers.logger import Book, LoggedRun, Logger
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
"""Of whole numbers: larger ones are none of the decimal numbers that loggers take."""

BESIDE = ("step", "time")
"""Numbers of lines that are no figures."""

Figures = tuple[int, dict[str, float]]
"""The number of a step, and its figures."""


class CommittedSteps:
    """Follows the file. What a script logs beside a step belongs to that step's figures, whose line comes last.

    Args:
        path: the path of the file.
    """

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
        """Follow the file that lies there, from its beginning.

        Returns:
            the number of steps that it has.
        """
        self.close()
        self._rest, self._step, self._values = b"", -1, {}
        self._file = os.fdopen(open_lines(self._path), "rb", buffering=0)
        size = self._file.seek(0, os.SEEK_END)
        self._file.seek(max(0, size - END))
        lines = self._file.read().splitlines(keepends=True)
        self._file.seek(0)
        found = (_parsed(line) for line in reversed(lines))
        return next((line["step"] + 1 for line in found if line is not None and "loss" in line), 0)

    def read(self) -> Iterator[Sequence[Figures]]:
        """The figures of steps whose lines are whole by now, some at a time."""
        while self._file is not None and (data := self._file.read(CHUNK)):
            *lines, self._rest = (self._rest + data).split(b"\n")
            yield [step for line in lines for step in self._took(_parsed(line + b"\n"))]

    def last(self) -> Sequence[Figures]:
        """What was logged behind the last step."""
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
    found = {**line, **seconds}
    return {name: value for name, value in found.items() if _is_figure(value) and name not in BESIDE}


def _is_figure(value: Any) -> bool:
    return type(value) in (int, float) and -LARGEST < value < LARGEST  # not NaN, either


def _parsed(line: bytes) -> Mapping[str, Any] | None:
    with suppress(Unreadable):
        found = parse_json(line) if line.endswith(b"\n") and line.strip() else None
        if isinstance(found, dict) and type(found.get("step")) is int:
            return found
    return None


class LoggedSteps:
    """One logger, and the first step that it lacks. What it raises ends its logging.

    Args:
        logger: the logger.
        folder: the run folder.
        job: the settings of the job.

    Attributes:
        failed: why it logs no more; empty as long as it does.
    """

    def __init__(self, logger: Logger, folder: Path, job: Mapping[str, Any]) -> None:
        self.logger, self.failed = logger, ""
        self._folder, self._job, self._book = folder, job, Book(folder)
        self._next = 0

    def open(self, steps: int) -> None:
        """Begin, or go on, behind so many committed steps."""
        noted = self._book.read(self.logger.name)
        logged = noted if type(noted) is int and steps else 0
        if not self.failed:
            with _Failure(self):
                self._next = self.logger.open(LoggedRun(self._folder, self._job, steps, logged))

    def take(self, steps: Sequence[Figures]) -> None:
        """Log those of these steps that it lacks, and note that it has them."""
        if new := self._log(steps):
            with _Failure(self):
                self._next = new[-1][0] + 1
                self._book.write(self.logger.name, self._next)

    def take_last(self, beside: Sequence[Figures]) -> None:
        """Log what stands beside a step that was not computed: a run that goes on computes it."""
        self._log(beside)

    def _log(self, steps: Sequence[Figures]) -> Sequence[Figures]:
        new = [(step, values) for step, values in steps if step >= self._next]
        if not self.failed and new:
            with _Failure(self):
                for step, values in new:
                    self.logger.log(step, values)
                self.logger.flush()
                return new
        return []

    def close(self) -> None:
        """Nothing more comes."""
        with _Failure(self):
            self.logger.close()


class _Failure:
    """Notes what a logger raises."""

    def __init__(self, steps: LoggedSteps) -> None:
        self._steps = steps

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: Any) -> bool:
        if error is not None and not self._steps.failed:
            self._steps.failed = why_of(error)
        return True


LATEST = 2**62
"""No step comes so late."""

PATIENCE_S = 60.0
"""How long the end of a run waits for loggers, such as one whose server does not answer."""


class LogFollower(Listener):
    """Opens loggers where a worker becomes the main one, and gives them what ``metrics.jsonl`` gets, once a second.

    The file is the one truth: it has each committed step once, whichever worker was the main one, and loses those that
    are computed again. A worker that may not write there gives nothing to its loggers.

    Args:
        folder: the run folder.
        membership: the members of the job.
        job: the settings of the job.
        loggers: the loggers.
        look_s: seconds between two looks at the file.
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
        self._told = set[str]()
        self._again = deque[int]()  # from which steps on others were computed again
        self._closing, self._is_abandoned, self._is_preempted = threading.Event(), False, False
        self._thread: threading.Thread | None = None

    def loop_begins(self, number: int, batches: Batches, order: Order) -> None:
        """The file has by now what is left of an earlier start."""
        self._begin()

    def renewed(self) -> None:
        """This may be the main worker now."""
        self._begin()

    def step_ends(self, step: Step, after: int) -> None:
        """Say which loggers failed, each once."""
        self._tell()

    def went_back(self, reached: int, step: int, doubt: Doubt) -> None:
        """What was logged of the steps from there on may be wrong."""
        self._again.append(step)

    def preempted(self) -> None:
        """The job goes on later: what was logged behind its last step comes again."""
        self._is_preempted = True

    def abandon(self) -> None:
        """Give the loggers nothing more, as if this process had been killed."""
        self._is_abandoned = True
        self.close()

    def close(self) -> None:
        """Give the loggers what is left."""
        self._closing.set()
        if self._thread is None:
            return
        self._thread.join(PATIENCE_S)
        if self._thread.is_alive():
            names = ", ".join(each.logger.name for each in self._loggers)
            _warn(f"{names}: not everything is logged after {PATIENCE_S:g} s. The run ends without the rest")
        self._tell()

    def _begin(self) -> None:
        if self._loggers and self._thread is None and self._membership.is_main:
            self._thread = threading.Thread(target=self._live, name="unisono-loggers", daemon=True)
            self._thread.start()

    def _tell(self) -> None:
        for each in self._loggers:
            if each.failed and each.logger.name not in self._told:
                self._told.add(each.logger.name)
                _warn(
                    f"{each.logger.name} logs no more: {each.failed}. The run goes on, and metrics.jsonl has all of it"
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
            for each in self._loggers:
                each.failed = each.failed or why_of(error)
        finally:
            self._committed.close()
            for each in self._loggers:
                each.close()

    def _look(self) -> None:
        if not self._is_ours():
            return
        again = [self._again.popleft() for _ in range(len(self._again))]
        if again or self._committed.is_another():
            count = min(self._committed.open(), *again, LATEST)
            for each in self._loggers:
                each.open(count)
        for steps in self._committed.read():
            for each in self._loggers:
                each.take(steps)

    def _finish(self) -> None:
        last = self._committed.last()
        if self._is_ours() and not self._is_preempted:
            for each in self._loggers:
                each.take_last(last)

    def _is_ours(self) -> bool:
        return self._folder.writer is None or self._folder.writer.is_ours()


def _warn(text: str) -> None:
    warnings.warn(text, UnisonoWarning, stacklevel=3)
