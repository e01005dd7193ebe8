"""What the steps of a run say in words: what takes the time of the median one, and which worker is slow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, median
from typing import Final

from unisono.errors import JobError
from unisono_lab.timeline.critical_path import Lane, Part, Stretch, critical_path, shares
from unisono_lab.timeline.recorded import StepTimelines, WorkerStep

SLOW = 1.2
"""How many times as long as the others' a worker's shards take before it is called slow."""

WORTH_TELLING = 0.05
"""Of a step: a part that takes less is not named."""

NAMES: Final[Mapping[Part, str]] = {
    "data": "waiting for samples",
    "forward": "forward passes",
    "backward": "backward passes",
    "compute": "other work on shards",
    "communication": "exposed communication",
    "update": "the update",
    "regroup": "regrouping",
    "script": "the loop's body and checks",
}


@dataclass(frozen=True, slots=True)
class Explanation:
    """The median step of a run.

    Attributes:
        step: its number.
        of: the number of steps of which it is the median: those of the generation in which most were taken.
        seconds: the seconds that it took.
        workers: the spans of each worker in it, by the worker's place.
        path: its critical path.
        words: sentences.
    """

    step: int
    of: int
    seconds: float
    workers: Mapping[int, WorkerStep]
    path: Sequence[Stretch]
    words: Sequence[str]


def parts_of(step: WorkerStep) -> dict[Part, float]:
    """The seconds of a worker's step by part."""
    found: dict[Part, float] = dict.fromkeys(NAMES, 0.0)
    lane = Lane(0, step)
    for each in lane.segments:
        if each.begun >= lane.begun:
            found[each.part] += each.seconds
    return found


def explained(timelines: StepTimelines) -> Explanation:
    """The median step, its critical path, and what there is to say of it.

    Raises:
        JobError: no step was taken by all workers of a generation.
    """
    steps = comparable(timelines)
    lengths = {number: _length(workers) for number, workers in steps.items()}
    number = sorted(lengths, key=lambda each: (lengths[each], each))[(len(lengths) - 1) // 2]
    path = critical_path(steps[number])
    first = (
        f"Step {number}, the median of {len(steps)}, takes {lengths[number] * 1e3:.3g} ms with {_crew(steps[number])}."
    )
    words = [first, *_parts(steps[number], path), *_slow(timelines, steps, number), *_unaligned(timelines)]
    return Explanation(number, len(steps), lengths[number], steps[number], path, words)


def comparable(timelines: StepTimelines) -> dict[int, dict[int, WorkerStep]]:
    """The steps of the generation in which most were taken, by all of its workers, but for its first one.

    Raises:
        JobError: there is none.
    """
    whole = {
        number: workers
        for number, workers in timelines.by_step.items()
        if {each.rank for each in workers.values()} == set(range(next(iter(workers.values())).workers))
        and _length(workers) > 0  # nobody has written down how long a damaged one took
    }
    by_generation: dict[int, list[int]] = {}
    for number, workers in whole.items():
        by_generation.setdefault(next(iter(workers.values())).generation, []).append(number)
    if not by_generation:
        raise JobError(
            "no step is recorded of all workers of its generation: where hosts have run folders of their own, name all"
        )
    _, numbers = max(by_generation.items(), key=lambda item: (len(item[1]), item[0]))
    kept = numbers[1:] if len(numbers) > 1 else numbers  # the first one makes what the others use again
    return {number: whole[number] for number in kept}


def _crew(workers: Mapping[int, WorkerStep]) -> str:
    """How many workers, and of how many devices, whose spans are those of processes."""
    count = next(iter(workers.values())).workers
    devices = len(workers) // count
    return f"{count} worker{'s' if count > 1 else ''}{f' of {devices} devices' if devices > 1 else ''}"


def _length(workers: Mapping[int, WorkerStep]) -> float:
    return max(each.seconds("step") for each in workers.values())


def _parts(workers: Mapping[int, WorkerStep], path: Sequence[Stretch]) -> list[str]:
    exposed = mean(parts_of(each)["communication"] for each in workers.values()) / _length(workers)
    told = [f"{_percent(share)} {NAMES[part]}" for part, share in shares(path).items() if share >= WORTH_TELLING]
    return [
        f"{_percent(exposed)} of the step is exposed communication: transfers, and waiting for other workers.",
        f"Its critical path: {', '.join(told)}.",
    ]


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _slow(timelines: StepTimelines, steps: Mapping[int, Mapping[int, WorkerStep]], number: int) -> list[str]:
    """Whose shards take longer than the others', and who has more of them."""
    each_shard: dict[int, list[float]] = {}
    for workers in steps.values():
        for place, step in workers.items():
            if shards := step.shards:
                each_shard.setdefault(place, []).append(step.seconds("compute") / shards)
    medians = {place: median(times) for place, times in each_shard.items()}
    found = []
    for place, took in sorted(medians.items()):
        others = [time for other, time in medians.items() if other != place]
        if others and took >= SLOW * median(others) > 0:
            name = _named(timelines, place, steps[number].get(place))
            found.append(
                f"Worker {name} is {took / median(others):.1f} times slower in compute than the others "
                f"({took * 1e3:.3g} ms for a shard)."
            )
    return found + _uneven(steps[number])


def _uneven(workers: Mapping[int, WorkerStep]) -> list[str]:
    counts = {place: step.shards for place, step in workers.items()}
    most, fewest = max(counts.values()), min(counts.values())
    if not 0 < fewest < most:
        return []
    some = sum(count == most for count in counts.values())
    return [f"{some} of {len(counts)} workers compute {most} shards, others {fewest}, and wait for them."]


def _named(timelines: StepTimelines, place: int, step: WorkerStep | None) -> str:
    worker = timelines.workers[place]
    if worker.worker.startswith("rank-") or step is None:
        return f"{worker.worker.removeprefix('rank-')} on host {worker.host}"
    return f"{worker.worker} (rank {step.rank}) on host {worker.host}"


def _unaligned(timelines: StepTimelines) -> list[str]:
    unknown = {one.host for one in timelines.workers if timelines.corrections.get(one.clock) is None}
    if not unknown:
        return []
    return [f"The clock of host {', '.join(sorted(unknown))} is not known: its spans may be shifted against others."]
