"""Running a script with several numbers of workers, one after the other, and comparing what they trained."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

from unisono.checkpoint.folder import RunFolder
from unisono.errors import JobError
from unisono.launch.ending.outcome import Outcome
from unisono.launch.ending.result import open_folder
from unisono.launch.local import Launcher, launch
from unisono.launch.settings import LaunchSettings, Script, Size
from unisono.launch.terminal.terminal import SilentTerminal
from unisono.launch.tuning import Tuning
from unisono.launch.verify.cause import Case, Cause, explain
from unisono.launch.verify.comparison import Finding, Moments, RunTrace, Stage, compare, compare_ranks, find_parting
from unisono.launch.verify.comparison import read_moments as moments_of
from unisono.launch.verify.hints import Hint, read_hints
from unisono.received import parse_object
from unisono.settings.reading import settings_by_path


@dataclass(frozen=True, slots=True)
class VerifyRequest:
    """A request to compare a script's runs on several numbers of workers.

    Attributes:
        script: the user's script or module.
        sizes: the size of each run; all runs are compared with the first.
        steps: the number of steps of each run to compare.
        shards: the job's number of shards, if set here.
        threads: the number of threads of each worker, if set here.
        tuning: the settings of the workers' memory allocator.
    """

    script: Script
    sizes: tuple[Size, ...]
    steps: int = 20
    shards: int | None = None
    threads: int | None = None
    tuning: Tuning = field(default_factory=Tuning)

    def check(self) -> None:
        """Refuse what cannot work, before anything is started.

        Raises:
            JobError: a number is out of range, or the script cannot be run; names it.
        """
        if self.steps < 1:
            raise JobError(f"--steps {self.steps}: at least 1 is needed")
        for size in self.sizes:
            self.settings(size, Path(), self.steps).check()

    def settings(self, size: Size, trace: Path, steps: int) -> LaunchSettings:
        """How to start one of the runs."""
        return LaunchSettings(
            self.script,
            workers=size.workers,
            options=settings_by_path(
                {
                    "communication.devices_per_worker": size.devices,
                    "shards": self.shards,
                    "arithmetic.threads": self.threads,
                }
            ),
            tuning=self.tuning,
            extra_environment={"UNISONO_TRACE": str(trace.absolute()), "UNISONO_STOP_AFTER": str(steps)},
        )


@dataclass(frozen=True, slots=True)
class TracedRun:
    """A run that has ended.

    Attributes:
        trace: the trace of its workers.
        outcome: the end of the run.
        folder: its run folder.
    """

    trace: RunTrace
    outcome: Outcome
    folder: RunFolder

    @property
    def failed(self) -> bool:
        """Whether the script did not end well."""
        return self.outcome.exit_code != 0


@dataclass(frozen=True, slots=True)
class VerifyResult:
    """The result of a verification.

    Attributes:
        runs: the runs in the order in which they were started; the last one may have failed.
        findings: the first differences of each run from the first run, or between its own ranks; None for equal runs.
        case: the first finding, and whether the first run repeats itself.
        cause: the likely cause.
        hints: places in the script that may have to do with it.
    """

    runs: tuple[TracedRun, ...]
    findings: tuple[Finding | None, ...]
    case: Case | None = None
    cause: Cause | None = None
    hints: tuple[Hint, ...] = ()

    @property
    def failed(self) -> TracedRun | None:
        """The run whose script did not end well; None if all did."""
        return next((run for run in self.runs if run.failed), None)

    @property
    def exit_code(self) -> int:
        """0 if all weights are identical, the script's own code if it failed, else 1."""
        if self.failed is not None:
            return self.failed.outcome.exit_code
        return 0 if self.case is None else 1


Watch = Callable[[str, Path], AbstractContextManager[object]]
"""Shows that a run is under way, until the context ends, given what it is and the folder of its traces."""


def verify(request: VerifyRequest, folder: Path, watch: Watch) -> VerifyResult:
    """Run the script with each number of workers and compare. Main thread only.

    A run that fails is the last one.

    Args:
        request: what to run; must have been checked.
        folder: an empty one, for run folders and traces.
        watch: shows what is under way.

    Raises:
        JobError: the script does nothing that could be compared; says what is missing.
        LaunchError: a worker could not be started.
    """
    runs: list[TracedRun] = []
    with Launcher(share=True) as launcher:
        runner = _Runner(request, watch, launcher)
        for number, size in enumerate(request.sizes, start=1):
            place = folder / f"run-{number}-{str(size).replace(' ', '-')}"
            label = f"run {number} of {len(request.sizes)}: {size}"
            runs.append(runner.run(size, place, label, fresh=number == 1))
            if runs[-1].failed:
                break
            _require_steps(request, runs)
        return _judge(runner, runs, folder)


def _judge(runner: _Runner, runs: Sequence[TracedRun], folder: Path) -> VerifyResult:
    reference = runs[0].trace
    findings = (compare_ranks(reference), *(compare(reference, run.trace) for run in runs[1:]))
    finding = next((each for each in findings if each is not None), None)
    if finding is None:
        return VerifyResult(tuple(runs), findings)
    case = Case(finding, _repeats(runner, reference, finding, folder))
    cause = explain(case)
    return VerifyResult(tuple(runs), findings, case, cause, _hints(runner.request.script, cause))


def _repeats(runner: _Runner, reference: RunTrace, finding: Finding, folder: Path) -> bool | None:
    """Whether the first run, started again, does the same up to the step in question."""
    if not finding.needs_repetition:
        return None
    step = finding.began.step
    label = f"looking for the cause: {reference.size} again"
    again = runner.run(reference.size, folder / "again", label, steps=step + 1)
    if again.failed:
        return None
    return find_parting(reference.until(step).whole, again.trace.whole, whole=False) is None


def _hints(script: Script, cause: Cause) -> tuple[Hint, ...]:
    if script.is_module:
        return ()
    hints = [hint for hint in read_hints(Path(script.target)) if hint.topic in cause.topics]
    return tuple(sorted(hints, key=lambda hint: cause.topics.index(hint.topic)))


@dataclass(frozen=True, slots=True)
class _Runner:
    """Runs the script once for each number of workers that it is asked for."""

    request: VerifyRequest
    watch: Watch
    launcher: Launcher

    def run(self, size: Size, place: Path, label: str, *, steps: int | None = None, fresh: bool = False) -> TracedRun:
        """A run from its start to its end, traced."""
        # Forks of one process go through a set of words in the same order, so the first run is no such fork.
        start = launch if fresh else self.launcher.launch
        request, traces = self.request, place / "trace"
        for part in (place / "run", traces):
            part.mkdir(parents=True)
        folder = open_folder(place / "run", request.script.stem)
        settings = request.settings(size, traces, steps or request.steps)
        with self.watch(label, traces):
            outcome = start(settings, folder, SilentTerminal())
        complete = outcome.exit_code == 0
        ranks = tuple(_read(traces / f"rank-{rank}.jsonl", whole=complete) for rank in range(size.processes))
        return TracedRun(RunTrace(size, ranks, folder.read_job() or {}, complete), outcome, folder)


def _read(path: Path, *, whole: bool) -> Moments:
    if not path.exists():
        return ()
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    # A worker that was ended may have left half a line.
    return moments_of(parse_object(line) for line in lines if whole or line.endswith("\n"))


def _require_steps(request: VerifyRequest, runs: Sequence[TracedRun]) -> None:
    """Refuse to compare nothing."""
    target, run = request.script.target, runs[-1]
    moments = run.trace.whole
    if not moments:
        started = (run.folder.path / "journal.jsonl").exists()
        missing = "run.prepare" if started else "unisono.init"
        raise JobError(
            f"{target} ended without ever calling {missing}, so there are no weights to compare. Does it train with "
            f"these arguments? Unisono's loop is: run = unisono.init(…), run.prepare(…), run.steps(…)"
        )
    if moments[0].stage is Stage.START and moments[0].step > 0:
        raise JobError(
            f"{target} went on from a checkpoint after step {moments[0].step}, but every run has to begin at the "
            f"start: it names a run folder of its own, so let it leave run_dir out, or name an empty one"
        )
    if len(runs) == 1 and run.trace.steps == 0:
        raise JobError(f"{target} took no step: is there a loop `for step in run.steps(…)` in it, and is it reached?")
