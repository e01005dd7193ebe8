"""A day of a job on thousands of workers, some of which are killed, in virtual time on one core."""

import resource
from dataclasses import asdict, dataclass
from time import process_time

from benchmarks.noise import NoiseMeter
from benchmarks.report import Grid, Report
from unisono.adapt.layouts import StepTime
from unisono_lab.simulation.scenario import Durations, HostKind, Incident, JobSpec, Scenario, Workload
from unisono_lab.simulation.simulated_run import simulate

DAY_S, STEP_S = 86_400.0, 0.6
BEGINS_S = 300.0
"""By then all workers train."""


@dataclass(frozen=True, slots=True)
class Choice:
    """How the benchmark is run.

    Attributes:
        workers: their number, eight a host.
        events: workers that are killed in the day, each of which is replaced.
        share: the share of the day that is simulated, with its share of the events.
    """

    workers: int = 10_000
    events: int = 500
    share: float = 1.0


def run(choice: Choice) -> Report:
    """Simulate it once, by seed 0."""
    meter = NoiseMeter()
    meter.calibrate()
    begun = process_time()
    found = simulate(scenario(choice), 0, 10 * DAY_S)
    seconds = process_time() - begun
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    grid = Grid(
        "A simulated job, on one core",
        ("workers", "virtual hours", "steps", "killed", "generations", "processor time", "peak memory"),
        [
            (
                str(choice.workers),
                f"{found.seconds / 3600:.2f}",
                str(found.steps),
                str(found.losses),
                str(found.generations),
                f"{seconds:.1f} s",
                f"{peak:.0f} MiB",
            )
        ],
        ("A worker that is killed makes two generations: one without it, and one with the worker in its place.",),
    )
    figures = {
        "processor_s": seconds,
        "peak_mib": peak,
        "generations": found.generations,
        "losses": found.losses,
        "virtual_s": found.seconds,
    }
    return Report("simulated-day", asdict(choice), meter.read(), [grid], figures)


def scenario(choice: Choice) -> Scenario:
    """The day, or a share of it."""
    day_s, events = DAY_S * choice.share, max(1, round(choice.events * choice.share))
    hosts = HostKind(name="host", count=-(-choice.workers // 8), workers=8, price=1.0)
    killed = [
        Incident(at_s=BEGINS_S + place * day_s / events, kill=place * 977 % choice.workers) for place in range(events)
    ]
    work = Workload(samples=int(day_s / STEP_S) * choice.workers, batch_size=choice.workers, shards=choice.workers)
    step = StepTime(a_c=STEP_S - 0.1, b_c=0.0, a_r=0.1, b_r=0.0, gamma=1.0)
    return Scenario(work, step, Durations(), [hosts], JobSpec(most=choice.workers), killed)
