"""What portable numerics cost: operations and training steps beside those of native numerics, in turns."""

import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass

from benchmarks.noise import NoiseMeter
from benchmarks.programs.operations import OPERATIONS
from benchmarks.report import Grid, Report
from unisono.host.machine import PORTABLE, numerics_variables

LEVELS = ("native", "portable")

Times = Mapping[str, Mapping[str, list[float]]]
"""Processor seconds of each turn, by operation and level."""


@dataclass(frozen=True, slots=True)
class Choice:
    """How the benchmark is run.

    Attributes:
        names: of operations.
        turns: of each operation at each level.
    """

    names: tuple[str, ...] = tuple(OPERATIONS)
    turns: int = 15


class Level:
    """A process that computes at a level, when it is asked to."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def seconds(self, name: str) -> float:
        """The processor seconds of one turn of an operation."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{name}\n")
        self._process.stdin.flush()
        return float(self._process.stdout.readline())


@contextmanager
def level(name: str) -> Iterator[Level]:
    """One, as long as the block lasts."""
    kept = {key: value for key, value in os.environ.items() if key not in PORTABLE}
    environment = {**kept, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", **numerics_variables(name)}
    command = [sys.executable, "-m", "benchmarks.programs.operations", name]
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield Level(process)


def run(choice: Choice) -> Report:
    """Each operation on one and the other, turn after turn."""
    meter = NoiseMeter()
    meter.calibrate()
    with ExitStack() as opened:
        levels = {name: opened.enter_context(level(name)) for name in LEVELS}
        times = {name: {each: list[float]() for each in LEVELS} for name in choice.names}
        for turn in range(choice.turns + 1):  # of which the first warms up
            for name in choice.names:
                for each in LEVELS if turn % 2 else reversed(LEVELS):
                    took = levels[each].seconds(name)
                    times[name][each] += [took] if turn else []
    meter.calibrate()
    grid = Grid(
        f"Portable numerics beside native ones, one thread, medians of {choice.turns} turns, processor time",
        ("", "native", "portable", "portable / native"),
        list(rows(times)),
    )
    return Report("numerics", asdict(choice), meter.read(), [grid], {"seconds": times})


def rows(times: Times) -> Iterator[tuple[str, ...]]:
    """The table."""
    for name, of_level in times.items():
        native, portable = (statistics.median(of_level[each]) for each in LEVELS)
        ratio = statistics.median(b / a for a, b in zip(of_level["native"], of_level["portable"], strict=True))
        yield name, f"{native * 1000:.2f} ms", f"{portable * 1000:.2f} ms", f"{ratio:.2f}"
