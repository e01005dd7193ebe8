"""One worker is three times slower: what asynchronous strategies gain, and what may be done about stale gradients."""

import random
import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from benchmarks.exercise import Exercise, Outcome
from benchmarks.figures import counted, times_as_fast
from benchmarks.noise import NoiseMeter
from benchmarks.report import Grid, Report
from benchmarks.strategies import ALL, SERIAL, Runs, learn, spread

PLAIN = "parameter-server:synchronous=false"
TREATED = {
    "plain": PLAIN,
    "staleness-aware": f"{PLAIN},staleness_aware=true",
    "compensated, λ = 0.04": f"{PLAIN},delay_compensation=0.04",
    "compensated, λ = 1": f"{PLAIN},delay_compensation=1.0",
}


@dataclass(frozen=True, slots=True)
class Choice:
    """How the benchmark is run.

    Attributes:
        strategies: whose throughput is compared.
        workers: of these jobs.
        rounds: fresh jobs of each.
        epochs: of each.
        slow: how many times slower one worker is.
        shard_ms: that a shard takes to compute, asleep.
        crowd: workers that make gradients stale.
        rates: of learning, with stale gradients.
        seeds: of each of these trainings.
        crowd_epochs: of each of these trainings.
    """

    strategies: tuple[str, ...] = ALL
    workers: int = 2
    rounds: int = 3
    epochs: int = 2
    slow: float = 3.0
    shard_ms: float = 10.0
    crowd: int = 10
    rates: tuple[float, ...] = (0.1, 0.5)
    seeds: int = 5
    crowd_epochs: int = 10

    def timed(self, strategy: str, seed: int) -> Exercise:
        """A training whose throughput counts."""
        return Exercise(
            model="mlp",
            strategy=strategy,
            seed=seed,
            epochs=self.epochs,
            batch_size=32,
            rate=0.1,
            shard_ms=self.shard_ms,
            slow=self.slow,
        )

    def judged(self, strategy: str, rate: float, seed: int) -> Exercise:
        """A training whose accuracy counts. A batch is one shard, whose time is that of the others all the same."""
        return Exercise(
            model="mlp",
            strategy=strategy,
            seed=seed,
            epochs=self.crowd_epochs,
            batch_size=32,
            shards=1 if strategy == SERIAL else self.crowd,
            rate=rate,
            shard_ms=0.0 if strategy == SERIAL else self.shard_ms / 4,
        )


def run(choice: Choice) -> Report:
    """Both."""
    meter, order = NoiseMeter(), random.Random(0)  # noqa: S311  the order is to be repeatable
    timed = throughputs(choice, meter, order)
    judged = accuracies(choice, meter, order)
    return Report(
        name="strategies-slow",
        settings=asdict(choice),
        noise=meter.read(),
        grids=[speed_grid(choice, timed), *(stale_grid(choice, rate, judged) for rate in choice.rates)],
        figures={
            "throughput": {name: [one and one.model_dump() for one in runs] for name, runs in timed.items()},
            "stale": [
                {"rate": rate, "way": way, "runs": [one and one.model_dump() for one in runs]}
                for (rate, way), runs in judged.items()
            ],
        },
    )


def throughputs(choice: Choice, meter: NoiseMeter, order: random.Random) -> dict[str, list[Outcome | None]]:
    """The strategies take turns, in another order in each round."""
    found: dict[str, list[Outcome | None]] = {strategy: [] for strategy in choice.strategies}
    for number in range(choice.rounds):
        meter.calibrate()
        names = order.sample(choice.strategies, len(choice.strategies))
        ended = learn(choice.workers, [choice.timed(strategy, number) for strategy in names])
        for strategy, outcome in zip(names, ended, strict=True):
            found[strategy].append(outcome)
    return found


def accuracies(
    choice: Choice, meter: NoiseMeter, order: random.Random
) -> dict[tuple[float, str], list[Outcome | None]]:
    """For each rate: alone, and with stale gradients that are treated in one way or another."""
    ways = [(rate, way) for rate in choice.rates for way in TREATED]
    serial = [(rate, "serial") for rate in choice.rates]
    found: dict[tuple[float, str], list[Outcome | None]] = {key: [] for key in (*serial, *ways)}
    for seed in range(choice.seeds):
        for workers, keys in ((1, serial), (choice.crowd, order.sample(ways, len(ways)))):
            meter.calibrate()
            ended = learn(workers, [choice.judged(TREATED.get(way, SERIAL), rate, seed) for rate, way in keys])
            for key, outcome in zip(keys, ended, strict=True):
                found[key].append(outcome)
    return found


def speed_grid(choice: Choice, timed: Mapping[str, Runs]) -> Grid:
    """Throughput beside that of the synchronous strategy."""
    rows = []
    for name, runs in timed.items():
        pairs = [(one, other) for one, other in zip(runs, timed[choice.strategies[0]], strict=True) if one and other]
        seconds = [(one.seconds / one.samples, other.seconds / other.samples) for one, other in pairs]
        stale = [tau for one, _ in pairs for tau in one.staleness]
        rows.append(
            (
                name,
                f"{statistics.median(one.samples_per_s for one, _ in pairs):.0f}",
                f"{times_as_fast([a for a, _ in seconds], [b for _, b in seconds]):.2f}",
                f"{statistics.fmean(stale):.2f}, {max(stale)}" if stale else "",
            )
        )
    return Grid(
        f"{counted(choice.workers, 'worker')}, of which one is {choice.slow:g} times slower: throughput",
        ("", "samples/s", f"beside {choice.strategies[0]}", "staleness"),
        rows,
        (f"Medians of {counted(choice.rounds, 'job')} each; a shard takes {choice.shard_ms:g} ms, asleep.",),
    )


def stale_grid(choice: Choice, rate: float, judged: Mapping[tuple[float, str], Runs]) -> Grid:
    """What treating stale gradients does to the accuracy."""
    plain = judged[(rate, "plain")]
    rows = []
    for way in ("serial", *TREATED):
        runs = judged[(rate, way)]
        stale = [tau for one in runs if one for tau in one.staleness]
        told, others = shares(runs), shares(plain)
        points = [100 * (one - other) for one, other in zip(told, others, strict=True)]
        losses = [one.loss for one in runs if one]
        rows.append(
            (
                way,
                f"{statistics.fmean(told):.2%} ({min(told):.2%} … {max(told):.2%})",
                spread(points),
                f"{statistics.fmean(losses):.4f}" if losses else "no number",
                f"{statistics.fmean(stale):.2f}, {max(stale)}" if stale else "",
            )
        )
    return Grid(
        f"{counted(choice.crowd, 'worker')}, plain SGD with rate {rate:g}, {counted(choice.seeds, 'seed')}",
        ("", "accuracy (lowest … highest)", "beside plain, points", "loss", "staleness"),
        rows,
        ("A run whose loss is no number any more knows nothing.",),
    )


def shares(runs: Runs) -> list[float]:
    """Accuracies, one for each seed."""
    return [one.accuracy if one else 0.0 for one in runs]
