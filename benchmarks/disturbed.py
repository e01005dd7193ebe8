"""A worker or a connection becomes slow in the middle of a job: what a policy gets back of what that costs."""

import json
import random
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.crew import Crew
from benchmarks.elastic_job import running
from benchmarks.figures import Ratio, bootstrap
from benchmarks.harness import interleaved
from benchmarks.link import Cable, NoLink, mesh
from benchmarks.noise import NoiseMeter
from benchmarks.programs.steered import Found, Task
from benchmarks.report import Grid, Report

WORKERS, SHARDS = 3, 8
WAYS = ("undisturbed", "left alone", "with the policy", "best setting")
"""How a job is run. The best setting is known beforehand, and there from the start."""


@dataclass(frozen=True, slots=True)
class Choice:
    """How the benchmark is run.

    Attributes:
        rounds: fresh jobs of each kind.
        steps: of each job.
        counted: at its end, for the throughput.
        at_step: when something becomes slow.
        shard_ms: that a shard takes to compute.
        factor: how many times slower a worker becomes.
        fast: connections, to begin with.
        slow: what one of them becomes.
        elements: of the model, with slow connections.
        seed: of the order.
    """

    rounds: int = 5
    steps: int = 300
    counted: int = 60
    at_step: int = 40
    shard_ms: float = 15.0
    factor: float = 4.0
    fast: Cable = field(default_factory=lambda: Cable("400mbit", "0.2ms"))
    slow: Cable = field(default_factory=lambda: Cable("40mbit", "0.2ms"))
    elements: int = 2**18
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Ended:
    """A job that has ended: seconds of its last steps, the slowest worker's, and what the policy decided."""

    seconds: list[float]
    decided: list[str]

    @property
    def step_s(self) -> float:
        """The median."""
        return statistics.median(self.seconds)


def run(choice: Choice) -> Report:
    """Measure both. Where there can be no slow connections, only the worker."""
    meter, order = NoiseMeter(), random.Random(choice.seed)  # noqa: S311  the order is to be repeatable
    workers: dict[str, list[Ended]] = {way: [] for way in WAYS}
    links: dict[str, list[Ended]] = {way: [] for way in WAYS}
    failures = []
    for number in interleaved(len(WAYS), choice.rounds, order):
        meter.calibrate()
        workers[WAYS[number]].append(slow_worker(choice, WAYS[number]))
    try:
        for number in interleaved(len(WAYS), choice.rounds, order):
            meter.calibrate()
            links[WAYS[number]].append(slow_link(choice, WAYS[number]))
    except NoLink as error:
        failures.append(f"slow connections: {error}")
    found = {f"A worker becomes {choice.factor:g} times slower": workers} | (
        {f"A connection of {choice.fast.rate} falls to {choice.slow.rate}": links} if not failures else {}
    )
    return Report(
        name="disturbed",
        settings=asdict(choice),
        noise=meter.read(),
        grids=[grid(title, choice, runs) for title, runs in found.items()],
        figures={title: _as_json(runs) for title, runs in found.items()},
        failures=failures,
    )


# -- a slow worker


def slow_worker(choice: Choice, way: str) -> Ended:
    """A job of three workers, of which the second becomes slow.

    The best setting for it is what there is once somebody else has come instead: no slow worker.
    """
    with TemporaryDirectory(prefix="benchmark-") as name:
        faults, folder = Path(name) / "faults.toml", Path(name) / "run"
        faults.write_text(f"[[fault]]\nkind = 'slow'\nrank = 1\nat_step = {choice.at_step}\nfactor = {choice.factor}\n")
        options = ["-n", f"{WORKERS}", "--max-restarts", "3"]
        options += ["--faults", str(faults)] if way in ("left alone", "with the policy") else []
        options += ["--policy", "straggler"] if way == "with the policy" else []
        script = ["-m", "benchmarks.programs.slept", str(SHARDS), str(choice.shard_ms), str(choice.steps)]
        with running(options, script, folder=folder) as job:
            assert job.launcher is not None
            if job.launcher.wait() != 0:
                raise RuntimeError(f"the job failed: {job.last_words}")
            lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
            decided = [f"step {one['step']}: {one['verb']}({one['value']})" for one in job.journal("decided")]
        return Ended([line["seconds"]["total"] for line in lines[-choice.counted :]], decided)


# -- a slow connection


def slow_link(choice: Choice, way: str) -> Ended:
    """A job of three hosts, two of which lose most of what lies between them.

    The best setting for it is a star: nothing goes over that connection.

    Raises:
        NoLink: there can be none here.
    """
    with mesh(WORKERS, choice.fast) as hosts:
        task = Task(
            topology="star" if way == "best setting" else "direct",
            policy=way == "with the policy",
            steps=choice.steps,
            at_step=choice.at_step,
            commands={} if way == "undisturbed" else hosts.slowed(1, 2, choice.slow),
            elements=choice.elements,
            compute_s=choice.shard_ms / 1000,
        )
        found = Crew(hosts.hosts).run("steered", task, Found)
    seconds = [max(each) for each in zip(*(one.seconds for one in found), strict=True)]
    return Ended(seconds[-choice.counted :], list(_changes(found[0].topologies)))


def _changes(topologies: Sequence[str]) -> Iterator[str]:
    for step, (before, after) in enumerate(pairwise(topologies), 1):
        if after != before:
            yield f"step {step}: {before} -> {after}"


# -- in words


def _as_json(runs: dict[str, list[Ended]]) -> dict[str, list[dict[str, object]]]:
    return {way: [asdict(one) for one in ended] for way, ended in runs.items()}


def grid(title: str, choice: Choice, runs: dict[str, list[Ended]]) -> Grid:
    """Throughput of the last steps, as a share of the undisturbed job's and of the best setting's."""
    rows = []
    for way, ended in runs.items():
        shares = [share(ended, runs[other]) for other in ("undisturbed", "best setting")]
        decided = ended[-1].decided
        step_ms = 1000 * statistics.median(one.step_s for one in ended)
        rows.append((way, f"{step_ms:.1f}", *(f"{each:.2f}" for each in shares), "; ".join(decided)))
    return Grid(
        f"{title} at step {choice.at_step}: the last {choice.counted} of {choice.steps} steps, {WORKERS} workers",
        ("", "step, ms", "throughput / undisturbed", "throughput / best setting", "decided (last job)"),
        rows,
        (f"medians of {choice.rounds} jobs each, in random order, with 95 % intervals",),
    )


def share(ours: Sequence[Ended], theirs: Sequence[Ended]) -> Ratio:
    """Throughput as a share of somebody else's; rounds are drawn as a whole."""
    pairs = [(one.step_s, other.step_s) for one, other in zip(ours, theirs, strict=True)]
    return bootstrap(
        pairs, lambda drawn: statistics.median(b for _, b in drawn) / statistics.median(a for a, _ in drawn)
    )
