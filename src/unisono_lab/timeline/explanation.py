"""What the steps of a run say in words: what takes the time of the median one, and which worker is slow."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from statistics import mean, median
from typing import Final, Literal

from unisono.errors import JobError
from unisono_lab.timeline.recorded import PlacedSpan, StepTimelines, WorkerStep

# The critical path of a step: the work and the transfers of which each had to wait for the one before.


Part = Literal["data", "forward", "backward", "compute", "communication", "update", "regroup", "script"]
"""What a worker's time is spent on. ``compute`` is what belongs to the shards besides their two passes, and ``script``
is the rest: the loop's body, checks, evaluations."""

PART_OF: Final[Mapping[str, Part]] = {
    "data": "data",
    "forward": "forward",
    "backward": "backward",
    "compute": "compute",
    "update": "update",
    "step": "script",
    **dict.fromkeys(("exposed", "exchange", "weigh", "reduce", "synchronise"), "communication"),
    **dict.fromkeys(("regroup", "wait", "form", "copy"), "regroup"),
}

AROUND = frozenset({"step", "compute", "exposed", "regroup"})
"""What holds other spans."""

MEETINGS = frozenset({"weigh", "reduce", "exchange"})
"""What no worker ends before all have begun it."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """A stretch of time of one worker.

    Attributes:
        worker: the worker, by its place among those of the step.
        part: what it was spent on.
        begun: the beginning, in nanoseconds.
        ended: the end.
    """

    worker: int
    part: Part
    begun: int
    ended: int

    @property
    def seconds(self) -> float:
        """The length."""
        return (self.ended - self.begun) / 1e9


@dataclass(frozen=True)
class Lane:
    """What a worker did in one step, on the thread that trains and on the reducer's.

    Attributes:
        worker: the worker's place.
        step: its spans.
    """

    worker: int
    step: WorkerStep

    @cached_property
    def segments(self) -> Sequence[Stretch]:
        """The time of the thread that trains, without gaps, each moment by the innermost span."""
        spans = [span for span in self.step.spans if span.on_main]
        edges = sorted({edge for span in spans for edge in (span.begun, span.ended)})
        found = list[Stretch]()
        for begun, ended in pairwise(edges):
            inside = [span for span in spans if span.begun <= begun and ended <= span.ended]
            part = PART_OF[min(inside, key=_depth).kind] if inside else "script"
            if found and found[-1].part == part and part != "communication":
                found[-1] = Stretch(self.worker, part, found[-1].begun, ended)
            else:
                found.append(Stretch(self.worker, part, begun, ended))
        return found

    @cached_property
    def meetings(self) -> Mapping[tuple[str, int], PlacedSpan]:
        """Where it met the others, by kind and number; of a step that was computed again, the last time."""
        return {(span.kind, span.number): span for span in self.step.spans if span.kind in MEETINGS}

    @property
    def begun(self) -> int:
        """When its step began."""
        return min((span.begun for span in self.step.all("step")), default=self.step.begun)

    @property
    def ended(self) -> int:
        """When its step was over."""
        return max((span.ended for span in self.step.all("step")), default=self.step.ended)

    def segment_before(self, at: int) -> Stretch | None:
        """What it did just before a moment."""
        return next((one for one in reversed(self.segments) if one.begun < at), None)

    def meeting_before(self, at: int) -> tuple[str, int] | None:
        """The last meeting that it had left at a moment."""
        known = [(span.ended, key) for key, span in self.meetings.items() if span.ended <= at]
        return max(known, default=(0, None))[1]


def _depth(span: PlacedSpan) -> tuple[int, bool]:
    """The smaller, the deeper a span lies; what holds others lies above one of its own length."""
    return span.took, span.kind in AROUND


def critical_path(step: Mapping[int, WorkerStep]) -> list[Stretch]:
    """The critical path of a step, from its beginning to its end.

    It is found from the end, on the worker that was ready last. Where a worker waits for others, the path goes on with
    the one that came last to the meeting which ended the wait.

    Args:
        step: what each worker did in it.
    """
    lanes = {worker: Lane(worker, each) for worker, each in step.items()}
    found = list(_backwards(lanes))
    joined = list[Stretch]()
    for each in reversed(found):
        last = joined[-1] if joined else None
        if last is not None and (last.worker, last.part) == (each.worker, each.part):
            joined[-1] = Stretch(each.worker, each.part, last.begun, each.ended)
        else:
            joined.append(each)
    return joined


def _backwards(lanes: Mapping[int, Lane]) -> Iterator[Stretch]:
    lane = max(lanes.values(), key=lambda each: each.ended)
    at = lane.ended
    while at > lane.begun and (segment := lane.segment_before(at)) is not None:
        if segment.part != "communication":
            yield Stretch(lane.worker, segment.part, segment.begun, at)
            at = segment.begun
            continue
        last, came = _waited_for(lanes, lane, segment, at)
        yield Stretch(lane.worker, "communication", came, at)
        lane, at = last, came


def _waited_for(lanes: Mapping[int, Lane], lane: Lane, segment: Stretch, at: int) -> tuple[Lane, int]:
    """For whom a worker waited at a moment, and when that one had come so far; itself if for nobody."""
    came = segment.begun
    while (key := lane.meeting_before(at)) is not None and lane.meetings[key].ended > segment.begun:
        there = [each for each in lanes.values() if key in each.meetings]
        lane = max(there, key=lambda each: each.meetings[key].begun)
        meeting = lane.meetings[key]
        came = at = min(meeting.begun, at - 1)
        before = lane.meeting_before(at)
        if not meeting.ready or before is None or lane.meetings[before].ended <= meeting.ready:
            return lane, min(came, meeting.ready or came)  # it was not ready before
        segment = Stretch(lane.worker, "communication", lane.begun, at)  # its reducer had others to reduce first
    return lane, came


def shares(path: Sequence[Stretch]) -> dict[Part, float]:
    """What part of a path each kind of work takes; the largest first."""
    whole = sum(each.seconds for each in path) or 1.0
    found: dict[Part, float] = {}
    for each in path:
        found[each.part] = found.get(each.part, 0.0) + each.seconds / whole
    return dict(sorted(found.items(), key=lambda item: -item[1]))


# What the steps of a run say in words: what takes the time of the median one, and which worker is slow.


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
