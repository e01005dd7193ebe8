"""What loggers get when steps are dropped from metrics.jsonl, and are computed again."""

from __future__ import annotations

import csv
import math
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import pytest

from unisono.checkpoint.folder import RunFolder
from unisono.checkpoint.writer import Writer, WriterOrder
from unisono.errors import UnisonoWarning
from unisono.loggers.by_name import CSVLogger, newest_step
from unisono.loggers.logger import LoggedRun, Logger
from unisono.train.record.log_follower import LogFollower

pytestmark = pytest.mark.unit

PATIENCE_S = 20.0


class Main:
    """The place of a worker, which is the main one."""

    is_main = True


class Kept(Logger):
    """Cannot forget a step."""

    def __init__(self) -> None:
        self.steps: list[tuple[int, float]] = []
        self._first = 0

    def open(self, run: LoggedRun) -> int:
        return self._first

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.steps.append((step, values["loss"]))
        self._first = step + 1


Follow = Callable[..., LogFollower]


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[RunFolder]:
    folder = RunFolder(tmp_path)
    yield folder
    folder.close()


@pytest.fixture
def follow(folder: RunFolder) -> Iterator[Follow]:
    followers: list[LogFollower] = []

    def begin(*loggers: Logger) -> LogFollower:
        followers.append(follower := LogFollower(folder, cast("Any", Main()), {}, loggers, 0.001))
        follower.renewed()
        return follower

    yield begin
    for each in followers:
        each.close()


def write(folder: RunFolder, steps: range, loss: float) -> None:
    for step in steps:
        folder.metrics.write({"step": step, "epoch": 0, "loss": loss, "seconds": {"total": 0.5}, "none": None})


def rows(folder: RunFolder) -> list[tuple[int, float]]:
    path = folder.path / "metrics.csv"
    with path.open(newline="", encoding="utf-8") as file:
        return [(int(row["step"]), float(row["loss"])) for row in csv.DictReader(file)]


def until(is_so: Callable[[], bool]) -> None:
    begun = time.monotonic()
    while not is_so():
        assert time.monotonic() - begun < PATIENCE_S
        time.sleep(0.001)


def test_steps_that_are_computed_again_replace_those_that_can_be_forgotten(folder: RunFolder, follow: Follow) -> None:
    kept = Kept()
    write(folder, range(5), 1.0)
    follower = follow(CSVLogger(), kept)
    until(lambda: len(kept.steps) == 5)
    folder.metrics.truncate_after(2)
    write(folder, range(3, 8), 2.0)
    follower.went_back(5, 3, cast("Any", None))
    follower.close()
    assert rows(folder) == [(0, 1.0), (1, 1.0), (2, 1.0), *((step, 2.0) for step in range(3, 8))]
    assert kept.steps == [*((step, 1.0) for step in range(5)), *((step, 2.0) for step in range(5, 8))]


def test_a_table_whose_last_row_is_torn_goes_on_behind_the_whole_ones(folder: RunFolder, follow: Follow) -> None:
    write(folder, range(4), 1.0)
    follow(CSVLogger()).close()
    path = folder.path / "metrics.csv"
    path.write_text(path.read_text()[:-4])
    write(folder, range(4, 6), 1.0)
    follow(CSVLogger()).close()
    assert rows(folder) == [(step, 1.0) for step in range(6)]


def test_a_worker_that_was_cut_off_gives_its_loggers_nothing(folder: RunFolder, follow: Follow) -> None:
    kept, away = Kept(), ["no word from the coordinator"]
    folder.written_by(Writer(folder.path, lambda: WriterOrder(1, 1), lambda: away[0]))
    RunFolder(folder.path).metrics.write({"step": 0, "epoch": 0, "loss": 1.0})  # by the worker that took its place
    follower = follow(kept)
    follower.close()
    assert kept.steps == []
    away[0] = ""
    Writer(folder.path, lambda: WriterOrder(1, 2)).obstacle()
    follow(kept).close()
    assert kept.steps == []


class Stuck(Kept):
    """Cannot be opened."""

    def open(self, run: LoggedRun) -> int:
        raise SystemExit("no licence")


def test_a_logger_that_ends_the_program_ends_its_logging_alone(folder: RunFolder, follow: Follow) -> None:
    write(folder, range(2), 1.0)
    follower = follow(Stuck(), CSVLogger())
    with pytest.warns(UnisonoWarning, match="Stuck logs no more: SystemExit: no licence"):
        follower.close()
    assert rows(folder) == [(0, 1.0), (1, 1.0)]


class Strict(Kept):
    """Takes decimal numbers, as TensorBoard and others do."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        assert all(math.isfinite(value) for value in values.values())
        super().log(step, values)


def test_figures_that_are_no_numbers_and_names_that_are_no_text_end_no_logger(
    folder: RunFolder, follow: Follow
) -> None:
    strict = Strict()
    odd = {"huge": 10**400, "small": -(10**400), "half \ud800": 1.0, "a\nb": 1.0, 'say "x",': 1.0, "": 1.0}
    folder.metrics.write({"step": 0, "epoch": 0, "loss": 1.0, **odd})
    with (folder.path / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 1, "epoch": 0, "loss": 1.0, "nan": NaN, "endless": -Infinity, "half \\ud800": 1.0}\n')
        file.write(b'\xff\xfe\n{"step": "2", "loss": 1.0}\n[2]\n{"step": 2, "loss": ')
    folder.metrics.close()  # another worker begins where that one was killed
    write(folder, range(2, 3), 1.0)
    for _ in range(2):  # the second goes on in the file of the first
        follow(strict, CSVLogger()).close()
    assert [step for step, _ in strict.steps] == [0, 1, 2]
    assert rows(folder) == [(0, 1.0), (1, 1.0), (2, 1.0)]


@pytest.mark.parametrize("data", [b"", b":W&B\xe1\xbe\x00", b"\x00" * 100_000, b"\xff" * 100_000])
def test_a_damaged_file_of_weights_and_biases_has_no_steps(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "offline-run-1-abc").mkdir()
    (tmp_path / "offline-run-1-abc" / "run-abc.wandb").write_bytes(data)
    assert newest_step(tmp_path, "abc") == -1
