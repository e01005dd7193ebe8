"""A slow network: how much of the communication is hidden behind the computation."""

import random
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace

from benchmarks.crew import Allocator, Crew
from benchmarks.figures import Ratio, bootstrap, counted, difference, mean_of_workers, slowest
from benchmarks.harness import Entry, measure
from benchmarks.link import Cable, Link, slow_link
from benchmarks.noise import NoiseMeter
from benchmarks.report import Grid, Report
from benchmarks.task import Option, Task, Trained
from benchmarks.workloads import WORKLOADS

OVERLAPPED, ONE_AFTER_THE_OTHER, DDP = "Unisono, overlap", "Unisono, no overlap", "DDP, 25 MB"
PARTS = ("compute", "communication", "exposed_communication")
GRAIN = 16
TRIES = 2


@dataclass(frozen=True, slots=True)
class Choice:
    """How the benchmark is run.

    Attributes:
        cable: between the two hosts.
        model: a name in ``WORKLOADS``.
        batch_size: of the model; by default such that communication and computation take about equally long.
        topology: of the transport.
        bucket_mb: of the reduction.
        rounds: fresh processes.
        steps: counted in each.
        warm_up: steps before those.
        allocator: of all processes.
        seed: of the order.
    """

    cable: Cable = field(default_factory=Cable)
    model: str = "tower"
    batch_size: int | None = None
    topology: str = "auto"
    bucket_mb: float | None = None
    rounds: int = 5
    steps: int = 10
    warm_up: int = 3
    allocator: Allocator = "tuned"
    seed: int = 0

    @property
    def options(self) -> dict[str, Option]:
        """What Unisono is told."""
        bucket: dict[str, Option] = {} if self.bucket_mb is None else {"bucket_mb": self.bucket_mb}
        return {"transport": "sockets", "insecure_data": True, "topology": self.topology, **bucket}  # as DDP is


@dataclass(frozen=True, slots=True)
class Row:
    """What was found about one way to train.

    Attributes:
        name: for people.
        seconds: of a step, one figure for each run.
        parts: seconds by name, one figure for each run; see ``metrics.jsonl``.
        hidden: the share of the communication that does not prolong the step, against no overlap.
        difference: the largest relative difference of the first losses from those without overlap.
    """

    name: str
    seconds: list[float]
    parts: dict[str, list[float]]
    hidden: Ratio | None
    difference: float

    def cells(self) -> tuple[str, ...]:
        """For the table."""
        times = [_milliseconds(self.parts[name]) if name in self.parts else "" for name in PARTS]
        hidden = f"{self.hidden:.0%}" if self.hidden else ""
        apart = f"{self.difference:.0e} apart" if self.difference else "identical"
        return (self.name, _milliseconds(self.seconds), *times, hidden, apart)


def run(choice: Choice) -> Report:
    """Lay the cable, find the batch size, measure.

    Raises:
        NoLink: there can be no slow link here.
        CrewFailed: a worker failed while the batch size was looked for.
    """
    meter, order = NoiseMeter(), random.Random(choice.seed)  # noqa: S311  the order is to be repeatable
    with slow_link(choice.cable) as link:
        settled = replace(choice, batch_size=choice.batch_size or balanced_batch(choice, link))
        planned = entries(settled, link)
        found = measure(planned, choice.rounds, meter, order)
    meter.calibrate()
    runs = {entry.name: one.runs for entry, one in zip(planned, found, strict=True) if one.runs and not one.failure}
    table = rows(runs) if ONE_AFTER_THE_OTHER in runs else []
    return Report(
        name="network",
        settings=asdict(settled) | {"speed": link.speed},
        noise=meter.read(),
        grids=[grid(settled, link, table)],
        figures={"rows": [asdict(row) for row in table]},
        failures=[one.failure for one in found if one.failure],
    )


def entries(choice: Choice, link: Link) -> list[Entry[Trained]]:
    """With overlap and without, and DDP."""
    ways: dict[str, tuple[str, dict[str, Option]]] = {
        OVERLAPPED: ("unisono", choice.options | {"overlap": True}),
        ONE_AFTER_THE_OTHER: ("unisono", choice.options | {"overlap": False}),
        DDP: ("ddp", {"bucket_mb": 25}),
    }
    crew = Crew(link.hosts, 1, choice.allocator)
    return [
        Entry(
            name,
            crew,
            "training",
            Task(
                contender=contender,
                options=options,
                workload=choice.model,
                batch_size=choice.batch_size or WORKLOADS[choice.model].batch_size,
                warm_up=choice.warm_up,
                steps=choice.steps,
            ),
            Trained,
        )
        for name, (contender, options) in ways.items()
    ]


def balanced_batch(choice: Choice, link: Link) -> int:
    """The batch size at which computing takes as long as communicating, from runs without overlap."""
    batch_size = WORKLOADS[choice.model].batch_size
    for _ in range(TRIES):
        tried = entries(replace(choice, batch_size=batch_size), link)[1]
        found = tried.crew.run(tried.program, tried.task, tried.found)
        compute, _, communication = (_part(found, name) for name in PARTS)
        batch_size = balanced(batch_size, compute, communication)
    return batch_size


def balanced(batch_size: int, compute: float, communication: float) -> int:
    """Computing takes about as long as there are samples; communicating does not depend on them."""
    return max(1, round(batch_size * communication / compute / GRAIN)) * GRAIN


def rows(runs: dict[str, list[list[Trained]]]) -> list[Row]:
    """What the runs say. Pure."""
    losses = {name: mean_of_workers([worker.losses for worker in found[0]]) for name, found in runs.items()}
    parts = {
        name: {part: [_part(one, part) for one in found] for part in PARTS if part in _parts_told(found)}
        for name, found in runs.items()
    }
    return [
        Row(
            name,
            [slowest([worker.seconds for worker in one]) for one in found],
            parts[name],
            hidden(parts[name][PARTS[2]], parts[ONE_AFTER_THE_OTHER][PARTS[2]]) if name == OVERLAPPED else None,
            difference(losses[name], losses[ONE_AFTER_THE_OTHER]),
        )
        for name, found in runs.items()
    ]


def hidden(exposed: Sequence[float], all_of_it: Sequence[float]) -> Ratio:
    """The share that overlap hides: 1 - exposed / all, of seconds in the same rounds."""
    rounds = list(zip(exposed, all_of_it, strict=True))

    def share(drawn: Sequence[tuple[float, float]]) -> float:
        return 1 - statistics.median(a for a, _ in drawn) / statistics.median(b for _, b in drawn)

    return bootstrap(rounds, share)


def grid(choice: Choice, link: Link, table: Sequence[Row]) -> Grid:
    """For the screen."""
    return Grid(
        f"{choice.model}, batch {choice.batch_size}, 2 hosts with 1 worker each, {link.speed}; "
        f"{counted(choice.rounds, 'fresh crew')}",
        ("", "step", "compute", "communication", "exposed", "hidden (95 %)", "losses"),
        [row.cells() for row in table],
        (
            "Communication: how long a reduction was under way. Exposed: how long the step waited for it.",
            "Hidden: 1 - exposed with overlap / exposed without.",
        ),
    )


def _parts_told(found: Sequence[Sequence[Trained]]) -> set[str]:
    return {name for one in found for worker in one for step in worker.parts for name in step}


def _part(workers: Sequence[Trained], name: str) -> float:
    return slowest([[step[name] for step in worker.parts] for worker in workers])


def _milliseconds(seconds: Sequence[float]) -> str:
    return f"{1000 * statistics.median(seconds):.0f} ms"
