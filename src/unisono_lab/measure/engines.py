"""Where the runs of a study are started: on this host, on the nodes of a Ray cluster, or by Slurm."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

from unisono.checkpoint.folder import RunFolder
from unisono.errors import FIRST_SIGNAL, PREEMPTED, JobError, LaunchError
from unisono.host.cgroup import usable_cores
from unisono.launch.command import PER_WORKER, elastic_command
from unisono.launch.elastic.elastic import ElasticSettings, Range
from unisono.launch.ending.result import in_a_line, last_lines, open_folder
from unisono.launch.local import launch
from unisono.launch.settings import LaunchSettings, Script
from unisono.launch.terminal.terminal import SilentTerminal
from unisono.settings.reading import settings_by_path, variables_of, words_of
from unisono_lab.analysis.results import Results
from unisono_lab.analysis.study_folder import PlannedCell
from unisono_lab.measure.measuring import (
    Measured,
    Measurement,
    RunEnd,
    network,
    notes,
    rows,
    shown_settings,
    surroundings,
)


def _options(settings: LaunchSettings) -> list[str]:
    """Those of ``unisono run`` that a study sets."""
    return words_of(settings.options, without=("launch.grace_s",))


class StudyEngine:
    """Starts runs, one at a time: with the launcher of this host, unless a subclass starts them elsewhere.

    Attributes:
        name: the name of the engine, as in ``--on``; empty for this host.
    """

    name = ""

    def opened(self) -> AbstractContextManager[object]:
        """Within it runs can be started.

        Raises:
            JobError: what it needs is not here.
            LaunchError: it cannot be reached.
        """
        return nullcontext()

    def cores(self) -> int:
        """The number of cores for workers. Only within :meth:`opened`."""
        return usable_cores()

    def run(self, settings: LaunchSettings, place: Path) -> RunEnd:
        """One run in this folder, from its start to its end. Main thread only."""
        folder = open_folder(place, settings.script.stem)
        try:
            outcome = launch(settings, folder, SilentTerminal())
        except LaunchError as error:
            return RunEnd(1, str(error))
        words, log = in_a_line(outcome, folder)
        return RunEnd(outcome.exit_code, words, str(log.relative_to(folder.path)), outcome.interrupted, outcome.reason)

    def typed(self, settings: LaunchSettings) -> list[str]:
        """The words with which a person would start such a run, without those of the script."""
        return ["unisono", "run", "-n", str(settings.workers), *_options(settings)]


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
        from unisono.launch.ray.driver import connection

        with connection(shows_output=False):
            yield

    def cores(self) -> int:
        """Those of all nodes together."""
        import ray

        return max(1, int(ray.cluster_resources().get("CPU", 0)))

    def run(self, settings: LaunchSettings, place: Path) -> RunEnd:
        """As ``unisono run --on ray`` does it, with a fixed number of workers."""
        from unisono.launch.ray.driver import train
        from unisono.launch.ray.request import RayRequest

        whole = replace(settings, workers=0, run_dir=place)
        elastic = ElasticSettings(whole, Range(settings.workers, settings.workers), max_restarts=0)
        try:
            ended = train(RayRequest.of_this_process(elastic, self.resources))
        except LaunchError as error:
            return RunEnd(1, str(error))
        return RunEnd(ended.exit_code, ended.words or _why(place), interrupted=ended.interrupted)

    def typed(self, settings: LaunchSettings) -> list[str]:
        """``unisono run --on ray``."""
        return ["unisono", "run", "--on", "ray", "-n", str(settings.workers), *_options(settings)]


ASKED = (PREEMPTED, FIRST_SIGNAL + signal.SIGTERM)
"""Exit codes of ``srun`` whose workers were asked to leave, after they could do so by themselves, and before."""


class BySlurm(StudyEngine):
    """Job steps of the allocation that this process is in; without one, ``srun`` asks for one for each run."""

    name = "slurm"

    def opened(self) -> AbstractContextManager[object]:
        """Nothing is to be opened, but ``srun`` has to be there."""
        if shutil.which("srun") is None:
            raise JobError("--on slurm: there is no srun here: start the study on a node of a Slurm cluster")
        return nullcontext()

    def cores(self) -> int:
        """Those of the allocation; without one, those of this host, which is as good as any."""
        found = os.environ.get("SLURM_JOB_CPUS_PER_NODE", "")
        parts = [re.fullmatch(r"([0-9]{1,5})(?:\(x([0-9]{1,5})\))?", part) for part in found.split(",")]
        return sum(int(part[1]) * int(part[2] or 1) for part in parts if part) or usable_cores()

    def run(self, settings: LaunchSettings, place: Path) -> RunEnd:
        """One job step, whose tasks are the workers."""
        common = elastic_command(settings, place, None)
        (place / "logs").mkdir(parents=True)
        log = place / "logs" / "srun.log"
        environ = {name: value for name, value in common.environment(os.environ).items() if name not in PER_WORKER}
        environ.pop("UNISONO_LAUNCHER_PID", None)  # it is on another host
        words = [*self._srun(settings), sys.executable, "-u", *settings.script.argv]
        with log.open("wb") as output, _attended(words, env=environ, stdout=output) as (process, heard):
            code = process.wait()
        said = _why(place) or " ".join([f"srun ended with exit code {code}", *last_lines(log)[-1:]])
        asked = heard[0] if heard else signal.SIGTERM if code in ASKED else None  # Slurm asks job steps, not this
        return RunEnd(code, said, "logs/srun.log", asked)

    def typed(self, settings: LaunchSettings) -> list[str]:
        """``srun``."""
        told = variables_of(settings.options)
        return [*(f"{name}={value}" for name, value in told.items()), *self._srun(settings), "python"]

    @staticmethod
    def _srun(settings: LaunchSettings) -> list[str]:
        """A worker for each task; as few nodes as there is room on."""
        per_node = re.match(r"[0-9]{1,5}", os.environ.get("SLURM_NTASKS_PER_NODE", ""))
        nodes = -(-settings.workers // int(per_node[0])) if per_node and int(per_node[0]) else None
        count = [] if nodes is None else [f"--nodes={nodes}", f"--ntasks-per-node={-(-settings.workers // nodes)}"]
        cores = os.environ.get("SLURM_CPUS_PER_TASK")  # which srun does not take over by itself
        count += [f"--cpus-per-task={cores}"] if cores else []
        return ["srun", "--kill-on-bad-exit=1", f"--ntasks={settings.workers}", *count]


ENGINES: Mapping[str | None, type[StudyEngine]] = {None: StudyEngine, "ray": OnRay, "slurm": BySlurm}


@contextmanager
def _attended(words: list[str], **how: Any) -> Iterator[tuple[subprocess.Popen[bytes], list[int]]]:
    """A process that hears SIGTERM when this one is to end: its workers leave, and it ends. Yields the signals, too."""
    heard: list[int] = []
    process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stderr=subprocess.STDOUT, start_new_session=True, **how)

    def asked(number: int, frame: FrameType | None) -> None:
        heard.append(number)
        process.terminate()

    before = {number: signal.signal(number, asked) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield process, heard
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if process.poll() is None:
            process.kill()
            process.wait()


def _why(place: Path) -> str:
    """The error of a run, as ``result.json`` says it; empty if it says none."""
    try:
        error = (RunFolder(place).read_result() or {}).get("error")
    except (OSError, ValueError):
        return ""
    return str(error["message"]) if isinstance(error, dict) and "message" in error else ""


# Runs of a study, each started by the study's engine, and the results that they come to.

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
        options = {
            # Of weak scaling's batch there are more shards than these, one for every worker at least.
            "shards": None if is_plain or kind.mode == "weak" else wanted.shards,
            "arithmetic.threads": wanted.plain_threads(kind) if is_plain else wanted.threads,
            "launch.grace_s": TRIAL_GRACE_S,
            "launch.tuning": None if wanted.tuned else False,
        }
        return LaunchSettings.tuned(
            Script.from_argv(wanted.baseline if is_plain else wanted.script),
            settings_by_path(options),
            workers=1 if is_plain else kind.workers,
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
