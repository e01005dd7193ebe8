"""``unisono study``: how many workers pay, measured."""

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

from unisono.cli.help import HelpfulCommand
from unisono.cli.options import Module, Resources, Starting, grouped, opt, read_workers
from unisono.cli.tables import bare_table, show_table
from unisono.errors import FIRST_SIGNAL, JobError
from unisono.host.cgroup import usable_cores
from unisono.launch.settings import Script
from unisono.settings.table import Settings

if TYPE_CHECKING:
    from unisono_lab.analysis.analysis import Wanted
    from unisono_lab.measure.engines import StudyEngine
    from unisono_lab.measure.measuring import Measurement


class StudyCommand(HelpfulCommand):
    """A command whose script has options of its own, behind ``--``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Say where an option belongs that is none of the study's."""
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            if type(error).__name__ == "NoSuchOption":
                error.message += ' (what is meant for the script stands behind "--")'  # type: ignore[attr-defined]
            raise


STUDIES = Path("studies")
"""Where studies are, unless somebody says otherwise; a search for the largest batch lies beside its script's."""

ScriptArgs = Annotated[list[str] | None, typer.Argument(help="The arguments of the script.", metavar="-- ARGS")]

COMPARE = "compare"
"""In the place of a script: studies follow. A script of this name is started as ``./compare``."""


@dataclass(frozen=True, slots=True)
class StudyPlace:
    """The options that say where the workers of a study are started."""

    engine: Annotated[Literal["ray", "slurm"] | None, opt("--on")] = None
    """Start the workers on the nodes of a Ray cluster, or as tasks of Slurm (srun)."""
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
        return ENGINES[self.engine]()


@dataclass(frozen=True, slots=True)
class ReportOptions:
    """The options that say what a report is to tell."""

    price: Annotated[float | None, opt()] = None
    """The price of one worker for an hour, to recommend the cheapest number of workers."""
    waiting: Annotated[float, opt()] = 0.0
    """The price of waiting for an hour, in the currency of --price."""
    efficiency: Annotated[float, opt()] = 0.8
    """The least efficiency, up to 1, of the recommended number of workers."""
    predict: Annotated[str | None, opt(metavar="N,N,…")] = None
    """Numbers of workers to predict; by default two and four times the largest measured one."""

    def wanted(self, title: str) -> Wanted:
        """The reader's choices, for a report with this title.

        Raises:
            JobError: one of them makes no sense.
        """
        from unisono_lab.analysis.analysis import Prices, Wanted

        if not 0 < self.efficiency <= 1:
            raise JobError(f"--efficiency {self.efficiency}: above 0 and at most 1, such as 0.8")
        for name, value in (("--price", self.price or 0.0), ("--waiting", self.waiting)):
            if not 0 <= value < float("inf"):
                raise JobError(f"{name} {value}: a number from 0")
        predicted = sorted({*read_workers(self.predict, "--predict")}) if self.predict else []
        if predicted and not predicted[0]:
            raise JobError(f"--predict {self.predict}: each number from 1")
        has_prices = self.price is not None or self.waiting
        prices = Prices(self.price or 0.0, self.waiting) if has_prices else None
        return Wanted(title=title, predict=predicted, threshold=self.efficiency, prices=prices)


@dataclass(frozen=True, slots=True)
class RunOptions:
    """The options that say what is to be measured."""

    workers: Annotated[str, opt(metavar="N,N,…")] = "1,2"
    """Numbers of workers to measure."""
    mode: Annotated[Literal["strong", "weak", "both"], opt()] = "strong"
    """Strong keeps the global batch; weak multiplies batch and learning rate by the workers."""
    repeats: Annotated[int, opt()] = 5
    """The number of runs of each kind; all runs are interleaved in random order."""
    steps: Annotated[int | None, opt()] = None
    """Cut each run short after so many steps."""
    epochs: Annotated[int | None, opt()] = None
    """Cut each run short after so many epochs."""
    warmup: Annotated[int, opt()] = 5
    """The number of first steps of each run that are not measured."""
    baseline: Annotated[str | None, opt(metavar="SCRIPT")] = None
    """The plain loop to compare with, with its arguments."""
    label: Annotated[str | None, opt()] = None
    """The name of this measurement in reports and comparisons."""
    seed: Annotated[int, opt()] = 0
    """The seed of the random order of runs."""

    def measurement(self, launched: Script, options: Settings) -> Measurement:
        """What is to be measured of a script.

        Raises:
            JobError: a script cannot be read, or an option makes no sense.
        """
        from unisono_lab.measure.engines import plain_workers
        from unisono_lab.measure.measuring import Measurement

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
    """The study's folder; a folder with measurements is continued."""
    measured: Annotated[Path | None, opt("--from", metavar="FILE")] = None
    """Measure nothing: write a report from this CSV file, results.json or study folder."""
    keep_going: Annotated[bool, opt()] = False
    """Go on even if the first run of each kind fails for the same reason."""
    stages: Annotated[int | None, opt(metavar="DEVICES")] = None
    """Measure one worker of so many devices by all schedules of run.pipeline, instead of numbers of workers."""
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
    own: StudyOptions,
    runs: RunOptions,
    report: ReportOptions,
    options: Starting,
) -> None:
    """Measure a script with several numbers of workers, several times each, and report how it scales.

        unisono study train.py --workers 1,2,4 --steps 50 -- --lr 0.1

        unisono study --from results.csv

        unisono study compare STUDY STUDY --out comparison

        unisono study train.py --stages 2

    What is measured is kept: started again, it measures only what is missing. Exit code 1 if figures are missing.
    """
    if script is None or own.measured is not None or (script == COMPARE and not own.module):
        return _from_figures(own.measured, [Path(each) for each in args or ()] if script else None, own.out, report)
    launched = Script(script, tuple(args or ()), is_module=own.module)
    if own.stages is not None:
        told: dict[str, Any] = {name: getattr(runs, name) for name in ("repeats", "steps", "warmup", "seed")}
        told |= {"shards": options.shards, "threads": options.arithmetic.values.get("threads")}
        told["tuned"] = options.launch.tuning
        where = own.out or STUDIES / f"{runs.label or launched.stem}-stages"
        raise typer.Exit(study_stages(launched, own.stages, where, **told))
    measurement = runs.measurement(launched, options)
    where, wanted = own.out or STUDIES / measurement.label, report.wanted(f"Scaling study: {measurement.label}")
    raise typer.Exit(start(measurement, place.engine_for(runs.baseline), where, wanted, keeps_going=own.keep_going))


def _from_figures(
    measured: Path | None, studies: Sequence[Path] | None, out: Path | None, options: ReportOptions
) -> None:
    """The report of what was measured before.

    Args:
        measured: the figures, or the study.
        studies: the studies to compare, if there are no figures.
        out: the folder of the report.
        options: what the report should say.

    Raises:
        JobError: there is neither.
    """
    from unisono_lab.commands.study_report import compare, name_of, report_from

    if measured is not None:
        return report_from(measured, out, options.wanted(f"Scaling study: {name_of(measured)}"))
    if studies is None:
        raise JobError("name the script to measure: unisono study train.py --workers 1,2")
    return compare(studies, out, options.wanted(f"Scaling studies: {' and '.join(map(name_of, studies))}"))


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
    from unisono_lab.commands.study_report import report
    from unisono_lab.measure.engines import CellRunner, results_of
    from unisono_lab.measure.measuring import measure

    def tell(words: str) -> None:
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
            tell(f"{len(cells)} runs{before}, folder {folder.path}")
            if most := [
                str(workers) for workers in measurement.workers if workers * (measurement.threads or 1) > cores
            ]:
                words = f"{' and '.join(most)} workers are too many for {cores} cores, unless they have GPUs"
                tell(f"{words}: they will be timed, and not called scaling")
            try:
                measured = measure(measurement, folder, runner, tell, keeps_going=keeps_going)
            except KeyboardInterrupt as interrupted:
                return say_ended(interrupted, "start it again to go on with what is missing", err)
            command = shlex.join(["unisono", *sys.argv[1:]])
            report(results_of(runner, measured, cores, command), folder.path, wanted)
    for missing in measured.missing:
        tell(f"no figures of {missing.cell}: {missing.words} (log: {missing.log})")
    if measured.left_out:
        others = f"the other {len(measured.left_out)} runs were left out (--keep-going runs them)"
        tell(f"all failed for the same reason, so {others}")
    return 1 if measured.missing else 0


def say_ended(interrupted: KeyboardInterrupt, words: str, err: Console) -> int:
    """Say which signal has ended what was measured.

    Returns:
        the exit code.
    """
    number = signal.Signals(interrupted.args[0] if interrupted.args else signal.SIGINT)
    err.print(Text(f"unisono: ended by {number.name}: {words}"), soft_wrap=True)
    return FIRST_SIGNAL + number


# ``unisono study --stages``: which schedule is the fastest for a model in stages.


def study_stages(script: Script, devices: int, place: Path, **options: Any) -> int:
    """Measure all schedules, print them as a table, and name the best.

    Args:
        script: the script, which calls ``run.pipeline``.
        devices: the number of devices that hold the stages.
        place: the study's folder, which must be new.
        options: those of ``ScheduleStudy``; None for its default.

    Returns:
        the exit code: 0 if there are figures of every schedule, 1 if not.

    Raises:
        JobError: it cannot be measured, or the folder has something in it.
    """
    from unisono_lab.measure.schedules import ScheduleStudy, measure_schedules, table_of  # which load torch

    wanted = ScheduleStudy(script, devices, **{name: value for name, value in options.items() if value is not None})
    wanted.check()
    if place.exists() and any(place.iterdir()):
        raise JobError(f"{place} has something in it already: name another folder with --out")
    err, out = Console(stderr=True, highlight=False, emoji=False), Console(highlight=False, emoji=False)
    cores = usable_cores()
    if wanted.devices * (wanted.threads or 1) > cores:
        words = f"unisono: {wanted.devices} devices are too many for {cores} cores, unless they are GPUs: they wait for"
        err.print(Text(f"{words} cores, and not for each other", "red"), soft_wrap=True)
    figures = measure_schedules(wanted, place, lambda words: err.print(Text(f"unisono: {words}"), soft_wrap=True))
    head, *rows = table_of(figures)
    show_table(bare_table(head, rows), out)
    for one in figures:
        if one.trouble:
            out.print(Text(f"{one.schedule}: {one.trouble}", "red"), soft_wrap=True)
    best = figures[0]
    if best.step_s:
        words = f'take run.pipeline(…, schedule="{best.schedule}"): {1000 * median(best.step_s):.1f} ms a step'
        out.print(Text(f"{words}. It changes no bit; more shards, which do, make the idle share smaller", "bold"))
    return int(any(one.trouble for one in figures))
