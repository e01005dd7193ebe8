"""``unisono study``: measures how a script scales with the number of workers."""

from __future__ import annotations

import os
import shlex
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console
from rich.text import Text

from unisono.cli.display import HelpfulCommand, bare_table, show_table
from unisono.cli.options import Module, Resources, Starting, grouped, opt, read_workers
from unisono.errors import FIRST_SIGNAL, JobError
from unisono.host.machine import usable_cores
from unisono.launch.settings import Script
from unisono.settings.table import Settings

if TYPE_CHECKING:
    from unisono_lab.study.analysis import ReportSettings
    from unisono_lab.study.engines import StudyEngine
    from unisono_lab.study.measuring import Measurement


class StudyCommand(HelpfulCommand):
    """A command that takes the options of a script behind ``--``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse; the error for an unknown option adds that the options of the script come behind ``--``."""
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            if type(error).__name__ == "NoSuchOption":
                error.message += ' (write the options of the script behind "--")'  # type: ignore[attr-defined]
            raise


STUDIES = Path("studies")
"""The default folder of studies; a search for the largest batch writes into the study folder of its script."""

ScriptArgs = Annotated[list[str] | None, typer.Argument(help="The arguments of the script.", metavar="-- ARGS")]

COMPARE = "compare"
"""The word in the place of the script that compares studies; a script of this name is given as ``./compare``."""


@dataclass(frozen=True, slots=True)
class StudyPlace:
    """The options for the place where the workers of a study are started."""

    engine: Annotated[Literal["ray", "slurm"] | None, opt("--on")] = None
    """Start the workers on the nodes of a Ray cluster, or as tasks of Slurm (srun)."""
    resources: Resources = None

    def engine_for(self, baseline: str | None) -> StudyEngine:
        """The engine that starts the runs.

        Raises:
            JobError: the options cannot be combined.
        """
        from unisono.launch.ray_request import read_resources
        from unisono_lab.study.engines import ENGINES, OnRay

        if self.resources is not None and self.engine != "ray":
            raise JobError("--resources-per-worker is for --on ray")
        if self.engine is not None and baseline is not None:
            raise JobError(
                f"--baseline with --on {self.engine}: a plain loop runs on one host; measure it in a study on that host"
            )
        if self.resources is not None:
            return OnRay(read_resources(self.resources))
        return ENGINES[self.engine]()


@dataclass(frozen=True, slots=True)
class ReportOptions:
    """The options for the content of a report."""

    price: Annotated[float | None, opt()] = None
    """The price of one worker for an hour, to recommend the cheapest number of workers."""
    waiting: Annotated[float, opt()] = 0.0
    """The price of waiting for an hour, in the currency of --price."""
    efficiency: Annotated[float, opt()] = 0.8
    """The least efficiency, up to 1, of the recommended number of workers."""
    predict: Annotated[str | None, opt(metavar="N,N,…")] = None
    """Numbers of workers to predict; by default two and four times the largest measured one."""

    def settings(self, title: str) -> ReportSettings:
        """The choices for a report with this title.

        Raises:
            JobError: an option makes no sense.
        """
        from unisono_lab.study.analysis import Prices, ReportSettings

        if not 0 < self.efficiency <= 1:
            raise JobError(f"--efficiency {self.efficiency}: needs a number above 0 and at most 1, such as 0.8")
        for name, value in (("--price", self.price or 0.0), ("--waiting", self.waiting)):
            if not 0 <= value < float("inf"):
                raise JobError(f"{name} {value}: needs a number of at least 0")
        predicted = sorted({*read_workers(self.predict, "--predict")}) if self.predict else []
        if predicted and not predicted[0]:
            raise JobError(f"--predict {self.predict}: needs numbers of at least 1")
        has_prices = self.price is not None or self.waiting
        prices = Prices(self.price or 0.0, self.waiting) if has_prices else None
        return ReportSettings(title=title, predict=predicted, threshold=self.efficiency, prices=prices)


@dataclass(frozen=True, slots=True)
class RunOptions:
    """The options for the measurements."""

    workers: Annotated[str, opt(metavar="N,N,…")] = "1,2"
    """Numbers of workers to measure."""
    mode: Annotated[Literal["strong", "weak", "both"], opt()] = "strong"
    """Strong keeps the global batch; weak multiplies the batch and the learning rate by the workers."""
    repeats: Annotated[int, opt()] = 5
    """The number of runs of each kind; all runs are interleaved in random order."""
    steps: Annotated[int | None, opt()] = None
    """The number of steps after which each run is cut short."""
    epochs: Annotated[int | None, opt()] = None
    """The number of epochs after which each run is cut short."""
    warmup: Annotated[int, opt()] = 5
    """The number of first steps of each run that are not measured."""
    baseline: Annotated[str | None, opt(metavar="SCRIPT")] = None
    """The script of a plain loop to compare with, with its arguments."""
    label: Annotated[str | None, opt()] = None
    """The name of this measurement in reports and comparisons."""
    seed: Annotated[int, opt()] = 0
    """The seed of the random order of runs."""

    def measurement(self, launched: Script, options: Settings) -> Measurement:
        """The measurement of a script.

        Raises:
            JobError: a script cannot be read, or an option makes no sense.
        """
        from unisono_lab.study.engines import plain_workers
        from unisono_lab.study.measuring import Measurement

        plain, workers = tuple(shlex.split(self.baseline or "")), read_workers(self.workers)
        for argv in filter(None, (launched.argv, plain)):
            Script.from_argv(argv).require_readable()
        return Measurement(
            script=tuple(launched.argv),
            workers=workers,
            modes=("strong", "weak") if self.mode == "both" else (self.mode,),
            repeats=self.repeats,
            steps=self.steps,
            epochs=self.epochs,
            baseline=plain,
            baseline_workers=plain_workers(workers, options.arithmetic.threads, usable_cores()) if plain else (),
            shards=options.shards,
            threads=options.arithmetic.values.get("threads"),
            warmup_steps=self.warmup,
            seed=self.seed,
            label=self.label or launched.stem,
            tuned=options.launch.tuning,
        )


app = typer.Typer()


@dataclass(frozen=True, slots=True)
class StudyOptions:
    """The options of a study."""

    out: Annotated[Path | None, opt()] = None
    """The folder of the study; if it holds measurements, the study continues."""
    measured: Annotated[Path | None, opt("--from", metavar="FILE")] = None
    """Measure nothing: write a report from this CSV file, results.json or study folder."""
    keep_going: Annotated[bool, opt()] = False
    """Go on even if the first run of each kind fails for the same reason."""
    stages: Annotated[int | None, opt(metavar="DEVICES")] = None
    """Measure one worker with this number of devices by all schedules of run.pipeline, not numbers of workers."""
    module: Module = False


@app.command(cls=StudyCommand)
@grouped
def study(
    place: StudyPlace,
    script: Annotated[
        str | None, typer.Argument(help="The script to measure; a module's name with -m.", metavar="SCRIPT")
    ] = None,
    args: ScriptArgs = None,
    *,
    study_options: StudyOptions,
    runs: RunOptions,
    report: ReportOptions,
    options: Starting,
) -> None:
    """Measure how a script scales with the number of workers.

        unisono study train.py --workers 1,2,4 --steps 50 -- --lr 0.1

        unisono study --from results.csv

        unisono study compare STUDY STUDY --out comparison

        unisono study train.py --stages 2

    Measurements are kept: a study that is started again makes only the missing ones. The exit code is 1 if figures are
    missing, and 0 if not.
    """
    out = study_options.out
    if script is None or study_options.measured is not None or (script == COMPARE and not study_options.module):
        studies = [Path(path) for path in args or ()] if script else None
        return _from_figures(study_options.measured, studies, out, report)
    target = Script(script, tuple(args or ()), is_module=study_options.module)
    if study_options.stages is not None:
        stage_options: dict[str, Any] = {name: getattr(runs, name) for name in ("repeats", "steps", "warmup", "seed")}
        stage_options |= {"shards": options.shards, "threads": options.arithmetic.values.get("threads")}
        stage_options["tuned"] = options.launch.tuning
        folder = out or STUDIES / f"{runs.label or target.stem}-stages"
        raise typer.Exit(study_stages(target, study_options.stages, folder, **stage_options))
    measurement = runs.measurement(target, options)
    folder, engine = out or STUDIES / measurement.label, place.engine_for(runs.baseline)
    settings = report.settings(f"Scaling study: {measurement.label}")
    raise typer.Exit(start(measurement, engine, folder, settings, keeps_going=study_options.keep_going))


def _from_figures(
    measured: Path | None, studies: Sequence[Path] | None, out: Path | None, options: ReportOptions
) -> None:
    """Report earlier measurements.

    Raises:
        JobError: there are neither figures nor studies.
    """
    from unisono_lab.report.report import compare, name_of, report_from

    if measured is not None:
        return report_from(measured, out, options.settings(f"Scaling study: {name_of(measured)}"))
    if studies is None:
        raise JobError("name a script to measure: unisono study train.py --workers 1,2")
    return compare(studies, out, options.settings(f"Scaling studies: {' and '.join(map(name_of, studies))}"))


def start(
    measurement: Measurement, engine: StudyEngine, path: Path, settings: ReportSettings, *, keeps_going: bool = False
) -> int:
    """Make the missing measurements, report, and return the exit code.

    Raises:
        JobError: a run could not be started, or the folder cannot be used, or holds another study.
    """
    from unisono_lab.report.report import report
    from unisono_lab.study.engines import CellRunner, results_of
    from unisono_lab.study.measuring import measure
    from unisono_lab.study.study_folder import StudyFolder

    def print_line(words: str) -> None:
        err.print(Text(f"unisono: {words}"), soft_wrap=True)

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
            print_line(f"{len(cells)} runs{before}, folder {folder.path}")
            if too_many := [
                str(workers) for workers in measurement.workers if workers * (measurement.threads or 1) > cores
            ]:
                words = f"{' and '.join(too_many)} workers are too many for {cores} cores, unless they have GPUs"
                print_line(f"{words}: they are timed, but their times are no scaling")
            try:
                measured = measure(measurement, folder, runner, print_line, keeps_going=keeps_going)
            except KeyboardInterrupt as interrupt:
                return report_interrupt(interrupt, "start it again to make the missing measurements", err)
            command = shlex.join(["unisono", *sys.argv[1:]])
            report(results_of(runner, measured, cores, command), folder.path, settings)
    for missing in measured.missing:
        print_line(f"there are no figures of {missing.cell}: {missing.words} (log: {missing.log})")
    if measured.left_out:
        others = f"the other {len(measured.left_out)} runs were left out (--keep-going runs them)"
        print_line(f"all runs failed for the same reason, so {others}")
    return 1 if measured.missing else 0


def report_interrupt(interrupted: KeyboardInterrupt, words: str, err: Console) -> int:
    """Print which signal ended the measurement, and return the exit code."""
    number = signal.Signals(interrupted.args[0] if interrupted.args else signal.SIGINT)
    err.print(Text(f"unisono: ended by {number.name}: {words}"), soft_wrap=True)
    return FIRST_SIGNAL + number


# ``unisono study --stages``: the fastest schedule for a model in stages.


def study_stages(script: Script, devices: int, place: Path, **options: Any) -> int:
    """Measure all schedules, print them as a table, and name the best; 0 if all have figures, 1 if not.

    The script calls ``run.pipeline``; the place must be new. An option of ``ScheduleStudy`` that is None has its
    default.

    Raises:
        JobError: the schedules cannot be measured, or the folder is not empty.
    """
    from unisono_lab.study.engines import ScheduleStudy, measure_schedules, table_of  # this module loads torch

    plan = ScheduleStudy(script, devices, **{name: value for name, value in options.items() if value is not None})
    plan.check()
    if place.exists() and any(place.iterdir()):
        raise JobError(f"{place} is not empty: name another folder with --out")
    err, out = Console(stderr=True, highlight=False, emoji=False), Console(highlight=False, emoji=False)
    cores = usable_cores()
    if plan.devices * (plan.threads or 1) > cores:
        words = f"unisono: {plan.devices} devices are too many for {cores} cores, unless they are GPUs: they wait for"
        err.print(Text(f"{words} cores, and not for each other", "red"), soft_wrap=True)
    figures = measure_schedules(plan, place, lambda words: err.print(Text(f"unisono: {words}"), soft_wrap=True))
    head, *rows = table_of(figures)
    show_table(bare_table(head, rows), out)
    for schedule in figures:
        if schedule.trouble:
            out.print(Text(f"{schedule.schedule}: {schedule.trouble}", "red"), soft_wrap=True)
    best = figures[0]
    if best.step_s:
        words = f'recommended: run.pipeline(…, schedule="{best.schedule}"): {1000 * median(best.step_s):.1f} ms a step'
        out.print(Text(f"{words}. The schedule changes no bit; more shards, which do, lower the idle share", "bold"))
    return int(any(schedule.trouble for schedule in figures))
