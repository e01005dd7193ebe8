"""The network between hosts: Gloo, our own sockets, and our own with TLS; and a job whose hosts strangers call."""

import random
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks.allreduce import shown_size, shown_time
from benchmarks.crew import Crew
from benchmarks.figures import Ratio, slowest, slowest_turns, times_as_fast, times_as_long
from benchmarks.harness import Entry, measure
from benchmarks.link import Cable, Link, slow_link
from benchmarks.noise import NoiseMeter
from benchmarks.programs.networked import NETWORKS, Networked, NetworkedTimes
from benchmarks.report import Grid, Report
from benchmarks.strangers import Siege, besieged
from benchmarks.task import Option, Task, Trained
from benchmarks.workloads import WORKLOADS

FAST = Cable("100gbit", "0ms", "16mb")
"""So fast that the processors are the limit."""


DDP = "DDP"

WAYS: dict[str, tuple[str, dict[str, Option]]] = {
    DDP: ("ddp", {"bucket_mb": 25}),
    "Gloo": ("unisono", {"transport": "process_group", "insecure_data": True}),
    "plain": ("unisono", {"transport": "sockets", "insecure_data": True}),
    "TLS": ("unisono", {"transport": "sockets"}),
}
"""How a step is trained: by DDP, which takes Gloo, and by Unisono over each network."""


@dataclass(frozen=True, slots=True)
class Choice:
    """How the benchmark is run.

    Attributes:
        cables: between the two hosts, one after the other.
        sizes: of buckets, in bytes.
        rounds: fresh processes.
        turns: of each network, for each size.
        models: names in ``WORKLOADS``, of which steps are trained.
        seed: of the order.
        siege: a job among strangers, in the end; None to leave it out.
    """

    cables: tuple[Cable, ...] = (FAST, Cable("1gbit", "1ms"))
    sizes: tuple[int, ...] = (2**8, 10**6, 26 * 10**6, 105 * 10**6)
    rounds: int = 3
    turns: int = 5
    models: tuple[str, ...] = ("gpt", "tower")
    seed: int = 0
    siege: Siege | None = field(default_factory=Siege)


@dataclass(frozen=True, slots=True)
class Row:
    """What was found about one size.

    Attributes:
        size: bytes.
        seconds: of a reduction, by network: one figure for each run.
        processor_s: seconds of processor time of a worker, likewise.
        plain: times as long as Gloo takes, without TLS.
        tls: times as long as without TLS, with TLS.
    """

    size: int
    seconds: dict[str, list[float]]
    processor_s: dict[str, list[float]]
    plain: Ratio
    tls: Ratio

    def cells(self) -> tuple[str, ...]:
        """For the table."""
        times = [shown_time(statistics.median(self.seconds[name])) for name in NETWORKS]
        busy = [shown_time(statistics.median(self.processor_s[name])) for name in NETWORKS]
        return (shown_size(self.size), *times, f"{self.plain:.2f}", f"{self.tls:.2f}", " / ".join(busy))


def run(choice: Choice) -> Report:
    """Lay each cable, and measure over it.

    Raises:
        NoLink: there can be no link here.
    """
    meter, order = NoiseMeter(), random.Random(choice.seed)  # noqa: S311  the order is to be repeatable
    task = Networked(sizes=choice.sizes, turns=choice.turns, seed=choice.seed)
    grids, failures, right = [], [], True
    figures: dict[str, Any] = {}
    for cable in choice.cables:
        with slow_link(cable) as link:
            entry = Entry("data network", Crew(link.hosts), "networked", task, NetworkedTimes)
            (found,) = measure([entry], choice.rounds, meter, order)
            steps, failed = trained(choice, link, meter, order)
        failures += failed
        failures += [found.failure] if found.failure else []
        rows = [row(size, found.runs) for size in choice.sizes] if found.runs else []
        right &= all(worker.is_right for one in found.runs for worker in one)
        grids.append(grid(link.speed, rows, right=right))
        figures[link.speed] = {"reductions": [asdict(one) for one in rows], "steps": [asdict(one) for one in steps]}
        if steps:
            grids.append(grid_of_steps(link.speed, steps))
    if choice.siege is not None:
        with slow_link(FAST) as link:
            among = besieged(choice.siege, link)
        grids.append(among.grid())
        figures["among strangers"] = asdict(among)
        failures += ["workers were lost among strangers"] if among.lost else []
    meter.calibrate()
    return Report(
        name="data-network",
        settings=asdict(choice),
        noise=meter.read(),
        grids=grids,
        figures={"rows": figures, "all_sums_right": right},
        failures=failures if right else [*failures, "some sums were wrong"],
    )


def row(size: int, runs: Sequence[Sequence[NetworkedTimes]]) -> Row:
    """What the runs say about one size. Pure."""
    turns = {name: [slowest_turns([worker.seconds[size][name] for worker in one]) for one in runs] for name in NETWORKS}
    busy = {name: [statistics.median(one[0].processor_s[size][name]) for one in runs] for name in NETWORKS}
    seconds = {name: [statistics.median(each) for each in turns[name]] for name in NETWORKS}
    gloo, plain, tls = (turns[name] for name in NETWORKS)
    return Row(size, seconds, busy, times_as_long(plain, gloo), times_as_long(tls, plain))


# -- a step


@dataclass(frozen=True, slots=True)
class StepRow:
    """What was found about the step of a model.

    Attributes:
        model: its name.
        seconds: of a step, by way: one figure for each run.
    """

    model: str
    seconds: dict[str, list[float]]

    def cells(self) -> tuple[str, ...]:
        """For the table."""
        times = [shown_time(statistics.median(self.seconds[name])) for name in WAYS]
        pairs = (("plain", DDP), ("plain", "Gloo"), ("TLS", "plain"))
        ratios = [times_as_fast(self.seconds[other], self.seconds[one]) for one, other in pairs]
        return (self.model, *times, *(f"{ratio:.2f}" for ratio in ratios))


def trained(choice: Choice, link: Link, meter: NoiseMeter, order: random.Random) -> tuple[list[StepRow], list[str]]:
    """Train a step of each model in each way; what was found, and what has failed."""
    rows, failures = [], []
    crew = Crew(link.hosts, 1, "tuned")
    for model in choice.models:
        batch_size = WORKLOADS[model].batch_size
        entries = [
            Entry(
                name,
                crew,
                "training",
                Task(contender=contender, options=options, workload=model, batch_size=batch_size),
                Trained,
            )
            for name, (contender, options) in WAYS.items()
        ]
        found = measure(entries, choice.rounds, meter, order)
        failures += [f"{model}, {name}: {one.failure}" for name, one in zip(WAYS, found, strict=True) if one.failure]
        if all(one.runs and not one.failure for one in found):
            seconds = [[slowest([worker.seconds for worker in run]) for run in one.runs] for one in found]
            rows.append(StepRow(model, dict(zip(WAYS, seconds, strict=True))))
    return rows, failures


def grid_of_steps(speed: str, rows: Sequence[StepRow]) -> Grid:
    """For the screen."""
    return Grid(
        f"a training step on two hosts, one worker each; {speed}; how many times as long (95 % interval)",
        ("model", *WAYS, "plain / DDP", "plain / Gloo", "TLS / plain"),
        [one.cells() for one in rows],
        ("DDP takes Gloo. Gloo, plain and TLS are Unisono's step over that network.",),
    )


def grid(speed: str, rows: Sequence[Row], *, right: bool) -> Grid:
    """For the screen."""
    return Grid(
        f"reduction of float32 between two hosts, one worker each; {speed}; how many times as long (95 % interval)",
        ("size", *NETWORKS, "plain / Gloo", "TLS / plain", "processor time: Gloo / plain / TLS"),
        [one.cells() for one in rows],
        ("All sums were right." if right else "SOME SUMS WERE WRONG.",),
    )
