"""Measuring: runs that are missing are run, one after the other, and what came of them is read."""

from __future__ import annotations

import hashlib
import platform
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.machinery import PathFinder
from importlib.metadata import version
from pathlib import Path
from statistics import median
from time import monotonic
from typing import Any

import psutil

from unisono.errors import JobError
from unisono.host.cgroup import processor
from unisono_lab.analysis.estimate import listed
from unisono_lab.analysis.results import FORMULA_WORDS, FORMULAS, Cell, Mode
from unisono_lab.analysis.study_folder import Kind, PlannedCell, StudyFolder, kinds_of, modes_of, planned
from unisono_lab.measure.measured_run import MeasuredRun, measured_run, plain_run

# The machine that a study is measured on, for those who read its figures.


def surroundings(cores: int) -> dict[str, Any]:
    """What figures depend on besides the script, by name.

    Args:
        cores: the number of cores that this process may use.
    """
    return {
        "system": f"{platform.system()} {platform.release()}",
        "machine": platform.machine(),
        "processor": processor(),
        "cores": cores,
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "python": platform.python_version(),
        "torch": version("torch"),
        "unisono": version("unisono"),
    }


# What a scaling study is to measure, as a value.

WARMUP_STEPS = 5
RATE_WARMUP_STEPS = 100
OWN = ("UNISONO_STOP_AFTER", "UNISONO_STOP_AFTER_EPOCHS", "UNISONO_BATCH_SCALE")
"""Variables that are a study's alone to set."""

RATE_WARMUP_SHARE = 5
"""The learning rate grows over a fifth of the steps at most."""

DECIDING = (
    "STRATEGY",
    "TRANSPORT",
    "TOPOLOGY",
    "OVERLAP",
    "VERIFY_EVERY",
    "CHECKS",
    "AUDIT",
    "MONITOR_EVERY",
    "CHECKPOINT_EVERY",
)
ADDING = ("POLICIES", "PLUGINS", "BATCH_SIZE", "BATCH_SCALE_WARMUP")
"""Variables that change how long a step takes, or what it computes, behind ``UNISONO_``."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """The settings of a study's measurements.

    Attributes:
        script: the user's script with its arguments, as Python takes them: ``train.py --lr 0.1`` or ``-m
            package.train``.
        workers: the numbers of workers to measure.
        modes: ``strong`` keeps the batch, ``weak`` multiplies it by the workers.
        repeats: the number of repeats of each cell.
        steps: the number of steps after which a run is cut short; None for no limit.
        epochs: the number of epochs after which a run is cut short; None for no limit.
        baseline: the plain loop with its arguments; empty without.
        baseline_workers: the numbers of workers whose threads the plain loop gets, one number after the other.
        shards: the job's number of shards, if set here.
        threads: the threads of each worker, if set here.
        warmup_steps: the number of steps that are left out of all figures.
        seed: the seed of the order of the runs.
        label: a name for what is measured, for comparisons.
        tuned: whether the launcher sets the workers' memory allocator.
    """

    script: tuple[str, ...]
    workers: tuple[int, ...]
    modes: tuple[Mode, ...] = ("strong",)
    repeats: int = 5
    steps: int | None = None
    epochs: int | None = None
    baseline: tuple[str, ...] = ()
    baseline_workers: tuple[int, ...] = (1,)
    shards: int | None = None
    threads: int | None = None
    warmup_steps: int = WARMUP_STEPS
    seed: int = 0
    label: str = ""
    tuned: bool = True

    def check(self) -> None:
        """Refuse what cannot work, before anything is started.

        Raises:
            JobError: a number is out of range; names it.
        """
        if self.label.startswith(FORMULAS):
            raise JobError(f"--label {self.label}: {FORMULA_WORDS}; give it another")
        listed = ",".join(map(str, self.workers))
        if not self.workers or min(self.workers) < 1 or len(set(self.workers)) < len(self.workers):
            raise JobError(f"--workers {listed}: each number once, from 1")
        for name in ("repeats", "steps", "epochs"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise JobError(f"--{name} {value}: at least 1 is needed")
        if self.steps is not None and self.epochs is not None:
            raise JobError(f"--steps {self.steps} --epochs {self.epochs}: use one of the two")
        if self.warmup_steps < 0:
            raise JobError(f"--warmup {self.warmup_steps}: a number of steps, from 0")
        if self.steps is not None and self.steps <= self.warmup_steps:
            raise JobError(
                f"--steps {self.steps}: the first {self.warmup_steps} are left out (--warmup), so there is nothing to "
                f"time; let a run take more"
            )

    @property
    def kinds(self) -> list[Kind]:
        """What there is to measure."""
        return kinds_of(self.workers, self.modes, self.baseline_workers if self.baseline else ())

    @property
    def cells(self) -> list[PlannedCell]:
        """The runs, in order."""
        return planned(self.kinds, self.repeats, self.seed)

    def plain_threads(self, kind: Kind) -> int:
        """Those of the plain loop: of so many workers together."""
        return kind.workers * (self.threads or 1)

    def variables(self, kind: Kind, environ: Mapping[str, str]) -> dict[str, str]:
        """What the workers of a run are told besides what the launcher tells them.

        Args:
            kind: the kind of run.
            environ: this process's.
        """
        found: dict[str, Any] = {"UNISONO_STUDY": 1, "UNISONO_TIMELINE": 1}
        found |= {} if self.steps is None else {"UNISONO_STOP_AFTER": self.steps}
        found |= {} if self.epochs is None else {"UNISONO_STOP_AFTER_EPOCHS": self.epochs}
        if kind.factor > 1:
            found["UNISONO_BATCH_SCALE"] = kind.factor
            if not environ.get("UNISONO_BATCH_SCALE_WARMUP"):
                found["UNISONO_BATCH_SCALE_WARMUP"] = self.rate_warmup_steps
        found |= {name: "" for name in OWN if environ.get(name) and name not in found}
        return {name: str(value) for name, value in found.items()}

    @property
    def rate_warmup_steps(self) -> int:
        """Steps of the script's batch over whose samples the rate grows in weak scaling."""
        if self.steps is None:
            return RATE_WARMUP_STEPS
        return max(1, min(RATE_WARMUP_STEPS, self.steps // RATE_WARMUP_SHARE))

    def settings(self, environ: Mapping[str, str], cores: int) -> dict[str, Any]:
        """What figures of one study have in common: where it differs, they belong to another study.

        How many workers and repeats there are, in which order and what is left out decides none of them.

        Args:
            environ: this process's.
            cores: the number of cores that it may use.
        """
        names = [f"UNISONO_{name}" for name in (*DECIDING, *ADDING)]
        return {
            "script": list(self.script),
            "script's text": text_digest(self.script),
            "baseline": list(self.baseline),
            "baseline's text": text_digest(self.baseline),
            "steps": self.steps,
            "epochs": self.epochs,
            "shards": self.shards,
            "threads": self.threads,
            "tuning": self.tuned,
            "cores": cores,
            "python": ".".join(map(str, sys.version_info[:3])),
            "torch": version("torch"),
            "unisono": version("unisono"),
            **{name: environ[name] for name in names if environ.get(name)},
        }


def text_digest(script: Sequence[str]) -> str:
    """The sha256, in hex, of a script, or of all of the package that a module is in; nothing if there is none."""
    if not script:
        return ""
    files = [Path(script[0])] if script[0] != "-m" else _package(script[1].partition(".")[0])
    whole = hashlib.sha256()
    for file in files:
        if file.is_file():
            whole.update(hashlib.sha256(file.read_bytes()).digest())
    return whole.hexdigest()


def _package(name: str) -> list[Path]:
    # As for a launch: finding what is inside a package would import it here.
    found = PathFinder.find_spec(name, [str(Path.cwd()), *sys.path])
    folders = list(found.submodule_search_locations or ()) if found is not None else []
    if found is not None and not folders and found.origin is not None:
        return [Path(found.origin)]
    return sorted(file for folder in folders for file in Path(folder).rglob("*.py"))


# Measuring: runs that are missing are run, one after the other, and what came of them is read.


@dataclass(frozen=True, slots=True)
class RunEnd:
    """The end of a run.

    Attributes:
        exit_code: the launcher's exit code.
        words: an error message for people.
        log: the log of the worker that failed, as a path inside of the run folder.
        interrupted: the signal that was to end the study, if any.
        reason: the words without who it was; by default the words.
    """

    exit_code: int
    words: str = ""
    log: str = "logs"
    interrupted: int | None = None
    reason: str = ""


RunCell = Callable[[PlannedCell, Path], RunEnd]
"""Runs one, in this folder, to its end."""


@dataclass(frozen=True, slots=True)
class Missing:
    """A run of which there are no figures, and why.

    Attributes:
        cell: the planned cell.
        exit_code: its run's exit code; 1 if it ended well and nothing could be timed.
        words: an error message.
        log: the file or folder with more about it.
        reason: the words without who it was.
    """

    cell: PlannedCell
    exit_code: int
    words: str
    log: Path
    reason: str = ""


class Interrupted(KeyboardInterrupt):
    """Somebody wants the study to end, by the signal of this number; what is measured by now is kept."""


@dataclass(slots=True)
class Measured:
    """The measured runs of a study.

    Attributes:
        runs: the figures, by cell, in the order of measuring.
        missing: runs without.
        left_out: runs that were not tried any more.
    """

    runs: dict[PlannedCell, MeasuredRun] = field(default_factory=dict)
    missing: list[Missing] = field(default_factory=list)
    left_out: list[PlannedCell] = field(default_factory=list)

    def is_hopeless(self, kinds: Sequence[Kind]) -> bool:
        """Whether nothing could be measured, and runs of all these kinds, two at least, failed for one reason."""
        failed = {each.cell.kind for each in self.missing}
        repeats = len(self.missing) > 1 and len({each.reason for each in self.missing}) == 1
        return not self.runs and repeats and failed == set(kinds)


def measure(
    measurement: Measurement,
    folder: StudyFolder,
    run_cell: RunCell,
    tell: Callable[[str], None],
    *,
    keeps_going: bool = False,
) -> Measured:
    """Make the runs that a folder lacks, and read all of them.

    Args:
        measurement: the measurement to make, which was checked before.
        folder: the study's folder, opened.
        run_cell: a function that makes one run.
        tell: a function that is told of each run before it starts, and what came of it.
        keeps_going: whether to go on if every kind of run fails for the same reason.

    Raises:
        Interrupted: by a signal; what is measured by then is kept.
    """
    found = Measured()
    cells = measurement.cells
    for cell in cells:
        if folder.kept(cell) is not None:
            found.runs[cell] = _read(folder.run_of(cell), cell, measurement)
    to_do = [cell for cell in cells if cell not in found.runs]
    for number, cell in enumerate(to_do):
        place, begun = folder.begin(cell), monotonic()
        tell(f"run {len(cells) - len(to_do) + number + 1} of {len(cells)}: {cell}")
        end = run_cell(cell, place)
        if end.interrupted is not None:
            folder.drop(cell)
            raise Interrupted(end.interrupted)
        try:
            if end.exit_code:
                raise JobError(end.words)
            found.runs[cell] = _read(place, cell, measurement)
        except JobError as error:
            log = folder.fail(cell) / end.log
            missing = Missing(cell, end.exit_code or 1, str(error), log, end.reason or str(error))
            found.missing.append(missing)
            tell(f"{cell}: FAILED: {missing.words} (log: {log})")
            if not keeps_going and found.is_hopeless(measurement.kinds):
                found.left_out = to_do[number + 1 :]
                break
        else:
            seconds = monotonic() - begun
            folder.keep(cell, {"mode": cell.kind.mode, "workers": cell.kind.workers, "seconds": round(seconds, 3)})
            tell(f"{cell}: {found.runs[cell].samples / found.runs[cell].seconds:.4g} samples/s")
    found.runs = {cell: found.runs[cell] for cell in cells if cell in found.runs}
    return found


def rows(measurement: Measurement, measured: Measured, cores: int) -> list[Cell]:
    """The figures as rows of results, in the order of measuring.

    Args:
        measurement: the measurement that they belong to.
        measured: the figures.
        cores: the number of cores of this machine.
    """
    shown = {cell: modes_of(cell.kind, measurement.modes) for cell in measurement.cells}
    trained: dict[Mode, list[int]] = defaultdict(list)
    for cell, run in measured.runs.items():
        for mode in shown[cell]:
            trained[mode].append(run.trained)
    missing = {each.cell: each for each in measured.missing}
    found: list[Cell] = []
    for cell, modes in shown.items():
        for mode in modes:
            if (workers := _stands_for(cell.kind, measurement, measured)) is None:
                continue
            common: dict[str, Any] = {"label": measurement.label, "mode": mode, "workers": workers}
            common |= {"repeat": cell.repeat}
            if cell in measured.runs:
                # What is compared is compared after the samples that all of them have seen.
                found.append(Cell(**common, **_figures(measured.runs[cell], min(trained[mode]), cores)))
            elif cell in missing:
                found.append(Cell(**common, samples=0, seconds=0, exit_code=missing[cell].exit_code))
    return found


def shown_settings(measurement: Measurement, measured: Measured) -> dict[str, Any]:
    """What readers of the figures should know of how they were measured, by name."""
    runs = list(measured.runs.values())
    return {
        "workers": list(measurement.workers),
        "modes": list(measurement.modes),
        "repeats": measurement.repeats,
        "steps": measurement.steps,
        "epochs": measurement.epochs,
        "warmup_steps": measurement.warmup_steps,
        "threads": max((run.threads for run in runs), default=measurement.threads or 1),
        "shards": min((run.shards for run in runs if run.shards), default=measurement.shards),
        "epoch_samples": next((run.epoch_samples for run in runs if run.epoch_samples), None),
        "gradient_bytes": next((run.gradient_bytes for run in runs if run.gradient_bytes), None),
        "seed": measurement.seed,
    }


def network(measured: Measured) -> dict[str, float]:
    """Latency, in seconds, and bandwidth, in bytes per second, of the reduction between the fewest workers: medians."""
    found = [(cell.kind.workers, run.reduction) for cell, run in measured.runs.items() if run.reduction is not None]
    fewest = min((workers for workers, _ in found), default=0)
    among = [reduction for workers, reduction in found if workers == fewest]
    return {name: median(each[name] for each in among) for name in among[0]} if among else {}


def notes(measurement: Measurement, measured: Measured) -> list[str]:
    """What to know of how figures were measured, in sentences."""
    found = [
        f"Steps are timed without a run's first {measurement.warmup_steps}, and without its first epoch where a whole "
        f"one comes after it; evaluation and whatever else stands between steps is not timed."
    ]
    if measurement.steps is not None or measurement.epochs is not None:
        limit = f"{measurement.steps} steps" if measurement.steps is not None else f"{measurement.epochs} epochs"
        found.append(f"Runs were cut short after {limit}.")
    if "weak" in measurement.modes:
        found.append(
            f"In weak scaling the learning rate grew to its multiple over the samples that one worker trains on in "
            f"{measurement.rate_warmup_steps} steps, unless UNISONO_BATCH_SCALE_WARMUP said otherwise."
        )
    unlike = [kind for kind in measurement.kinds if _stands_for(kind, measurement, measured) != kind.workers]
    if unlike:
        threads = listed([str(number) for number in sorted(_worker_threads(measured))])
        found.append(
            f"The script sets threads={threads} itself: a plain loop stands beside the workers that really have as "
            f"many threads, and those that no workers have are left out. Give the same number as --threads."
        )
    return found


def _worker_threads(measured: Measured) -> set[int]:
    return {run.threads for cell, run in measured.runs.items() if cell.kind.mode != "baseline"}


def _stands_for(kind: Kind, measurement: Measurement, measured: Measured) -> int | None:
    """For how many workers a kind has threads: a script's own setting goes before --threads. None for no number."""
    if kind.mode != "baseline":
        return kind.workers
    each = _worker_threads(measured) or {measurement.threads or 1}
    workers, rest = divmod(measurement.plain_threads(kind), max(each))
    return None if rest or len(each) > 1 else workers


def _read(place: Path, cell: PlannedCell, measurement: Measurement) -> MeasuredRun:
    if cell.kind.mode == "baseline":
        return plain_run(place / "logs" / "rank-0.log")
    return measured_run(place, measurement.warmup_steps)


def _figures(run: MeasuredRun, trained: int, cores: int) -> dict[str, Any]:
    parts = {} if run.times is None else {name: max(value, 0.0) for name, value in run.times.items()}
    alike = {name: getattr(run, name) for name in Cell.model_fields if hasattr(run, name)}
    return {**alike, **parts, "loss": run.loss_at(trained), "oversubscribed": run.is_oversubscribed(cores)}
