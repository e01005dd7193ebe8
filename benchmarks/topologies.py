"""Ways of the sums over a slow network: what latency and bandwidth say of each, beside what it took."""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field

import torch

from benchmarks.allreduce import shown_size, shown_time
from benchmarks.crew import Crew, CrewFailed
from benchmarks.figures import slowest_turns
from benchmarks.link import Cable, switched
from benchmarks.noise import NoiseMeter
from benchmarks.programs.reduced import Reduce, Reduced, ways
from benchmarks.report import Grid, Report
from unisono.plan.split import Split
from unisono.plan.topology import plan
from unisono.reduce.exchange import pieces_of
from unisono_lab.simulation.simulated_training import Forecast, forecast

HOSTS, LATENCY_S, BYTES_PER_S = 16, 1e-3, 125e6
"""Of a network that is only thought of."""


@dataclass(frozen=True, slots=True)
class Choice:
    """How the benchmark is run.

    Attributes:
        cable: of each host, to the switch.
        workers: one on each host.
        sizes: of buckets, in bytes.
        turns: of each way, for each size.
        seed: of the order.
    """

    cable: Cable = field(default_factory=lambda: Cable("200mbit", burst="32kb"))
    workers: tuple[int, ...] = (2, 3, 4)
    sizes: tuple[int, ...] = (2**12, 2**18, 2**22)
    turns: int = 7
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Row:
    """One way for buckets of one size.

    Attributes:
        workers: that reduce.
        size: bytes.
        way: a topology, or a server.
        seconds: of each turn, of the slowest worker.
        forecast: by the latency and the bandwidth that were measured in the same run.
    """

    workers: int
    size: int
    way: str
    seconds: list[float]
    forecast: Forecast

    @property
    def measured_s(self) -> float:
        """The median."""
        return statistics.median(self.seconds)

    def cells(self, others: Sequence["Row"]) -> tuple[str, ...]:
        """For the table; ``others`` are all ways of this size, the first of which is compared with."""
        first = others[0]
        return (
            self.way,
            f"{self.forecast.rounds}",
            f"{self.forecast.messages}",
            shown_size(round(self.forecast.most_bytes)),
            shown_time(self.forecast.seconds),
            shown_time(self.measured_s),
            f"{self.measured_s / self.forecast.seconds:.2f}",
            f"{self.forecast.seconds / first.forecast.seconds:.2f}",
            f"{self.measured_s / first.measured_s:.2f}",
        )


def run(choice: Choice) -> Report:
    """Lay the cables for each number of workers, and measure.

    Raises:
        NoLink: there can be no slow link here.
    """
    meter = NoiseMeter()
    rows: list[Row] = []
    links: dict[int, tuple[float, float]] = {}
    failures: list[str] = []
    speed = ""  # in words, as the cables turn out
    for workers in choice.workers:
        meter.calibrate()
        with switched(workers, choice.cable) as (hosts, said):
            speed = said
            task = Reduce(sizes=choice.sizes, turns=choice.turns, seed=choice.seed)
            try:
                found = Crew(hosts).run("reduced", task, Reduced)
            except CrewFailed as failure:
                failures.append(str(failure))
                continue
        links[workers] = link_of(found[0])
        rows += rows_of(found, *links[workers])
    meter.calibrate()
    return Report(
        name="topologies",
        settings=asdict(choice) | {"speed": speed},
        noise=meter.read(),
        grids=[*grids(rows, links, speed), *elsewhere(choice.sizes)],
        figures={"rows": [asdict(row) for row in rows], "links": links},
        failures=failures,
    )


def link_of(found: Reduced) -> tuple[float, float]:
    """The median of the latency between two workers, and a worker's bandwidth while all reduce together."""
    latencies = (value for look in found.links for row in look["latency_s"] for value in row if value)
    return statistics.median(latencies), found.bytes_per_s


def rows_of(found: Sequence[Reduced], latency_s: float, bytes_per_s: float) -> Iterator[Row]:
    """What the workers found, beside what was to be expected. Pure."""
    for size in found[0].seconds:
        for name, (topology, split) in ways(len(found)).items():
            seconds = slowest_turns([worker.seconds[size][name] for worker in found])
            yield Row(len(found), size, name, seconds, predicted(topology, split, size, latency_s, bytes_per_s))


def predicted(topology: str, split: Split, size: int, latency_s: float, bytes_per_s: float) -> Forecast:
    """For a bucket that is cut as the transport would cut it. Pure."""
    pieces = pieces_of(torch.empty(size // 4, device="meta"), split, topology)
    return forecast(plan(split, topology, pieces), size, latency_s, bytes_per_s)


def grids(rows: Sequence[Row], links: dict[int, tuple[float, float]], speed: str) -> Iterator[Grid]:
    """For the screen."""
    for workers, size in dict.fromkeys((row.workers, row.size) for row in rows):
        alike = [row for row in rows if (row.workers, row.size) == (workers, size)]
        latency_s, bytes_per_s = links[workers]
        yield Grid(
            f"{workers} hosts, a bucket of {shown_size(size)}; {speed}; measured: "
            f"{shown_time(latency_s)}, {bytes_per_s / 1e6:.1f} MB/s",
            ("way", "rounds", "messages", "most bytes", "predicted", "measured", "off by",
             f"predicted / {alike[0].way}", f"measured / {alike[0].way}"),
            [row.cells(alike) for row in alike],
        )  # fmt: skip


def elsewhere(sizes: Sequence[int]) -> Iterator[Grid]:
    """What is predicted for a network that there is none of here: more hosts, and a latency of its own."""
    known = ways(HOSTS)
    cells = [
        (name, *(shown_time(predicted(*known[name], size, LATENCY_S, BYTES_PER_S).seconds) for size in sizes))
        for name in known
    ]
    yield Grid(
        f"Only predicted: {HOSTS} hosts, {shown_time(LATENCY_S)}, {BYTES_PER_S / 1e6:.0f} MB/s",
        ("way", *map(shown_size, sizes)),
        cells,
    )
