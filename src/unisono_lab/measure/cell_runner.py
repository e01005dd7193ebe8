"""Runs of a study, each started by the study's engine, and the results that they come to."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from unisono.launch.settings import LaunchSettings, Script
from unisono.launch.tuning import Tuning
from unisono_lab.analysis.results import Results
from unisono_lab.analysis.study_folder import PlannedCell
from unisono_lab.measure.engines import StudyEngine
from unisono_lab.measure.measurement import Measurement, surroundings
from unisono_lab.measure.measuring import Measured, RunEnd, network, notes, rows, shown_settings

TRIAL_GRACE_S = 5.0
"""How long the workers of a run that is interrupted may take to leave: nobody wants their checkpoint."""


def plain_workers(workers: Sequence[int], threads: int, cores: int) -> tuple[int, ...]:
    """The numbers of workers whose threads the plain loop is to have: what cores there are for, where there is no GPU.

    A loop on one GPU has nothing of the others.
    """
    from unisono.device import names  # torch takes a second or two

    most = 1 if names()[1:] else cores // threads
    return tuple(sorted({1, *(number for number in workers if number <= most)}))


@dataclass(frozen=True, slots=True)
class CellRunner:
    """Runs one cell of a study.

    Attributes:
        measurement: the measurement that was asked for.
        engine: the engine that starts runs.
    """

    measurement: Measurement
    engine: StudyEngine

    def check(self) -> None:
        """Refuse what cannot be started, before anything is.

        Raises:
            JobError: says which option to change.
        """
        for cell in self.measurement.cells:
            self.settings(cell).check()

    def __call__(self, cell: PlannedCell, place: Path) -> RunEnd:
        """From its start to its end. Main thread only."""
        return self.engine.run(self.settings(cell), place)

    def settings(self, cell: PlannedCell) -> LaunchSettings:
        """How to start one."""
        wanted, kind = self.measurement, cell.kind
        is_plain = kind.mode == "baseline"
        return LaunchSettings(
            Script.from_argv(wanted.baseline if is_plain else wanted.script),
            workers=1 if is_plain else kind.workers,
            # Of weak scaling's batch there are more shards than these, one for every worker at least.
            shards=None if is_plain or kind.mode == "weak" else wanted.shards,
            threads=wanted.plain_threads(kind) if is_plain else wanted.threads,
            grace_s=TRIAL_GRACE_S,
            tuning=Tuning.of_this_process(wanted=wanted.tuned),
            extra_environment={} if is_plain else self._told(cell),
        )

    def _told(self, cell: PlannedCell) -> dict[str, str]:
        told = self.measurement.variables(cell.kind, os.environ)
        if self.measurement.shards is not None and cell.kind.mode == "weak":
            told["UNISONO_SHARDS"] = str(self.measurement.shards)
        return told


def results_of(runner: CellRunner, measured: Measured, cores: int, command: str) -> Results:
    """All that a report is made from.

    Args:
        runner: what has made the runs.
        measured: the measured runs.
        cores: the number of cores that all workers share.
        command: the command that asked for the study, as it was typed.
    """
    measurement, engine = runner.measurement, runner.engine
    cells = rows(measurement, measured, cores)
    where = [f"Workers ran on nodes of {engine.name.capitalize()}; the processor shown is the study's own."]
    return Results(
        cells=tuple(cells),
        environment={**surroundings(cores), **network(measured)},
        commands=(command, *commands(runner)),
        settings=shown_settings(measurement, measured),
        notes=(*notes(measurement, measured), *(where if engine.name else [])),
    )


def commands(runner: CellRunner) -> list[str]:
    """How each kind of run could be started by hand."""
    return [_typed(runner.engine, runner.settings(PlannedCell(kind, 0))) for kind in runner.measurement.kinds]


def _typed(engine: StudyEngine, settings: LaunchSettings) -> str:
    words = [f"{name}={value}" for name, value in settings.extra_environment.items() if value]
    return shlex.join([*words, *engine.typed(settings), *settings.script.argv])
