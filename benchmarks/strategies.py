"""Every synchronisation strategy on the same trainings: accuracy, loss, traffic, throughput, staleness."""

import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product

from benchmarks.crew import Crew
from benchmarks.exercise import Exercise, Exercises, ModelName, Outcome, Outcomes
from benchmarks.figures import counted
from benchmarks.noise import NoiseMeter
from benchmarks.report import Grid, Report

SERIAL = "all-reduce"

ALL = (
    "all-reduce",
    "parameter-server",
    "parameter-server:synchronous=false",
    "parameter-server:synchronous=false,max_staleness=1",
    "model-averaging",
    "pair-averaging",
    "local-sgd",
    "diloco",
)

SHAPES: Mapping[ModelName, Exercise] = {
    "digits": Exercise(model="digits", strategy=SERIAL, epochs=30),
    "char_lm": Exercise(model="char_lm", strategy=SERIAL, epochs=30, batch_size=64),
}

RATES: Mapping[ModelName, tuple[float, ...]] = {"digits": (3e-3,), "char_lm": (6e-3, 1.2e-2, 2.4e-2)}
"""A strategy that moves the weights less for each gradient wants a larger one."""

Runs = Sequence[Outcome | None]
"""One for each seed; None where the loss was no number any more."""


@dataclass(frozen=True, slots=True)
class Choice:
    """How the benchmark is run.

    Attributes:
        models: on which strategies are compared.
        workers: numbers of them.
        seeds: how many.
        strategies: that are compared, as their texts.
        epochs: instead of each model's own; 0 for those.
        rates: of learning, tried with each strategy and the first seed; the others have the best of them. None for
            each model's own.
    """

    models: tuple[ModelName, ...] = ("digits", "char_lm")
    workers: tuple[int, ...] = (2, 4)
    seeds: int = 3
    strategies: tuple[str, ...] = ALL
    epochs: int = 0
    rates: tuple[float, ...] = ()

    def exercise(self, key: "Key", rate: float, seed: int) -> Exercise:
        """One training."""
        model, _, strategy = key
        epochs = self.epochs or SHAPES[model].epochs
        return SHAPES[model].model_copy(update={"strategy": strategy, "seed": seed, "rate": rate, "epochs": epochs})

    def keys(self, workers: int) -> list["Key"]:
        """What is trained on so many; on one that is the serial run."""
        strategies = (SERIAL,) if workers == 1 else self.strategies
        return [(model, workers, strategy) for model, strategy in product(self.models, strategies)]


Key = tuple[ModelName, int, str]
"""A model, a number of workers, a strategy."""

Found = Mapping[Key, Mapping[float, Runs]]
"""With each rate."""


Learn = Callable[[int, Sequence[Exercise]], Sequence[Outcome | None]]
"""Trains exercises on so many workers."""


def run(choice: Choice, train: Learn | None = None) -> Report:
    """Train all of it: one crew for each number of workers and seed, in which the strategies take turns.

    Args:
        choice: what is trained.
        train: carries out exercises; by default a crew of this host does.
    """
    meter, order = NoiseMeter(), random.Random(0)  # noqa: S311  the order is to be repeatable
    found: dict[Key, dict[float, list[Outcome | None]]] = {}
    for seed, workers in product(range(choice.seeds), (1, *choice.workers)):
        meter.calibrate()
        exercises = [
            choice.exercise(key, rate, seed)
            for key in choice.keys(workers)
            for rate in ((best(found[key])[0],) if key in found else choice.rates or RATES[key[0]])
        ]
        exercises = order.sample(exercises, len(exercises))
        for exercise, outcome in zip(exercises, (train or learn)(workers, exercises), strict=True):
            rates = found.setdefault((exercise.model, workers, exercise.strategy), {})
            rates.setdefault(exercise.rate, []).append(outcome)
    return Report(
        name="strategies",
        settings=asdict(choice),
        noise=meter.read(),
        grids=[grid for model in choice.models for grid in grids(model, choice, found)],
        figures={"found": as_json(found)},
    )


def learn(workers: int, exercises: Sequence[Exercise]) -> list[Outcome | None]:
    """How they end on so many workers, one after the other in the same processes."""
    (first, *_) = Crew.here(workers).run("exercises", Exercises(exercises=list(exercises)), Outcomes)
    return first.outcomes


def grids(model: ModelName, choice: Choice, found: Found) -> list[Grid]:
    """All strategies on one model, each with the rate that is best for it: what they learn, and what they cost."""
    keys = [key for workers in (1, *choice.workers) for key in choice.keys(workers) if key[0] == model]
    shown = [("serial" if key[1] == 1 else key[2], key[1], *best(found[key])) for key in keys]
    serial = shown[0][-1]
    title = f"{model}, {counted(choice.seeds, 'seed')}: "
    return [
        Grid(
            f"{title}held-out samples",
            ("", "workers", "rate", "accuracy", "beside serial, points", "loss", "beside serial, %", "same weights"),
            [learned(*one, serial) for one in shown],
            (
                "Of the rates that were tried with the first seed, that with the lowest loss.",
                "Beside serial: the mean over seeds (lowest … highest).",
            ),
        ),
        Grid(
            f"{title}a step with one batch, all workers together",
            ("", "workers", "kB", "messages", "samples/s", "staleness: mean, largest"),
            [costs(name, workers, runs) for name, workers, _, runs in shown],
        ),
    ]


def best(rates: Mapping[float, Runs]) -> tuple[float, Runs]:
    """The rate that most seeds were trained with; of several the one with which most ended, with the lowest loss."""

    def judged(rate: float) -> tuple[int, int, float]:
        losses = [one.loss for one in rates[rate] if one]
        return -len(rates[rate]), -len(losses), statistics.fmean(losses) if losses else 0.0

    rate = min(rates, key=judged)
    return rate, rates[rate]


def learned(name: str, workers: int, rate: float, runs: Runs, serial: Runs) -> tuple[str, ...]:
    """One line of the first table."""
    pairs = [(one, other) for one, other in zip(runs, serial, strict=True) if one and other]
    if not pairs:
        return (name, f"{workers}", f"{rate:g}", *("no number",) * 5)
    ended = [one for one, _ in pairs]
    points = [100 * (one.accuracy - other.accuracy) for one, other in pairs]
    percent = [100 * (one.loss / other.loss - 1) for one, other in pairs]
    shows_accuracy = any(one.accuracy for one in ended)
    return (
        name if len(pairs) == len(runs) else f"{name} ({len(pairs)} of {len(runs)} seeds)",
        f"{workers}",
        f"{rate:g}",
        f"{statistics.fmean(one.accuracy for one in ended):.2%}" if shows_accuracy else "",
        spread(points) if shows_accuracy else "",
        f"{statistics.fmean(one.loss for one in ended):.4f}",
        spread(percent),
        "yes" if all(one.digest == other.digest for one, other in pairs) else "no",
    )


def costs(name: str, workers: int, runs: Runs) -> tuple[str, ...]:
    """One line of the second table."""
    ended = [one for one in runs if one]
    if not ended:
        return (name, f"{workers}", *("no number",) * 4)
    stale = [tau for one in ended for tau in one.staleness]
    return (
        name,
        f"{workers}",
        f"{statistics.fmean(one.sent_bytes for one in ended) / 1000:.1f}",
        f"{statistics.fmean(one.sent_messages for one in ended):.1f}",
        f"{statistics.median(one.samples_per_s for one in ended):.0f}",
        f"{statistics.fmean(stale):.2f}, {max(stale)}" if stale else "",
    )


def spread(values: Sequence[float]) -> str:
    """The mean, and where the values lie."""
    return f"{statistics.fmean(values):+.2f} ({min(values):+.2f} … {max(values):+.2f})"


def as_json(found: Found) -> list[dict[str, object]]:
    """For programs."""
    return [
        {
            "model": model,
            "workers": workers,
            "strategy": strategy,
            "rate": rate,
            "runs": [one and one.model_dump() for one in runs],
        }
        for (model, workers, strategy), rates in found.items()
        for rate, runs in rates.items()
    ]
