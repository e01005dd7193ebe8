"""``unisono chaos``: inject faults into a job until it is done, and compare it with the same job without faults."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import psutil
import typer
from rich.console import Console
from rich.text import Text

from unisono.checkpoint.folder import new_run_folder, write_json
from unisono.cli.display import bare_table, show_table
from unisono.cli.options import Module, ScriptName, grouped, named_folder, opt
from unisono.errors import FIRST_SIGNAL, PREEMPTED, JobError, UnisonoError
from unisono.jsonl import read_lines
from unisono.launch.command import PER_WORKER
from unisono.launch.elastic.address import Control, address_of
from unisono.launch.elastic.elastic_settings import Range
from unisono.launch.outcome import RUNS, last_lines
from unisono.launch.settings import Script
from unisono.received import LONGEST_S, read_object
from unisono_lab.faults.faults import Faults, RandomFaults, count

SERIAL, STRUCK, PLAN, REPORT = "serial", "struck", "faults.toml", "chaos.json"
"""The names in the folder: the run folders without and with faults, the fault plan, and the report."""

TRAINED = "serial.json"
"""The file that says which job ran without faults, written when it is done; another test in the folder reuses it."""

MARK = "UNISONO_CHAOS"
"""The environment variable that marks every process which a job has started."""

NOT_HANDED_ON = (*PER_WORKER, "UNISONO_RUN_DIR")

RESTARTS_PER_PLACE = 10_000
SPARE_STARTS = 5
LOOK_S = 0.5
OUTLIVE_S = 15.0
"""The seconds for which processes may outlive their killed agent."""


@dataclass(frozen=True, slots=True)
class ChaosOptions:
    """The options of this command."""

    seed: Annotated[int, opt()] = 0
    """The seed of the fault plan: the same seed gives the same faults."""
    faults: Annotated[int, opt(min=1)] = 50
    """The number of faults."""
    written: Annotated[Path | None, opt("--script")] = None
    """A fault plan (TOML) to use instead of one drawn from the seed."""
    workers: Annotated[str, opt("-n", "--workers", metavar="A:B")] = "1:4"
    """The range of workers."""
    devices_per_worker: Annotated[int, opt(min=1)] = 1
    """The number of devices of each worker; in the job without faults the worker has one."""
    module: Module = False
    run_dir: Annotated[Path | None, opt(parser=named_folder, metavar="FOLDER")] = None
    """A new folder for both jobs and the report."""
    checkpoint_every: Annotated[int | None, opt(min=1)] = None
    """The number of steps between checkpoints; by default the run writes fifty checkpoints."""
    failure_timeout_s: Annotated[float, opt()] = 5.0
    """The seconds of silence after which a worker counts as lost."""
    patience_s: Annotated[float, opt()] = 120.0
    """The seconds without progress after which the job is ended."""

    @property
    def range(self) -> Range:
        """The numbers of workers.

        Raises:
            JobError: this or another option makes no sense; the message names it.
        """
        workers = Range.read(self.workers)
        for name, seconds in {"failure-timeout-s": self.failure_timeout_s, "patience-s": self.patience_s}.items():
            if not 0 < seconds <= LONGEST_S:
                raise JobError(f"--{name} {seconds:g}: needs a number of seconds above 0, at most {LONGEST_S:g}")
        if not 1 <= workers.smallest < workers.largest:
            raise JobError(
                f"--workers {self.workers}: faults change the number of workers, so write a range, such as 1:4"
            )
        return workers


@dataclass(frozen=True, slots=True)
class ChaosResult:
    """The result of a chaos test.

    Attributes:
        struck: the number of injected faults of each kind.
        starts: the number of times that the job was started.
        repeated: the number of times that a step was begun again.
        digest: the digest of the weights with faults; None if the job did not come to an end.
        problems: sentences that say what is wrong with the samples, or with the way in which the job ended.
    """

    steps: int
    planned: Mapping[str, int]
    struck: Mapping[str, int]
    generations: int
    starts: int
    repeated: int
    seconds: float
    serial_digest: str
    digest: str | None
    problems: Sequence[str] = ()

    @property
    def is_good(self) -> bool:
        """Whether the job ended with the weights and the samples of the one without faults."""
        return self.digest == self.serial_digest and not self.problems


Show = Callable[[str], None]
"""Shows a line to the user."""


def run_chaos(options: ChaosOptions, script: Script, folder: Path, plan: Faults | None, show: Show) -> ChaosResult:
    """Run the job without faults, then run it with faults, and compare.

    Raises:
        JobError: the job fails even without faults, or the folder holds an earlier test.
    """
    if (folder / STRUCK).exists():
        raise JobError(f"{folder} holds an earlier test: name another folder with --run-dir")
    folder.mkdir(parents=True, exist_ok=True)
    serial = _serial(script, folder, show)
    steps = int(serial["steps"])
    drawn = RandomFaults(options.seed, options.faults, steps, options.range.largest, devices=options.devices_per_worker)
    plan = plan or drawn.draw()
    (folder / PLAN).write_text(plan.to_toml(), encoding="utf-8")
    show(f"{steps} steps; now the job runs with {len(plan.faults)} faults, on {options.range} workers")
    started_at = time.monotonic()
    struck = _Struck(options, script, folder, plan, steps, show)
    struck.run()
    result = _judge(folder, serial, struck, round(time.monotonic() - started_at, 1))
    write_json(folder / REPORT, {**asdict(result), "passed": result.is_good})
    return result


def _serial(script: Script, folder: Path, show: Show) -> dict[str, Any]:
    run_folder, record = folder / SERIAL, folder / TRAINED
    if _read(record).get("argv") == script.argv:
        show(f"the result of the job without faults is taken from {run_folder}")
        return _read(run_folder / "result.json")
    if run_folder.exists():
        raise JobError(
            f"{run_folder} belongs to another job, or to a job that did not end: name another folder with --run-dir"
        )
    show("the job runs without faults, on one worker")
    with _started(script, run_folder, "-n", "1", mark=secrets.token_hex(8)) as job:
        code = job.wait()
    result = _read(run_folder / "result.json")
    if code or not result.get("weights_sha256"):
        raise JobError(f"the job ends with exit code {code} even without faults{_last_output(run_folder)}")
    write_json(record, {"argv": script.argv})
    return result


def _judge(folder: Path, serial: Mapping[str, Any], struck: _Struck, seconds: float) -> ChaosResult:
    from unisono_lab.faults.samples import Samples, problems  # this module loads torch

    samples, steps, digest = Samples.read(struck.run_folder), int(serial["steps"]), None
    sentences = list(struck.problems)
    if struck.is_done:
        digest = _read(struck.run_folder / "result.json").get("weights_sha256")
        shards = int(read_object(folder / SERIAL / "job.json")["shards"])
        sentences += problems(samples, steps, shards, Samples.read(folder / SERIAL))
    journal = read_lines(struck.run_folder / "journal.jsonl")
    return ChaosResult(
        steps=steps,
        planned=struck.plan.counts,
        struck=count(str(line["kind"]) for line in journal if line["event"] == "fault"),
        generations=sum(line["event"] == "minted" for line in journal),
        starts=struck.starts,
        repeated=samples.repeated,
        seconds=seconds,
        serial_digest=str(serial["weights_sha256"]),
        digest=digest,
        problems=tuple(sentences),
    )


@dataclass
class _Struck:
    """The job with injected faults, from its first start to its end.

    Attributes:
        problems: sentences that say what is wrong with its end; empty while nothing is wrong.
    """

    options: ChaosOptions
    script: Script
    folder: Path
    plan: Faults
    steps: int
    show: Show
    problems: list[str] = field(default_factory=list)
    starts: int = 0
    is_done: bool = False

    @property
    def run_folder(self) -> Path:
        return self.folder / STRUCK

    def run(self) -> None:
        """Start the job, and start it again whenever a fault has ended it."""
        counts = self.plan.counts
        most = 1 + counts.get("kill_agent", 0) + counts.get("leave", 0) + SPARE_STARTS
        while not self.is_done and not self.problems:
            if self.starts == most:
                self.problems.append(f"the job was started {most} times, and is not done")
                return
            self.starts += 1
            self._run_once()

    def _run_once(self) -> None:
        mark = secrets.token_hex(8)
        with _started(self.script, self.run_folder, *self._options(), mark=mark) as job:
            code = self._await(job, mark)
        if code is None:
            return
        self._look_for_leftovers(mark)
        if code == 0:
            self.is_done = True
        elif reason := restart_reason(code, _read(self.run_folder / "result.json")):
            self.show(f"{reason}: the job is started again")
        else:
            self.problems.append(f"the job ended with exit code {code}{_last_output(self.run_folder)}")

    def _options(self) -> list[str]:
        options = self.options
        arguments = {
            "-n": options.range,
            "--max-restarts": RESTARTS_PER_PLACE,
            "--failure-timeout-s": options.failure_timeout_s,
            "--checkpoint-every": options.checkpoint_every or max(1, self.steps // 50),
            "--faults": self.folder / PLAN,
            **({"--devices-per-worker": options.devices_per_worker} if options.devices_per_worker > 1 else {}),
        }
        return [str(word) for pair in arguments.items() for word in pair]

    def _await(self, job: subprocess.Popen[bytes], mark: str) -> int | None:
        """Wait for the job; returns its exit code, or None if it hung and was ended."""
        progress, since = -1, time.monotonic()
        while time.monotonic() - since <= self.options.patience_s:
            with suppress(subprocess.TimeoutExpired):
                return job.wait(LOOK_S)
            if (newest := _progress(self.run_folder)) != progress:
                progress, since = newest, time.monotonic()
        words = f"the job made no progress for {self.options.patience_s:g} s, and was ended"
        self.problems.append(f"{words}; the coordinator says: {_status(self.run_folder)}")
        _end(mark)
        return None

    def _look_for_leftovers(self, mark: str) -> None:
        until = time.monotonic() + OUTLIVE_S
        while processes := _marked(mark):
            if time.monotonic() > until:
                self.problems += [
                    f"process {process.pid} outlived its agent: {' '.join(process.cmdline())}" for process in processes
                ]
                _end(mark)
                return
            psutil.wait_procs(processes, LOOK_S)


def restart_reason(code: int, result: Mapping[str, Any]) -> str:
    """The reason to start a job again: what a fault has done to it; empty if the job failed by itself.

    The code is minus the signal's number if a signal ended the job.
    """
    if code == -signal.SIGKILL:
        return "its agent was killed"
    if code == PREEMPTED:
        return "all its workers were asked to leave"
    if code > FIRST_SIGNAL and result.get("weights_sha256"):
        return "a fault hit its main worker in the script's last lines"
    return ""


@contextmanager
def _started(script: Script, folder: Path, *options: str, mark: str) -> Iterator[subprocess.Popen[bytes]]:
    """Start a job in this run folder; it is ended if waiting for it is interrupted."""
    environment = {name: value for name, value in os.environ.items() if name not in NOT_HANDED_ON}
    command = [sys.executable, "-P", "-m", "unisono", "run", *options, "--run-dir", str(folder)]
    with _output(folder).open("ab") as output:
        job = subprocess.Popen(
            [*command, *(["-m"] if script.is_module else []), script.target, *script.args],
            env={**environment, MARK: mark, "UNISONO_SAMPLES": "1"},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        yield job
    finally:
        if job.poll() is None:
            _end(mark)
        job.wait()


def _marked(mark: str) -> list[psutil.Process]:
    marked = []
    for process in psutil.process_iter():
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                marked.append(process)
    return marked


def _end(mark: str) -> None:
    # Again and again: a process may have started another one between the search and the kill.
    while processes := _marked(mark):
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(processes, LOOK_S)


def _progress(folder: Path) -> int:
    """A number that changes as long as the job does something."""
    files = [folder / "journal.jsonl", folder / "metrics.jsonl"]
    return sum(path.stat().st_size for path in files if path.exists())


def _status(folder: Path) -> str:
    try:
        return json.dumps(Control(address_of(folder)).status())
    except UnisonoError as error:
        return str(error)


def _read(path: Path) -> dict[str, Any]:
    try:
        return read_object(path)
    except (OSError, ValueError):
        return {}


def _output(folder: Path) -> Path:
    """The file with the output of a job, beside its run folder."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    return folder.with_suffix(".txt")


def _last_output(folder: Path) -> str:
    return f" (log {_output(folder)})" + "".join(f"\n  | {line}" for line in last_lines(_output(folder)))


DIGITS = 16
MOST_PROBLEMS = 20


@grouped
def chaos(
    script: ScriptName,
    args: Annotated[
        list[str] | None, typer.Argument(help="The arguments of the script, after --.", metavar="-- ARGS")
    ] = None,
    *,
    options: ChaosOptions,
) -> None:
    """Train with random faults, and compare the weights.

    The weights and samples are compared with those of a run without faults. The exit code is 0 if they are the same,
    and 1 if not.
    """
    _ = options.range
    target = Script(script, tuple(args or ()), is_module=options.module)
    target.require_readable()
    plan = None if options.written is None else Faults.read(options.written)
    folder = (options.run_dir or new_run_folder(RUNS, f"chaos-{target.stem}")).absolute()
    out, err = (Console(stderr=stderr, highlight=False, emoji=False) for stderr in (False, True))
    result = run_chaos(options, target, folder, plan, lambda line: err.print(Text(f"unisono: {line}"), soft_wrap=True))
    _show(result, out)
    out.print(Text(f"fault plan: {folder / PLAN}; report: {folder / REPORT}", "dim"), soft_wrap=True)
    raise typer.Exit(0 if result.is_good else 1)


def _show(result: ChaosResult, out: Console) -> None:
    rows = [(kind, str(number), str(result.struck.get(kind, 0))) for kind, number in result.planned.items()]
    rows.append(("all", str(sum(result.planned.values())), str(sum(result.struck.values()))))
    show_table(bare_table(("fault", "planned", "injected"), rows), out)
    alone, digest = result.serial_digest[:DIGITS], (result.digest or "none")[:DIGITS]
    facts = {
        "steps": f"{result.steps}; a step was begun again {result.repeated} times",
        "generations": f"{result.generations}",
        "starts": f"{result.starts}",
        "seconds": f"{result.seconds:g}",
        "weights": f"{alone} without faults, {digest} with faults",
        "samples": "see below" if result.problems else "each used exactly once",
    }
    for name, fact in facts.items():
        out.print(Text(f"{name:>12}  {fact}"), soft_wrap=True)
    for problem in result.problems[:MOST_PROBLEMS]:
        out.print(Text(problem, "red"), soft_wrap=True)
    if len(result.problems) > MOST_PROBLEMS:
        out.print(Text(f"… and {len(result.problems) - MOST_PROBLEMS} problems more", "red"))
    words = Text("passed: weights and samples are those of the run without faults", "bold green")
    out.print(words if result.is_good else Text("FAILED", "bold red"), soft_wrap=True)
