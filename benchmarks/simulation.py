"""How far ``unisono simulate`` is to be trusted: recorded elastic jobs, each predicted from its first part."""

import json
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.elastic_job import seconds_of
from benchmarks.noise import NoiseMeter
from benchmarks.recorded_run import PLANS, Recorded, RunPlan, record
from benchmarks.report import Grid, Report
from unisono.adapt.layouts import Layout, StepTime, fit
from unisono_lab.recorded.record import Record
from unisono_lab.simulation.calibration import WARM_UP, measured
from unisono_lab.simulation.market import MarketTrace
from unisono_lab.simulation.scenario import Scenario, read_scenario
from unisono_lab.simulation.simulated_run import SimulatedOutcome, simulate

SEEDS = 8
UNTIL_S = 10_000.0

WITHIN, STEP_WITHIN, STALL_FACTOR, OFTEN = 0.10, 0.15, 1.5, 0.9
"""What predictions are to keep: the total, in so many of the runs; a step; a stall in the median."""


@dataclass(frozen=True, slots=True)
class Choice:
    """How the benchmark is run.

    Attributes:
        plans: the names of jobs in ``PLANS``.
        kept: a folder in which recordings stay, and from which those that are there are read; empty for none.
    """

    plans: tuple[str, ...] = tuple(plan.name for plan in PLANS)
    kept: str = ""


@dataclass(frozen=True, slots=True)
class Verdict:
    """A job as it was, and as it was predicted.

    Attributes:
        plan: the job.
        workers: the number of workers of each generation that has trained.
        seconds: from the first agent to the end, measured and predicted.
        steps: the seconds of a step with twice the workers of the first part, measured and predicted; None if there
            were none.
        stalls: what training stood still for each thing that was done behind the first part, measured and predicted.
        figures: what was calibrated from the first part.
    """

    plan: str
    workers: list[int]
    seconds: tuple[float, float]
    steps: tuple[float, float] | None
    stalls: list[tuple[float, float]] = field(default_factory=list)
    figures: Mapping[str, float] = field(default_factory=dict)

    @property
    def total_off(self) -> float:
        """How far the predicted time is from the measured one, as a share of it."""
        return self.seconds[1] / self.seconds[0] - 1

    @property
    def step_off(self) -> float | None:
        """The same of a step; None if there is none."""
        return None if self.steps is None else self.steps[1] / self.steps[0] - 1


def run(choice: Choice) -> Report:
    """Record all jobs, one after the other, and predict each."""
    meter = NoiseMeter()
    found, failures = [], []
    with tempfile.TemporaryDirectory(prefix="benchmark-") as name:
        for plan in (plan for plan in PLANS if plan.name in choice.plans):
            meter.calibrate()
            folder = Path(choice.kept or name) / plan.name.replace(" ", "-").replace(",", "")
            try:
                found.append(judged(_recorded(plan, folder)))
            except (RuntimeError, TimeoutError, OSError) as error:
                failures.append(f"{plan.name}: {error}")
    return Report(
        name="simulation",
        settings=asdict(choice),
        noise=meter.read(),
        grids=grids(found) if found else [],
        figures={"runs": [asdict(one) for one in found]},
        failures=failures,
    )


def _recorded(plan: RunPlan, folder: Path) -> Recorded:
    """Read what is kept, or record it."""
    note = folder / "done.json"
    if note.exists():
        return Recorded(plan, folder / "run", json.loads(note.read_text()))
    folder.mkdir(parents=True, exist_ok=True)
    found = record(plan, folder / "run")
    note.write_text(json.dumps(found.moments))
    return found


def judged(recorded: Recorded) -> Verdict:
    """Predict the whole from its first part, and put both side by side."""
    plan, whole = recorded.plan, Record.read(recorded.folder)
    begun = next(seconds_of(line["time"]) for line in whole.journal if line["event"] == "agent joined")
    ended = next(seconds_of(line["time"]) for line in whole.journal if line["event"] == "over")
    moments = [at - begun for at in recorded.moments]
    first = first_part(recorded)
    scenario, traces = _scenario(plan, whole.batch_size, moments, first)
    outcomes = [simulate(scenario, seed, UNTIL_S, traces) for seed in range(SEEDS)]
    steady = replace(scenario, seconds=scenario.seconds.model_copy(update={"jitter": 0.0, "stall_s": 0.0}))
    simulated = simulate(steady, 0, UNTIL_S, traces)
    later = [moment for moment, blow in zip(moments, plan.blows, strict=True) if blow.step > plan.known]
    lines = [(float(line["time"]) - begun, line) for line in whole.steps]
    stalls = zip(
        by_event(later, measured_stalls(lines, plan.shards)),
        by_event(later, simulated_stalls(simulated, steady.step, whole.batch_size, plan.shards)),
        strict=True,
    )
    return Verdict(
        plan.name,
        [group[0] for group in _groups(line["world_size"] for _, line in lines)],
        (ended - begun, statistics.median(each.seconds for each in outcomes)),
        _doubled(scenario, lines),
        list(stalls),
        scenario.figures(),
    )


def first_part(recorded: Recorded) -> Path:
    """A run folder with what was recorded until the known steps were done."""
    source, target = recorded.folder, recorded.folder.with_name("first-part")
    target.mkdir(exist_ok=True)
    (target / "job.json").write_bytes((source / "job.json").read_bytes())
    steps = [json.loads(line) for line in (source / "metrics.jsonl").read_text().splitlines()]
    known = [line for line in steps if line.get("step", 0) < recorded.plan.known]
    until = max(float(line["time"]) for line in known)
    events = [json.loads(line) for line in (source / "journal.jsonl").read_text().splitlines()]
    for name, lines in (
        ("metrics.jsonl", known),
        ("journal.jsonl", [line for line in events if seconds_of(line["time"]) <= until]),
    ):
        (target / name).write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return target


def _scenario(
    plan: RunPlan, batch_size: int, moments: Sequence[float], first: Path
) -> tuple[Scenario, dict[str, MarketTrace]]:
    """The job as ``unisono simulate --from`` reads it: what was done to it happens at the same moments."""
    path = first.with_name("job.toml")
    hosts = [("first", plan.begin if plan.joins else plan.most, "")]
    incidents = []
    for number, (blow, at) in enumerate(zip(plan.blows, moments, strict=True)):
        if blow.verb == "join":
            (path.parent / f"joined-{number}.csv").write_text(f"start,end,available\n0,{at},0\n{at},{UNTIL_S},1\n")
            hosts.append((f"joined-{number}", blow.number, f'trace = "joined-{number}.csv"\ntrace_from_s = 0\n'))
        else:
            incidents.append(f"[[incidents]]\nat_s = {at}\n{blow.verb} = {blow.number}\n")
    begin = "" if plan.joins else f"begin_with = {plan.begin}\n"
    path.write_text(
        f"[work]\nsamples = {plan.steps * batch_size}\nbatch_size = {batch_size}\nshards = {plan.shards}\n"
        f"[job]\nfewest = {plan.least}\n{begin}checkpoint_every = {plan.checkpoint_every}\n"
        + "".join(
            f'[[hosts]]\nname = "{name}"\ncount = 1\nworkers = {workers}\nboot_s = 0\n{more}'
            for name, workers, more in hosts
        )
        + "".join(incidents)
    )
    scenario = read_scenario(path, measured([first]))
    return scenario, {kind.name: MarketTrace.read(kind.trace) for kind in scenario.hosts if kind.trace}


# -- what was measured, and what was simulated: pure

Lines = Sequence[tuple[float, Mapping[str, Any]]]
"""Steps, each with the seconds since the first agent came at which it was done."""

Stalls = list[tuple[float, float]]
"""Of generations: the moment at which each of them begins to train, and what was lost before and at its beginning."""


def _groups(values: Iterator[int]) -> list[list[int]]:
    found: list[list[int]] = []
    for value in values:
        if not found or found[-1][0] != value:
            found.append([])
        found[-1].append(value)
    return found


def measured_stalls(lines: Lines, shards: int) -> Stalls:
    """For each change of the generation: the time from the last step before it, less what its first steps take."""
    layouts: dict[Layout, list[float]] = defaultdict(list)
    for (before, last), (at, line) in pairwise(lines):
        if line["generation"] == last["generation"]:
            layouts[Layout(line["world_size"], line["batch_size"], shards)].append(at - before)
    known = {layout: statistics.median(each) for layout, each in layouts.items()}
    model = fit(known)
    found = []
    for place, ((before, last), (at, line)) in enumerate(pairwise(lines)):
        if line["generation"] != last["generation"]:
            alike = [each for each, one in lines[place + 1 :] if one["generation"] == line["generation"]][:WARM_UP]
            layout = Layout(line["world_size"], line["batch_size"], shards)
            typical = known[layout] if len(layouts[layout]) >= WARM_UP else model.seconds(layout)
            found.append((at, alike[-1] - before - len(alike) * typical))
    return found


def simulated_stalls(outcome: SimulatedOutcome, model: StepTime, batch_size: int, shards: int) -> Stalls:
    """For each formed generation but the first: the time since the one before it that was no step."""
    formed = [mark for mark in outcome.marks if mark.workers]
    return [
        (
            mark.seconds,
            mark.seconds
            - last.seconds
            - (mark.samples - last.samples) / batch_size * model.seconds(Layout(last.workers, batch_size, shards)),
        )
        for last, mark in pairwise(formed)
    ]


def by_event(moments: Sequence[float], stalls: Stalls) -> list[float]:
    """Add up the stalls behind each of some moments, as far as the next."""
    ends = [*moments[1:], float("inf")]
    return [sum(lost for at, lost in stalls if begin < at <= end) for begin, end in zip(moments, ends, strict=True)]


def _doubled(scenario: Scenario, lines: Lines) -> tuple[float, float] | None:
    """The median step with twice the workers that the first part had, and what was predicted of it."""
    workers = 2 * scenario.measured_to
    took = [line["seconds"]["total"] for _, line in lines if line["world_size"] == workers]
    if len(took) < 10:
        return None
    layout = Layout(workers, scenario.work.batch_size, scenario.work.shards)
    return statistics.median(took), scenario.step.seconds(layout)


# -- for the screen


def grids(found: Sequence[Verdict]) -> list[Grid]:
    """The jobs one by one, and whether predictions are as good as they are to be."""
    steps = [one.step_off for one in found if one.step_off is not None]
    factors = [factor(*stall) for one in found for stall in one.stalls if any(stall)]  # two kills may be one stall
    good = sum(abs(one.total_off) <= WITHIN for one in found)
    close = sum(abs(off) <= STEP_WITHIN for off in steps)
    rows = [("total time within 10 %", "in 18 of 20", f"in {good} of {len(found)}", _held(good >= OFTEN * len(found)))]
    if steps:
        said = f"in {close} of {len(steps)}, the worst {max(steps, key=abs):+.0%}"
        rows.append(("a step of twice the workers within 15 %", "in all", said, _held(close == len(steps))))
    if factors:
        middle = statistics.median(factors)
        rows.append(("stall of an event", "within 1.5", f"within {middle:.2f}", _held(middle <= STALL_FACTOR)))
    return [
        Grid(
            "elastic jobs, each predicted from its first part",
            ("", "workers", "total", "predicted", "off by", "twice as many", "predicted", "off by",
             "stalls, ms", "predicted"),
            [_row(one) for one in found],
            ("Total: from the first agent to the end. Twice as many workers: as the first part had.",),
        ),
        Grid("what predictions are to keep", ("", "to be", "is", "held"), rows,
             ("Stall: the larger of measured and predicted over the smaller one, the median of all events.",)),
    ]  # fmt: skip


def factor(one: float, other: float) -> float:
    """The larger of two times over the smaller; a stall is a millisecond at least."""
    small, large = sorted(max(each, 1e-3) for each in (one, other))
    return large / small


def _held(held: bool) -> str:
    return "yes" if held else "NO"


def _row(one: Verdict) -> tuple[str, ...]:
    doubled = ("", "", "")
    if one.steps is not None and one.step_off is not None:
        doubled = (f"{1000 * one.steps[0]:.0f} ms", f"{1000 * one.steps[1]:.0f} ms", f"{one.step_off:+.1%}")
    return (
        one.plan,
        " ".join(map(str, one.workers)),
        f"{one.seconds[0]:.1f} s",
        f"{one.seconds[1]:.1f} s",
        f"{one.total_off:+.1%}",
        *doubled,
        " ".join(f"{1000 * stall[0]:.0f}" for stall in one.stalls),
        " ".join(f"{1000 * stall[1]:.0f}" for stall in one.stalls),
    )
