"""Measuring: missing runs are made one after the other, and their figures are read."""

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
from unisono.host.machine import processor
from unisono_lab.study.estimate import listed
from unisono_lab.study.measured_run import MeasuredRun, measured_run, plain_run
from unisono_lab.study.results import FORMULA_WORDS, FORMULAS, Cell, Mode
from unisono_lab.study.study_folder import Kind, PlannedCell, StudyFolder, kinds_of, modes_of, planned

# The host on which a study is measured.


def surroundings(cores: int) -> dict[str, Any]:
    """Facts of the host and its software on which the figures depend, by name."""
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


# The settings of the measurements, as a value.

WARMUP_STEPS = 5
RATE_WARMUP_STEPS = 100
STUDY_VARIABLES = ("UNISONO_STOP_AFTER", "UNISONO_STOP_AFTER_EPOCHS", "UNISONO_BATCH_SCALE")
"""Environment variables that only the study sets; those of the shell are cleared."""

RATE_WARMUP_SHARE = 5
"""The learning rate grows over at most the steps divided by this number."""

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
"""Environment variables, without ``UNISONO_``, that change the time of a step or what it computes."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """The settings of a study's measurements.

    Attributes:
        script: the user's script with its arguments, as Python takes them: ``train.py --lr 0.1`` or ``-m
            package.train``.
        modes: ``strong`` keeps the batch, ``weak`` multiplies it by the workers.
        steps: the number of steps after which a run is cut short; None for no limit.
        epochs: the number of epochs after which a run is cut short; None for no limit.
        baseline: the plain loop with its arguments; empty if there is none.
        baseline_workers: the numbers of workers whose threads the plain loop gets, one number after the other.
        shards: the job's number of shards, if set here.
        threads: the threads of each worker, if set here.
        warmup_steps: the number of steps that are left out of all figures.
        seed: the seed of the order of the runs.
        label: the name of the measurement in comparisons.
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
        """Refuse settings that cannot work, before anything is started.

        Raises:
            JobError: a setting is wrong; the message names it.
        """
        if self.label.startswith(FORMULAS):
            raise JobError(f"--label {self.label}: {FORMULA_WORDS}; use another label")
        numbers = ",".join(map(str, self.workers))
        if not self.workers or min(self.workers) < 1 or len(set(self.workers)) < len(self.workers):
            raise JobError(f"--workers {numbers}: needs different numbers of at least 1")
        for name in ("repeats", "steps", "epochs"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise JobError(f"--{name} {value}: needs a number of at least 1")
        if self.steps is not None and self.epochs is not None:
            raise JobError(f"--steps {self.steps} --epochs {self.epochs}: use only one of them")
        if self.warmup_steps < 0:
            raise JobError(f"--warmup {self.warmup_steps}: needs a number of at least 0")
        if self.steps is not None and self.steps <= self.warmup_steps:
            raise JobError(
                f"--steps {self.steps}: the first {self.warmup_steps} are left out (--warmup), so there is nothing to "
                f"time: use more"
            )

    @property
    def kinds(self) -> list[Kind]:
        """The kinds of runs to measure."""
        return kinds_of(self.workers, self.modes, self.baseline_workers if self.baseline else ())

    @property
    def cells(self) -> list[PlannedCell]:
        """The runs, in the order of measuring."""
        return planned(self.kinds, self.repeats, self.seed)

    def plain_threads(self, kind: Kind) -> int:
        """The threads of the plain loop: as many as that number of workers has together."""
        return kind.workers * (self.threads or 1)

    def variables(self, kind: Kind, environ: Mapping[str, str]) -> dict[str, str]:
        """Environment variables for the workers of a run, besides the launcher's."""
        variables: dict[str, Any] = {"UNISONO_STUDY": 1, "UNISONO_TIMELINE": 1}
        variables |= {} if self.steps is None else {"UNISONO_STOP_AFTER": self.steps}
        variables |= {} if self.epochs is None else {"UNISONO_STOP_AFTER_EPOCHS": self.epochs}
        if kind.factor > 1:
            variables["UNISONO_BATCH_SCALE"] = kind.factor
            if not environ.get("UNISONO_BATCH_SCALE_WARMUP"):
                variables["UNISONO_BATCH_SCALE_WARMUP"] = self.rate_warmup_steps
        variables |= {name: "" for name in STUDY_VARIABLES if environ.get(name) and name not in variables}
        return {name: str(value) for name, value in variables.items()}

    @property
    def rate_warmup_steps(self) -> int:
        """The number of steps of the script's batch over whose samples the learning rate grows in weak scaling."""
        if self.steps is None:
            return RATE_WARMUP_STEPS
        return max(1, min(RATE_WARMUP_STEPS, self.steps // RATE_WARMUP_SHARE))

    def settings(self, environ: Mapping[str, str], cores: int) -> dict[str, Any]:
        """The settings that all figures of one study share: figures with other settings belong to another study.

        The numbers of workers and repeats, the order, and the warm-up steps change no figure, and are not in it.
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
    """The sha256, in hex, of a script, or of the whole package of a module; empty without a script."""
    if not script:
        return ""
    files = [Path(script[0])] if script[0] != "-m" else _package(script[1].partition(".")[0])
    digest = hashlib.sha256()
    for file in files:
        if file.is_file():
            digest.update(hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()


def _package(name: str) -> list[Path]:
    # Only the package itself is looked up: looking up a module inside of it would import the package here.
    spec = PathFinder.find_spec(name, [str(Path.cwd()), *sys.path])
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    if spec is not None and not folders and spec.origin is not None:
        return [Path(spec.origin)]
    return sorted(file for folder in folders for file in Path(folder).rglob("*.py"))


# Measuring: missing runs are made one after the other, and their figures are read.


@dataclass(frozen=True, slots=True)
class RunEnd:
    """The end of a run.

    Attributes:
        log: the log of the worker that failed, as a path inside of the run folder.
        interrupted: the number of the signal that interrupted the run, if any.
        reason: the error message without the worker's name, by which failures are compared.
    """

    exit_code: int
    words: str = ""
    log: str = "logs"
    interrupted: int | None = None
    reason: str = ""


RunCell = Callable[[PlannedCell, Path], RunEnd]
"""Makes a run in this folder, and returns when it has ended."""


@dataclass(frozen=True, slots=True)
class Missing:
    """A run without figures, and the reason.

    Attributes:
        exit_code: the exit code of the run; 1 if it ended well and nothing could be timed.
        log: the file or folder with more about the failure.
        reason: the error message without the worker's name, by which failures are compared.
    """

    cell: PlannedCell
    exit_code: int
    words: str
    log: Path
    reason: str = ""


class Interrupted(KeyboardInterrupt):
    """The signal of this number interrupts the study; earlier measurements are kept."""


@dataclass(slots=True)
class Measured:
    """The measured runs of a study.

    Attributes:
        runs: the figures, by cell, in the order of measuring.
        left_out: the runs that were not started.
    """

    runs: dict[PlannedCell, MeasuredRun] = field(default_factory=dict)
    missing: list[Missing] = field(default_factory=list)
    left_out: list[PlannedCell] = field(default_factory=list)

    def is_hopeless(self, kinds: Sequence[Kind]) -> bool:
        """Whether nothing was measured, and runs of all these kinds, at least two, failed for the same reason."""
        failed = {run.cell.kind for run in self.missing}
        is_same_reason = len(self.missing) > 1 and len({run.reason for run in self.missing}) == 1
        return not self.runs and is_same_reason and failed == set(kinds)


def measure(
    measurement: Measurement,
    folder: StudyFolder,
    run_cell: RunCell,
    show: Callable[[str], None],
    *,
    keeps_going: bool = False,
) -> Measured:
    """Make the runs that are missing in a folder, and read the figures of all.

    With ``keeps_going`` also if every kind of run fails for the same reason. ``show`` gets a line about each run before
    it starts, and a line about its result.

    Raises:
        Interrupted: a signal interrupted a run; earlier measurements are kept.
    """
    measured = Measured()
    cells = measurement.cells
    for cell in cells:
        if folder.kept(cell) is not None:
            measured.runs[cell] = _read(folder.run_of(cell), cell, measurement)
    to_do = [cell for cell in cells if cell not in measured.runs]
    for number, cell in enumerate(to_do):
        run_folder, started_at = folder.begin(cell), monotonic()
        show(f"run {len(cells) - len(to_do) + number + 1} of {len(cells)}: {cell}")
        end = run_cell(cell, run_folder)
        if end.interrupted is not None:
            folder.drop(cell)
            raise Interrupted(end.interrupted)
        try:
            if end.exit_code:
                raise JobError(end.words)
            measured.runs[cell] = _read(run_folder, cell, measurement)
        except JobError as error:
            log = folder.fail(cell) / end.log
            missing = Missing(cell, end.exit_code or 1, str(error), log, end.reason or str(error))
            measured.missing.append(missing)
            show(f"{cell}: FAILED: {missing.words} (log: {log})")
            if not keeps_going and measured.is_hopeless(measurement.kinds):
                measured.left_out = to_do[number + 1 :]
                break
        else:
            seconds = monotonic() - started_at
            folder.keep(cell, {"mode": cell.kind.mode, "workers": cell.kind.workers, "seconds": round(seconds, 3)})
            show(f"{cell}: {measured.runs[cell].samples / measured.runs[cell].seconds:.4g} samples/s")
    measured.runs = {cell: measured.runs[cell] for cell in cells if cell in measured.runs}
    return measured


def rows(measurement: Measurement, measured: Measured, cores: int) -> list[Cell]:
    """The figures as rows of results, in the order of measuring."""
    shown = {cell: modes_of(cell.kind, measurement.modes) for cell in measurement.cells}
    trained: dict[Mode, list[int]] = defaultdict(list)
    for cell, run in measured.runs.items():
        for mode in shown[cell]:
            trained[mode].append(run.trained)
    missing = {failure.cell: failure for failure in measured.missing}
    results: list[Cell] = []
    for cell, modes in shown.items():
        for mode in modes:
            if (workers := _stands_for(cell.kind, measurement, measured)) is None:
                continue
            common: dict[str, Any] = {"label": measurement.label, "mode": mode, "workers": workers}
            common |= {"repeat": cell.repeat}
            if cell in measured.runs:
                # Losses are compared after the number of samples that all runs of a mode have seen.
                results.append(Cell(**common, **_figures(measured.runs[cell], min(trained[mode]), cores)))
            elif cell in missing:
                results.append(Cell(**common, samples=0, seconds=0, exit_code=missing[cell].exit_code))
    return results


def shown_settings(measurement: Measurement, measured: Measured) -> dict[str, Any]:
    """The settings that the report shows, by name."""
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
    """The median latency (s) and bandwidth (bytes/s) of the reduction, in the runs with the fewest workers."""
    reductions = [
        (cell.kind.workers, run.reduction) for cell, run in measured.runs.items() if run.reduction is not None
    ]
    fewest = min((workers for workers, _ in reductions), default=0)
    of_fewest = [reduction for workers, reduction in reductions if workers == fewest]
    return {name: median(reduction[name] for reduction in of_fewest) for name in of_fewest[0]} if of_fewest else {}


def notes(measurement: Measurement, measured: Measured) -> list[str]:
    """Sentences that say how the figures were measured."""
    sentences = [
        f"Steps are timed without a run's first {measurement.warmup_steps}, and without its first epoch where a whole "
        f"one comes after it; evaluation and other work between steps is not timed."
    ]
    if measurement.steps is not None or measurement.epochs is not None:
        limit = f"{measurement.steps} steps" if measurement.steps is not None else f"{measurement.epochs} epochs"
        sentences.append(f"Runs were cut short after {limit}.")
    if "weak" in measurement.modes:
        sentences.append(
            f"In weak scaling the learning rate grew to its multiple over the samples that one worker trains on in "
            f"{measurement.rate_warmup_steps} steps, unless UNISONO_BATCH_SCALE_WARMUP was set."
        )
    unequal = [kind for kind in measurement.kinds if _stands_for(kind, measurement, measured) != kind.workers]
    if unequal:
        threads = listed([str(number) for number in sorted(_worker_threads(measured))])
        sentences.append(
            f"The script sets threads={threads} itself: a plain loop is compared with workers that have as many "
            f"threads, and left out if there are none. Set --threads to the same number."
        )
    return sentences


def _worker_threads(measured: Measured) -> set[int]:
    return {run.threads for cell, run in measured.runs.items() if cell.kind.mode != "baseline"}


def _stands_for(kind: Kind, measurement: Measurement, measured: Measured) -> int | None:
    """The number of workers that have as many threads as runs of a kind; None if there is no such number.

    The threads that a script sets itself count before ``--threads``.
    """
    if kind.mode != "baseline":
        return kind.workers
    threads = _worker_threads(measured) or {measurement.threads or 1}
    workers, remainder = divmod(measurement.plain_threads(kind), max(threads))
    return None if remainder or len(threads) > 1 else workers


def _read(place: Path, cell: PlannedCell, measurement: Measurement) -> MeasuredRun:
    if cell.kind.mode == "baseline":
        return plain_run(place / "logs" / "rank-0.log")
    return measured_run(place, measurement.warmup_steps)


def _figures(run: MeasuredRun, trained: int, cores: int) -> dict[str, Any]:
    parts = {} if run.times is None else {name: max(value, 0.0) for name, value in run.times.items()}
    same_named = {name: getattr(run, name) for name in Cell.model_fields if hasattr(run, name)}
    return {**same_named, **parts, "loss": run.loss_at(trained), "oversubscribed": run.is_oversubscribed(cores)}
