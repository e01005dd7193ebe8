"""``unisono study``: how many workers pay, measured."""

from __future__ import annotations

import os
import shlex
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.text import Text

from unisono.cli.options import Module, Resources, Shards, Threads, Tuned, grouped, read_workers
from unisono.errors import FIRST_SIGNAL, JobError
from unisono.host.cgroup import usable_cores
from unisono.launch.settings import Script
from unisono_lab.commands.study_options import (
    STUDIES,
    Baseline,
    Efficiency,
    Epochs,
    From,
    KeepGoing,
    Label,
    Out,
    Predict,
    Price,
    Repeats,
    ScalingMode,
    ScriptArgs,
    Seed,
    Stages,
    Steps,
    StudyCommand,
    StudyOn,
    StudyScript,
    Waiting,
    Warmup,
    Workers,
)
from unisono_lab.commands.study_stages import study_stages

if TYPE_CHECKING:
    from unisono_lab.analysis.analysis import Wanted
    from unisono_lab.measure.engines import StudyEngine
    from unisono_lab.measure.measurement import Measurement

COMPARE = "compare"
"""In the place of a script: studies follow. A script of this name is started as ``./compare``."""


@dataclass(frozen=True, slots=True)
class StudyPlace:
    """The options that say where the workers of a study are started."""

    engine: StudyOn = None
    resources: Resources = None

    def engine_for(self, baseline: str | None) -> StudyEngine:
        """What starts the runs.

        Args:
            baseline: the plain loop to compare with, if there is one.

        Raises:
            JobError: the options do not go together.
        """
        from unisono.launch.ray.request import read_resources
        from unisono_lab.measure.engines import ENGINES, OnRay

        if self.resources is not None and self.engine != "ray":
            raise JobError("--resources-per-worker is for --on ray")
        if self.engine is not None and baseline is not None:
            raise JobError(
                f"--baseline with --on {self.engine}: a plain loop runs on one host; measure it in a study there"
            )
        if self.resources is not None:
            return OnRay(read_resources(self.resources))
        made: StudyEngine = ENGINES[self.engine]()
        return made


app = typer.Typer()


@app.command(cls=StudyCommand)
@grouped
def study(
    place: StudyPlace,
    script: StudyScript = None,
    args: ScriptArgs = None,
    workers: Workers = "1,2",
    mode: ScalingMode = "strong",
    repeats: Repeats = 5,
    steps: Steps = None,
    epochs: Epochs = None,
    warmup: Warmup = 5,
    baseline: Baseline = None,
    out: Out = None,
    label: Label = None,
    price: Price = None,
    waiting: Waiting = 0.0,
    efficiency: Efficiency = 0.8,
    predict: Predict = None,
    seed: Seed = 0,
    measured: From = None,
    module: Module = False,
    shards: Shards = None,
    threads: Threads = None,
    tuned: Tuned = True,
    keep_going: KeepGoing = False,
    stages: Stages = None,
) -> None:
    """Measure a script with several numbers of workers, several times each, and report how it scales.

        unisono study train.py --workers 1,2,4 --steps 50 -- --lr 0.1

        unisono study --from results.csv

        unisono study compare STUDY STUDY --out comparison

        unisono study train.py --stages 2

    What is measured is kept: started again, it measures only what is missing. Exit code 1 if figures are missing.
    """
    from unisono_lab.commands.study_report import wanted_of

    wanted = partial(wanted_of, predict=predict, threshold=efficiency, price=price, waiting=waiting)
    if script is None or measured is not None or (script == COMPARE and not module):
        return _from_figures(measured, [Path(each) for each in args or ()] if script else None, out, wanted)
    from unisono_lab.measure.cell_runner import plain_workers
    from unisono_lab.measure.measurement import Measurement

    launched = Script(script, tuple(args or ()), is_module=module)
    if stages is not None:
        own = {"repeats": repeats, "steps": steps, "warmup": warmup, "shards": shards, "threads": threads, "seed": seed}
        where = out or STUDIES / f"{label or launched.stem}-stages"
        raise typer.Exit(study_stages(launched, stages, where, tuned=tuned, **own))
    plain = tuple(shlex.split(baseline or ""))
    for argv in filter(None, (launched.argv, plain)):
        Script.from_argv(argv).require_readable()
    measurement = Measurement(
        script=tuple(launched.argv),
        workers=read_workers(workers),
        modes=("strong", "weak") if mode == "both" else (mode,),
        repeats=repeats,
        steps=steps,
        epochs=epochs,
        baseline=plain,
        baseline_workers=plain_workers(read_workers(workers), threads or 1, usable_cores()) if plain else (),
        shards=shards,
        threads=threads,
        warmup_steps=warmup,
        seed=seed,
        label=label or launched.stem,
        tuned=tuned,
    )
    where, report = out or STUDIES / measurement.label, wanted(f"Scaling study: {measurement.label}")
    raise typer.Exit(start(measurement, place.engine_for(baseline), where, report, keeps_going=keep_going))


def _from_figures(measured: Path | None, studies: Sequence[Path] | None, out: Path | None, wanted: Any) -> None:
    """The report of what was measured before.

    Args:
        measured: the figures, or the study.
        studies: the studies to compare, if there are no figures.
        out: the folder of the report.
        wanted: a function that makes of a title what the report should say.

    Raises:
        JobError: there is neither.
    """
    from unisono_lab.commands.study_report import compare, name_of, report_from

    if measured is not None:
        return report_from(measured, out, wanted(f"Scaling study: {name_of(measured)}"))
    if studies is None:
        raise JobError("name the script to measure: unisono study train.py --workers 1,2")
    return compare(studies, out, wanted(f"Scaling studies: {' and '.join(map(name_of, studies))}"))


def start(
    measurement: Measurement, engine: StudyEngine, path: Path, wanted: Wanted, *, keeps_going: bool = False
) -> int:
    """Measure what is missing, and report.

    Returns:
        the exit code.

    Raises:
        JobError: a run could not be started, or the folder cannot be used, or holds another study.
    """
    from unisono_lab.analysis.study_folder import StudyFolder
    from unisono_lab.commands.study_progress import StudyProgress
    from unisono_lab.commands.study_report import report
    from unisono_lab.measure.cell_runner import CellRunner, results_of
    from unisono_lab.measure.measuring import Interrupted, measure

    measurement.check()
    folder, err = StudyFolder(path), Console(stderr=True, highlight=False, emoji=False)
    runner = CellRunner(measurement, engine)
    runner.check()
    with engine.opened():
        cores = engine.cores()
        common = measurement.settings(os.environ, cores) | ({"engine": engine.name} if engine.name else {})
        with folder.opened(common):
            cells = measurement.cells
            done = sum(folder.kept(cell) is not None for cell in cells)
            before = f", {done} of them measured before" if done else ""
            err.print(Text(f"unisono: {len(cells)} runs{before}, folder {folder.path}"), soft_wrap=True)
            if most := [
                str(workers) for workers in measurement.workers if workers * (measurement.threads or 1) > cores
            ]:
                words = f"unisono: {' and '.join(most)} workers are too many for {cores} cores, unless they have GPUs"
                err.print(Text(f"{words}: they will be timed, and not called scaling"), soft_wrap=True)
            try:
                with StudyProgress(len(cells), done) as progress:
                    measured = measure(measurement, folder, runner, progress, keeps_going=keeps_going)
            except (Interrupted, KeyboardInterrupt) as interrupted:
                number = interrupted.signal if isinstance(interrupted, Interrupted) else signal.SIGINT
                words = f"unisono: ended by {signal.Signals(number).name}: start it again to go on with what is missing"
                err.print(Text(words), soft_wrap=True)
                return FIRST_SIGNAL + number
            command = shlex.join(["unisono", *sys.argv[1:]])
            report(results_of(runner, measured, cores, command), folder.path, wanted)
    for missing in measured.missing:
        words = f"unisono: no figures of {missing.cell}: {missing.words} (log: {missing.log})"
        err.print(Text(words, "red"), soft_wrap=True)
    if measured.left_out:
        words = f"unisono: all failed for the same reason, so the other {len(measured.left_out)} runs were left out"
        err.print(Text(f"{words} (--keep-going runs them)", "red"), soft_wrap=True)
    return 1 if measured.missing else 0
