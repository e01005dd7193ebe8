"""How the contenders stand on one model, from what their runs found. Pure."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from benchmarks.contenders import PLAIN, Contender
from benchmarks.figures import Ratio, difference, mean_of_workers, slowest, times_as_fast
from benchmarks.harness import Measured
from benchmarks.task import Trained

TOLERANCE = 2e-5
"""Relative, among the first losses. Rounding differs by 1e-7, which a few steps amplify to some 1e-6; BatchNorm over
other samples, the smallest mistake that one can make here, already changes the first loss by 1e-4."""

FAILED, NOT_INSTALLED = "failed", "not installed"


@dataclass(frozen=True, slots=True)
class Standing:
    """What was found about one contender.

    Attributes:
        key: of the contender.
        name: of the contender.
        note: why there is nothing more.
        seconds: of a step, one figure for each run.
        of_plain: how many times as fast as the plain loop with one worker's threads.
        of_ddp: how many times as fast as the best DDP.
        efficiency: the plain loop's step / (workers * step); 1 would be ideal.
        difference: the largest relative difference of the first losses from those that they have to be.
        parts: where a step's seconds go, as far as the contender says so: medians by name.
    """

    key: str
    name: str
    note: str = ""
    seconds: tuple[float, ...] = ()
    of_plain: Ratio | None = None
    of_ddp: Ratio | None = None
    efficiency: float | None = None
    difference: float = 0.0
    parts: Mapping[str, float] = field(default_factory=dict)

    @property
    def step(self) -> float:
        """The median step, in seconds."""
        return statistics.median(self.seconds)

    @property
    def did_same_work(self) -> bool:
        """Whether the losses differ by rounding at most."""
        return self.difference <= TOLERANCE


def standings(
    contenders: Sequence[Contender], found: Mapping[str, Measured[Trained]], *, batch_norm: bool
) -> list[Standing]:
    """Compare the contenders with the plain loop and the best DDP.

    Args:
        contenders: all of them, in the order of the table.
        found: by key; those that are not installed are absent.
        batch_norm: the losses depend on how many workers share the batch.
    """
    finished = {key: one.runs for key, one in found.items() if one.runs and not one.failure}
    seconds = {key: [slowest([worker.seconds for worker in run]) for run in runs] for key, runs in finished.items()}
    losses = {key: mean_of_workers([worker.losses for worker in runs[0]]) for key, runs in finished.items()}
    ddp = [one.key for one in contenders if one.is_ddp and one.key in finished]
    best_ddp = min(ddp, key=lambda key: statistics.median(seconds[key]), default=None)
    ran = [one for one in contenders if one.key in finished]

    def standing(one: Contender) -> Standing:
        if one.key not in finished:
            return Standing(one.key, one.name, FAILED if one.key in found else NOT_INSTALLED)
        like = next(other for other in ran if not batch_norm or other.workers == one.workers)
        plain = next((other for other in ran if other.key == PLAIN), None)
        of_plain = times_as_fast(seconds[one.key], seconds[PLAIN]) if plain else None
        return Standing(
            one.key,
            one.name,
            seconds=tuple(seconds[one.key]),
            of_plain=of_plain,
            of_ddp=times_as_fast(seconds[one.key], seconds[best_ddp]) if best_ddp else None,
            efficiency=of_plain.value * plain.threads / (one.workers * one.threads) if of_plain and plain else None,
            difference=difference(losses[one.key], losses[like.key]),
            parts=_medians([step for run in finished[one.key] for step in run[0].parts]),
        )

    return [standing(one) for one in contenders]


def _medians(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = steps[0] if steps else {}
    return {name: statistics.median(step[name] for step in steps) for name in names}
