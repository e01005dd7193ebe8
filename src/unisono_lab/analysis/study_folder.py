"""The folder of a scaling study: what was measured in it stays, whatever ends the study."""

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
from unisono_lab.analysis.batch_curve import FAILED_NAME
from unisono_lab.analysis.batch_curve import NAME as BATCHES_NAME
from unisono_lab.analysis.results import SETTINGS_NAME, Mode

# The cells of a scaling study: which runs it is made of, and in which order.


@dataclass(frozen=True, slots=True, order=True)
class Kind:
    """The mode and the number of workers of runs that are repeated.

    Attributes:
        mode: ``strong``, ``weak``, or ``baseline`` for the plain loop.
        workers: the number of workers. The plain loop is one process; it has the threads of so many workers.
    """

    mode: Mode
    workers: int

    def __str__(self) -> str:
        if self.mode == "baseline":
            return "baseline" + (f" with the threads of {self.workers} workers" if self.workers > 1 else "")
        return f"{self.mode}, {self.workers} worker{'s' if self.workers > 1 else ''}"

    @property
    def factor(self) -> int:
        """By which the script's batch is multiplied."""
        return self.workers if self.mode == "weak" else 1


@dataclass(frozen=True, slots=True, order=True)
class PlannedCell:
    """A planned run of a study.

    Attributes:
        kind: the kind of run.
        repeat: the number of the repeat, from 0.
    """

    kind: Kind
    repeat: int

    def __str__(self) -> str:
        return f"{self.kind}, repeat {self.repeat + 1}"

    @property
    def name(self) -> str:
        """Of its folder."""
        return f"{self.kind.mode}-{self.kind.workers}-{self.repeat}"


def kinds_of(workers: Sequence[int], modes: Sequence[Mode], baselines: Sequence[int] = ()) -> list[Kind]:
    """What a study measures. One worker is strong and weak scaling's beginning alike, and is measured once for both.

    Args:
        workers: the number of workers that train together.
        modes: strong, weak or both.
        baselines: the plain loop, with the threads of so many workers.
    """
    found = [Kind("baseline", number) for number in baselines]
    for mode in modes:
        shared = "strong" in modes and mode == "weak"
        found += [Kind(mode, number) for number in workers if not (shared and number == 1)]
    return found


def modes_of(kind: Kind, modes: Sequence[Mode]) -> list[Mode]:
    """The tables that a kind's figures belong to."""
    if kind.mode == "strong" and kind.workers == 1:
        return list(modes)
    return [kind.mode]


def planned(kinds: Sequence[Kind], repeats: int, seed: int) -> list[PlannedCell]:
    """All cells, interleaved: every kind once, in random order, then every kind again, in another.

    What changes slowly on a machine (its temperature, its neighbours) then meets all kinds alike: Hoefler and Belli,
    SC 2015.
    """
    # The order of one repeat follows from its own number, so that more of them leave those before as they were.
    cells: list[PlannedCell] = []
    for repeat in range(repeats):
        order = sorted(kinds)
        random.Random(f"{seed}/{repeat}").shuffle(order)  # noqa: S311 (no secret)
        cells += [PlannedCell(kind, repeat) for kind in order]
    return cells


ABOUT_NAME = "cell.json"


class StudyFolder:
    """``study.json``, and in ``cells/`` a folder for each run that is over.

    A run is measured in a folder with a dot before its name, which is renamed when everything of it is there. So what
    has its own name is whole, and is never measured again.

    Args:
        path: the folder's path.
    """

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self._cells = self.path / "cells"

    @contextmanager
    def opened(self, settings: Mapping[str, Any]) -> Iterator[None]:
        """Nobody else measures in this folder meanwhile.

        Args:
            settings: the settings that decide what is measured. Those of figures that are in the folder already must
                be equal.

        Raises:
            JobError: they are not, somebody else does, or the folder cannot be used; says what to do.
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
        """What was kept about a run that is over; None if it is yet to be measured."""
        with suppress(OSError, ValueError):
            return read_object(self._place(cell) / ABOUT_NAME)
        return None

    def run_of(self, cell: PlannedCell) -> Path:
        """The run folder of a run that is over."""
        return self._place(cell) / "run"

    def begin(self, cell: PlannedCell) -> Path:
        """An empty run folder to measure in."""
        self._drop(self._beside(cell))
        place = self._beside(cell) / "run"
        place.mkdir(parents=True)
        return place

    def keep(self, cell: PlannedCell, about: Mapping[str, Any]) -> None:
        """A run is over, and its figures are whole. Its checkpoints go: nobody will resume it."""
        beside = self._beside(cell)
        shutil.rmtree(RunFolder(beside / "run").checkpoints, ignore_errors=True)
        write_json(beside / ABOUT_NAME, about)
        self._drop(self._place(cell))
        self._drop(self._failed(cell))
        os.replace(beside, self._place(cell))  # noqa: PTH105 (what the promise rests on)

    def fail(self, cell: PlannedCell) -> Path:
        """A run failed; returns where its logs stay until it is measured again."""
        self._drop(self._failed(cell))
        return self._beside(cell).rename(self._failed(cell)) / "run"

    def drop(self, cell: PlannedCell) -> None:
        """A run was interrupted: nothing of it counts."""
        self._drop(self._beside(cell))

    def _place(self, cell: PlannedCell) -> Path:
        return self._cells / cell.name

    def _beside(self, cell: PlannedCell) -> Path:
        return self._cells / f".{cell.name}"

    def _failed(self, cell: PlannedCell) -> Path:
        return self._cells / f"{cell.name}.failed"

    def _drop(self, place: Path) -> None:
        if place.exists():
            shutil.rmtree(place)

    def _require_own(self) -> None:
        if not self.path.exists() or (self.path / SETTINGS_NAME).exists():
            return
        own = (".lock", "cells", BATCHES_NAME, FAILED_NAME)  # the search for the largest batch may have come first
        others = sorted(one.name for one in self.path.iterdir() if one.name not in own)
        if others:
            raise JobError(f"{self.path} is no study's folder: it holds {others[0]}; name another with --out")

    def _lock(self, lock: int) -> None:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise JobError(f"another study measures in {self.path} just now: wait for it, or use --out") from None
        except OSError:  # not every network file system has locks
            return

    def _agree(self, settings: Mapping[str, Any]) -> None:
        path = self.path / SETTINGS_NAME
        try:
            theirs = read_object(path)
        except FileNotFoundError:
            write_json(path, settings)
            return
        except (OSError, ValueError) as error:
            raise JobError(f"{path} cannot be read: {error}; use another folder with --out") from error
        ours = parse_object(json.dumps(settings))
        if changed := differences(ours, theirs):
            raise JobError(
                f"{self.path} holds figures of another study (here: this one, there: the folder's): "
                f"{'; '.join(changed)}. Measure anew with another --out, or remove the folder"
            )
