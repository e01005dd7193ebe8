"""A job with injected faults, and the same job without: their weights must be the same."""

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
from typing import Any

import psutil

from unisono.checkpoint.folder import write_json
from unisono.errors import FIRST_SIGNAL, PREEMPTED, JobError, UnisonoError
from unisono.jsonl import read_lines
from unisono.launch.command import PER_WORKER
from unisono.launch.elastic.address import Control, address_of
from unisono.launch.ending.result import last_lines
from unisono.launch.settings import Script
from unisono.received import read_object
from unisono_lab.faults.faults import Faults, RandomFaults, count
from unisono_lab.faults.samples import Samples, problems

SERIAL, STRUCK, SCRIPT, REPORT = "serial", "struck", "faults.toml", "chaos.json"
"""In the folder: the run folders of both jobs, the fault plan, and the report."""

TRAINED = "serial.json"
"""In the folder, once the job alone is done: which job it was. Another try in the folder need not run it again."""

MARK = "UNISONO_CHAOS"
"""The variable by which everything that a job has started is found again."""

NOT_HANDED_ON = (*PER_WORKER, "UNISONO_RUN_DIR")

RESTARTS_PER_PLACE = 10_000
SPARE_STARTS = 5
LOOK_S = 0.5
GONE_S = 15.0
"""How long what an agent has started may live on after it was killed."""


@dataclass(frozen=True, slots=True)
class ChaosSpec:
    """The settings of a chaos test: the job, and the faults that it has to survive.

    Attributes:
        script: the training script.
        folder: the folder for everything that is left behind.
        seed: the seed of the faults.
        faults: the number of faults.
        workers: the numbers of workers that the job may have, as ``A:B``.
        largest: the largest number of workers, B.
        devices: the number of devices of each worker; the job without faults has one.
        failure_timeout_s: the seconds of silence after which a worker counts as lost.
        patience_s: the seconds without a step after which the job is taken to hang.
        checkpoint_every: the number of steps between checkpoints; None for fifty checkpoints in the whole run.
        written: a fault plan to use instead of a drawn one.
    """

    script: Script
    folder: Path
    seed: int = 0
    faults: int = 50
    workers: str = "1:4"
    largest: int = 4
    devices: int = 1
    failure_timeout_s: float = 5.0
    patience_s: float = 120.0
    checkpoint_every: int | None = None
    written: Faults | None = None


@dataclass(frozen=True, slots=True)
class ChaosResult:
    """The result of a chaos test.

    Attributes:
        steps: the number of steps of the job.
        planned: the number of planned faults of each kind.
        struck: the number of injected faults of each kind.
        generations: the number of generations that the workers formed.
        starts: the number of times that the job was started.
        repeated: the number of times that a step was begun again.
        seconds: the duration of the job, in seconds.
        serial_digest: the digest of the weights without faults.
        digest: the digest of the weights with faults; None if the job did not come to an end.
        problems: what is wrong with the samples, or with the way in which the job ended, as sentences.
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

    def write(self, path: Path) -> None:
        """Write it down as JSON."""
        write_json(path, {**asdict(self), "passed": self.is_good})


Say = Callable[[str], None]
"""Shows a line to the person who waits."""


def run_chaos(spec: ChaosSpec, say: Say) -> ChaosResult:
    """Run the job alone, then run it with faults, and compare.

    Raises:
        JobError: the job fails even if nothing disturbs it, or the folder has been used.
    """
    if (spec.folder / STRUCK).exists():
        raise JobError(f"{spec.folder} has been used: name another folder with --run-dir")
    spec.folder.mkdir(parents=True, exist_ok=True)
    serial = _serial(spec, say)
    steps = int(serial["steps"])
    drawn = RandomFaults(spec.seed, spec.faults, steps, spec.largest, devices=spec.devices)
    faults = spec.written or drawn.draw()
    (spec.folder / SCRIPT).write_text(faults.to_toml(), encoding="utf-8")
    say(f"{steps} steps; the job with {len(faults.faults)} faults, on {spec.workers} workers")
    begun = time.monotonic()
    struck = _Struck(spec, faults, steps, say)
    struck.run()
    verdict = _judge(spec, faults, serial, struck, time.monotonic() - begun)
    verdict.write(spec.folder / REPORT)
    return verdict


def _serial(spec: ChaosSpec, say: Say) -> dict[str, Any]:
    folder, known = spec.folder / SERIAL, spec.folder / TRAINED
    if _read(known).get("argv") == spec.script.argv:
        say(f"the job alone is known from {folder}")
        return _read(folder / "result.json")
    if folder.exists():
        raise JobError(f"{folder} is of another job, or of one that did not end: name another folder with --run-dir")
    say("the job alone, on one worker")
    with _started(_command(spec, folder, "-n", "1"), folder) as job:
        code = job.wait()
    found = _read(folder / "result.json")
    if code or not found.get("weights_sha256"):
        raise JobError(f"the job ends with exit code {code} even if nothing disturbs it{_words(folder)}")
    write_json(known, {"argv": spec.script.argv})
    return found


def _judge(spec: ChaosSpec, faults: Faults, serial: Mapping[str, Any], struck: _Struck, seconds: float) -> ChaosResult:
    samples, alone = Samples.read(struck.folder), Samples.read(spec.folder / SERIAL)
    digest = _read(struck.folder / "result.json").get("weights_sha256") if struck.is_done else None
    wrong = list(struck.problems)
    if struck.is_done:
        wrong += problems(samples, int(serial["steps"]), _shards(spec.folder / SERIAL), alone)
    journal = read_lines(struck.folder / "journal.jsonl")
    return ChaosResult(
        steps=int(serial["steps"]),
        planned=faults.counts,
        struck=count(str(line["kind"]) for line in journal if line["event"] == "fault"),
        generations=sum(line["event"] == "minted" for line in journal),
        starts=struck.starts,
        repeated=samples.repeated,
        seconds=round(seconds, 1),
        serial_digest=str(serial["weights_sha256"]),
        digest=digest,
        problems=tuple(wrong),
    )


@dataclass
class _Struck:
    """The job with injected faults, from its first start to its end.

    Attributes:
        problems: what is wrong with its end, as sentences; empty while nothing is.
        starts: the number of times that it was started.
        is_done: whether it has come to its end.
    """

    spec: ChaosSpec
    faults: Faults
    steps: int
    say: Say
    problems: list[str] = field(default_factory=list)
    starts: int = 0
    is_done: bool = False

    @property
    def folder(self) -> Path:
        """Its run folder."""
        return self.spec.folder / STRUCK

    def run(self) -> None:
        """Start it, and start it again whenever it was ended by a fault."""
        counts = self.faults.counts
        most = 1 + counts.get("kill_agent", 0) + counts.get("leave", 0) + SPARE_STARTS
        while not self.is_done and not self.problems:
            if self.starts == most:
                self.problems.append(f"it was started {most} times, and is not done")
                return
            self.starts += 1
            self._run_once()

    def _run_once(self) -> None:
        mark = secrets.token_hex(8)
        with _started(self._command(), self.folder, mark) as job:
            code = self._await(job, mark)
        if code is None:
            return
        self._look_for_leftovers(mark)
        if code == 0:
            self.is_done = True
        elif why := why_again(code, _read(self.folder / "result.json")):
            self.say(f"{why}: starting it again")
        else:
            self.problems.append(f"it ended with exit code {code}{_words(self.folder)}")

    def _command(self) -> list[str]:
        every = self.spec.checkpoint_every or max(1, self.steps // 50)
        options = {
            "-n": self.spec.workers,
            "--max-restarts": RESTARTS_PER_PLACE,
            "--failure-timeout-s": self.spec.failure_timeout_s,
            "--checkpoint-every": every,
            "--faults": self.spec.folder / SCRIPT,
            **({"--devices-per-worker": self.spec.devices} if self.spec.devices > 1 else {}),
        }
        return _command(self.spec, self.folder, *(str(word) for pair in options.items() for word in pair))

    def _await(self, job: subprocess.Popen[bytes], mark: str) -> int | None:
        """Its exit code; None if it does nothing any more."""
        seen, since = -1, time.monotonic()
        while True:
            with suppress(subprocess.TimeoutExpired):
                return job.wait(LOOK_S)
            if (now := _progress(self.folder)) != seen:
                seen, since = now, time.monotonic()
            elif time.monotonic() - since > self.spec.patience_s:
                self._give_up(mark)
                return None

    def _give_up(self, mark: str) -> None:
        """It hangs: end it."""
        words = f"it did nothing for {self.spec.patience_s:g} s, and was ended"
        self.problems.append(f"{words}; the coordinator says: {_status(self.folder)}")
        _end(mark)

    def _look_for_leftovers(self, mark: str) -> None:
        until = time.monotonic() + GONE_S
        while left := _marked(mark):
            if time.monotonic() > until:
                self.problems += [f"process {each.pid} outlived its agent: {' '.join(each.cmdline())}" for each in left]
                _end(mark)
                return
            psutil.wait_procs(left, LOOK_S)


def why_again(code: int, result: Mapping[str, Any]) -> str:
    """What a fault has done to a job that is to be started again; nothing if it is not.

    Args:
        code: the exit code of the job; minus the signal's number if a signal ended it.
        result: the content of its ``result.json``.
    """
    if code == -signal.SIGKILL:
        return "its agent was killed"
    if code == PREEMPTED:
        return "all its workers were asked to leave"
    if code > FIRST_SIGNAL and result.get("weights_sha256"):
        return "a fault hit its main worker in the script's last lines"
    return ""


@contextmanager
def _started(command: Sequence[str], folder: Path, mark: str = "") -> Iterator[subprocess.Popen[bytes]]:
    """A job; ended if whoever waits for it is interrupted."""
    environment = {name: value for name, value in os.environ.items() if name not in NOT_HANDED_ON}
    mark = mark or secrets.token_hex(8)
    with _output(folder).open("ab") as output:
        job = subprocess.Popen(
            command,
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


def _command(spec: ChaosSpec, folder: Path, *options: str) -> list[str]:
    own = [sys.executable, "-P", "-m", "unisono", "run", *options, "--run-dir", str(folder)]
    script = spec.script
    return [*own, *(["-m"] if script.is_module else []), script.target, *script.args]


def _marked(mark: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def _end(mark: str) -> None:
    while left := _marked(mark):
        for process in left:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(left, LOOK_S)


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


def _shards(folder: Path) -> int:
    return int(read_object(folder / "job.json")["shards"])


def _output(folder: Path) -> Path:
    """What a job prints, beside its run folder."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    return folder.with_suffix(".txt")


def _words(folder: Path) -> str:
    return f" (log {_output(folder)})" + "".join(f"\n  | {line}" for line in last_lines(_output(folder)))
