"""Runs a script with several numbers of workers, compares the weights, and explains differences.

The causes, and what to do about each, are in ``causes.toml``.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from unisono.errors import JobError
from unisono.launch.comparison import (
    Difference,
    Finding,
    Moments,
    RunTrace,
    Stage,
    compare,
    compare_ranks,
    find_parting,
)
from unisono.launch.comparison import read_moments as moments_of
from unisono.launch.hints import Hint, Topic, read_hints
from unisono.launch.local import Launcher
from unisono.launch.settings import LaunchSettings, Script, Size
from unisono.launch.trial import Trial
from unisono.launch.tuning import Tuning
from unisono.received import parse_object
from unisono.settings.reading import settings_by_path

PROCESS = (Topic.RANK, Topic.GENERATOR, Topic.ORDER, Topic.WORLD)
CHANCE = (Topic.UNSEEDED, Topic.TIME, Topic.GENERATOR, Topic.ORDER, Topic.RELAXED)

DRAWING = {
    Stage.LOSSES: "the loss function",
    Stage.SHARES: "the weight that the loss function returns",
    Stage.GRADIENTS: "the backward pass",
    Stage.UPDATED: "the optimizer's update",
    Stage.WEIGHTS: "what writes into that buffer",
}
"""The code that may draw by chance, by the stage whose values differ."""

MOST_NAMED = 8
"""The most shards that one line names."""


@dataclass(frozen=True, slots=True)
class Cause:
    """The likely cause of a finding.

    Attributes:
        topics: the kinds of places in the script that may have to do with it, the likeliest first.
    """

    likely: str
    todo: str
    topics: tuple[Topic, ...] = ()


@dataclass(frozen=True, slots=True)
class Case:
    """A finding, and whether the reference run repeats itself; None if that was not tried."""

    finding: Finding
    repeats: bool | None = None

    @property
    def by_chance(self) -> bool:
        """Whether two runs of the same size differ."""
        return self.repeats is False or self.finding.against == self.finding.size

    @property
    def among_ranks(self) -> bool:
        """Whether the ranks of one run differ."""
        return self.finding.against is None

    @property
    def depends_on(self) -> str:
        """The number on which a difference depends that is not chance, in words."""
        return "on the rank" if self.among_ranks else "on the number of workers"

    @property
    def asks(self) -> tuple[Topic, ...]:
        """The topics of code that depends on that number: all ranks of one run see the same number of workers."""
        return (Topic.RANK,) if self.among_ranks else (Topic.WORLD, Topic.RANK)

    @property
    def from_the_first(self) -> bool:
        """Whether shard 0 of step 0 differs: rank 0 computes it first of all, whatever the number of workers."""
        return self.finding.began.step == 0 and "0" in self.finding.began.names

    @property
    def absent(self) -> bool:
        """Whether only one of the runs has the first value that differs."""
        return self.finding.began.absent

    @property
    def of_trained(self) -> bool:
        """Whether a parameter differs, and not buffers alone."""
        finding = self.finding
        return finding.stage is Stage.BEFORE or not finding.trained.isdisjoint(finding.began.names)

    @property
    def of_further_ranks(self) -> bool:
        """Whether only shards of other ranks than 0 differ."""
        return bool(self.finding.ranks) and 0 not in self.finding.ranks

    @property
    def is_native(self) -> bool:
        """Whether the backend decides the order in which gradients are added."""
        return self.finding.jobs[1].get("reduction") == "native"

    @property
    def is_relaxed(self) -> bool:
        """Whether operations are allowed that are not deterministic."""
        return self.finding.jobs[1].get("deterministic") is False

    @property
    def words(self) -> dict[str, str]:
        """The values of the names in braces in the table of causes."""
        ranks = sorted(self.finding.ranks)
        return {
            "depends_on": self.depends_on,
            "settings": " and ".join(self.finding.job_differences),
            "ranks": f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}",
            "beside": "before" if self.finding.stage is Stage.BEFORE else "after",
            "drawing": DRAWING.get(self.finding.stage, ""),
        }


def explain(case: Case) -> Cause:
    """The likely cause of a finding: the first row of the table that fits."""
    stage, several = case.finding.stage.name, {"asks": case.asks, "process": PROCESS, "chance": CHANCE}
    rows = (row for row in _causes() if stage in row["stages"])
    row = next(row for row in rows if all(getattr(case, name) for name in row.get("when", ())))
    topics = tuple(topic for name in row["topics"] for topic in several.get(name) or (Topic[name],))
    return Cause(row["likely"].format(**case.words), row["todo"], topics)


@cache
def _causes() -> list[dict[str, Any]]:
    table: list[dict[str, Any]] = tomllib.loads(Path(__file__).with_name("causes.toml").read_text("utf-8"))["cause"]
    return table


def where(finding: Finding) -> str:
    """The step and the values at which the runs first differ, in words."""
    began, (first, second) = finding.began, _sides(finding)
    if finding.stage is Stage.JOB:
        return "; ".join(f"{name} is {a} {first} and {b} {second}" for name, (a, b) in finding.job_differences.items())
    step = f"step {began.step}" + (f", call {began.call}" if began.call else "")
    match began.stage:
        case Stage.START:
            return f"before any step, after run.prepare: {_named(began)}"
        case Stage.BEFORE:
            until = "run.prepare" if began.step == 0 else f"step {began.step - 1}"
            return f"between the end of {until} and step.run in {step}: {_named(began)}"
        case Stage.INPUTS:
            return f"{step}: the batch of {_shards(began)} does not hold the same values"
        case Stage.SAMPLES | Stage.LOSSES | Stage.SHARES | Stage.CLIP | Stage.OPTIONS:
            return f"{step}: {_valued(began)} {first} and {_number(began, began.theirs)} {second}{_others(began)}"
        case Stage.GRADIENTS:
            return f"{step}: the gradient of {_named(began)}"
        case Stage.UPDATED:
            return f"{step}, right after the optimizer's update: {_named(began)}"
        case Stage.FLOW:
            return f"{step}: {began.ours} {first}, and {began.theirs} {second}"
        case Stage.LENGTH:
            return f"{began.ours} steps {first} and {began.theirs} {second}; equal as far as both go"
    return f"{step}, at the end of the loop's body: {_named(began)}"


def weights_text(finding: Finding) -> str:
    """The first parameter or buffer that differs, and the number of others, in words."""
    weights = finding.parting.weights
    if weights is None:
        return "the same in all steps that both have"
    after = "after run.prepare" if weights.stage is Stage.START else f"after step {weights.step}"
    return f"{_named(weights)} {after}"


def equal_until_then(finding: Finding) -> str:
    """The values that were still equal in the step of the first difference; empty if none were compared."""
    order = [Stage.BEFORE, Stage.INPUTS, Stage.LOSSES, Stage.GRADIENTS, Stage.OPTIONS, Stage.UPDATED]
    words = [
        "the weights",
        "every batch",
        "every loss",
        "the reduced gradients",
        "the optimizer's settings",
        "its update",
    ]
    stage = {Stage.SHARES: Stage.GRADIENTS, Stage.CLIP: Stage.GRADIENTS}.get(finding.stage, finding.stage)
    if stage is Stage.WEIGHTS:
        return ", ".join(words)
    return ", ".join(words[: order.index(stage)]) if stage in order else ""


def repeated_text(case: Case) -> str:
    """The result of running the reference again, in words; empty if that was not done."""
    if case.repeats is None or case.finding.against is None:
        return ""
    size = str(case.finding.against)
    if case.repeats:
        return f"{size} a second time: the same bits, so it is not chance"
    return f"{size} a second time: other bits, so the number of workers is not to blame"


def _sides(finding: Finding) -> tuple[str, str]:
    if finding.against is None:
        return "on rank 0", f"on rank {finding.rank}"
    if finding.against == finding.size:
        return "in the first run", "in the second"
    return f"with {finding.against}", f"with {finding.size}"


def _named(difference: Difference) -> str:
    more = len(difference.names) - 1
    only = " (which only one side has)" if difference.absent else ""
    others = f" and {more} other{'s' if more > 1 else ''}" if more else ""
    return f"{difference.names[0]}{only}{others}"


def _shards(difference: Difference) -> str:
    names = difference.names[:MOST_NAMED]
    more = len(difference.names) - len(names)
    return f"shard{'s' if len(names) > 1 else ''} {', '.join(names)}" + (f" and {more} others" if more else "")


def _valued(difference: Difference) -> str:
    name, value = difference.names[0], _number(difference, difference.ours)
    match difference.stage:
        case Stage.SAMPLES:
            return f"shard {name} has {value} samples"
        case Stage.LOSSES:
            return f"the loss of shard {name} is {value}"
        case Stage.SHARES:
            return f"the weight of shard {name} is {value}"
    return f"{name} is {value}"


def _others(difference: Difference) -> str:
    names = difference.names[1:]
    if not names or difference.stage in (Stage.CLIP, Stage.OPTIONS):
        return f"; also {', '.join(names)}" if names else ""
    return f"; also {_shards(Difference(difference.stage, 0, None, names, '', ''))}"


def _number(difference: Difference, value: str) -> str:
    if difference.stage not in (Stage.LOSSES, Stage.SHARES):
        return value
    try:
        return repr(float.fromhex(value))
    except ValueError:  # a shard that only one side has
        return value


# Running a script with several numbers of workers, one after the other, and comparing what they trained.


@dataclass(frozen=True, slots=True)
class VerifyRequest:
    """A request to compare a script's runs on several numbers of workers.

    Attributes:
        sizes: the size of each run; all runs are compared with the first.
    """

    script: Script
    sizes: tuple[Size, ...]
    steps: int = 20
    shards: int | None = None
    threads: int | None = None
    tuning: Tuning = field(default_factory=Tuning)

    def check(self) -> None:
        """Refuse a request that cannot work, before anything is started.

        Raises:
            JobError: a number is out of range, or the script cannot be run; names it.
        """
        if self.steps < 1:
            raise JobError(f"--steps {self.steps}: at least 1 is needed")
        for size in self.sizes:
            self.settings(size, Path(), self.steps).check()

    def settings(self, size: Size, trace: Path, steps: int) -> LaunchSettings:
        """The settings with which one of the runs is started."""
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
    """A run that has ended, and its trace."""

    trace: RunTrace
    trial: Trial


@dataclass(frozen=True, slots=True)
class VerifyResult:
    """The result of a verification.

    Attributes:
        runs: the runs in the order in which they were started; the last one may have failed.
        findings: the first differences of each run from the first run, or between its own ranks; None for equal runs.
        case: the first finding, and whether the first run repeats itself.
        unnamed: what the runs were warned of: state beside the model that they do not keep, in sentences.
    """

    runs: tuple[TracedRun, ...]
    findings: tuple[Finding | None, ...]
    case: Case | None = None
    cause: Cause | None = None
    hints: tuple[Hint, ...] = ()
    unnamed: tuple[str, ...] = ()

    @property
    def failed(self) -> TracedRun | None:
        """The run whose script did not end well; None if all did."""
        return next((run for run in self.runs if run.trial.failed), None)

    @property
    def exit_code(self) -> int:
        """0 if all weights are identical and nothing is unnamed, the script's own code if it failed, else 1."""
        if self.failed is not None:
            return self.failed.trial.outcome.exit_code
        return 0 if self.case is None and not self.unnamed else 1


Watch = Callable[[str, Path], AbstractContextManager[object]]
"""Shows until the context ends that a run is under way, given its description and the folder of its traces."""


def verify(request: VerifyRequest, folder: Path, watch: Watch) -> VerifyResult:
    """Run the script with each number of workers and compare. Main thread only.

    A run that fails is the last one. The request must have been checked; the folder is an empty one, for run folders
    and traces.

    Raises:
        JobError: the script does nothing that could be compared; says what is missing.
        LaunchError: a worker could not be started.
    """
    runs: list[TracedRun] = []
    with Launcher(share=True) as launcher:
        runner = _Runner(request, watch, launcher)
        for number, size in enumerate(request.sizes, start=1):
            run_folder = folder / f"run-{number}-{str(size).replace(' ', '-')}"
            label = f"run {number} of {len(request.sizes)}: {size}"
            runs.append(runner.run(size, run_folder, label, fresh=number == 1))
            if runs[-1].trial.failed:
                break
            _require_steps(request, runs)
        return _judge(runner, runs, folder)


def _judge(runner: _Runner, runs: Sequence[TracedRun], folder: Path) -> VerifyResult:
    reference = runs[0].trace
    findings = (compare_ranks(reference), *(compare(reference, run.trace) for run in runs[1:]))
    finding = next((candidate for candidate in findings if candidate is not None), None)
    unnamed = tuple(dict.fromkeys(words for run in runs for words in run.trial.folder.unnamed_states))
    if finding is None:
        return VerifyResult(tuple(runs), findings, unnamed=unnamed)
    case = Case(finding, _repeats(runner, reference, finding, folder))
    cause = explain(case)
    return VerifyResult(tuple(runs), findings, case, cause, _hints(runner.request.script, cause), unnamed)


def _repeats(runner: _Runner, reference: RunTrace, finding: Finding, folder: Path) -> bool | None:
    """Whether the first run, started again, is the same up to the step of the first difference; None if not tried."""
    if not finding.needs_repetition:
        return None
    step = finding.began.step
    label = f"looking for the cause: {reference.size} again"
    again = runner.run(reference.size, folder / "again", label, steps=step + 1)
    if again.trial.failed:
        return None
    return find_parting(reference.until(step).whole, again.trace.whole, whole=False) is None


def _hints(script: Script, cause: Cause) -> tuple[Hint, ...]:
    if script.is_module:
        return ()
    hints = [hint for hint in read_hints(Path(script.target)) if hint.topic in cause.topics]
    return tuple(sorted(hints, key=lambda hint: cause.topics.index(hint.topic)))


@dataclass(frozen=True, slots=True)
class _Runner:
    """Runs the script, and reads the traces of its workers."""

    request: VerifyRequest
    watch: Watch
    launcher: Launcher

    def run(self, size: Size, folder: Path, label: str, *, steps: int | None = None, fresh: bool = False) -> TracedRun:
        """A run from its start to its end, traced; a fresh one does not use the shared launcher's fork server."""
        # Forks of one process iterate a set of strings in the same order. The first run is no fork of that process, so
        # that a script whose results depend on that order differs.
        launcher = None if fresh else self.launcher
        request, traces = self.request, folder / "trace"
        for path in (folder / "run", traces):
            path.mkdir(parents=True)
        settings = request.settings(size, traces, steps or request.steps)
        with self.watch(label, traces):
            trial = Trial.run(settings, folder / "run", launcher)
        complete = not trial.failed
        ranks = tuple(_read(traces / f"rank-{rank}.jsonl", whole=complete) for rank in range(size.processes))
        return TracedRun(RunTrace(size, ranks, trial.folder.read_job() or {}, complete), trial)


def _read(path: Path, *, whole: bool) -> Moments:
    if not path.exists():
        return ()
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    # The last line of a worker that was ended may be incomplete.
    return moments_of(parse_object(line) for line in lines if whole or line.endswith("\n"))


def _require_steps(request: VerifyRequest, runs: Sequence[TracedRun]) -> None:
    """Refuse runs that have no weights or no steps to compare.

    Raises:
        JobError: says what the script lacks.
    """
    target, run = request.script.target, runs[-1]
    moments = run.trace.whole
    if not moments:
        started = (run.trial.folder.path / "journal.jsonl").exists()
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
