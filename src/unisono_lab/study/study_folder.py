"""The folder of a scaling study, which keeps finished measurements however the study ends."""

from __future__ import annotations

import fcntl
import json
import os
import random
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unisono.checkpoint.folder import RunFolder, write_json
from unisono.errors import JobError
from unisono.job import differences
from unisono.received import parse_object, read_object
from unisono_lab.study.results import BATCHES_NAME, FAILED_NAME, SETTINGS_NAME, Mode

# The cells of a scaling study: its runs, and their order.


@dataclass(frozen=True, slots=True, order=True)
class Kind:
    """The mode and the number of workers that repeated runs share.

    Attributes:
        mode: ``strong``, ``weak``, or ``baseline`` for the plain loop.
        workers: the number of workers. The plain loop is one process with as many threads as they have together.
    """

    mode: Mode
    workers: int

    def __str__(self) -> str:
        if self.mode == "baseline":
            return "baseline" + (f" with the threads of {self.workers} workers" if self.workers > 1 else "")
        return f"{self.mode}, {self.workers} worker{'s' if self.workers > 1 else ''}"

    @property
    def factor(self) -> int:
        """The factor by which the script's batch is multiplied."""
        return self.workers if self.mode == "weak" else 1


@dataclass(frozen=True, slots=True, order=True)
class PlannedCell:
    """A planned run of a study; repeats are counted from 0."""

    kind: Kind
    repeat: int

    def __str__(self) -> str:
        return f"{self.kind}, repeat {self.repeat + 1}"

    @property
    def name(self) -> str:
        """The name of the run's folder in ``cells/``."""
        return f"{self.kind.mode}-{self.kind.workers}-{self.repeat}"


def kinds_of(workers: Sequence[int], modes: Sequence[Mode], baselines: Sequence[int] = ()) -> list[Kind]:
    """The kinds that a study measures. One worker is the same in strong and weak scaling, and is measured once.

    The plain loop gets the threads of as many workers as ``baselines`` say.
    """
    kinds = [Kind("baseline", number) for number in baselines]
    for mode in modes:
        shared = "strong" in modes and mode == "weak"
        kinds += [Kind(mode, number) for number in workers if not (shared and number == 1)]
    return kinds


def modes_of(kind: Kind, modes: Sequence[Mode]) -> list[Mode]:
    """The tables that a kind's figures belong to."""
    if kind.mode == "strong" and kind.workers == 1:
        return list(modes)
    return [kind.mode]


def planned(kinds: Sequence[Kind], repeats: int, seed: int) -> list[PlannedCell]:
    """All cells, interleaved: every kind once, in random order, then every kind again, in another.

    Slow changes of a host (its temperature, its other programs) then affect all kinds alike: Hoefler and Belli, SC
    2015.
    """
    # The order of a repeat depends on its own number alone, so that more repeats do not change the earlier ones.
    cells: list[PlannedCell] = []
    for repeat in range(repeats):
        order = sorted(kinds)
        random.Random(f"{seed}/{repeat}").shuffle(order)  # noqa: S311 (no secret)
        cells += [PlannedCell(kind, repeat) for kind in order]
    return cells


ABOUT_NAME = "cell.json"


class StudyFolder:
    """``study.json``, and in ``cells/`` a folder for each run that is over.

    A run is measured in a folder with a dot before its name, which is renamed when the run is complete. So a folder
    without the dot is complete, and its run is never measured again.
    """

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self._cells = self.path / "cells"

    @contextmanager
    def opened(self, settings: Mapping[str, Any]) -> Iterator[None]:
        """A context in which no other study measures in this folder; figures in it must have equal settings.

        Raises:
            JobError: the settings differ, another study measures here, or the folder cannot be used; the message says
                what to do.
        """
        try:
            self._require_own()
            self._cells.mkdir(parents=True, exist_ok=True)
            lock = os.open(self.path / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise JobError(f"the folder {self.path} cannot be used: {error}; name another with --out") from error
        try:
            self._lock(lock)
            self._agree(settings)
            for unfinished in self._cells.glob(".*"):
                shutil.rmtree(unfinished)
            yield
        finally:
            os.close(lock)

    def kept(self, cell: PlannedCell) -> dict[str, Any] | None:
        """The facts that were kept about a finished run; None if it is yet to be measured."""
        with suppress(OSError, ValueError):
            return read_object(self._cells / cell.name / ABOUT_NAME)
        return None

    def run_of(self, cell: PlannedCell) -> Path:
        """The run folder of a finished run."""
        return self._cells / cell.name / "run"

    def begin(self, cell: PlannedCell) -> Path:
        """An empty run folder to measure in."""
        self.drop(cell)
        run_folder = self._beside(cell) / "run"
        run_folder.mkdir(parents=True)
        return run_folder

    def keep(self, cell: PlannedCell, about: Mapping[str, Any]) -> None:
        """Keep a finished run, whose figures are complete. Its checkpoints are removed: it will not be resumed."""
        beside, kept = self._beside(cell), self._cells / cell.name
        shutil.rmtree(RunFolder(beside / "run").checkpoints, ignore_errors=True)
        write_json(beside / ABOUT_NAME, about)
        _remove(kept)
        _remove(self._failed(cell))
        os.replace(beside, kept)  # noqa: PTH105 (atomic: the folder is complete or not there)

    def fail(self, cell: PlannedCell) -> Path:
        """Move a failed run aside; returns the run folder, which stays until the run is measured again."""
        _remove(self._failed(cell))
        return self._beside(cell).rename(self._failed(cell)) / "run"

    def drop(self, cell: PlannedCell) -> None:
        """Remove the files of an interrupted run."""
        _remove(self._beside(cell))

    def _beside(self, cell: PlannedCell) -> Path:
        return self._cells / f".{cell.name}"

    def _failed(self, cell: PlannedCell) -> Path:
        return self._cells / f"{cell.name}.failed"

    def _require_own(self) -> None:
        if not self.path.exists() or (self.path / SETTINGS_NAME).exists():
            return
        own = (".lock", "cells", BATCHES_NAME, FAILED_NAME)  # the search for the largest batch may have come first
        foreign = sorted(entry.name for entry in self.path.iterdir() if entry.name not in own)
        if foreign:
            raise JobError(f"{self.path} is no study's folder: it holds {foreign[0]}; name another with --out")

    def _lock(self, lock: int) -> None:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise JobError(f"another study measures in {self.path} at the moment: wait for it, or use --out") from None
        except OSError:  # not every network file system has locks
            return

    def _agree(self, settings: Mapping[str, Any]) -> None:
        path = self.path / SETTINGS_NAME
        try:
            kept = read_object(path)
        except FileNotFoundError:
            write_json(path, settings)
            return
        except (OSError, ValueError) as error:
            raise JobError(f"{path} cannot be read: {error}; use another folder with --out") from error
        own_settings = parse_object(json.dumps(settings))
        if changed := differences(own_settings, kept):
            raise JobError(
                f"{self.path} holds figures of another study (here: this one, there: the folder's): "
                f"{'; '.join(changed)}. Use another --out, or remove the folder"
            )


def _remove(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)
