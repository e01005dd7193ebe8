"""Where the runs of a study are started: on this host, on the nodes of a Ray cluster, or by Slurm."""

from __future__ import annotations

import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median
from types import FrameType
from typing import Any

from unisono.checkpoint.folder import RunFolder
from unisono.errors import FIRST_SIGNAL, PREEMPTED, JobError, LaunchError
from unisono.host.machine import usable_cores
from unisono.jsonl import read_lines
from unisono.launch.command import PER_WORKER, elastic_command
from unisono.launch.elastic.elastic_settings import ElasticSettings, Range
from unisono.launch.outcome import last_lines
from unisono.launch.settings import LaunchSettings, Script
from unisono.launch.trial import Trial
from unisono.settings.reading import settings_by_path, variables_of, words_of
from unisono.train.model.stages import LOOPED, SCHEDULES
from unisono_lab.study.measuring import (
    Measured,
    Measurement,
    RunEnd,
    network,
    notes,
    rows,
    shown_settings,
    surroundings,
)
from unisono_lab.study.results import Results
from unisono_lab.study.study_folder import PlannedCell


def trial_settings(
    script: Script,
    workers: int,
    variables: Mapping[str, str],
    *,
    shards: int | None = None,
    threads: int | None = None,
    tuned: bool = True,
    **more: Any,
) -> LaunchSettings:
    """The settings with which a measured run is started; None leaves a setting to the script."""
    options = {
        "shards": shards,
        "arithmetic.threads": threads,
        "launch.grace_s": TRIAL_GRACE_S,
        "launch.tuning": None if tuned else False,
    }
    return LaunchSettings.tuned(
        script, settings_by_path({**options, **more}), workers=workers, extra_environment=variables
    )


class StudyEngine:
    """Starts runs, one at a time: with the launcher of this host, unless a subclass starts them elsewhere.

    Attributes:
        name: the name of the engine, as in ``--on``; empty for this host.
    """

    name = ""

    def opened(self) -> AbstractContextManager[object]:
        """The context within which runs can be started.

        Raises:
            JobError: a program that the engine needs is missing.
            LaunchError: the engine cannot be reached.
        """
        return nullcontext()

    def cores(self) -> int:
        """The number of cores for workers. Only within :meth:`opened`."""
        return usable_cores()

    def run(self, settings: LaunchSettings, place: Path) -> RunEnd:
        """Run in this folder, from start to end. Main thread only."""
        try:
            trial = Trial.run(settings, place)
        except LaunchError as error:
            return RunEnd(1, str(error))
        outcome, log = trial.outcome, str(trial.log.relative_to(trial.folder.path))
        return RunEnd(outcome.exit_code, trial.error, log, outcome.interrupted, outcome.reason)

    def typed(self, settings: LaunchSettings) -> list[str]:
        """The command with which a person would start such a run, without the script."""
        where = ["--on", self.name] if self.name else []
        options = words_of(settings.options, without=("launch.grace_s",))
        return ["unisono", "run", *where, "-n", str(settings.workers), *options]


@dataclass(frozen=True, slots=True)
class OnRay(StudyEngine):
    """The nodes of a Ray cluster, all of which see the folder of the study.

    Attributes:
        resources: the resources of each worker, by Ray's names; None for a core for each of its threads.
    """

    resources: Mapping[str, float] | None = None
    name = "ray"

    @contextmanager
    def opened(self) -> Iterator[None]:
        """One connection to the cluster for all runs; what workers print stays in Ray's logs."""
        from unisono.launch.ray import connection

        with connection(shows_output=False):
            yield

    def cores(self) -> int:
        """The number of cores of all nodes together."""
        import ray

        return max(1, int(ray.cluster_resources().get("CPU", 0)))

    def run(self, settings: LaunchSettings, place: Path) -> RunEnd:
        """Run as ``unisono run --on ray`` does, with a fixed number of workers."""
        from unisono.launch.ray import train
        from unisono.launch.ray_request import RayRequest

        launch_settings = replace(settings, workers=0, run_dir=place)
        elastic = ElasticSettings(launch_settings, Range(settings.workers, settings.workers), max_restarts=0)
        try:
            end = train(RayRequest.of_this_process(elastic, self.resources))
        except LaunchError as error:
            return RunEnd(1, str(error))
        return RunEnd(end.exit_code, end.words or _error_message(place), interrupted=end.interrupted)


LEAVE_CODES = (PREEMPTED, FIRST_SIGNAL + signal.SIGTERM)
"""Exit codes of ``srun`` whose workers were asked to leave: with a checkpoint, and before they can write one."""


class BySlurm(StudyEngine):
    """Job steps of the allocation that this process is in; without one, ``srun`` asks for one for each run."""

    name = "slurm"

    def opened(self) -> AbstractContextManager[object]:
        """Nothing has to be opened; checks that ``srun`` is installed."""
        if shutil.which("srun") is None:
            raise JobError("--on slurm: this host has no srun: start the study on a node of a Slurm cluster")
        return nullcontext()

    def cores(self) -> int:
        """The number of cores of the allocation; without one, that of this host as a guess."""
        per_node = os.environ.get("SLURM_JOB_CPUS_PER_NODE", "")
        parts = [re.fullmatch(r"([0-9]{1,5})(?:\(x([0-9]{1,5})\))?", part) for part in per_node.split(",")]
        return sum(int(part[1]) * int(part[2] or 1) for part in parts if part) or usable_cores()

    def run(self, settings: LaunchSettings, place: Path) -> RunEnd:
        """Run one job step, whose tasks are the workers."""
        common = elastic_command(settings, place, None)
        (place / "logs").mkdir(parents=True)
        log = place / "logs" / "srun.log"
        environ = {name: value for name, value in common.environment(os.environ).items() if name not in PER_WORKER}
        environ.pop("UNISONO_LAUNCHER_PID", None)  # a process id of this host means nothing on others
        command = [*self._srun(settings), sys.executable, "-u", *settings.script.argv]
        with log.open("wb") as output, _attended(command, env=environ, stdout=output) as (process, signals):
            code = process.wait()
        message = _error_message(place) or " ".join([f"srun ended with exit code {code}", *last_lines(log)[-1:]])
        # Slurm signals job steps, not this process, so the exit code may be the only sign.
        interrupted = signals[0] if signals else signal.SIGTERM if code in LEAVE_CODES else None
        return RunEnd(code, message, "logs/srun.log", interrupted)

    def typed(self, settings: LaunchSettings) -> list[str]:
        """The ``srun`` command with its environment variables."""
        variables = variables_of(settings.options)
        return [*(f"{name}={value}" for name, value in variables.items()), *self._srun(settings), "python"]

    @staticmethod
    def _srun(settings: LaunchSettings) -> list[str]:
        """The ``srun`` command: a task for each worker, on as few nodes as hold them."""
        per_node = re.match(r"[0-9]{1,5}", os.environ.get("SLURM_NTASKS_PER_NODE", ""))
        nodes = -(-settings.workers // int(per_node[0])) if per_node and int(per_node[0]) else None
        count = [] if nodes is None else [f"--nodes={nodes}", f"--ntasks-per-node={-(-settings.workers // nodes)}"]
        cores = os.environ.get("SLURM_CPUS_PER_TASK")  # srun does not take this over by itself
        count += [f"--cpus-per-task={cores}"] if cores else []
        return ["srun", "--kill-on-bad-exit=1", f"--ntasks={settings.workers}", *count]


ENGINES: Mapping[str | None, type[StudyEngine]] = {None: StudyEngine, "ray": OnRay, "slurm": BySlurm}


@contextmanager
def _attended(words: list[str], **how: Any) -> Iterator[tuple[subprocess.Popen[bytes], list[int]]]:
    """Start a process that gets SIGTERM when this one is to end, so that its workers leave; yields the signals, too."""
    signals: list[int] = []
    process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stderr=subprocess.STDOUT, start_new_session=True, **how)

    def on_signal(number: int, frame: FrameType | None) -> None:
        signals.append(number)
        process.terminate()

    before = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield process, signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if process.poll() is None:
            process.kill()
            process.wait()


def _error_message(place: Path) -> str:
    """The error message in ``result.json`` of a run; empty if there is none."""
    try:
        error = (RunFolder(place).read_result() or {}).get("error")
    except (OSError, ValueError):
        return ""
    return str(error["message"]) if isinstance(error, dict) and "message" in error else ""


# Runs of a study, each started by the study's engine, and the results that they come to.

TRIAL_GRACE_S = 5.0
"""The seconds that the workers of an interrupted run get to leave; few, since no checkpoint is needed."""


def plain_workers(workers: Sequence[int], threads: int, cores: int) -> tuple[int, ...]:
    """The numbers of workers whose threads the plain loop gets, as far as there are cores.

    With GPUs it is 1 alone: a loop on one GPU cannot use the others.
    """
    from unisono.device import names  # loads torch, which takes a second or two

    most = 1 if names()[1:] else cores // threads
    return tuple(sorted({1, *(number for number in workers if number <= most)}))


@dataclass(frozen=True, slots=True)
class CellRunner:
    """Runs one cell of a study."""

    measurement: Measurement
    engine: StudyEngine

    def check(self) -> None:
        """Refuse settings that cannot work, before anything is started.

        Raises:
            JobError: a setting is wrong; the message names the option to change.
        """
        for cell in self.measurement.cells:
            self.settings(cell).check()

    def __call__(self, cell: PlannedCell, place: Path) -> RunEnd:
        """Run a cell from start to end. Main thread only."""
        return self.engine.run(self.settings(cell), place)

    def settings(self, cell: PlannedCell) -> LaunchSettings:
        """The settings with which a cell is started."""
        measurement, kind = self.measurement, cell.kind
        if kind.mode == "baseline":
            plain = Script.from_argv(measurement.baseline)
            return trial_settings(plain, 1, {}, threads=measurement.plain_threads(kind), tuned=measurement.tuned)
        variables, shards = measurement.variables(kind, os.environ), measurement.shards
        if shards is not None and kind.mode == "weak":
            # Of its batch there are more shards than these, one for every worker at least.
            variables["UNISONO_SHARDS"], shards = str(shards), None
        script = Script.from_argv(measurement.script)
        return trial_settings(
            script, kind.workers, variables, shards=shards, threads=measurement.threads, tuned=measurement.tuned
        )


def results_of(runner: CellRunner, measured: Measured, cores: int, command: str) -> Results:
    """The results, from which a report is made."""
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
    """The commands that start a run of each kind by hand."""
    lines = []
    for kind in runner.measurement.kinds:
        settings = runner.settings(PlannedCell(kind, 0))
        variables = [f"{name}={value}" for name, value in settings.extra_environment.items() if value]
        lines.append(shlex.join([*variables, *runner.engine.typed(settings), *settings.script.argv]))
    return lines


def ideal_bubble(schedule: str, devices: int, shards: int, blocks: int) -> float:
    """The share of a step in which a device is idle, if all stages take equally long and messages take no time.

    With p devices, m shards and v blocks of stages on each device: (p - 1) / (v m + p - 1) for GPipe (Huang et al.,
    NeurIPS 2019), 1F1B and interleaved 1F1B (Narayanan et al., SC 2021) and looped BFS (Lamy-Poirier, MLSys 2023); and
    (p - 1) / (3 v m + p - 1) where gradients of weights fill the gaps (ZB-H1 of Qi et al., ICLR 2024), if a forward
    pass, and a backward pass for inputs or for weights, take equally long.
    """
    rounds = blocks // devices if schedule in LOOPED else 1
    parts = 3 if schedule == "interleaved-zero-bubble" else 1
    return (devices - 1) / (parts * rounds * shards + devices - 1)


STEPS = 30
"""The default number of measured steps of a run."""


@dataclass(frozen=True, slots=True)
class ScheduleStudy:
    """The settings of a study of schedules: one worker, whose devices hold the stages, trains by each schedule.

    Attributes:
        script: the script, which calls ``run.pipeline``.
        steps: the number of measured steps of a run.
        warmup: the number of steps before them, which are not measured.
        shards: the number of shards, unless the script sets it.
        threads: torch threads of each device, unless the script sets it.
        tuned: whether the launcher sets the memory allocator, so that it keeps freed memory.
        seed: the seed of the order of the runs.
    """

    script: Script
    devices: int
    repeats: int = 5
    steps: int = STEPS
    warmup: int = 5
    shards: int | None = None
    threads: int | None = None
    tuned: bool = True
    seed: int = 0

    def check(self) -> None:
        """Refuse settings that cannot work.

        Raises:
            JobError: a setting is wrong; the message says what to change.
        """
        if self.devices < 2:
            raise JobError(f"--stages {self.devices}: needs at least 2 devices that hold the stages")
        if min(self.repeats, self.steps) < 1 or self.warmup < 0:
            raise JobError("--repeats and --steps need numbers of at least 1, and --warmup of at least 0")
        self.settings(SCHEDULES[0]).check()

    def settings(self, schedule: str) -> LaunchSettings:
        """The settings with which a run by this schedule is started."""
        variables = {
            "UNISONO_STUDY": "1",
            "UNISONO_STAGE_SCHEDULE": schedule,
            "UNISONO_STOP_AFTER": str(self.warmup + self.steps),
        }
        more: dict[str, Any] = {"communication.devices_per_worker": self.devices}
        return trial_settings(
            self.script, 1, variables, shards=self.shards, threads=self.threads, tuned=self.tuned, **more
        )


@dataclass(frozen=True, slots=True)
class ScheduleFigures:
    """The figures of a schedule.

    Attributes:
        step_s: the median seconds of a step, for each run.
        idle: the share of a step's passes in which each device was idle, the median over all steps.
        ideal: the idle share of :func:`ideal_bubble`.
        trouble: the reason why there are no figures; empty if there are some.
    """

    schedule: str
    step_s: Sequence[float] = ()
    idle: Sequence[float] = ()
    ideal: float = 0.0
    trouble: str = ""


def measure_schedules(
    study: ScheduleStudy, place: Path, show: Callable[[str], None] = lambda words: None
) -> list[ScheduleFigures]:
    """Run a script by all schedules, in random order; the figures come the fastest first, and missing ones last.

    Raises:
        JobError: the script has no stages on several devices.
    """
    order = random.Random(study.seed)  # noqa: S311  the order must be repeatable
    runs: dict[str, list[_Run]] = {schedule: [] for schedule in SCHEDULES}
    trouble: dict[str, str] = {}
    for repeat in range(study.repeats):
        for schedule in order.sample(SCHEDULES, len(SCHEDULES)):
            if schedule in trouble:
                continue
            show(f"{schedule}, run {repeat + 1} of {study.repeats}")
            folder = place / f"{schedule}-{repeat}"
            end = StudyEngine().run(study.settings(schedule), folder)
            if end.interrupted:
                raise KeyboardInterrupt
            if end.exit_code:
                trouble[schedule] = end.words
            else:
                runs[schedule].append(_Run.of(folder, study.warmup))
    figures = [_figures(schedule, done, trouble.get(schedule, "")) for schedule, done in runs.items()]
    return sorted(figures, key=lambda row: (bool(row.trouble), median(row.step_s) if row.step_s else 0.0))


@dataclass(frozen=True, slots=True)
class _Run:
    """One run: the median seconds of a step, and each device's lines about its passes."""

    step_s: float
    passes: Sequence[Sequence[Mapping[str, Any]]]

    @classmethod
    def of(cls, folder: Path, warmup: int) -> _Run:
        lines = [line for line in read_lines(folder / "metrics.jsonl") if "seconds" in line][warmup:]
        passes = [read_lines(path)[warmup:] for path in sorted(folder.glob("stages-*.jsonl"))]
        if not lines or not any(passes):
            raise JobError(
                "the script has no measured step of a model in stages: it must call run.pipeline before run.prepare, "
                "and train for more steps than --warmup"
            )
        return cls(median(line["seconds"]["total"] for line in lines), passes)


def _figures(schedule: str, runs: Sequence[_Run], trouble: str) -> ScheduleFigures:
    if trouble:
        return ScheduleFigures(schedule, trouble=trouble)
    about = runs[0].passes[0][0]
    ideal = ideal_bubble(schedule, about["devices"], about["shards"], about["blocks"])
    return ScheduleFigures(schedule, [run.step_s for run in runs], list(_idle(runs)), ideal)


def _idle(runs: Sequence[_Run]) -> Iterator[float]:
    for device in range(len(runs[0].passes)):
        lines = [line for run in runs for line in run.passes[device]]
        yield median(1 - line["busy_s"] / line["passes_s"] for line in lines)


def table_of(figures: Sequence[ScheduleFigures]) -> list[tuple[str, ...]]:
    """The figures as rows of text, with a head."""
    rows: list[tuple[str, ...]] = [("schedule", "step", "beside the fastest", "idle, by device", "mean", "ideal")]
    fastest = next((median(schedule.step_s) for schedule in figures if schedule.step_s), 1.0)
    for schedule in figures:
        if schedule.trouble:
            rows.append((schedule.schedule, "-", "-", "-", "-", "-"))
            continue
        step_s = median(schedule.step_s)
        idle = " ".join(f"{share:.0%}" for share in schedule.idle)
        mean = f"{fmean(schedule.idle):.1%}"
        rows.append(
            (
                schedule.schedule,
                f"{1000 * step_s:.1f} ms",
                f"{step_s / fastest:.3f}",
                idle,
                mean,
                f"{schedule.ideal:.1%}",
            )
        )
    return rows
