"""The summary of repeated runs: a row for each number of workers, with intervals."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from unisono_lab.analysis.estimate import Estimate, median, ratio
from unisono_lab.analysis.results import Cell, Mode, Results

T = TypeVar("T")

PARTS: Mapping[str, str] = {
    "data_s": "data",
    "compute_s": "compute",
    "exposed_s": "exposed communication",
    "wait_s": "waiting for the slowest",
    "update_s": "update",
}
"""Of a step: the field, and what it is called."""

SCALING: tuple[Mode, ...] = ("strong", "weak")


@dataclass(frozen=True, slots=True)
class Row:
    """A number of workers, of one label and one mode.

    All ratios are of medians. Speedup is T(1)/T(W) for the same samples, which is the ratio of the throughputs; in weak
    scaling it is the scaled speedup.

    Attributes:
        label: the name of what was measured.
        mode: strong, weak or baseline.
        workers: the number of workers.
        cells: the measurements that count.
        rates: samples per second of each run, or of each epoch where there is but one run.
        repeats: the numbers of the runs; none if these are epochs.
        samples_per_s: the throughput, in samples per second.
        epoch_s: seconds of an epoch.
        speedup: the speedup over one worker; None if that was not measured, or if workers shared cores.
        over_baseline: the throughput as a multiple of that of the plain loop with one worker's threads; None as above.
        over_equal: the throughput as a multiple of that of the plain loop with as many threads as all workers have
            together.
    """

    label: str
    mode: Mode
    workers: int
    cells: Sequence[Cell]
    rates: Sequence[float]
    repeats: Sequence[int]
    samples_per_s: Estimate
    epoch_s: Estimate | None
    speedup: Estimate | None = None
    over_baseline: Estimate | None = None
    over_equal: Estimate | None = None

    @property
    def oversubscribed(self) -> bool:
        """Whether there were more workers than cores: then no figure says anything about scaling."""
        return any(cell.oversubscribed for cell in self.cells)

    @property
    def efficiency(self) -> Estimate | None:
        """Speedup per worker."""
        return None if self.speedup is None else self.speedup.mapped(lambda speedup: speedup / self.workers)

    @property
    def serial_share(self) -> Estimate | None:
        """What share of the work behaves as if it were serial: (1/S - 1/W) / (1 - 1/W) (Karp and Flatt, CACM 1990)."""
        if self.speedup is None or self.workers == 1:
            return None
        share = 1 / self.workers
        return self.speedup.mapped(lambda speedup: (1 / speedup - share) / (1 - share))

    @property
    def batch_size(self) -> int | None:
        """Samples in a global batch, if all runs had the same."""
        return _only({cell.batch_size for cell in self.cells})

    @property
    def learning_rate(self) -> float | None:
        """The learning rate, if all runs had the same."""
        return _only({cell.learning_rate for cell in self.cells})

    @property
    def step_s(self) -> float | None:
        """Median seconds of a step."""
        found = self._known("step_s")
        if found is None and self.batch_size:
            return self.batch_size / self.samples_per_s.value
        return found

    @property
    def peak_memory_mib(self) -> float | None:
        """The most that a worker needed."""
        return max((cell.peak_memory_mib for cell in self.cells if cell.peak_memory_mib is not None), default=None)

    @property
    def loss(self) -> float | None:
        """Median loss after the same samples."""
        return self._known("loss")

    @property
    def accuracy(self) -> float | None:
        """Median accuracy after the same samples."""
        return self._known("accuracy")

    @property
    def digests(self) -> set[str]:
        """Of the weights; one if all runs ended with the same bits."""
        return {cell.digest for cell in self.cells if cell.digest}

    @property
    def parts(self) -> dict[str, float] | None:
        """Median seconds of each part of a step; None unless data, compute or communication was measured."""
        found = {field: value for field in PARTS if (value := self._known(field)) is not None}
        return found or None

    def _known(self, field: str) -> float | None:
        values = [value for cell in self.cells if (value := getattr(cell, field)) is not None]
        return statistics.median(values) if values else None


@dataclass(frozen=True, slots=True)
class Summary:
    """All rows of a study.

    Attributes:
        rows: the rows of strong or of weak scaling, by label and workers.
        baselines: the plain loops, by label; each with the threads of one worker or of more, fewest first.
    """

    rows: Mapping[Mode, Sequence[Row]]
    baselines: Mapping[str, Sequence[Row]]

    def plain(self, label: str) -> Sequence[Row]:
        """The plain loops to compare with: of this label, or of none."""
        return self.baselines.get(label) or self.baselines.get("") or ()

    def of(self, mode: Mode, label: str) -> list[Row]:
        """The rows of one curve, fewest workers first."""
        return [row for row in self.rows.get(mode, ()) if row.label == label]

    def curves(self) -> Iterable[tuple[Mode, str, list[Row]]]:
        """All of them."""
        for mode in self.rows:
            for label in dict.fromkeys(row.label for row in self.rows[mode]):
                yield mode, label, self.of(mode, label)


def summarized(results: Results) -> Summary:
    """Median, interval, speedup and efficiency of all that was measured.

    The first epoch of a run is left out where it has later ones. Where several runs were made they are what is drawn
    again for the intervals, and where there is one, its epochs.
    """
    succeeded = [cell for cell in results.cells if cell.succeeded]
    groups: dict[tuple[Mode, str, int], list[Cell]] = {}
    for cell in _later_epochs(succeeded):
        groups.setdefault((cell.mode, cell.label, cell.workers), []).append(cell)
    labels = list(dict.fromkeys(cell.label for cell in succeeded))
    samples = {label: results.figure("epoch_samples", label) or None for label in labels}

    def curve(mode: Mode, label: str) -> list[Row]:
        found = sorted(workers for one, other, workers in groups if (one, other) == (mode, label))
        return [_row(groups[mode, label, workers], samples[label]) for workers in found]

    summary = Summary({}, {label: found for label in labels if (found := curve("baseline", label))})
    rows = {
        mode: [row for label in labels for row in _related(curve(mode, label), summary.plain(label))]
        for mode in SCALING
    }
    return replace(summary, rows={mode: found for mode, found in rows.items() if found})


def _later_epochs(cells: Sequence[Cell]) -> list[Cell]:
    """Without the first epoch of each run that has others."""
    later = {_run(cell) for cell in cells if cell.epoch is not None and cell.epoch > 1}
    return [cell for cell in cells if cell.epoch != 1 or _run(cell) not in later]


def _run(cell: Cell) -> tuple[str, Mode, int, int]:
    return cell.label, cell.mode, cell.workers, cell.repeat


def _row(cells: Sequence[Cell], epoch_samples: float | None) -> Row:
    runs: dict[int, list[Cell]] = {}
    for cell in cells:
        runs.setdefault(cell.repeat, []).append(cell)
    several = len(runs) > 1
    units = list(runs.values()) if several else [[cell] for cell in cells]
    rates = [statistics.median(cell.samples_per_s for cell in unit) for unit in units]
    epochs = [_epoch_s(unit, rate, epoch_samples) for unit, rate in zip(units, rates, strict=True)]
    known = [seconds for seconds in epochs if seconds is not None]
    return Row(
        label=cells[0].label,
        mode=cells[0].mode,
        workers=cells[0].workers,
        cells=cells,
        rates=rates,
        repeats=list(runs) if several else [],
        samples_per_s=median(rates),
        epoch_s=median(known) if known else None,
    )


def _epoch_s(unit: Sequence[Cell], rate: float, epoch_samples: float | None) -> float | None:
    """Of one run: as it was measured, or as its throughput makes it."""
    found = [cell.epoch_s for cell in unit if cell.epoch_s is not None]
    if found:
        return statistics.median(found)
    return None if epoch_samples is None else epoch_samples / rate


def _related(curve: Sequence[Row], plain: Sequence[Row]) -> list[Row]:
    """With the ratios to one worker and to the plain loops."""
    alone = _with_workers(curve, 1)
    return [
        row
        if row.oversubscribed
        else replace(
            row,
            speedup=_times(row, alone),
            over_baseline=_times(row, _with_workers(plain, 1)),
            over_equal=_times(row, _with_workers(plain, row.workers)),
        )
        for row in curve
    ]


def _with_workers(rows: Sequence[Row], workers: int) -> Row | None:
    return next((row for row in rows if row.workers == workers), None)


def _times(row: Row, reference: Row | None) -> Estimate | None:
    if reference is None or reference.oversubscribed:
        return None
    if row is reference:
        return Estimate(1.0)
    paired = bool(row.repeats) and sorted(row.repeats) == sorted(reference.repeats)
    return ratio(_in_order(row), _in_order(reference), paired=paired)


def _in_order(row: Row) -> list[float]:
    """Its rates by the number of the repeat."""
    if not row.repeats:
        return list(row.rates)
    return [rate for _, rate in sorted(zip(row.repeats, row.rates, strict=True))]


def _only(found: set[T | None]) -> T | None:
    return next(iter(found)) if len(found) == 1 else None
