"""What takes the figures of a run's steps, one step after the other."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

from unisono.errors import JobError, Unreadable
from unisono.received import read_object

OF_EVERY_STEP = "epoch"
"""A figure that every step has. What is logged beside one that was not computed lacks it."""

BOOK = "loggers.json"
"""In the run folder: the notes of loggers, by name: how far they have come, and the ids of their runs elsewhere."""


@dataclass(frozen=True, slots=True)
class LoggedRun:
    """The run whose steps are to be logged, and how far it has come.

    Attributes:
        folder: the run folder.
        job: the settings of the job.
        steps: the number of steps that are committed: what was logged of later ones is computed again. 0 for a run that
            begins.
        logged: the number of steps that this logger has surely logged before, in this process or another one.
    """

    folder: Path
    job: Mapping[str, Any]
    steps: int
    logged: int


class Logger:
    """Takes the figures of committed steps. Called on a thread of its own, of the main worker alone.

    A run that resumes, or whose main worker is lost, opens its loggers again, in another process: they go on where they
    were. What a logger raises ends its logging, and nothing else.

    Attributes:
        packages: the modules that it needs, which are loaded when it is opened.
        extra: the extra of Unisono that installs them.
    """

    packages: ClassVar[tuple[str, ...]] = ()
    extra: ClassVar[str] = ""

    @property
    def name(self) -> str:
        """The name under which the run folder keeps how far it has come."""
        return type(self).__name__

    def open(self, run: LoggedRun) -> int:
        """Begin, or go on.

        Args:
            run: the run.

        Returns:
            the number of the first step to log. A logger that can forget the steps from ``run.steps`` on does so, and
            takes them again; one that cannot gets later ones only.
        """
        return run.logged

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Take the figures of a step, which come once, in the order of steps.

        Args:
            step: the number of the step, from 0.
            values: finite numbers by name, as in ``metrics.jsonl``; parts of ``seconds`` as ``seconds/total``.
        """
        raise NotImplementedError

    def flush(self) -> None:
        """Have all that was logged outlast this process."""

    def close(self) -> None:
        """Nothing more comes."""

    def require_packages(self) -> None:
        """Refuse to begin without the packages that it needs.

        Raises:
            JobError: one is not installed; says how to install it.
        """
        lacking = [name for name in self.packages if find_spec(name) is None]
        if lacking:
            raise JobError(
                f"loggers: {self.name} needs {', '.join(lacking)}, which is not installed: pip install "
                f"'unisono[{self.extra}]' (in a clone of Unisono: pip install -c constraints.txt '.[{self.extra}]')"
            )


def read_note(folder: Path, name: str) -> Any:
    """A note of a logger in the run folder; None if there is none, or it cannot be read."""
    try:
        return read_object(folder / BOOK).get(name)
    except (OSError, Unreadable):
        return None


def write_note(folder: Path, name: str, value: int | str) -> None:
    """Write a note, in one piece with the others.

    Raises:
        OSError: it cannot be written.
    """
    try:
        known = read_object(folder / BOOK)
    except (OSError, Unreadable):
        known = {}
    beside = folder / f".{BOOK}.new"
    beside.write_text(json.dumps({**known, name: value}, indent=2) + "\n")
    beside.replace(folder / BOOK)
