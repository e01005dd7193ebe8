"""What AdaScale is worth: a batch of eight times the size, beside the small one and beside plain linear scaling."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from scipy import stats

from benchmarks.crew import Crew
from benchmarks.noise import NoiseMeter
from benchmarks.report import Grid, Report
from benchmarks.training_spec import Learned, Look, TrainingSpec, TrainingSpecs

SMALL = 16
TIMES = 8

Runs = Sequence[Look | None]
"""The end of a run for each seed; None where the loss was no number any more."""


@dataclass(frozen=True, slots=True)
class Choice:
    """How the study is run.

    Attributes:
        seeds: how many.
        iterations: of the small batch.
        rates: of learning, among which the one is chosen that is best for the small batch.
    """

    seeds: int = 5
    iterations: int = 900
    rates: tuple[float, ...] = (0.025, 0.05, 0.1, 0.2)

    @property
    def samples(self) -> int:
        """That the small batch uses."""
        return SMALL * self.iterations


def run(choice: Choice) -> Report:
    """Choose the rate for the small batch, and then train with the large one."""
    meter = NoiseMeter()
    tuned = learn({f"{rate:g}": small(choice, rate) for rate in choice.rates}, choice.seeds, meter)
    best = max(tuned, key=lambda rate: mean(tuned[rate]))
    found = {"small batch": tuned[best]} | learn(large(choice, float(best)), choice.seeds, meter)
    longer = max(round(statistics.fmean(one.samples for one in found["AdaScale"] if one)), choice.samples)
    found |= learn(linear(choice, float(best), longer, " and AdaScale's samples"), choice.seeds, meter)
    return Report(
        name="accuracy",
        settings=asdict(choice) | {"small": SMALL, "times": TIMES, "rate": float(best)},
        noise=meter.read(),
        grids=[tuning(tuned), comparison(found, best)],
        figures={
            name: {key: [one and one.model_dump() for one in runs] for key, runs in table.items()}
            for name, table in (("tuned", tuned), ("compared", found))
        },
    )


def small(choice: Choice, rate: float) -> TrainingSpec:
    """What all is measured by: a small batch in one shard."""
    return TrainingSpec(batch_size=SMALL, rate=rate, samples=choice.samples, falls=True, shards=1)


def large(choice: Choice, rate: float) -> dict[str, TrainingSpec]:
    """What is compared with it."""
    most = choice.samples * TIMES  # where there is no gain at all
    ada = TrainingSpec(
        batch_size=TIMES * SMALL,
        rate=rate,
        samples=most,
        shards=TIMES,
        policy="ada-scale",
        iterations=choice.iterations,
    )
    return linear(choice, rate, choice.samples, "") | {"AdaScale": ada}


def linear(choice: Choice, rate: float, samples: int, name: str) -> dict[str, TrainingSpec]:
    """The rate in proportion to the batch, at once and over a warm-up."""
    plain = TrainingSpec(batch_size=TIMES * SMALL, rate=TIMES * rate, samples=samples, falls=True, shards=TIMES)
    warm = plain.model_copy(update={"rate": rate, "policy": "warm-up", "factor": float(TIMES)})
    return {f"linear scaling{name}": plain, f"with warm-up{name}": warm}


def learn(specs: Mapping[str, TrainingSpec], seeds: int, meter: NoiseMeter) -> dict[str, list[Look | None]]:
    """The ends of all runs: a fresh process for each seed."""
    found: dict[str, list[Look | None]] = {name: [] for name in specs}
    for seed in range(seeds):
        meter.calibrate()
        (learned,) = Crew.here(1).run("training_spec", TrainingSpecs(specs=list(specs.values()), seed=seed), Learned)
        for name, looks in zip(specs, learned.runs, strict=True):
            found[name].append(looks[-1] if looks else None)
    return found


def accuracies(runs: Runs) -> list[float]:
    """One for each seed; a run whose loss is no number any more knows nothing."""
    return [one.accuracy if one else 0.0 for one in runs]


def mean(runs: Runs) -> float:
    """Of the accuracies."""
    return statistics.fmean(accuracies(runs))


def beside(runs: Runs, others: Runs) -> str:
    """The mean difference in points, with the interval of Student's t for pairs of the same seed."""
    ours, theirs = accuracies(runs), accuracies(others)
    points = 100 * (statistics.fmean(ours) - statistics.fmean(theirs))
    if len(ours) < 2 or ours == theirs:
        return f"{points:+.2f}"
    between = stats.ttest_rel(ours, theirs).confidence_interval(0.95)
    return f"{points:+.2f} ({100 * between.low:+.2f} … {100 * between.high:+.2f})"


def tuning(tuned: Mapping[str, Runs]) -> Grid:
    """How the rate was chosen."""
    rows = [(rate, f"{mean(runs):.2%}") for rate, runs in tuned.items()]
    return Grid(
        f"batch {SMALL}: the rate that is best for it, on the very images that count", ("rate", "accuracy"), rows
    )


def comparison(found: Mapping[str, Runs], rate: str) -> Grid:
    """What is compared with the small batch."""
    rows = []
    for name, runs in found.items():
        told, ended = accuracies(runs), [one for one in runs if one]
        steps, samples = (
            f"{statistics.fmean(values):.0f}" if values else ""
            for values in ([one.steps for one in ended], [one.samples for one in ended])
        )
        spread = f"{min(told):.2%} … {max(told):.2%}"
        rows.append((name, steps, samples, f"{mean(runs):.2%}", spread, beside(runs, found["small batch"])))
    return Grid(
        f"batch {TIMES * SMALL} beside batch {SMALL} with rate {rate}; {len(found['small batch'])} seeds",
        ("", "steps", "samples", "accuracy", "lowest … highest", "beside the small batch, points"),
        rows,
        ("AdaScale ends after as many scale-invariant iterations as the small batch has steps.",),
    )
