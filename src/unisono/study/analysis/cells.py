"""The cells of a scaling study: which runs it is made of, and in which order."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from unisono.study.analysis.results import Mode


@dataclass(frozen=True, slots=True, order=True)
class Kind:
    """What is measured several times over.

    Attributes:
        mode: ``strong``, ``weak``, or ``baseline`` for the plain loop.
        workers: how many; of the plain loop, which is one process, those whose threads it has.
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
    """One run of a study.

    Attributes:
        kind: what is run.
        repeat: which time, from 0.
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
        workers: how many train together.
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


def seconds_left(cells: Iterable[PlannedCell], took: Mapping[Kind, Sequence[float]]) -> float | None:
    """How long cells will take: each as long as its kind so far, or as all kinds on average; None if nothing is known.

    Args:
        cells: that are left.
        took: seconds of those that are done.
    """
    means = {kind: sum(seconds) / len(seconds) for kind, seconds in took.items() if seconds}
    if not means:
        return None
    average = sum(means.values()) / len(means)
    return sum(means.get(cell.kind, average) for cell in cells)
