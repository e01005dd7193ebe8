"""What a batch that follows the noise is worth: how soon it gets there, beside batches that stay as they are."""

import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.crew import Crew
from benchmarks.figures import Ratio, bootstrap, counted
from benchmarks.noise import NoiseMeter
from benchmarks.report import Grid, Report
from benchmarks.training_spec import Learned, Look, TrainingSpec, TrainingSpecs, digits

FIRST, LARGEST = 64, 512
RATE = 0.1

COLUMNS = ("", "steps", "to the target", "of the best small", "computing", "its steps", "accuracy")

Found = Mapping[str, Sequence[Sequence[Look]]]
"""For each way of training the looks at it, seed by seed."""


@dataclass(frozen=True, slots=True)
class Choice:
    """How the study is run.

    Attributes:
        seeds: how many.
        epochs: passes over the data.
        workers: that train together.
        target: the accuracy that is to be reached.
        noise: of the images.
        few: leave out all but one way of each kind.
    """

    seeds: int = 5
    epochs: int = 40
    workers: int = 1
    target: float = 0.9
    noise: float = 0.3
    few: bool = False

    def spec(self, batch_size: int, rate: float, **more: Any) -> TrainingSpec:
        """One way of training; the others differ from it in what they say."""
        samples = self.epochs * len(digits()[0])
        return TrainingSpec(
            batch_size=batch_size, rate=rate, samples=samples, shards=4, noise=self.noise, looks=True, **more
        )

    def small(self) -> dict[str, TrainingSpec]:
        """The best of these is to be beaten in time."""
        grid = [(FIRST, RATE)] if self.few else [(32, 0.05), (64, 0.05), (64, 0.1), (64, 0.2)]
        return {f"batch {batch}, rate {rate:g}": self.spec(batch, rate) for batch, rate in grid}

    def large(self) -> dict[str, TrainingSpec]:
        """The best of these is to be beaten in accuracy."""
        grid = [0.2] if self.few else [0.2, 0.4, LARGEST / FIRST * RATE]
        return {f"batch {LARGEST}, rate {rate:g}": self.spec(LARGEST, rate) for rate in grid}

    def adaptive(self) -> dict[str, TrainingSpec]:
        """What is to win."""
        both = {
            "noise scale, rate by √": self.spec(FIRST, RATE, policy="noise-scale", largest=LARGEST),
            "noise scale, rate by AdaScale": self.spec(FIRST, RATE, policy="noise-scale, ada-scale", largest=LARGEST),
        }
        return dict(list(both.items())[:1]) if self.few else both

    def others(self) -> dict[str, TrainingSpec]:
        """What somebody might have chosen who knew better."""
        grid = [] if self.few else [(FIRST, RATE, True), (2 * FIRST, 2 * RATE, False), (2 * FIRST, 2 * RATE, True)]
        return {
            f"batch {batch}, rate {rate:g}{', falling' if falls else ''}": self.spec(batch, rate, falls=falls)
            for batch, rate, falls in grid
        }


def run(choice: Choice) -> Report:
    """All ways of training in each crew, in random order."""
    meter, order = NoiseMeter(), random.Random(0)  # noqa: S311  the order is to be repeatable
    specs = choice.small() | choice.large() | choice.adaptive() | choice.others()
    found: dict[str, list[list[Look]]] = {name: [] for name in specs}
    for seed in range(choice.seeds):
        meter.calibrate()
        names = order.sample(list(specs), len(specs))
        task = TrainingSpecs(specs=[specs[name] for name in names], seed=seed)
        learned = Crew.here(choice.workers).run("training_spec", task, Learned)[0]
        for name, looks in zip(names, learned.runs, strict=True):
            found[name].append(looks)
    small = min(choice.small(), key=lambda name: statistics.median(times(found[name], choice.target)))
    return Report(
        name="adaptive",
        settings=asdict(choice) | {"first": FIRST, "largest": LARGEST},
        noise=meter.read(),
        grids=[grid(choice, found, small)],
        figures={"found": {name: [[one.model_dump() for one in run] for run in runs] for name, runs in found.items()}},
        draw=lambda figure: draw(figure, choice, found, small),
    )


def times(runs: Sequence[Sequence[Look]], target: float, clock: str = "seconds") -> list[float]:
    """Seconds until the target was seen, for each seed; infinity if it was not."""
    return [next((getattr(one, clock) for one in looks if one.accuracy >= target), float("inf")) for looks in runs]


def sooner(ours: Sequence[float], theirs: Sequence[float]) -> Ratio:
    """Our time as a share of theirs: the median over seeds. Who does not get there takes for ever."""
    shares = [a / b if a < float("inf") else a for a, b in zip(ours, theirs, strict=True)]
    return bootstrap(shares, statistics.median)


def grid(choice: Choice, found: Found, small: str) -> Grid:
    """For the screen."""
    rows = []
    for name, runs in found.items():
        reached = times(runs, choice.target)
        there = [seconds for seconds in reached if seconds < float("inf")]
        shares = [
            sooner(times(runs, choice.target, clock), times(found[small], choice.target, clock))
            for clock in ("seconds", "cpu_seconds", "steps")
        ]
        ends = [looks[-1] if looks else None for looks in runs]
        told = [one.accuracy if one else 0.0 for one in ends]
        rows.append(
            (
                f"{name} (best small)" if name == small else name,
                f"{statistics.fmean(one.steps for one in ends if one):.0f}" if any(ends) else "",
                f"{statistics.median(there):.1f} s, {len(there)} of {len(runs)}" if there else "",
                *(f"{share:.2f}" if share.value < float("inf") else "" for share in shares),
                f"{statistics.fmean(told):.2%} ({min(told):.2%} … {max(told):.2%})",
            )
        )
    return Grid(
        f"noisy digits, {choice.epochs} epochs, {counted(choice.workers, 'worker')}, {counted(choice.seeds, 'seed')}; "
        f"the target is {choice.target:.0%}",
        COLUMNS,
        rows,
        (
            "Seconds are those of training. A share is the median over seeds; the ways take turns in one process.",
            "Computing: the same share of the main worker's processor time, which other work hardly lengthens.",
        ),
    )


def draw(figure: Any, choice: Choice, found: Found, small: str) -> None:
    """Accuracy and batch over the main worker's processor time, a line for each seed."""
    figure.set_size_inches(11, 4.5)
    above, beside = figure.subplots(1, 2)
    large = max(
        choice.large(), key=lambda name: statistics.fmean(one[-1].accuracy if one else 0 for one in found[name])
    )
    shown = {
        small: "tab:gray",
        large: "tab:blue",
        **dict(zip(choice.adaptive(), ("tab:orange", "tab:green"), strict=False)),
    }
    for name, colour in shown.items():
        for number, looks in enumerate(found[name]):
            seconds = [one.cpu_seconds for one in looks]
            label = name if number == 0 else None
            above.plot(seconds, [one.accuracy for one in looks], color=colour, label=label, linewidth=1, alpha=0.8)
            beside.plot(seconds, [one.batch_size for one in looks], color=colour, linewidth=1, alpha=0.8)
    above.axhline(choice.target, color="black", linewidth=0.5, linestyle="dotted")
    above.set(xlabel="seconds of training (processor time)", ylabel="accuracy on held-out images", ylim=(0.75, 0.93))
    above.legend(loc="lower right")
    beside.set(xlabel="seconds of training (processor time)", ylabel="batch")
    beside.set_yscale("log", base=2)
